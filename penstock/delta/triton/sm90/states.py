"""What the backward pass of KDA needs of the chain of states, on Hopper, in Gluon: the walk of ``walk.py`` without outputs.

    X = beta o (V - k S)        S' = total o S + (B^T)^T X        (k: times the decays w_1 ... w_t)

X and S before each chunk are stored in the dtype of v. The gradient of beta divides by it, so that it is at least 2^-100 here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, meet
from ....gpu.ring import barriers, expect, load_tiles
from .layouts import C
from .programs import nonzero, walk_of_program

STAGES = gl.constexpr(3)


@gluon.jit
def load_chunk(tiles, rings, bars, place, c):
    """Start the loads of chunk c: k, B^T and v."""
    row, value_column, first, H, chunks = place
    at = (first + c * H) * C
    load_tiles(tiles, rings, bars, ([at, 0], [at, 0], [row + c * C, value_column]), c, c < chunks)


@gluon.jit(do_not_specialize=["N", "T", "H", "b_b", "b_t", "b_h"])
def penstock_kda_states_sm90(
    k_tiles, b_tiles, v_tiles, x_tiles, S_tiles, beta, totals, initial_state, cu_seqlens, N, T, H, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, INITIAL: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """X = beta o (V - k S), S <- total o S + (B^T)^T X, chunk by chunk.

    TMA tiles: k, B^T [C,K] and x [C,C] of [slots,H,C,...], v [C,C] of tokens [B T,H V], S^T before each chunk [C,K] of [slots,H,V,K]. Reads
    beta [B,T,H] and the initial state [N,H,K,V] by strides, total [slots,H,K]. Program (sequence, head, block of C value channels).
    """
    kind: gl.constexpr = v_tiles.dtype
    NV: gl.constexpr = V // C
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    owner, h, vb, b, row, tokens, chunks, first_chunk = walk_of_program(cu_seqlens, N, T, H, NV, PACKED)
    head = h.to(gl.int64)
    k_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    b_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    v_s = gl.allocate_shared_memory(kind, [STAGES, C, C], half)
    out_s = gl.allocate_shared_memory(kind, [C, C], half)
    state_s = gl.allocate_shared_memory(kind, [C, K], half)
    total_s = gl.allocate_shared_memory(gl.float32, [2, K], flat)
    rate_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    bars = (barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1))
    rings = (k_s, b_s, v_s)
    tiles = (k_tiles, b_tiles, v_tiles)
    fence_async_shared()
    meet()
    place = ((b * T + row).to(gl.int32), h * V + vb * C, first_chunk.to(gl.int32), H, chunks)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks * 0 + m < chunks)
    meet()
    for m in gl.static_range(STAGES):
        load_chunk(tiles, rings, bars, place, chunks * 0 + m)
    dk = gl.arange(0, K, gl.SliceLayout(0, mma))[None, :]
    dv = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None] + vb * C
    S = gl.zeros([C, K], gl.float32, mma)
    if INITIAL:
        at = initial_state + owner * s_n + head * s_h
        S = gl.load(at + dk.to(gl.int64) * s_k + dv.to(gl.int64) * s_v).to(gl.float32)
    channel = gl.arange(0, K, line)
    token = gl.arange(0, C, line)
    totals += first_chunk * K + channel
    beta += b * b_b + row * b_t + head * b_h + token.to(gl.int64) * b_t
    column = gl.arange(0, C, gl.SliceLayout(0, out_mma))[None, :]
    step = H.to(gl.int64) * K
    total_s.index(0).store(gl.load(totals, mask=channel * 0 < chunks, other=0.0))
    rate_s.index(0).store(nonzero(gl.load(beta, mask=token < tokens, other=0.0).to(gl.float32)))
    for c in range(chunks):
        s = c % STAGES
        t = c * C
        phase = (c // STAGES) & 1
        coming = gl.load(totals + (c + 1) * step, mask=channel * 0 + c + 1 < chunks, other=0.0)
        rates = nonzero(gl.load(beta + (c + 1) * C * b_t.to(gl.int64), mask=t + C + token < tokens, other=0.0).to(gl.float32))
        rounded = S.to(kind)
        L = gl.convert_layout(rounded, left, assert_trivial=True)
        mbarrier.wait(bars[0].index(s), phase)
        Y = gl.zeros([C, C], gl.float32, out_mma)
        Y = warpgroup_mma(L, k_s.index(s).permute((1, 0)), Y, use_acc=False, is_async=True)
        tma.store_wait(0)
        mbarrier.wait(bars[2].index(s), phase)
        meet()  # totals and rates are stored, the stores of the chunk before are done
        state_s.store(rounded)
        X = v_s.index(s).permute((1, 0)).load(out_mma).to(gl.float32)
        rate = rate_s.index(c & 1).load(gl.SliceLayout(0, out_mma))[None, :]
        S = S * total_s.index(c & 1).load(gl.SliceLayout(0, mma))[None, :]
        Y, L = warpgroup_mma_wait(0, [Y, L])
        X = gl.where(t + column < tokens, (X - Y) * rate, 0.0).to(kind)
        mbarrier.wait(bars[1].index(s), phase)
        S = warpgroup_mma(gl.convert_layout(X, left, assert_trivial=True), b_s.index(s), S, is_async=True)
        out_s.permute((1, 0)).store(X)
        total_s.index((c + 1) & 1).store(coming)
        rate_s.index((c + 1) & 1).store(rates)
        S = warpgroup_mma_wait(0, [S])
        expect(tiles, bars, c + STAGES, c + STAGES < chunks)
        fence_async_shared()
        meet()
        load_chunk(tiles, rings, bars, place, c + STAGES)
        chunk = place[2] + c * H
        async_store(x_tiles, [chunk * C, vb * C], out_s)
        async_store(S_tiles, [chunk * V + vb * C, 0], state_s)
    tma.store_wait(0)
