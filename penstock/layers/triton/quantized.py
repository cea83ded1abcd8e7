"""Linear maps with weights of 8 and 4 bits (``layers/quantization.py``), which the kernels read as they are stored.

The time of a linear map with few rows is the time to read its weights. A program of ``penstock_quantized_products`` reads BN rows of codes
once. Codes are exact in every dtype of x; scales multiply float32 sums. The order of the sums depends only on the sizes of the weight, so a
row does not depend on the other rows, to the bit, for all tiles with ``APART``.
"""

import triton
import triton.language as tl

from .few_rows import begin, prefetch, selected


@triton.jit
def _int8(
    x, codes, n, m, N, R, K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, APART: tl.constexpr
):  # fmt: skip
    """Codes of rows n times rows m of x: [BN,BM]. Each of APART warps sums over its own blocks of K."""
    s = tl.arange(0, APART)[:, None, None] * BK
    k = tl.arange(0, BK)[None, None, :]
    rows = codes + n.to(tl.int64)[None, :, None] * K
    inputs = x + m.to(tl.int64)[None, :, None] * K
    there = (n < N)[None, :, None]
    given = (m < R)[None, :, None]
    sums = tl.zeros([APART, BN, BM], tl.float32)
    for block in tl.range(0, (K + APART * BK - 1) // (APART * BK), num_stages=STAGES):
        at = block * (APART * BK) + s + k
        if K % (APART * BK) == 0:
            a = tl.load(rows + at, there, other=0)
            b = tl.load(inputs + at, given, other=0.0)
        else:
            a = tl.load(rows + at, there & (at < K), other=0)
            b = tl.load(inputs + at, given & (at < K), other=0.0)
        sums = tl.dot(a.to(b.dtype), tl.permute(b, (0, 2, 1)), sums, input_precision="ieee")
    return _joined(sums)


@triton.jit
def _int4(
    x, codes, scales, n, m, N, R, K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Rows n of a weight times rows m of x: [BN,BM]. Each of APART warps sums over its own groups of 2 * HALF columns."""
    GROUPS: tl.constexpr = (K + 2 * HALF - 1) // (2 * HALF)
    s = tl.arange(0, APART)[:, None, None]
    j = tl.arange(0, HALF)[None, None, :]
    rows = codes + n.to(tl.int64)[None, :, None] * (GROUPS * HALF)
    factors = scales + n.to(tl.int64)[None, :, None] * GROUPS
    inputs = x + m.to(tl.int64)[None, :, None] * K
    there = (n < N)[None, :, None]
    given = (m < R)[None, :, None]
    sums = tl.zeros([APART, BN, BM], tl.float32)
    for block in tl.range(0, (GROUPS + APART - 1) // APART, num_stages=STAGES):
        g = block * APART + s
        at = g * (2 * HALF) + j
        if K % (2 * HALF * APART) == 0:
            both = tl.load(rows + g * HALF + j, there, other=0)
            scale = tl.load(factors + g, there, other=0.0)
            b0 = tl.load(inputs + at, given, other=0.0)
            b1 = tl.load(inputs + at + HALF, given, other=0.0)
        else:
            both = tl.load(rows + g * HALF + j, there & (g < GROUPS), other=0)
            scale = tl.load(factors + g, there & (g < GROUPS), other=0.0)
            b0 = tl.load(inputs + at, given & (at < K), other=0.0)
            b1 = tl.load(inputs + at + HALF, given & (at + HALF < K), other=0.0)
        low, high = _nibbles(both)
        part = tl.dot(low.to(b0.dtype), tl.permute(b0, (0, 2, 1)), input_precision="ieee")
        part = tl.dot(high.to(b1.dtype), tl.permute(b1, (0, 2, 1)), part, input_precision="ieee")
        sums += part * scale.to(tl.float32)
    return _joined(sums)


@triton.jit
def _nibbles(both):
    """The numbers of the low and of the high 4 bits, from -8 to 7, int8."""
    return (both & 15).to(tl.int8) - 8, (both >> 4).to(tl.int8) - 8


@triton.jit
def _joined(sums):
    """The sum over the warps, in an order that does not depend on the layout."""
    BN: tl.constexpr = sums.shape[1]
    BM: tl.constexpr = sums.shape[2]
    if sums.shape[0] == 4:
        sums = tl.sum(tl.reshape(sums, [2, 2, BN, BM]), 0)
        sums = tl.reshape(tl.sum(sums, 0), [BN, BM])
    else:
        tl.static_assert(sums.shape[0] == 1)
        sums = tl.reshape(sums, [BN, BM])
    return sums


@triton.jit
def _int8_of_one(x, codes, n, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Codes of rows n times one row x, without tensor cores: [BN,1]. All loads of a tile [BN,BK] are in flight at once."""
    k = tl.arange(0, BK)
    rows = codes + n.to(tl.int64)[:, None] * K + k[None, :]
    there = (n < N)[:, None]
    sums = tl.zeros([BN, BK], tl.float32)
    for at in tl.range(0, K, BK):
        if K % BK == 0:
            a = tl.load(rows + at, there, other=0)
            b = tl.load(x + at + k)
        else:
            inside = k < K - at
            a = tl.load(rows + at, there & inside[None, :], other=0)
            b = tl.load(x + at + k, inside, other=0.0)
        sums += a.to(tl.float32) * b.to(tl.float32)[None, :]
    return tl.sum(sums, 1)[:, None]


@triton.jit
def _int4_of_one(x, codes, scales, n, N, K: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, HALF: tl.constexpr):
    """Rows n of a weight times one row x, without tensor cores: [BN,1]. All loads of a tile of BG groups are in flight at once."""
    GROUPS: tl.constexpr = (K + 2 * HALF - 1) // (2 * HALF)
    g = tl.arange(0, BG)
    j = tl.arange(0, HALF)
    rows = codes + n.to(tl.int64)[:, None, None] * (GROUPS * HALF) + g[None, :, None] * HALF + j[None, None, :]
    factors = scales + n.to(tl.int64)[:, None] * GROUPS + g[None, :]
    there = (n < N)[:, None]
    sums = tl.zeros([BN, BG], tl.float32)
    for first in tl.range(0, GROUPS, BG):
        inside = there & (g[None, :] < GROUPS - first)
        at = (first + g)[:, None] * (2 * HALF) + j[None, :]
        both = tl.load(rows + first * HALF, inside[:, :, None], other=0)
        scale = tl.load(factors + first, inside, other=0.0)
        b0 = tl.load(x + at, at < K, other=0.0).to(tl.float32)
        b1 = tl.load(x + at + HALF, at + HALF < K, other=0.0).to(tl.float32)
        low, high = _nibbles(both)
        part = low.to(tl.float32) * b0[None, :, :] + high.to(tl.float32) * b1[None, :, :]
        sums += tl.sum(part, 2) * scale.to(tl.float32)
    return tl.sum(sums, 1)[:, None]


@triton.jit(do_not_specialize=["R"])
def penstock_quantized_products(
    x0, x1, x2, x3, x4,  # [R,K]
    c0, c1, c2, c3, c4,  # codes of [N,K]
    s0, s1, s2, s3, s4,  # scales
    y0, y1, y2, y3, y4,  # [R,N]
    gate,  # [R,n0]
    n0, n1, n2, n3, n4,
    f1, f2, f3, f4,  # the first block of each part
    R,
    K: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, RELU_SQUARED: tl.constexpr, GATE: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, APART: tl.constexpr, WARPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y_i = x_i W_i^T in one grid. RELU_SQUARED: y_0 becomes relu(y_0)^2. GATE: y_0 is multiplied by sigmoid(gate).

    Reads x_i [R,K], codes and scales of W_i [N,K], gate [R,N]. Writes y_i [R,N]. Program (BN rows of a weight, BM rows of x). With APART
    = 0 there is one row of x.
    """
    BYTES: tl.constexpr = K if BITS == 8 else (K + 2 * HALF - 1) // (2 * HALF) * HALF
    block = tl.program_id(0)
    part = block * 0
    if PARTS > 1:
        part = (block >= f1).to(tl.int32) + (block >= f2).to(tl.int32) + (block >= f3).to(tl.int32) + (block >= f4).to(tl.int32)
        block -= selected(part, part * 0, f1, f2, f3, f4, PARTS)
    x = selected(part, x0, x1, x2, x3, x4, PARTS)
    codes = selected(part, c0, c1, c2, c3, c4, PARTS)
    scales = selected(part, s0, s1, s2, s3, s4, PARTS)
    y = selected(part, y0, y1, y2, y3, y4, PARTS)
    N = selected(part, n0, n1, n2, n3, n4, PARTS)
    n = block * BN + tl.arange(0, BN)
    if BYTES % 16 == 0:
        prefetch(codes, block.to(tl.int64) * (BN * BYTES), BN * BYTES, N.to(tl.int64) * BYTES, WARPS, PDL)
    begin(PDL)
    if APART == 0:
        m = tl.zeros([1], tl.int32)
        if BITS == 8:
            o = _int8_of_one(x, codes, n, N, K, BN, BK)
        else:
            o = _int4_of_one(x, codes, scales, n, N, K, BN, BK // (2 * HALF), HALF)
    else:
        m = tl.program_id(1) * BM + tl.arange(0, BM)
        if BITS == 8:
            o = _int8(x, codes, n, m, N, R, K, BN, BM, BK, STAGES, APART)
        else:
            o = _int4(x, codes, scales, n, m, N, R, K, BN, BM, HALF, STAGES, APART)
    if BITS == 8:
        o *= tl.load(scales + n, n < N, other=0.0)[:, None]
    to = m.to(tl.int64)[None, :] * N + n[:, None]
    here = (n < N)[:, None] & (m < R)[None, :]
    if RELU_SQUARED:
        positive = tl.where(o < 0, 0.0, o)  # keeps NaN
        o = tl.where(part == 0, positive * positive, o)
    if GATE:
        o *= tl.sigmoid(tl.load(gate + to, here, other=0.0).to(tl.float32))
    tl.store(y + to, o.to(y.dtype.element_ty), here)


@triton.jit
def penstock_dequantize(
    codes, scales, y,  # [N,K]
    K,
    BITS: tl.constexpr, HALF: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y = codes * scales.

    Reads the codes and scales of W [N,K]. Writes y [N,K]. Program (row n, BK columns).
    """
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    if BITS == 8:
        code = tl.load(codes + n * K + k, k < K, other=0).to(tl.float32)
        scale = tl.load(scales + n)
    else:
        groups = (K + 2 * HALF - 1) // (2 * HALF)
        g = k // (2 * HALF)
        both = tl.load(codes + n * groups * HALF + g * HALF + k % HALF, k < K, other=0)
        low, high = _nibbles(both)
        code = tl.where(k % (2 * HALF) < HALF, low, high).to(tl.float32)
        scale = tl.load(scales + n * groups + g, k < K, other=0.0).to(tl.float32)
    tl.store(y + n * K + k, (code * scale).to(y.dtype.element_ty), k < K)
