"""Device functions that the chunk kernels share: sums of decays, factors of levels, and masks of pairs.

A chunk of C tokens is cut into levels: blocks of 2 L tokens for L = C/2, C/4 ... 1. Every pair of tokens s < t is in different halves of
the block of exactly one level. Its decay is the product of the factors of both tokens: of t the exponential of the sum of the decays from
the middle of the block up to t, of s that of the decays after s up to the middle. Every factor is the exponential of one sum and at most
1, so every decay is exact.

Bounded decays may have an anchor instead of the levels inside blocks of LOW tokens: the factors are exp(G_t) and exp(-G_s), G the sums
from the beginning of the block. Decays are in log2 units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import FLOOR
from ....gpu.tiles import LOG2E, apart, sums_of_rows, uniform

COARSE = tl.constexpr(786432.0)  # 1.5 * 2^19: adding and subtracting it rounds to multiples of 2^-4
LEAST = tl.constexpr(2.0**-100)  # stands for a beta of 0
INCLUSIVE, EXCLUSIVE, LATER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # tokens u <= t, u < t, u > t


@triton.jit
def ordered(i, ORDER: tl.constexpr):
    """Which tokens u (columns) have this order relative to tokens t (rows): [C,C]."""
    if ORDER == INCLUSIVE:
        chosen = i[None, :] <= i[:, None]
    elif ORDER == EXCLUSIVE:
        chosen = i[None, :] < i[:, None]
    else:
        chosen = i[None, :] > i[:, None]
    return chosen


@triton.jit
def within(i, L):
    """Whether tokens i (rows) and i (columns) are in the same block of L tokens: [C,C]."""
    return (i & -L)[:, None] == (i & -L)[None, :]


@triton.jit
def of_level(i, level, C: tl.constexpr, LEVELS: tl.constexpr, OWN: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """Which decays (columns) are in the factor of each token (rows) at a level: [C,C]. Without the token's own decay unless OWN.

    TRANSPOSED: tokens are columns.

    Level LEVELS is the anchor, whose blocks have as many tokens as the halves of the last level, or C.
    """
    L = tl.where(level < LEVELS, C // 2 >> level, C >> LEVELS)
    if TRANSPOSED:
        t = i[None, :]
        u = i[:, None]
    else:
        t = i[:, None]
        u = i[None, :]
    later = ((t & L) != 0) | uniform(level == LEVELS)
    read = u <= t if OWN else u < t
    return within(i, L) & ((later & read) | (~later & (u > t)))


@triton.jit
def pairs_of_level(i, level, C: tl.constexpr, LEVELS: tl.constexpr):
    """The pairs of tokens t (rows) and s < t (columns) of a level or of the anchor: [C,C]."""
    L = tl.where(level < LEVELS, C // 2 >> level, C >> LEVELS)
    anchored = within(i, L) & ordered(i, EXCLUSIVE)
    return (uniform(level < LEVELS) & apart(i, L)) | (uniform(level == LEVELS) & anchored)


@triton.jit
def sums(chosen, x, PRECISION: tl.constexpr):
    """The sums of the rows of x that the rows of ``chosen`` [C,C] select: no scans, no differences."""
    if PRECISION == "bf16" or PRECISION == "tf32":
        s = sums_of_rows(chosen.to(tl.bfloat16), x)
    else:
        s = tl.dot(chosen.to(tl.float32), x, input_precision=PRECISION)
    return s


@triton.jit
def factors_of_level(d, i, level, C: tl.constexpr, LEVELS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr):
    """The factors of q, of a and of b (and k) at a level [C,BK], from the decays d of the chunk."""
    G = sums(of_level(i, level, C, LEVELS, True), d, PRECISION)
    query = tl.exp2(G)
    key = tl.exp2(tl.where(level == LEVELS, -G, G))
    removal = query
    if not AFTER:
        removal = tl.exp2(sums(of_level(i, level, C, LEVELS, False), d, PRECISION))
    return query, removal, key


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
