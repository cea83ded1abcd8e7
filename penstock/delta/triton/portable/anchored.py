"""Of the chunk kernels for bounded decays: factors of a whole chunk with one anchor, and products with T.

The anchor is the beginning of the chunk. G_t are the sums of decays up to and including token t, in log2 units::

    rows q: exp2(G_t)     rows a: exp2(G_t - g_t)     columns b, k: exp2(-G_s)     with the state after the chunk: exp2(sum u > s)

So the rows of pairs are those that meet the state before the chunk, and there are no levels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import decays
from ....gpu.levels import apart
from ....gpu.tiles import product

SUBCHUNK = tl.constexpr(16)  # tokens of a block that is solved by substitution


@triton.jit
def in_two(x):
    """X as the sum of two bfloat16 tiles, 16 significant bits with the range of float32. Rounded in integers: conversions are slow."""
    high = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def chosen_sums(chosen, x, PRECISION: tl.constexpr):
    """Sums of the rows of x [C,BK] that the rows of ``chosen`` [C,C] select: on tensor cores, no differences."""
    if PRECISION == "bf16" or PRECISION == "tf32":
        high, low = in_two(x)
        chosen = tl.where(chosen, 1.0, 0.0).to(tl.bfloat16)
        s = tl.dot(chosen, low, tl.dot(chosen, high))
    else:
        s = tl.dot(tl.where(chosen, 1.0, 0.0), x, input_precision=PRECISION)
    return s


@triton.jit
def sums(g, i, live, g_t, j, g_k, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """G and the sums of decays after each token [C,BK], and the decays."""
    d = decays(g, i, live, g_t, j, g_k, K, BK)
    G = chosen_sums(i[None, :] <= i[:, None], d, PRECISION)
    return G, chosen_sums(i[None, :] > i[:, None], d, PRECISION), d


@triton.jit
def product_with_T(a, b, PRECISION: tl.constexpr):
    """The product of float32 tiles, one of which is T or makes it. Beside bfloat16 operands these have 16 bits, more than TF32."""
    if PRECISION == "bf16":
        a_high, a_low = in_two(a)
        b_high, b_low = in_two(b)
        c = tl.dot(a_low, b_high)
        c = tl.dot(a_high, b_low, c)
        c = tl.dot(a_high, b_high, c)
    else:
        c = product(a, b, "tf32x3" if PRECISION == "tf32" else PRECISION)
    return c


@triton.jit
def spread_blocks(t, C: tl.constexpr):
    """Diagonal blocks [C/16,16,16] in a matrix [C,C] that is 0 elsewhere."""
    M: tl.constexpr = C // SUBCHUNK
    n = tl.arange(0, M)
    own = n[:, None, None, None] == n[None, None, :, None]
    return tl.reshape(tl.where(own, t[:, :, None, :], 0.0), [C, C])


@triton.jit
def diagonal_blocks(N, C: tl.constexpr):
    """The diagonal blocks [C/16,16,16] of a matrix [C,C]."""
    M: tl.constexpr = C // SUBCHUNK
    n = tl.arange(0, M)
    own = n[:, None, None, None] == n[None, None, :, None]
    return tl.sum(tl.where(own, tl.reshape(N, [M, SUBCHUNK, M, SUBCHUNK]), 0.0), 2)


@triton.jit
def inverse(N, i, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I - N)^-1 - I of a strictly lower triangular N [C,C].

    Diagonal blocks are substituted forward in float32: row r of T is row r of I plus N[r,:r] T[:r]. Then pairs of blocks are merged,
    T21 = T22 (N21 T11).
    """
    blocks = diagonal_blocks(N, C)
    r = tl.arange(0, SUBCHUNK)
    t = tl.zeros_like(blocks)
    for row in tl.range(1, SUBCHUNK, num_stages=1):
        chosen = (r == row)[None, :, None]
        n = tl.sum(tl.where(chosen, blocks, 0.0), 1)
        made = n + tl.sum(n[:, :, None] * t, 1)
        t = tl.where(chosen, made[:, None, :], t)
    T = spread_blocks(t, C)
    L: tl.constexpr = SUBCHUNK
    for level in tl.static_range(2):
        between = apart(i, L << level)
        N21 = tl.where(between, N, 0.0)
        N21 += product_with_T(N21, T, PRECISION)
        N21 += product_with_T(T, N21, PRECISION)
        T += tl.where(between, N21, 0.0)
    return T
