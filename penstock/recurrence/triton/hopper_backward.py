"""The chunkwise backward kernel for decays per channel on Hopper, in Gluon: any decay at the same speed. One program per chunk and head.

Between the state S before the chunk and the state's gradient dS behind it, with the tiles X and factors f of ``hopper_forward``:

    dA = scale dO V^T                                   M = dA below the diagonal, its transpose above
    dX_L = f o Y_L,   Y_L = (M where L splits the pair) X_L      second halves are added to dq, first halves to dk
    dq += e k + scale read o (dO S^T)                   dk += e q + rest o (V dS^T)            e the diagonal of dA
    dV = A^T dO + (k o rest) dS                         A = sum of X_L X_L^T as in the forward pass
    dg_t = sum over all levels of q o dX over later tokens in the second half, and of k o dX over earlier tokens in the first half,
           the same sums for the terms of the states, and total o rowsum(S o dS)

Every term of dg is a pair of tokens with t between them, so there is no cancellation. Y_L overwrites X_L. Factors are computed again for
dq and again for dk, because registers limit the kernel more than exponentials do.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ...gpu.hopper_tiles import exp2, meet, zeroed_behind
from ...gpu.tiles import LOG2E, span_of
from .hopper_dyadic import around, between, factored, flat, grouped, halves, in_second_half, joined, spread, widened

C = gl.constexpr(64)
GROUPS = gl.constexpr(8)  # groups of R tokens; a thread holds all tokens of a group
R = gl.constexpr(8)
LEVELS = gl.constexpr(6)
ROWS = gl.constexpr(16)  # rows of a warp's product
KINDS = gl.constexpr(3)  # kinds of sums over groups: of levels 16 and 32, and of the terms of the states


@gluon.jit
def decays(g, g_t: gl.constexpr, g_k: gl.constexpr, tokens, K: gl.constexpr, layout: gl.constexpr):
    """Load the chunk's log2 decays [C,K], 0 behind the last token."""
    i = gl.arange(0, C, gl.SliceLayout(1, layout))
    j = gl.arange(0, K, gl.SliceLayout(0, layout))
    at = (i // R * R)[:, None] * g_t + j[None, :] * g_k + (i % R)[:, None] * g_t
    return gl.load(g + at, mask=(i < tokens)[:, None], other=0.0).to(gl.float32) * LOG2E


@gluon.jit
def over_the_middle(x, L: gl.constexpr, LATER: gl.constexpr, layout: gl.constexpr, WARPS: gl.constexpr):
    """In blocks of 2 L tokens: the sum of x over the second half, for tokens of the first (LATER); else of the first, for the second."""
    a, b = halves(x, L, WARPS)
    if LATER:
        y = gl.expand_dims(gl.sum(b, 2), 2).broadcast_to(a.shape)
        y = joined(y, gl.zeros_like(b), layout)
    else:
        y = gl.expand_dims(gl.sum(a, 2), 2).broadcast_to(b.shape)
        y = joined(gl.zeros_like(a), y, layout)
    return y


@gluon.jit
def from_groups(sums, carry, LATER: gl.constexpr, across: gl.constexpr):
    """From sums of groups [KINDS,GROUPS,K]: the sums over later (LATER) or earlier groups in blocks of 2, 4 and 8 groups: [GROUPS,K]."""
    WARPS: gl.constexpr = gl.num_warps()
    K: gl.constexpr = sums.shape[2]
    whole: gl.constexpr = gl.BlockedLayout([1, GROUPS, 2], [1, 1, 32], [1, 1, WARPS], [2, 1, 0])
    eight = sums.index(2).load(gl.SliceLayout(0, whole))[None, :, :]
    four = eight + sums.index(1).load(gl.SliceLayout(0, whole))[None, :, :]
    two = four + sums.index(0).load(gl.SliceLayout(0, whole))[None, :, :]
    x = over_the_middle(two, 1, LATER, whole, WARPS)
    x += over_the_middle(four, 2, LATER, whole, WARPS)
    x += over_the_middle(eight, 4, LATER, whole, WARPS)
    carry.store(gl.convert_layout(gl.reshape(x, [GROUPS, K]), gl.SliceLayout(0, whole), assert_trivial=True))
    return carry.load(across)


@gluon.jit
def collected(
    tile, through_state, Y_s, x, tables, sums, layout: gl.constexpr, by_group: gl.constexpr,
    QUERIES: gl.constexpr, PREVIOUS: gl.constexpr, DG: gl.constexpr,
):  # fmt: skip
    """dq (QUERIES) or dk [C,K] from levels and state, and its part of dg [GROUPS,R,K] within groups; ``sums`` gets sums of groups."""
    WARPS: gl.constexpr = gl.num_warps()
    K: gl.constexpr = tile.shape[1]
    across: gl.constexpr = gl.SliceLayout(1, by_group)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, across))[:, None]
    total = exp2(grouped(x, GROUPS, by_group))
    behind = gl.full([GROUPS, R, K], 1.0, gl.float32, by_group)
    through = behind
    if not PREVIOUS:
        through = total
    raw = tile.load(layout).to(gl.float32)
    d = gl.zeros([C, K], gl.float32, layout)
    d_gate = gl.zeros([GROUPS, R, K], gl.float32, by_group)
    for n in gl.static_range(3):  # the levels within a group
        here = in_second_half(n, C, layout)
        factor = flat(through, layout)
        if not QUERIES:
            here = here == 0
            factor = flat(behind, layout)
        y = gl.where(here, Y_s.index(n).load(layout).to(gl.float32) * factor, 0.0)
        d += y
        if DG:
            z = grouped(raw * y, GROUPS, by_group)
            if QUERIES and not PREVIOUS:
                d_gate += z
            for m in gl.static_range(n):
                d_gate += over_the_middle(z, 1 << m, QUERIES, by_group, WARPS)
        through, behind, total = widened(through, behind, total, by_group, WARPS)
    factor = flat(through, layout)
    if not QUERIES:
        factor = flat(behind, layout)
    raw = raw * factor
    far = gl.zeros([C, K], gl.float32, layout)
    for n in gl.static_range(4):  # the levels of groups, then the state
        if n < 3:
            y = Y_s.index(3 + n).load(layout).to(gl.float32)
            here = (group >> n & 1) == 1
            if not QUERIES:
                here = here == 0
            if n == 0:
                to_middle = gl.where(here, 1.0, gl.zeros([GROUPS, K], gl.float32, across))
            else:
                to_middle = gl.where(here, tables.index(n - 1).load(across), 0.0)
        else:
            y = through_state.load(layout).to(gl.float32)
            if QUERIES:
                to_middle = tables.index(2).load(across)
            else:
                to_middle = tables.index(3).load(across)
        far += y * spread(to_middle, R, layout)
        if DG and n > 0:
            sums.index(n - 1).store(gl.sum(grouped(raw * y, GROUPS, by_group), 1) * to_middle)
    if DG:
        z = grouped(raw * far, GROUPS, by_group)
        if QUERIES and not PREVIOUS:
            d_gate += z
        for m in gl.static_range(3):
            d_gate += over_the_middle(z, 1 << m, QUERIES, by_group, WARPS)
    return d + far * factor, d_gate


@gluon.constexpr_function
def folded(layout, TRANSPOSED):
    """Convert a layout of four blocks [4,ROWS,K] ([4,K,ROWS] if TRANSPOSED) to the layout of the tile [C,K] of these blocks."""

    def fold(bases):
        return [[ROWS.value * x[0] + x[2], x[1]] if TRANSPOSED else [ROWS.value * x[0] + x[1], x[2]] for x in bases]

    shape = [layout.shape[0] * layout.shape[2], layout.shape[1]] if TRANSPOSED else [layout.shape[0] * layout.shape[1], layout.shape[2]]
    return gl.DistributedLinearLayout(
        fold(layout.reg_bases), fold(layout.lane_bases), fold(layout.warp_bases), fold(layout.block_bases), shape
    )


@gluon.constexpr_function
def in_blocks(layout):
    """Convert a layout of [C,C] to a layout of [C,4,ROWS]."""

    def cut(bases):
        return [[x[0], x[1] // ROWS.value, x[1] % ROWS.value] for x in bases]

    shape = [C.value, C.value // ROWS.value, ROWS.value]
    return gl.DistributedLinearLayout(cut(layout.reg_bases), cut(layout.lane_bases), cut(layout.warp_bases), cut(layout.block_bases), shape)


@gluon.jit
def blocks(tile, layout: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Load a tile [C,K] as an operand of products within its four blocks: [4,ROWS,K], or [4,K,ROWS] if TRANSPOSED."""
    K: gl.constexpr = tile.shape[1]
    N: gl.constexpr = C // ROWS
    if TRANSPOSED:
        x = tile.load(folded(gl.to_linear_layout(layout, [N, K, ROWS]), True))
        x = gl.permute(gl.reshape(x, [N, ROWS, K]), (0, 2, 1))
    else:
        x = gl.reshape(tile.load(folded(gl.to_linear_layout(layout, [N, ROWS, K]), False)), [N, ROWS, K])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def ask_values(tiles, parts, bars, line, column, state, first_column):
    """Start the loads of tiles of v and dO, and of the state and its gradient."""
    v_tiles, o_tiles, S_tiles, dS_tiles = tiles
    v_s, o_s, S, dS = parts
    tma.async_copy_global_to_shared(v_tiles, [line, column], bars.index(0), v_s)
    tma.async_copy_global_to_shared(o_tiles, [line, column], bars.index(0), o_s)
    mbarrier.expect(bars.index(1), 2 * S_tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(S_tiles, [state, first_column], bars.index(1), S)
    tma.async_copy_global_to_shared(dS_tiles, [state, first_column], bars.index(1), dS)


@gluon.jit(do_not_specialize=["N", "T"])
def penstock_chunk_bwd_hopper(
    q_tiles, k_tiles, v_tiles, o_tiles, S_tiles, dS_tiles, g, u, dq, dk, dv, dg, du, weights, rest, cu_seqlens, scale, N, T,
    g_b, g_h, u_h, u_k, g_t: gl.constexpr, g_k: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
    DG: gl.constexpr, PREVIOUS: gl.constexpr, PACKED: gl.constexpr, BLOCKS: gl.constexpr, NV: gl.constexpr,
):  # fmt: skip
    """Program (chunk slot, head). TMA tiles: [C, K] of tokens [B T, H K], and [K, K] of states [slots H K, NV K].

    dq, dk, dv, dg are contiguous; du is [slots, H, K].

    BLOCKS > 1: heads of BLOCKS K key channels; each of the H heads here is a block of K of them. NV: blocks of K value channels. If either
    is more than 1, dv is left to ``values.py``, and what it needs is stored: A in ``weights`` [slots, H, C, C], float32, and k with the
    factors of the state in ``rest``, like k.
    """
    APART: gl.constexpr = BLOCKS * NV > 1
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = WARPS // 4
    layout: gl.constexpr = gl.BlockedLayout([R, 2], [1, 32], [GROUPS, WARPS // GROUPS], [1, 0])
    by_group: gl.constexpr = gl.BlockedLayout([1, R, 2], [1, 1, 32], [GROUPS, 1, WARPS // GROUPS], [2, 1, 0])
    across: gl.constexpr = gl.SliceLayout(1, by_group)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [WARPS, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, ACROSS], [16, K // ACROSS, 16])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, ACROSS], [16, C // ACROSS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    block: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, ACROSS], [1, 16, 8])
    block_left: gl.constexpr = gl.DotOperandLayout(0, block, 2)
    block_right: gl.constexpr = gl.DotOperandLayout(1, block, 2)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    pid = gl.program_id(0)
    h = (pid % H).to(gl.int64)
    n, begin, end, done = span_of(pid // H, cu_seqlens, N, T, C, PACKED)
    tokens = gl.minimum(end - begin - done, C).to(gl.int32)
    per_chunk = pid.to(gl.int64) * K
    if tokens <= 0:
        if PREVIOUS:
            j = gl.arange(0, K, gl.SliceLayout(0, layout))
            gl.store(du + per_chunk + j, gl.zeros([K], gl.float32, gl.SliceLayout(0, layout)))
        return
    b = n.to(gl.int64)
    if PACKED:
        b = b * 0
    token = b * T + begin + done
    place = (token * H + h) * K
    whole_head = h // BLOCKS
    key = h % BLOCKS * K
    g += b * g_b + (begin + done) * g_t + whole_head * g_h + key * g_k
    u += whole_head * u_h + key * u_k

    q_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], half)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], half)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], half)  # later the state's part of dq
    o_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], half)
    dk_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], half)  # the state's part of dk
    M_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)  # later A
    X_s = gl.allocate_shared_memory(gl.bfloat16, [LEVELS, C, K], half)  # before that: S, dS and k o rest
    part = gl.allocate_shared_memory(gl.float32, [GROUPS, K], plain2)
    tables = gl.allocate_shared_memory(gl.float32, [4, GROUPS, K], plain2)  # to the middle of 4 and 8 groups, from the start, to the end
    e_s = gl.allocate_shared_memory(gl.float32, [C], plain)
    D_s = gl.allocate_shared_memory(gl.bfloat16, [C, ROWS], plain2)
    row_s = gl.allocate_shared_memory(gl.float32, [K], plain)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    TILES: gl.constexpr = K // C  # tiles of a state
    states = X_s._reinterpret(gl.bfloat16, [LEVELS // TILES, K, K], half)
    S = states.index(0)
    dS = states.index(1)
    rest_s = X_s.index(2 * TILES)
    uk_s = X_s.index(LEVELS - 1)
    for n_bar in gl.static_range(2):
        mbarrier.init(bars.index(n_bar), count=1)
    fence_async_shared()
    meet()
    line = token.to(gl.int32)
    column = (h * K).to(gl.int32)
    value_column = (whole_head * (NV * K)).to(gl.int32)
    tiles = (v_tiles, o_tiles, S_tiles, dS_tiles)
    parts = (v_s, o_s, S, dS)
    mbarrier.expect(bars.index(0), 4 * q_tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(q_tiles, [line, column], bars.index(0), q_s)
    tma.async_copy_global_to_shared(k_tiles, [line, column], bars.index(0), k_s)
    ask_values(tiles, parts, bars, line, value_column, pid * K, 0)

    x = decays(g, g_t, g_k, tokens, K, layout)
    part.store(gl.sum(grouped(x, GROUPS, by_group), 1))
    bonus = gl.full([1, K], 1.0, gl.float32, layout)
    if PREVIOUS:
        bonus = gl.load(u + gl.arange(0, K, gl.SliceLayout(0, layout)) * u_k).to(gl.float32)[None, :]
    mbarrier.wait(bars.index(0), 0)
    if tokens < C:
        zeroed_behind(q_s, tokens, layout)
        zeroed_behind(k_s, tokens, layout)
        zeroed_behind(v_s, tokens, layout)
        zeroed_behind(o_s, tokens, layout)
        fence_async_shared()
        meet()

    # M, and the terms of the states
    i = gl.arange(0, C, gl.SliceLayout(1, square))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, block)))[None, :, None]
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, block)))[None, None, :]
    zero = gl.zeros([C // ROWS, ROWS, ROWS], gl.float32, block)
    dA = warpgroup_mma(o_s, v_s.permute((1, 0)), gl.zeros([C, C], gl.float32, square), use_acc=False, is_async=True)
    dA_t = warpgroup_mma(v_s, o_s.permute((1, 0)), gl.zeros([C, C], gl.float32, square), use_acc=False, is_async=True)
    dA, dA_t = warpgroup_mma_wait(0, [dA, dA_t])
    if not APART:
        M_s.store((gl.where(i > j, dA, dA_t) * scale).to(gl.bfloat16))
    D = mma_v2(blocks(o_s, block_left, False), blocks(v_s, block_right, True), zero)
    D_t = mma_v2(blocks(v_s, block_left, False), blocks(o_s, block_right, True), zero)
    if not APART:
        near = gl.convert_layout((gl.where(a > b, D, D_t) * scale).to(gl.bfloat16), block_left)
        e_s.store(gl.reshape(gl.sum(gl.where(a == b, D, 0.0), 2), [C]) * scale)
    mbarrier.wait(bars.index(1), 0)
    dq_in = warpgroup_mma(o_s, S.permute((1, 0)), gl.zeros([C, K], gl.float32, mma), use_acc=False, is_async=True)
    dk_in = warpgroup_mma(v_s, dS.permute((1, 0)), gl.zeros([C, K], gl.float32, mma), use_acc=False, is_async=True)
    dq_in, dk_in = warpgroup_mma_wait(0, [dq_in, dk_in])
    if APART:
        row = gl.zeros([K], gl.float32, gl.SliceLayout(1, by_row))
        if DG:
            row += gl.sum(S.load(by_row).to(gl.float32) * dS.load(by_row).to(gl.float32), 1)
        for n_v in range(1, NV):
            fence_async_shared()
            meet()
            mbarrier.expect(bars.index(0), 2 * v_tiles.block_type.nbytes)
            ask_values(tiles, parts, bars, line, value_column + n_v * K, pid * K, n_v * K)
            mbarrier.wait(bars.index(0), n_v & 1)
            if tokens < C:
                zeroed_behind(v_s, tokens, layout)
                zeroed_behind(o_s, tokens, layout)
                fence_async_shared()
                meet()
            dA = warpgroup_mma(o_s, v_s.permute((1, 0)), dA, is_async=True)
            dA_t = warpgroup_mma(v_s, o_s.permute((1, 0)), dA_t, is_async=True)
            D = mma_v2(blocks(o_s, block_left, False), blocks(v_s, block_right, True), D)
            D_t = mma_v2(blocks(v_s, block_left, False), blocks(o_s, block_right, True), D_t)
            mbarrier.wait(bars.index(1), n_v & 1)
            dq_in = warpgroup_mma(o_s, S.permute((1, 0)), dq_in, is_async=True)
            dk_in = warpgroup_mma(v_s, dS.permute((1, 0)), dk_in, is_async=True)
            if DG:
                row += gl.sum(S.load(by_row).to(gl.float32) * dS.load(by_row).to(gl.float32), 1)
            dA, dA_t, dq_in, dk_in = warpgroup_mma_wait(0, [dA, dA_t, dq_in, dk_in])
        M_s.store((gl.where(i > j, dA, dA_t) * scale).to(gl.bfloat16))
        near = gl.convert_layout((gl.where(a > b, D, D_t) * scale).to(gl.bfloat16), block_left)
        e_s.store(gl.reshape(gl.sum(gl.where(a == b, D, 0.0), 2), [C]) * scale)
        row_s.store(row)
    meet()
    v_s.store((dq_in * scale).to(gl.bfloat16))
    dk_s.store(dk_in.to(gl.bfloat16))
    if DG and not APART:
        row_s.store(gl.sum(S.load(by_row).to(gl.float32) * dS.load(by_row).to(gl.float32), 1))

    # X of all levels
    q = q_s.load(layout)
    k = k_s.load(layout)
    total = exp2(grouped(x, GROUPS, by_group))
    behind = gl.full([GROUPS, R, K], 1.0, gl.float32, by_group)
    through = behind
    if not PREVIOUS:
        through = total
    X_0 = factored(q, k, through, behind, 0, layout)
    through, behind, total = widened(through, behind, total, by_group, WARPS)
    X_1 = factored(q, k, through, behind, 1, layout)
    through, behind, total = widened(through, behind, total, by_group, WARPS)
    X_2 = factored(q, k, through, behind, 2, layout)
    through, behind, total = widened(through, behind, total, by_group, WARPS)
    qf = q.to(gl.float32) * flat(through, layout)
    kf = k.to(gl.float32) * flat(behind, layout)
    before, after, whole = around(part, across)
    after = exp2(after)
    quarter = exp2(between(part, 2, across))
    half_way = exp2(between(part, 4, across))
    tables.index(0).store(quarter)
    tables.index(1).store(half_way)
    tables.index(2).store(exp2(before))
    tables.index(3).store(after)
    key_rest = (kf * spread(after, R, layout)).to(gl.bfloat16)
    if APART:
        own_row = gl.arange(0, C, gl.SliceLayout(1, layout))
        own_key = gl.arange(0, K, gl.SliceLayout(0, layout))
        own_at = (
            (own_row // R * R).to(gl.int64)[:, None] * (H * K) + own_key[None, :] + (own_row % R).to(gl.int64)[:, None] * (H * K) + place
        )
        gl.store(rest + own_at, key_rest, mask=(own_row < tokens)[:, None])
    else:
        rest_s.store(key_rest)
    if PREVIOUS:
        uk_s.store((k.to(gl.float32) * bonus).to(gl.bfloat16))
    fence_async_shared()
    meet()
    if not APART:
        dV = warpgroup_mma(rest_s, dS, gl.zeros([C, K], gl.float32, mma), use_acc=False, is_async=True)
    X_3 = gl.where(in_second_half(3, C, layout), qf, kf)
    X_4 = gl.where(in_second_half(4, C, layout), qf, kf) * spread(quarter, R, layout)
    X_5 = gl.where(in_second_half(5, C, layout), qf, kf) * spread(half_way, R, layout)
    if PREVIOUS:
        D = mma_v2(blocks(q_s, block_left, False), blocks(uk_s, block_right, True), zero)
    else:
        D = mma_v2(blocks(q_s, block_left, False), blocks(k_s, block_right, True), zero)
    D = gl.where(a == b, D, 0.0)
    if not APART:
        dV = warpgroup_mma_wait(0, [dV])
    meet()
    X_s.index(0).store(X_0)
    X_s.index(1).store(X_1)
    X_s.index(2).store(X_2)
    X_s.index(3).store(X_3.to(gl.bfloat16))
    X_s.index(4).store(X_4.to(gl.bfloat16))
    X_s.index(5).store(X_5.to(gl.bfloat16))
    fence_async_shared()
    meet()

    # A, and Y, which overwrites X
    M = M_s.load(left)
    differ = gl.arange(0, C, gl.SliceLayout(1, left))[:, None] ^ gl.arange(0, C, gl.SliceLayout(0, left))[None, :]
    none = gl.zeros_like(M)
    A = gl.zeros([C, C], gl.float32, square)
    for n in gl.static_range(4, LEVELS):
        X = X_s.index(n)
        far = gl.where(differ >> n == 1, M, none)
        P = warpgroup_mma(X, X.permute((1, 0)), gl.zeros([C, C], gl.float32, square), use_acc=False, is_async=True)
        Y = warpgroup_mma(far, X, gl.zeros([C, K], gl.float32, mma), use_acc=False, is_async=True)
        P, far, Y = warpgroup_mma_wait(0, [P, far, Y])
        A = gl.where((i > j) & ((i ^ j) >> n == 1), P, A)
        Y = Y.to(gl.bfloat16)
        meet()
        X.store(Y)
    near_a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, block_left)))[None, :, None]
    near_b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, block_left)))[None, None, :]
    wide = gl.zeros([C // ROWS, ROWS, K], gl.float32, block)
    for n in gl.static_range(4):
        X = X_s.index(n)
        P = mma_v2(blocks(X, block_left, False), blocks(X, block_right, True), zero)
        D = gl.where(((a ^ b) >> n == 1) & (a > b), P, D)
        Y = mma_v2(gl.where((near_a ^ near_b) >> n == 1, near, gl.zeros_like(near)), blocks(X, block_right, False), wide)
        Y = gl.reshape(Y.to(gl.bfloat16), [C, K])
        meet()
        X.store(Y)
    if APART:
        D_s = o_s._reinterpret(gl.float32, [C, ROWS], plain2)
    D_s.store(gl.reshape((D * scale).to(D_s.dtype), [C, ROWS]))
    cut: gl.constexpr = in_blocks(gl.to_linear_layout(square, [C, C]))
    D = gl.expand_dims(D_s.load(gl.SliceLayout(1, cut)), 1).broadcast_to([C, C // ROWS, ROWS])
    D = gl.convert_layout(gl.reshape(D, [C, C]), square, assert_trivial=True)
    A = gl.where(i // ROWS == j // ROWS, D, (A * scale).to(D_s.dtype))
    if APART:
        gl.store(weights + pid.to(gl.int64) * (C * C) + i * C + j, A)
        meet()
    else:
        M_s.store(A)
        fence_async_shared()
        meet()
        dV = warpgroup_mma(M_s.permute((1, 0)), o_s, dV, is_async=True)
        dV = warpgroup_mma_wait(0, [dV])
        meet()
        row = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None]
        where = row.to(gl.int64) * (H * K) + gl.arange(0, K, gl.SliceLayout(0, mma))[None, :]
        gl.store(dv + place + where, dV.to(gl.bfloat16), mask=row < tokens)

    # dq, dk, dg
    i = gl.arange(0, C, gl.SliceLayout(1, layout))
    j = gl.arange(0, K, gl.SliceLayout(0, layout))
    live = (i < tokens)[:, None]
    at = (i // R * R).to(gl.int64)[:, None] * (H * K) + j[None, :] + (i % R).to(gl.int64)[:, None] * (H * K) + place
    e = e_s.load(gl.SliceLayout(1, layout))[:, None]
    sums = o_s._reinterpret(gl.float32, [KINDS, GROUPS, K], plain2)
    x = decays(g, g_t, g_k, tokens, K, layout)
    d, d_gate = collected(q_s, v_s, X_s, x, tables, sums, layout, by_group, True, PREVIOUS, DG)
    gl.store(dq + at, (d + k_s.load(layout).to(gl.float32) * (e * bonus)).to(gl.bfloat16), mask=live)
    if DG:
        meet()
        d_gate = flat(d_gate, layout) + spread(from_groups(sums, part, True, across), R, layout)
        whole = exp2(whole) * grouped_row(row_s, across)
        d_gate += spread(whole.broadcast_to([GROUPS, K]), R, layout)
        meet()
    x = decays(g, g_t, g_k, tokens, K, layout)
    d, more = collected(k_s, dk_s, X_s, x, tables, sums, layout, by_group, False, PREVIOUS, DG)
    gl.store(dk + at, (d + q_s.load(layout).to(gl.float32) * (e * bonus)).to(gl.bfloat16), mask=live)
    if DG:
        meet()
        d_gate += flat(more, layout) + spread(from_groups(sums, part, False, across), R, layout)
        gl.store(dg + at, d_gate.to(dg.dtype.element_ty), mask=live)
    if PREVIOUS:
        meet()
        own = q_s.load(layout).to(gl.float32) * k_s.load(layout).to(gl.float32) * e
        part.store(gl.sum(grouped(own, GROUPS, by_group), 1))
        _before, _after, whole = around(part, across)
        gl.store(du + per_chunk + gl.arange(0, K, gl.SliceLayout(0, across)), gl.sum(whole, 0))


@gluon.jit
def grouped_row(row, across: gl.constexpr):
    """Load [K] as [1,K]."""
    return row.load(gl.SliceLayout(0, across))[None, :]
