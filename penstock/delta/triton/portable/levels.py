"""Device functions that the chunk kernels share: sums of decays, factors of levels, and masks of pairs.

A chunk of C tokens is cut into levels, see ``gpu/dyadic.py``: every pair of tokens s < t is in different halves of the block of exactly one
level. Its decay is the product of the factors of both tokens. Every factor is the exponential of one sum and at most 1, so every decay is
exact. ``matrices`` are those of ``dyadic.levels`` with and without the token's own decay.

Bounded decays may have an anchor instead of the levels inside blocks of LOW tokens: the factors are exp(G_t) and exp(-G_s), G the sums
from the beginning of the block. Decays are in log2 units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import FLOOR
from ....gpu.levels import apart, selected_by_parts
from ....gpu.tiles import LOG2E, chunk_of_slot, uniform

COARSE = tl.constexpr(786432.0)  # 1.5 * 2^19: adding and subtracting it rounds to multiples of 2^-4
LEAST = tl.constexpr(2.0**-100)  # stands for a beta of 0
INCLUSIVE, EXCLUSIVE, LATER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # u <= t, u < t, u > t: triangles of ``levels``


@triton.jit
def ordered(i, ORDER: tl.constexpr):
    """Which tokens u (columns) have this order relative to tokens t (rows): [C,C]."""
    if ORDER == INCLUSIVE:
        chosen = i[None, :] <= i[:, None]
    else:
        chosen = i[None, :] < i[:, None]
    return chosen


@triton.jit
def within(i, L):
    """Whether tokens i (rows) and i (columns) are in the same block of L tokens: [C,C]."""
    return (i & -L)[:, None] == (i & -L)[None, :]


@triton.jit
def pairs_of_level(i, level, C: tl.constexpr, LEVELS: tl.constexpr, ANCHOR: tl.constexpr):
    """The pairs of tokens t (rows) and s < t (columns) of a level or, at level LEVELS, of the anchor: [C,C]."""
    mask = apart(i, C // 2 >> level)
    if ANCHOR:
        mask = (uniform(level < LEVELS) & mask) | (uniform(level == LEVELS) & within(i, C >> LEVELS) & ordered(i, EXCLUSIVE))
    return mask


@triton.jit
def halves_of_level(i, live, level, C: tl.constexpr, LEVELS: tl.constexpr, ANCHOR: tl.constexpr):
    """Which tokens are rows, and which are columns, of the pairs of a level.

    Tiles that are loaded for each level take no registers between levels. Masks that depend on the level keep the loads in the loop.
    """
    second = (i & (C // 2 >> level)) != 0
    later = live & second
    earlier = live & ~second
    if ANCHOR:
        anchored = live & uniform(level == LEVELS)
        later |= anchored
        earlier |= anchored
    return later, earlier


@triton.jit
def factors_of_level(d, inclusive, i, level, C: tl.constexpr, LEVELS: tl.constexpr, ANCHOR: tl.constexpr, PRECISION: tl.constexpr):
    """The factors of q and of b (and k) at a level [C,BK], from the decays d of the chunk."""
    G = selected_by_parts(d, inclusive, level, i, C, PRECISION)
    query = tl.exp2(G)
    key = query
    if ANCHOR:
        key = tl.exp2(tl.where(level == LEVELS, -G, G))
    return query, key


@triton.jit
def factor_of_removals(query, d, exclusive, i, level, C: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr):
    """The factor of a at a level [C,BK]: that of q if the removal reads the state after the decay."""
    if not AFTER:
        query = tl.exp2(selected_by_parts(d, exclusive, level, i, C, PRECISION))
    return query


@triton.jit
def scalar_factors(g, i, live, g_t, SCALAR: tl.constexpr):
    """Of one decay per token: the decays between tokens s <= t [C,C], 0 for s > t; up to each token and after it [C]; of the chunk.

    Sums have two parts, multiples of 2^-4, whose sums are exact, and small rests. Differences of both are accurate for every decay. Without
    decays all are 1.
    """
    lower = ordered(i, INCLUSIVE)
    if SCALAR:
        d = tl.maximum(tl.load(g + i * g_t, mask=live, other=0.0).to(tl.float32) * LOG2E, FLOOR)
        multiple = (d + COARSE) - COARSE
        coarse = tl.cumsum(multiple, 0)
        fine = tl.cumsum(d - multiple, 0)
        between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        decays = tl.where(lower, tl.exp2(tl.minimum(between, 0.0)), 0.0)
        read = tl.exp2(coarse + fine)
        all_coarse = tl.sum(multiple, 0)
        all_fine = tl.sum(d - multiple, 0)
        rest = tl.exp2(tl.minimum((all_coarse - coarse) + (all_fine - fine), 0.0))
        total = tl.exp2(all_coarse + all_fine)
    else:
        decays = tl.where(lower, 1.0, 0.0)
        read = tl.full(i.shape, 1.0, tl.float32)
        rest = read
        total = 1.0
    return decays, read, rest, total


@triton.jit
def chunk_of(program, cu_seqlens, N, T, H, C: tl.constexpr, PACKED: tl.constexpr):
    """The chunk and head of a program: the batch row, the first token's row, the number of tokens, the head, the index [slots,H]."""
    slot = program // H
    batch, row, tokens = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    h = (program % H).to(tl.int64)
    return batch, row, tokens, h, slot.to(tl.int64) * H + h


@triton.jit
def strengths(beta, i, live, beta_t, STREAMS: tl.constexpr):
    """beta of a chunk's tokens [C], LEAST for 0, because the gradient of beta is divided by it; 1 with two streams."""
    if STREAMS == 1:
        x = tl.load(beta + i * beta_t, mask=live, other=0.0).to(tl.float32)
        x = tl.where(tl.abs(x) < LEAST, LEAST, x)
    else:
        x = tl.full(i.shape, 1.0, tl.float32)
    return x


@triton.jit
def where_written(strength, x):
    """The rows of x [C,...] whose beta is not 0, else 0."""
    return tl.where(strength == LEAST, 0.0, x)
