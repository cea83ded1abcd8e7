"""The chunkwise backward kernel for decays per channel on Hopper, in Gluon: any decay at the same speed. One program per chunk and head.

Between the state S before the chunk and the state's gradient dS behind it, with the tiles X and factors f of ``channel_forward``:

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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, exp2, inverse, meet, most, reinterpret, zeroed_behind
from ....gpu.tiles import powers_of_two
from ..heads import MEDIUM, SMALL
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
from .sums import KINDS, collected, from_groups, grouped_row

LEVELS = gl.constexpr(6)


@gluon.jit
def level_powers(dA, largest):
    """A power of two for dA, and its inverse. Rounded to float16, dA and the products Y with tiles of at most ``largest`` do not overflow.

    Y has at most 32 terms.
    """
    x = most(dA)
    return powers_of_two(gl.maximum(x, 32 * x * largest))


@gluon.jit
def expect_step(tiles, bars, n, steps, COPIES: gl.constexpr):
    """Announce the tiles of step n. Each tensor has barriers of its own: between copies with the same one, Triton has all warps meet."""
    for m in gl.static_range(COPIES):
        mbarrier.expect(bars[m].index(n % bars[m].shape[0]), tiles[m].block_type.nbytes, pred=n < steps)


@gluon.jit
def ask_step(tiles, values, states, bars, line, column, state, n, steps, COPIES: gl.constexpr):
    """Start the loads of step n: 64 value channels of v and dO and, of 16 bits (COPIES = 4), of the state and its gradient."""
    W: gl.constexpr = tiles[0].block_shape[1]
    STAGES: gl.constexpr = bars[0].shape[0]
    at = ([line, column + n * W], [state, n * W])
    parts = (values, states)
    for m in gl.static_range(COPIES):
        tile = parts[m // 2].index(m % 2 * STAGES + n % STAGES)
        async_load(tiles[m], at[m // 2], bars[m].index(n % STAGES), tile, pred=n < steps)


@gluon.jit
def part_of(parts, first: gl.constexpr, row: gl.constexpr, column: gl.constexpr, ACROSS: gl.constexpr):
    """The part [64,64] at 64 ``row``, 64 ``column`` of a tile [64 ACROSS,64 ACROSS]. ``parts``: the same memory as tiles [64,64].

    ``first``: the number of the tile's first part. With a swizzle of 128 bytes, the first 64 columns of all rows come before the others.
    """
    return parts.index(first + column * ACROSS + row)


@gluon.jit
def rounded_states(states, d_states, S_s, dS_s, V: gl.constexpr, DG: gl.constexpr, layout: gl.constexpr):
    """Load tiles of a float32 state [K,V] and its gradient, store them as float16 times powers of two.

    Returns the inverse powers, and the sums of S o dS over value channels if DG.
    """
    K: gl.constexpr = S_s.shape[0]
    W: gl.constexpr = S_s.shape[1]
    at = gl.arange(0, K, gl.SliceLayout(1, layout))[:, None] * V + gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]
    S = gl.load(states + at)
    dS = gl.load(d_states + at)
    kept = gl.zeros([K], gl.float32, gl.SliceLayout(1, layout))
    if DG:
        kept += gl.sum(S * dS, 1)
    down, of_S = powers_of_two(most(S))
    S_s.store((S * down).to(S_s.dtype))
    down, of_dS = powers_of_two(most(dS))
    dS_s.store((dS * down).to(dS_s.dtype))
    return of_S, of_dS, kept


@gluon.jit
def store_sum(to, x, part, by_group: gl.constexpr):
    """Store the sum of x [C,K] over its rows at ``to``. ``part``: memory of [GROUPS,K], which others may still read."""
    across: gl.constexpr = gl.SliceLayout(1, by_group)
    meet()
    part.store(gl.sum(grouped(x, part.shape[0], by_group), 1))
    _before, _after, whole = around(part, across)
    gl.store(to + gl.arange(0, part.shape[1], gl.SliceLayout(0, across)), gl.sum(whole, 0))


@gluon.jit(do_not_specialize=["N", "T"])
def penstock_channel_bwd_sm90(
    q_tiles, k_tiles, v_tiles, o_tiles, S_tiles, dS_tiles, dv_tiles, dq_tiles, g, u, dq, dk, dv, dg, du, weights, rest, cu_seqlens,
    scale, N, T, g_b, g_h, u_h, u_k, g_t: gl.constexpr, g_k: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
    DG: gl.constexpr, STATIC: gl.constexpr, PREVIOUS: gl.constexpr, PACKED: gl.constexpr, BLOCKS: gl.constexpr, NV: gl.constexpr,
    STORED: gl.constexpr,
):  # fmt: skip
    """Program (chunk slot, head). TMA tiles: [C, K] of tokens [B T, H K], and [K, K] of states [slots H K, NV K].

    bfloat16 without BLOCKS and NV: of a whole chunk, dS is in the rows of its tokens in dv and, behind C channels, in dq, which this launch
    writes after it has read them (``IN_ROWS`` in ``segments.py``). Their TMA tiles have 64 columns. ``dS_tiles`` has shorter chunks'.

    float16: the states are float32 and have no TMA tiles. Operands of products that have no bound are multiplied by powers of two, one
    for a tile (``powers_of_two``), and their products by the inverse.

    dq, dk, dv, dg are contiguous; du and, with STATIC, dg are sums over the tokens of a chunk, [slots, H, K].

    BLOCKS > 1: heads of BLOCKS K key channels; each of the H heads here is a block of K of them. NV: blocks of K value channels. If either
    is more than 1, dv is left to another launch. STORED: to ``values.py``, and what it needs is stored: A in ``weights`` [slots, H, C, C],
    float32, and k with the factors of the state in ``rest``, like k.
    """
    gl.static_assert(K == SMALL or K == MEDIUM)
    gl.static_assert(q_tiles.dtype == gl.bfloat16 or q_tiles.dtype == gl.float16)
    kind: gl.constexpr = q_tiles.dtype
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    COPIES: gl.constexpr = 2 if HALF else 4
    APART: gl.constexpr = BLOCKS * NV > 1
    WEIGHED: gl.constexpr = STORED or not APART  # whether this launch needs A
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = WARPS // 4
    layout: gl.constexpr = gl.BlockedLayout([R, 2], [1, 32], [GROUPS, WARPS // GROUPS], [1, 0])
    by_group: gl.constexpr = gl.BlockedLayout([1, R, 2], [1, 1, 32], [GROUPS, 1, WARPS // GROUPS], [2, 1, 0])
    across: gl.constexpr = gl.SliceLayout(1, by_group)
    W: gl.constexpr = 64 if APART else K  # value channels of a step
    STAGES: gl.constexpr = K // W  # of tiles of a step, in the memory of X, v and dO
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [WARPS, 1], [1, 0])
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

    q_s = gl.allocate_shared_memory(kind, [C, K], half)
    k_s = gl.allocate_shared_memory(kind, [C, K], half)
    if APART:
        values = gl.allocate_shared_memory(kind, [2, C, K], half)
        v_s = values.index(0)  # later the state's part of dq
        o_s = values.index(1)
    else:
        v_s = gl.allocate_shared_memory(kind, [C, K], half)
        o_s = gl.allocate_shared_memory(kind, [C, K], half)
    dk_s = gl.allocate_shared_memory(kind, [C, K], half)  # the state's part of dk
    M_s = gl.allocate_shared_memory(kind, [C, C], half)  # later A
    X_s = gl.allocate_shared_memory(kind, [LEVELS, C, K], half)  # before that: S, dS and k o rest
    part = gl.allocate_shared_memory(gl.float32, [GROUPS, K], plain2)
    tables = gl.allocate_shared_memory(gl.float32, [4, GROUPS, K], plain2)  # to the middle of 4 and 8 groups, from the start, to the end
    e_s = gl.allocate_shared_memory(gl.float32, [C], plain)
    D_s = gl.allocate_shared_memory(kind, [C, ROWS], plain2)
    row_s = gl.allocate_shared_memory(gl.float32, [K], plain)
    TILES: gl.constexpr = K // C  # tiles of a state
    rest_s = X_s.index(2 * TILES)
    uk_s = X_s.index(LEVELS - 1)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for m in gl.static_range(2):
        mbarrier.init(bars.index(m), count=1)
    line = token.to(gl.int32)
    column = (h * K).to(gl.int32)
    value_column = (whole_head * (NV * K)).to(gl.int32)
    tiles = (v_tiles, o_tiles, S_tiles, dS_tiles)
    if APART:
        STEPS: gl.constexpr = NV * K // W
        states = reinterpret(X_s, kind, [LEVELS * C // W, K, W], half)
        values = reinterpret(values, kind, [2 * STAGES, C, W], half)
        v_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        o_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        step_bars = (v_bars, o_bars)
        if not HALF:  # memory of a barrier that is not waited for may be used for other values
            S_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            dS_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            step_bars = (v_bars, o_bars, S_bars, dS_bars)
        for m in gl.static_range(COPIES):
            for first in gl.static_range(STAGES):
                mbarrier.init(step_bars[m].index(first), count=1)
        fence_async_shared()
        meet()
        mbarrier.expect(bars.index(0), 2 * q_tiles.block_type.nbytes)
        for first in gl.static_range(STAGES):
            expect_step(tiles, step_bars, first, STEPS, COPIES)
        meet()
        for first in gl.static_range(STAGES):
            ask_step(tiles, values, states, step_bars, line, value_column, pid * K, first, STEPS, COPIES)
        async_load(q_tiles, [line, column], bars.index(0), q_s)
        async_load(k_tiles, [line, column], bars.index(0), k_s)
    else:
        states = reinterpret(X_s, kind, [LEVELS // TILES, K, K], half)
        S = states.index(0)
        dS = states.index(1)
        parts = reinterpret(X_s, kind, [LEVELS * TILES, C, C], half)
        fence_async_shared()
        meet()
        mbarrier.expect(bars.index(0), 4 * q_tiles.block_type.nbytes)
        async_load(q_tiles, [line, column], bars.index(0), q_s)
        async_load(k_tiles, [line, column], bars.index(0), k_s)
        async_load(v_tiles, [line, value_column], bars.index(0), v_s)
        async_load(o_tiles, [line, value_column], bars.index(0), o_s)
        if not HALF:
            mbarrier.expect(bars.index(1), 2 * S_tiles.block_type.nbytes)
            async_load(S_tiles, [pid * K, 0], bars.index(1), S)
            in_rows = (dv_tiles, dq_tiles)
            if tokens < C:
                async_load(dS_tiles, [(n * H + pid % H) * K, 0], bars.index(1), dS)
            else:
                for m in gl.static_range(TILES):
                    for right in gl.static_range(TILES):
                        into = part_of(parts, TILES * TILES, m, right, TILES)
                        async_load(in_rows[m], [line, column + right * C], bars.index(1), into)

    x = decays(g, g_t, g_k, tokens, K, layout)
    part.store(gl.sum(grouped(x, GROUPS, by_group), 1))
    bonus = gl.full([1, K], 1.0, gl.float32, layout)
    if PREVIOUS:
        bonus = gl.load(u + gl.arange(0, K, gl.SliceLayout(0, layout)) * u_k).to(gl.float32)[None, :]
    if HALF:
        S_tiles += pid.to(gl.int64) * (K * NV * K)
        dS_tiles += pid.to(gl.int64) * (K * NV * K)
        if not APART:
            of_S, of_dS, state_row = rounded_states(S_tiles, dS_tiles, S, dS, K, DG, by_row)
            row_s.store(state_row)
            fence_async_shared()
    mbarrier.wait(bars.index(0), 0)
    if tokens < C:
        zeroed_behind(q_s, tokens, layout)
        zeroed_behind(k_s, tokens, layout)
        if not APART:
            zeroed_behind(v_s, tokens, layout)
            zeroed_behind(o_s, tokens, layout)
        fence_async_shared()
        meet()

    if HALF:
        largest = most(gl.maximum(gl.abs(q_s.load(by_row)), gl.abs(k_s.load(by_row))).to(gl.float32))

    # M, and the terms of the states: sums over steps of W value channels
    i = gl.arange(0, C, gl.SliceLayout(1, square))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, block)))[None, :, None]
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, block)))[None, None, :]
    zero = gl.zeros([C // ROWS, ROWS, ROWS], gl.float32, block)
    of_M, of_levels, of_q, of_k = scale, 1.0, 1.0, 1.0
    if APART:
        dA = gl.zeros([C, C], gl.float32, square)
        dA_t = dA
        dq_in = gl.zeros([C, K], gl.float32, mma)
        dk_in = dq_in
        D = zero
        D_t = zero
        state_row = gl.zeros([K], gl.float32, gl.SliceLayout(1, by_row))
        for step in range(STEPS):
            stage = step % STAGES
            v = values.index(stage)
            o = values.index(STAGES + stage)
            S = states.index(stage)
            dS = states.index(STAGES + stage)
            if HALF:
                of_S, of_dS, more = rounded_states(S_tiles + step * W, dS_tiles + step * W, S, dS, NV * K, DG, by_row)
                state_row += more
                dq_in *= inverse(of_S)
                dk_in *= inverse(of_dS)
                fence_async_shared()
                meet()
            for one in gl.static_range(COPIES):
                mbarrier.wait(step_bars[one].index(stage), (step // STAGES) & 1)
            if tokens < C:
                zeroed_behind(v, tokens, by_row)
                zeroed_behind(o, tokens, by_row)
                fence_async_shared()
                meet()
            D = mma_v2(blocks(o, block_left, False), blocks(v, block_right, True), D)
            D_t = mma_v2(blocks(v, block_left, False), blocks(o, block_right, True), D_t)
            if DG and not HALF:
                state_row += gl.sum(S.load(by_row).to(gl.float32) * dS.load(by_row).to(gl.float32), 1)
            dA = warpgroup_mma(o, v.permute((1, 0)), dA, is_async=True)
            dA_t = warpgroup_mma(v, o.permute((1, 0)), dA_t, is_async=True)
            dq_in = warpgroup_mma(o, S.permute((1, 0)), dq_in, is_async=True)
            dk_in = warpgroup_mma(v, dS.permute((1, 0)), dk_in, is_async=True)
            dA, dA_t, dq_in, dk_in = warpgroup_mma_wait(0, [dA, dA_t, dq_in, dk_in])
            if HALF:
                dq_in *= of_S
                dk_in *= of_dS
            expect_step(tiles, step_bars, step + STAGES, STEPS, COPIES)
            meet()
            ask_step(tiles, values, states, step_bars, line, value_column, pid * K, step + STAGES, STEPS, COPIES)
        if HALF:
            of_M, of_levels = level_powers(dA, largest)
        M_s.store((gl.where(i > j, dA, dA_t) * of_M).to(kind))
    else:
        dA = warpgroup_mma(o_s, v_s.permute((1, 0)), gl.zeros([C, C], gl.float32, square), use_acc=False, is_async=True)
        dA_t = warpgroup_mma(v_s, o_s.permute((1, 0)), gl.zeros([C, C], gl.float32, square), use_acc=False, is_async=True)
        dA, dA_t = warpgroup_mma_wait(0, [dA, dA_t])
        if HALF:
            of_M, of_levels = level_powers(dA, largest)
        M_s.store((gl.where(i > j, dA, dA_t) * of_M).to(kind))
        D = mma_v2(blocks(o_s, block_left, False), blocks(v_s, block_right, True), zero)
        D_t = mma_v2(blocks(v_s, block_left, False), blocks(o_s, block_right, True), zero)
    near = gl.convert_layout((gl.where(a > b, D, D_t) * of_M).to(kind), block_left)
    e_s.store(gl.reshape(gl.sum(gl.where(a == b, D, 0.0), 2), [C]) * scale)
    if APART:
        if DG:
            row_s.store(state_row)
    else:
        if not HALF:
            mbarrier.wait(bars.index(1), 0)
        dq_in = warpgroup_mma(o_s, S.permute((1, 0)), gl.zeros([C, K], gl.float32, mma), use_acc=False, is_async=True)
        dk_in = warpgroup_mma(v_s, dS.permute((1, 0)), gl.zeros([C, K], gl.float32, mma), use_acc=False, is_async=True)
        dq_in, dk_in = warpgroup_mma_wait(0, [dq_in, dk_in])
        if HALF:
            dq_in *= of_S
            dk_in *= of_dS
    if HALF:
        down, of_q = powers_of_two(most(dq_in))
        dq_in *= down
        of_q *= scale
        down, of_k = powers_of_two(most(dk_in))
        dk_in *= down
        of_levels *= scale
    else:
        dq_in *= scale
    meet()
    v_s.store(dq_in.to(kind))
    dk_s.store(dk_in.to(kind))
    if DG and not (HALF or APART):
        row_s.store(gl.sum(S.load(by_row).to(gl.float32) * dS.load(by_row).to(gl.float32), 1))

    # X of all levels
    q = q_s.load(layout)
    k = k_s.load(layout)
    X_0, X_1, X_2, qf, kf = near_levels(q, k, x, PREVIOUS, layout, by_group)
    before, after, whole = around(part, across)
    after = exp2(after)
    quarter = exp2(between(part, 2, across))
    half_way = exp2(between(part, 4, across))
    tables.index(0).store(quarter * of_levels)
    tables.index(1).store(half_way * of_levels)
    tables.index(2).store(exp2(before) * of_q)
    tables.index(3).store(after * of_k)
    if STORED:
        own_row = gl.arange(0, C, gl.SliceLayout(1, layout))
        own_key = gl.arange(0, K, gl.SliceLayout(0, layout))
        own_at = (
            (own_row // R * R).to(gl.int64)[:, None] * (H * K) + own_key[None, :] + (own_row % R).to(gl.int64)[:, None] * (H * K) + place
        )
        gl.store(rest + own_at, (kf * spread(after, R, layout)).to(kind), mask=(own_row < tokens)[:, None])
    elif not APART:
        rest_s.store((kf * spread(after, R, layout)).to(kind))
    if PREVIOUS and WEIGHED:
        own = bonus
        if HALF:
            down, of_u = powers_of_two(most(bonus) * 2**15)
            own *= down
        uk_s.store((k.to(gl.float32) * own).to(kind))
    fence_async_shared()
    meet()
    if not APART:
        dV = warpgroup_mma(rest_s, dS, gl.zeros([C, K], gl.float32, mma), use_acc=False, is_async=True)
    X_3 = gl.where(in_second_half(3, C, layout), qf, kf)
    X_4 = gl.where(in_second_half(4, C, layout), qf, kf) * spread(quarter, R, layout)
    X_5 = gl.where(in_second_half(5, C, layout), qf, kf) * spread(half_way, R, layout)
    if WEIGHED:
        if PREVIOUS:
            D = mma_v2(blocks(q_s, block_left, False), blocks(uk_s, block_right, True), zero)
        else:
            D = mma_v2(blocks(q_s, block_left, False), blocks(k_s, block_right, True), zero)
        if PREVIOUS and HALF:
            D *= of_u
        D = gl.where(a == b, D, 0.0)
    if not APART:
        dV = warpgroup_mma_wait(0, [dV])
    meet()
    X_s.index(0).store(X_0)
    X_s.index(1).store(X_1)
    X_s.index(2).store(X_2)
    X_s.index(3).store(X_3.to(kind))
    X_s.index(4).store(X_4.to(kind))
    X_s.index(5).store(X_5.to(kind))
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
        if WEIGHED:
            P = warpgroup_mma(X, X.permute((1, 0)), gl.zeros([C, C], gl.float32, square), use_acc=False, is_async=True)
        Y = warpgroup_mma(far, X, gl.zeros([C, K], gl.float32, mma), use_acc=False, is_async=True)
        if WEIGHED:
            P, far, Y = warpgroup_mma_wait(0, [P, far, Y])
            A = gl.where((i > j) & ((i ^ j) >> n == 1), P, A)
        else:
            far, Y = warpgroup_mma_wait(0, [far, Y])
        Y = Y.to(kind)
        meet()
        X.store(Y)
    near_a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, block_left)))[None, :, None]
    near_b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, block_left)))[None, None, :]
    wide = gl.zeros([C // ROWS, ROWS, K], gl.float32, block)
    for n in gl.static_range(4):
        X = X_s.index(n)
        if WEIGHED:
            P = mma_v2(blocks(X, block_left, False), blocks(X, block_right, True), zero)
            D = gl.where(((a ^ b) >> n == 1) & (a > b), P, D)
        Y = mma_v2(gl.where((near_a ^ near_b) >> n == 1, near, gl.zeros_like(near)), blocks(X, block_right, False), wide)
        Y = gl.reshape(Y.to(kind), [C, K])
        meet()
        X.store(Y)
    if WEIGHED:
        if APART:
            D_s = reinterpret(o_s, gl.float32, [C, ROWS], plain2)
        of_A = scale
        if HALF and not APART:
            down, up = powers_of_two(gl.maximum(most(A), most(gl.reshape(D, [C, ROWS]))) * gl.maximum(scale, -scale))
            of_A *= down
            dV *= of_dS * down
        D_s.store(gl.reshape((D * of_A).to(D_s.dtype), [C, ROWS]))
        cut: gl.constexpr = in_blocks(gl.to_linear_layout(square, [C, C]))
        D = gl.expand_dims(D_s.load(gl.SliceLayout(1, cut)), 1).broadcast_to([C, C // ROWS, ROWS])
        D = gl.convert_layout(gl.reshape(D, [C, C]), square, assert_trivial=True)
        A = gl.where(i // ROWS == j // ROWS, D, (A * of_A).to(D_s.dtype))
        if APART:
            gl.store(weights + pid.to(gl.int64) * (C * C) + i * C + j, A)
            meet()
        else:
            M_s.store(A)
            fence_async_shared()
            meet()
            dV = warpgroup_mma(M_s.permute((1, 0)), o_s, dV, is_async=True)
            dV = warpgroup_mma_wait(0, [dV])
            if HALF:
                dV *= up
            meet()
            row = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None]
            where = row.to(gl.int64) * (H * K) + gl.arange(0, K, gl.SliceLayout(0, mma))[None, :]
            gl.store(dv + place + where, dV.to(kind), mask=row < tokens)
    else:
        meet()

    # dq, dk, dg
    i = gl.arange(0, C, gl.SliceLayout(1, layout))
    j = gl.arange(0, K, gl.SliceLayout(0, layout))
    live = (i < tokens)[:, None]
    at = (i // R * R).to(gl.int64)[:, None] * (H * K) + j[None, :] + (i % R).to(gl.int64)[:, None] * (H * K) + place
    sums = reinterpret(o_s, gl.float32, [KINDS, GROUPS, K], plain2)
    x = decays(g, g_t, g_k, tokens, K, layout)
    d, d_gate = collected(q_s, v_s, X_s, x, tables, sums, of_levels, layout, by_group, True, PREVIOUS, DG, HALF)
    e = e_s.load(gl.SliceLayout(1, layout))[:, None]
    gl.store(dq + at, (d + k_s.load(layout).to(gl.float32) * (e * bonus)).to(kind), mask=live)
    if DG:
        meet()
        d_gate = flat(d_gate, layout) + spread(from_groups(sums, part, True, across), R, layout)
        whole = exp2(whole) * grouped_row(row_s, across)
        d_gate += spread(whole.broadcast_to([GROUPS, K]), R, layout)
        meet()
    x = decays(g, g_t, g_k, tokens, K, layout)
    d, more = collected(k_s, dk_s, X_s, x, tables, sums, of_levels, layout, by_group, False, PREVIOUS, DG, HALF)
    e = e_s.load(gl.SliceLayout(1, layout))[:, None]
    gl.store(dk + at, (d + q_s.load(layout).to(gl.float32) * (e * bonus)).to(kind), mask=live)
    if DG:
        meet()
        d_gate += flat(more, layout) + spread(from_groups(sums, part, False, across), R, layout)
        if STATIC:
            store_sum(dg + per_chunk, gl.where(live, d_gate, 0.0), part, by_group)
        else:
            gl.store(dg + at, d_gate.to(dg.dtype.element_ty), mask=live)
    if PREVIOUS:
        own = q_s.load(layout).to(gl.float32) * k_s.load(layout).to(gl.float32) * e
        store_sum(du + per_chunk, own, part, by_group)
