"""Hooks, wrappers and replaced forwards act on every module in every pass: whole, from a state, in place, with kernels of decode steps."""

from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, SIZES, model_of
from formulas import error
from sampling import every
from torch import Tensor, nn

from penstock import ShapeError
from penstock.engine import Engine, SamplingParams
from penstock.layers import Mixer, modes
from penstock.layers.chains import Choice, recorded
from penstock.layers.cpu import absent
from penstock.models import CausalLM
from penstock.models.backbone import Layer
from penstock.models.streaming import stream

IDS = torch.randint(SIZES["vocab_size"], (2, 6), generator=torch.Generator().manual_seed(5))
pytestmark = [pytest.mark.usefixtures("at_full_speed"), pytest.mark.sampled(file=True)]


def named(model: CausalLM) -> dict[str, nn.Module]:
    """Every module that computes something, of a layer of each kind and outside of layers."""
    last = f"layers.{len(model.layers) - 1}."
    kinds = (nn.ModuleList, nn.Sequential)
    names = [name for name, one in model.named_modules() if name and not isinstance(one, kinds)]
    return {name: model.get_submodule(name) for name in names if not name.startswith("layers.") or name.startswith(("layers.0.", last)) or
            name in ("layers.0", last[:-1])}  # fmt: skip


def moved(output: Any) -> Any:
    """An output with its tensor changed, as steering and ablation do."""
    first = output[0] if isinstance(output, tuple) else output
    first = first * 0.75 + torch.linspace(-0.5, 0.5, first.shape[-1], dtype=first.dtype)
    return (first, *output[1:]) if isinstance(output, tuple) else first


@torch.no_grad()
def passes(model: CausalLM) -> dict[str, Tensor]:
    """Logits of all tokens by every pass that there is."""
    T, found = IDS.shape[1], {"whole": model(IDS).logits}
    state, parts = None, []
    for piece in IDS.split([3, 1, 2], 1):
        logits, state = model(piece, state)
        parts.append(logits)
    found["state"] = torch.cat(parts, 1)
    pool = model.initial_state(2)
    found["in place"] = torch.cat([model.advance(piece, pool) for piece in IDS.split([3, 1, 2], 1)], 1)
    pool, slots = model.initial_state(4), torch.tensor([2, 0])
    found["slots"] = torch.cat([model.advance(IDS[:, t : t + 1], pool, slots=slots) for t in range(T)], 1)
    ends = torch.tensor([0, T, 2 * T])
    found["packed"] = model.advance(IDS.reshape(1, -1), model.initial_state(4), cu_seqlens=ends, slots=slots).view(2, T, -1)
    model.gradient_checkpointing = True
    with torch.enable_grad():
        found["training"] = model(IDS).logits.detach()
    model.gradient_checkpointing = False
    return found


@pytest.mark.parametrize("name", every(3, ARCHITECTURES))
def test_a_hook_on_any_module_acts_in_every_pass(name: str) -> None:
    model = model_of(name, torch.float64)
    plain = model(IDS).logits
    for place, module in named(model).items():
        calls: list[int] = []
        handle = module.register_forward_hook(lambda module, given, output, calls=calls: calls.append(1) or moved(output))
        found = passes(model)
        handle.remove()
        assert error(found["whole"], plain) > 1e-6, place
        for way, logits in found.items():
            assert error(logits, found["whole"]) < 1e-9, (place, way)
        assert len(calls) >= 1 + 3 + 3 + IDS.shape[1] + 1 + 1, place
    assert torch.equal(model(IDS).logits, plain)


class Wrapper(nn.Module):
    """What adapters and compilers put in the place of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any, **options: Any) -> Any:
        return moved(self.inner(*given, **options))


def wrapped(model: CausalLM, place: str) -> Callable[[], None]:
    parent, _, name = place.rpartition(".")
    module = model.get_submodule(place)
    setattr(model.get_submodule(parent), name, Wrapper(module))
    return lambda: setattr(model.get_submodule(parent), name, module)


def replaced(model: CausalLM, place: str) -> Callable[[], None]:
    module = model.get_submodule(place)
    whole = module.forward
    module.forward = lambda *given, **options: moved(whole(*given, **options))
    return lambda: delattr(module, "forward")


def replaced_in_class(model: CausalLM, place: str) -> Callable[[], None]:
    kind = type(model.get_submodule(place))
    whole, own = kind.forward, "forward" in vars(kind)
    kind.forward = lambda *given, **options: moved(whole(*given, **options))
    return lambda: setattr(kind, "forward", whole) if own else delattr(kind, "forward")


def compiled(model: CausalLM, place: str) -> Callable[[], None]:
    """As ``module.compile()`` does, with a compiler that is seen."""
    module = model.get_submodule(place)
    module._compiled_call_impl = lambda *given, **options: moved(module._call_impl(*given, **options))
    return lambda: setattr(module, "_compiled_call_impl", None)


def pre_hook(model: CausalLM, place: str) -> Callable[[], None]:
    module = model.get_submodule(place)
    if place == "embeddings":  # whose input are tokens
        return module.register_forward_hook(lambda module, given, output: moved(output)).remove
    return module.register_forward_pre_hook(lambda module, given: moved(given)).remove


def hook_of_all_modules(model: CausalLM, place: str) -> Callable[[], None]:
    chosen = model.get_submodule(place)
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, output: moved(output) if module is chosen else None)
    return hook.remove


CHANGES = [wrapped, replaced, replaced_in_class, compiled, pre_hook, hook_of_all_modules]


@pytest.mark.parametrize("change", every(2, CHANGES))
@pytest.mark.parametrize("name", ["rwkv5.2", "rwkv6", "rwkv7", "gla", "retnet", "linear", "mamba2_grouped", "hybrid"])
def test_any_change_of_a_module_acts_in_every_pass(name: str, change: Callable[..., Any]) -> None:
    model = model_of(name, torch.float64)
    plain = model(IDS).logits
    for place in named(model):
        undo = change(model, place)
        try:
            found = passes(model)
        finally:
            undo()
        assert error(found["whole"], plain) > 1e-6, place
        for way, logits in found.items():
            assert error(logits, found["whole"]) < 1e-9, (place, way)
    assert torch.equal(model(IDS).logits, plain)


@pytest.mark.parametrize("name", every(4, ["rwkv6", "rwkv5.2", "gla", "mamba2"]))
@pytest.mark.parametrize("form", ["shifted_norm", "native"])
def test_kernels_of_decode_steps_step_aside_for_one_module_alone(name: str, form: str, request: pytest.FixtureRequest) -> None:
    """A norm, mixer or layer with a hook runs as a module; the other layers keep their kernels."""
    for fixture in ("kernels_on_a_cpu", "no_native_kernels") if form != "native" else ():
        request.getfixturevalue(fixture)
    if form == "native" and absent("shifted_norm", torch.device("cpu")) is not None:
        pytest.skip("needs the native library")
    model = model_of(name)
    changed = {"": 2, "layers.0": 1, "layers.0.mixer": 1, "layers.0.channel": 1, "layers.0.mixer_norm": 1}
    for place in changed:
        if place.endswith("channel") and model.layers[0].channel is None:
            continue
        handle = model.get_submodule(place).register_forward_hook(lambda module, given, output: moved(output)) if place else None
        with torch.no_grad():
            wanted = model(IDS).logits
            pool = model.initial_state(2)
            with nullcontext() if form == "native" else modes.in_graph(), recorded(model) as choices:
                found = torch.cat([model.advance(IDS[:, t : t + 1], pool) for t in range(IDS.shape[1])], 1)
        if handle is not None:
            handle.remove()
        assert error(found, wanted) < 1e-4, place
        if name.startswith("rwkv"):
            least = {"": 4, "layers.0": 2}.get(place, 3) * IDS.shape[1]
            assert sum(isinstance(one, Choice) and (one.chain, one.form) == ("shifted_norm", form) for one in choices) == least, place


def test_a_subclass_with_its_own_mix_is_not_stepped_by_its_base() -> None:
    model = model_of("rwkv6", torch.float64)
    mixer = model.layers[0].mixer
    assert mixer.unstepped is None
    inner = type(mixer)

    class Halved(inner):  # type: ignore[misc, valid-type]
        """A time mix of half the size."""

        def mix(self, x: Tensor, state: Any, sequences: Any) -> Any:
            y, after = super().mix(x, state, sequences)
            return y / 2, after

    mixer.__class__ = Halved
    assert mixer.unstepped == "has a mix that its step does not belong to"
    found = passes(model)
    assert all(error(logits, found["whole"]) < 1e-9 for logits in found.values())
    mixer.__class__ = inner
    mixer.mix = MethodType(Halved.mix, mixer)
    assert mixer.unstepped == "has a mix that its step does not belong to"


def test_states_that_hooks_return() -> None:
    """In place, a hook sees the pool; another state that it returns is written to it, if it fits."""
    model = model_of("rwkv6", torch.float64)
    handle = model.layers[0].register_forward_hook(lambda module, given, output: (output[0], given[1]))
    pool = model.initial_state(2)
    model.advance(IDS, pool)
    assert pool[0].mixer.wkv.any(), "the pool itself is a state"
    handle.remove()
    for module in (model.layers[0], model.layers[0].mixer):
        wanted = model.initial_state(2)
        model.advance(IDS, wanted)

        def copies(module: nn.Module, given: Any, output: Any) -> Any:
            state = torch.utils._pytree.tree_map(lambda x: 2 * x if isinstance(x, Tensor) else x, output[1])
            return output[0], state

        handle = module.register_forward_hook(copies)
        pool = model.initial_state(2)
        model.advance(IDS, pool)
        assert torch.allclose(pool[0].mixer.wkv, 2 * wanted[0].mixer.wkv)
        handle.remove()
        handle = module.register_forward_hook(lambda module, given, output: (output[0], None))
        with pytest.raises(ShapeError, match="advance: the state that a hook or wrapper returns must be the pool"):
            model.advance(IDS, pool)
        handle.remove()


def test_a_layer_in_whose_place_is_another_module() -> None:
    """A block that is no ``Layer``, as ablations use, has no state."""

    class Skipped(nn.Module):
        def forward(self, x: Tensor, state: Any, sequences: Any) -> Any:
            return x, state

    model = model_of("gla", torch.float64)
    model.layers[1] = Skipped()
    found = passes(model)
    assert all(error(logits, found["whole"]) < 1e-9 for logits in found.values())


def test_classes_are_remembered_as_they_were_written() -> None:
    """Every mixer inherits ``forward``: one with its own would run as a module, without kernels that go across modules."""
    for name in ARCHITECTURES:
        for module in model_of(name).modules():
            if isinstance(module, Mixer):
                assert type(module).forward is Mixer.forward
                assert "step" not in vars(type(module)) or module.unstepped is None
            elif isinstance(module, Layer):
                assert type(module) is Layer


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not name.startswith("hybrid")])
@pytest.mark.parametrize("invariant", [False, True])
def test_hooks_act_in_an_engine(name: str, invariant: bool) -> None:
    model = model_of(name, torch.float64)
    prompts, params = [row.tolist() for row in IDS], SamplingParams(max_tokens=4, temperature=0)
    for place in ("layers.0", "layers.1.mixer", "norm"):
        handle = model.get_submodule(place).register_forward_hook(lambda module, given, output: moved(output))
        found = Engine(model, slots=2, batch_invariant=invariant).generate(prompts, params)
        assert [one.tokens for one in found] == model.generate(IDS, 4, temperature=0).tolist(), place
        handle.remove()


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not name.startswith("hybrid")])
def test_wrapped_modules_act_in_an_engine(name: str) -> None:
    model = model_of(name, torch.float64)
    prompts, params = [row.tolist() for row in IDS], SamplingParams(max_tokens=4, temperature=0)
    for place in ("embeddings", "layers.0", "head"):
        undo = wrapped(model, place)
        found = Engine(model, slots=2).generate(prompts, params)
        assert [one.tokens for one in found] == model.generate(IDS, 4, temperature=0).tolist(), place
        assert list(stream(model, prompts[0], 4, temperature=0)) == found[0].tokens, place
        undo()


class Rounded(nn.Module):
    """Embeddings of 8 bits, without parameters."""

    def __init__(self, inner: nn.Embedding) -> None:
        super().__init__()
        self.scale = inner.weight.abs().max().item() / 127
        self.register_buffer("weight", (inner.weight / self.scale).round().to(torch.int8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids].double() * self.scale


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_modules_without_parameters(name: str) -> None:
    model = model_of(name, torch.float64)
    for place, made in (("embeddings", Rounded), ("layers.0.mixer_norm", lambda _: nn.Identity()), ("norm", lambda _: nn.Identity())):
        parent, _, child = place.rpartition(".")
        setattr(model.get_submodule(parent), child, made(model.get_submodule(place)))
        found = passes(model)
        assert found["whole"].dtype == torch.float64
        for way, logits in found.items():
            assert error(logits, found["whole"]) < 1e-9, (place, way)
