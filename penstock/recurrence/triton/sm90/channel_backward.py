"""The chunkwise backward kernel for decays per channel on Hopper, in Gluon: any decay at the same speed. One program per chunk and head.

With S the state before the chunk, dS the gradient of the state after it, and the tiles X and factors f of ``channel_forward``:

    dA = scale dO V^T                                   M = dA below the diagonal, its transpose above
    dX_L = f o Y_L,   Y_L = (M where L splits the pair) X_L      second halves are added to dq, first halves to dk
    dq += e k + scale read o (dO S^T)                   dk += e q + rest o (V dS^T)            e the diagonal of dA
    dV = A^T dO + (k o rest) dS                         A = sum of X_L X_L^T as in the forward pass
    dg_t = sum over all levels of q o dX over later tokens in the second half, and of k o dX over earlier tokens in the first half,
           the same sums for the terms of the states, and total o rowsum(S o dS)

Every term of dg is a pair of tokens with t between them, so there is no cancellation. Y_L overwrites X_L. Factors are computed again for
dq and again for dk, because registers limit the kernel more than exponentials do.

The phases of a program: load (``backward_memory``), terms of the states (``state_terms``), ``store_levels``, ``multiply_levels``,
``store_value_gradient``, and the gradients of q, k and decays (``sums``).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import exp2, meet, most, reinterpret
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import powers_of_two
from ..heads import MEDIUM, SMALL
from .backward_memory import (
    LEVELS,
    Place,
    Tiles,
    await_chunk,
    layouts_of,
    load_chunk,
    load_first_steps,
    memory_of,
)
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
    grouped,
    in_blocks,
    in_second_half,
    near_levels,
    spread,
    store_zeros,
)
from .state_terms import rounded_states, state_terms
from .sums import store_gradients


@gluon.jit
def store_tables(memory, powers, L: gl.constexpr):
    """Store factors of groups. Returns those to the middles of blocks of 4 and 8 groups, to the end, and the sum of the chunk's decays."""
    of_levels, of_q, of_k = powers
    before, after, whole = around(memory.part, L.across)
    after = exp2(after)
    quarter = exp2(between(memory.part, 2, L.across))
    half_way = exp2(between(memory.part, 4, L.across))
    memory.tables.index(0).store(quarter * of_levels)
    memory.tables.index(1).store(half_way * of_levels)
    memory.tables.index(2).store(exp2(before) * of_q)
    memory.tables.index(3).store(after * of_k)
    return quarter, half_way, after, whole


@gluon.jit
def store_levels(
    memory, x, dS, bonus, powers, rest, first, tokens, H: gl.constexpr,
    STORED: gl.constexpr, STEPS: gl.constexpr, PREVIOUS: gl.constexpr, HALF: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Store X of all levels and the tables of factors; if STORED, k o rest in ``rest`` from ``first`` on.

    Returns the sum of the chunk's decays, the diagonal of A in blocks, and the state's part of dV; without steps, the latter is 0.
    """
    kind: gl.constexpr = memory.q.dtype
    K: gl.constexpr = memory.q.shape[1]
    WEIGHED: gl.constexpr = STORED or not STEPS
    X_s = memory.X
    rest_s = X_s.index(2 * (K // C))
    uk_s = X_s.index(LEVELS - 1)
    q = memory.q.load(L.tokens)
    k = memory.k.load(L.tokens)
    X_0, X_1, X_2, qf, kf = near_levels(q, k, x, PREVIOUS, L.tokens, L.groups)
    quarter, half_way, after, whole = store_tables(memory, powers, L)
    if STORED:
        i = gl.arange(0, C, gl.SliceLayout(1, L.tokens))
        j = gl.arange(0, K, gl.SliceLayout(0, L.tokens))
        at = (i // R * R).to(gl.int64)[:, None] * (H * K) + j[None, :] + (i % R).to(gl.int64)[:, None] * (H * K) + first
        gl.store(rest + at, (kf * spread(after, R, L.tokens)).to(kind), mask=(i < tokens)[:, None])
    elif not STEPS:
        rest_s.store((kf * spread(after, R, L.tokens)).to(kind))
    if PREVIOUS and WEIGHED:
        own = bonus
        if HALF:
            down, of_u = powers_of_two(most(bonus) * 2**15)
            own *= down
        uk_s.store((k.to(gl.float32) * own).to(kind))
    fence_async_shared()
    meet()
    dV = 0.0
    if not STEPS:
        dV = warpgroup_mma(rest_s, dS, gl.zeros([C, K], gl.float32, L.mma), use_acc=False, is_async=True)
    X_3 = gl.where(in_second_half(3, C, L.tokens), qf, kf)
    X_4 = gl.where(in_second_half(4, C, L.tokens), qf, kf) * spread(quarter, R, L.tokens)
    X_5 = gl.where(in_second_half(5, C, L.tokens), qf, kf) * spread(half_way, R, L.tokens)
    D = gl.zeros([C // ROWS, ROWS, ROWS], gl.float32, L.block)
    if WEIGHED:
        a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L.block)))[None, :, None]
        b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, L.block)))[None, None, :]
        if PREVIOUS:
            D = mma_v2(blocks(memory.q, L.block_left, False), blocks(uk_s, L.block_right, True), D)
        else:
            D = mma_v2(blocks(memory.q, L.block_left, False), blocks(memory.k, L.block_right, True), D)
        if PREVIOUS and HALF:
            D *= of_u
        D = gl.where(a == b, D, 0.0)
    if not STEPS:
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
    return whole, D, dV


@gluon.jit
def multiply_levels(memory, near, D, WEIGHED: gl.constexpr, L: gl.constexpr):
    """Overwrite X of all levels by Y. Returns A [C,C] and the blocks on its diagonal, if WEIGHED.

    ``near``: the blocks on the diagonal of M. D: the diagonal of A in blocks.
    """
    kind: gl.constexpr = memory.q.dtype
    K: gl.constexpr = memory.q.shape[1]
    i = gl.arange(0, C, gl.SliceLayout(1, L.square))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, L.square))[None, :]
    a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L.block)))[None, :, None]
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, L.block)))[None, None, :]
    M = memory.M.load(L.left)
    differ = gl.arange(0, C, gl.SliceLayout(1, L.left))[:, None] ^ gl.arange(0, C, gl.SliceLayout(0, L.left))[None, :]
    none = gl.zeros_like(M)
    A = gl.zeros([C, C], gl.float32, L.square)
    for n in gl.static_range(4, LEVELS):
        X = memory.X.index(n)
        far = gl.where(differ >> n == 1, M, none)
        if WEIGHED:
            P = warpgroup_mma(X, X.permute((1, 0)), gl.zeros([C, C], gl.float32, L.square), use_acc=False, is_async=True)
        Y = warpgroup_mma(far, X, gl.zeros([C, K], gl.float32, L.mma), use_acc=False, is_async=True)
        if WEIGHED:
            P, far, Y = warpgroup_mma_wait(0, [P, far, Y])
            A = gl.where((i > j) & ((i ^ j) >> n == 1), P, A)
        else:
            far, Y = warpgroup_mma_wait(0, [far, Y])
        Y = Y.to(kind)
        meet()
        X.store(Y)
    near_a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L.block_left)))[None, :, None]
    near_b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, L.block_left)))[None, None, :]
    zero = gl.zeros([C // ROWS, ROWS, ROWS], gl.float32, L.block)
    wide = gl.zeros([C // ROWS, ROWS, K], gl.float32, L.block)
    for n in gl.static_range(4):
        X = memory.X.index(n)
        if WEIGHED:
            P = mma_v2(blocks(X, L.block_left, False), blocks(X, L.block_right, True), zero)
            D = gl.where(((a ^ b) >> n == 1) & (a > b), P, D)
        Y = mma_v2(gl.where((near_a ^ near_b) >> n == 1, near, gl.zeros_like(near)), blocks(X, L.block_right, False), wide)
        Y = gl.reshape(Y.to(kind), [C, K])
        meet()
        X.store(Y)
    return A, D


@gluon.jit
def store_value_gradient(
    memory, A, D, dV, of_dS, weights, dv, first, tokens, scale, H: gl.constexpr, STEPS: gl.constexpr, HALF: gl.constexpr, L: gl.constexpr
):
    """Store dV in ``dv`` from ``first`` on. With steps: store A in ``weights`` [C,C], and dV is left to ``values.py``."""
    kind: gl.constexpr = memory.q.dtype
    K: gl.constexpr = memory.q.shape[1]
    i = gl.arange(0, C, gl.SliceLayout(1, L.square))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, L.square))[None, :]
    D_s = memory.D
    if STEPS:
        D_s = reinterpret(memory.dO, gl.float32, [C, ROWS], L.plain2)
    of_A = scale
    if HALF and not STEPS:
        down, up = powers_of_two(gl.maximum(most(A), most(gl.reshape(D, [C, ROWS]))) * gl.maximum(scale, -scale))
        of_A *= down
        dV *= of_dS * down
    D_s.store(gl.reshape((D * of_A).to(D_s.dtype), [C, ROWS]))
    cut: gl.constexpr = in_blocks(gl.to_linear_layout(L.square, [C, C]))
    D = gl.expand_dims(D_s.load(gl.SliceLayout(1, cut)), 1).broadcast_to([C, C // ROWS, ROWS])
    D = gl.convert_layout(gl.reshape(D, [C, C]), L.square, assert_trivial=True)
    A = gl.where(i // ROWS == j // ROWS, D, (A * of_A).to(D_s.dtype))
    if STEPS:
        gl.store(weights + i * C + j, A)
        meet()
    else:
        memory.M.store(A)
        fence_async_shared()
        meet()
        dV = warpgroup_mma(memory.M.permute((1, 0)), memory.dO, dV, is_async=True)
        dV = warpgroup_mma_wait(0, [dV])
        if HALF:
            dV *= up
        meet()
        row = gl.arange(0, C, gl.SliceLayout(1, L.mma))[:, None]
        where = row.to(gl.int64) * (H * K) + gl.arange(0, K, gl.SliceLayout(0, L.mma))[None, :]
        gl.store(dv + first + where, dV.to(kind), mask=row < tokens)


@gluon.jit(do_not_specialize=["N", "T"])
def penstock_channel_bwd_sm90(
    q_tiles, k_tiles, v_tiles, o_tiles, S_tiles, dS_tiles, dv_tiles, dq_tiles, g, u, dq, dk, dv, dg, du, weights, rest, cu_seqlens,
    scale, N, T, g_b, g_h, u_h, u_k, g_t: gl.constexpr, g_k: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
    DG: gl.constexpr, STATIC: gl.constexpr, PREVIOUS: gl.constexpr, PACKED: gl.constexpr, BLOCKS: gl.constexpr, NV: gl.constexpr,
    STORED: gl.constexpr,
):  # fmt: skip
    """dA = scale dO V^T, dq = sum_L dX_L + scale read o (dO S^T), dk = sum_L dX_L + rest o (V dS^T), dV = A^T dO + (k o rest) dS.

    Reads q, k [B,T,H,K], v, dO [B,T,H,V], S before and dS after each chunk [slots,H,K,NV K], as TMA tiles: [C,K] of tokens [B T,H K], [K,K]
    of states [slots H K,NV K]; g [B,T,H,K], u [H,K]. Writes dq, dk, dg [B,T,H,K] and dv [B,T,H,V]. Program (chunk, head).

    bfloat16 without BLOCKS and NV: dS after a whole chunk is in the rows of its tokens: the first C key channels in dv, the others in dq.
    This launch writes dv and dq after it has read dS (``IN_ROWS`` in ``segments.py``). Their TMA tiles have 64 columns. ``dS_tiles`` has dS
    after shorter chunks.

    float16: the states are float32 and have no TMA tiles. Operands of products that have no bound are multiplied by powers of two, one
    for a tile (``powers_of_two``), and their products by the inverse.

    dq, dk, dv, dg are contiguous; du and, with STATIC, dg are sums over the tokens of a chunk, [slots, H, K].

    BLOCKS > 1: heads of BLOCKS K key channels; each of the H heads here is a block of K of them. NV: blocks of K value channels. If either
    is more than 1, dv is left to another launch. STORED: to ``values.py``, and what it needs is stored: A in ``weights`` [slots, H, C, C],
    float32, and k with the factors of the state in ``rest``, like k.
    """
    gl.static_assert(K == SMALL or K == MEDIUM)
    gl.static_assert(q_tiles.dtype == gl.bfloat16 or q_tiles.dtype == gl.float16)
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    IN_STEPS: gl.constexpr = BLOCKS * NV > 1
    W: gl.constexpr = 64 if IN_STEPS else K  # value channels of a step
    STEPS: gl.constexpr = NV * K // W if IN_STEPS else 0
    V: gl.constexpr = NV * K
    L: gl.constexpr = layouts_of(gl.num_warps(), K, W, 2)

    pid = gl.program_id(0)
    h, n, b, at, tokens = chunk_at(pid, cu_seqlens, N, T, H, PACKED)
    per_chunk = pid.to(gl.int64) * K
    if tokens <= 0:
        store_zeros(du, dg, per_chunk, K, PREVIOUS, DG and STATIC, gl.SliceLayout(0, L.tokens))
        return
    token = b * T + at
    first = (token * H + h) * K
    whole_head = h // BLOCKS
    key = h % BLOCKS * K
    g += b * g_b + at * g_t + whole_head * g_h + key * g_k
    u += whole_head * u_h + key * u_k

    memory = memory_of(q_tiles.dtype, K, IN_STEPS, L)
    bars = barriers(2, 1)
    place = Place(token.to(gl.int32), (h * K).to(gl.int32), (whole_head * V).to(gl.int32), pid, n, tokens)
    tiles = Tiles(q_tiles, k_tiles, v_tiles, o_tiles, S_tiles, dS_tiles, dv_tiles, dq_tiles)
    of_S, of_dS = 1.0, 1.0
    if IN_STEPS:
        step = load_first_steps(tiles, memory, bars, place, W, STEPS, HALF, L)
        S, dS = memory.X, memory.X
    else:
        S, dS = load_chunk(tiles, memory, bars, place, H, HALF, L)
        step = 0

    x = decays(g, g_t, g_k, tokens, K, L.tokens)
    memory.part.store(gl.sum(grouped(x, GROUPS, L.groups), 1))
    bonus = gl.full([1, K], 1.0, gl.float32, L.tokens)
    if PREVIOUS:
        bonus = gl.load(u + gl.arange(0, K, gl.SliceLayout(0, L.tokens)) * u_k).to(gl.float32)[None, :]
    if HALF:
        S_tiles += pid.to(gl.int64) * (K * V)
        dS_tiles += pid.to(gl.int64) * (K * V)
        if not IN_STEPS:
            of_S, of_dS, state_row = rounded_states(S_tiles, dS_tiles, S, dS, K, DG, L.rows)
            memory.row.store(state_row)
            fence_async_shared()
            meet()
    await_chunk(memory, bars.index(0), tokens, IN_STEPS, L)
    largest = 1.0
    if HALF:
        largest = most(gl.maximum(gl.abs(memory.q.load(L.rows)), gl.abs(memory.k.load(L.rows))).to(gl.float32))
    near, of_levels, of_q, of_k = state_terms(
        memory, bars.index(1), (S, dS, of_S, of_dS), step, S_tiles, dS_tiles, place, largest, scale, V, STEPS, DG, HALF, L
    )
    whole, D, dV = store_levels(memory, x, dS, bonus, (of_levels, of_q, of_k), rest, first, tokens, H, STORED, IN_STEPS, PREVIOUS, HALF, L)
    A, D = multiply_levels(memory, near, D, STORED or not IN_STEPS, L)
    if STORED or not IN_STEPS:
        weights += pid.to(gl.int64) * (C * C)
        store_value_gradient(memory, A, D, dV, of_dS, weights, dv, first, tokens, scale, H, IN_STEPS, HALF, L)
    else:
        meet()
    store_gradients(
        memory, memory.X, x, (g, g_t, g_k), bonus, whole, of_levels, (dq, dk, dg, du), first, per_chunk, tokens,
        H, DG, STATIC, PREVIOUS, HALF, True, L,
    )  # fmt: skip
    invalidate((bars,))
    if IN_STEPS:
        invalidate(step[3])
