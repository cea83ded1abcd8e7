"""The chunkwise backward kernel for decays per channel on Hopper, in Gluon, for float32 inputs. One program per chunk and head.

The formulas are those of ``channel_backward``. Operands are sums of float16 tiles times powers of two, see ``parts``; what is between
two products is stored in float32: the products Y of the levels, which overwrite the parts of X, and the terms of the states.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, exp2, meet, most, most_of_both, reinterpret, zeroed_behind
from ....gpu.tiles import powers_of_two
from ..heads import SMALL
from .backward_memory import LEVELS
from .dyadic import (
    GROUPS,
    ROWS,
    C,
    R,
    around,
    between,
    blocks,
    chunk_at,
    decays,
    flat,
    grouped,
    in_blocks,
    in_second_half,
    near_levels,
    spread,
    store_zeros,
)
from .parts import LEAST, halved, parts_of, store_parts, times, turned
from .sums import KINDS, collected, from_groups, grouped_row, store_sum


@gluon.jit
def block_product(a, b, c, PARTS: gl.constexpr, left: gl.constexpr, right: gl.constexpr):
    """c + a b^T within the four blocks of ROWS tokens of tiles [C,K], given by their parts."""
    a_0 = blocks(a[0], left, False)
    b_0 = blocks(b[0], right, True)
    if PARTS > 1:
        c = mma_v2(blocks(a[1], left, False), b_0, c)
        c = mma_v2(a_0, blocks(b[1], right, True), c)
    return mma_v2(a_0, b_0, c)


@gluon.jit(do_not_specialize=["N", "T"])
def penstock_channel_bwd_float32_sm90(
    q_tiles, k_tiles, v_tiles, o_tiles, S, dS, g, u, dq, dk, dv, dg, du, weights, rest, cu_seqlens,
    scale, N, T, g_b, g_h, u_h, u_k, g_t: gl.constexpr, g_k: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
    DG: gl.constexpr, STATIC: gl.constexpr, PREVIOUS: gl.constexpr, PACKED: gl.constexpr, BLOCKS: gl.constexpr, NV: gl.constexpr,
    STORED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Program (chunk slot, head). TMA tiles: [C, K] of tokens [B T, H K]. States S and gradients dS: [slots, H, K, NV K], float32.

    The other arguments are those of ``penstock_channel_bwd_sm90``. K is 64.
    """
    gl.static_assert(K == SMALL)
    gl.static_assert(q_tiles.dtype == gl.float32)
    APART: gl.constexpr = BLOCKS * NV > 1
    WEIGHED: gl.constexpr = STORED or not APART  # whether this launch needs A
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = WARPS // 4
    V: gl.constexpr = NV * K
    layout: gl.constexpr = gl.BlockedLayout([R, 2], [1, 32], [GROUPS, WARPS // GROUPS], [1, 0])
    by_group: gl.constexpr = gl.BlockedLayout([1, R, 2], [1, 1, 32], [GROUPS, 1, WARPS // GROUPS], [2, 1, 0])
    across: gl.constexpr = gl.SliceLayout(1, by_group)
    by_row: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    row: gl.constexpr = gl.SliceLayout(1, by_row)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, ACROSS], [16, K // ACROSS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    block: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, ACROSS], [1, 16, 8])
    block_left: gl.constexpr = gl.DotOperandLayout(0, block, 2)
    block_right: gl.constexpr = gl.DotOperandLayout(1, block, 2)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    whole: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    pid = gl.program_id(0)
    h, n, b, at, tokens = chunk_at(pid, cu_seqlens, N, T, H, PACKED)
    per_chunk = pid.to(gl.int64) * K
    if tokens <= 0:
        store_zeros(du, dg, per_chunk, K, PREVIOUS, DG and STATIC, gl.SliceLayout(0, layout))
        return
    token = b * T + at
    place = (token * H + h) * K
    whole_head = h // BLOCKS
    key = h % BLOCKS * K
    g += b * g_b + at * g_t + whole_head * g_h + key * g_k
    u += whole_head * u_h + key * u_k
    S += per_chunk * V
    dS += per_chunk * V

    q_s = gl.allocate_shared_memory(gl.float32, [C, K], whole)
    k_s = gl.allocate_shared_memory(gl.float32, [C, K], whole)
    v_s = gl.allocate_shared_memory(gl.float32, [C, K], whole)  # then its parts, later the state's part of dq
    o_s = gl.allocate_shared_memory(gl.float32, [C, K], whole)  # then its parts
    dk_s = gl.allocate_shared_memory(gl.float32, [C, K], whole)  # the state's part of dk
    M_s = gl.allocate_shared_memory(gl.float16, [2, C, C], half)  # later A
    X_s = gl.allocate_shared_memory(gl.float16, [2 * LEVELS, C, K], half)  # before that: S, dS and k o rest
    part = gl.allocate_shared_memory(gl.float32, [GROUPS, K], plain2)
    tables = gl.allocate_shared_memory(gl.float32, [4, GROUPS, K], plain2)  # to the middle of 4 and 8 groups, from the start, to the end
    e_s = gl.allocate_shared_memory(gl.float32, [C], plain)
    own_s = gl.allocate_shared_memory(gl.float32, [C], plain)
    D_s = gl.allocate_shared_memory(gl.float32, [C, ROWS], plain2)
    row_s = gl.allocate_shared_memory(gl.float32, [K], plain)
    Y_s = reinterpret(X_s, gl.float32, [LEVELS, C, K], whole)
    v_tiles_s = reinterpret(v_s, gl.float16, [2, C, K], half)
    o_tiles_s = reinterpret(o_s, gl.float16, [2, C, K], half)
    v = parts_of(v_tiles_s, 0, PARTS)
    o = parts_of(o_tiles_s, 0, PARTS)
    S_parts = parts_of(X_s, 0, PARTS)
    dS_parts = parts_of(X_s, 2, PARTS)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for m in gl.static_range(2):
        mbarrier.init(bars.index(m), count=1)
    fence_async_shared()
    meet()
    line = token.to(gl.int32)
    column = (h * K).to(gl.int32)
    value_column = (whole_head * V).to(gl.int32)
    mbarrier.expect(bars.index(0), 2 * q_tiles.block_type.nbytes)
    mbarrier.expect(bars.index(1), 2 * v_tiles.block_type.nbytes)
    meet()
    async_load(v_tiles, [line, value_column], bars.index(1), v_s)
    async_load(o_tiles, [line, value_column], bars.index(1), o_s)
    async_load(q_tiles, [line, column], bars.index(0), q_s)
    async_load(k_tiles, [line, column], bars.index(0), k_s)

    x = decays(g, g_t, g_k, tokens, K, layout)
    part.store(gl.sum(grouped(x, GROUPS, by_group), 1))
    bonus = gl.full([1, K], 1.0, gl.float32, layout)
    if PREVIOUS:
        bonus = gl.load(u + gl.arange(0, K, gl.SliceLayout(0, layout)) * u_k).to(gl.float32)[None, :]

    # dA, and the terms of the states: sums over blocks of K value channels
    i = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, mma))[None, :]
    a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, block)))[None, :, None]
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, block)))[None, None, :]
    none = gl.zeros([C // ROWS, ROWS, ROWS], gl.float32, block)
    zero = gl.zeros([C, K], gl.float32, mma)
    live_row = gl.arange(0, C, row)[:, None] < tokens
    state_at = gl.arange(0, K, row)[:, None] * V + gl.arange(0, K, gl.SliceLayout(0, by_row))[None, :]
    dA, dA_t, dq_in, dk_in, D, D_t = zero, zero, zero, zero, none, none
    state_row = gl.zeros([K], gl.float32, row)
    up_o, up_dS = 1.0, 1.0
    for step in range(NV):
        one = gl.load(S + state_at + step * K)
        other = gl.load(dS + state_at + step * K)
        if DG:
            state_row += gl.sum(one * other, 1)
        largest, largest_d = most_of_both(one, other)
        down, up_S = powers_of_two(largest, LEAST)
        store_parts(X_s, 0, one * down, PARTS)
        down, up_dS = powers_of_two(largest_d, LEAST)
        store_parts(X_s, 2, other * down, PARTS)
        mbarrier.wait(bars.index(1), step & 1)
        one = v_s.load(by_row)
        other = o_s.load(by_row)
        if tokens < C:
            one = gl.where(live_row, one, 0.0)
            other = gl.where(live_row, other, 0.0)
        largest, largest_d = most_of_both(one, other)
        down, up_v = powers_of_two(largest, LEAST)
        one *= down
        down, up_o = powers_of_two(largest_d, LEAST)
        other *= down
        meet()
        store_parts(v_tiles_s, 0, one, PARTS)
        store_parts(o_tiles_s, 0, other, PARTS)
        fence_async_shared()
        meet()
        D += block_product(o, v, none, PARTS, block_left, block_right) * up_o * up_v
        D_t += block_product(v, o, none, PARTS, block_left, block_right) * up_o * up_v
        P = times(o, turned(v), zero, PARTS)
        P_t = times(v, turned(o), zero, PARTS)
        P_q = times(o, turned(S_parts), zero, PARTS)
        P_k = times(v, turned(dS_parts), zero, PARTS)
        P, P_t, P_q, P_k = warpgroup_mma_wait(0, [P, P_t, P_q, P_k])
        dA += P * up_o * up_v
        dA_t += P_t * up_o * up_v
        dq_in += P_q * up_o * up_S
        dk_in += P_k * up_v * up_dS
        if NV > 1:
            mbarrier.expect(bars.index(1), 2 * v_tiles.block_type.nbytes, pred=step + 1 < NV)
            meet()
            async_load(v_tiles, [line, value_column + (step + 1) * K], bars.index(1), v_s, pred=step + 1 < NV)
            async_load(o_tiles, [line, value_column + (step + 1) * K], bars.index(1), o_s, pred=step + 1 < NV)
    dA = gl.where(i > j, dA, dA_t) * scale
    down, up_M = powers_of_two(most(dA), LEAST)
    store_parts(M_s, 0, dA * down, PARTS)
    near, near_rest = halved(gl.where(a > b, D, D_t) * scale * down, PARTS)
    near = gl.convert_layout(near, block_left)
    near_rest = gl.convert_layout(near_rest, block_left)
    e_s.store(gl.reshape(gl.sum(gl.where(a == b, D, 0.0), 2), [C]) * scale)
    meet()
    v_s.store(dq_in * scale)
    dk_s.store(dk_in)
    if DG:
        row_s.store(state_row)

    # X of all levels
    mbarrier.wait(bars.index(0), 0)
    if tokens < C:
        zeroed_behind(q_s, tokens, layout)
        zeroed_behind(k_s, tokens, layout)
        meet()
    q = q_s.load(layout)
    k = k_s.load(layout)
    if WEIGHED:
        own_s.store(gl.sum(q * (k * bonus), 1))
    largest, largest_k = most_of_both(q, k)
    down, up_q = powers_of_two(largest, LEAST)
    q *= down
    down, up_k = powers_of_two(largest_k, LEAST)
    k *= down
    X_0, X_1, X_2, qf, kf = near_levels(q, k, x, PREVIOUS, layout, by_group)
    before, after, total = around(part, across)
    after = exp2(after)
    quarter = exp2(between(part, 2, across))
    half_way = exp2(between(part, 4, across))
    tables.index(0).store(quarter)
    tables.index(1).store(half_way)
    tables.index(2).store(exp2(before))
    tables.index(3).store(after)
    if STORED:
        own_row = gl.arange(0, C, gl.SliceLayout(1, layout))
        own_key = gl.arange(0, K, gl.SliceLayout(0, layout))
        own_at = own_row.to(gl.int64)[:, None] * (H * K) + own_key[None, :] + place
        gl.store(rest + own_at, kf * spread(after, R, layout) * up_k, mask=(own_row < tokens)[:, None])
    elif not APART:
        store_parts(X_s, 4, kf * spread(after, R, layout), PARTS)
    fence_async_shared()
    meet()
    if not APART:
        dV = times(parts_of(X_s, 4, PARTS), dS_parts, zero, PARTS)
    X_3 = gl.where(in_second_half(3, C, layout), qf, kf)
    X_4 = gl.where(in_second_half(4, C, layout), qf, kf) * spread(quarter, R, layout)
    X_5 = gl.where(in_second_half(5, C, layout), qf, kf) * spread(half_way, R, layout)
    if not APART:
        dV = warpgroup_mma_wait(0, [dV])
        dV = dV * up_k * up_dS
    meet()
    store_parts(X_s, 0, X_0, PARTS)
    store_parts(X_s, 2, X_1, PARTS)
    store_parts(X_s, 4, X_2, PARTS)
    store_parts(X_s, 6, X_3, PARTS)
    store_parts(X_s, 8, X_4, PARTS)
    store_parts(X_s, 10, X_5, PARTS)
    fence_async_shared()
    meet()

    # A, and Y, which overwrites X. Its rows are multiplied by the inverse of the power of the other half's tile
    M = M_s.index(0).load(left)
    M_rest = M_s.index(PARTS - 1).load(left)
    differ = gl.arange(0, C, gl.SliceLayout(1, left))[:, None] ^ gl.arange(0, C, gl.SliceLayout(0, left))[None, :]
    A = zero
    for n in gl.static_range(4, LEVELS):
        X = parts_of(X_s, 2 * n, PARTS)
        far = gl.where(differ >> n == 1, M, gl.zeros_like(M))
        far_rest = gl.where(differ >> n == 1, M_rest, gl.zeros_like(M))
        Y = zero
        if PARTS > 1:
            Y = warpgroup_mma(far_rest, X[0], Y, is_async=True)
            Y = warpgroup_mma(far, X[1], Y, is_async=True)
        Y = warpgroup_mma(far, X[0], Y, is_async=True)
        if WEIGHED:
            P = times(X, turned(X), zero, PARTS)
            P, far, far_rest, Y = warpgroup_mma_wait(0, [P, far, far_rest, Y])
            A = gl.where((i > j) & ((i ^ j) >> n == 1), P, A)
        else:
            far, far_rest, Y = warpgroup_mma_wait(0, [far, far_rest, Y])
        Y = Y * up_M * gl.where((i >> n & 1) == 1, up_k, up_q)
        meet()
        Y_s.index(n).store(Y)
    near_a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, block_left)))[None, :, None]
    near_b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, block_left)))[None, None, :]
    wide = gl.zeros([C // ROWS, ROWS, K], gl.float32, block)
    D = none
    for n in gl.static_range(4):
        X = parts_of(X_s, 2 * n, PARTS)
        if WEIGHED:
            P = block_product(X, X, none, PARTS, block_left, block_right)
            D = gl.where(((a ^ b) >> n == 1) & (a > b), P, D)
        pairs = (near_a ^ near_b) >> n == 1
        inner = gl.where(pairs, near, gl.zeros_like(near))
        X_high = blocks(X[0], block_right, False)
        Y = mma_v2(inner, X_high, wide)
        if PARTS > 1:
            Y = mma_v2(inner, blocks(X[1], block_right, False), Y)
            Y = mma_v2(gl.where(pairs, near_rest, gl.zeros_like(near)), X_high, Y)
        Y = gl.reshape(Y * up_M * gl.where((a >> n & 1) == 1, up_k, up_q), [C, K])
        meet()
        Y_s.index(n).store(Y)
    if WEIGHED:
        D_s.store(gl.reshape(D * up_q * up_k, [C, ROWS]))
        meet()
        cut: gl.constexpr = in_blocks(gl.to_linear_layout(mma, [C, C]))
        row_of_D: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, cut))
        own_column = gl.arange(0, C, row_of_D)[:, None] % ROWS == gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, cut)))[None, :]
        D = gl.where(own_column, own_s.load(row_of_D)[:, None], D_s.load(gl.SliceLayout(1, cut))) * scale
        D = gl.expand_dims(D, 1).broadcast_to([C, C // ROWS, ROWS])
        D = gl.convert_layout(gl.reshape(D, [C, C]), mma, assert_trivial=True)
        A = gl.where(i // ROWS == j // ROWS, D, A * up_q * up_k * scale)
        if APART:
            gl.store(weights + pid.to(gl.int64) * (C * C) + i * C + j, A)
        else:
            down, up_A = powers_of_two(most(A), LEAST)
            store_parts(M_s, 0, A * down, PARTS)
            fence_async_shared()
            meet()
            P = times(turned(parts_of(M_s, 0, PARTS)), o, zero, PARTS)
            P = warpgroup_mma_wait(0, [P])
            dV += P * up_A * up_o
            where = i.to(gl.int64) * (H * K) + gl.arange(0, K, gl.SliceLayout(0, mma))[None, :]
            gl.store(dv + place + where, dV, mask=i < tokens)
    meet()

    # dq, dk, dg
    i = gl.arange(0, C, gl.SliceLayout(1, layout))
    j = gl.arange(0, K, gl.SliceLayout(0, layout))
    live = (i < tokens)[:, None]
    at = i.to(gl.int64)[:, None] * (H * K) + j[None, :] + place
    sums = reinterpret(o_s, gl.float32, [KINDS, GROUPS, K], plain2)
    d, d_gate = collected(q_s, v_s, Y_s, x, tables, sums, 1.0, layout, by_group, True, PREVIOUS, DG, False)
    e = e_s.load(gl.SliceLayout(1, layout))[:, None]
    gl.store(dq + at, d + k_s.load(layout) * (e * bonus), mask=live)
    if DG:
        meet()
        d_gate = flat(d_gate, layout) + spread(from_groups(sums, part, True, across), R, layout)
        total = exp2(total) * grouped_row(row_s, across)
        d_gate += spread(total.broadcast_to([GROUPS, K]), R, layout)
        meet()
    d, more = collected(k_s, dk_s, Y_s, x, tables, sums, 1.0, layout, by_group, False, PREVIOUS, DG, False)
    gl.store(dk + at, d + q_s.load(layout) * (e * bonus), mask=live)
    if DG:
        meet()
        d_gate += flat(more, layout) + spread(from_groups(sums, part, False, across), R, layout)
        if STATIC:
            store_sum(dg + per_chunk, gl.where(live, d_gate, 0.0), part, by_group)
        else:
            gl.store(dg + at, d_gate.to(dg.dtype.element_ty), mask=live)
    if PREVIOUS:
        store_sum(du + per_chunk, q_s.load(layout) * k_s.load(layout) * e, part, by_group)
