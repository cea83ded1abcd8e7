"""Float16 models whose residual stream passes 65,504: halved by ``rescale_every``, they give what they would without that limit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from formulas import error
from halved_models import IDS, deep, enlarged, last_maps, of_its_scale, outputs, power_of
from public_models.published import PUBLISHED
from torch import Tensor, nn

from penstock.engine import Engine, SamplingParams
from penstock.layers import Sequences
from penstock.models import CausalLM, Config, gla, load, rwkv6, save
from penstock.models.checkpoints import FORMATS

pytestmark = pytest.mark.sampled(file=True)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_residual_stream_that_would_overflow_changes_nothing(name: str) -> None:
    """All factors are powers of two: nothing is rounded in another way but numbers below 2^-14."""
    power = power_of(name)
    plain, large = outputs(deep(name, 0)), enlarged(deep(name, 1), power)
    assert not enlarged(deep(name, 0), power)(IDS).logits.isfinite().all()
    for x, y in zip(of_its_scale(name, outputs(large), power), plain):
        assert (x != y).sum() <= x.numel() / 50
        assert not x.numel() or error(x, y) < 2e-4


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "own_mixer"])
def test_what_a_mixer_adds_may_be_too_large(name: str) -> None:
    """It is divided before it overflows. That of a user's mixer is divided afterwards.

    Of few layers: six of the delta rule enlarge one rounding to a third of the logits.
    """
    few = partial(deep, name, layers=3)
    rounding = error(few(every=0)(IDS).logits, few(every=0, dtype=torch.float64)(IDS).logits)
    model, seen = few(every=1, dtype=torch.float64), []
    last = [*last_maps(model).values()][-1]
    hook = last.register_forward_hook(lambda module, given, y: seen.append(y.abs().max().item()))
    model(IDS)
    hook.remove()
    for x in last.parameters():
        x.mul_(2.0 ** math.ceil(math.log2(70_000 / seen[0])))
    true = model(IDS).logits
    for x in outputs(model.half()):
        assert x.isfinite().all()
        assert x.shape != true.shape or error(x, true) < 0.01 + 1.5 * rounding


def gradients_of(model: CausalLM, scale: float = 1.0) -> dict[str, Tensor]:
    """Of a loss times a scale, as in training with float16."""
    ((model(IDS).logits.to(torch.promote_types(model.head.weight.dtype, torch.float32)) ** 2).mean() * scale).backward()
    return {name: x.grad for name, x in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_halving_changes_nothing_in_range(name: str, dtype: torch.dtype) -> None:
    """Outputs, states and gradients. Float32 and bfloat16 are not halved."""
    exact = gradients_of(deep(name, 0, torch.float64))
    scale = 100 / max(x.abs().max().item() for x in exact.values())
    results = []
    for every in (0, 1, 2, 4):
        model = deep(name, every, dtype)
        gradients = gradients_of(model, scale)
        with torch.no_grad():
            results.append((outputs(model), gradients))
    for found, gradients in results[1:]:
        for x, y in zip(found, results[0][0]):
            assert torch.equal(x, y) or (dtype == torch.float16 and error(x, y) < 2e-4)
        for one, x in gradients.items():
            if dtype == torch.float16:
                # a bias of all keys adds nearly the same to all scores of a query: the terms of its gradient cancel
                size = exact[one.replace("lnk.bias", "lnk.weight")].norm() * scale
                errors = [(given.double() - exact[one] * scale).norm() / size for given in (x, results[0][1][one])]
                assert errors[0] < 1.2 * errors[1] + 2e-3
            else:
                assert torch.equal(x, results[0][1][one])


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_gradients_of_large_activations(checkpointing: bool | str) -> None:
    """As exact as those of the same model with a small residual stream, also where the backward pass computes layers again."""
    errors = []
    for every, power in ((0, 0), (1, power_of("rwkv6"))):
        exact = gradients_of(enlarged(deep("rwkv6", every, torch.float64), power))
        scale = 100 / max(x.abs().max().item() for x in exact.values())
        model = enlarged(deep("rwkv6", every), power)
        model.gradient_checkpointing = checkpointing
        errors.append({name: error(x, exact[name] * scale) for name, x in gradients_of(model, scale).items()})
    for name, found in errors[1].items():
        assert found < 1.2 * errors[0][name] + 2e-3, name


class Adapted(nn.Module):
    """A linear map with a low-rank part, as adapters of PEFT are."""

    def __init__(self, base: nn.Module, bias: bool) -> None:
        super().__init__()
        out, inner = base.weight.shape
        self.base = base
        self.A, self.B = nn.Linear(inner, 2, bias=False), nn.Linear(2, out, bias=bias)
        for x in (*self.A.parameters(), *self.B.parameters()):
            nn.init.normal_(x, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.B(self.A(x))


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_modules_in_the_place_of_linear_maps(name: str, bias: bool) -> None:
    results = []
    for every in (0, 1):
        model = deep(name, every)
        torch.manual_seed(2)
        for place, one in last_maps(model).items():
            model.set_submodule(place, Adapted(one, bias).half())
        results.append(outputs(model))
    for x, y in zip(*results):
        assert torch.equal(x, y) or error(x, y) < 2e-4


@torch.no_grad()
def test_the_engine_and_saved_models(tmp_path: Path) -> None:
    """The engine generates what the model does. Files have the weights as they are, in every format."""
    model = enlarged(deep("rwkv6", 1), power_of("rwkv6"))
    for one in model.modules():
        if isinstance(one, nn.LayerNorm):
            one.eps = 1e-5
    model.config = replace(model.config, norm_eps=1e-5)
    wanted = model.generate(IDS[:1], 5, temperature=0)[0].tolist()
    (done,) = Engine(model).generate([IDS[0].tolist()], SamplingParams(max_tokens=5, temperature=0))
    assert done.tokens == wanted
    formats = [form for form in FORMATS if form.refuses(model.config) is None]
    assert len(formats) == 4
    for form in formats:
        path = tmp_path / (f"{form.title}.pth" if form.stored is None else form.title)
        save(model, path, form.name)
        again = load(path)
        assert again.config.rescale_every == (6 if form.stored is None else 1), form.title
        assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
        wide = load(path, dtype=torch.float32)
        assert wide(IDS).logits.isfinite().all()
        if form.stored is not None:
            assert torch.equal(wide.to(torch.float16)(IDS).logits, model(IDS).logits), "by the dtype of the weights alone"


@pytest.mark.parametrize("name", PUBLISHED)
def test_rwkv_5_and_6_are_halved_every_six_layers_as_by_the_authors(name: str, tmp_path: Path) -> None:
    """Others are where their configuration says so, which is saved in formats with a config.json."""
    config = load(PUBLISHED[name].write(tmp_path)).config
    assert config.rescale_every == (6 if "rwkv5" in name or "rwkv6" in name else 0)
    for form in (one for one in PUBLISHED[name].formats if one != "blinkdl"):
        for every in (0, 3, 6):
            model = CausalLM(replace(config, rescale_every=every))
            save(model, tmp_path / f"{form}{every}", form)
            assert load(tmp_path / f"{form}{every}").config == model.config


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own tracer reads it
@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["rwkv6", "linear"])
def test_compiled_models(name: str, whole: bool) -> None:
    """Layers one by one, and the whole model: gradients are as exact as those of the same model in eager mode."""
    torch._dynamo.reset()
    eager, compiled = (enlarged(deep(name, 2), power_of(name)) for _ in range(2))
    for one in [compiled] if whole else compiled.layers:
        one.compile(backend="aot_eager")
    exact = gradients_of(enlarged(deep(name, 2, torch.float64), power_of(name)))
    scale = 100 / max(x.abs().max().item() for x in exact.values())
    errors = []
    for model in (eager, compiled):
        found = gradients_of(model, scale)
        assert all(x.isfinite().all() for x in found.values())
        errors.append({one: error(x, exact[one] * scale) for one, x in found.items()})
    for one, found in errors[1].items():
        assert found < 1.2 * errors[0][one] + 2e-3, one


def test_where_the_residual_stream_is_divided() -> None:
    model = CausalLM(rwkv6(vocab_size=13, hidden_size=16, num_layers=13, head_size=8))
    assert [layer.halvings for layer in model.layers] == [0] * 6 + [1] * 6 + [2]
    assert [n for n, layer in enumerate(model.layers) if layer.halves] == [6, 12]
    assert not any(layer.halvings for layer in CausalLM(gla(vocab_size=13, hidden_size=16, num_layers=13)).layers)
    assert Config.from_dict(model.config.to_dict()) == model.config
    assert (Sequences.halves, Sequences.halvings) == (False, 0)
