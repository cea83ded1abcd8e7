"""States for the backward pass of gated DeltaNet or DeltaNet on Hopper, in Gluon: the walk of ``scalar_walk.py`` without outputs.

    X = beta o (V - read o (k S))        S' = total o S + (B^T)^T X

X and S before each chunk are stored in the dtype of v. The gradient of beta divides by it, so that it is at least 2^-100 here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, meet, zero_rows_from
from ....gpu.ring import barriers, expect, load_tiles
from .layouts import C
from .programs import nonzero, vectors_of, walk_of_program


@gluon.jit
def load_chunk(tiles, rings, bars, place, c):
    """Start the loads of chunk c: k, v and B^T."""
    row, key_column, value_column, first, H, chunks = place
    line = row + c * C
    load_tiles(tiles, rings, bars, ([line, key_column], [line, value_column], [(first + c * H) * C, 0]), c, c < chunks)


@gluon.jit
def store_chunk(x_tiles, S_tiles, out_s, state_s, place, c, vb, V: gl.constexpr, BV: gl.constexpr):
    """Start the stores of chunk c: X, and the state before it."""
    chunk = place[3] + c * place[4]
    async_store(x_tiles, [chunk * C, vb * BV], out_s.index(c & 1))
    async_store(S_tiles, [chunk * V + vb * BV, 0], state_s.index(c & 1))


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "k_h", "b_b", "b_t", "b_h"])
def penstock_gdn_states_sm90(
    k_tiles, v_tiles, b_tiles, x_tiles, S_tiles, beta, reads, initial_state, cu_seqlens, N, T, H, R, k_h, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, INITIAL: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """X = beta o (V - read o (k S)), S <- total o S + (B^T)^T X, chunk by chunk.

    TMA tiles: k [C,K] of tokens [B T,H / R K], v [C,BV] of [B T,H V], B^T [C,K] and x [C,BV] of [slots,H,C,...], S^T before each chunk
    [BV,K] of [slots,H,V,K]. Reads beta [B,T,H] and the initial state [N,H,K,V] by strides, read_t [slots,H,C]. Program (sequence, head,
    block of BV value channels): four warps for each 64 of them. ``k_h`` is K, or 0 if all heads share k.
    """
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(BV == 16 * WARPS)
    kind: gl.constexpr = v_tiles.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    by_token: gl.constexpr = gl.SliceLayout(0, out_mma)
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    owner, h, vb, b, row, tokens, chunks, first_chunk = walk_of_program(cu_seqlens, N, T, H, V // BV, PACKED)
    head = h.to(gl.int64)
    k_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    v_s = gl.allocate_shared_memory(kind, [STAGES, C, BV], half)
    b_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    out_s = gl.allocate_shared_memory(kind, [2, C, BV], half)
    state_s = gl.allocate_shared_memory(kind, [2, BV, K], half)
    rate_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    read_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    bars = (barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1))
    rings = (k_s, v_s, b_s)
    tiles = (k_tiles, v_tiles, b_tiles)
    fence_async_shared()
    meet()
    place = ((b * T + row).to(gl.int32), h // R * k_h, h * V + vb * BV, first_chunk.to(gl.int32), H, chunks)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks * 0 + m < chunks)
    meet()
    for m in gl.static_range(STAGES):
        load_chunk(tiles, rings, bars, place, chunks * 0 + m)
    dk = gl.arange(0, K, gl.SliceLayout(0, mma))[None, :]
    dv = gl.arange(0, BV, gl.SliceLayout(1, mma))[:, None] + vb * BV
    S = gl.zeros([BV, K], gl.float32, mma)
    if INITIAL:
        S = gl.load(initial_state + owner * s_n + head * s_h + dk.to(gl.int64) * s_k + dv.to(gl.int64) * s_v).to(gl.float32)
    beta += b * b_b + row * b_t + head * b_h
    reads += first_chunk * C
    step = H.to(gl.int64) * C
    rates, factors = vectors_of(beta, reads, chunks * 0, tokens, b_t, step, chunks > 0)
    rate_s.index(0).store(nonzero(rates))
    read_s.index(0).store(factors)
    total = gl.load(reads + (C - 1), mask=chunks > 0, other=1.0)
    for c in range(chunks):
        s = c % STAGES
        t = c * C
        phase = (c // STAGES) & 1
        rates, factors = vectors_of(beta, reads, c + 1, tokens, b_t, step, c + 1 < chunks)
        next_total = gl.load(reads + (c + 1) * step + (C - 1), mask=c + 1 < chunks, other=1.0)
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
        # while the tensor cores compute: stores of the chunk before, and loads into its memory
        tma.store_wait(0)
        expect(tiles, bars, c - 1 + STAGES, (c > 0) & (c - 1 + STAGES < chunks))
        fence_async_shared()
        meet()
        if c > 0:
            load_chunk(tiles, rings, bars, place, c - 1 + STAGES)
            store_chunk(x_tiles, S_tiles, out_s, state_s, place, c - 1, vb, V, BV)
        mbarrier.wait(bars[1].index(s), phase)
        state_s.index(c & 1).store(rounded)
        rate = rate_s.index(c & 1).load(by_token)[None, :]
        read = read_s.index(c & 1).load(by_token)[None, :]
        X = v_s.index(s).permute((1, 0)).load(out_mma).to(gl.float32) * rate
        rate = rate * read
        S = S * total
        Y, L = warpgroup_mma_wait(0, [Y, L])
        X = (X - Y * rate).to(kind)
        mbarrier.wait(bars[2].index(s), phase)
        S = warpgroup_mma(gl.convert_layout(X, left, assert_trivial=True), b_s.index(s), S, is_async=True)
        out_s.index(c & 1).permute((1, 0)).store(X)
        rate_s.index((c + 1) & 1).store(nonzero(rates))
        read_s.index((c + 1) & 1).store(factors)
        total = next_total
        S = warpgroup_mma_wait(0, [S])
    fence_async_shared()
    meet()
    if chunks > 0:
        store_chunk(x_tiles, S_tiles, out_s, state_s, place, chunks - 1, vb, V, BV)
    tma.store_wait(0)
