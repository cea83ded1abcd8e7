"""The walk backward over the chunks of gated DeltaNet or DeltaNet on Hopper, in Gluon. With dS' the gradient of the state after a chunk,

    Z = A^T dO + B^T dS'        Y = beta o Z = dV        dS = total o dS' + q^T (scale read o dO) - k^T (read o Y)

The same products as in ``scalar_walk.py``, in the other direction: dS' is in registers, transposed, so that it, dO and Y are left operands
without a copy. Two products of a chunk depend on the chunk after it. All other gradients need no chain: ``scalar_gradients.py``.

float16: dS', Z, beta o read o Z and read o dO have no bound. Each value channel is multiplied by a power of two, as an operand or where it
is stored, and columns of products by what columns of A and rows of B^T lack. In place of Y Z is stored, which has no factor beta: where it
is tiny, no row underflows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, meet, scaled_half, zero_rows_from
from ....gpu.ring import barriers, expect, invalidate, load_tiles
from ....gpu.tiles import powers_of_two
from .layouts import C
from .programs import nonzero, places, vectors_of, walk_of_program


@gluon.jit
def load_step(tiles, rings, bars, place, m):
    """Start the loads of step m, which is chunk ``chunks - 1 - m``: B^T, dO, A, q and k."""
    row, columns, first, H, chunks = place
    c = chunks - 1 - m
    at = (first + c * H) * C
    line = row + c * C
    load_tiles(tiles, rings, bars, ([at, 0], [line, columns[0]], [at, 0], [line, columns[1]], [line, columns[2]]), m, m < chunks)


@gluon.jit
def store_step(y_tiles, dS_tiles, out_s, state_s, place, m, tokens, vb, V: gl.constexpr, BV: gl.constexpr, COPIES: gl.constexpr):
    """Start the stores of step m: dS' after its chunk and, if the chunk has C tokens, Y. float16: Z, of any chunk."""
    row, columns, first, H, chunks = place
    c = chunks - 1 - m
    async_store(dS_tiles, [(first + c * H) * V + vb * BV, 0], state_s.index(m % COPIES))
    if out_s.dtype == gl.float16:
        async_store(y_tiles, [(first + c * H) * C, vb * BV], out_s.index(m % COPIES))
    elif (c + 1) * C <= tokens:
        async_store(y_tiles, [row + c * C, columns[0]], out_s.index(m % COPIES))


@gluon.jit
def powers_of(powers, c, step, exists):
    """What columns of A and rows of B^T of chunk c lack, if it exists: [C] each."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = gl.arange(0, C, line)
    known = (i * 0 == 0) & exists
    at = powers + c * (2 * step) + i
    return gl.load(at, mask=known, other=1.0), gl.load(at + C, mask=known, other=1.0)


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "q_h", "k_h", "b_b", "b_t", "b_h"])
def penstock_gdn_reverse_sm90(
    b_tiles, o_tiles, a_tiles, q_tiles, k_tiles, y_tiles, dS_tiles, beta, reads, d_final_state, d_values, d_initial_state, cu_seqlens,
    powers, z_powers, dS_powers, scale, N, T, H, R, q_h, k_h, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, COPIES: gl.constexpr, FINAL: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Y = beta o (A^T dO + B^T dS'), dS = total o dS' + q^T (scale read o dO) - k^T (read o Y), from the last chunk to the first.

    TMA tiles: B^T [C,K] and A [C,C] of [slots,H,C,...], q, k [C,K] of tokens [B T,H / R K], dO and dV [C,BV] of [B T,H V], dS'^T after each
    chunk [BV,K] of [slots,H,V,K]. Reads beta [B,T,H] and, with FINAL, the gradient of the final state [N,H,K,V] by strides, read_t
    [slots,H,C]. Writes dV [B,T,H,V] and the gradient of the initial state [N,H,K,V]. Program (sequence, head, block of BV value channels):
    four warps for each 64 of them. ``q_h`` and ``k_h`` are K, or 0 if all heads share q and k.

    float16: ``powers`` [slots,H,2,C] is what columns of A and rows of B^T lack. In place of dV Z [slots,H,C,V] is written, and what value
    channels of Z and dS' lack [slots,H,V].
    """
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(BV == 16 * WARPS)
    kind: gl.constexpr = o_tiles.dtype
    F16: gl.constexpr = o_tiles.dtype == gl.float16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    by_token: gl.constexpr = gl.SliceLayout(0, out_mma)
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    owner, h, vb, b, row, tokens, chunks, first_chunk = walk_of_program(cu_seqlens, N, T, H, V // BV, PACKED)
    head = h.to(gl.int64)
    b_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    do_s = gl.allocate_shared_memory(kind, [STAGES, C, BV], half)
    a_s = gl.allocate_shared_memory(kind, [STAGES, C, C], half)
    q_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    k_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    out_s = gl.allocate_shared_memory(kind, [COPIES, C, BV], half)
    state_s = gl.allocate_shared_memory(kind, [COPIES, BV, K], half)
    rate_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    read_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    bars = (barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1))
    rings = (b_s, do_s, a_s, q_s, k_s)
    with_padding = (do_s, q_s, k_s)
    tiles = (b_tiles, o_tiles, a_tiles, q_tiles, k_tiles)
    fence_async_shared()
    meet()
    place = ((b * T + row).to(gl.int32), (h * V + vb * BV, h // R * q_h, h // R * k_h), first_chunk.to(gl.int32), H, chunks)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks * 0 + m < chunks)
    meet()
    for m in gl.static_range(STAGES):
        load_step(tiles, rings, bars, place, chunks * 0 + m)
    dk = gl.arange(0, K, gl.SliceLayout(0, mma))[None, :]
    dv = gl.arange(0, BV, gl.SliceLayout(1, mma))[:, None] + vb * BV
    dS = gl.zeros([BV, K], gl.float32, mma)
    if FINAL:
        dS = gl.load(places(d_final_state, owner, head, dk, dv, (s_n, s_h, s_k, s_v))).to(gl.float32)
    if F16:
        of_A = gl.allocate_shared_memory(gl.float32, [2, C], flat)
        of_B = gl.allocate_shared_memory(gl.float32, [2, C], flat)
        powers_at = gl.arange(0, BV, gl.SliceLayout(1, out_mma)) + vb * BV
        powers += first_chunk * (2 * C)
    last = chunks - 1
    beta += b * b_b + row * b_t + head * b_h
    reads += first_chunk * C
    column = gl.arange(0, C, by_token)[None, :]
    line_of = gl.arange(0, BV, gl.SliceLayout(1, out_mma))[:, None]
    step = H.to(gl.int64) * C
    rates, factors = vectors_of(beta, reads, last, tokens, b_t, step, chunks > 0)
    if F16:
        rate_s.index(0).store(rates)
        a_powers, b_powers = powers_of(powers, last, step, chunks > 0)
        of_A.index(0).store(a_powers)
        of_B.index(0).store(b_powers)
    else:
        rate_s.index(0).store(nonzero(rates))
    read_s.index(0).store(factors)
    total = gl.load(reads + last * step + (C - 1), mask=chunks > 0, other=1.0)
    d_values += ((b * T + row) * H + head) * V + vb * BV
    for m in range(chunks):
        s = m % STAGES
        c = last - m
        t = c * C
        phase = (m // STAGES) & 1
        rates, factors = vectors_of(beta, reads, c - 1, tokens, b_t, step, c > 0)
        next_total = gl.load(reads + (c - 1) * step + (C - 1), mask=c > 0, other=1.0)
        if F16:
            a_powers, b_powers = powers_of(powers, c - 1, step, c > 0)
        for n in gl.static_range(1, 5):
            mbarrier.wait(bars[n].index(s), phase)
        if t + C > tokens:  # rows after the last token are padding, or belong to another sequence
            for n in gl.static_range(len(with_padding)):
                zero_rows_from(with_padding[n].index(s), tokens - t, clean)
            fence_async_shared()
            meet()
        dO = do_s.index(s).permute((1, 0)).load(left)
        Z = gl.zeros([BV, C], gl.float32, out_mma)
        Z = warpgroup_mma(dO, a_s.index(s), Z, use_acc=False, is_async=True)
        if F16:
            rounded, up = scaled_half(dS, 1)
            up = gl.convert_layout(up, gl.SliceLayout(1, out_mma), assert_trivial=True)
        else:
            rounded = dS.to(kind)
        L = gl.convert_layout(rounded, left, assert_trivial=True)
        mbarrier.wait(bars[0].index(s), phase)
        if F16:
            of_state = gl.zeros([BV, C], gl.float32, out_mma)
            of_state = warpgroup_mma(L, b_s.index(s).permute((1, 0)), of_state, use_acc=False, is_async=True)
        else:
            Z = warpgroup_mma(L, b_s.index(s).permute((1, 0)), Z, is_async=True)
        tma.store_wait(0)
        if COPIES == 2:  # while the tensor cores compute: stores of the chunk after this one, and loads into its memory
            expect(tiles, bars, m - 1 + STAGES, (m > 0) & (m - 1 + STAGES < chunks))
            fence_async_shared()
        meet()  # the vectors are stored, and the stores that used the same memory are done
        if COPIES == 2:
            if m > 0:
                load_step(tiles, rings, bars, place, m - 1 + STAGES)
                store_step(y_tiles, dS_tiles, out_s, state_s, place, m - 1, tokens, vb, V, BV, COPIES)
        rate = rate_s.index(m & 1).load(by_token)[None, :]
        read = rate * read_s.index(m & 1).load(by_token)[None, :]
        if F16:
            Z, of_state, L, dO = warpgroup_mma_wait(0, [Z, of_state, L, dO])
            Z = Z * of_A.index(m & 1).load(by_token)[None, :]
            Z += of_state * of_B.index(m & 1).load(by_token)[None, :] * up[:, None]
            minus = Z * -read
            reading = read_s.index(m & 1).load(by_token)[None, :] * scale
            scaled = gl.convert_layout(dO, out_mma, assert_trivial=True).to(gl.float32) * reading
            down, of_sum = powers_of_two(gl.maximum(gl.max(gl.abs(scaled), 1), gl.max(gl.abs(minus), 1)))
            scaled = gl.convert_layout((scaled * down[:, None]).to(kind), left, assert_trivial=True)
            minus = gl.convert_layout((minus * down[:, None]).to(kind), left, assert_trivial=True)
            down = gl.convert_layout(down, gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
            of_sum = gl.convert_layout(of_sum, gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
            dS = dS * total * down
            dS = warpgroup_mma(scaled, q_s.index(s), dS, is_async=True)
            dS = warpgroup_mma(minus, k_s.index(s), dS, is_async=True)
            Y, of_Z = scaled_half(Z, 1)
            at = (place[2] + c * H).to(gl.int64) * V + powers_at
            gl.store(z_powers + at, of_Z)
            gl.store(dS_powers + at, up)
        else:
            reading = read_s.index(m & 1).load(gl.SliceLayout(0, left))[None, :] * scale
            scaled = (dO.to(gl.float32) * reading).to(kind)
            dS = dS * total
            dS = warpgroup_mma(scaled, q_s.index(s), dS, is_async=True)
            Z, L, dO = warpgroup_mma_wait(1, [Z, L, dO])
            minus = gl.convert_layout((Z * -read).to(kind), left, assert_trivial=True)
            dS = warpgroup_mma(minus, k_s.index(s), dS, is_async=True)
        state_s.index(m % COPIES).store(rounded)
        if not F16:
            Y = (Z * rate).to(kind)
        out_s.index(m % COPIES).permute((1, 0)).store(Y)
        if F16:
            rate_s.index((m + 1) & 1).store(rates)
            of_A.index((m + 1) & 1).store(a_powers)
            of_B.index((m + 1) & 1).store(b_powers)
        else:
            rate_s.index((m + 1) & 1).store(nonzero(rates))
        read_s.index((m + 1) & 1).store(factors)
        total = next_total
        dS, scaled, minus = warpgroup_mma_wait(0, [dS, scaled, minus])
        if F16:
            dS = dS * of_sum
        elif t + C > tokens:
            gl.store(d_values + (t + column) * (H.to(gl.int64) * V) + line_of, Y, mask=t + column < tokens)
        if COPIES == 1:
            expect(tiles, bars, m + STAGES, m + STAGES < chunks)
            fence_async_shared()
            meet()
            load_step(tiles, rings, bars, place, m + STAGES)
            store_step(y_tiles, dS_tiles, out_s, state_s, place, m, tokens, vb, V, BV, COPIES)
    if COPIES == 2:
        fence_async_shared()
        meet()
        if chunks > 0:
            store_step(y_tiles, dS_tiles, out_s, state_s, place, last, tokens, vb, V, BV, COPIES)
    gl.store(d_initial_state + (owner * H + head) * (K * V) + dk * V + dv, dS)
    tma.store_wait(0)
    invalidate(bars)
