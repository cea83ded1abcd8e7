"""advance of every implementation: cuts, other rows, skipped and empty rows; a refused call leaves the pool unchanged."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from canonical import Sequences, check, packed, part_of
from cases import NAMES, Case, draw
from pools import pool_of

import penstock as ps
from penstock.recurrence.variants import VARIANTS

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PIECES = Case("", B=1, T=150, H=2, K=20, V=36, state=False)
"""Two pieces of 64 tokens, then single tokens. K and V are not multiples of a vector register."""
POOLS = [(FLOAT32, "contiguous"), (FLOAT32, "gaps"), (FLOAT64, "heads first"), (BFLOAT16, "contiguous"), (FLOAT16, "gaps")]


def walk(case, impl, cuts, pool):
    """The output of one sequence in row 2 of a pool, cut at these tokens."""
    tensors, outputs = draw(case), []
    for begin, end in pairwise([0, *cuts, case.T]):
        arguments = packed(case, part_of(case, tensors, begin, end))
        outputs.append(ps.advance(case.variant, **arguments, state=pool, slots=torch.tensor([2]), impl=impl))
    return torch.cat(outputs, 1)


@pytest.mark.parametrize(("dtype", "layout"), POOLS, ids=str)
@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuts_at_multiples_of_64_change_no_bit(variant, impl, dtype, layout):
    """Of outputs and of the pool. The tokens after the last multiple of 64 may be cut anywhere."""
    case = replace(PIECES, variant=variant)
    wanted_pool, _ = pool_of(4, case, dtype, layout)
    wanted = walk(case, impl, [], wanted_pool)
    for cuts in ([64], [64, 128], [128, 129, 140]):
        pool, _ = pool_of(4, case, dtype, layout)
        assert torch.equal(walk(case, impl, cuts, pool), wanted), cuts
        assert torch.equal(pool, wanted_pool), cuts


@pytest.mark.parametrize(("dtype", "layout"), POOLS, ids=str)
@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_rows_change_no_bit(variant, impl, dtype, layout):
    """Rows before and after, an empty one, and one that is skipped."""
    case = replace(PIECES, variant=variant)
    wanted_pool, _ = pool_of(4, case, dtype, layout)
    wanted = walk(case, impl, [], wanted_pool)
    tensors, (pool, _) = draw(case), pool_of(4, case, dtype, layout)
    before = pool.clone()
    spans = [(0, 70), (0, 0), (0, case.T), (0, 3)]
    arguments = packed(case, *(part_of(case, tensors, *span) for span in spans))
    output = ps.advance(variant, **arguments, state=pool, slots=torch.tensor([0, 3, 2, -1]), impl=impl)
    assert torch.equal(output[:, 70 : 70 + case.T], wanted)
    assert torch.equal(pool[2], wanted_pool[2])
    assert torch.equal(pool[[1, 3]], before[[1, 3]])
    assert not torch.equal(pool[0], before[0])
    assert not output[:, -3:].any()


LENGTHS, SHORT = (131, 0, 64, 5, 70), (67, 0, 64, 3)
RANDOM = [
    (FLOAT32, FLOAT32, "contiguous", False),
    (FLOAT32, FLOAT16, "gaps", True),
    (BFLOAT16, BFLOAT16, "heads first", False),
    (FLOAT16, FLOAT32, "gaps", True),
    (FLOAT64, FLOAT64, "contiguous", False),
]
"""Dtypes of inputs and pool, the pool's layout, and whether the inputs have gaps."""


def random_calls(variant, dtype, pool, layout, strided, lengths):
    case = Case(variant, B=1, T=sum(lengths), H=2, K=5, V=7, dtype=dtype, strided=strided, gate="mixture", state=False)
    return Sequences(case, lengths, pool, layout)


TAKEN = [(impl, one) for impl in NAMES for one in RANDOM if impl != "cpu" or one[0] != FLOAT64]


@pytest.mark.parametrize(("impl", "options"), TAKEN, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_calls_equal_each_sequence_alone(variant, impl, options):
    """Random cuts, rows, orders and slots, decode steps among them. Rows of one length share torch's products if not packed."""
    check(random_calls(variant, *options, LENGTHS), impl, range(2), batches=impl not in ("chunkwise", "parallel"))


EVERY = [(name, one) for name in VARIANTS for one in (*RANDOM[:2], RANDOM[3]) if (name, one) != ("rwkv6", RANDOM[1])]
INTERPRETED = [("rwkv6", RANDOM[1]), *(pytest.param(*one, marks=pytest.mark.slow) for one in EVERY)]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize(("variant", "options"), INTERPRETED, ids=str)
def test_random_calls_of_triton_equal_each_sequence_alone(variant, options):
    check(random_calls(variant, *options, SHORT), "triton_recurrent", range(1))


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize(
    ("lengths", "slots"),
    [((5, 1), (-1, -7)), ((), ()), ((0, 0), (3, 1)), ((0, 0), None), ((0, 2), (1, -1))],
    ids=["all skipped", "no rows", "empty rows", "empty rows without slots", "one empty, one skipped"],
)
def test_rows_without_tokens_leave_the_pool_unchanged(lengths, slots, impl, dtype):
    """Also not by rounding a float64 pool to float32."""
    case = Case("gla", lengths=lengths, state=False)
    pool, _ = pool_of(4 if slots is not None else len(lengths), case, dtype)
    before = pool.clone()
    slots = None if slots is None else torch.tensor(slots, dtype=torch.int64)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    arguments = part_of(case, draw(case), 0, sum(lengths)) | {"cu_seqlens": ends}
    output = ps.advance("gla", **arguments, state=pool, slots=slots, impl=impl)
    assert output.shape == (1, sum(lengths), case.H, case.V)
    assert not output.any()
    assert torch.equal(pool, before)


N, ROWS = 2, 4
STEP = Case("rwkv6", B=N, T=3, H=2, K=4, V=4, state=False)


REFUSED = {
    "equal slots": (lambda pool: {"slots": torch.tensor([2, 2])}, "different for every sequence"),
    "slots beyond the pool": (lambda pool: {"slots": torch.tensor([0, ROWS])}, f"below the {ROWS} rows"),
    "slots far beyond the pool": (lambda pool: {"slots": torch.tensor([0, 2**62])}, f"below the {ROWS} rows"),
    "gradients": (lambda pool: {"q": draw(STEP)["q"].requires_grad_()}, "free of gradients"),
    "a positive decay": (lambda pool: {"g": draw(STEP)["g"].abs()}, "nowhere above 0"),
    "offsets that do not fit": (lambda pool: {"cu_seqlens": torch.tensor([0, 1, 2])}, "B must be 1 with cu_seqlens"),
    "another dtype": (lambda pool: {"v": draw(STEP)["v"].double()}, "v must be float32"),
    "another number of slots": (lambda pool: {"slots": torch.tensor([0])}, "slots must be of shape"),
    "a wrong scale": (lambda pool: {"scale": torch.inf}, "scale must be finite"),
    "an unknown implementation": (lambda pool: {"impl": "fast"}, "impl must be one of"),
}


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_call_leaves_the_pool_unchanged(reason, impl, dtype):
    """The first call, and one that is equal to a valid one in all but values."""
    changed, said = REFUSED[reason]
    pool, _ = pool_of(ROWS, STEP, dtype)
    arguments = part_of(STEP, draw(STEP), 0, STEP.T) | {"slots": torch.tensor([3, 0]), "state": pool, "impl": impl}
    for _ in range(2):
        before = pool.clone()
        with pytest.raises(ps.InvalidArgument, match=said):
            ps.advance("rwkv6", **arguments | changed(pool))
        assert torch.equal(pool, before)
        ps.advance("rwkv6", **arguments)


@pytest.mark.parametrize("impl", NAMES)
def test_inputs_beside_the_pool_in_one_memory(impl):
    """Views of one buffer that do not overlap are taken."""
    case = Case("linear_attention", B=1, T=2, H=2, K=4, V=4, state=False)
    tensors, (pool, _) = draw(case), pool_of(1, case, FLOAT32)
    buffer = torch.cat([tensors["q"].flatten(), pool.flatten()])
    q, state = buffer[: tensors["q"].numel()].view_as(tensors["q"]), buffer[tensors["q"].numel() :].view_as(pool)
    wanted = ps.advance("linear_attention", tensors["q"], tensors["k"], tensors["v"], state=pool, impl=impl)
    assert torch.equal(ps.advance("linear_attention", q, tensors["k"], tensors["v"], state=state, impl=impl), wanted)
    assert torch.equal(state, pool)


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("name", list("qkvgu"))
def test_inputs_inside_the_pool_are_refused(name, impl):
    pool = -pool_of(ROWS, STEP, FLOAT32)[0].abs()
    before, tensors = pool.clone(), part_of(STEP, draw(STEP), 0, STEP.T)
    for at in (0, 1, pool.numel() - tensors[name].numel()):
        inside = pool.as_strided(tensors[name].shape, tensors[name].stride(), at)
        with pytest.raises(ps.RangeError, match=f"state must be in memory of its own, .* got memory of {name}"):
            ps.advance("rwkv6", **tensors | {name: inside}, state=pool, slots=torch.tensor([3, 0]), impl=impl)
        assert torch.equal(pool, before)
