"""The walk over the chunks of gated DeltaNet or DeltaNet on Hopper, in Gluon. With what ``scalar_prepare.py`` computes of each chunk,

    E = V - read o (k S)        X = beta o E        O = A X + scale read o (q S)        S' = total o S + (B^T)^T X

where total is read of the last token. q and k are read as the call has them: the decays are factors of columns of the accumulators. For
the backward pass E and the state before each chunk are stored. The state is in registers, transposed, so that it and X are left operands of
all products without a copy in shared memory. Two products of a chunk depend on the chunk before. Two or three stages of tiles are loaded
ahead by the tensor memory accelerator (TMA). Results are stored during the first product of the next chunk.

float16: S and X have no bound. As an operand each value channel of S, which is of earlier tokens only, is multiplied by a power of two; the
products with S are multiplied by the inverse. A power of two that tokens of X share would let later tokens change how earlier ones are
rounded. So X has two bfloat16 parts, 16 bits with the range of float32, as A and B^T have, and their products are three each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, in_two, meet, scaled_half, zero_rows_from
from ....gpu.ring import barriers, expect, invalidate, load_tiles
from .layouts import C
from .parts import added_in_parts
from .programs import places, row_of_pool, store_in_pool, vectors_of, walk_of_program


@gluon.jit
def load_chunk(tiles, rings, bars, place, c, PARTS: gl.constexpr):
    """Start the loads of chunk c: k, v and B^T; q and A. B^T and A may have two parts."""
    row, columns, first, H, chunks = place
    at = (first + c * H) * (PARTS * C)
    line = row + c * C
    if PARTS == 2:
        low = at + C
        where = ([line, columns[0]], [line, columns[1]], [at, 0], [low, 0], [line, columns[2]], [at, 0], [low, 0])
    else:
        where = ([line, columns[0]], [line, columns[1]], [at, 0], [line, columns[2]], [at, 0])
    load_tiles(tiles, rings, bars, where, c, c < chunks)


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "q_h", "k_h", "b_b", "b_t", "b_h"])
def penstock_gdn_walk_sm90(
    k_tiles, q_tiles, v_tiles, b_tiles, a_tiles, o_tiles, e_tiles, S_tiles, beta, reads, initial_state, output, final_state, cu_seqlens,
    rows, e_powers, S_powers, scale, N, T, H, R, q_h, k_h, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, INITIAL: gl.constexpr, OUTPUT: gl.constexpr,
    KEEP: gl.constexpr, PACKED: gl.constexpr, PIECE: gl.constexpr, ROWS_GIVEN: gl.constexpr,
    NARROW: gl.constexpr,
):  # fmt: skip
    """O = A X + scale read o (q S), S <- total o S + (B^T)^T X with X = beta o E, E = V - read o (k S), chunk by chunk.

    TMA tiles: k, q [C,K] of tokens [B T,H / R K], v and output [C,BV] of [B T,H V], B^T [C,K], A [C,C] and E [C,BV] of [slots,H,C,...], S^T
    before each chunk [BV,K] of [slots,H,V,K]. Reads beta [B,T,H] and the initial state [N,H,K,V] by strides, read_t [slots,H,C]. With
    OUTPUT writes the output and the final state [N,H,K,V], with KEEP E and the states before chunks. Program (sequence, head, block of BV
    value channels): four warps for each 64 of them. ``q_h`` and ``k_h`` are K, or 0 if all heads share q and k.

    PIECE > 0: updates in place, of whole pieces only. States are rows of a pool, the initial state, with ROWS_GIVEN row ``rows[n]``, where
    a negative one is skipped. NARROW: the pool has 16 bits, to which the state is rounded after each piece.

    float16: B^T and A are [slots,H,2,C,...] in bfloat16, two parts whose sums they are. With KEEP the powers of two that value channels of
    E and of the states lack are written, too: [slots,H,V].
    """
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(BV == 16 * WARPS)
    kind: gl.constexpr = v_tiles.dtype
    F16: gl.constexpr = v_tiles.dtype == gl.float16
    part: gl.constexpr = b_tiles.dtype
    PARTS: gl.constexpr = 2 if F16 else 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    by_token: gl.constexpr = gl.SliceLayout(0, out_mma)
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    owner, h, vb, b, row, tokens, chunks, first_chunk = walk_of_program(cu_seqlens, N, T, H, V // BV, PACKED, PIECE)
    if PIECE > 0:
        owner, chunks = row_of_pool(rows, owner, chunks, ROWS_GIVEN)
    head = h.to(gl.int64)
    k_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    v_s = gl.allocate_shared_memory(kind, [STAGES, C, BV], half)
    b_s = gl.allocate_shared_memory(part, [STAGES, C, K], half)
    tiles = (k_tiles, v_tiles, b_tiles)
    rings = (k_s, v_s, b_s)
    if F16:
        b_low_s = gl.allocate_shared_memory(part, [STAGES, C, K], half)
        tiles = tiles + (b_tiles,)
        rings = rings + (b_low_s,)
    if OUTPUT:
        q_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
        a_s = gl.allocate_shared_memory(part, [STAGES, C, C], half)
        out_s = gl.allocate_shared_memory(kind, [C, BV], half)
        tiles = tiles + (q_tiles, a_tiles)
        rings = rings + (q_s, a_s)
        if F16:
            a_low_s = gl.allocate_shared_memory(part, [STAGES, C, C], half)
            tiles = tiles + (a_tiles,)
            rings = rings + (a_low_s,)
    if KEEP:
        e_s = gl.allocate_shared_memory(kind, [C, BV], half)
        state_s = gl.allocate_shared_memory(kind, [BV, K], half)
    bars = ()
    for _ in gl.static_range(len(tiles)):
        bars = bars + (barriers(STAGES, 1),)
    rate_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    read_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    fence_async_shared()
    meet()
    value_column = h * V + vb * BV
    place = ((b * T + row).to(gl.int32), (h // R * k_h, value_column, h // R * q_h), first_chunk.to(gl.int32), H, chunks)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks * 0 + m < chunks)
    meet()
    for m in gl.static_range(STAGES):
        load_chunk(tiles, rings, bars, place, chunks * 0 + m, PARTS)
    dk = gl.arange(0, K, gl.SliceLayout(0, mma))[None, :]
    dv = gl.arange(0, BV, gl.SliceLayout(1, mma))[:, None] + vb * BV
    S = gl.zeros([BV, K], gl.float32, mma)
    if INITIAL:
        begins = (dk >= 0) & (dv >= 0) & ((chunks > 0) | (PIECE == 0))  # a pool may be empty
        S = gl.load(places(initial_state, owner, head, dk, dv, (s_n, s_h, s_k, s_v)), mask=begins, other=0.0).to(gl.float32)
    beta += b * b_b + row * b_t + head * b_h
    reads += first_chunk * C
    step = H.to(gl.int64) * C
    column = gl.arange(0, C, by_token)[None, :]
    line_of = gl.arange(0, BV, gl.SliceLayout(1, out_mma))[:, None]
    rates, factors = vectors_of(beta, reads, chunks * 0, tokens, b_t, step, chunks > 0)
    rate_s.index(0).store(rates)
    read_s.index(0).store(factors)
    total = gl.load(reads + (C - 1), mask=chunks > 0, other=1.0)
    output += ((b * T + row) * H + head) * V + vb * BV
    if F16 and KEEP:
        powers_at = gl.arange(0, BV, gl.SliceLayout(1, out_mma)) + vb * BV
    done = gl.zeros([BV, C], kind, out_mma)
    done_e = done
    for c in range(chunks):
        s = c % STAGES
        t = c * C
        phase = (c // STAGES) & 1
        rates, factors = vectors_of(beta, reads, c + 1, tokens, b_t, step, c + 1 < chunks)
        next_total = gl.load(reads + (c + 1) * step + (C - 1), mask=c + 1 < chunks, other=1.0)
        if F16:
            rounded, up = scaled_half(S, 1)
            up = gl.convert_layout(up, gl.SliceLayout(1, out_mma), assert_trivial=True)
        else:
            rounded = S.to(kind)
        L = gl.convert_layout(rounded, left, assert_trivial=True)
        mbarrier.wait(bars[0].index(s), phase)
        if t + C > tokens:  # rows after the last token are padding, or belong to another sequence
            mbarrier.wait(bars[1].index(s), phase)
            zero_rows_from(k_s.index(s), tokens - t, clean)
            zero_rows_from(v_s.index(s), tokens - t, clean)
            fence_async_shared()
            meet()
        Y = gl.zeros([BV, C], gl.float32, out_mma)
        Y = warpgroup_mma(L, k_s.index(s).permute((1, 0)), Y, use_acc=False, is_async=True)
        O = gl.zeros([BV, C], gl.float32, out_mma)
        if OUTPUT:
            mbarrier.wait(bars[2 + PARTS].index(s), phase)
            O = warpgroup_mma(L, q_s.index(s).permute((1, 0)), O, use_acc=False, is_async=True)
        # while the tensor cores compute: stores of the chunk before, and loads into its memory
        tma.store_wait(0)
        expect(tiles, bars, c - 1 + STAGES, (c > 0) & (c - 1 + STAGES < chunks))
        meet()  # the memory of results is free
        if OUTPUT:
            out_s.permute((1, 0)).store(done)
        if KEEP:
            e_s.permute((1, 0)).store(done_e)
            state_s.store(rounded)
        fence_async_shared()
        meet()  # the vectors and results are stored
        if c > 0:
            load_chunk(tiles, rings, bars, place, c - 1 + STAGES, PARTS)
            if OUTPUT:
                async_store(o_tiles, [place[0] + t - C, value_column], out_s)
            if KEEP:
                async_store(e_tiles, [(place[2] + (c - 1) * H) * C, vb * BV], e_s)
        if KEEP:
            async_store(S_tiles, [(place[2] + c * H) * V + vb * BV, 0], state_s)
        mbarrier.wait(bars[1].index(s), phase)
        rate = rate_s.index(c & 1).load(by_token)[None, :]
        read = read_s.index(c & 1).load(by_token)[None, :]
        X = v_s.index(s).permute((1, 0)).load(out_mma).to(gl.float32) * rate
        rate = rate * read
        S = S * total
        if OUTPUT:
            Y = warpgroup_mma_wait(1, [Y])
        else:
            Y, L = warpgroup_mma_wait(0, [Y, L])
        if F16:
            Y = Y * up[:, None]
            high, low = in_two(X - Y * rate, part)
            X = gl.convert_layout(high, left, assert_trivial=True)
            low = gl.convert_layout(low, left, assert_trivial=True)
            for n in gl.static_range(2, 4):
                mbarrier.wait(bars[n].index(s), phase)
            S = added_in_parts((X, low), (b_s.index(s), b_low_s.index(s)), S)
        else:
            X = (X - Y * rate).to(kind)
            X = gl.convert_layout(X, left, assert_trivial=True)
            mbarrier.wait(bars[2].index(s), phase)
            S = warpgroup_mma(X, b_s.index(s), S, is_async=True)
        if OUTPUT:
            O, L = warpgroup_mma_wait(3 if F16 else 1, [O, L])
            if F16:
                O = O * up[:, None]
            O = O * (read * scale)
            mbarrier.wait(bars[3 + PARTS].index(s), phase)
            if F16:
                mbarrier.wait(bars[6].index(s), phase)
                O = added_in_parts((X, low), (a_s.index(s).permute((1, 0)), a_low_s.index(s).permute((1, 0))), O)
            else:
                O = warpgroup_mma(X, a_s.index(s).permute((1, 0)), O, is_async=True)
        if KEEP:
            E = v_s.index(s).permute((1, 0)).load(out_mma).to(gl.float32) - Y * read
            if F16:
                done_e, of_E = scaled_half(E, 1)
                at = (place[2] + c * H).to(gl.int64) * V + powers_at
                gl.store(e_powers + at, of_E)
                gl.store(S_powers + at, up)
            else:
                done_e = E.to(kind)
        rate_s.index((c + 1) & 1).store(rates)
        read_s.index((c + 1) & 1).store(factors)
        total = next_total
        if F16:
            S, O, X, low = warpgroup_mma_wait(0, [S, O, X, low])
        else:
            S, O, X = warpgroup_mma_wait(0, [S, O, X])
        if NARROW:
            S = S.to(initial_state.dtype.element_ty).to(gl.float32)
        done = O.to(kind)
    if KEEP:
        tma.store_wait(0)
        meet()
        e_s.permute((1, 0)).store(done_e)
        fence_async_shared()
        meet()
        if chunks > 0:
            async_store(e_tiles, [(place[2] + (chunks - 1) * H) * C, vb * BV], e_s)
    if OUTPUT:
        t = (chunks - 1) * C
        gl.store(output + (t + column) * (H.to(gl.int64) * V) + line_of, done, mask=(t + column < tokens) & (chunks > 0))
        if PIECE > 0:
            store_in_pool(S, initial_state, owner, head, dk, dv, (s_n, s_h, s_k, s_v), chunks)
        else:
            gl.store(final_state + (owner * H + head) * (K * V) + dk * V + dv, S)
    tma.store_wait(0)
    invalidate(bars)
