"""The backward pass without decays per channel on Hopper, in Gluon: a program walks over a whole sequence of one head of 64 channels.

It walks from the last chunk to the first with the gradient dS of the state in registers. With S the state before the chunk, G the sums of
decays up to a token, R those behind it, D_ij = 2^(G_i - G_j), L the chunk's last token, and tiles strictly below the diagonal::

    A'  = scale D o Q K^T       dA' = scale D o dO V^T       e_i = scale dO_i . v_i
    dv  = A'^T dO + 2^R o K dS                               A' with its diagonal
    dk  = dA'^T Q + 2^R o V dS^T + e q
    dq  = dA' K + scale 2^G o dO S^T + e k
    dS <- 2^(G_L) dS + scale Q^T (2^G o dO)

    dg_t = sum_{i>=t} (q_i . (dA' K + scale 2^G o dO S^T)_i - sum_l (dA' o Q K^T)_li)
           + sum_{j<t} k_j . (2^R o V dS^T)_j + 2^(G_L) sum(S o dS)

So dS is neither stored nor loaded, a quarter of the bytes of two launches, and is never rounded between chunks. Without dg, dA' has its
diagonal and e is not needed. In dg pairs of tokens behind t cancel: they are products of the same rounded dA'.

A and dA are computed transposed: rounded, they are left operands of dv and dk in registers. Two stages of tiles are loaded ahead by the
tensor memory accelerator (TMA). Two programs fit on a multiprocessor: one computes weights while the other waits for products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, async_store, exp2, meet, zeroed_behind
from ....gpu.tiles import slot_of, tokens_of
from ..heads import SMALL
from .scalar_decays import (
    C,
    barriers,
    decay_vectors,
    expect,
    gradients_of_decays,
    log_decays,
    place_of_decays,
    store_decays,
    sums_of_decays,
)

STAGES = gl.constexpr(2)


@gluon.jit
def ask(tiles, parts, bars, place, columns, c):
    """Start the loads of step c: q, k, v, dO and the state before the chunk."""
    line, state, H, chunks = place
    chunk = chunks - 1 - c
    s = c % STAGES
    for n in gl.static_range(4):
        async_load(tiles[n], [line + chunk * C, columns[n]], bars[n].index(s), parts[n].index(s), pred=c < chunks)
    async_load(tiles[4], [state + chunk * (H * C), 0], bars[4].index(s), parts[4].index(s), pred=c < chunks)


@gluon.jit(do_not_specialize=["N", "T"])
def penstock_scalar_bwd_sm90(
    q_tiles, k_tiles, v_tiles, o_tiles, state_tiles, dq_tiles, dk_tiles, dv_tiles, g, last, dq, dk, dv, dg, first, cu_seqlens,
    scale, N, T, H, q_h, k_h, g_b, g_t, g_h, s_n, s_h, s_k, s_v,
    DECAYS: gl.constexpr, STATIC: gl.constexpr, DG: gl.constexpr, LAST: gl.constexpr, FIRST: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Program (sequence, head). TMA tiles: [C, C] of tokens [B T, H C] and of states [slots H C, C].

    ``q_h`` and ``k_h`` are C, or 0 if all heads share q or k. dq, dk, dv and dg are contiguous; a constant decay's dg is [slots, H].
    LAST: ``last`` [N,H,C,C] is the gradient of the final state. FIRST: that of the initial state is stored in ``first``, contiguous.
    """
    gl.static_assert(q_tiles.block_shape[1] == SMALL)
    gl.static_assert(q_tiles.dtype == gl.bfloat16)
    WARPS: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, C * 4 // WARPS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    by_column: gl.constexpr = gl.SliceLayout(0, mma)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])  # every warp has all tokens
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    pid = gl.program_id(0)
    h = pid % H
    head = h.to(gl.int64)
    n, b, row, _, begin, done, tokens = tokens_of(pid // H, cu_seqlens, N, T, T, False, PACKED, False)
    first_chunk = slot_of(n, begin, done, T, C, PACKED)
    owner = n.to(gl.int64)
    chunks = (tokens + (C - 1)) // C
    i = gl.arange(0, C, line)
    i_row = gl.arange(0, C, by_row)[:, None]
    i_column = gl.arange(0, C, by_column)[None, :]
    dS = gl.zeros([C, C], gl.float32, mma)
    if LAST:
        last += owner * s_n + head * s_h + i_row.to(gl.int64) * s_k + i_column.to(gl.int64) * s_v
        dS = gl.load(last).to(gl.float32)
    g += b * g_b + row * g_t + head * g_h
    token = b * T + row
    dg = place_of_decays(dg, first_chunk, token, n, begin + tokens, chunks, H, head, STATIC, DG and PACKED)

    q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    dS_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)  # later dv
    dA_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)  # later dq
    read_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)  # scale 2^G o dO, later dk
    vectors = decay_vectors()
    of_queries_s = gl.allocate_shared_memory(gl.float32, [C], plain)
    of_keys_s = gl.allocate_shared_memory(gl.float32, [C], plain)
    of_state_s = gl.allocate_shared_memory(gl.float32, [C], plain)
    bars = (barriers(STAGES), barriers(STAGES), barriers(STAGES), barriers(STAGES), barriers(STAGES))
    for m in gl.static_range(STAGES):
        for tensor in gl.static_range(5):
            mbarrier.init(bars[tensor].index(m), count=1)
    fence_async_shared()
    meet()
    place = (token.to(gl.int32), ((first_chunk * H + h) * C).to(gl.int32), H, chunks)
    columns = (h * q_h, h * k_h, h * C, h * C)
    tiles = (q_tiles, k_tiles, v_tiles, o_tiles, state_tiles)
    parts = (q_s, k_s, v_s, o_s, state_s)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks, STAGES)
    meet()
    for m in gl.static_range(STAGES):
        ask(tiles, parts, bars, place, columns, chunks * 0 + m)
    total = 1.0
    d = gl.zeros([C], gl.float32, line)
    if DECAYS:
        start = gl.maximum(chunks - 1, 0) * C
        d = log_decays(g + start.to(gl.int64) * g_t, g_t, tokens - start, i)
        total = sums_of_decays(d, vectors, chunks * 0, scale)

    for c in range(chunks):
        chunk = chunks - 1 - c
        t = chunk * C
        s = c % STAGES
        phase = (c // STAGES) & 1
        q = q_s.index(s)
        k = k_s.index(s)
        v = v_s.index(s)
        o = o_s.index(s)
        S = state_s.index(s)
        known = c % 2
        if DECAYS:
            coming = log_decays(g + (gl.maximum(t, C) - C).to(gl.int64) * g_t, g_t, gl.minimum(tokens, C), i)
        for tensor in gl.static_range(5):
            mbarrier.wait(bars[tensor].index(s), phase)
        if t + C > tokens:
            zeroed_behind(q, tokens - t, rows)
            zeroed_behind(k, tokens - t, rows)
            zeroed_behind(v, tokens - t, rows)
            zeroed_behind(o, tokens - t, rows)
        tma.store_wait(0)
        meet()
        dS_s.store(dS.to(gl.bfloat16))
        factor = scale
        if DECAYS:
            factor = vectors[2].index(known).load(gl.SliceLayout(1, rows))[:, None]
        if DG:
            of_state_s.store(gl.sum(S.load(mma).to(gl.float32) * dS, 1))
        read_s.store((o.load(rows).to(gl.float32) * factor).to(gl.bfloat16))
        fence_async_shared()
        meet()
        A = warpgroup_mma(k, q.permute((1, 0)), gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
        dA = warpgroup_mma(v, o.permute((1, 0)), gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
        dV = warpgroup_mma(k, dS_s, gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
        dK = warpgroup_mma(v, dS_s.permute((1, 0)), gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
        A, dA, dV, dK = warpgroup_mma_wait(0, [A, dA, dV, dK])

        D = scale
        if DECAYS:
            coarse = vectors[0].index(known).load(by_column)[None, :] - vectors[0].index(known).load(by_row)[:, None]
            fine = vectors[1].index(known).load(by_column)[None, :] - vectors[1].index(known).load(by_row)[:, None]
            D = exp2(coarse + fine) * scale
            rest = vectors[3].index(known).load(by_row)[:, None]
            dV = dV * rest
            dK = dK * rest
        if DG:
            e = gl.sum(gl.where(i_row == i_column, dA, 0.0), 1)[:, None] * scale
            dA = gl.where(i_row < i_column, dA * D, 0.0).to(gl.bfloat16)
            of_pairs = gl.sum(dA.to(gl.float32) * A, 1)
            of_keys_s.store(gl.sum(k.load(mma).to(gl.float32) * dK, 1))
        else:
            dA = gl.where(i_row <= i_column, dA * D, 0.0).to(gl.bfloat16)
        A = gl.where(i_row <= i_column, A * D, 0.0).to(gl.bfloat16)
        dA_s.store(dA)
        A = gl.convert_layout(A, left, assert_trivial=True)
        dA = gl.convert_layout(dA, left, assert_trivial=True)
        if DECAYS:
            dS = dS * total
        fence_async_shared()
        meet()
        dV = warpgroup_mma(A, o, dV, is_async=True)
        dK = warpgroup_mma(dA, q, dK, is_async=True)
        dQ = warpgroup_mma(read_s, S.permute((1, 0)), gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
        dQ = warpgroup_mma(dA_s.permute((1, 0)), k, dQ, is_async=True)
        dS = warpgroup_mma(q.permute((1, 0)), read_s, dS, is_async=True)
        A, dA, dV, dK, dQ, dS = warpgroup_mma_wait(0, [A, dA, dV, dK, dQ, dS])

        if DG:
            Q = q.load(mma).to(gl.float32)
            of_queries_s.store(gl.sum(Q * dQ, 1) - of_pairs)
            dK += e * Q
            dQ += e * k.load(mma).to(gl.float32)
        decay = total
        if DECAYS:
            total = sums_of_decays(coming, vectors, 1 - known, scale)
        expect(tiles, bars, c + STAGES, chunks, STAGES)
        meet()
        if t + C <= tokens:
            dS_s.store(dV.to(gl.bfloat16))
            read_s.store(dK.to(gl.bfloat16))
            dA_s.store(dQ.to(gl.bfloat16))
            fence_async_shared()
            meet()
            at = [place[0] + t, columns[2]]
            async_store(dv_tiles, at, dS_s)
            async_store(dk_tiles, at, read_s)
            async_store(dq_tiles, at, dA_s)
        else:
            where = ((token + t + i_row) * H + head) * C + i_column
            live = i_row < tokens - t
            gl.store(dv + where, dV.to(gl.bfloat16), mask=live)
            gl.store(dk + where, dK.to(gl.bfloat16), mask=live)
            gl.store(dq + where, dQ.to(gl.bfloat16), mask=live)
        ask(tiles, parts, bars, place, columns, c + STAGES)
        if DG:
            of_state = gl.sum(of_state_s.load(line), 0) * decay
            d_gate = gradients_of_decays(of_queries_s.load(line), of_keys_s.load(line), of_state, d, i >= tokens - t)
            store_decays(dg, d_gate, chunk, i, tokens - t, H, STATIC)
        if DECAYS:
            d = coming
    if FIRST:
        first += (owner * H + head) * (C * C) + i_row * C + i_column
        gl.store(first, dS.to(first.dtype.element_ty))
    tma.store_wait(0)
