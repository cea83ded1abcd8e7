"""Updates in place on a GPU: equal bits for all cuts and batches, and results within their budgets. Run with ``pytest -m gpu``."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from canonical import Sequences, check
from cases import Case
from torch import Tensor

import penstock as ps
from penstock.recurrence import chunkwise, rounded
from penstock.recurrence.operators import FAMILY, RECURRENCE
from penstock.recurrence.variants import VARIANTS
from penstock.tokens.shape import Shape
from penstock.verify.inputs import Inputs, inputs
from penstock.verify.oracle import budget, error, growth

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(600)]

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = (200, 0, 64, 131, 37, 1, 300, 65, 5)
RANDOM = [
    (BFLOAT16, FLOAT32, "contiguous", False, (4, 64, 64)),
    (BFLOAT16, BFLOAT16, "gaps", False, (2, 128, 64)),
    (FLOAT32, FLOAT32, "contiguous", False, (2, 64, 64)),
    (FLOAT16, FLOAT16, "heads first", True, (3, 100, 36)),
    (FLOAT32, FLOAT32, "contiguous", True, (2, 100, 36)),
    (BFLOAT16, FLOAT32, "contiguous", True, (2, 128, 64)),
]
"""Dtypes of inputs and pool, the pool's layout, whether the inputs have gaps, and H, K, V."""


@pytest.mark.parametrize(("dtype", "pool", "layout", "strided", "sizes"), RANDOM, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_calls_equal_each_sequence_alone(variant, dtype, pool, layout, strided, sizes):
    """Random cuts, rows, orders and slots, decode steps among them."""
    H, K, V = sizes
    case = Case(variant, B=1, T=sum(LENGTHS), H=H, K=K, V=V, dtype=dtype, others=FLOAT32, gate="mixture", strided=strided, state=False)
    check(Sequences(case, LENGTHS, pool, layout, "cuda"), "auto", range(4))


@pytest.mark.parametrize("kind", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("sizes", [(32, 64, 64), (16, 128, 128), (8, 100, 36), (4, 256, 512), (2, 520, 64)], ids=str)
@pytest.mark.parametrize("variant", ["simple_gla", "gla", "rwkv6"])
def test_decode_steps_of_many_rows_equal_steps_of_one(variant, sizes, kind):
    """The block of V follows the number of rows."""
    rows, (H, K, V) = 150, sizes
    x = inputs(variant, Shape(rows, 1, H, K, V), BFLOAT16, "cuda")
    before = torch.randn(rows, H, K, V, device="cuda").to(kind)

    def step(chosen: list[int]) -> tuple[Tensor, Tensor]:
        state, (q, k, v) = before.clone(), (t[chosen] for t in (x.q, x.k, x.v))
        g = x.g[chosen] if "T" in VARIANTS[variant].decay else x.g
        slots = torch.tensor(chosen, device="cuda")
        return ps.decode_step(variant, q, k, v, g, x.u, state=state, slots=slots), state[chosen]

    every = step(list(range(rows)))
    for chosen in ([7], [149, 3, 8], list(range(20, 32)), list(range(60, 20, -1))):
        for found, wanted in zip(step(chosen), every):
            assert torch.equal(found, wanted[chosen])


def test_packed_decode_rows_equal_decode_steps():
    x = inputs("rwkv6", Shape(40, 1, 32, 64, 64), BFLOAT16, "cuda")
    one = torch.randn(40, 32, 64, 64, device="cuda")
    other = one.clone()
    wanted = ps.decode_step("rwkv6", x.q, x.k, x.v, x.g, x.u, state=one)
    q, k, v, g = (t.transpose(0, 1) for t in (x.q, x.k, x.v, x.g))
    found = ps.advance("rwkv6", q, k, v, g, x.u, state=other, cu_seqlens=torch.arange(41, device="cuda"))
    assert torch.equal(found.transpose(0, 1), wanted)
    assert torch.equal(one, other)


def gated(x: Inputs, which: str) -> Inputs:
    """The same inputs with other decays."""
    if x.g is None or which == "drawn":
        return x
    random = torch.Generator("cuda").manual_seed(5)
    chance = torch.rand(x.g.shape, generator=random, device="cuda")
    channels = torch.rand(x.g.shape[-1], generator=random, device="cuda")
    g = {
        "spikes": torch.where(chance < 0.01, -2661.0, torch.where(chance < 0.02, -torch.inf, x.g)),
        "channels": torch.where(channels < 0.02, -100.0, x.g),
        "strong": torch.where(chance < 0.3, -9.0, x.g),
        "weak": torch.full_like(x.g, -3e-8),
    }[which]
    return replace(x, g=g.to(x.g.dtype))


def exact(x: Inputs, state: Tensor, formula) -> dict[str, Tensor]:
    """Output and states in float64."""
    tensors = [None if t is None else t.double() for t in (x.q, x.k, x.v, x.g, x.u)]
    scale = VARIANTS[x.variant].scale or x.shape.K**-0.5
    with torch.no_grad():
        output, states = formula(RECURRENCE.checked(x.variant, (*tensors, None, state.double()), (scale, False, True)))
    return {"output": output, "state": states}


@pytest.mark.parametrize("gate", ["drawn", "spikes", "channels", "strong", "weak"])
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [(BFLOAT16, (64, 64)), (BFLOAT16, (128, 128)), (FLOAT32, (64, 64)), (FLOAT16, (100, 36))],
    ids=str,
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_results_are_within_their_budgets(variant, dtype, sizes, gate):
    """Pieces and single tokens: the budget of ``test_accuracy.hold``. Slots out of order, one skipped."""
    x = gated(inputs(variant, Shape(4, 300, 2, *sizes), dtype, "cuda"), gate)
    pool = torch.randn(6, 2, *sizes, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    slots = torch.tensor([5, 0, -1, 2], device="cuda")
    before, live = pool[slots.clamp(min=0)], slots >= 0
    wanted = exact(x, before, chunkwise.forward)
    bits = FAMILY.named("triton_recurrent").operands(dtype, "advance")
    rounding: dict[str, float] = {}
    if bits is not None:
        tame = x if x.g is None else replace(x, g=x.g.clamp(min=-10.0))
        off, same = (exact(tame, before, formula) for formula in (partial(rounded.forward, bits=bits), chunkwise.forward))
        rounding = {name: error(off[name][live], same[name][live]) for name in off}
    output = ps.advance(variant, x.q, x.k, x.v, x.g, x.u, state=pool, slots=slots)
    found = {"output": output, "state": pool[slots.clamp(min=0)]}
    assert not output[2].any()
    for name, y in found.items():
        allowed = growth(300) * budget(dtype, y.dtype) + 2 * rounding.get(name, 0.0)
        assert error(y[live], wanted[name][live]) <= allowed, (name, error(y[live], wanted[name][live]), allowed)


@pytest.mark.parametrize("g", [-0.4, -2.0, -9.0, -12.0])
@pytest.mark.parametrize(("T", "sizes"), [(1, (64, 64)), (2, (128, 128)), (2, (100, 36))], ids=str)
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
def test_what_strong_decays_leave_is_exact(variant, T, sizes, g):
    """Each element of a state that only decays, relative to itself."""
    x = inputs(variant, Shape(4, T, 2, *sizes), FLOAT32, "cuda")
    decay = torch.full_like(x.g, g)
    pool = torch.randn(4, 2, *sizes, device="cuda")
    wanted = pool.double() * (T * decay.flatten()[0].double()).exp()
    ps.advance(variant, x.q, x.k, torch.zeros_like(x.v), decay, x.u, state=pool)
    assert ((pool.double() - wanted).abs() <= 2e-6 * wanted.abs()).all()


@pytest.mark.parametrize("variant", ["simple_gla", "gla", "rwkv6"])
def test_nan_in_a_decay_gives_nan_in_its_head(variant):
    """Compiled kernels must propagate NaN: by default, ``tl.maximum(NaN, x)`` is x."""
    x = inputs(variant, Shape(3, 3, 2, 64, 64), BFLOAT16, "cuda")
    sick = x.g.clone()
    sick[1, 0, 1] = torch.nan
    found = []
    for g in (x.g, sick):
        pool = torch.ones(3, 2, 64, 64, device="cuda")
        found.append((ps.advance(variant, x.q, x.k, x.v, g, x.u, state=pool, impl="triton_recurrent"), pool))
    (wanted, states), (output, pool) = found
    assert pool[1, 1].isnan().all()
    assert output[1, 2, 1].isnan().all()
    output[1, :, 1], pool[1, 1] = wanted[1, :, 1], states[1, 1]
    assert torch.equal(output, wanted)
    assert torch.equal(pool, states)


@pytest.mark.parametrize("pool", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_narrow_pools_are_rounded_behind_pieces_and_tokens(variant, pool):
    """As ``chunkwise`` in float64 rounds them; an element may round to a neighbour."""
    x = inputs(variant, Shape(3, 200, 2, 64, 64), FLOAT32, "cuda")
    one = torch.randn(3, 2, 64, 64, generator=torch.Generator("cuda").manual_seed(3), device="cuda").to(pool)
    other = one.clone()
    doubles = [None if t is None else t.double() for t in (x.q, x.k, x.v, x.g, x.u)]
    wanted = ps.advance(variant, *doubles, state=other, impl="chunkwise")
    found = ps.advance(variant, x.q, x.k, x.v, x.g, x.u, state=one)
    assert error(found, wanted) < torch.finfo(pool).eps
    assert error(one, other) <= torch.finfo(pool).eps
    assert (one != other).float().mean() < 0.02
