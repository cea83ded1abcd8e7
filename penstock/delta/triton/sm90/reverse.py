"""The walk backward over the chunks of KDA on Hopper, in Gluon. With dS' the gradient of the state after a chunk,

    Z = A^T dO + B^T dS'        Y = beta o Z = dV        dS = total o dS' + q^T dO - k^T Y        (q, k: times the decays w_1 ... w_t)

The same products as in ``walk.py``, in the other direction: dS' is in registers, transposed, so that it, dO and Y are left operands without
a copy. Two products of a chunk depend on the chunk after it. Results are stored during the first products of the next step. All other
gradients need no chain: ``gradients.py``.

float16: dS', dO and Y are float16 operands times powers of two, as in ``walk.py``; dO in A^T dO is in two parts of bfloat16, as A is. Z is
stored in place of Y: beta is a factor of rows and columns in ``gradients.py``, which stores dV.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, in_two, meet, zero_rows_from
from ....gpu.ring import barriers, expect, invalidate, load_tiles
from ....gpu.tiles import powers_of_two
from .layouts import C
from .programs import nonzero, places, walk_of_program
from .walk import as_left, vectors_of_powers

STAGES = gl.constexpr(2)


@gluon.jit
def load_step(tiles, rings, bars, place, m, PARTS: gl.constexpr):
    """Start the loads of step m, which is chunk ``chunks - 1 - m``: B^T, dO, A, q and k. PARTS: matrices of A."""
    row, value_column, first, H, chunks = place
    c = chunks - 1 - m
    at = (first + c * H) * C
    load_tiles(tiles, rings, bars, ([at, 0], [row + c * C, value_column], [at * PARTS, 0], [at, 0], [at, 0]), m, m < chunks)


@gluon.jit
def store_step(y_tiles, dS_tiles, out_s, state_s, place, m, tokens, V: gl.constexpr, F16: gl.constexpr):
    """Start the stores of step m: dS' after its chunk and, if the chunk has C tokens, Y; F16: Z of its slot."""
    row, value_column, first, H, chunks = place
    c = chunks - 1 - m
    async_store(dS_tiles, [(first + c * H) * V + value_column % V, 0], state_s.index(m & 1))
    if F16:
        async_store(y_tiles, [(first + c * H) * C, value_column % V], out_s.index(m & 1))
    elif (c + 1) * C <= tokens:
        async_store(y_tiles, [row + c * C, value_column], out_s.index(m & 1))


@gluon.jit(do_not_specialize=["N", "T", "H", "b_b", "b_t", "b_h"])
def penstock_kda_reverse_sm90(
    b_tiles, o_tiles, a_tiles, q_tiles, k_tiles, y_tiles, dS_tiles, beta, totals, powers, d_powers, d_final_state, d_values,
    d_initial_state, cu_seqlens, N, T, H, b_b, b_t, b_h, s_n, s_h, s_k, s_v, scale,
    K: gl.constexpr, V: gl.constexpr, FINAL: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Y = beta o (A^T dO + B^T dS'), dS = total o dS' + q^T dO - k^T Y, from the last chunk to the first.

    TMA tiles: B^T, q, k [C,K] and A [C,C] of [slots,H,C,...], dO and dV [C,C] of tokens [B T,H V], dS'^T after each chunk [C,K] of
    [slots,H,V,K]. Reads beta [B,T,H] and, with FINAL, the gradient of the final state [N,H,K,V] by strides, total [slots,H,K]. Writes
    dV [B,T,H,V] and the gradient of the initial state [N,H,K,V]. Program (sequence, head, block of C value channels).

    float16: q lacks ``scale``, A is two matrices in bfloat16, ``powers`` [slots,H,2,C] has what rows of q and k, and of B^T, lack. In place
    of dV, Z [slots,H,C,V] is written. Its columns and rows of dS'^T are multiplied by powers of two, and ``d_powers`` [slots,H,2,V] gets
    what Z and dS'^T lack.
    """
    kind: gl.constexpr = o_tiles.dtype
    F16: gl.constexpr = kind == gl.float16
    PARTS: gl.constexpr = 2 if F16 else 1
    NV: gl.constexpr = V // C
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    owner, h, vb, b, row, tokens, chunks, first_chunk = walk_of_program(cu_seqlens, N, T, H, NV, PACKED)
    head = h.to(gl.int64)
    b_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    do_s = gl.allocate_shared_memory(kind, [STAGES, C, C], half)
    a_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PARTS * C, C], half)
    q_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    k_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    out_s = gl.allocate_shared_memory(kind, [2, C, C], half)
    state_s = gl.allocate_shared_memory(kind, [2, C, K], half)
    total_s = gl.allocate_shared_memory(gl.float32, [2, K], flat)
    rate_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    if F16:
        read_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
        update_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    bars = (barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1))
    rings = (b_s, do_s, a_s, q_s, k_s)
    tiles = (b_tiles, o_tiles, a_tiles, q_tiles, k_tiles)
    fence_async_shared()
    meet()
    place = ((b * T + row).to(gl.int32), h * V + vb * C, first_chunk.to(gl.int32), H, chunks)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks * 0 + m < chunks)
    meet()
    for m in gl.static_range(STAGES):
        load_step(tiles, rings, bars, place, chunks * 0 + m, PARTS)
    dk = gl.arange(0, K, gl.SliceLayout(0, mma))[None, :]
    dv = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None] + vb * C
    dS = gl.zeros([C, K], gl.float32, mma)
    if FINAL:
        dS = gl.load(places(d_final_state, owner, head, dk, dv, (s_n, s_h, s_k, s_v))).to(gl.float32)
    channel = gl.arange(0, K, line)
    token = gl.arange(0, C, line)
    last = chunks - 1
    totals += first_chunk * K + channel
    beta += b * b_b + row * b_t + head * b_h + token.to(gl.int64) * b_t
    column = gl.arange(0, C, gl.SliceLayout(0, out_mma))[None, :]
    line_of = gl.arange(0, C, gl.SliceLayout(1, out_mma))[:, None]
    step = H.to(gl.int64) * K
    total_s.index(0).store(gl.load(totals + last * step, mask=channel * 0 < chunks, other=0.0))
    known = (token * 0 + chunks > 0) & (last * C + token < tokens)
    rates = gl.load(beta + last * C * b_t.to(gl.int64), mask=known, other=0.0).to(gl.float32)
    if F16:
        rate_s.index(0).store(rates)
        powers += first_chunk * (2 * C)
        d_powers += first_chunk * (2 * V) + vb * C
        reads, updates = vectors_of_powers(powers, last, H, chunks > 0)
        read_s.index(0).store(reads)
        update_s.index(0).store(updates)
    else:
        rate_s.index(0).store(nonzero(rates))
    d_values += ((b * T + row) * H + head) * V + vb * C
    for m in range(chunks):
        s = m % STAGES
        c = chunks - 1 - m
        t = c * C
        phase = (m // STAGES) & 1
        coming = gl.load(totals + (c - 1) * step, mask=channel * 0 + c > 0, other=0.0)
        rates = gl.load(beta + (c - 1) * C * b_t.to(gl.int64), mask=token * 0 + c > 0, other=0.0).to(gl.float32)
        if F16:
            reads, updates = vectors_of_powers(powers, c - 1, H, c > 0)
        else:
            rates = nonzero(rates)
        for n in gl.static_range(1, 3):
            mbarrier.wait(bars[n].index(s), phase)
        if t + C > tokens:  # rows after the last token are padding, or belong to another sequence
            zero_rows_from(do_s.index(s), tokens - t, clean)
            meet()
        Z = gl.zeros([C, C], gl.float32, out_mma)
        if F16:
            A = a_s.index(s)
            high, low = in_two(do_s.index(s).permute((1, 0)).load(out_mma).to(gl.float32), gl.bfloat16)
            high = as_left(high, out_mma)
            low = as_left(low, out_mma)
            Z = warpgroup_mma(high, A.slice(0, C), Z, use_acc=False, is_async=True)
            Z = warpgroup_mma(low, A.slice(0, C), Z, is_async=True)
            Z = warpgroup_mma(high, A.slice(C, C), Z, is_async=True)
            largest = gl.max(gl.abs(dS), 1)
            down, up = powers_of_two(largest)
            rounded = (dS * down[:, None]).to(kind)
            largest = gl.convert_layout(largest, gl.SliceLayout(1, out_mma), assert_trivial=True) * 2.0**-100
            up = gl.convert_layout(up, gl.SliceLayout(1, out_mma), assert_trivial=True)
        else:
            dO = do_s.index(s).permute((1, 0)).load(left)
            Z = warpgroup_mma(dO, a_s.index(s), Z, use_acc=False, is_async=True)
            rounded = dS.to(kind)
        L = gl.convert_layout(rounded, left, assert_trivial=True)
        mbarrier.wait(bars[0].index(s), phase)
        if F16:
            R = gl.zeros([C, C], gl.float32, out_mma)
            R = warpgroup_mma(L, b_s.index(s).permute((1, 0)), R, use_acc=False, is_async=True)
        else:
            Z = warpgroup_mma(L, b_s.index(s).permute((1, 0)), Z, is_async=True)
        # while the tensor cores compute: stores of the chunk after this one, and loads into its memory
        tma.store_wait(0)
        expect(tiles, bars, m - 1 + STAGES, (m > 0) & (m - 1 + STAGES < chunks))
        fence_async_shared()
        meet()  # totals, rates and results are stored
        if m > 0:
            load_step(tiles, rings, bars, place, m - 1 + STAGES, PARTS)
            store_step(y_tiles, dS_tiles, out_s, state_s, place, m - 1, tokens, V, F16)
        state_s.index(m & 1).store(rounded)
        rate = rate_s.index(m & 1).load(gl.SliceLayout(0, out_mma))[None, :]
        if F16:
            for n in gl.static_range(3, 5):
                mbarrier.wait(bars[n].index(s), phase)
            Z, R, L, high, low = warpgroup_mma_wait(0, [Z, R, L, high, low])
            Z += R * up[:, None] * update_s.index(m & 1).load(gl.SliceLayout(0, out_mma))[None, :]
            read = read_s.index(m & 1).load(gl.SliceLayout(0, out_mma))[None, :]
            Y = Z * (rate * read)
            dO = do_s.index(s).permute((1, 0)).load(out_mma).to(gl.float32) * (read * scale)
            down, up_S = powers_of_two(gl.maximum(gl.max(gl.maximum(gl.abs(Y), gl.abs(dO)), 1), largest), 20)
            dS = dS * total_s.index(m & 1).load(gl.SliceLayout(0, mma))[None, :]
            dS = dS * gl.convert_layout(down, gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
            minus = as_left((Y * -down[:, None]).to(kind), out_mma)
            dO = as_left((dO * down[:, None]).to(kind), out_mma)
            dS = warpgroup_mma(minus, k_s.index(s), dS, is_async=True)
            dS = warpgroup_mma(dO, q_s.index(s), dS, is_async=True)
            down, up_Z = powers_of_two(gl.max(gl.abs(Z), 1))
            out_s.index(m & 1).permute((1, 0)).store((Z * down[:, None]).to(kind))
            at = d_powers + c * H.to(gl.int64) * (2 * V) + gl.arange(0, C, gl.SliceLayout(1, out_mma))
            gl.store(at, up_Z)
            gl.store(at + V, up)
            total_s.index((m + 1) & 1).store(coming)
            rate_s.index((m + 1) & 1).store(rates)
            read_s.index((m + 1) & 1).store(reads)
            update_s.index((m + 1) & 1).store(updates)
            dS, dO, minus = warpgroup_mma_wait(0, [dS, dO, minus])
            dS = dS * gl.convert_layout(up_S, gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
        else:
            dS = dS * total_s.index(m & 1).load(gl.SliceLayout(0, mma))[None, :]
            for n in gl.static_range(3, 5):
                mbarrier.wait(bars[n].index(s), phase)
            Z, L, dO = warpgroup_mma_wait(0, [Z, L, dO])
            Z = Z * rate
            minus = gl.convert_layout((-Z).to(kind), left, assert_trivial=True)
            dS = warpgroup_mma(minus, k_s.index(s), dS, is_async=True)
            dS = warpgroup_mma(dO, q_s.index(s), dS, is_async=True)
            Y = Z.to(kind)
            out_s.index(m & 1).permute((1, 0)).store(Y)
            total_s.index((m + 1) & 1).store(coming)
            rate_s.index((m + 1) & 1).store(rates)
            dS, dO, minus = warpgroup_mma_wait(0, [dS, dO, minus])
            if t + C > tokens:
                gl.store(d_values + (t + column) * (H.to(gl.int64) * V) + line_of, Y, mask=t + column < tokens)
    fence_async_shared()
    meet()
    if chunks > 0:
        store_step(y_tiles, dS_tiles, out_s, state_s, place, last, tokens, V, F16)
    gl.store(d_initial_state + (owner * H + head) * (K * V) + dk * V + dv, dS)
    tma.store_wait(0)
    invalidate(bars)
