"""The walk backward over the chunks of gated DeltaNet or DeltaNet on Hopper for heads of up to 256 key channels, in Gluon.

With dS' the gradient of the state after a chunk,

    Z = A^T dO + B^T dS'        Y = beta o Z = dV        dS = total o dS' + q^T (scale read o dO) - k^T (read o Y)

As in ``wide_walk.py`` dS' [K,BV] is in registers and goes through shared memory once a chunk, as the right operand of B^T dS'. What is a
right operand of the other products, scale read o dO and read o Y, goes through it, too.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_decays import decay_vectors, sums_of_decays
from ....gpu.hopper_tiles import async_store, meet, zero_rows_from
from ....gpu.ring import expect, invalidate
from .layouts import C
from .programs import decays_of, nonzero, of_tokens, places, walk_of_program
from .wide_ring import begin, expect_next, load_narrow, load_next, wait_wide


@gluon.jit(do_not_specialize=["N", "T", "H", "q_h", "k_h", "g_b", "g_t", "g_h", "b_b", "b_t", "b_h"])
def penstock_gdn_wide_reverse_sm90(
    b_tiles, q_tiles, k_tiles, o_tiles, a_tiles, y_tiles, dS_tiles, g, beta, d_final_state, d_values, d_initial_state, cu_seqlens,
    scale, N, T, H, q_h, k_h, g_b, g_t, g_h, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, SLOTS: gl.constexpr, DECAYS: gl.constexpr, FINAL: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Z = A^T dO + B^T dS', Y = beta o Z, dS = total o dS' + q^T (scale read o dO) - k^T (read o Y), from the last chunk to the first.

    TMA tiles: B^T [C,K] and A [C,C] of [slots,H,C,...], q, k [C,K] of tokens [B T,H K], dO and dV [C,BV] of [B T,H V], dS' after
    each chunk [K,BV] of [slots,H,K,V]. Reads g, beta [B,T,H] and, with FINAL, the gradient of the final state [N,H,K,V] by strides. Writes
    dV, dS' and the gradient of the initial state [N,H,K,V]. Program (sequence, head, block of BV value channels). ``q_h`` and ``k_h``
    are K, or 0 if all heads share q and k.
    """
    gl.static_assert(gl.num_warps() == 8)
    kind: gl.constexpr = o_tiles.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BV // 2, 16])
    by_token: gl.constexpr = gl.SliceLayout(1, mma)
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [8], [0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    owner, h, vb, b, row, tokens, chunks, first_chunk = walk_of_program(cu_seqlens, N, T, H, V // BV, PACKED)
    head = h.to(gl.int64)
    ring = gl.allocate_shared_memory(kind, [SLOTS, C, K], half)
    dS_s = gl.allocate_shared_memory(kind, [K, BV], half)
    do_s = gl.allocate_shared_memory(kind, [2, C, BV], half)
    a_s = gl.allocate_shared_memory(kind, [2, C, C], half)
    scaled_s = gl.allocate_shared_memory(kind, [C, BV], half)
    minus_s = gl.allocate_shared_memory(kind, [C, BV], half)
    y_s = gl.allocate_shared_memory(kind, [C, BV], half)
    last = chunks - 1
    start = (b * T + row).to(gl.int32)
    tail = start + last * C
    at = ((first_chunk + last * H) * C).to(gl.int32)
    value_column = h * V + vb * BV
    of_b = (at, H * -C, 0)
    wide = (b_tiles, q_tiles, k_tiles)
    steps = (of_b, (tail, -C, h * q_h), (tail, -C, h * k_h))
    narrow = (o_tiles, a_tiles)
    rings = (do_s, a_s)
    narrow_steps = ((tail, -C, value_column), of_b)
    if DECAYS:
        vectors = decay_vectors()
    zero = chunks * 0
    bars, narrow_bars = begin(wide, ring, steps, narrow, rings, narrow_steps, zero, chunks)
    j = gl.arange(0, K, gl.SliceLayout(1, mma))[:, None]
    y = gl.arange(0, BV, gl.SliceLayout(0, mma))[None, :] + vb * BV
    dS = gl.zeros([K, BV], gl.float32, mma)
    if FINAL:
        dS = gl.load(places(d_final_state, owner, head, j, y, (s_n, s_h, s_k, s_v))).to(gl.float32)
    g += b * g_b + row * g_t + head * g_h
    beta += b * b_b + row * b_t + head * b_h
    d_values += ((b * T + row) * H + head) * V + vb * BV
    i = gl.arange(0, C, by_token)
    column = gl.arange(0, BV, gl.SliceLayout(0, mma))[None, :]
    total = 1.0
    if DECAYS:
        total = sums_of_decays(decays_of(g, g_t, last, tokens, line, DECAYS), vectors, zero, 1.0)
    for m in range(chunks):
        c = last - m
        t = c * C
        place = (first_chunk + c * H).to(gl.int32)
        tma.store_wait(0)
        meet()  # the memory of results is free
        dS_s.store(dS.to(kind))
        if DECAYS:
            dS = dS * total  # not while products are under way: the compiler would wait for all of them
        fence_async_shared()
        meet()  # the gradient of the state and the sums of decays are stored
        async_store(dS_tiles, [place * K, vb * BV], dS_s)
        for n in gl.static_range(2):
            mbarrier.wait(narrow_bars[n].index(m & 1), (m >> 1) & 1)
        b_s = wait_wide(ring, bars, m, 0, 3)
        q_s = wait_wide(ring, bars, m, 1, 3)
        k_s = wait_wide(ring, bars, m, 2, 3)
        if t + C > tokens:  # rows after the last token are padding, or belong to another sequence
            zero_rows_from(do_s.index(m & 1), tokens - t, clean)
            zero_rows_from(q_s, tokens - t, clean)
            zero_rows_from(k_s, tokens - t, clean)
            fence_async_shared()
            meet()
        Z = gl.zeros([C, BV], gl.float32, mma)
        Z = warpgroup_mma(a_s.index(m & 1).permute((1, 0)), do_s.index(m & 1), Z, use_acc=False, is_async=True)
        Z = warpgroup_mma(b_s, dS_s, Z, is_async=True)
        coming = decays_of(g, g_t, c - 1, tokens, line, DECAYS)
        rate = nonzero(of_tokens(beta, b_t, c, tokens, by_token))[:, None]
        scaled = do_s.index(m & 1).load(mma).to(gl.float32) * scale
        if DECAYS:
            read = vectors[2].index(m & 1).load(by_token)[:, None]
            scaled = scaled * read
        scaled_s.store(scaled.to(kind))
        fence_async_shared()
        meet()  # scale read o dO is stored
        dS = warpgroup_mma(q_s.permute((1, 0)), scaled_s, dS, is_async=True)
        Z = warpgroup_mma_wait(1, [Z])
        Y = Z * rate
        y_s.store(Y.to(kind))
        minus = -Y
        if DECAYS:
            minus = minus * read
        minus_s.store(minus.to(kind))
        expect_next(wide, ring, bars, m, 0, chunks)
        fence_async_shared()
        meet()  # Y is stored, B^T is free
        load_next(wide, ring, bars, steps, m, 0, chunks)
        if t + C <= tokens:
            async_store(y_tiles, [start + t, value_column], y_s)
        else:
            to = d_values + (t + i[:, None]).to(gl.int64) * (H.to(gl.int64) * V) + column
            gl.store(to, Y.to(kind), mask=(t + i < tokens)[:, None])
        dS = warpgroup_mma(k_s.permute((1, 0)), minus_s, dS, is_async=True)
        if DECAYS:
            total = sums_of_decays(coming, vectors, (m + 1) & 1, 1.0)
        dS = warpgroup_mma_wait(0, [dS])
        for n in gl.static_range(1, 3):
            expect_next(wide, ring, bars, m, n, chunks)
        expect(narrow, narrow_bars, m + 2, m + 2 < chunks)
        meet()  # all tiles of the chunk are free
        for n in gl.static_range(1, 3):
            load_next(wide, ring, bars, steps, m, n, chunks)
        load_narrow(narrow, rings, narrow_bars, narrow_steps, m + 2, m + 2 < chunks)
    gl.store(d_initial_state + (owner * H + head) * (K * V) + j * V + y, dS)
    tma.store_wait(0)
    invalidate((bars,) + narrow_bars)
