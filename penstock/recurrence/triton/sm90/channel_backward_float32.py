"""The chunkwise backward kernel for decays per channel on Hopper, in Gluon, for float32 inputs. One program per chunk and head.

The formulas are those of ``channel_backward``. Operands are sums of float16 tiles times powers of two, see ``parts``; what is between
two products is stored in float32: the products Y of the levels, which overwrite the parts of X, and the terms of the states.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, meet, most, most_of_both, reinterpret, zero_rows_from
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import powers_of_two
from ..heads import SMALL
from .backward_memory import LEVELS, Memory, Place, layouts_of
from .channel_backward import store_tables
from .dyadic import GROUPS, ROWS, C, R, blocks, chunk_at, decays, grouped, in_blocks, in_second_half, near_levels, spread, store_zeros
from .parts import LEAST, halved, parts_of, store_parts, times, turned
from .sums import store_gradients


@gluon.jit
def block_product(a, b, c, PARTS: gl.constexpr, left: gl.constexpr, right: gl.constexpr):
    """c + a b^T within the four blocks of ROWS tokens of tiles [C,K], given by their parts."""
    a_0 = blocks(a[0], left, False)
    b_0 = blocks(b[0], right, True)
    if PARTS > 1:
        c = mma_v2(blocks(a[1], left, False), b_0, c)
        c = mma_v2(a_0, blocks(b[1], right, True), c)
    return mma_v2(a_0, b_0, c)


@gluon.jit
def memory_of(K: gl.constexpr, L: gl.constexpr):
    """The shared memory of a program (see ``Memory``: tiles of products as two parts each), and a vector [C] for the diagonal of A."""
    q = gl.allocate_shared_memory(gl.float32, [C, K], L.whole)
    k = gl.allocate_shared_memory(gl.float32, [C, K], L.whole)
    v = gl.allocate_shared_memory(gl.float32, [C, K], L.whole)  # then its parts, later the state's part of dq
    dO = gl.allocate_shared_memory(gl.float32, [C, K], L.whole)  # then its parts
    dk = gl.allocate_shared_memory(gl.float32, [C, K], L.whole)
    M = gl.allocate_shared_memory(gl.float16, [2, C, C], L.half)
    X = gl.allocate_shared_memory(gl.float16, [2 * LEVELS, C, K], L.half)
    part = gl.allocate_shared_memory(gl.float32, [GROUPS, K], L.plain2)
    tables = gl.allocate_shared_memory(gl.float32, [4, GROUPS, K], L.plain2)
    e = gl.allocate_shared_memory(gl.float32, [C], L.plain)
    own = gl.allocate_shared_memory(gl.float32, [C], L.plain)
    D = gl.allocate_shared_memory(gl.float32, [C, ROWS], L.plain2)
    row = gl.allocate_shared_memory(gl.float32, [K], L.plain)
    return Memory(q, k, v, dO, v, dk, M, X, part, tables, e, D, row), own


@gluon.jit
def sums_over_values(
    memory, bar, tiles, S, dS, place, NV: gl.constexpr, DG: gl.constexpr, PARTS: gl.constexpr, L: gl.constexpr
):  # fmt: skip
    """Sums over blocks of K value channels: dO V^T, V dO^T, dO S^T, V dS^T, the blocks on the diagonals of the first two, rowsum(S o dS).

    Then the inverse powers of two of the last tiles of dO and dS.
    """
    v_tiles, o_tiles = tiles
    K: gl.constexpr = memory.q.shape[1]
    V: gl.constexpr = NV * K
    row: gl.constexpr = gl.SliceLayout(1, L.rows)
    v_parts = reinterpret(memory.v, gl.float16, [2, C, K], L.half)
    o_parts = reinterpret(memory.dO, gl.float16, [2, C, K], L.half)
    v = parts_of(v_parts, 0, PARTS)
    o = parts_of(o_parts, 0, PARTS)
    S_parts = parts_of(memory.X, 0, PARTS)
    dS_parts = parts_of(memory.X, 2, PARTS)
    none = gl.zeros([C // ROWS, ROWS, ROWS], gl.float32, L.block)
    zero = gl.zeros([C, K], gl.float32, L.mma)
    live_row = gl.arange(0, C, row)[:, None] < place.tokens
    state_at = gl.arange(0, K, row)[:, None] * V + gl.arange(0, K, gl.SliceLayout(0, L.rows))[None, :]
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
        store_parts(memory.X, 0, one * down, PARTS)
        down, up_dS = powers_of_two(largest_d, LEAST)
        store_parts(memory.X, 2, other * down, PARTS)
        mbarrier.wait(bar, step & 1)
        one = memory.v.load(L.rows)
        other = memory.dO.load(L.rows)
        if place.tokens < C:
            one = gl.where(live_row, one, 0.0)
            other = gl.where(live_row, other, 0.0)
        largest, largest_d = most_of_both(one, other)
        down, up_v = powers_of_two(largest, LEAST)
        one *= down
        down, up_o = powers_of_two(largest_d, LEAST)
        other *= down
        meet()
        store_parts(v_parts, 0, one, PARTS)
        store_parts(o_parts, 0, other, PARTS)
        fence_async_shared()
        meet()
        D += block_product(o, v, none, PARTS, L.block_left, L.block_right) * up_o * up_v
        D_t += block_product(v, o, none, PARTS, L.block_left, L.block_right) * up_o * up_v
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
            mbarrier.expect(bar, 2 * v_tiles.block_type.nbytes, pred=step + 1 < NV)
            meet()
            async_load(v_tiles, [place.line, place.value_column + (step + 1) * K], bar, memory.v, pred=step + 1 < NV)
            async_load(o_tiles, [place.line, place.value_column + (step + 1) * K], bar, memory.dO, pred=step + 1 < NV)
    return dA, dA_t, dq_in, dk_in, D, D_t, state_row, up_o, up_dS


@gluon.jit
def store_state_terms(memory, sums, scale, DG: gl.constexpr, PARTS: gl.constexpr, L: gl.constexpr):
    """Store M, e, rowsum(S o dS), and the states' parts of dq (in ``memory.v``) and dk.

    Returns the parts of the blocks on the diagonal of M, and the inverse power of two of M.
    """
    dA, dA_t, dq_in, dk_in, D, D_t, state_row = sums
    i = gl.arange(0, C, gl.SliceLayout(1, L.mma))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, L.mma))[None, :]
    a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L.block)))[None, :, None]
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, L.block)))[None, None, :]
    dA = gl.where(i > j, dA, dA_t) * scale
    down, up_M = powers_of_two(most(dA), LEAST)
    store_parts(memory.M, 0, dA * down, PARTS)
    near, near_rest = halved(gl.where(a > b, D, D_t) * scale * down, PARTS)
    near = gl.convert_layout(near, L.block_left)
    near_rest = gl.convert_layout(near_rest, L.block_left)
    memory.e.store(gl.reshape(gl.sum(gl.where(a == b, D, 0.0), 2), [C]) * scale)
    meet()
    memory.v.store(dq_in * scale)
    memory.dk.store(dk_in)
    if DG:
        memory.row.store(state_row)
    return near, near_rest, up_M


@gluon.jit
def store_levels(
    memory, own_s, x, bonus, up_dS, rest, first, tokens, H: gl.constexpr,
    STORED: gl.constexpr, STEPS: gl.constexpr, PREVIOUS: gl.constexpr, PARTS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Store the parts of X of all levels, and the tables of factors; if STORED, k o rest in ``rest`` from ``first`` on.

    Returns the sum of the chunk's decays, the inverse powers of two of q and k, and the state's part of dV; with STEPS, the latter is 0.
    """
    K: gl.constexpr = memory.q.shape[1]
    q = memory.q.load(L.tokens)
    k = memory.k.load(L.tokens)
    if STORED or not STEPS:
        own_s.store(gl.sum(q * (k * bonus), 1))
    largest, largest_k = most_of_both(q, k)
    down, up_q = powers_of_two(largest, LEAST)
    q *= down
    down, up_k = powers_of_two(largest_k, LEAST)
    k *= down
    X_0, X_1, X_2, qf, kf = near_levels(q, k, x, PREVIOUS, L.tokens, L.groups)
    quarter, half_way, after, whole = store_tables(memory, (1.0, 1.0, 1.0), L)
    if STORED:
        i = gl.arange(0, C, gl.SliceLayout(1, L.tokens))
        j = gl.arange(0, K, gl.SliceLayout(0, L.tokens))
        at = i.to(gl.int64)[:, None] * (H * K) + j[None, :] + first
        gl.store(rest + at, kf * spread(after, R, L.tokens) * up_k, mask=(i < tokens)[:, None])
    elif not STEPS:
        store_parts(memory.X, 4, kf * spread(after, R, L.tokens), PARTS)
    fence_async_shared()
    meet()
    dV = 0.0
    if not STEPS:
        zero = gl.zeros([C, K], gl.float32, L.mma)
        dV = times(parts_of(memory.X, 4, PARTS), parts_of(memory.X, 2, PARTS), zero, PARTS)
    X_3 = gl.where(in_second_half(3, C, L.tokens), qf, kf)
    X_4 = gl.where(in_second_half(4, C, L.tokens), qf, kf) * spread(quarter, R, L.tokens)
    X_5 = gl.where(in_second_half(5, C, L.tokens), qf, kf) * spread(half_way, R, L.tokens)
    if not STEPS:
        dV = warpgroup_mma_wait(0, [dV])
        dV = dV * up_k * up_dS
    meet()
    store_parts(memory.X, 0, X_0, PARTS)
    store_parts(memory.X, 2, X_1, PARTS)
    store_parts(memory.X, 4, X_2, PARTS)
    store_parts(memory.X, 6, X_3, PARTS)
    store_parts(memory.X, 8, X_4, PARTS)
    store_parts(memory.X, 10, X_5, PARTS)
    fence_async_shared()
    meet()
    return whole, up_q, up_k, dV


@gluon.jit
def multiply_levels(memory, Y_s, near, ups, WEIGHED: gl.constexpr, PARTS: gl.constexpr, L: gl.constexpr):
    """Overwrite X of all levels by Y, float32, in ``Y_s``. If WEIGHED, returns A [C,C] and the blocks on its diagonal.

    A is not yet multiplied by the inverse powers of two of q and k.

    ``near``: parts of the blocks on the diagonal of M. Rows of Y are multiplied by the inverse of the power of the other half's tile.
    """
    near, near_rest = near
    up_M, up_q, up_k = ups
    K: gl.constexpr = memory.q.shape[1]
    i = gl.arange(0, C, gl.SliceLayout(1, L.mma))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, L.mma))[None, :]
    a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L.block)))[None, :, None]
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, L.block)))[None, None, :]
    none = gl.zeros([C // ROWS, ROWS, ROWS], gl.float32, L.block)
    zero = gl.zeros([C, K], gl.float32, L.mma)
    M = memory.M.index(0).load(L.left)
    M_rest = memory.M.index(PARTS - 1).load(L.left)
    differ = gl.arange(0, C, gl.SliceLayout(1, L.left))[:, None] ^ gl.arange(0, C, gl.SliceLayout(0, L.left))[None, :]
    A = zero
    for n in gl.static_range(4, LEVELS):
        X = parts_of(memory.X, 2 * n, PARTS)
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
    near_a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L.block_left)))[None, :, None]
    near_b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, L.block_left)))[None, None, :]
    wide = gl.zeros([C // ROWS, ROWS, K], gl.float32, L.block)
    D = none
    for n in gl.static_range(4):
        X = parts_of(memory.X, 2 * n, PARTS)
        if WEIGHED:
            P = block_product(X, X, none, PARTS, L.block_left, L.block_right)
            D = gl.where(((a ^ b) >> n == 1) & (a > b), P, D)
        pairs = (near_a ^ near_b) >> n == 1
        inner = gl.where(pairs, near, gl.zeros_like(near))
        X_high = blocks(X[0], L.block_right, False)
        Y = mma_v2(inner, X_high, wide)
        if PARTS > 1:
            Y = mma_v2(inner, blocks(X[1], L.block_right, False), Y)
            Y = mma_v2(gl.where(pairs, near_rest, gl.zeros_like(near)), X_high, Y)
        Y = gl.reshape(Y * up_M * gl.where((a >> n & 1) == 1, up_k, up_q), [C, K])
        meet()
        Y_s.index(n).store(Y)
    return A, D


@gluon.jit
def store_value_gradient(
    memory, own_s, A, D, dV, ups, weights, dv, first, tokens, scale,
    H: gl.constexpr, STEPS: gl.constexpr, PARTS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Store dV in ``dv`` from ``first`` on. STEPS: store A in ``weights`` [C,C], and dV is left to ``values.py``."""
    up_q, up_k, up_o = ups
    K: gl.constexpr = memory.q.shape[1]
    i = gl.arange(0, C, gl.SliceLayout(1, L.mma))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, L.mma))[None, :]
    memory.D.store(gl.reshape(D * up_q * up_k, [C, ROWS]))
    meet()
    cut: gl.constexpr = in_blocks(gl.to_linear_layout(L.mma, [C, C]))
    row_of_D: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, cut))
    own_column = gl.arange(0, C, row_of_D)[:, None] % ROWS == gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, cut)))[None, :]
    D = gl.where(own_column, own_s.load(row_of_D)[:, None], memory.D.load(gl.SliceLayout(1, cut))) * scale
    D = gl.expand_dims(D, 1).broadcast_to([C, C // ROWS, ROWS])
    D = gl.convert_layout(gl.reshape(D, [C, C]), L.mma, assert_trivial=True)
    A = gl.where(i // ROWS == j // ROWS, D, A * up_q * up_k * scale)
    if STEPS:
        gl.store(weights + i * C + j, A)
    else:
        down, up_A = powers_of_two(most(A), LEAST)
        store_parts(memory.M, 0, A * down, PARTS)
        fence_async_shared()
        meet()
        o = parts_of(reinterpret(memory.dO, gl.float16, [2, C, K], L.half), 0, PARTS)
        P = times(turned(parts_of(memory.M, 0, PARTS)), o, gl.zeros([C, K], gl.float32, L.mma), PARTS)
        P = warpgroup_mma_wait(0, [P])
        dV += P * up_A * up_o
        where = i.to(gl.int64) * (H * K) + gl.arange(0, K, gl.SliceLayout(0, L.mma))[None, :]
        gl.store(dv + first + where, dV, mask=i < tokens)


@gluon.jit(do_not_specialize=["N", "T"])
def penstock_channel_bwd_float32_sm90(
    q_tiles, k_tiles, v_tiles, o_tiles, S, dS, g, u, dq, dk, dv, dg, du, weights, rest, cu_seqlens,
    scale, N, T, g_b, g_h, u_h, u_k, g_t: gl.constexpr, g_k: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
    DG: gl.constexpr, STATIC: gl.constexpr, PREVIOUS: gl.constexpr, PACKED: gl.constexpr, BLOCKS: gl.constexpr, NV: gl.constexpr,
    STORED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """dA = scale dO V^T, dq = sum_L dX_L + scale read o (dO S^T), dk = sum_L dX_L + rest o (V dS^T), dV = A^T dO + (k o rest) dS.

    Reads q, k [B,T,H,K], v, dO [B,T,H,V] as TMA tiles [C,K] of tokens [B T,H K], and states S and gradients dS [slots,H,K,NV K], float32.
    Writes dq, dk, dg [B,T,H,K] and dv [B,T,H,V]. Program (chunk, head).

    The other arguments are those of ``penstock_channel_bwd_sm90``. K is 64.
    """
    gl.static_assert(K == SMALL)
    gl.static_assert(q_tiles.dtype == gl.float32)
    IN_STEPS: gl.constexpr = BLOCKS * NV > 1
    V: gl.constexpr = NV * K
    L: gl.constexpr = layouts_of(gl.num_warps(), K, K, 4)

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
    S += per_chunk * V
    dS += per_chunk * V

    memory, own_s = memory_of(K, L)
    Y_s = reinterpret(memory.X, gl.float32, [LEVELS, C, K], L.whole)
    bars = barriers(2, 1)
    fence_async_shared()
    meet()
    place = Place(token.to(gl.int32), (h * K).to(gl.int32), (whole_head * V).to(gl.int32), pid, n, tokens)
    mbarrier.expect(bars.index(0), 2 * q_tiles.block_type.nbytes)
    mbarrier.expect(bars.index(1), 2 * v_tiles.block_type.nbytes)
    meet()
    async_load(v_tiles, [place.line, place.value_column], bars.index(1), memory.v)
    async_load(o_tiles, [place.line, place.value_column], bars.index(1), memory.dO)
    async_load(q_tiles, [place.line, place.column], bars.index(0), memory.q)
    async_load(k_tiles, [place.line, place.column], bars.index(0), memory.k)

    x = decays(g, g_t, g_k, tokens, K, L.tokens)
    memory.part.store(gl.sum(grouped(x, GROUPS, L.groups), 1))
    bonus = gl.full([1, K], 1.0, gl.float32, L.tokens)
    if PREVIOUS:
        bonus = gl.load(u + gl.arange(0, K, gl.SliceLayout(0, L.tokens)) * u_k).to(gl.float32)[None, :]
    dA, dA_t, dq_in, dk_in, D, D_t, state_row, up_o, up_dS = sums_over_values(
        memory, bars.index(1), (v_tiles, o_tiles), S, dS, place, NV, DG, PARTS, L
    )
    near, near_rest, up_M = store_state_terms(memory, (dA, dA_t, dq_in, dk_in, D, D_t, state_row), scale, DG, PARTS, L)
    mbarrier.wait(bars.index(0), 0)
    if tokens < C:
        zero_rows_from(memory.q, tokens, L.tokens)
        zero_rows_from(memory.k, tokens, L.tokens)
        meet()
    whole, up_q, up_k, dV = store_levels(memory, own_s, x, bonus, up_dS, rest, first, tokens, H, STORED, IN_STEPS, PREVIOUS, PARTS, L)
    A, D = multiply_levels(memory, Y_s, (near, near_rest), (up_M, up_q, up_k), STORED or not IN_STEPS, PARTS, L)
    if STORED or not IN_STEPS:
        weights += pid.to(gl.int64) * (C * C)
        store_value_gradient(memory, own_s, A, D, dV, (up_q, up_k, up_o), weights, dv, first, tokens, scale, H, IN_STEPS, PARTS, L)
    meet()
    store_gradients(
        memory, Y_s, x, (g, g_t, g_k), bonus, whole, 1.0, (dq, dk, dg, du), first, per_chunk, tokens,
        H, DG, STATIC, PREVIOUS, False, False, L,
    )  # fmt: skip
    invalidate((bars,))
