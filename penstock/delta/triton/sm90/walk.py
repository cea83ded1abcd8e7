"""The walk over the chunks of KDA on Hopper, in Gluon. With what ``prepare.py`` computes of each chunk,

    X = beta o (V - k S)        O = A X + q S        S' = total o S + (B^T)^T X        (q, k: times the decays w_1 ... w_t)

The state is in registers, transposed, so that it and X are left operands of all products without a copy in shared memory. Two products of a
chunk depend on the chunk before. Two stages of tiles are loaded ahead by the tensor memory accelerator (TMA).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, meet
from ....gpu.ring import barriers, expect, load_tiles
from .layouts import C
from .programs import walk_of_program

STAGES = gl.constexpr(2)


@gluon.jit
def load_chunk(tiles, rings, bars, place, c):
    """Start the loads of chunk c: k, q, B^T, A and v."""
    row, value_column, first, H, chunks = place
    at = (first + c * H) * C
    load_tiles(tiles, rings, bars, ([at, 0], [at, 0], [at, 0], [at, 0], [row + c * C, value_column]), c, c < chunks)


@gluon.jit
def updated(L, X_of, rings, s, S, O, BV: gl.constexpr, mma: gl.constexpr, out_mma: gl.constexpr):
    """S plus X^T B^T, and the output O = S q^T + X^T A^T; all transposed."""
    left: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    X = gl.convert_layout(X_of, left, assert_trivial=True)
    S = warpgroup_mma(X, rings[2].index(s), S, is_async=True)
    O = warpgroup_mma(L, rings[1].index(s).permute((1, 0)), O, use_acc=False, is_async=True)
    O = warpgroup_mma(X, rings[3].index(s).permute((1, 0)), O, is_async=True)
    S, O, L, X = warpgroup_mma_wait(0, [S, O, L, X])
    return S, O


@gluon.jit(do_not_specialize=["N", "T", "H"])
def penstock_kda_walk_sm90(
    k_tiles, q_tiles, b_tiles, a_tiles, v_tiles, o_tiles, beta, totals, initial_state, output, final_state, cu_seqlens, N, T, H,
    b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """O = A X + q S, S <- total o S + (B^T)^T X with X = beta o (V - k S), chunk by chunk.

    TMA tiles: k, q, B^T [C,K] and A [C,C] of [slots,H,C,...], v and output [C,BV] of tokens [B T,H V]. Reads beta [B,T,H] and the initial
    state [N,H,K,V] by strides, total [slots,H,K]. Writes the final state [N,H,K,V]. Program (sequence, head, block of BV value channels).
    """
    gl.static_assert(BV == C)
    kind: gl.constexpr = v_tiles.dtype
    NV: gl.constexpr = V // BV
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    owner, h, vb, b, row, tokens, chunks, first_chunk = walk_of_program(cu_seqlens, N, T, H, NV, PACKED)
    head = h.to(gl.int64)
    k_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    q_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    b_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    a_s = gl.allocate_shared_memory(kind, [STAGES, C, C], half)
    v_s = gl.allocate_shared_memory(kind, [STAGES, C, BV], half)
    out_s = gl.allocate_shared_memory(kind, [C, BV], half)
    total_s = gl.allocate_shared_memory(gl.float32, [2, K], flat)
    rate_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    bars = (barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1))
    rings = (k_s, q_s, b_s, a_s, v_s)
    tiles = (k_tiles, q_tiles, b_tiles, a_tiles, v_tiles)
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
        S = gl.load(initial_state + owner * s_n + head * s_h + dk.to(gl.int64) * s_k + dv.to(gl.int64) * s_v).to(gl.float32)
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
        L = gl.convert_layout(S.to(kind), left, assert_trivial=True)
        mbarrier.wait(bars[0].index(s), phase)
        Y = gl.zeros([BV, C], gl.float32, out_mma)
        Y = warpgroup_mma(L, k_s.index(s).permute((1, 0)), Y, use_acc=False, is_async=True)
        mbarrier.wait(bars[4].index(s), phase)
        meet()  # totals and rates are stored
        X = v_s.index(s).permute((1, 0)).load(out_mma).to(gl.float32)
        rate = rate_s.index(c & 1).load(gl.SliceLayout(0, out_mma))[None, :]
        S = S * total_s.index(c & 1).load(gl.SliceLayout(0, mma))[None, :]
        Y, L = warpgroup_mma_wait(0, [Y, L])
        X = gl.where(t + column < tokens, (X - Y) * rate, 0.0).to(kind)
        for m in gl.static_range(1, 4):
            mbarrier.wait(bars[m].index(s), phase)
        O = gl.zeros([BV, C], gl.float32, out_mma)
        S, O = updated(L, X, rings, s, S, O, BV, mma, out_mma)
        tma.store_wait(0)
        meet()
        expect(tiles, bars, c + STAGES, c + STAGES < chunks)
        total_s.index((c + 1) & 1).store(coming)
        rate_s.index((c + 1) & 1).store(rates)
        O = O.to(kind)
        out_s.permute((1, 0)).store(O)
        fence_async_shared()
        meet()
        load_chunk(tiles, rings, bars, place, c + STAGES)
        if t + C <= tokens:
            async_store(o_tiles, [place[0] + t, place[1]], out_s)
        else:
            gl.store(output + (t + column) * (H.to(gl.int64) * V) + line_of, O, mask=t + column < tokens)
    if FINAL:
        gl.store(final_state + (owner * H + head) * (K * V) + dk * V + dv, S)
    tma.store_wait(0)
