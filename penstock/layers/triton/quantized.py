"""Linear maps with weights of 8 and 4 bits (``layers/quantization.py``), which the kernels read as they are stored.

The time of a linear map with few rows is the time to read its weights. A program of ``penstock_quantized_products`` reads BN rows of codes
once; for one row of x, into registers before the wait for the previous kernel. Codes are exact in every dtype of x; scales multiply
float32 sums. The order of the sums depends only on the sizes of the weight, so a row does not depend on the other rows, to the bit, for
all tiles with ``APART``.
"""

import triton
import triton.language as tl

from .few_rows import begin, prefetch, selected, store_activated


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
def _columns(first, BK: tl.constexpr, BITS: tl.constexpr):
    """Of codes [BK * BITS / 64,8], their bytes and the columns of a row (of ``int4``, those of the low bits)."""
    t = tl.arange(0, BK * BITS // 64)[:, None]
    j = tl.arange(0, 8)[None, :]
    if BITS == 8:
        at = t * 8 + j
        column = at
    else:
        at = t * 8 + j
        column = (t // 4) * 64 + (t % 4) * 8 + j
    return first * BITS // 8 + at, first + column


@triton.jit
def _codes(codes, n, N, first, K: tl.constexpr, BYTES: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr):
    """Codes of rows n from column ``first`` on: [BN,BK*BITS/64,8]. All loads are in flight at once."""
    at, _ = _columns(first, BK, BITS)
    rows = codes + n.to(tl.int64)[:, None, None] * BYTES + at[None, :, :]
    there = (n < N)[:, None, None]
    if K % BK == 0:
        a = tl.load(rows, there, other=0)
    else:
        a = tl.load(rows, there & (at < BYTES)[None, :, :], other=0)
    return a


@triton.jit
def _raw(codes, PDL: tl.constexpr):
    """Codes that are converted after this point only: until then they take a quarter of the registers."""
    if PDL:
        codes = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [codes], dtype=codes.dtype, is_pure=False, pack=4)
    return codes


@triton.jit
def _scales(scales, n, N, first, K: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr):
    """Scales of ``int4`` for the codes of rows n from column ``first`` on: [BN,BK/16], the same for four neighbours."""
    GROUPS: tl.constexpr = (K + 2 * HALF - 1) // (2 * HALF)
    g = first // (2 * HALF) + tl.arange(0, BK // 16)[None, :] // 4
    return tl.load(scales + n.to(tl.int64)[:, None] * GROUPS + g, (n < N)[:, None] & (g < GROUPS), other=0.0)


@triton.jit
def _sums(x, a, scale, first, K: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr):
    """Partial sums of codes times one row of x, of ``int4`` times scales."""
    _, column = _columns(first, BK, BITS)
    b = tl.load(x + column, column < K, other=0.0).to(tl.float32)
    if BITS == 8:
        sums = tl.sum(a.to(tl.float32) * b[None, :, :], 2)
    else:
        column += HALF
        b1 = tl.load(x + column, column < K, other=0.0).to(tl.float32)
        both = (a & 15).to(tl.float32) * b[None, :, :] + (a >> 4).to(tl.float32) * b1[None, :, :]
        zero = tl.sum(b + b1, 1) * 8.0
        sums = (tl.sum(both, 2) - zero[None, :]) * scale.to(tl.float32)
    return sums


@triton.jit
def _of_one(
    x, codes, scales, n, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows n of a weight times one row x, without tensor cores. The codes of BK columns are loaded before the wait in ``begin``."""
    BYTES: tl.constexpr = K if BITS == 8 else (K + 2 * HALF - 1) // (2 * HALF) * HALF
    a = _codes(codes, n, N, 0, K, BYTES, BK, BITS)
    scale = _scales(scales, n, N, 0, K, BK, HALF) if BITS == 4 else a
    factor = tl.load(scales + n, n < N, other=0.0) if BITS == 8 else n
    begin(PDL)
    sums = _sums(x, _raw(a, PDL), scale, 0, K, BK, BITS, HALF)
    for first in tl.static_range(BK, K, BK):
        a = _codes(codes, n, N, first, K, BYTES, BK, BITS)
        scale = _scales(scales, n, N, first, K, BK, HALF) if BITS == 4 else a
        sums += _sums(x, a, scale, first, K, BK, BITS, HALF)
    o = tl.sum(sums, 1)
    if BITS == 8:
        o *= factor
    return o


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
    if APART == 0:
        o = _of_one(x, codes, scales, n, N, K, BN, BK, BITS, HALF, PDL)
        store_activated(o, y, gate, n, n < N, part, RELU_SQUARED, GATE)
    else:
        if BYTES % 16 == 0:
            prefetch(codes, block.to(tl.int64) * (BN * BYTES), BN * BYTES, N.to(tl.int64) * BYTES, WARPS, PDL)
        begin(PDL)
        m = tl.program_id(1) * BM + tl.arange(0, BM)
        if BITS == 8:
            o = _int8(x, codes, n, m, N, R, K, BN, BM, BK, STAGES, APART)
            o *= tl.load(scales + n, n < N, other=0.0)[:, None]
        else:
            o = _int4(x, codes, scales, n, m, N, R, K, BN, BM, HALF, STAGES, APART)
        to = m.to(tl.int64)[None, :] * N + n[:, None]
        store_activated(o, y, gate, to, (n < N)[:, None] & (m < R)[None, :], part, RELU_SQUARED, GATE)


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
