"""Linear maps of one token on Hopper whose inputs are interpolations of its norm with that of the token before, in Gluon.

Each program computes the norm itself, after it has started to load its weights, in place of a launch that all programs wait for. For more
tokens this takes longer than that launch.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra import cuda

from ...gpu.hopper_tiles import meet
from .few_rows import centred, interpolated, likely, moments, of_slot, scaled, selected, summed
from .hopper_products import UNIT, panels

HEIGHT = gl.constexpr(64)  # weights of a program
GROUPS = gl.constexpr(2)  # blocks of 64 of K of a stage
LINES = gl.constexpr(8)  # columns of a product


@gluon.jit
def put_token(
    token, mu, x_s, STORE, C, eps, ADD: gl.constexpr, CENTRE: gl.constexpr, BIAS: gl.constexpr, COMPLEMENT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Wait for the kernel ahead, and put the interpolation into ``x_s``, 64 columns a row. STORE: the sum and its norm are stored."""
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
    place = likely(slots, 0, P)
    if PDL:
        cuda.gdc_wait()
    slot = gl.load(slots, volatile=PDL).to(gl.int64)  # not the value from before the wait
    last = gl.load(pool + place * p_n + c, mask=here, other=0.0)
    values = summed(x, y, total, c, here, ADD)
    mean, deviation = moments(values, here, C, eps, CENTRE)
    last = of_slot(last, pool, p_n, slot, place, c, here)
    rounded = scaled(centred(values, mean, here, CENTRE), deviation, scale, offset, BIAS).to(dtype)
    mixed = interpolated(rounded, last, share, COMPLEMENT).to(dtype)
    x_s._reinterpret(x_s.dtype, [BLOCKS, UNIT], half).store(gl.reshape(mixed, [BLOCKS, UNIT]))
    fence_async_shared()
    meet()
    if STORE:
        if ADD:
            gl.store(total + c, values, mask=here)
        gl.store(normed + c, rounded, mask=here)


@gluon.jit
def held(w, n, N, K: gl.constexpr, HELD: gl.constexpr):
    """The first HELD blocks of weights from row n on, as left operands in registers."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, LINES, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    row = n + gl.arange(0, HEIGHT, gl.SliceLayout(1, left))[:, None]
    w += row.to(gl.int64) * K + gl.arange(0, UNIT, gl.SliceLayout(0, left))[None, :]
    blocks = ()
    for j in gl.static_range(HELD):
        blocks += (gl.load(w + j * UNIT, mask=row < N, other=0.0),)
    return blocks


@gluon.jit
def ask(w_tiles, w_s, w_bars, n, i, SKIPPED: gl.constexpr, there):
    """Start to load stage i of weights from row n on, behind SKIPPED stages."""
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    s = i % w_s.shape[0]
    stage = panels(w_s.index(s), [HEIGHT, GROUPS * UNIT], half)
    tma.async_copy_global_to_shared(w_tiles, [n, (i + SKIPPED) * (GROUPS * UNIT)], w_bars.index(s), stage, pred=there)


@gluon.jit
def ask_first(w_tiles, w_s, w_bars, n, SKIPPED: gl.constexpr):
    """Start to load weights from row n on, as many stages as the ring has."""
    for i in range(w_s.shape[0]):
        mbarrier.expect(w_bars.index(i), w_tiles.block_type.nbytes)
    meet()
    for i in range(w_s.shape[0]):
        ask(w_tiles, w_s, w_bars, n, i, SKIPPED, True)


@gluon.jit
def add_up(w_tiles, blocks, y, n, N, x_s, w_s, w_bars, K: gl.constexpr, RELU_SQUARED: gl.constexpr):
    """Weights n to n + HEIGHT times x. ``blocks``: the first blocks of weights, if they are in registers.

    A product has LINES columns at least, and LINES blocks of x lie together, so a block of weights is multiplied by all of them. Of its
    product with block j, column j % LINES is used: there are LINES sums, each with one column that counts.
    """
    HELD: gl.constexpr = len(blocks)
    EACH: gl.constexpr = LINES // GROUPS  # stages for LINES blocks
    STAGES: gl.constexpr = w_s.shape[0]
    STEPS: gl.constexpr = K // (GROUPS * UNIT) - HELD // GROUPS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, LINES, 16])
    sums = ()
    for _ in gl.static_range(LINES):
        sums += (gl.zeros([HEIGHT, LINES], gl.float32, mma),)
    if HELD > 0:
        b = x_s.index(0).permute((1, 0))
        found = ()
        for j in gl.static_range(LINES):
            found += (warpgroup_mma(blocks[j], b, sums[j], is_async=True),)
        sums = warpgroup_mma_wait(0, found)
    for at in range(HELD // LINES, K // (LINES * UNIT)):
        b = x_s.index(at).permute((1, 0))
        found = ()
        for step in gl.static_range(EACH):
            i = (at - HELD // LINES) * EACH + step
            s = i % STAGES
            mbarrier.wait(w_bars.index(s), (i // STAGES) & 1)
            w = w_s.index(s)
            o0 = warpgroup_mma(w.slice(0, HEIGHT), b, sums[GROUPS * step], is_async=True)
            o1 = warpgroup_mma(w.slice(HEIGHT, HEIGHT), b, sums[GROUPS * step + 1], is_async=True)
            found += warpgroup_mma_wait(0, [o0, o1])
            later = i + STAGES
            mbarrier.expect(w_bars.index(s), w_tiles.block_type.nbytes, pred=later < STEPS)
            meet()
            ask(w_tiles, w_s, w_bars, n, later, HELD // GROUPS, later < STEPS)
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
    w0, w1, w2, w3, w4,  # tiles [HEIGHT,64 GROUPS] of [N,K]
    x, y,  # [K]
    total,  # [K], x + y
    weight, bias,  # [K]
    pool, slots,  # [P,K], rows ``p_n`` apart; [1]
    normed,  # [K]
    mu0, mu1, mu2, mu3, mu4,  # [K]
    weight0, weight1, weight2, weight3, weight4,  # the same [N,K]
    y0, y1, y2, y3, y4,  # [N]
    n0, n1, n2, n3, n4,
    b1, b2, b3, b4,  # where the programs of each part begin
    P, p_n, eps,
    K: gl.constexpr, ADD: gl.constexpr, CENTRE: gl.constexpr, BIAS: gl.constexpr, COMPLEMENT: gl.constexpr, PARTS: gl.constexpr,
    RELU_SQUARED: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y_i = W_i (z + (p - z) mu_i) by tile of weights: z is the norm of x + y, p the row of the pool. With COMPLEMENT, 1 - mu_i for mu_i.

    RELU_SQUARED: y_0 is relu(y_0)^2. PDL: the kernels ahead do not write weights and factors, which are read before the wait for them: as
    many blocks of weights as the ring has stages and, into registers, HELD before these.
    All programs read the row of the pool, so a later launch replaces it by ``normed``.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    block = gl.program_id(0)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_s = gl.allocate_shared_memory(w0.dtype, [BLOCKS // LINES, LINES, UNIT], half)
    w_s = gl.allocate_shared_memory(w0.dtype, [STAGES, GROUPS * HEIGHT, UNIT], half)
    w_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in range(STAGES):
        mbarrier.init(w_bars.index(i), count=1)
    fence_async_shared()
    meet()
    part = block * 0
    if PARTS > 1:
        part = (block >= b1).to(gl.int32) + (block >= b2).to(gl.int32) + (block >= b3).to(gl.int32) + (block >= b4).to(gl.int32)
    n = (block - selected(part, part * 0, b1, b2, b3, b4, PARTS)) * HEIGHT
    if part == 0:
        ask_first(w0, w_s, w_bars, n, HELD // GROUPS)
    if PARTS > 1:
        if part == 1:
            ask_first(w1, w_s, w_bars, n, HELD // GROUPS)
    if PARTS > 2:
        if part == 2:
            ask_first(w2, w_s, w_bars, n, HELD // GROUPS)
    if PARTS > 3:
        if part == 3:
            ask_first(w3, w_s, w_bars, n, HELD // GROUPS)
    if PARTS > 4:
        if part == 4:
            ask_first(w4, w_s, w_bars, n, HELD // GROUPS)
    w = selected(part, weight0, weight1, weight2, weight3, weight4, PARTS)
    blocks = held(w, n, selected(part, n0, n1, n2, n3, n4, PARTS), K, HELD)
    token = (x, y, total, weight, bias, pool, slots, normed, P, p_n)
    mu = selected(part, mu0, mu1, mu2, mu3, mu4, PARTS)
    put_token(token, mu, x_s, block == 0, K, eps, ADD, CENTRE, BIAS, COMPLEMENT, PDL)
    if part == 0:
        add_up(w0, blocks, y0, n, n0, x_s, w_s, w_bars, K, RELU_SQUARED)
    if PARTS > 1:
        if part == 1:
            add_up(w1, blocks, y1, n, n1, x_s, w_s, w_bars, K, False)
    if PARTS > 2:
        if part == 2:
            add_up(w2, blocks, y2, n, n2, x_s, w_s, w_bars, K, False)
    if PARTS > 3:
        if part == 3:
            add_up(w3, blocks, y3, n, n3, x_s, w_s, w_bars, K, False)
    if PARTS > 4:
        if part == 4:
            add_up(w4, blocks, y4, n, n4, x_s, w_s, w_bars, K, False)
