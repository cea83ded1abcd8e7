"""Gradients of the inputs of gated DeltaNet or DeltaNet on Hopper for heads of up to 256 key channels, in Gluon.

The formulas are those of ``scalar_gradients.py``, what needs no chain over chunks. The states of a chunk do not fit shared memory, so a
program walks over blocks of 64 value channels, for up to 128 key channels at a time:

    W = E - (A_k T) (beta o E)      U = beta o W        of each block        P, M: sums over the blocks, with the first key channels
    dO S^T, Y S^T, U dS'^T          sums over the blocks, 128 columns in registers

and multiplies with P, M, q and k once for these columns. Two blocks are loaded ahead of their use.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_decays import decay_vectors, factors_between, gradients_of_decays, log_decays, sums_of_decays
from ....gpu.hopper_tiles import meet, unknown, zero_rows_from
from ....gpu.ring import barriers, expect, invalidate, load_tiles
from ....gpu.tiles import chunk_of_slot
from .gradient_terms import from_token_on, removed, store_gradient
from .layouts import C
from .programs import nonzero

BV = gl.constexpr(64)  # value channels of a block


@gluon.jit
def load_block(tiles, rings, bars, place, n, PASSES: gl.constexpr, NV: gl.constexpr):
    """Start the copies of step n, which is block n % NV of the value channels and the key channels n // NV: E, Y, dO, S and dS'."""
    row, at, state, column, KB = place
    v = n % NV * BV
    s = state + n // NV * KB
    load_tiles(tiles, rings, bars, ([at, v], [row, column + v], [row, column + v], [s, v], [s, v]), n, n < PASSES * NV)


@gluon.jit(do_not_specialize=["N", "T", "H", "q_h", "k_h", "g_b", "g_t", "g_h", "b_b", "b_t", "b_h"])
def penstock_gdn_wide_gradients_sm90(
    q_tiles, k_tiles, e_tiles, y_tiles, o_tiles, r_tiles, S_tiles, dS_tiles, dq_tiles, dk_tiles, g, beta, d_query, d_key, d_decay, dbeta,
    cu_seqlens, scale, N, T, H, q_h, k_h, g_b, g_t, g_h, b_b, b_t, b_h,
    K: gl.constexpr, V: gl.constexpr, KB: gl.constexpr, DECAYS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dq, dk, dg and dbeta, from U = T X, P = scale dO U^T o D, M = -Y U^T o D.

    TMA tiles: q, k, dq, dk [C,KB] of tokens [B T,H K], dO and Y [C,BV] of [B T,H V], E [C,BV] and A_k T [C,C] of [slots,H,C,...], S and dS'
    [KB,BV] of [slots,H,K,V]. Reads g and beta [B,T,H] by strides. Writes dq, dk [B,T,H,K], dg and dbeta [B,T,H]. Program (slot of a chunk,
    head). ``q_h`` and ``k_h`` are K, or 0 if all heads share q and k.
    """
    gl.static_assert(gl.num_warps() == 8)
    kind: gl.constexpr = q_tiles.dtype
    PASSES: gl.constexpr = K // KB
    NV: gl.constexpr = V // BV
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KB // 2, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, wide)
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [8], [0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    QUARTER: gl.constexpr = KB // 4

    slot = gl.program_id(0) // H
    h = gl.program_id(0) % H
    b, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    head = h.to(gl.int64)
    token = b * T + begin
    row = token.to(gl.int32)
    place = (row, (slot * H + h) * C, (slot * H + h) * K, h * V, KB)
    q_ring = gl.allocate_shared_memory(kind, [PASSES, C, KB], q_tiles.layout)
    k_ring = gl.allocate_shared_memory(kind, [PASSES, C, KB], k_tiles.layout)
    e_ring = gl.allocate_shared_memory(kind, [2, C, BV], e_tiles.layout)
    y_ring = gl.allocate_shared_memory(kind, [2, C, BV], y_tiles.layout)
    o_ring = gl.allocate_shared_memory(kind, [2, C, BV], o_tiles.layout)
    S_ring = gl.allocate_shared_memory(kind, [2, KB, BV], S_tiles.layout)
    dS_ring = gl.allocate_shared_memory(kind, [2, KB, BV], dS_tiles.layout)
    r_ring = gl.allocate_shared_memory(gl.float16, [1, C, C], r_tiles.layout)
    p_s = gl.allocate_shared_memory(kind, [C, C], half)
    m_s = gl.allocate_shared_memory(kind, [C, C], half)
    if DECAYS:
        f_s = gl.allocate_shared_memory(kind, [C, C], half)
        vectors = decay_vectors()
    rate_s = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles = (e_tiles, y_tiles, o_tiles, S_tiles, dS_tiles)
    rings = (e_ring, y_ring, o_ring, S_ring, dS_ring)
    bars = (barriers(2, 1), barriers(2, 1), barriers(2, 1), barriers(2, 1), barriers(2, 1))
    r_bars = (barriers(1, 1),)
    qk_bars = (barriers(PASSES, 1), barriers(PASSES, 1))
    fence_async_shared()
    meet()
    zero = left * 0
    expect((r_tiles,), r_bars, zero, left > 0)
    for n in gl.static_range(2):
        expect(tiles, bars, zero + n, zero + n < PASSES * NV)
    for n in gl.static_range(PASSES):
        expect((q_tiles, k_tiles), qk_bars, zero + n, left > 0)
    meet()
    load_tiles((r_tiles,), (r_ring,), r_bars, ([place[1], 0],), zero, left > 0)
    for n in gl.static_range(2):
        load_block(tiles, rings, bars, place, zero + n, PASSES, NV)
    for n in gl.static_range(PASSES):
        at_n = ([row, h * q_h + n * KB], [row, h * k_h + n * KB])
        load_tiles((q_tiles, k_tiles), (q_ring, k_ring), qk_bars, at_n, zero + n, left > 0)
    i = gl.arange(0, C, gl.SliceLayout(1, square))
    j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    at = gl.arange(0, C, line)
    beta += b * b_b + begin * b_t + head * b_h
    rate_s.store(gl.load(beta + at.to(gl.int64) * b_t, mask=at < left, other=0.0).to(gl.float32))
    d_decay += token * H + h
    dbeta += token * H + h
    square_zero = gl.zeros([C, C], gl.float32, square)
    wide_zero = gl.zeros([C, KB], gl.float32, wide)
    if DECAYS:
        d = log_decays(g + b * g_b + begin * g_t + head * g_h, g_t, left, at)
        total = sums_of_decays(d, vectors, zero, 1.0)
    mbarrier.wait(r_bars[0].index(0), 0)
    meet()  # the vectors are stored
    high, low = removed(r_ring.index(0), rate_s, square, kind)
    rates = rate_s.load(gl.SliceLayout(1, square))[:, None]
    P = square_zero
    M = square_zero
    of_beta = gl.zeros([C], gl.float32, gl.SliceLayout(1, square))
    of_rows = gl.zeros([C], gl.float32, by_row)
    of_columns = gl.zeros([C], gl.float32, by_row)
    of_states = gl.zeros([QUARTER, BV], gl.float32, clean)
    pairs = gl.zeros([C], gl.float32, gl.SliceLayout(1, square))
    step = H.to(gl.int64) * K
    for m in gl.static_range(PASSES):
        d_q = wide_zero
        d_a = wide_zero
        d_b = wide_zero
        for block in range(NV):
            turn = m * NV + block
            s = unknown(zero + turn) & 1
            e_s = e_ring.index(s)
            y_s = y_ring.index(s)
            o_s = o_ring.index(s)
            S_s = S_ring.index(s)
            dS_s = dS_ring.index(s)
            for ring in gl.static_range(len(bars)):
                mbarrier.wait(bars[ring].index(s), (turn >> 1) & 1)
            if left < C:
                zero_rows_from(y_s, left, clean)
                zero_rows_from(o_s, left, clean)
                fence_async_shared()
                meet()
            W = e_s.load(square).to(gl.float32)
            W = warpgroup_mma(high, e_s, W)
            W = warpgroup_mma(low, e_s, W)
            if m == 0:
                of_beta += gl.sum(y_s.load(square).to(gl.float32) * W, 1)
            meet()  # no product reads E
            e_s.store((W * rates).to(kind))
            fence_async_shared()
            meet()  # U is stored
            d_q = warpgroup_mma(o_s, S_s.permute((1, 0)), d_q, is_async=True)
            d_a = warpgroup_mma(y_s, S_s.permute((1, 0)), d_a, is_async=True)
            d_b = warpgroup_mma(e_s, dS_s.permute((1, 0)), d_b, is_async=True)
            if m == 0:
                P = warpgroup_mma(o_s, e_s.permute((1, 0)), P, is_async=True)
                M = warpgroup_mma(y_s, e_s.permute((1, 0)), M, is_async=True)
            if DECAYS:
                for part in gl.static_range(4):
                    one = S_s.slice(part * QUARTER, QUARTER).load(clean).to(gl.float32)
                    of_states += one * dS_s.slice(part * QUARTER, QUARTER).load(clean).to(gl.float32)
            if m == 0:
                d_q, d_a, d_b, P, M = warpgroup_mma_wait(0, [d_q, d_a, d_b, P, M])
            else:
                d_q, d_a, d_b = warpgroup_mma_wait(0, [d_q, d_a, d_b])
            expect(tiles, bars, turn + 2, turn + 2 < PASSES * NV)
            fence_async_shared()
            meet()  # the tiles of the block are free
            load_block(tiles, rings, bars, place, zero + turn + 2, PASSES, NV)
        if m == 0:
            for n in gl.static_range(PASSES):
                mbarrier.wait(qk_bars[0].index(n), 0)
                mbarrier.wait(qk_bars[1].index(n), 0)
            if left < C:
                for n in gl.static_range(PASSES):
                    zero_rows_from(q_ring.index(n), left, clean)
                    zero_rows_from(k_ring.index(n), left, clean)
                fence_async_shared()
                meet()
            if DECAYS:
                D = factors_between(vectors, zero, 1.0, False, square)
                P = P * D
                M = M * D
            P = gl.where(i[:, None] >= j, P * scale, 0.0)
            M = gl.where(i[:, None] > j, -M, 0.0)
            p_s.store(P.to(kind))
            m_s.store(M.to(kind))
            if DECAYS:
                of_q = square_zero
                of_k = square_zero
                for n in gl.static_range(PASSES):
                    of_q = warpgroup_mma(q_ring.index(n), k_ring.index(n).permute((1, 0)), of_q, is_async=True)
                    of_k = warpgroup_mma(k_ring.index(n), k_ring.index(n).permute((1, 0)), of_k, is_async=True)
                of_q, of_k = warpgroup_mma_wait(0, [of_q, of_k])
                f_s.store((P * of_q + M * of_k).to(kind))
            fence_async_shared()
            meet()  # P, M and F are stored
            if DECAYS:
                F = warpgroup_mma(from_token_on(unknown(zero), square, kind), f_s, square_zero, use_acc=False)
                pairs = gl.sum(gl.where(j < i[:, None], F, 0.0), 1)
        q_s = q_ring.index(m)
        k_s = k_ring.index(m)
        if DECAYS:
            read = vectors[2].index(0).load(by_row)[:, None]
            d_q = d_q * (read * scale)
            d_a = d_a * read
            d_b = d_b * vectors[3].index(0).load(by_row)[:, None]
            of_rows += gl.sum(q_s.load(wide).to(gl.float32) * d_q - k_s.load(wide).to(gl.float32) * d_a, 1)
            of_columns += gl.sum(k_s.load(wide).to(gl.float32) * d_b, 1)
        else:
            d_q = d_q * scale
        d_k = d_b - d_a
        d_q = warpgroup_mma(p_s, k_s, d_q, is_async=True)
        d_k = warpgroup_mma(p_s.permute((1, 0)), q_s, d_k, is_async=True)
        d_k = warpgroup_mma(m_s, k_s, d_k, is_async=True)
        d_k = warpgroup_mma(m_s.permute((1, 0)), k_s, d_k, is_async=True)
        d_q, d_k = warpgroup_mma_wait(0, [d_q, d_k])
        meet()  # no product reads these columns of q and k
        store_gradient(dq_tiles, d_q, q_s, d_query, row, h * K + m * KB, token, step, left)
        store_gradient(dk_tiles, d_k, k_s, d_key, row, h * K + m * KB, token, step, left)
    tma.store_wait(0)
    meet()  # sums across warps may use the memory of q and k
    of_beta = of_beta / nonzero(rate_s.load(gl.SliceLayout(1, square)))
    gl.store(dbeta + i.to(gl.int64) * H, of_beta.to(dbeta.dtype.element_ty), mask=i < left)
    if DECAYS:
        of_state = gl.sum(gl.reshape(of_states, [QUARTER * BV]), 0) * total
        queries = gl.convert_layout(of_rows, line)
        keys = gl.convert_layout(of_columns, line)
        gradient = gradients_of_decays(queries, keys, of_state, d, at >= left) + gl.convert_layout(pairs, line)
        gl.store(d_decay + at.to(gl.int64) * H, gradient.to(d_decay.dtype.element_ty), mask=at < left)
    invalidate(bars + r_bars + qk_bars)
