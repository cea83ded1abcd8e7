"""What a chunk of KDA needs besides the state, on Hopper with float32 inputs, in Gluon: ``prepare.py`` in three bfloat16 parts.

A_q and A_k are sums over dyadic levels whose factors are at most 1, so the time does not depend on the decays. Decays are sums of
logarithms in two parts, multiples of 2^-8 and rests: sums of multiples are exact, so their differences are accurate for every decay. The
factor of a token in a level is the exponential of one such sum: up to it from the middle (second halves), or after it up to the middle.

Products of levels are six of parts. Those of a block of W key channels are summed in registers: tensor cores cut an accumulator off at each
step. Blocks of q and g are loaded into a ring of two, k is in shared memory, and k o w_{s+1} ... w_64 takes its place. With K = 128 two
programs share a multiprocessor. The parts of a block, of columns of levels 16 and 32 and then of what is stored, share memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....gpu.hopper_decays import COARSE
from ....gpu.hopper_tiles import async_load, in_three, meet, reinterpret, unknown, zero_rows_from
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import chunk_of_slot
from .anchored import power
from .anchored_inverse import inverse
from .inverse import inverted_blocks, on_diagonal, store_blocks
from .layouts import GROUPS, ROWS, C, by_group, by_token, of_partner, spread
from .pairs import left_operand, right_operand
from .parts import finished, parts_at, product_from_registers, product_of_parts, send_parts, store_parts, transposed
from .prepare import assembled, far, memory_of_factors, near, no_pairs

W = gl.constexpr(32)
"""Key channels of a block."""
STAGES = gl.constexpr(2)
LEAST = gl.constexpr(-177.445678223346)
"""``GONE`` as a natural logarithm."""
LOG2E = gl.constexpr(1.44269502162933)
LOG2E_REST = gl.constexpr(1.925963033500e-8)
"""log2(e) in two parts of float32."""


@gluon.jit
def in_two_sums(g):
    """Log decays g as log2 decays in two parts, multiples of 2^-8 and rests. NaN stays."""
    g = gl.where(g < LEAST, LEAST, g)
    coarse = (g * LOG2E + COARSE) - COARSE
    return coarse, gl.fma(g, gl.full_like(g, LOG2E), -coarse) + g * LOG2E_REST


@gluon.jit
def store_sums_of_groups(g, coarse_s, rest_s):
    """Store the sums of a tile of log decays [C,W] over the tokens of each group, log2, in two parts [GROUPS,W]."""
    layout: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [4, 1], [1, 0])
    across: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    coarse, rest = in_two_sums(g.load(layout))
    coarse = gl.sum(gl.reshape(coarse, [GROUPS, ROWS, W]), 1)
    rest = gl.sum(gl.reshape(rest, [GROUPS, ROWS, W]), 1)
    coarse_s.store(gl.convert_layout(coarse, across, assert_trivial=True))
    rest_s.store(gl.convert_layout(rest, across, assert_trivial=True))


@gluon.jit
def sums_around(part, across: gl.constexpr):
    """From sums of groups [GROUPS,W]: those of all groups before each, of all after it, of all; of groups 1 and 2."""
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, across))[:, None]
    zero = gl.zeros([GROUPS, W], gl.float32, across)
    one_0 = part.slice(0, 1).load(across) + zero
    one_1 = part.slice(1, 1).load(across) + zero
    one_2 = part.slice(2, 1).load(across) + zero
    one_3 = part.slice(3, 1).load(across) + zero
    before = gl.where(group > 0, one_0, 0.0) + gl.where(group > 1, one_1, 0.0) + gl.where(group > 2, one_2, 0.0)
    after = gl.where(group < 3, one_3, 0.0) + gl.where(group < 2, one_2, 0.0) + gl.where(group < 1, one_1, 0.0)
    beside = gl.where(group == 3, one_2, 0.0), gl.where(group == 0, one_1, 0.0)
    return before, after, one_0 + one_1 + one_2 + one_3, beside


@gluon.jit
def store_factors(coarse_s, rest_s, factors_s, totals, scale):
    """From log2 decays of groups [GROUPS,W]: the factors of each group in memory, and the decays of the chunk at ``totals``."""
    across: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, across))[:, None]
    channel = gl.arange(0, W, gl.SliceLayout(0, across))[None, :]
    before, after, every, beside = sums_around(coarse_s, across)
    before_rest, after_rest, every_rest, beside_rest = sums_around(rest_s, across)
    decay = power((before, before_rest))
    factors_s[0].store(decay * scale)
    factors_s[1].store(decay)
    factors_s[2].store(power((after, after_rest)))
    factors_s[3].store(power((beside[0], beside_rest[0])))
    factors_s[4].store(power((beside[1], beside_rest[1])))
    gl.store(totals + channel + group * 0, power((every, every_rest)), mask=group == 0)


@gluon.jit
def pairs_of_parts(x, y, inner: gl.constexpr):
    """The products x y^T within groups of two tiles in three parts."""
    D = gl.zeros([GROUPS, ROWS, ROWS], gl.float32, inner)
    for most in gl.static_range(2, -1, -1):
        for m in gl.static_range(most + 1):
            D = mma_v2(left_operand(x[most - m], inner), right_operand(y[m], inner), D)
    return D


@gluon.jit
def near_pairs(q_s, X, g, s, D_q, D_k):
    """Add the products of W channels within groups to the blocks below the diagonal of A_q and A_k.

    X, g [C,W]: k and log decays; q is tile s of ``q_s``, loaded again for each level: it would take registers that spill meanwhile. Returns
    also the sums of log2 decays up to each token of a group, and after it, in two parts.
    """
    layout: gl.constexpr = by_token(W)
    inner: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, inner)))[None, :, None]
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, inner)))[None, None, :]
    i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    through, through_rest = in_two_sums(g)
    every, every_rest = through, through_rest
    for n in gl.static_range(4):
        second = (i >> n) & 1 == 1
        sums = gl.where(second, through, every - through)
        sums_rest = gl.where(second, through_rest, every_rest - through_rest)
        factor = power((sums, sums_rest))
        split = ((a ^ b) >> n == 1) & (a > b)
        x = in_three(X * factor, gl.bfloat16)
        D_k += gl.where(split, pairs_of_parts(x, x, inner), 0.0)
        Q = q_s.index(unknown(s)).load(layout)
        D_q += gl.where(split, pairs_of_parts(in_three(Q * factor, gl.bfloat16), x, inner), 0.0)
        across = of_partner(every, n, layout)
        across_rest = of_partner(every_rest, n, layout)
        through += gl.where(second, across, 0.0)
        through_rest += gl.where(second, across_rest, 0.0)
        every += across
        every_rest += across_rest
    return D_q, D_k, (through, through_rest), (every - through, every_rest - through_rest)


@gluon.jit
def near_of_parts(x, near_s, acc):
    """``acc`` plus the products of level 16 of rows x [C,W] and columns in three parts, see ``near`` of ``prepare.py``."""
    paired: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2, 1], [1, 16, 8])
    x = in_three(x, gl.bfloat16)
    y = gl.zeros([2, 2 * ROWS, ROWS], gl.float32, paired)
    for most in gl.static_range(2, -1, -1):
        for m in gl.static_range(most + 1):
            y = near(x[most - m], near_s.index(m), y, paired)
    return acc + y


@gluon.jit
def far_of_parts(x, far_s, acc):
    """``acc`` plus the products of level 32 of rows x [C,W] and columns in three parts, the last tiles of ``far_s``."""
    narrow: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    x = in_three(x, gl.bfloat16)
    y = gl.zeros([C, 2 * ROWS], gl.float32, narrow)
    for most in gl.static_range(2, -1, -1):
        for m in gl.static_range(most + 1):
            y = far(x[most - m], far_s.index(3 + m), 0, 2 * ROWS, y, narrow)
    return acc + y


@gluon.jit
def columns_of_two(x, y):
    """The columns of x, then those of y: [C,2 W]."""
    return gl.reshape(gl.permute(gl.join(x, y), (0, 2, 1)), [C, 2 * W])


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "b_b", "b_t", "b_h"])
def penstock_kda_prepare_float32_sm90(
    q_tiles, k_tiles, g_tiles, kt_tiles, qt_tiles, bt_tiles, a_tiles, r_tiles, totals, beta, cu_seqlens, scale, N, T, H, R, b_b, b_t, b_h,
    K: gl.constexpr, PACKED: gl.constexpr, REMOVALS: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """T = (I + diag(beta) A_k)^-1, A = A_q T, B^T = T^T (k o w_{s+1} ... w_64), q and k o w_1 ... w_t, total = w_1 ... w_64.

    Reads q, k [B,T,H / R,K] and g [B,T,H,K] as TMA tiles [C,W] and beta [B,T,H] by strides, all in float32. Writes the parts of q, k, B^T
    [slots,H,3 C,K], of A and, with REMOVALS, A_k T [slots,H,3 C,C] in bfloat16, and total [slots,H,K] in float32. Program (slot of a chunk,
    head): all of it. PIECE: only chunks of C tokens are processed.
    """
    gl.static_assert(q_tiles.dtype == gl.float32)
    BLOCKS: gl.constexpr = K // W
    inner: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    block: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    layout: gl.constexpr = by_token(W)
    grouped: gl.constexpr = by_group(W)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    clean: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])

    slot = gl.program_id(0) // H
    h = gl.program_id(0) % H
    b, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    if PIECE > 0:
        if left < C:
            return
    row = (b * T + begin).to(gl.int32)
    place = slot.to(gl.int64) * H + h
    at = (place * (3 * C)).to(gl.int32)
    k_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, C, W], k_tiles.layout)
    q_s = gl.allocate_shared_memory(gl.float32, [STAGES, C, W], q_tiles.layout)
    g_s = gl.allocate_shared_memory(gl.float32, [STAGES, C, W], g_tiles.layout)
    parts_s = gl.allocate_shared_memory(gl.bfloat16, [6, C, W], qt_tiles.layout)
    near_s = reinterpret(parts_s, gl.bfloat16, [6, 2, 2 * ROWS, W], gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0]))
    coarse_s = gl.allocate_shared_memory(gl.float32, [GROUPS, W], plain2)
    rest_s = gl.allocate_shared_memory(gl.float32, [GROUPS, W], plain2)
    factors_s = memory_of_factors(W)
    loaded = barriers(BLOCKS, 1)
    fence_async_shared()
    meet()
    for p in gl.static_range(BLOCKS):
        mbarrier.expect(loaded.index(p), 3 * q_tiles.block_type.nbytes)
        async_load(k_tiles, [row, h // R * K + p * W], loaded.index(p), k_s.index(p))
        if p < STAGES:
            async_load(q_tiles, [row, h // R * K + p * W], loaded.index(p), q_s.index(p))
            async_load(g_tiles, [row, h * K + p * W], loaded.index(p), g_s.index(p))
    totals += place * K
    D_q, near_q, far_q = no_pairs()
    D_k, near_k, far_k = no_pairs()
    own = gl.zeros([C], gl.float32, gl.SliceLayout(1, layout))
    for p in range(BLOCKS):
        s = p % STAGES
        mbarrier.wait(loaded.index(p), 0)
        if left < C:
            zero_rows_from(q_s.index(s), left, clean)
            zero_rows_from(k_s.index(p), left, clean)
            zero_rows_from(g_s.index(s), left, clean)
            meet()
        store_sums_of_groups(g_s.index(s), coarse_s, rest_s)
        meet()
        store_factors(coarse_s, rest_s, factors_s, totals + p * W, scale)
        X = k_s.index(p).load(layout)
        own += gl.sum(q_s.index(s).load(layout) * X, 1)
        D_q, D_k, through, after = near_pairs(q_s, X, g_s.index(s).load(layout), s, D_q, D_k)
        remaining = X * power(after)
        decay = power(through)
        Q = q_s.index(unknown(s)).load(layout) * decay
        X *= decay
        tma.store_wait(0)
        fence_async_shared()
        meet()  # all warps have loaded q, k and g and stored factors, and the copies of the last block are done
        if p + STAGES < BLOCKS:
            async_load(q_tiles, [row, h // R * K + (p + STAGES) * W], loaded.index(p + STAGES), q_s.index(s))
            async_load(g_tiles, [row, h * K + (p + STAGES) * W], loaded.index(p + STAGES), g_s.index(s))
        k_s.index(p).store(remaining * spread(factors_s[2], W, layout, grouped))
        store_parts(gl.reshape(remaining, [2, 2 * ROWS, W]), parts_at(near_s, 0, 3))
        store_parts(remaining * spread(factors_s[4], W, layout, grouped), parts_at(parts_s, 3, 3))
        meet()
        near_q = near_of_parts(Q, near_s, near_q)
        near_k = near_of_parts(X, near_s, near_k)
        rows = spread(factors_s[3], W, layout, grouped)
        far_q = far_of_parts(Q * rows, parts_s, far_q)
        far_k = far_of_parts(X * rows, parts_s, far_k)
        meet()  # all warps have multiplied the columns
        store_parts(Q * spread(factors_s[0], W, layout, grouped), parts_at(parts_s, 0, 3))
        store_parts(X * spread(factors_s[1], W, layout, grouped), parts_at(parts_s, 3, 3))
        fence_async_shared()
        meet()
        send_parts(parts_at(parts_s, 0, 3), qt_tiles, at, p * W)
        send_parts(parts_at(parts_s, 3, 3), kt_tiles, at, p * W)
    of_k = (D_k, near_k, far_k)
    tma.store_wait(0)
    meet()  # the ring and the parts are free

    own_s = gl.allocate_shared_memory(gl.float32, [C], plain)
    own_s.store(own)
    n_s = gl.allocate_shared_memory(gl.float32, [ROWS * ROWS, GROUPS], plain)
    d_s = gl.allocate_shared_memory(gl.float32, [ROWS, GROUPS * ROWS], plain2)
    n_parts = gl.allocate_shared_memory(gl.bfloat16, [3, C, C], a_tiles.layout)
    t_parts = gl.allocate_shared_memory(gl.bfloat16, [3, C, C], a_tiles.layout)
    N_s, T_s = parts_at(n_parts, 0, 3), parts_at(t_parts, 0, 3)
    i = gl.arange(0, C, gl.SliceLayout(1, wide))
    j = gl.arange(0, C, gl.SliceLayout(0, wide))
    rates = beta + b * b_b + begin * b_t + h.to(gl.int64) * b_h
    rates = gl.load(rates + i.to(gl.int64) * b_t, mask=i < left, other=0.0).to(gl.float32)
    pairs = assembled(of_k, narrow, wide)
    store_parts(pairs * -rates[:, None], N_s)
    rates = gl.convert_layout(gl.reshape(rates, [GROUPS, ROWS]), gl.SliceLayout(2, inner))
    store_blocks(of_k[0] * -gl.expand_dims(rates, 2), n_s)
    meet()
    inverse(on_diagonal(inverted_blocks(n_s, d_s), wide), T_s, N_s)
    if REMOVALS:
        removals_s = gl.allocate_shared_memory(gl.bfloat16, [3, C, C], r_tiles.layout)
        store_parts(product_from_registers(pairs, T_s), parts_at(removals_s, 0, 3))
    A = assembled((D_q, near_q, far_q), narrow, wide)
    A = gl.where(i[:, None] == j[None, :], own_s.load(gl.SliceLayout(1, wide))[:, None], A) * scale
    store_parts(product_from_registers(A, T_s), N_s)
    fence_async_shared()
    meet()
    send_parts(parts_at(n_parts, 0, 3), a_tiles, at, 0)
    if REMOVALS:
        send_parts(parts_at(removals_s, 0, 3), r_tiles, at, 0)

    for n in gl.static_range(K // C):
        tma.store_wait(0)
        meet()  # all warps have multiplied, and the copies are done
        keys, solved = parts_at(n_parts, unknown(left * 0), 3), parts_at(t_parts, unknown(left * 0), 3)
        store_parts(columns_of_two(k_s.index(2 * n).load(block), k_s.index(2 * n + 1).load(block)), keys)
        fence_async_shared()
        meet()
        B = finished((product_of_parts(transposed(solved), keys, wide),), ())[0]
        meet()  # all warps have multiplied
        store_parts(B, keys)
        fence_async_shared()
        meet()
        send_parts(parts_at(n_parts, 0, 3), bt_tiles, at, n * C)
    tma.store_wait(0)
    # until here these are read by copies: without this, later allocations get their memory
    n_parts._keep_alive()
    if REMOVALS:
        removals_s._keep_alive()
    invalidate((loaded,))
