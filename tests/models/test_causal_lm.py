"""Models of every architecture against their formulas in float64; cut, packed and pooled sequences."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, SIZES, flat, model_of
from formulas import error, literal_logits
from sampling import every
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from penstock.layers.arguments import mapped
from penstock.layers.norms import GroupedRMSNorm, RMSNorm
from penstock.models import CausalLM

pytestmark = pytest.mark.sampled(file=True)

BATCH, LENGTH = 2, 40
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-10}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_the_formulas(name: str, dtype: torch.dtype, ids: Tensor) -> None:
    model = model_of(name, dtype)
    true = torch.stack([literal_logits(model.config, model.state_dict(), one) for one in ids])
    assert true.std() > 0.3
    assert error(model(ids).logits, true) < BOUNDS[dtype]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_gradients_equal_those_of_the_formulas(name: str, ids: Tensor) -> None:
    model, ids = model_of(name, torch.float64), ids[:, :7]
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    weights = {key: x.detach().clone().requires_grad_() for key, x in model.state_dict(keep_vars=True).items()}
    if model.config.tie_embeddings:
        weights["head.weight"] = weights["embeddings.weight"]
    logits = torch.stack([literal_logits(model.config, weights, one) for one in ids[:, :-1]])
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().max() > 0, key
        assert error(parameter.grad, weights[key].grad) < 1e-8, key


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_second_derivatives_and_transforms_of_the_loss(name: str, ids: Tensor) -> None:
    """The Hessian times a vector, by two backward passes and by ``torch.func``, equals that of the formulas."""
    model, ids = model_of(name, torch.float64), ids[:, :5]
    weights = dict(model.named_parameters())
    direction = {key: torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape) for key, x in weights.items()}

    def literal(weights: dict[str, Tensor]) -> Tensor:
        if model.config.tie_embeddings:
            weights = {**weights, "head.weight": weights["embeddings.weight"]}
        logits = torch.stack([literal_logits(model.config, weights, one) for one in ids[:, :-1]])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def twice(loss: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        along = sum((x * y).sum() for x, y in zip(first, direction.values()))
        return [*first, *torch.autograd.grad(along, list(weights.values()))]

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> Tensor:
            return self.model.loss(ids[:, :-1], ids[:, 1:])

    def gradient(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return torch.func.grad(lambda given: torch.func.functional_call(Loss(), {f"model.{key}": x for key, x in given.items()}))(weights)

    wanted = twice(literal(weights))
    first, second = torch.func.jvp(gradient, (weights,), (direction,))
    for found in (twice(model.loss(ids[:, :-1], ids[:, 1:])), [*first.values(), *second.values()]):
        for n, (x, y) in enumerate(zip(found, wanted)):
            assert error(x, y) < 1e-8, [*weights, *weights][n]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cut_sequences_equal_whole_ones(name: str, ids: Tensor) -> None:
    model = model_of(name)
    whole, end = model(ids)
    for cuts in ([1], [LENGTH - 1], [7, 8, 8, 30]):
        parts, state = [], None
        for piece in torch.tensor_split(ids, cuts, dim=1):
            before = [x.clone() for x in flat(state)]
            logits, after = model(piece, state)
            assert all(torch.equal(x, y) for x, y in zip(flat(state), before)), "the given state is not changed"
            parts.append(logits)
            state = after
        assert error(torch.cat(parts, 1), whole) < 1e-5
        assert all(error(x, y) < 1e-5 for x, y in zip(flat(state), flat(end)) if x.numel())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_prompts_and_decode_steps_in_one_call(name: str, ids: Tensor) -> None:
    """Rows of a pool: prompts in pieces beside decode steps, with and without ``last_only``."""
    model, wanted = model_of(name), model_of(name)(ids).logits
    pool = model.initial_state(4)
    places = [x.data_ptr() for x in flat(pool)]
    done, slots = [0, 0], torch.tensor([2, -1, 0])
    for first, second in ((9, 1), (1, 20), (0, 5), (1, 1), (LENGTH - 11, LENGTH - 27)):
        pieces = [ids[0, done[0] : done[0] + first], ids[0, :3], ids[1, done[1] : done[1] + second]]
        cu_seqlens = torch.tensor([0, *(len(piece) for piece in pieces)]).cumsum(0)
        call = {"cu_seqlens": cu_seqlens, "slots": slots}
        last = model.advance(torch.cat(pieces)[None], [*map(copied, pool)], **call, last_only=True)
        logits = model.advance(torch.cat(pieces)[None], pool, **call)
        done[0], done[1] = done[0] + first, done[1] + second
        assert torch.allclose(logits[0, :first], wanted[0, done[0] - first : done[0]], atol=1e-4)
        assert torch.allclose(logits[0, first + 3 :], wanted[1, done[1] - second : done[1]], atol=1e-4)
        assert last.shape == (3, SIZES["vocab_size"])
        for row, n in ((0, 0), (2, 1)):
            assert (first, 3, second)[row] == 0 or torch.allclose(last[row], wanted[n, done[n] - 1], atol=1e-4)
    assert done == [LENGTH, LENGTH]
    assert places == [x.data_ptr() for x in flat(pool)], "the pool is updated in place"
    for x, initial in zip(flat(pool), flat(model.initial_state(4))):
        assert torch.equal(x[[1, 3]], initial[[1, 3]])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_calls_without_tokens(name: str, ids: Tensor) -> None:
    model, none = model_of(name), ids[:, :0]
    pool = model.initial_state(2)
    model.advance(ids[:, :5], pool)
    before = [x.clone() for x in flat(pool)]
    packed = {"cu_seqlens": torch.tensor([0, 0, 0])}
    for given, call in ((none, {}), (none[:1], packed), (none[:1], {**packed, "slots": torch.tensor([1, -1])})):
        assert model.advance(given, pool, **call, last_only=True).shape == (2, SIZES["vocab_size"])
        assert model.advance(given, pool, **call).shape == (*given.shape, SIZES["vocab_size"])
    assert all(torch.equal(x, y) for x, y in zip(flat(pool), before))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_nan_in_one_row_of_a_pool_stays_there(name: str, ids: Tensor) -> None:
    """Bits of the other rows do not change, and the call is not refused after it has written a part of the pool."""
    model, cu_seqlens, slots = model_of(name), torch.tensor([0, 3, 6, 8]), torch.tensor([3, 1, 0])
    pools = [model.initial_state(4) for _ in range(2)]
    for x in flat(pools[1][0]):
        x[1] = torch.nan if x.is_floating_point() else x[1]
    wanted, found = (model.advance(ids[:1, :8], pool, cu_seqlens=cu_seqlens, slots=slots) for pool in pools)
    assert torch.equal(found[0, [0, 1, 2, 6, 7]], wanted[0, [0, 1, 2, 6, 7]])
    assert all(torch.equal(x[[0, 2, 3]], y[[0, 2, 3]]) for x, y in zip(*map(flat, pools)))


def nan_first(x: Tensor) -> Tensor:
    return torch.cat([x[:1] * torch.nan, x[1:]]) if x.is_floating_point() else x


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_nan_in_one_sequence_stays_there(name: str, ids: Tensor) -> None:
    """In training too, on every device alike: decays that the layers compute are not refused."""
    model, state = model_of(name), model_of(name)(ids[:, :3]).state
    wanted = model(ids[:, 3:], state).logits
    broken = [layer._replace(mixer=mapped(layer.mixer, nan_first)) for layer in state]
    logits = model(ids[:, 3:], broken).logits
    assert logits[0].isnan().all()
    assert error(logits[1], wanted[1]) < 1e-6
    logits.sum().backward()
    assert all(x.grad.isnan().any() for key, x in model.named_parameters() if "mixer_norm" in key)


@pytest.mark.parametrize("name", ["rwkv6", "gla_grouped", "mamba2"])
def test_models_on_the_meta_device_advance(name: str, ids: Tensor) -> None:
    model = CausalLM(ARCHITECTURES[name]).to("meta")
    assert model.advance(ids.to("meta"), model.initial_state(BATCH)).shape == (*ids.shape, SIZES["vocab_size"])


class Adapter(nn.Module):
    """Beside a linear map, as those of LoRA; ``weight`` is that of the map."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features, bias=False, dtype=base.weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.more(x)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_adapters_of_linear_maps_run(name: str, ids: Tensor) -> None:
    """A model whose linear maps are replaced by others is the model with the sums of their weights."""
    model, merged = model_of(name, torch.float64), model_of(name, torch.float64)
    if model.config.tie_embeddings:
        merged.head = copy.deepcopy(merged.head)  # embeddings have no adapter
    for key, part in list(model.named_modules()):
        if isinstance(part, nn.Linear):
            parent, _, last = key.rpartition(".")
            adapter = Adapter(part)
            setattr(model.get_submodule(parent), last, adapter)
            with torch.no_grad():
                merged.get_submodule(key).weight += adapter.more.weight
    labels = ids.roll(-1, 1)
    for reduction in ("mean", "none"):
        found, wanted = (one.loss(ids, labels, reduction=reduction) for one in (model, merged))
        assert error(found, wanted) < 1e-10
    model.loss(ids, labels).backward()
    assert all(part.more.weight.grad.any() for part in model.modules() if isinstance(part, Adapter))
    assert error(model.advance(ids, model.initial_state(BATCH)), merged(ids).logits) < 1e-10


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hooks_of_linear_maps_run(name: str, ids: Tensor) -> None:
    """Those of ``register_forward_hook``, and of libraries that replace ``forward``."""
    model, ran = model_of(name, torch.float64), Counter()
    maps = {key: part for key, part in model.named_modules() if isinstance(part, nn.Linear)}
    for n, (key, part) in enumerate(maps.items()):
        if n % 2:
            part.forward = lambda x, forward=part.forward, key=key: ran.update([key]) or forward(x)
        else:
            part.register_forward_hook(lambda module, given, result, key=key: ran.update([key]))
    model.loss(ids, ids.roll(-1, 1)).backward()
    assert set(ran) == set(maps)
    with torch.no_grad():
        model.advance(ids, model.initial_state(BATCH))
    assert set(ran.values()) == {2}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hooks_of_norms_run(name: str, ids: Tensor) -> None:
    """They change results as twice the weights do."""
    model, other, ran = model_of(name, torch.float64), model_of(name, torch.float64), Counter()
    kinds = nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, GroupedRMSNorm
    norms = {key: part for key, part in model.named_modules() if isinstance(part, kinds) and part.weight is not None}
    for key, part in norms.items():
        part.register_forward_hook(lambda module, given, result, key=key: ran.update([key]) or 2 * result)
        for parameter in other.get_submodule(key).parameters():
            parameter.data *= 2
    found, wanted = (torch.autograd.grad(one.loss(ids, ids.roll(-1, 1)), list(one.parameters())) for one in (model, other))
    own = {id(parameter) for key in norms for parameter in model.get_submodule(key).parameters()}
    for x, y, parameter in zip(found, wanted, model.parameters()):
        assert error(x, 2 * y if id(parameter) in own else y) < 1e-10
    assert error(model.advance(ids, model.initial_state(BATCH)), other.advance(ids, other.initial_state(BATCH))) < 1e-10
    assert ran == dict.fromkeys(norms, 2)


@pytest.mark.parametrize("name", ["rwkv6", "gla", "mamba2"])
def test_hooks_of_all_modules_run(name: str, ids: Tensor) -> None:
    """They may change results, also where the backward pass computes again."""
    model, ran, found = model_of(name, torch.float64), set(), []

    def changed(module: nn.Module, given: object, result: Tensor) -> Tensor | None:
        ran.add(module)
        return result * 1.3 if isinstance(module, nn.Linear | nn.LayerNorm | nn.RMSNorm) else None

    hook = nn.modules.module.register_module_forward_hook(changed)  # type: ignore[arg-type]
    try:
        for checkpointing in (False, "selective"):
            model.gradient_checkpointing = checkpointing
            found.append(torch.autograd.grad(model(ids).logits.square().sum(), list(model.parameters())))
    finally:
        hook.remove()
    assert {part for part in model.modules() if isinstance(part, nn.Linear)} <= ran
    assert all(torch.equal(x, y) for x, y in zip(*found))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_of_fake_tensors(name: str) -> None:
    """As tools have them that estimate memory."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model, ids = CausalLM(ARCHITECTURES[name]), torch.zeros(2, 9, dtype=torch.int64)
        model.loss(ids, ids).backward()
        assert model.advance(ids, model.initial_state(2)).shape == (2, 9, SIZES["vocab_size"])


def copied(state):
    return type(state)(*(x.clone() if isinstance(x, Tensor) else copied(x) for x in state))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_training_equals_separate_sequences(name: str, ids: Tensor) -> None:
    model, cu_seqlens = model_of(name, torch.float64), torch.tensor([0, 4, 4, 5, LENGTH], dtype=torch.int32)
    labels = ids[1:].clone()
    labels[0, ::5] = -100
    packed = model.loss(ids[:1], labels, cu_seqlens, reduction="sum")
    spans = list(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist()))
    alone = [model.loss(ids[:1, a:b], labels[:, a:b], reduction="sum") for a, b in spans]
    assert torch.allclose(packed, torch.stack(alone).sum())
    gradients = torch.autograd.grad(packed, list(model.parameters()))
    for x, y in zip(gradients, torch.autograd.grad(torch.stack(alone).sum(), list(model.parameters()))):
        assert error(x, y) < 1e-8


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradient_checkpointing_changes_no_bits(name: str, ids: Tensor) -> None:
    model, results = model_of(name), []
    for checkpointing in (False, True, "selective"):
        model.gradient_checkpointing = checkpointing
        _, state = model(ids[:, :9])
        model.zero_grad()
        loss = model.loss(ids[:, 9:-1], ids[:, 10:], state=state)  # also through the state
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(x, y) for found in results[1:] for x, y in zip(results[0], found))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_selective_checkpoints_of_torch(name: str, ids: Tensor) -> None:
    """Layers run in a mode, which saves the results of products."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    found = []
    for checkpointing in (False, True):
        model = model_of(name)
        for layer in model.layers if checkpointing else ():
            contexts = partial(create_selective_checkpoint_contexts, policy)
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(error(x, y) < 1e-4 for x, y in zip(*found))


@pytest.mark.parametrize("name", ["rwkv6", "gla", "mamba2"])
def test_gradient_checkpointing_takes_the_parameters_of_the_forward_pass(name: str, ids: Tensor) -> None:
    """Behind ``functional_call`` the model has its own again."""
    model, found = model_of(name), []
    parameters = {key: (x.detach() * 1.3 + 0.1).requires_grad_() for key, x in model.named_parameters()}
    for checkpointing in (False, True, "selective"):
        model.gradient_checkpointing = checkpointing
        loss = torch.func.functional_call(model, parameters, (ids,))[0].square().sum()
        found.append(torch.autograd.grad(loss, list(parameters.values())))
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own tracer reads it
@pytest.mark.parametrize("name", ["rwkv6", "mamba2"])
def test_compiled_layers_have_equal_gradients(name: str, ids: Tensor) -> None:
    torch._dynamo.reset()
    eager, compiled = model_of(name), model_of(name)
    for layer in compiled.layers:
        layer.compile(backend="aot_eager")
    for model in (eager, compiled):
        model.loss(ids[:, :8], ids[:, 1:9]).backward()
    assert all(error(x.grad, y.grad) < 1e-5 for x, y in zip(compiled.parameters(), eager.parameters()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", every(5, list(ARCHITECTURES)))
def test_a_loss_is_compiled_once_for_all_lengths(name: str) -> None:
    """With its gradients, and with any number of chunks. In float64: gradients of some biases cancel, as that of a norm of keys."""
    torch._dynamo.reset()
    model = model_of(name).double()

    def loss(ids: Tensor) -> Tensor:
        return model.loss(ids, ids, chunk_tokens=16)

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 8, 30, 70):
            given = torch.arange(BATCH * tokens).view(BATCH, tokens) * 5 % SIZES["vocab_size"]
            found, wanted = compiled(given), loss(given)
            assert error(found, wanted) < 1e-12
            for x, y in zip(*(torch.autograd.grad(one, list(model.parameters())) for one in (found, wanted))):
                assert error(x, y) < 1e-9


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", every(5, [name for name in ARCHITECTURES if name != "own_mixer"]))
@torch.no_grad()
def test_a_model_is_exported_for_any_number_of_tokens(name: str, ids: Tensor) -> None:
    """Without tracing Python's bytecode, which is torch's default."""
    model = model_of(name)
    model.forward = lambda ids: (CausalLM.forward(model, ids).logits,)  # type: ignore[method-assign]
    program = torch.export.export(model, (ids,), dynamic_shapes=({1: torch.export.Dim("T", min=2, max=4096)},)).module()
    for tokens in (2, 5, 70):
        given = torch.arange(BATCH * tokens).view(BATCH, tokens) * 5 % SIZES["vocab_size"]
        assert error(program(given)[0], model(given)[0]) < 1e-5


@pytest.mark.parametrize("name", ["rwkv7a", "hybrid"])
def test_a_compiled_model_with_checkpointing(name: str, ids: Tensor) -> None:
    """In one graph: layers inside ``checkpoint`` write to nothing that they share."""
    torch._dynamo.reset()
    model, found = model_of(name, torch.float64, num_layers=1 if name == "rwkv7a" else 2), []
    model.gradient_checkpointing = True
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        found.append(torch.autograd.grad(call(ids[:, :8]).logits.square().sum(), list(model.parameters())))
    assert all(error(x, y) < 1e-10 for x, y in zip(*found))


def test_causality_and_independence(ids: Tensor) -> None:
    for name in ARCHITECTURES:
        model, other = model_of(name), ids.clone()
        other[:, 30:] = (other[:, 30:] + 1) % SIZES["vocab_size"]
        assert torch.equal(model(ids).logits[:, :30], model(other).logits[:, :30])
        assert error(torch.cat([model(one[None]).logits for one in ids]), model(ids).logits) < 1e-6


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bfloat16(name: str, ids: Tensor) -> None:
    half = model_of(name, torch.bfloat16)
    logits, _ = half(ids)
    assert logits.dtype == torch.bfloat16
    assert error(logits, model_of(name)(ids).logits) < 0.1
    pool = half.initial_state(BATCH)
    assert half.advance(ids, pool).dtype == torch.bfloat16


@pytest.mark.parametrize("name", [name for name, config in ARCHITECTURES.items() if not config.residual_in_float32])
def test_norms_kept_in_float32(name: str) -> None:
    """Of models of 16 bits: logits, prompts in pieces, and gradients in the dtypes of parameters. A float32 stream has the norms' dtype."""
    model, ids = model_of(name, torch.bfloat16), torch.randint(13, (2, 7), generator=torch.Generator().manual_seed(1))
    wanted = model(ids).logits
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm, RMSNorm)):
            module.float()
    logits = model(ids).logits
    assert logits.dtype == torch.bfloat16
    assert error(logits, wanted) < 0.05
    logits.float().square().mean().backward()
    assert all(x.grad is None or x.grad.dtype == x.dtype for x in model.parameters())
    pool = model.initial_state(2, max_length=9)
    with torch.no_grad():
        parts = [model.advance(part, pool) for part in ids.split((3, 4), 1)]
    assert error(torch.cat(parts, 1), logits.detach()) < 0.05
