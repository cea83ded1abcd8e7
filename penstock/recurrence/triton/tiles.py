"""Device functions that all chunk kernels share: loads, sums and factors of decays.

Inside kernels decays are in log2 units, so a decay is one ``exp2``. Time runs forward in a kernel: token i of a chunk is row
``first + i * step`` of the tensors, and step is -1 if the caller's time runs backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.tiles import LOG2E, tile

FLOOR = tl.constexpr(-16384.0)  # log2 units: 2 ** FLOOR is 0 in float32, and sums of clamped decays are finite
SUITS = tl.constexpr(200.0)  # log2 units: the strongest decay of a chunk with one anchor; factors are then at most 2^100
COARSE = tl.constexpr(49152.0)  # 1.5 * 2^15: adding and subtracting it rounds to multiples of 2^-8
NEAR, FAR = tl.constexpr(0.0), tl.constexpr(100.0)  # log2 units: the offset of a subchunk's sums

# With FAR neither factor of a subchunk that decays by 2^200 overflows. With NEAR sums are more accurate.

NONE, SCALAR, CHANNEL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # DECAY: absent, one per head, one per channel


@triton.jit
def triangle(ones, i, W: tl.constexpr, OWN: tl.constexpr, PRECISION: tl.constexpr):
    """[C, C] for ``sums``: ones left of the diagonal and, if OWN, on it. Loaded from ``ones`` [W + 1, W], whose row n has n ones.

    Loaded operands of products stay in shared memory, which takes no registers and few instructions.
    """
    if PRECISION == "bf16" or PRECISION == "tf32":
        t = tl.load(ones + (i + OWN)[:, None] * W + i[None, :])
    else:
        t = 0.0
    return t


@triton.jit
def sums(x, triangle, PRECISION: tl.constexpr, REVERSE: tl.constexpr = False, OWN: tl.constexpr = True, start=0.0):
    """``start`` plus cumulative sums over the tokens of a tile, including the token itself if OWN; from the end if REVERSE.

    If products round their operands, tensor cores compute the sums: a triangle of ones times x in two parts of 8 bits. The error is
    2^-17 per term.
    """
    if PRECISION == "bf16" or PRECISION == "tf32":
        if REVERSE:
            triangle = tl.trans(triangle)
        high = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)  # cheaper than two casts
        s = tl.dot(triangle, high.to(tl.bfloat16), tl.zeros_like(x) + start)
        s = tl.dot(triangle, (x - high).to(tl.bfloat16), s)
    else:
        s = start + tl.cumsum(x, 0, reverse=REVERSE)
        if not OWN:
            s -= x
    return s


@triton.jit
def sequence_with_pieces(rank, cu_seqlens, N, PIECE: tl.constexpr, BLOCK: tl.constexpr = 256):
    """The sequence of this rank among those of at least PIECE tokens, in their order; N if there are fewer."""
    found = rank * 0 + N
    before = rank * 0
    i = tl.arange(0, BLOCK)
    for first in tl.range(0, N, BLOCK):
        begin = tl.load(cu_seqlens + first + i, mask=first + i < N, other=0)
        end = tl.load(cu_seqlens + first + i + 1, mask=first + i < N, other=0)
        long = (end - begin >= PIECE).to(tl.int32)
        wanted = (long == 1) & (before + tl.cumsum(long, 0) == rank + 1)
        found += tl.sum(tl.where(wanted, first + i - N, 0), 0)
        before += tl.sum(long, 0)
    return found


@triton.jit
def rounded(S, pool):
    """S rounded to the dtype of the pool, if that has 16 bits. Not to float64."""
    if pool.dtype.element_ty.primitive_bitwidth < 32:
        S = S.to(pool.dtype.element_ty).to(tl.float32)
    return S


@triton.jit
def decays(base, i, live, stride_i, j, stride_j, J: tl.constexpr, BJ: tl.constexpr):
    """A tile of log decays in log2 units, 0 outside the mask: [len(i), BJ]."""
    return tl.maximum(tile(base, i, live, stride_i, j, stride_j, J, BJ).to(tl.float32) * LOG2E, FLOOR)


@triton.jit
def factors(d, lower, strict, PREVIOUS: tl.constexpr, PRECISION: tl.constexpr):
    """The factors of q, k and states in a chunk with decays d (natural logarithms), and the chunk's total decay in log2 units.

    ``lower`` and ``strict`` are triangles with and without the diagonal; ``strict`` is used only if PREVIOUS.
    G are the sums up to a token, Gq the sums that its query uses, G_L is the last sum and M about half of it. The factors are
    2^(Gq - M) and 2^(M - G) [C,BK], 2^M and 2^(G_L - M) [BK]. If the chunk decays by at most 2^SUITS, none overflows float32.

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
        behind = tl.exp2(whole)
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
        behind = tl.exp2(total - M) * tl.exp2(tl.sum(fine, 0))
    return grow, shrink, tl.exp2(M), behind, total


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

    Returns the sums over j < t <= i [C,C], -inf for j > i; up to each token [C]; behind each token [C]; over the chunk. If STATIC all
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
        if total >= -LIMIT:
            between = read[:, None] - read[None, :]
        else:
            between = tl.cumsum(tl.where(i[:, None] > i[None, :], d[:, None], 0.0), 0)
    return tl.where(i[:, None] >= i[None, :], between, float("-inf")), read, rest, total


@triton.jit
def subchunk(
    g, step, left, m, i, j, g_t, g_k,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PREVIOUS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The tokens [m, n) of a chunk that share an anchor before m, and the factors of q and k for the pairs (i, j), m <= i < n, j < i.

    A pair i > j needs ``2 ** -P_j``, where P_j is the sum of decays from m to j. The tokens before the last may decay by at most
    LIMIT; the last by any amount. 2 ** ANCHOR is moved from the key's factor to the query's. Apart from it, the query's factor is at
    most 1; the key's is at most 1 for tokens before m and at most 2 ** LIMIT from m on. Sums begin at the anchor, so they are small
    where the factors are large, for any decays elsewhere in the chunk.
    """
    ANCHOR: tl.constexpr = FAR if LIMIT > 100.0 else NEAR
    P = tl.cumsum(decays(g, i * step, (i >= m) & (i < left), g_t, j, g_k, K, BK), 0)
    fits = tl.sum((tl.min(P, 1) >= -LIMIT).to(tl.int32), 0)  # tokens before m have P = 0
    n = tl.minimum(tl.maximum(fits, m) + 1, C)
    if PREVIOUS:
        Pq = tl.cumsum(decays(g - step * g_t, i * step, (i > m) & (i < left), g_t, j, g_k, K, BK), 0)
    else:
        Pq = P
    eq = tl.where(((i >= m) & (i < n))[:, None], tl.exp2(Pq + ANCHOR), 0.0)
    earlier = tl.cumsum(decays(g + step * g_t, i * step, i + 1 < m, g_t, j, g_k, K, BK), 0, reverse=True)
    ek = tl.where((i < n - 1)[:, None], tl.exp2(tl.where((i >= m)[:, None], -P, earlier) - ANCHOR), 0.0)
    return n, eq, ek


@triton.jit
def read_factors(g, step, left, i, j, g_t, g_k, K: tl.constexpr, BK: tl.constexpr, PREVIOUS: tl.constexpr):
    """2^Gq, the decay from the chunk's beginning to each token's query: [C,BK], at most 1."""
    if PREVIOUS:
        d = decays(g - step * g_t, i * step, (i > 0) & (i < left), g_t, j, g_k, K, BK)
    else:
        d = decays(g, i * step, i < left, g_t, j, g_k, K, BK)
    return tl.exp2(tl.cumsum(d, 0))


@triton.jit
def rest_factors(g, step, left, i, j, g_t, g_k, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """2^R, the decay from each token to the end of the chunk: [C,BK], at most 1."""
    return tl.exp2(tl.cumsum(decays(g + step * g_t, i * step, (i < C - 1) & (i + 1 < left), g_t, j, g_k, K, BK), 0, reverse=True))
