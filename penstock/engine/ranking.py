"""A Triton kernel that keeps the top k and the nucleus of rows of weights, without sorting them.

Weights are whole numbers below 2**45, so their sums are exact and have no order. The rank of a token is the number of tokens with a larger
weight, and of those before it with an equal one. The sum of the weights of lower ranks grows with the rank, so the tokens that are kept are
those above a weight, and the first ones of that weight. It is found by a search of three bits a pass.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..gpu.launch import on_device_of

BITS = tl.constexpr(45)
BLOCK, WARPS = 2048, 16


@triton.jit
def _more(found, w, bound, COUNTED: tl.constexpr):
    """``found`` with 1 (COUNTED) or its weight added for each weight above the bound."""
    if COUNTED:
        return found + (w > bound).to(tl.int64)
    return found + tl.where(w > bound, w, 0)


@triton.jit
def _many(found, limit, COUNTED: tl.constexpr):
    """Whether tokens with these totals are too many: 1 or 0."""
    if COUNTED:
        return (tl.sum(found, 0) > limit).to(tl.int64)
    return (tl.sum(found, 0).to(tl.float64) >= limit).to(tl.int64)


@triton.jit
def _search(weights, V, limit, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest weight w such that the tokens above it are few enough, their number, and their sum.

    COUNTED: at most ``limit`` of them. Else their sum is below ``limit``. A pass cuts the range of w in eight parts and finds the totals
    above the last weight of the first seven; above that of the eighth, tokens are few enough. A pass sums over lanes at its end.
    """
    first = tl.zeros([], tl.int64)
    lane = tl.arange(0, BLOCK)
    for n in tl.range(0, BITS // 3):
        part = tl.full([], 1, tl.int64) << (BITS - 3 * (n + 1))
        a = tl.zeros([BLOCK], tl.int64)
        b, c, d, e, f, g = a, a, a, a, a, a
        following = tl.load(weights + lane, lane < V, other=-1)
        for begin in tl.range(0, V, BLOCK):
            w = following
            following = tl.load(weights + begin + BLOCK + lane, lane < V - begin - BLOCK, other=-1)
            bound = first + part - 1
            a = _more(a, w, bound, COUNTED)
            b = _more(b, w, bound + part, COUNTED)
            c = _more(c, w, bound + 2 * part, COUNTED)
            d = _more(d, w, bound + 3 * part, COUNTED)
            e = _more(e, w, bound + 4 * part, COUNTED)
            f = _more(f, w, bound + 5 * part, COUNTED)
            g = _more(g, w, bound + 6 * part, COUNTED)
        parts = _many(a, limit, COUNTED) + _many(b, limit, COUNTED) + _many(c, limit, COUNTED) + _many(d, limit, COUNTED)
        parts += _many(e, limit, COUNTED) + _many(f, limit, COUNTED) + _many(g, limit, COUNTED)
        first += parts * part
    number, total = _above(weights, V, first, BLOCK)
    return first, number, total


@triton.jit
def _above(weights, V, bound, BLOCK: tl.constexpr):
    """The number and the sum of weights above a bound."""
    lane = tl.arange(0, BLOCK)
    number, total = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for begin in tl.range(0, V, BLOCK):
        w = tl.load(weights + begin + lane, lane < V - begin, other=-1)
        number = _more(number, w, bound, True)
        total = _more(total, w, bound, False)
    return tl.sum(number, 0), tl.sum(total, 0)


@triton.jit
def penstock_keep_ranks(
    weights,  # [R,V] int64, written
    last_ranks, shares,  # [R] float64, ``s`` apart
    V, s,
    RANKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zero where the rank is above the last, and where the sum of lower ranks is at least its share of that of all ranks up to the last.

    RANKED: some last rank is below V - 1.
    """
    row = tl.program_id(0).to(tl.int64)
    weights += row * V
    last = tl.load(last_ranks + row * s).to(tl.int64)
    if RANKED:
        lowest, others, total = _search(weights, V, last, True, BLOCK)
        total += (last + 1 - others) * lowest
    else:
        lowest, others = tl.full([], -1, tl.int64), tl.zeros([], tl.int64)
        _, total = _above(weights, V, lowest, BLOCK)
    limit = tl.load(shares + row * s) * total.to(tl.float64)
    floor, _, before = _search(weights, V, limit, False, BLOCK)
    lane = tl.arange(0, BLOCK)
    equal, tied = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for begin in tl.range(0, V, BLOCK):
        w = tl.load(weights + begin + lane, lane < V - begin, other=-1)
        same, at_floor = (w == lowest).to(tl.int64), (w == floor).to(tl.int64)
        rank, lower = others + equal, before + tied * floor  # of the first of them
        equal += tl.sum(same, 0) if RANKED else 0
        tied += tl.sum(at_floor, 0)
        some, some_at_floor = rank <= last, tl.where(lower.to(tl.float64) < limit, 1, 0) > 0
        kept = ((w > lowest) | ((w == lowest) & some)) & ((w > floor) | ((w == floor) & some_at_floor))
        cut = some & (others + equal - 1 > last)
        cut |= some_at_floor & (tl.where((before + (tied - 1) * floor).to(tl.float64) < limit, 0, 1) > 0)
        if cut:  # some of them are kept
            ranks = rank + tl.cumsum(same, 0) - same
            sums = lower + (tl.cumsum(at_floor, 0) - at_floor) * floor
            kept &= ((w > lowest) | (ranks <= last)) & ((w > floor) | (sums.to(tl.float64) < limit))
        tl.store(weights + begin + lane, tl.where(kept, w, 0), lane < V - begin)


def keep_ranks(weights: Tensor, last_ranks: Tensor, shares: Tensor, ranked: bool, block: int = BLOCK) -> Tensor:
    """``weights`` [R,V], changed in place if contiguous. See the kernel; last_ranks and shares are columns of one table."""
    (R, V), weights = weights.shape, weights.contiguous()
    kernel = on_device_of(weights, penstock_keep_ranks)
    kernel[(R,)](weights, last_ranks, shares, V, shares.stride(0), RANKED=ranked, BLOCK=block, num_warps=WARPS)
    return weights
