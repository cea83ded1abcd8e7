"""Gradients of the inputs of gated DeltaNet or DeltaNet on Hopper, in Gluon: everything that needs no chain over chunks.

With S the state before the chunk, dS' the gradient of the state after it, X and Y = dV from the walks, and D, read, rest and A_k as in
``scalar_prepare.py``,

    R = X / beta - (A_k T) X        U = beta o R = T X              dbeta = rowsum(Y o R) / beta
    P = scale dO U^T o D (s <= t)   M = -Y U^T o D (s < t)          F = P o q k^T + M o k k^T
    dq = P k + scale read o (dO S^T)
    dk = P^T q + (M + M^T) k - read o (Y S^T) + rest o (U dS'^T)
    dg_t = sum over s < t <= i of F_is + sum i >= t of (q o scale read o (dO S^T) - k o read o (Y S^T))_i
           + sum s < t of (k o rest o (U dS'^T))_s + total sum(S o dS')

Every term of dg is a pair of tokens with t between them, or a token and a state on both sides of it, so there is no cancellation. A_k T is
bounded and has no factor beta: where beta is tiny, no row underflows in float16. It is taken as two bfloat16 numbers.

A program computes a chunk for all heads of v that share a head of q and k. Their dq and dk are summed in float32 and rounded once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_decays import decay_vectors, factors_between, gradients_of_decays, log_decays, sums_of_decays
from ....gpu.hopper_tiles import async_load, async_store, meet, unknown, zero_rows_from
from ....gpu.ring import barriers
from ....gpu.tiles import span_of
from .layouts import C
from .programs import nonzero

GROUPS = gl.constexpr(2)  # groups of four warps: each has half of the columns of every product


@gluon.jit
def load_head(tiles, rings, bars, place, line, column, V: gl.constexpr, exists):
    """Start the loads of a head: X, Y, dO and A_k T, then S^T and dS'^T."""
    mbarrier.expect(bars.index(0), 3 * tiles[0].block_type.nbytes + tiles[3].block_type.nbytes, pred=exists)
    async_load(tiles[0], [place * C, 0], bars.index(0), rings[0], pred=exists)
    async_load(tiles[3], [place * C, 0], bars.index(0), rings[3], pred=exists)
    async_load(tiles[1], [line, column], bars.index(0), rings[1], pred=exists)
    async_load(tiles[2], [line, column], bars.index(0), rings[2], pred=exists)
    mbarrier.expect(bars.index(1), 2 * tiles[4].block_type.nbytes, pred=exists)
    async_load(tiles[4], [place * V, 0], bars.index(1), rings[4], pred=exists)
    async_load(tiles[5], [place * V, 0], bars.index(1), rings[5], pred=exists)


@gluon.jit
def store_values(x_s, y_s, r_s, rates, dbeta, step, left):
    """U replaces X. Store dbeta."""
    kind: gl.constexpr = x_s.dtype
    V: gl.constexpr = x_s.shape[1]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, V // GROUPS, 16])
    token = gl.arange(0, C, gl.SliceLayout(1, wide))
    rates = gl.convert_layout(rates, gl.SliceLayout(1, wide))
    inverse = 1.0 / rates
    T = -r_s.load(gl.DotOperandLayout(0, wide, 2)).to(gl.float32)
    most = (T.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)  # the bits of a bfloat16 number
    high = most.to(kind)
    low = (T - most).to(kind)
    R = x_s.load(wide).to(gl.float32) * inverse[:, None]
    R = warpgroup_mma(high, x_s, R)
    R = warpgroup_mma(low, x_s, R)
    of_beta = gl.sum(y_s.load(wide).to(gl.float32) * inverse[:, None] * R, 1)
    gl.store(dbeta + token.to(gl.int64) * step, of_beta.to(dbeta.dtype.element_ty), mask=token < left)
    U = (R * rates[:, None]).to(kind)
    meet()
    x_s.store(U)


@gluon.jit
def sum_of_product(S_s, dS_s):
    """The sum of S o dS'."""
    ROWS: gl.constexpr = S_s.shape[0] // 4
    K: gl.constexpr = S_s.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    acc = gl.zeros([ROWS, K], gl.float32, layout)
    for n in gl.static_range(4):
        x = S_s.slice(n * ROWS, ROWS).load(layout).to(gl.float32)
        acc += x * dS_s.slice(n * ROWS, ROWS).load(layout).to(gl.float32)
    return gl.sum(gl.reshape(acc, [ROWS * K]), 0)


@gluon.jit
def store_gradient(tiles, x, memory, pointer, row, column, token, step, left):
    """Store dq or dk [C,K] of a chunk with ``left`` tokens, by ``memory``; ``pointer``: its first element, rows are ``step`` apart."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    memory.store(x.to(memory.dtype))
    fence_async_shared()
    meet()
    if left == C:
        async_store(tiles, [row, column], memory)
    else:
        i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
        j = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
        gl.store(pointer + (token + i) * step + column + j, memory.load(layout), mask=i < left)


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "q_h", "k_h", "g_b", "g_t", "g_h", "b_b", "b_t", "b_h"])
def penstock_gdn_gradients_sm90(
    q_tiles, k_tiles, x_tiles, y_tiles, o_tiles, r_tiles, S_tiles, dS_tiles, dq_tiles, dk_tiles, g, beta, d_query, d_key, d_decay, dbeta,
    cu_seqlens, scale, N, T, H, R, q_h, k_h, g_b, g_t, g_h, b_b, b_t, b_h,
    K: gl.constexpr, V: gl.constexpr, DECAYS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dq, dk, dg and dbeta, from U = T X, P = scale dO U^T o D, M = -Y U^T o D.

    TMA tiles: q, k, dq, dk [C,K] of tokens [B T,H / R K], dO and Y [C,V] of [B T,H V], X [C,V] and A_k T [C,C] of [slots,H,C,...], S^T and
    dS'^T [V,K] of [slots,H,V,K]. Reads g and beta [B,T,H] by strides. Writes dq, dk [B,T,H / R,K], dg and dbeta [B,T,H]. Program (slot of a
    chunk, head of q and k): the R heads of v that share it one after another. ``q_h`` and ``k_h`` are K, or 0 if all heads share q and k.
    """
    gl.static_assert(q_tiles.dtype == gl.bfloat16)
    gl.static_assert(gl.num_warps() == 4 * GROUPS)
    kind: gl.constexpr = q_tiles.dtype
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, C // GROUPS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, K // GROUPS, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, wide)
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4 * GROUPS], [0])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4 * GROUPS, 1], [1, 0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    G = H // R
    slot = gl.program_id(0) // G
    group = gl.program_id(0) % G
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, C, PACKED)
    b = n.to(gl.int64)
    if PACKED:
        b = b * 0
    left = gl.minimum(end - begin - done, C).to(gl.int32)
    if left <= 0:
        return
    token = b * T + begin + done
    row = token.to(gl.int32)
    first = group * R
    q_ring = gl.allocate_shared_memory(kind, [1, C, K], q_tiles.layout)
    k_ring = gl.allocate_shared_memory(kind, [1, C, K], k_tiles.layout)
    x_ring = gl.allocate_shared_memory(kind, [1, C, V], x_tiles.layout)
    y_ring = gl.allocate_shared_memory(kind, [1, C, V], y_tiles.layout)
    o_ring = gl.allocate_shared_memory(kind, [1, C, V], o_tiles.layout)
    r_ring = gl.allocate_shared_memory(gl.float16, [1, C, C], r_tiles.layout)
    S_ring = gl.allocate_shared_memory(kind, [1, V, K], S_tiles.layout)
    dS_ring = gl.allocate_shared_memory(kind, [1, V, K], dS_tiles.layout)
    p_ring = gl.allocate_shared_memory(kind, [1, C, C], half)
    m_ring = gl.allocate_shared_memory(kind, [1, C, C], half)
    if DECAYS:
        f_ring = gl.allocate_shared_memory(kind, [1, C, C], half)
        ones_ring = gl.allocate_shared_memory(kind, [1, C, C], half)
        vectors = decay_vectors()
    tiles = (x_tiles, y_tiles, o_tiles, r_tiles, S_tiles, dS_tiles)
    rings = (x_ring.index(0), y_ring.index(0), o_ring.index(0), r_ring.index(0), S_ring.index(0), dS_ring.index(0))
    q_s = q_ring.index(0)
    k_s = k_ring.index(0)
    bars = barriers(3, 1)
    fence_async_shared()
    meet()
    mbarrier.expect(bars.index(2), q_tiles.block_type.nbytes + k_tiles.block_type.nbytes)
    async_load(q_tiles, [row, group * q_h], bars.index(2), q_s)
    async_load(k_tiles, [row, group * k_h], bars.index(2), k_s)
    load_head(tiles, rings, bars, slot * H + first, row, first * V, V, left > 0)
    i = gl.arange(0, C, gl.SliceLayout(1, square))
    j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    at = gl.arange(0, C, line)
    g += b * g_b + (begin + done) * g_t + first.to(gl.int64) * g_h
    beta += b * b_b + (begin + done) * b_t + first.to(gl.int64) * b_h + i.to(gl.int64) * b_t
    d_decay += token * H + first
    dbeta += token * H + first
    square_zero = gl.zeros([C, C], gl.float32, square)
    wide_zero = gl.zeros([C, K], gl.float32, wide)
    d_q = wide_zero
    d_k = wide_zero
    mbarrier.wait(bars.index(2), 0)
    if left < C:
        zero_rows_from(q_s, left, clean)
        zero_rows_from(k_s, left, clean)
    if DECAYS:
        one = gl.full([C, C], 1.0, kind, square)
        ones_ring.index(0).store(gl.where(i[:, None] < j, one, gl.zeros([C, C], kind, square)))

    for r in range(R):
        phase = r & 1
        zero = unknown(r * 0)  # addresses and descriptors of tiles are computed where they are used: as loop invariants they spill
        q_s = q_ring.index(zero)
        k_s = k_ring.index(zero)
        x_s = x_ring.index(zero)
        y_s = y_ring.index(zero)
        o_s = o_ring.index(zero)
        r_s = r_ring.index(zero)
        S_s = S_ring.index(zero)
        dS_s = dS_ring.index(zero)
        p_s = p_ring.index(zero)
        m_s = m_ring.index(zero)
        rates = nonzero(gl.load(beta + r * b_h.to(gl.int64), mask=i < left, other=0.0).to(gl.float32))
        if DECAYS:
            d = log_decays(g + r * g_h.to(gl.int64), g_t, left, at)
            total = sums_of_decays(d, vectors, phase, 1.0)
        mbarrier.wait(bars.index(0), phase)
        if left < C:
            zero_rows_from(y_s, left, clean)
            zero_rows_from(o_s, left, clean)
        fence_async_shared()
        meet()
        store_values(x_s, y_s, r_s, rates, dbeta + r, H, left)
        fence_async_shared()
        meet()
        P = warpgroup_mma(o_s, x_s.permute((1, 0)), square_zero, use_acc=False, is_async=True)
        M = warpgroup_mma(y_s, x_s.permute((1, 0)), square_zero, use_acc=False, is_async=True)
        if DECAYS:
            of_q = warpgroup_mma(q_s, k_s.permute((1, 0)), square_zero, use_acc=False, is_async=True)
            of_k = warpgroup_mma(k_s, k_s.permute((1, 0)), square_zero, use_acc=False, is_async=True)
            D = factors_between(vectors, phase, 1.0, False, square)
            P, M, of_q, of_k = warpgroup_mma_wait(0, [P, M, of_q, of_k])
            P = P * D
            M = M * D
        else:
            P, M = warpgroup_mma_wait(0, [P, M])
        P = gl.where(i[:, None] >= j, P * scale, 0.0)
        M = gl.where(i[:, None] > j, -M, 0.0)
        p_s.store(P.to(kind))
        m_s.store(M.to(kind))
        if DECAYS:
            f_ring.index(zero).store((P * of_q + M * of_k).to(kind))
        mbarrier.wait(bars.index(1), phase)
        fence_async_shared()
        meet()
        dQ = warpgroup_mma(o_s, S_s, wide_zero, use_acc=False, is_async=True)
        dA = warpgroup_mma(y_s, S_s, wide_zero, use_acc=False, is_async=True)
        if DECAYS:
            read = vectors[2].index(phase).load(by_row)[:, None]
            of_state = sum_of_product(S_s, dS_s) * total
            dQ = warpgroup_mma_wait(1, [dQ]) * (read * scale)
            of_rows = q_s.load(wide).to(gl.float32) * dQ
            d_q += dQ
            dA = warpgroup_mma_wait(0, [dA]) * read
            dB = warpgroup_mma(x_s, dS_s, wide_zero, use_acc=False, is_async=True)
            of_rows = gl.sum(of_rows - k_s.load(wide).to(gl.float32) * dA, 1)
            d_k -= dA
            dB = warpgroup_mma_wait(0, [dB]) * vectors[3].index(phase).load(by_row)[:, None]
            of_columns = gl.sum(k_s.load(wide).to(gl.float32) * dB, 1)
            d_k += dB
        else:
            dQ = warpgroup_mma_wait(1, [dQ])
            d_q += dQ * scale
            dA = warpgroup_mma_wait(0, [dA])
            dB = warpgroup_mma(x_s, dS_s, wide_zero, use_acc=False, is_async=True)
            d_k -= dA
            d_k += warpgroup_mma_wait(0, [dB])
        fence_async_shared()
        meet()  # X, Y, dO and the states are free
        load_head(tiles, (x_s, y_s, o_s, r_s, S_s, dS_s), bars, slot * H + first + r + 1, row, (first + r + 1) * V, V, r + 1 < R)
        d_q = warpgroup_mma(p_s, k_s, d_q, is_async=True)
        d_k = warpgroup_mma(p_s.permute((1, 0)), q_s, d_k, is_async=True)
        d_k = warpgroup_mma(m_s, k_s, d_k, is_async=True)
        d_k = warpgroup_mma(m_s.permute((1, 0)), k_s, d_k, is_async=True)
        if DECAYS:
            F = warpgroup_mma(f_ring.index(zero), ones_ring.index(zero), square_zero, use_acc=False, is_async=True)
            d_q, d_k, F = warpgroup_mma_wait(0, [d_q, d_k, F])
            pairs = gl.sum(gl.where(i[:, None] >= j, F, 0.0), 0)
            queries = gl.convert_layout(of_rows, line)
            keys = gl.convert_layout(of_columns, line)
            gradient = gradients_of_decays(queries, keys, of_state, d, at >= left) + gl.convert_layout(pairs, line)
            gl.store(d_decay + r + at.to(gl.int64) * H, gradient.to(d_decay.dtype.element_ty), mask=at < left)
        else:
            d_q, d_k = warpgroup_mma_wait(0, [d_q, d_k])
    meet()  # no product reads q and k
    q_s = q_ring.index(0)
    k_s = k_ring.index(0)
    step = G.to(gl.int64) * K
    store_gradient(dq_tiles, d_q, q_s, d_query, row, group * K, token, step, left)
    store_gradient(dk_tiles, d_k, k_s, d_key, row, group * K, token, step, left)
    tma.store_wait(0)
