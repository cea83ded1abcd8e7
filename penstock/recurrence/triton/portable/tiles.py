"""Device functions that all chunk kernels share: loads, sums and factors of decays.

Inside kernels decays are in log2 units, so a decay is one ``exp2``. Time runs forward in a kernel: token i of a chunk is row
``first + i * step`` of the tensors, and step is -1 if the caller's time runs backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import FLOOR
from ....gpu.levels import apart, selected, sums_of_rows
from ....gpu.tiles import LOG2E, product, tile

SUITS = tl.constexpr(200.0)  # log2 units: the strongest decay of a chunk with one anchor; factors are then at most 2^100
COARSE = tl.constexpr(49152.0)  # 1.5 * 2^15: adding and subtracting it rounds to multiples of 2^-8


@triton.jit
def ones(levels, n, i, C: tl.constexpr, PRECISION: tl.constexpr):
    """Matrix n [C,C] of ``levels`` for ``sums``, see ``gpu/dyadic.py``. 0 where ``sums`` of a triangle needs none.

    Loaded operands of products stay in shared memory, which takes no registers and few instructions.
    """
    if PRECISION == "bf16" or PRECISION == "tf32":
        t = tl.load(levels + n * (C * C) + i[:, None] * C + i[None, :])
    else:
        t = 0.0
    return t


@triton.jit
def sums(x, triangle, PRECISION: tl.constexpr, REVERSE: tl.constexpr = False, OWN: tl.constexpr = True, start=0.0):
    """``start`` plus cumulative sums over the tokens of a tile, including the token itself if OWN; from the end if REVERSE.

    If products round their operands, tensor cores compute the sums: a triangle of ones times x in two parts of 8 bits. The error is
    2^-17 per term.
    """
    if PRECISION == "bf16" or PRECISION == "f16" or PRECISION == "tf32":
        if REVERSE:
            triangle = tl.trans(triangle)
        s = sums_of_rows(triangle, x, start)
    else:
        s = start + tl.cumsum(x, 0, reverse=REVERSE)
        if not OWN:
            s -= x
    return s


@triton.jit
def factors(d, lower, strict, PREVIOUS: tl.constexpr, PRECISION: tl.constexpr):
    """The factors of q, k and states in a chunk with decays d (natural logarithms) of at most 2^SUITS in all.

    ``lower`` and ``strict`` are triangles with and without the diagonal; ``strict`` is used only if PREVIOUS.
    G are the sums up to a token, Gq the sums that its query uses, G_L is the last sum and M about half of it. The factors are
    2^(Gq - M) and 2^(M - G) [C,BK], 2^M and 2^(G_L - M) [BK]. None overflows float32.

    If products round their operands, M is chosen so that 2^(G_L - M) is a power of two: multiplying by it does not round in bfloat16.
    Otherwise decays are split into multiples of 2^-8, whose sums are exact, and small rests. A single float32 sum as large as SUITS
    has an error of 4e-6.
    """
    if PRECISION == "bf16" or PRECISION == "tf32":
        total = tl.maximum(tl.sum(d, 0) * LOG2E, FLOOR)
        whole = tl.floor(0.5 * total + 0.5)
        M = total - whole
        G = sums(d, lower, PRECISION)
        shrink = tl.exp2(M[None, :] - G * LOG2E)
        if PREVIOUS:
            G = sums(d, strict, PRECISION, OWN=False)
        grow = tl.exp2(G * LOG2E - M[None, :])
        after = tl.exp2(whole)
    else:
        d = tl.maximum(d * LOG2E, FLOOR)
        coarse = (d + COARSE) - COARSE
        fine = d - coarse
        total = tl.sum(coarse, 0)
        M = (0.5 * total + COARSE) - COARSE
        G = tl.cumsum(coarse, 0) - M[None, :]
        rest = tl.cumsum(fine, 0)
        shrink = tl.exp2(-G) * tl.exp2(-rest)
        if PREVIOUS:
            G -= coarse
            rest -= fine
        grow = tl.exp2(G) * tl.exp2(rest)
        after = tl.exp2(total - M) * tl.exp2(tl.sum(fine, 0))
    return grow, shrink, tl.exp2(M), after, total


@triton.jit
def halves(queries, keys, r, live, second, j, K: tl.constexpr, BK: tl.constexpr):
    """q where ``second``, else k: [C,BK]. Loaded for each level, which takes no registers between levels."""
    q, q_t, q_k = queries
    k, k_t, k_k = keys
    later = tile(q, r, live & second, q_t, j, q_k, K, BK)
    earlier = tile(k, r, live & ~second, k_t, j, k_k, K, BK)
    return tl.where(second[:, None], later, earlier)


@triton.jit
def weights_by_levels(
    queries, keys, d, levels, i, r, live, j,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, THEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A [C,C] strictly below the diagonal for any decays d, in log2 units; and the sums of d [C,BK] that matrix THEN of ``levels`` selects.

    Every pair of tokens belongs to the level whose block's halves they lie in, see ``gpu/dyadic.py``. With X = f o (q in second
    halves, k in first halves), where f are the decays between a token and the middle of its block, X X^T are the weights of its pairs.
    Factors are at most 1, so X of float16 inputs fits float16, which has as many bits as TF32 and faster products.

    An iteration computes the sums of the next one, because their order decides how products are distributed: for GPUs without warp groups,
    Triton gives all products that depend on each other in a block of code the distribution of the last one. If that has as many rows as
    columns, every warp has 16 rows and all columns: with 32 rows, all warps but two repeat the others' work and hold whole operands.
    """
    A = tl.zeros((C, C), tl.float32)
    between = selected(d, levels, 0, i, C, PRECISION)
    for level in tl.range(LEVELS, num_stages=1):
        L = C // 2 >> level
        f = tl.exp2(between)
        x = halves(queries, keys, r, live, (i & L) != 0, j, K, BK)
        if PRECISION == "tf32" and x.dtype == tl.float16:
            X = (f * x.to(tl.float32)).to(tl.float16)
            made = tl.dot(X, tl.trans(X))
        else:
            X = (f * x.to(tl.float32)).to(tl.bfloat16 if PRECISION == "bf16" else tl.float32)
            made = product(X, tl.trans(X), PRECISION)
        A = tl.where(apart(i, L), made, A)
        between = selected(d, levels, tl.where(level + 1 < LEVELS, level + 1, THEN), i, C, PRECISION)
    return A, between


@triton.jit
def constant_decay(base):
    """A head's constant decay, in log2 units."""
    return tl.maximum(tl.load(base).to(tl.float32) * LOG2E, FLOOR)


@triton.jit
def scalar_decays(base, i, live, stride_i):
    """Scalar decays in log2 units, 0 outside the mask: [len(i)]."""
    return tl.maximum(tl.load(base + i * stride_i, mask=live, other=0.0).to(tl.float32) * LOG2E, FLOOR)


@triton.jit
def scalar_sums(g, constant, step, left, i, g_t, C: tl.constexpr, STATIC: tl.constexpr, LIMIT: tl.constexpr):
    """Sums of scalar decays over a chunk with ``left`` tokens, accurate for every decay.

    Returns the sums over j < t <= i [C,C], -inf for j > i; up to each token [C]; after each token [C]; over the chunk. If STATIC all
    decays are ``constant``, and the sums are multiples of it.
    """
    if STATIC:
        between = (i[:, None] - i[None, :]).to(tl.float32) * constant
        read = (i + 1).to(tl.float32) * constant
        rest = tl.maximum(left - 1 - i, 0).to(tl.float32) * constant
        total = left.to(tl.float32) * constant
    else:
        d = scalar_decays(g, i * step, i < left, g_t)
        read = tl.cumsum(d, 0)
        rest = tl.cumsum(scalar_decays(g + step * g_t, i * step, (i + 1 < left) & (i < C - 1), g_t), 0, reverse=True)
        total = tl.sum(d, 0)
        between = read[:, None] - read[None, :]
        if tl.min(read, 0) < -LIMIT:  # of each token alone: no later decay selects how its sums are computed
            strong = tl.cumsum(tl.where(i[:, None] > i[None, :], d[:, None], 0.0), 0)
            between = tl.where(read[:, None] >= -LIMIT, between, strong)
    return tl.where(i[:, None] >= i[None, :], between, float("-inf")), read, rest, total
