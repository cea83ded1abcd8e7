"""The walk over the chunks of KDA on Hopper, in Gluon. With what ``prepare.py`` computes of each chunk,

    X = beta o (V - k S)        O = A X + q S        S' = total o S + (B^T)^T X        (q, k: times the decays w_1 ... w_t)

and, for the backward pass, W = V - k S - (A_k T) X. Then beta o W = T X is what each token writes. The state is in registers, transposed,
so that it and X are left operands of all products without a copy in shared memory. Two products of a chunk depend on the chunk before.
Two stages of tiles are loaded ahead by the tensor memory accelerator (TMA). Results are stored during the first product of the next chunk.

float16: S, X and W have no bound. Left operands of products are float16 times a power of two for each value channel, that of S of the state
before the chunk, so that no token changes a bit of an earlier output. X in A X is in two parts of bfloat16, as A is. Rows of k, q and B^T
lack powers of two, too (``prepare.py``): they are factors of columns of the products and of X.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, in_two, meet, reinterpret, store_in_two, zero_rows_from
from ....gpu.ring import barriers, expect, invalidate, load_tiles
from ....gpu.tiles import powers_of_two
from .layouts import C
from .programs import places, row_of_pool, store_in_pool, walk_of_program

STAGES = gl.constexpr(2)


@gluon.jit
def load_chunk(tiles, rings, bars, place, c, PARTS: gl.constexpr):
    """Start the loads of chunk c: v, and tiles of its slot. PARTS: matrices of A."""
    row, value_column, first, H, chunks = place
    at = (first + c * H) * C
    where = ([row + c * C, value_column], [at, 0], [at, 0], [at, 0], [at * PARTS, 0], [at, 0])
    load_tiles(tiles, rings, bars, where, c, c < chunks)


@gluon.jit
def store_chunk(o_tiles, w_tiles, S_tiles, results, place, c, tokens, V: gl.constexpr, OUTPUT: gl.constexpr, KEEP: gl.constexpr):
    """Start the stores of chunk c: the output if the chunk has C tokens; W and the state before it."""
    row, value_column, first, H, _ = place
    if KEEP:
        chunk = first + c * H
        column = value_column % V
        async_store(w_tiles, [chunk * C, column], results[1].index(c & 1))
        async_store(S_tiles, [chunk * V + column, 0], results[2].index(c & 1))
    if OUTPUT:
        if (c + 1) * C <= tokens:
            async_store(o_tiles, [row + c * C, value_column], results[0].index(c & 1))


@gluon.jit
def split(removals_s, low_s, mma: gl.constexpr):
    """-A_k T as two matrices in bfloat16 whose sum it is, the first in its place."""
    T = -removals_s.load(mma).to(gl.float32)
    high_s = reinterpret(removals_s, low_s.dtype, [C, C], low_s.layout)
    store_in_two(T, high_s, low_s)
    return high_s


@gluon.jit
def as_left(x, out_mma: gl.constexpr):
    """A tile as a left operand, from the same registers."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, out_mma, 2), assert_trivial=True)


@gluon.jit
def in_halves(x, least, out_mma: gl.constexpr):
    """A tile as a float16 left operand, each row times a power of two. Also returns the power, and its inverse.

    ``least``: for each row, what bounds the power where the row is 0.
    """
    down, up = powers_of_two(gl.maximum(gl.max(gl.abs(x), 1), least), 20)
    return as_left((x * down[:, None]).to(gl.float16), out_mma), down, up


@gluon.jit
def vectors_of_powers(powers, c, H, exists):
    """Of chunk c, if it exists: what rows of q and k lack, and what those of B^T lack: [C]."""
    token = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
    at = powers + c * H.to(gl.int64) * (2 * C) + token
    known = (token * 0 == 0) & exists
    return gl.load(at, mask=known, other=0.0), gl.load(at + C, mask=known, other=0.0)


@gluon.jit(do_not_specialize=["N", "T", "H", "b_b", "b_t", "b_h"])
def penstock_kda_walk_sm90(
    v_tiles, k_tiles, b_tiles, q_tiles, a_tiles, r_tiles, o_tiles, w_tiles, S_tiles, beta, totals, powers, kept_powers, initial_state,
    output, final_state, cu_seqlens, rows, N, T, H, b_b, b_t, b_h, s_n, s_h, s_k, s_v, scale,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, INITIAL: gl.constexpr, OUTPUT: gl.constexpr, KEEP: gl.constexpr,
    PACKED: gl.constexpr, PIECE: gl.constexpr, ROWS_GIVEN: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """O = A X + q S, S <- total o S + (B^T)^T X with X = beta o (V - k S), chunk by chunk. W = V - k S - (A_k T) X.

    TMA tiles: v and output [C,BV] of tokens [B T,H V]; k, B^T, q [C,K], A, A_k T [C,C] and W [C,BV] of [slots,H,C,...]; S^T before each
    chunk [BV,K] of [slots,H,V,K]. Reads beta [B,T,H] and the initial state [N,H,K,V] by strides, total [slots,H,K]. With OUTPUT writes
    the output and the final state [N,H,K,V], with KEEP W and the states before chunks. Program (sequence, head, block of BV value
    channels). PIECE, ROWS_GIVEN, NARROW: see ``scalar_walk.py``.

    float16: q lacks ``scale``, A is two matrices in bfloat16, ``powers`` [slots,H,2,C] has what rows of q and k, and of B^T, lack. With
    KEEP rows of S^T and columns of W are multiplied by powers of two, and ``kept_powers`` [slots,H,2,V] gets what W and S^T lack.
    """
    gl.static_assert(BV == C)
    kind: gl.constexpr = v_tiles.dtype
    F16: gl.constexpr = kind == gl.float16
    PARTS: gl.constexpr = 2 if F16 else 1
    REMOVALS: gl.constexpr = 5 if OUTPUT else 3  # the place of A_k T among the tiles
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    owner, h, vb, b, row, tokens, chunks, first_chunk = walk_of_program(cu_seqlens, N, T, H, V // BV, PACKED, PIECE)
    if PIECE > 0:
        owner, chunks = row_of_pool(rows, owner, chunks, ROWS_GIVEN)
    head = h.to(gl.int64)
    tiles = (v_tiles, k_tiles, b_tiles)
    rings = (gl.allocate_shared_memory(kind, [STAGES, C, BV], half),)
    for _ in gl.static_range(2):
        rings = rings + (gl.allocate_shared_memory(kind, [STAGES, C, K], half),)
    results = (rings[0], rings[0], rings[0])
    if OUTPUT:
        tiles = tiles + (q_tiles, a_tiles)
        rings = rings + (gl.allocate_shared_memory(kind, [STAGES, C, K], half),)
        rings = rings + (gl.allocate_shared_memory(gl.bfloat16, [STAGES, PARTS * C, C], half),)
        results = (gl.allocate_shared_memory(kind, [2, C, BV], half), rings[0], rings[0])
    if KEEP:
        tiles = tiles + (r_tiles,)
        rings = rings + (gl.allocate_shared_memory(gl.float16, [STAGES, C, C], half),)
        if not F16:
            low_s = gl.allocate_shared_memory(kind, [2, C, C], half)
        kept = (gl.allocate_shared_memory(kind, [2, C, BV], half), gl.allocate_shared_memory(kind, [2, BV, K], half))
        results = (results[0],) + kept
    bars = ()
    for _ in gl.static_range(len(tiles)):
        bars = bars + (barriers(STAGES, 1),)
    total_s = gl.allocate_shared_memory(gl.float32, [2, K], flat)
    rate_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    if F16:
        read_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
        update_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    fence_async_shared()
    meet()
    place = ((b * T + row).to(gl.int32), h * V + vb * BV, first_chunk.to(gl.int32), H, chunks)
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
    channel = gl.arange(0, K, line)
    token = gl.arange(0, C, line)
    totals += first_chunk * K + channel
    beta += b * b_b + row * b_t + head * b_h
    column = gl.arange(0, C, gl.SliceLayout(0, out_mma))[None, :]
    line_of = gl.arange(0, BV, gl.SliceLayout(1, out_mma))[:, None]
    step = H.to(gl.int64) * K
    total_s.index(0).store(gl.load(totals, mask=channel * 0 < chunks, other=0.0))
    rate_s.index(0).store(gl.load(beta + token.to(gl.int64) * b_t, mask=token < tokens, other=0.0).to(gl.float32))
    output += ((b * T + row) * H + head) * V + vb * BV
    if F16:
        powers += first_chunk * (2 * C)
        kept_powers += first_chunk * (2 * V) + vb * BV
        reads, updates = vectors_of_powers(powers, chunks * 0, H, chunks > 0)
        read_s.index(0).store(reads)
        update_s.index(0).store(updates)
    for c in range(chunks):
        s = c % STAGES
        t = c * C
        phase = (c // STAGES) & 1
        coming = gl.load(totals + (c + 1) * step, mask=channel * 0 + c + 1 < chunks, other=0.0)
        later = t + C + token
        rates = gl.load(beta + later.to(gl.int64) * b_t, mask=later < tokens, other=0.0).to(gl.float32)
        if F16:
            reads, updates = vectors_of_powers(powers, c + 1, H, c + 1 < chunks)
            largest = gl.max(gl.abs(S), 1)
            down, up = powers_of_two(largest)
            rounded = (S * down[:, None]).to(kind)
            largest = gl.convert_layout(largest, gl.SliceLayout(1, out_mma), assert_trivial=True) * 2.0**-100
            up = gl.convert_layout(up, gl.SliceLayout(1, out_mma), assert_trivial=True)
        else:
            rounded = S.to(kind)
        L = gl.convert_layout(rounded, left, assert_trivial=True)
        mbarrier.wait(bars[0].index(s), phase)
        if t + C > tokens:  # rows after the last token are padding, or belong to another sequence
            zero_rows_from(rings[0].index(s), tokens - t, clean)
            meet()
        mbarrier.wait(bars[1].index(s), phase)
        Y = gl.zeros([BV, C], gl.float32, out_mma)
        Y = warpgroup_mma(L, rings[1].index(s).permute((1, 0)), Y, use_acc=False, is_async=True)
        if F16:
            O = gl.zeros([BV, C], gl.float32, out_mma)
            if OUTPUT:
                mbarrier.wait(bars[3].index(s), phase)
                O = warpgroup_mma(L, rings[3].index(s).permute((1, 0)), O, use_acc=False, is_async=True)
        # while the tensor cores compute: stores of the chunk before, and loads into its memory
        tma.store_wait(0)
        expect(tiles, bars, c - 1 + STAGES, (c > 0) & (c - 1 + STAGES < chunks))
        if KEEP and not F16:
            mbarrier.wait(bars[REMOVALS].index(s), phase)
            high_s = split(rings[REMOVALS].index(s), low_s.index(c & 1), out_mma)
        fence_async_shared()
        meet()  # totals, rates and results are stored
        if c > 0:
            load_chunk(tiles, rings, bars, place, c - 1 + STAGES, PARTS)
            store_chunk(o_tiles, w_tiles, S_tiles, results, place, c - 1, tokens, V, OUTPUT, KEEP)
        if KEEP:
            results[2].index(c & 1).store(rounded)
            if F16:
                kept_at = kept_powers + c * H.to(gl.int64) * (2 * V) + gl.arange(0, BV, gl.SliceLayout(1, out_mma))
                gl.store(kept_at + V, up)
        W = rings[0].index(s).permute((1, 0)).load(out_mma).to(gl.float32)
        rate = rate_s.index(c & 1).load(gl.SliceLayout(0, out_mma))[None, :]
        if F16:
            if OUTPUT:
                Y, O, L = warpgroup_mma_wait(0, [Y, O, L])
            else:
                Y, L = warpgroup_mma_wait(0, [Y, L])
            read = read_s.index(c & 1).load(gl.SliceLayout(0, out_mma))[None, :]
            if OUTPUT:
                O = O * up[:, None] * (read * scale)
            W = W - Y * up[:, None] * read
            X = W * rate
            update = update_s.index(c & 1).load(gl.SliceLayout(0, out_mma))[None, :]
            U, down, up_S = in_halves(X * update, largest, out_mma)
            S = S * total_s.index(c & 1).load(gl.SliceLayout(0, mma))[None, :]
            S = S * gl.convert_layout(down, gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
            for m in gl.static_range(2, len(bars)):
                mbarrier.wait(bars[m].index(s), phase)
            S = warpgroup_mma(U, rings[2].index(s), S, is_async=True)
            high, low = in_two(X, gl.bfloat16)
            high = as_left(high, out_mma)
            low = as_left(low, out_mma)
            if OUTPUT:
                A = rings[4].index(s)
                O = warpgroup_mma(high, A.slice(0, C).permute((1, 0)), O, is_async=True)
                O = warpgroup_mma(low, A.slice(0, C).permute((1, 0)), O, is_async=True)
                O = warpgroup_mma(high, A.slice(C, C).permute((1, 0)), O, is_async=True)
            if KEEP:
                down, up = powers_of_two(gl.max(gl.maximum(gl.abs(X), gl.abs(W)), 1))
                R = as_left((X * -down[:, None]).to(kind), out_mma)
                W = W * down[:, None]
                W = warpgroup_mma(R, rings[REMOVALS].index(s).permute((1, 0)), W, is_async=True)
            total_s.index((c + 1) & 1).store(coming)
            rate_s.index((c + 1) & 1).store(rates)
            read_s.index((c + 1) & 1).store(reads)
            update_s.index((c + 1) & 1).store(updates)
            if KEEP:
                S, O, W, U, R, high, low = warpgroup_mma_wait(0, [S, O, W, U, R, high, low])
                down, up_W = powers_of_two(gl.max(gl.abs(W), 1))
                W = W * down[:, None]
                gl.store(kept_at, up * up_W)
            else:
                S, O, U, high, low = warpgroup_mma_wait(0, [S, O, U, high, low])
            S = S * gl.convert_layout(up_S, gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
        else:
            S = S * total_s.index(c & 1).load(gl.SliceLayout(0, mma))[None, :]
            Y, L = warpgroup_mma_wait(0, [Y, L])
            W = W - Y
            X = gl.convert_layout((W * rate).to(kind), left, assert_trivial=True)
            for m in gl.static_range(2, len(bars)):
                mbarrier.wait(bars[m].index(s), phase)
            S = warpgroup_mma(X, rings[2].index(s), S, is_async=True)
            O = gl.zeros([BV, C], gl.float32, out_mma)
            if OUTPUT:
                O = warpgroup_mma(L, rings[3].index(s).permute((1, 0)), O, use_acc=False, is_async=True)
                O = warpgroup_mma(X, rings[4].index(s).permute((1, 0)), O, is_async=True)
            if KEEP:
                W = warpgroup_mma(X, high_s.permute((1, 0)), W, is_async=True)
                W = warpgroup_mma(X, low_s.index(c & 1).permute((1, 0)), W, is_async=True)
            total_s.index((c + 1) & 1).store(coming)
            rate_s.index((c + 1) & 1).store(rates)
            S, O, W, L, X = warpgroup_mma_wait(0, [S, O, W, L, X])
        if NARROW:
            S = S.to(initial_state.dtype.element_ty).to(gl.float32)
        if OUTPUT:
            O = O.to(kind)
            results[0].index(c & 1).permute((1, 0)).store(O)
            if t + C > tokens:
                gl.store(output + (t + column) * (H.to(gl.int64) * V) + line_of, O, mask=t + column < tokens)
        if KEEP:
            results[1].index(c & 1).permute((1, 0)).store(W.to(kind))
    fence_async_shared()
    meet()
    if chunks > 0:
        store_chunk(o_tiles, w_tiles, S_tiles, results, place, chunks - 1, tokens, V, OUTPUT, KEEP)
    if PIECE > 0:
        store_in_pool(S, initial_state, owner, head, dk, dv, (s_n, s_h, s_k, s_v), chunks)
    elif OUTPUT:
        gl.store(final_state + (owner * H + head) * (K * V) + dk * V + dv, S)
    tma.store_wait(0)
    invalidate(bars)
