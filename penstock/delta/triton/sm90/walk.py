"""The walk over the chunks of KDA on Hopper, in Gluon. With what ``prepare.py`` computes of each chunk,

    X = beta o (V - k S)        O = A X + q S        S' = total o S + (B^T)^T X        (q, k: times the decays w_1 ... w_t)

and, for the backward pass, W = V - k S - (A_k T) X. Then beta o W = T X is what each token writes. The state is in registers, transposed,
so that it and X are left operands of all products without a copy in shared memory. Two products of a chunk depend on the chunk before.
Two stages of tiles are loaded ahead by the tensor memory accelerator (TMA). Results are stored during the first product of the next chunk.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, meet, reinterpret, store_in_two, zero_rows_from
from ....gpu.ring import barriers, expect, load_tiles
from .layouts import C
from .programs import places, row_of_pool, store_in_pool, walk_of_program

STAGES = gl.constexpr(2)


@gluon.jit
def load_chunk(tiles, rings, bars, place, c):
    """Start the loads of chunk c: v, and tiles of its slot."""
    row, value_column, first, H, chunks = place
    at = (first + c * H) * C
    where = ([row + c * C, value_column], [at, 0], [at, 0], [at, 0], [at, 0], [at, 0])
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


@gluon.jit(do_not_specialize=["N", "T", "H", "b_b", "b_t", "b_h"])
def penstock_kda_walk_sm90(
    v_tiles, k_tiles, b_tiles, q_tiles, a_tiles, r_tiles, o_tiles, w_tiles, S_tiles, beta, totals, initial_state, output, final_state,
    cu_seqlens, rows, N, T, H, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, INITIAL: gl.constexpr, OUTPUT: gl.constexpr, KEEP: gl.constexpr,
    PACKED: gl.constexpr, PIECE: gl.constexpr, ROWS_GIVEN: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """O = A X + q S, S <- total o S + (B^T)^T X with X = beta o (V - k S), chunk by chunk. W = V - k S - (A_k T) X.

    TMA tiles: v and output [C,BV] of tokens [B T,H V]; k, B^T, q [C,K], A, A_k T [C,C] and W [C,BV] of [slots,H,C,...]; S^T before each
    chunk [BV,K] of [slots,H,V,K]. Reads beta [B,T,H] and the initial state [N,H,K,V] by strides, total [slots,H,K]. With OUTPUT writes
    the output and the final state [N,H,K,V], with KEEP W and the states before chunks. Program (sequence, head, block of BV value
    channels). PIECE, ROWS_GIVEN, NARROW: see ``scalar_walk.py``.
    """
    gl.static_assert(BV == C)
    kind: gl.constexpr = v_tiles.dtype
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
        rings = rings + (gl.allocate_shared_memory(kind, [STAGES, C, K], half), gl.allocate_shared_memory(kind, [STAGES, C, C], half))
        results = (gl.allocate_shared_memory(kind, [2, C, BV], half), rings[0], rings[0])
    if KEEP:
        tiles = tiles + (r_tiles,)
        rings = rings + (gl.allocate_shared_memory(gl.float16, [STAGES, C, C], half),)
        low_s = gl.allocate_shared_memory(kind, [2, C, C], half)
        kept = (gl.allocate_shared_memory(kind, [2, C, BV], half), gl.allocate_shared_memory(kind, [2, BV, K], half))
        results = (results[0],) + kept
    bars = ()
    for _ in gl.static_range(len(tiles)):
        bars = bars + (barriers(STAGES, 1),)
    total_s = gl.allocate_shared_memory(gl.float32, [2, K], flat)
    rate_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    fence_async_shared()
    meet()
    place = ((b * T + row).to(gl.int32), h * V + vb * BV, first_chunk.to(gl.int32), H, chunks)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks * 0 + m < chunks)
    meet()
    for m in gl.static_range(STAGES):
        load_chunk(tiles, rings, bars, place, chunks * 0 + m)
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
    for c in range(chunks):
        s = c % STAGES
        t = c * C
        phase = (c // STAGES) & 1
        coming = gl.load(totals + (c + 1) * step, mask=channel * 0 + c + 1 < chunks, other=0.0)
        later = t + C + token
        rates = gl.load(beta + later.to(gl.int64) * b_t, mask=later < tokens, other=0.0).to(gl.float32)
        rounded = S.to(kind)
        L = gl.convert_layout(rounded, left, assert_trivial=True)
        mbarrier.wait(bars[0].index(s), phase)
        if t + C > tokens:  # rows after the last token are padding, or belong to another sequence
            zero_rows_from(rings[0].index(s), tokens - t, clean)
            meet()
        mbarrier.wait(bars[1].index(s), phase)
        Y = gl.zeros([BV, C], gl.float32, out_mma)
        Y = warpgroup_mma(L, rings[1].index(s).permute((1, 0)), Y, use_acc=False, is_async=True)
        # while the tensor cores compute: stores of the chunk before, and loads into its memory
        tma.store_wait(0)
        expect(tiles, bars, c - 1 + STAGES, (c > 0) & (c - 1 + STAGES < chunks))
        if KEEP:
            mbarrier.wait(bars[REMOVALS].index(s), phase)
            high_s = split(rings[REMOVALS].index(s), low_s.index(c & 1), out_mma)
        fence_async_shared()
        meet()  # totals, rates and results are stored
        if c > 0:
            load_chunk(tiles, rings, bars, place, c - 1 + STAGES)
            store_chunk(o_tiles, w_tiles, S_tiles, results, place, c - 1, tokens, V, OUTPUT, KEEP)
        if KEEP:
            results[2].index(c & 1).store(rounded)
        W = rings[0].index(s).permute((1, 0)).load(out_mma).to(gl.float32)
        rate = rate_s.index(c & 1).load(gl.SliceLayout(0, out_mma))[None, :]
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
