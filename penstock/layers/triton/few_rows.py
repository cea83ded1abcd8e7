"""Kernels of decode steps: linear maps with few rows, and the operations between them. Each row is the only token of its sequence.

The time of a linear map with few rows is the time to read its weights. A program of ``penstock_products`` reads BN rows of a weight once.
The order of its sums depends only on the sizes of the weight, so a row does not depend on the other rows, to the bit.

PDL: the launch may begin while the previous kernel runs (programmatic dependent launch). Until ``begin`` has waited for that kernel, a
program only reads weights, or prefetches them to the L2 cache.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from ...gpu.tiles import uniform
from .token_shift import tanh

WARPS = 4  # per program


@triton.jit
def prefetch(x, first, COUNT: tl.constexpr, size, WARPS: tl.constexpr, PDL: tl.constexpr):
    """Prefetch the first COUNT of the ``size`` elements of x to the L2 cache, an equal share per warp.

    The instruction requires multiples of 16 bytes. x is aligned to 16 bytes.
    """
    BYTES: tl.constexpr = COUNT * (x.dtype.element_ty.primitive_bitwidth // 8) // WARPS
    if PDL and BYTES % 16 == 0:
        if (size >= COUNT) & (size % 8 == 0):
            _prefetch(x, first, COUNT, size, BYTES, WARPS)


@triton.jit
def _prefetch(x, first, COUNT: tl.constexpr, size, BYTES: tl.constexpr, WARPS: tl.constexpr):
    share = tl.arange(0, 32 * WARPS) // 32 * (COUNT // WARPS)
    at = (x + tl.minimum(first.to(tl.int64) + share, size - COUNT // WARPS)).to(tl.int64)
    asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l,r", [at, tl.full([32 * WARPS], BYTES, tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def begin(PDL: tl.constexpr):
    """Allow the next kernel to begin, and wait for the previous kernel."""
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def selected(i, x0, x1, x2, x3, x4, COUNT: tl.constexpr):
    """Tensor ``i`` of COUNT."""
    x = x0
    if COUNT > 1:
        if i == 1:
            x = x1
    if COUNT > 2:
        if i == 2:
            x = x2
    if COUNT > 3:
        if i == 3:
            x = x3
    if COUNT > 4:
        if i == 4:
            x = x4
    return x


@triton.jit
def _product(
    x, w, n, m, N, R, w_n, w_k,
    K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Rows n of w times rows m of x: [BN,BM]. With APART = 4, each of the 4 warps sums over its own blocks of K."""
    s = tl.arange(0, APART)[:, None, None] * BK
    k = tl.arange(0, BK)[None, None, :]
    weights = w + n.to(tl.int64)[None, :, None] * w_n
    inputs = x + m[None, :, None] * K
    there = (n < N)[None, :, None]
    given = (m < R)[None, :, None]
    if APART > 1:
        sums = tl.zeros([APART, BN, BM], tl.float32)
    else:
        sums = tl.zeros([BN, BM], tl.float32)
    for block in tl.range(0, (K + APART * BK - 1) // (APART * BK), num_stages=STAGES):
        at = block * (APART * BK) + s + k
        if K % (APART * BK) == 0:
            a = tl.load(weights + at * w_k, there, other=0.0)
            b = tl.load(inputs + at, given, other=0.0)
        else:
            a = tl.load(weights + at * w_k, there & (at < K), other=0.0)
            b = tl.load(inputs + at, given & (at < K), other=0.0)
        if APART > 1:
            sums = tl.dot(a, tl.permute(b, (0, 2, 1)), sums, input_precision="ieee")
        else:
            sums = tl.dot(tl.reshape(a, [BN, BK]), tl.trans(tl.reshape(b, [BM, BK])), sums, input_precision="ieee")
    if APART > 1:
        for _ in tl.static_range(2):  # two sums of two values each: their order does not depend on the layout
            sums = tl.sum(tl.reshape(sums, [2, sums.shape[0] // 2, BN, BM]), 0)
    return tl.reshape(sums, [BN, BM])


@triton.jit
def store_activated(o, y, gate, to, here, part, RELU_SQUARED: tl.constexpr, GATE: tl.constexpr):
    """Store o to y at ``to``; with RELU_SQUARED relu(o)^2 of part 0, with GATE times sigmoid(gate)."""
    if RELU_SQUARED:
        positive = tl.where(o < 0, 0.0, o)  # keeps NaN
        o = tl.where(part == 0, positive * positive, o)
    if GATE:
        o *= tl.sigmoid(tl.load(gate + to, here, other=0.0).to(tl.float32))
    tl.store(y + to, o.to(y.dtype.element_ty), here)


@triton.jit(do_not_specialize=["R"])
def penstock_products(
    x0, x1, x2, x3, x4,  # [R,K]
    w0, w1, w2, w3, w4,  # [N,K]; with ``COLUMNS`` w0 is [K,N]
    y0, y1, y2, y3, y4,  # [R,N]
    gate,  # [R,n0]
    n0, n1, n2, n3, n4,
    b1, b2, b3, b4,  # the first block of each part
    R,
    K: tl.constexpr, PARTS: tl.constexpr, RELU_SQUARED: tl.constexpr, COLUMNS: tl.constexpr, GATE: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, APART: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y_i = x_i W_i^T in one grid. RELU_SQUARED: y_0 becomes relu(y_0)^2. GATE: y_0 is multiplied by sigmoid(gate).

    Reads x_i [R,K], W_i [N,K], gate [R,N]. Writes y_i [R,N]. Program (BN rows of a weight, BM rows of x).
    """
    block = tl.program_id(0)
    part = block * 0
    if PARTS > 1:
        part = (block >= b1).to(tl.int32) + (block >= b2).to(tl.int32) + (block >= b3).to(tl.int32) + (block >= b4).to(tl.int32)
        block -= selected(part, part * 0, b1, b2, b3, b4, PARTS)
    x = selected(part, x0, x1, x2, x3, x4, PARTS)
    w = selected(part, w0, w1, w2, w3, w4, PARTS)
    y = selected(part, y0, y1, y2, y3, y4, PARTS)
    N = selected(part, n0, n1, n2, n3, n4, PARTS)
    n = block * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    prefetch(w, block.to(tl.int64) * (BN * K), BN * K, N.to(tl.int64) * K, WARPS, PDL)
    begin(PDL)
    if COLUMNS and PARTS == 1:
        o = _product(x, w, n, m, N, R, 1, N, K, BN, BM, BK, STAGES, APART)
    elif COLUMNS:
        if part == 0:
            o = _product(x, w, n, m, N, R, 1, N, K, BN, BM, BK, STAGES, APART)
        else:
            o = _product(x, w, n, m, N, R, K, 1, K, BN, BM, BK, STAGES, APART)
    else:
        o = _product(x, w, n, m, N, R, K, 1, K, BN, BM, BK, STAGES, APART)
    to = m[None, :] * N + n[:, None]
    store_activated(o, y, gate, to, (n < N)[:, None] & (m < R)[None, :], part, RELU_SQUARED, GATE)


@triton.jit(do_not_specialize=["R"])
def penstock_low_rank(
    hidden,  # [R,PARTS,M]
    up,  # [PARTS,M,C]
    mu0, mu1, mu2, mu3, mu4,  # [C]
    x, before,  # [R,C], the token and the previous one
    y,  # [PARTS,R,C]; with ``DECAY`` [R,C] float32
    R, C,
    PARTS: tl.constexpr, M: tl.constexpr, DECAY: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y_i = x + (before - x) m_i, m_i = mu_i + tanh(hidden_i) up_i; with ``DECAY`` y = -exp(m_0).

    Reads hidden [R,PARTS,M], up [PARTS,M,C], mu_i [C], x and before [R,C]. Writes y [PARTS,R,C]. Program (BC channels, part i, BR tokens).
    """
    i = tl.program_id(1)
    mu = selected(i, mu0, mu1, mu2, mu3, mu4, PARTS)
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    m = tl.arange(0, BM)
    up += i.to(tl.int64) * M * C
    high = tl.load(up + m[:, None] * C + c[None, :], (m < M)[:, None] & (c < C)[None, :], other=0.0)
    base = tl.load(mu + c, c < C, other=0.0)
    begin(PDL)
    low = tl.load(hidden + (r[:, None] * PARTS + i) * M + m[None, :], (r < R)[:, None] & (m < M)[None, :], other=0.0)
    low = tanh(low.to(tl.float32)).to(low.dtype)
    factor = tl.dot(low, high, input_precision=PRECISION) + base.to(tl.float32)[None, :]
    at = r[:, None] * C + c[None, :]
    here = (r < R)[:, None] & (c < C)[None, :]
    if DECAY:
        tl.store(y + at, -tl.exp(factor), here)
    else:
        now = tl.load(x + at, here, other=0.0).to(tl.float32)
        step = tl.load(before + at, here, other=0.0).to(tl.float32) - now
        tl.store(y + i.to(tl.int64) * R * C + at, (now + step * factor).to(y.dtype.element_ty), here)


@triton.jit
def summed(x, y, total, at, here, ADD: tl.constexpr):
    """Values of x or, with ADD, of x + y, rounded to the dtype of ``total``."""
    values = tl.load(x + at, here, other=0.0)
    if ADD:
        added = values.to(tl.float32) + tl.load(y + at, here, other=0.0).to(tl.float32)
        values = added.to(total.dtype.element_ty)
    return values


@triton.jit
def centred(values, mean, here, CENTRE: tl.constexpr):
    """x in float32; with CENTRE, minus the mean."""
    values = values.to(tl.float32)
    if CENTRE:
        values = tl.where(here, values - mean, 0.0)
    return values


@triton.jit
def scaled(values, scale, weight, bias, BIAS: tl.constexpr):
    """A norm in float32, from centred values and the inverse of their deviation. ``weight`` and ``bias`` are values of the columns."""
    values *= scale
    values *= weight.to(tl.float32)
    if BIAS:
        values += bias.to(tl.float32)
    return values


@triton.jit
def moments(values, here, C, eps, CENTRE: tl.constexpr):
    """The mean of the C values of a row (0 without CENTRE), and the reciprocal of their deviation."""
    mean = 0.0
    if CENTRE:
        mean = tl.sum(values.to(tl.float32), 0) / C
    values = centred(values, mean, here, CENTRE)
    return mean, tl.rsqrt(tl.sum(values * values, 0) / C + eps)


@triton.jit
def summed_norm(
    x, y, total, weight, bias, r, c, C, eps, ADD: tl.constexpr, CENTRE: tl.constexpr, BIAS: tl.constexpr, STORE: tl.constexpr
):  # fmt: skip
    """The norm of row r of x, or (``ADD``) of x + y, which is rounded and, with STORE, stored as ``total``. Float32. c are all columns.

    ``weight`` and ``bias`` are values of the columns.
    """
    here = c < C
    values = summed(x + r * C, y + r * C, total, c, here, ADD)
    if ADD and STORE:
        tl.store(total + r * C + c, values, here)
    mean, scale = moments(values, here, C, eps, CENTRE)
    return scaled(centred(values, mean, here, CENTRE), scale, weight, bias, BIAS)


@triton.jit
def interpolated(x, last, factor):
    """x + (last - x) factor in float32, where last is rounded to the dtype of x."""
    now = x.to(tl.float32)
    return now + (last.to(x.dtype).to(tl.float32) - now) * factor.to(tl.float32)


@triton.jit(do_not_specialize=["R"])
def penstock_shifted_norm(
    x, y,  # [R,C]
    total,  # [R,C], x + y
    weight, bias,  # [C]
    pool, slots,  # [P,C], row stride ``p_n``; [N]
    starts, ends,  # [R] int32; [N+1] int64
    normed, before,  # [R,C]
    mu0, mu1, mu2, mu3, mu4, mu5,  # [C]
    shifted,  # [COUNT,R,C]
    R, C, p_n, eps,
    ADD: tl.constexpr, CENTRE: tl.constexpr, BIAS: tl.constexpr, SLOTS: tl.constexpr, SINGLE: tl.constexpr, COUNT: tl.constexpr,
    COMPLEMENT: tl.constexpr, KEPT: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """z_t = norm(x_t + y_t), shifted_i = z_t + (z_{t-1} - z_t) mu_i.

    Reads x, y [R,C], weight, bias and mu_i [C], pool [P,C]. Writes total = x + y and z [R,C], shifted [COUNT,R,C], and rows of the pool.
    One program per token.

    ``starts`` is the index of the sequence that begins at a token, or -1. The previous token of a sequence's first token is its row of the
    pool. The norm of the last token replaces that row: the program of the first token reads the row, computes the last token's norm and
    writes it, so no program waits for another one. Every other program computes the norm of the previous token.
    SINGLE: each token is a sequence. COMPLEMENT: factors are 1 - mu_i. KEPT: ``normed`` and ``before`` are stored. For a negative slot, the
    previous token is 0 and no row changes.
    """
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    here = c < C
    scale = tl.load(weight + c, here, other=0.0)
    offset = tl.load(bias + c, here, other=0.0) if BIAS else scale
    m0 = tl.load(mu0 + c, here, other=0.0)
    m1 = tl.load(mu1 + c, here, other=0.0) if COUNT > 1 else m0
    m2 = tl.load(mu2 + c, here, other=0.0) if COUNT > 2 else m0
    m3 = tl.load(mu3 + c, here, other=0.0) if COUNT > 3 else m0
    m4 = tl.load(mu4 + c, here, other=0.0) if COUNT > 4 else m0
    m5 = tl.load(mu5 + c, here, other=0.0) if COUNT > 5 else m0
    begin(PDL)
    slot = r
    first = slot >= 0
    other = r  # the last token of the sequence that begins here, else the previous token
    if not SINGLE:
        slot = tl.load(starts + r).to(tl.int64)
        first = slot >= 0
        other = tl.load(ends + slot + 1, first, other=0) - 1
        other = tl.where(first, other, r - 1)
    if SLOTS:
        slot = tl.load(slots + slot, first, other=-1).to(tl.int64)
    row = pool + slot * p_n + c
    mine = here & uniform(slot >= 0)
    last = tl.load(row, mine, other=0.0).to(normed.dtype.element_ty)
    rounded = summed_norm(x, y, total, scale, offset, r, c, C, eps, ADD, CENTRE, BIAS, True).to(normed.dtype.element_ty)
    replaced = rounded
    if not SINGLE:
        replaced = summed_norm(x, y, total, scale, offset, other, c, C, eps, ADD, CENTRE, BIAS, False).to(normed.dtype.element_ty)
        last = tl.where(first, last, replaced)
    tl.store(row, replaced.to(pool.dtype.element_ty), mine)
    if KEPT:
        tl.store(normed + r * C + c, rounded, here)
        tl.store(before + r * C + c, last, here)
    for i in tl.static_range(COUNT):
        factor = (m0 if i == 0 else m1 if i == 1 else m2 if i == 2 else m3 if i == 3 else m4 if i == 4 else m5).to(tl.float32)
        if COMPLEMENT:
            mixed = interpolated(last, rounded, factor)
        else:
            mixed = interpolated(rounded, last, factor)
        tl.store(shifted + (i * R + r) * C + c, mixed.to(shifted.dtype.element_ty), here)
