"""Gluon kernels for a decode step of one token of RWKV-6 on Hopper. They begin with a norm; linear maps are in them or follow them.

All programs read the last token's norm, a row of the pool of shift states, so a later launch replaces it by ``normed``. Before the wait
for the previous kernel, only weights and the slot are read. No kernel of a graph writes weights; the slot is read again after the wait.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra import cuda

from ...gpu.hopper_tiles import async_load, meet, reinterpret
from ...gpu.ring import barriers, invalidate
from .few_rows import centred, interpolated, moments, scaled, selected, summed
from .hopper_products import UNIT, panels
from .token_shift import tanh

WARPS = gl.constexpr(8)  # per program of low-rank maps
PARTS = gl.constexpr(5)  # interpolations of a time mix
HEIGHT = gl.constexpr(64)  # rows of a weight per program of linear maps
GROUPS = gl.constexpr(2)  # blocks of 64 elements of K per stage
LINES = gl.constexpr(8)  # columns of a product


@gluon.jit
def likely(slots, P):
    """The index of a row of a pool [P,C] to read speculatively: an earlier kernel may still change the slot."""
    return gl.minimum(gl.maximum(gl.load(slots).to(gl.int64), 0), P - 1)


@gluon.jit
def of_slot(values, pool, p_n, slot, place, c, here):
    """The values of a slot's row, zeros for a negative slot. If the row is ``place``, they are ``values``, which were read before."""
    if slot != place:
        values = gl.load(pool + slot * p_n + c, mask=here & (slot >= 0), other=0.0)
    return values


@gluon.jit
def by_warps(a, b, BM: gl.constexpr):
    """Sums over K of W [K,BM] times b [K]: ``a`` [WARPS*BM,K/WARPS] stacks one part of K per warp.

    The parts of b are the columns of the right operand. Only the diagonal blocks of the product [WARPS*BM,WARPS] are used.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    parts = gl.permute(gl.reshape(b, [WARPS, b.shape[0] // WARPS]), [1, 0])
    o = mma_v2(a, gl.convert_layout(parts, gl.DotOperandLayout(1, mma, 2)), gl.zeros([WARPS * BM, WARPS], gl.float32, mma))
    block = gl.arange(0, WARPS * BM, gl.SliceLayout(1, mma))[:, None] // BM
    o = gl.where(block == gl.arange(0, WARPS, gl.SliceLayout(0, mma))[None, :], o, 0.0)
    return gl.sum(gl.reshape(gl.sum(o, 1), [WARPS, BM]), 0)


@gluon.jit(do_not_specialize=["P"])
def penstock_shifted_low_rank(
    x, y,  # [C]
    total,  # [C], x + y
    weight, bias,  # [C]
    pool, slots,  # [P,C], row stride ``p_n``; [1]
    normed,  # [C]
    mu,  # [C]
    down,  # [C,PARTS*M]
    up,  # [PARTS,M,C]
    mu0, mu1, mu2, mu3, mu4,  # [C]
    shifted,  # [PARTS,C]
    C, P, p_n, eps,
    ADD: gl.constexpr, CENTRE: gl.constexpr, BIAS: gl.constexpr, M: gl.constexpr, BM: gl.constexpr, BC: gl.constexpr, BN: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """y_i = z + (p - z) m_i, m_i = mu_i + tanh((z + (p - z) mu) down_i) up_i.

    Reads x, y [C], pool [P,C], mu [C], down [C,PARTS*M], up [PARTS,M,C], mu_i [C]. Writes total = x + y and z [C], y_i [PARTS,C]. Program
    (BN columns, part i).

    z is the norm of x + y, as ``penstock_shifted_norm`` computes it for single tokens, and p the row of the pool.

    No program waits for another one: each recomputes the norm and the tanh of its part. The weights are loaded to registers before the
    wait for the previous kernel. So shared memory is free for the weights of the next launch.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    dense: gl.constexpr = gl.BlockedLayout([8, 1], [BM // 8, 256 // BM], [WARPS, 1], [0, 1])
    line: gl.constexpr = gl.BlockedLayout([BC // (32 * WARPS)], [32], [WARPS], [0])
    single: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    own: gl.constexpr = gl.BlockedLayout([BM // 2, BN // (16 * WARPS)], [2, 16], [1, WARPS], [1, 0])  # sums over M within a warp
    dtype: gl.constexpr = x.dtype.element_ty
    i = gl.program_id(1)

    row = gl.arange(0, WARPS * BM, gl.SliceLayout(1, dense))[:, None]
    k = row // BM * (BC // WARPS) + gl.arange(0, BC // WARPS, gl.SliceLayout(0, dense))[None, :]
    first = gl.load(down + k * (PARTS * M) + i * M + row % BM, mask=(k < C) & (row % BM < M), other=0.0)
    first = gl.convert_layout(first, gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8]), 2))
    c = gl.arange(0, BC, line)
    n = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(0, own))
    m = gl.arange(0, BM, gl.SliceLayout(1, own))[:, None]
    here = c < C
    mine = n < C
    second = gl.load(up + (i * M + m) * C + n[None, :], mask=(m < M) & mine[None, :], other=0.0)
    scale = gl.load(weight + c, mask=here, other=0.0)
    n_scale = gl.load(weight + n, mask=mine, other=0.0)
    offset = scale
    n_offset = n_scale
    if BIAS:
        offset = gl.load(bias + c, mask=here, other=0.0)
        n_offset = gl.load(bias + n, mask=mine, other=0.0)
    share = gl.load(mu + c, mask=here, other=0.0)
    base = gl.load(selected(i, mu0, mu1, mu2, mu3, mu4, PARTS) + n, mask=mine, other=0.0)
    place = likely(slots, P)

    if PDL:
        cuda.gdc_wait()
    slot = gl.load(slots, volatile=PDL).to(gl.int64)  # reload: the value may be older than the wait
    last = gl.load(pool + place * p_n + c, mask=here, other=0.0)
    n_last = gl.load(pool + place * p_n + n, mask=mine, other=0.0)
    values = summed(x, y, total, c, here, ADD)
    n_values = summed(x, y, total, n, mine, ADD)
    mean, deviation = moments(values, here, C, eps, CENTRE)
    last = of_slot(last, pool, p_n, slot, place, c, here)
    n_last = of_slot(n_last, pool, p_n, slot, place, n, mine)
    rounded = scaled(centred(values, mean, here, CENTRE), deviation, scale, offset, BIAS).to(dtype)
    low = by_warps(first, interpolated(rounded, last, share).to(dtype), BM)
    low = tanh(gl.convert_layout(low, single).to(dtype).to(gl.float32)).to(dtype)
    low = gl.convert_layout(low, gl.SliceLayout(1, own)).to(gl.float32)
    factor = gl.sum(second.to(gl.float32) * low[:, None], 0) + base.to(gl.float32)
    rounded = scaled(centred(n_values, mean, mine, CENTRE), deviation, n_scale, n_offset, BIAS).to(dtype)
    gl.store(shifted + i * C + n, interpolated(rounded, n_last, factor).to(dtype), mask=mine)
    if i == 0:
        if ADD:
            gl.store(total + n, n_values, mask=mine)
        gl.store(normed + n, rounded, mask=mine)


@gluon.jit
def put_token(token, mu, x_s, STORE, C, eps, ADD: gl.constexpr, CENTRE: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr):
    """Wait for the previous kernel, and write the interpolation to ``x_s``, 64 columns per row. STORE: store the sum and its norm."""
    x, y, total, weight, bias, pool, slots, normed, P, p_n = token
    BLOCKS: gl.constexpr = x_s.shape[0] * LINES
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = x.dtype.element_ty
    c = gl.arange(0, BLOCKS * UNIT, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    here = c < C
    scale = gl.load(weight + c, mask=here, other=0.0)
    offset = scale
    if BIAS:
        offset = gl.load(bias + c, mask=here, other=0.0)
    share = gl.load(mu + c, mask=here, other=0.0)
    place = likely(slots, P)
    if PDL:
        cuda.gdc_wait()
    slot = gl.load(slots, volatile=PDL).to(gl.int64)  # reload: the value may be older than the wait
    last = gl.load(pool + place * p_n + c, mask=here, other=0.0)
    values = summed(x, y, total, c, here, ADD)
    mean, deviation = moments(values, here, C, eps, CENTRE)
    last = of_slot(last, pool, p_n, slot, place, c, here)
    rounded = scaled(centred(values, mean, here, CENTRE), deviation, scale, offset, BIAS).to(dtype)
    mixed = interpolated(rounded, last, share).to(dtype)
    reinterpret(x_s, x_s.dtype, [BLOCKS, UNIT], half).store(gl.reshape(mixed, [BLOCKS, UNIT]))
    fence_async_shared()
    meet()
    if STORE:
        if ADD:
            gl.store(total + c, values, mask=here)
        gl.store(normed + c, rounded, mask=here)


@gluon.jit
def ask(w_tiles, w_s, w_bars, n, i, there):
    """Start to load stage i of the weights from row n on."""
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    s = i % w_s.shape[0]
    stage = panels(w_s.index(s), [HEIGHT, GROUPS * UNIT], half)
    async_load(w_tiles, [n, i * (GROUPS * UNIT)], w_bars.index(s), stage, pred=there)


@gluon.jit
def ask_first(w_tiles, w_s, w_bars, n):
    """Start to load the weights from row n on into all stages of the ring."""
    for i in range(w_s.shape[0]):
        mbarrier.expect(w_bars.index(i), w_tiles.block_type.nbytes)
    meet()
    for i in range(w_s.shape[0]):
        ask(w_tiles, w_s, w_bars, n, i, True)


@gluon.jit
def add_up(w_tiles, y, n, N, x_s, w_s, w_bars, K: gl.constexpr, RELU_SQUARED: gl.constexpr):
    """Rows n to n + HEIGHT of the weight times x.

    The minimum width of a product is LINES columns, so a block of weights is multiplied by LINES consecutive blocks of x. Of the product
    for block j, only column j % LINES is used: there are LINES sums with one valid column each.
    """
    EACH: gl.constexpr = LINES // GROUPS  # stages for LINES blocks
    STAGES: gl.constexpr = w_s.shape[0]
    STEPS: gl.constexpr = K // (GROUPS * UNIT)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, LINES, 16])
    sums = ()
    for _ in gl.static_range(LINES):
        sums += (gl.zeros([HEIGHT, LINES], gl.float32, mma),)
    for at in range(K // (LINES * UNIT)):
        b = x_s.index(at).permute((1, 0))
        found = ()
        for step in gl.static_range(EACH):
            i = at * EACH + step
            s = i % STAGES
            mbarrier.wait(w_bars.index(s), (i // STAGES) & 1)
            w = w_s.index(s)
            o0 = warpgroup_mma(w.slice(0, HEIGHT), b, sums[GROUPS * step], is_async=True)
            o1 = warpgroup_mma(w.slice(HEIGHT, HEIGHT), b, sums[GROUPS * step + 1], is_async=True)
            found += warpgroup_mma_wait(0, [o0, o1])
            later = i + STAGES
            mbarrier.expect(w_bars.index(s), w_tiles.block_type.nbytes, pred=later < STEPS)
            meet()
            ask(w_tiles, w_s, w_bars, n, later, later < STEPS)
        sums = found
    o = sums[0]
    for j in gl.static_range(1, LINES):
        o = gl.where(gl.arange(0, LINES, gl.SliceLayout(0, mma))[None, :] == j, sums[j], o)
    o = gl.sum(o, 1)
    if RELU_SQUARED:
        positive = gl.where(o < 0, 0.0, o)  # keeps NaN
        o = positive * positive
    row = n + gl.arange(0, HEIGHT, gl.SliceLayout(1, mma))
    gl.store(y + row, o.to(y.dtype.element_ty), mask=row < N)


@gluon.jit(do_not_specialize=["P"])
def penstock_shifted_products(
    w0, w1,  # tiles [HEIGHT,64 GROUPS] of [N,K]
    x, y,  # [K]
    total,  # [K], x + y
    weight, bias,  # [K]
    pool, slots,  # [P,K], row stride ``p_n``; [1]
    normed,  # [K]
    mu0, mu1,  # [K]
    y0, y1,  # [N]
    n0, n1,
    b1,  # the first program of w1
    P, p_n, eps,
    K: gl.constexpr, ADD: gl.constexpr, CENTRE: gl.constexpr, BIAS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """y_0 = relu(W_0 (z + (p - z) mu_0))^2 and y_1 = W_1 (z + (p - z) mu_1): RWKV's channel mix.

    Reads x, y [K], pool [P,K], mu_i [K], W_i [N,K] as tiles [HEIGHT,64 GROUPS]. Writes total = x + y and z [K], y_i [N]. One program per
    tile of weights.

    z is the norm of x + y and p the row of the pool. Each program computes the norm itself, which saves a launch. PDL: all stages of the
    ring of weights are loaded before the wait for the previous kernel.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    block = gl.program_id(0)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_s = gl.allocate_shared_memory(w0.dtype, [BLOCKS // LINES, LINES, UNIT], half)
    w_s = gl.allocate_shared_memory(w0.dtype, [STAGES, GROUPS * HEIGHT, UNIT], half)
    w_bars = barriers(STAGES, 1)
    fence_async_shared()
    meet()
    n = block * HEIGHT
    mu = mu0
    if block < b1:
        ask_first(w0, w_s, w_bars, n)
    else:
        n = (block - b1) * HEIGHT
        mu = mu1
        ask_first(w1, w_s, w_bars, n)
    token = (x, y, total, weight, bias, pool, slots, normed, P, p_n)
    put_token(token, mu, x_s, block == 0, K, eps, ADD, CENTRE, BIAS, PDL)
    if block < b1:
        add_up(w0, y0, n, n0, x_s, w_s, w_bars, K, True)
    else:
        add_up(w1, y1, n, n1, x_s, w_s, w_bars, K, False)
    invalidate((w_bars,))
