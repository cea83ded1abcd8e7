"""The walk over the chunks of gated DeltaNet or DeltaNet on Hopper for heads of up to 256 key channels, in Gluon.

With B^T and A of each chunk, from ``scalar_prepare.py``,

    E = V - read o (k S)        X = beta o E        O = A X + scale read o (q S)        S' = total o S + (B^T)^T X

The state [K,BV] is in registers, half of its columns in each group of four warps, and goes through shared memory once a chunk, as the
right operand of k S and q S. ``scalar_walk.py`` holds that operand in registers, too: for twice the key channels there are none. Tiles of
k, q and B^T share a ring (``wide_ring.py``). Decays are summed here, a chunk ahead.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_decays import decay_vectors, sums_of_decays
from ....gpu.hopper_tiles import async_store, meet, zero_rows_from
from ....gpu.ring import expect, invalidate
from .layouts import C
from .programs import decays_of, of_tokens, places, row_of_pool, store_in_pool, walk_of_program
from .wide_ring import begin, expect_next, load_narrow, load_next, wait_wide


@gluon.jit(do_not_specialize=["N", "T", "H", "q_h", "k_h", "g_b", "g_t", "g_h", "b_b", "b_t", "b_h"])
def penstock_gdn_wide_walk_sm90(
    k_tiles, q_tiles, b_tiles, v_tiles, a_tiles, o_tiles, e_tiles, S_tiles, g, beta, initial_state, output, final_state, cu_seqlens,
    rows, scale, N, T, H, q_h, k_h, g_b, g_t, g_h, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, SLOTS: gl.constexpr, DECAYS: gl.constexpr, INITIAL: gl.constexpr,
    OUTPUT: gl.constexpr, KEEP: gl.constexpr, PACKED: gl.constexpr, PIECE: gl.constexpr, ROWS_GIVEN: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """O = A X + scale read o (q S), S <- total o S + (B^T)^T X with X = beta o E, E = V - read o (k S), chunk by chunk.

    TMA tiles: k, q [C,K] of tokens [B T,H K], v and output [C,BV] of [B T,H V], B^T [C,K], A [C,C] and E [C,BV] of [slots,H,C,...], S
    before each chunk [K,BV] of [slots,H,K,V]. Reads g, beta [B,T,H] and the initial state [N,H,K,V] by strides. Writes the output and
    the final state [N,H,K,V] or, with KEEP, E and the states before chunks. Program (sequence, head, block of BV value channels).
    ``q_h`` and ``k_h`` are K, or 0 if all heads share q and k. PIECE, ROWS_GIVEN and NARROW: as ``scalar_walk.py``.
    """
    gl.static_assert(gl.num_warps() == 8)
    gl.static_assert(OUTPUT != KEEP)
    kind: gl.constexpr = v_tiles.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BV // 2, 16])
    by_token: gl.constexpr = gl.SliceLayout(1, mma)
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [8], [0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    owner, h, vb, b, row, tokens, chunks, first_chunk = walk_of_program(cu_seqlens, N, T, H, V // BV, PACKED, PIECE)
    if PIECE > 0:
        owner, chunks = row_of_pool(rows, owner, chunks, ROWS_GIVEN)
    head = h.to(gl.int64)
    ring = gl.allocate_shared_memory(kind, [SLOTS, C, K], half)
    S_s = gl.allocate_shared_memory(kind, [K, BV], half)
    X_s = gl.allocate_shared_memory(kind, [C, BV], half)
    v_s = gl.allocate_shared_memory(kind, [2, C, BV], half)
    start = (b * T + row).to(gl.int32)
    at = (first_chunk * C).to(gl.int32)
    value_column = h * V + vb * BV
    of_v = (start, C, value_column)
    of_k = (start, C, h * k_h)
    of_b = (at, H * C, 0)
    out_s = gl.allocate_shared_memory(kind, [C, BV], half)  # of E or of the output
    if KEEP:
        wide = (k_tiles, b_tiles)
        steps = (of_k, of_b)
        narrow = (v_tiles,)
        rings = (v_s,)
        narrow_steps = (of_v,)
    else:
        wide = (k_tiles, q_tiles, b_tiles)
        steps = (of_k, (start, C, h * q_h), of_b)
        a_s = gl.allocate_shared_memory(kind, [2, C, C], half)
        narrow = (v_tiles, a_tiles)
        rings = (v_s, a_s)
        narrow_steps = (of_v, of_b)
    PER: gl.constexpr = len(wide)
    LAST: gl.constexpr = PER - 1
    if DECAYS:
        vectors = decay_vectors()
    zero = chunks * 0
    bars, narrow_bars = begin(wide, ring, steps, narrow, rings, narrow_steps, zero, chunks)
    j = gl.arange(0, K, gl.SliceLayout(1, mma))[:, None]
    y = gl.arange(0, BV, gl.SliceLayout(0, mma))[None, :] + vb * BV
    S = gl.zeros([K, BV], gl.float32, mma)
    if INITIAL:
        begins = (j >= 0) & (y >= 0) & ((chunks > 0) | (PIECE == 0))  # a pool may be empty
        S = gl.load(places(initial_state, owner, head, j, y, (s_n, s_h, s_k, s_v)), mask=begins, other=0.0).to(gl.float32)
    g += b * g_b + row * g_t + head * g_h
    beta += b * b_b + row * b_t + head * b_h
    output += ((b * T + row) * H + head) * V + vb * BV
    i = gl.arange(0, C, by_token)
    column = gl.arange(0, BV, gl.SliceLayout(0, mma))[None, :]
    total = 1.0
    if DECAYS:
        total = sums_of_decays(decays_of(g, g_t, zero, tokens, line, DECAYS), vectors, zero, 1.0)
    for c in range(chunks):
        t = c * C
        tma.store_wait(0)
        meet()  # the memory of results is free
        S_s.store(S.to(kind))
        if DECAYS:
            S = S * total  # not while products are under way: the compiler would wait for all of them
        fence_async_shared()
        meet()  # the state and the sums of decays are stored
        if KEEP:
            async_store(S_tiles, [(first_chunk + c * H).to(gl.int32) * K, vb * BV], S_s)
        k_s = wait_wide(ring, bars, c, 0, PER)
        mbarrier.wait(narrow_bars[0].index(c & 1), (c >> 1) & 1)
        if t + C > tokens:  # rows after the last token are padding, or belong to another sequence
            zero_rows_from(k_s, tokens - t, clean)
            zero_rows_from(v_s.index(c & 1), tokens - t, clean)
            fence_async_shared()
            meet()
        Y = gl.zeros([C, BV], gl.float32, mma)
        Y = warpgroup_mma(k_s, S_s, Y, use_acc=False, is_async=True)
        O = gl.zeros([C, BV], gl.float32, mma)
        if OUTPUT:
            q_s = wait_wide(ring, bars, c, 1, PER)
            O = warpgroup_mma(q_s, S_s, O, use_acc=False, is_async=True)
        coming = decays_of(g, g_t, c + 1, tokens, line, DECAYS)
        rate = of_tokens(beta, b_t, c, tokens, by_token)[:, None]
        E = v_s.index(c & 1).load(mma).to(gl.float32)
        if DECAYS:
            read = vectors[2].index(c & 1).load(by_token)
        Y = warpgroup_mma_wait(1 if OUTPUT else 0, [Y])
        if DECAYS:
            Y = Y * read[:, None]
        E = E - Y
        if KEEP:
            out_s.store(E.to(kind))
        X_s.store((E * rate).to(kind))
        expect_next(wide, ring, bars, c, 0, chunks)
        fence_async_shared()
        meet()  # X is stored, k is free
        load_next(wide, ring, bars, steps, c, 0, chunks)
        if KEEP:
            async_store(e_tiles, [(first_chunk + c * H).to(gl.int32) * C, vb * BV], out_s)
        b_s = wait_wide(ring, bars, c, LAST, PER)
        S = warpgroup_mma(b_s.permute((1, 0)), X_s, S, is_async=True)
        if OUTPUT:
            O = warpgroup_mma_wait(1, [O])
            O = O * scale
            if DECAYS:
                O = O * read[:, None]
            mbarrier.wait(narrow_bars[1].index(c & 1), (c >> 1) & 1)
            O = warpgroup_mma(a_s.index(c & 1), X_s, O, is_async=True)
        if DECAYS:
            total = sums_of_decays(coming, vectors, (c + 1) & 1, 1.0)
        S, O = warpgroup_mma_wait(0, [S, O])
        if NARROW:
            S = S.to(initial_state.dtype.element_ty).to(gl.float32)
        for n in gl.static_range(1, PER):
            expect_next(wide, ring, bars, c, n, chunks)
        expect(narrow, narrow_bars, c + 2, c + 2 < chunks)
        if OUTPUT:
            out_s.store(O.to(kind))
        fence_async_shared()
        meet()  # all tiles of the chunk are free, the output is stored
        for n in gl.static_range(1, PER):
            load_next(wide, ring, bars, steps, c, n, chunks)
        load_narrow(narrow, rings, narrow_bars, narrow_steps, c + 2, c + 2 < chunks)
        if OUTPUT:
            if t + C <= tokens:
                async_store(o_tiles, [start + t, value_column], out_s)
            else:
                place = output + (t + i[:, None]).to(gl.int64) * (H.to(gl.int64) * V) + column
                gl.store(place, O.to(kind), mask=(t + i < tokens)[:, None])
    if PIECE > 0:
        store_in_pool(S, initial_state, owner, head, j, y, (s_n, s_h, s_k, s_v), chunks)
    elif OUTPUT:
        gl.store(final_state + (owner * H + head) * (K * V) + j * V + y, S)
    tma.store_wait(0)
    invalidate((bars,) + narrow_bars)
