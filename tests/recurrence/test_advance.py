"""advance of every implementation: cuts, other rows, skipped and empty rows; a refused call leaves the pool unchanged."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cases import NAMES, Case, draw
from pools import pool_of

import penstock as ps
from penstock.recurrence.variants import VARIANTS

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PIECES = Case("", B=1, T=150, H=2, K=20, V=36, state=False)
"""Two pieces of 64 tokens, then single tokens. K and V are not multiples of a vector register."""
POOLS = [(FLOAT32, "contiguous"), (FLOAT32, "gaps"), (FLOAT64, "heads first"), (BFLOAT16, "contiguous"), (FLOAT16, "gaps")]


def tokens_of(case, tensors, begin, end):
    """The arguments for a span of the tokens, by name."""
    constant = {"u"} if "T" in case.row.decay else {"u", "g"}
    return {name: x if x is None or name in constant else x[:, begin:end] for name, x in tensors.items() if name != "initial_state"}


def packed(case, *calls):
    """Arguments of several calls, one after another on the token axis, and their offsets."""
    ends = torch.tensor([0, *(one["q"].shape[1] for one in calls)]).cumsum(0)
    shared = {"u"} if "T" in case.row.decay else {"u", "g"}
    joined = {name: x if x is None or name in shared else torch.cat([one[name] for one in calls], 1) for name, x in calls[0].items()}
    return joined | {"cu_seqlens": ends}


def walk(case, impl, cuts, pool):
    """The output of one sequence in row 2 of a pool, cut at these tokens."""
    tensors, outputs = draw(case), []
    for begin, end in pairwise([0, *cuts, case.T]):
        arguments = packed(case, tokens_of(case, tensors, begin, end))
        outputs.append(ps.advance(case.variant, **arguments, state=pool, slots=torch.tensor([2]), impl=impl))
    return torch.cat(outputs, 1)


@pytest.mark.parametrize(("dtype", "layout"), POOLS, ids=str)
@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuts_at_multiples_of_64_change_no_bit(variant, impl, dtype, layout):
    """Of outputs and of the pool. The tokens behind the last multiple of 64 may be cut anywhere."""
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
    """Rows before and behind, an empty one, and one that is skipped."""
    case = replace(PIECES, variant=variant)
    wanted_pool, _ = pool_of(4, case, dtype, layout)
    wanted = walk(case, impl, [], wanted_pool)
    tensors, (pool, _) = draw(case), pool_of(4, case, dtype, layout)
    before = pool.clone()
    spans = [(0, 70), (0, 0), (0, case.T), (0, 3)]
    arguments = packed(case, *(tokens_of(case, tensors, *span) for span in spans))
    output = ps.advance(variant, **arguments, state=pool, slots=torch.tensor([0, 3, 2, -1]), impl=impl)
    assert torch.equal(output[:, 70 : 70 + case.T], wanted)
    assert torch.equal(pool[2], wanted_pool[2])
    assert torch.equal(pool[[1, 3]], before[[1, 3]])
    assert not torch.equal(pool[0], before[0])
    assert not output[:, -3:].any()
