"""What chunks need of their own tokens, for heads of several blocks of key channels on Hopper, in Gluon: any decay at the same speed.

With the tiles X of ``channel_forward``, a program stores of its chunk and head, for ``channel_walk``:

    A     = scale (sum of X_L X_L^T + diagonal)
    read  = scale q o w_1 ... w_t   ("previous": up to t - 1)     rest = k o w_{s+1} ... w_64     total = w_1 ... w_64

It walks the blocks of BK key channels, over which A is summed. No chunk needs another one. Two programs fit on a multiprocessor: one makes
tiles while the other multiplies.

float16: A has no bound. It is multiplied by a power of two for each row, so no later token changes an output. Backward in time its rows are
summed over, and have the same power. The inverses are stored in ``powers``. The walk multiplies by the power of two in scale, so that read
does not become subnormal.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import exp2, meet, zero_rows_from
from ....gpu.ring import barriers, expect, invalidate, load_tiles
from ....gpu.tiles import powers_of_two
from ..heads import LARGE
from .dyadic import GROUPS, ROWS, C, R, around, between, blocks, chunk_at, decays, grouped, in_blocks, in_second_half, near_levels, spread

BK = gl.constexpr(64)  # key channels of a block
STAGES = gl.constexpr(2)  # of tiles of q and k


@gluon.jit
def load_block(tiles, rings, bars, line, column, n, exists):
    """Start the loads of q and k of block n."""
    at = ([line, column + n * BK], [line, column + n * BK])
    load_tiles(tiles, rings, bars, at, n, exists)


@gluon.jit
def store_levels(X_s, q, k, x, part, PREVIOUS: gl.constexpr, layout: gl.constexpr, by_group: gl.constexpr):
    """Store X of all levels. Returns q and k with their factors within groups."""
    across: gl.constexpr = gl.SliceLayout(1, by_group)
    X_0, X_1, X_2, qf, kf = near_levels(q, k, x, PREVIOUS, layout, by_group)
    X_s[0].store(X_0)
    X_s[1].store(X_1)
    X_s[2].store(X_2)
    X_s[3].store(gl.where(in_second_half(3, C, layout), qf, kf).to(q.dtype))
    X_4 = gl.where(in_second_half(4, C, layout), qf, kf) * spread(exp2(between(part, 2, across)), R, layout)
    X_s[4].store(X_4.to(q.dtype))
    X_5 = gl.where(in_second_half(5, C, layout), qf, kf) * spread(exp2(between(part, 4, across)), R, layout)
    X_s[5].store(X_5.to(q.dtype))
    return qf, kf


@gluon.jit
def store_weights(
    A, D, D_s, weights, powers, scale, HALF: gl.constexpr, ROW_POWERS: gl.constexpr, square: gl.constexpr
):  # fmt: skip
    """Store scale A [C,C] with the blocks D on its diagonal; float16: times powers of two, whose inverses are stored in ``powers`` [C]."""
    i = gl.arange(0, C, gl.SliceLayout(1, square))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    D_s.store(gl.reshape(D, [C, ROWS]))
    meet()
    cut: gl.constexpr = in_blocks(gl.to_linear_layout(square, [C, C]))
    D = gl.expand_dims(D_s.load(gl.SliceLayout(1, cut)), 1).broadcast_to([C, C // ROWS, ROWS])
    D = gl.convert_layout(gl.reshape(D, [C, C]), square, assert_trivial=True)
    A = gl.where(i // ROWS == j // ROWS, D, A) * scale
    if HALF:
        largest = gl.max(gl.abs(A), 1)
        if not ROW_POWERS:
            largest = gl.max(largest, 0) + gl.zeros([C], gl.float32, gl.SliceLayout(1, square))
        down, up = powers_of_two(largest)
        A *= down[:, None]
        gl.store(powers + gl.arange(0, C, gl.SliceLayout(1, square)), up)
    gl.store(weights + i * C + j, A.to(weights.dtype.element_ty))


@gluon.jit(do_not_specialize=["N", "T"])
def penstock_channel_weights_sm90(
    q_tiles, k_tiles, g, u, weights, read, rest, totals, powers, cu_seqlens, scale, N, T,
    g_b, g_h, u_h, u_k, g_t: gl.constexpr, g_k: gl.constexpr, H: gl.constexpr, K: gl.constexpr, PREVIOUS: gl.constexpr,
    PACKED: gl.constexpr, ROW_POWERS: gl.constexpr,
):  # fmt: skip
    """A = scale (sum_L X_L X_L^T + diagonal), read = scale q o w_1 ... w_t, rest = k o w_{s+1} ... w_64, total = w_1 ... w_64.

    Reads q, k [B,T,H,K] as TMA tiles [C,BK] of tokens [B T,H K], g [B,T,H,K], u [H,K]. Writes ``weights`` A [slots,H,C,C], ``read`` and
    ``rest`` [B,T,H,K], ``totals`` [slots,H,K] and, of float16, ``powers`` [slots,H,C] float32: of each row if ROW_POWERS, else one for all.
    Program (chunk, head).
    """
    gl.static_assert(K == LARGE)
    gl.static_assert(q_tiles.dtype == gl.bfloat16 or q_tiles.dtype == gl.float16)
    kind: gl.constexpr = q_tiles.dtype
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = WARPS // 4
    layout: gl.constexpr = gl.BlockedLayout([R, 2], [1, 32], [GROUPS, WARPS // GROUPS], [1, 0])
    by_group: gl.constexpr = gl.BlockedLayout([1, R, 2], [1, 1, 32], [GROUPS, 1, WARPS // GROUPS], [2, 1, 0])
    across: gl.constexpr = gl.SliceLayout(1, by_group)
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, ACROSS], [16, C // ACROSS, 16])
    block: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, ACROSS], [1, 16, 8])
    block_left: gl.constexpr = gl.DotOperandLayout(0, block, 2)
    block_right: gl.constexpr = gl.DotOperandLayout(1, block, 2)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    pid = gl.program_id(0)
    h, _, b, at, tokens = chunk_at(pid, cu_seqlens, N, T, H, PACKED)
    if tokens <= 0:
        return
    token = b * T + at
    g += b * g_b + at * g_t + h * g_h
    u += h * u_h
    line = token.to(gl.int32)
    column = (h * K).to(gl.int32)

    q_s = gl.allocate_shared_memory(kind, [STAGES, C, BK], half)
    k_s = gl.allocate_shared_memory(kind, [STAGES, C, BK], half)
    X_s = (  # Triton puts barriers between stores to one allocation
        gl.allocate_shared_memory(kind, [C, BK], half),
        gl.allocate_shared_memory(kind, [C, BK], half),
        gl.allocate_shared_memory(kind, [C, BK], half),
        gl.allocate_shared_memory(kind, [C, BK], half),
        gl.allocate_shared_memory(kind, [C, BK], half),
        gl.allocate_shared_memory(kind, [C, BK], half),
    )
    part = gl.allocate_shared_memory(gl.float32, [GROUPS, BK], plain2)
    D_s = gl.allocate_shared_memory(gl.float32, [C, ROWS], plain2)
    bars = (barriers(STAGES, 1), barriers(STAGES, 1))
    if PREVIOUS:
        uk_s = gl.allocate_shared_memory(kind, [C, BK], half)
    fence_async_shared()
    meet()
    tiles = (q_tiles, k_tiles)
    rings = (q_s, k_s)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, m, m < K // BK)
    meet()
    for m in gl.static_range(STAGES):
        load_block(tiles, rings, bars, line, column, m, m < K // BK)

    i = gl.arange(0, C, gl.SliceLayout(1, square))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, block)))[None, :, None]
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, block)))[None, None, :]
    row = gl.arange(0, C, gl.SliceLayout(1, layout))
    key = gl.arange(0, BK, gl.SliceLayout(0, layout))
    at = (row // R * R).to(gl.int64)[:, None] * (H * K) + key[None, :] + (row % R).to(gl.int64)[:, None] * (H * K) + token * (H * K) + h * K
    none = gl.zeros([C, C], gl.float32, square)
    A = none
    D = gl.zeros([C // ROWS, ROWS, ROWS], gl.float32, block)
    of_u = 1.0
    if PREVIOUS and HALF:
        own = gl.load(u + gl.arange(0, K, gl.BlockedLayout([1], [32], [WARPS], [0])) * u_k).to(gl.float32)
        of_u, up_u = powers_of_two(gl.max(gl.abs(own), 0) * 2**15)
    x = decays(g, g_t, g_k, tokens, BK, layout)
    for m in range(K // BK):
        s = m % STAGES
        q_tile = q_s.index(s)
        k_tile = k_s.index(s)
        part.store(gl.sum(grouped(x, GROUPS, by_group), 1))
        mbarrier.wait(bars[0].index(s), (m // STAGES) & 1)
        mbarrier.wait(bars[1].index(s), (m // STAGES) & 1)
        if tokens < C:
            zero_rows_from(q_tile, tokens, layout)
            zero_rows_from(k_tile, tokens, layout)
        meet()
        q = q_tile.load(layout)
        k = k_tile.load(layout)
        if PREVIOUS:
            bonus = gl.load(u + (m * BK + key) * u_k).to(gl.float32)[None, :]
            uk_s.store((k.to(gl.float32) * (bonus * of_u)).to(kind))
        qf, kf = store_levels(X_s, q, k, x, part, PREVIOUS, layout, by_group)
        before, after, whole = around(part, across)
        live = (row < tokens)[:, None]
        gl.store(read + at + m * BK, (qf * (spread(exp2(before), R, layout) * scale)).to(kind), mask=live)
        gl.store(rest + at + m * BK, (kf * spread(exp2(after), R, layout)).to(kind), mask=live)
        sums = totals + pid.to(gl.int64) * K + m * BK + gl.arange(0, BK, gl.SliceLayout(0, across))
        gl.store(sums, gl.sum(exp2(whole), 0))
        if m + 1 < K // BK:
            x = decays(g + (m + 1) * (BK * g_k), g_t, g_k, tokens, BK, layout)
        fence_async_shared()
        meet()
        P_4 = warpgroup_mma(X_s[4], X_s[4].permute((1, 0)), none, use_acc=False, is_async=True)
        P_5 = warpgroup_mma(X_s[5], X_s[5].permute((1, 0)), none, use_acc=False, is_async=True)
        left = blocks(q_tile, block_left, False)
        if PREVIOUS:
            D = gl.where(a == b, mma_v2(left, blocks(uk_s, block_right, True), D), D)
        else:
            D = gl.where(a == b, mma_v2(left, blocks(k_tile, block_right, True), D), D)
        for level in gl.static_range(4):
            X = X_s[level]
            P = mma_v2(blocks(X, block_left, False), blocks(X, block_right, True), D)
            D = gl.where(((a ^ b) >> level == 1) & (a > b), P, D)
        P_4, P_5 = warpgroup_mma_wait(0, [P_4, P_5])
        expect(tiles, bars, m + STAGES, m + STAGES < K // BK)
        A += gl.where(i > j, gl.where((i ^ j) >> 4 == 1, P_4, gl.where((i ^ j) >> 5 == 1, P_5, 0.0)), 0.0)
        meet()
        load_block(tiles, rings, bars, line, column, m + STAGES, m + STAGES < K // BK)
    if PREVIOUS and HALF:
        D = gl.where(a == b, D * up_u, D)
    store_weights(A, D, D_s, weights + pid.to(gl.int64) * (C * C), powers + pid.to(gl.int64) * C, scale, HALF, ROW_POWERS, square)
    invalidate(bars)
