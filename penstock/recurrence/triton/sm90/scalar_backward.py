"""The backward pass without decays per channel on Hopper, in Gluon: a program walks over a whole sequence of one head of 64 channels.

It walks from the last chunk to the first with the gradient dS of the state in registers. With S the state before the chunk, G the sums of
decays up to a token, R those after it, D_ij = 2^(G_i - G_j), L the chunk's last token, and tiles strictly below the diagonal::

    A'  = scale D o Q K^T       dA' = scale D o dO V^T       e_i = scale dO_i . v_i
    dv  = A'^T dO + 2^R o K dS                               A' with its diagonal
    dk  = dA'^T Q + 2^R o V dS^T + e q
    dq  = dA' K + scale 2^G o dO S^T + e k
    dS <- 2^(G_L) dS + scale Q^T (2^G o dO)

    dg_t = sum_{i>=t} (q_i . (dA' K + scale 2^G o dO S^T)_i - sum_l (dA' o Q K^T)_li)
           + sum_{j<t} k_j . (2^R o V dS^T)_j + 2^(G_L) sum(S o dS)

So dS is neither stored nor loaded, a quarter of the bytes of two launches, and is never rounded between chunks. Without dg, dA' has its
diagonal and e is not needed. In dg pairs of tokens after t cancel: they are products of the same rounded dA'.

A and dA are computed transposed: rounded, they are left operands of dv and dk in registers. Two stages of tiles are loaded ahead by the
tensor memory accelerator (TMA). Two programs fit on a multiprocessor: one computes weights while the other waits for products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, meet
from ....gpu.ring import barriers, expect, load_tiles
from ....gpu.tiles import slot_of, tokens_of
from ..heads import SMALL
from .scalar_decays import (
    C,
    decay_vectors,
    factors_between,
    gradients_of_decays,
    log_decays,
    place_of_decays,
    store_decays,
    sums_of_decays,
    zero_padding,
)

STAGES = gl.constexpr(2)


class Memory(NamedTuple):
    """Shared memory of a program besides the rings."""

    dS: Any
    """dS as operand [C,C], later dv."""
    dA: Any
    """dA^T as operand [C,C], later dq."""
    read: Any
    """scale 2^G o dO [C,C], later dk."""
    of_queries: Any
    of_keys: Any
    of_state: Any
    """Terms of dg: of tokens from t on, of earlier tokens [C], of the state's rows [C]."""


@gluon.jit
def memory_of(half: gl.constexpr):
    """The shared memory of a program besides the rings, and the vectors of ``sums_of_decays``."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dS = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)
    dA = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)
    read = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)
    vectors = decay_vectors()
    of_queries = gl.allocate_shared_memory(gl.float32, [C], plain)
    of_keys = gl.allocate_shared_memory(gl.float32, [C], plain)
    of_state = gl.allocate_shared_memory(gl.float32, [C], plain)
    return Memory(dS, dA, read, of_queries, of_keys, of_state), vectors


@gluon.jit
def load_chunk(tiles, rings, bars, place, columns, c):
    """Start the loads of step c: q, k, v, dO and the state before the chunk."""
    line, state, H, chunks = place
    chunk = chunks - 1 - c
    row = line + chunk * C
    at = ([row, columns[0]], [row, columns[1]], [row, columns[2]], [row, columns[3]], [state + chunk * (H * C), 0])
    load_tiles(tiles, rings, bars, at, c, c < chunks)


@gluon.jit
def first_products(chunk, dS, memory, vectors, known, scale, DECAYS: gl.constexpr, DG: gl.constexpr, rows: gl.constexpr, mma: gl.constexpr):
    """K Q^T, V dO^T, K dS, V dS^T, with dS rounded; stores scale 2^G o dO and the terms of S o dS."""
    q, k, v, o, S = chunk
    memory.dS.store(dS.to(gl.bfloat16))
    factor = scale
    if DECAYS:
        factor = vectors[2].index(known).load(gl.SliceLayout(1, rows))[:, None]
    if DG:
        memory.of_state.store(gl.sum(S.load(mma).to(gl.float32) * dS, 1))
    memory.read.store((o.load(rows).to(gl.float32) * factor).to(gl.bfloat16))
    fence_async_shared()
    meet()
    A = warpgroup_mma(k, q.permute((1, 0)), gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
    dA = warpgroup_mma(v, o.permute((1, 0)), gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
    dV = warpgroup_mma(k, memory.dS, gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
    dK = warpgroup_mma(v, memory.dS.permute((1, 0)), gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, [A, dA, dV, dK])


@gluon.jit
def gradients(
    chunk, indices, dS, memory, vectors, known, total, scale, DECAYS: gl.constexpr, DG: gl.constexpr, rows: gl.constexpr, mma: gl.constexpr
):
    """dq, dk, dv [C,C] of a chunk, and dS before it. Stores terms of dg. ``indices``: of rows and columns; computed here, they spilled."""
    q, k, _, o, S = chunk
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    i_row, i_column = indices
    A, dA, dV, dK = first_products(chunk, dS, memory, vectors, known, scale, DECAYS, DG, rows, mma)
    D = scale
    if DECAYS:
        D = factors_between(vectors, known, scale, True, mma)
        rest = vectors[3].index(known).load(gl.SliceLayout(1, mma))[:, None]
        dV = dV * rest
        dK = dK * rest
    if DG:
        e = gl.sum(gl.where(i_row == i_column, dA, 0.0), 1)[:, None] * scale
        dA = gl.where(i_row < i_column, dA * D, 0.0).to(gl.bfloat16)
        of_pairs = gl.sum(dA.to(gl.float32) * A, 1)
        memory.of_keys.store(gl.sum(k.load(mma).to(gl.float32) * dK, 1))
    else:
        dA = gl.where(i_row <= i_column, dA * D, 0.0).to(gl.bfloat16)
    A = gl.where(i_row <= i_column, A * D, 0.0).to(gl.bfloat16)
    memory.dA.store(dA)
    A = gl.convert_layout(A, left, assert_trivial=True)
    dA = gl.convert_layout(dA, left, assert_trivial=True)
    if DECAYS:
        dS = dS * total
    fence_async_shared()
    meet()
    dV = warpgroup_mma(A, o, dV, is_async=True)
    dK = warpgroup_mma(dA, q, dK, is_async=True)
    dQ = warpgroup_mma(memory.read, S.permute((1, 0)), gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
    dQ = warpgroup_mma(memory.dA.permute((1, 0)), k, dQ, is_async=True)
    dS = warpgroup_mma(q.permute((1, 0)), memory.read, dS, is_async=True)
    A, dA, dV, dK, dQ, dS = warpgroup_mma_wait(0, [A, dA, dV, dK, dQ, dS])
    if DG:
        Q = q.load(mma).to(gl.float32)
        memory.of_queries.store(gl.sum(Q * dQ, 1) - of_pairs)
        dK += e * Q
        dQ += e * k.load(mma).to(gl.float32)
    return dQ, dK, dV, dS


@gluon.jit
def store(dQ, dK, dV, memory, tiles, pointers, at, place, t, tokens, H, head, mma: gl.constexpr):
    """Store dq, dk and dv of the chunk from token t on: a whole chunk through shared memory. ``place``: of the sequence's first token."""
    dq_tiles, dk_tiles, dv_tiles = tiles
    dq, dk, dv = pointers
    if t + C <= tokens:
        memory.dS.store(dV.to(gl.bfloat16))
        memory.read.store(dK.to(gl.bfloat16))
        memory.dA.store(dQ.to(gl.bfloat16))
        fence_async_shared()
        meet()
        async_store(dv_tiles, at, memory.dS)
        async_store(dk_tiles, at, memory.read)
        async_store(dq_tiles, at, memory.dA)
    else:
        i_row = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None]
        where = ((place + t + i_row) * H + head) * C + gl.arange(0, C, gl.SliceLayout(0, mma))[None, :]
        live = i_row < tokens - t
        gl.store(dv + where, dV.to(gl.bfloat16), mask=live)
        gl.store(dk + where, dK.to(gl.bfloat16), mask=live)
        gl.store(dq + where, dQ.to(gl.bfloat16), mask=live)


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
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])  # every warp has all tokens
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    pid = gl.program_id(0)
    h = pid % H
    head = h.to(gl.int64)
    n, b, row, _, begin, done, tokens = tokens_of(pid // H, cu_seqlens, N, T, T, False, PACKED, False)
    first_chunk = slot_of(n, begin, done, T, C, PACKED)
    owner = n.to(gl.int64)
    chunks = (tokens + (C - 1)) // C
    i = gl.arange(0, C, line)
    i_row = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None]
    i_column = gl.arange(0, C, gl.SliceLayout(0, mma))[None, :]
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
    memory, vectors = memory_of(half)
    bars = (barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1))
    fence_async_shared()
    meet()
    place = (token.to(gl.int32), ((first_chunk * H + h) * C).to(gl.int32), H, chunks)
    columns = (h * q_h, h * k_h, h * C, h * C)
    tiles = (q_tiles, k_tiles, v_tiles, o_tiles, state_tiles)
    rings = (q_s, k_s, v_s, o_s, state_s)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks * 0 + m < chunks)
    meet()
    for m in gl.static_range(STAGES):
        load_chunk(tiles, rings, bars, place, columns, chunks * 0 + m)
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
        known = c % 2
        if DECAYS:
            coming = log_decays(g + (gl.maximum(t, C) - C).to(gl.int64) * g_t, g_t, gl.minimum(tokens, C), i)
        for tensor in gl.static_range(5):
            mbarrier.wait(bars[tensor].index(s), phase)
        chunk_tiles = (q_s.index(s), k_s.index(s), v_s.index(s), o_s.index(s), state_s.index(s))
        if t + C > tokens:
            zero_padding(chunk_tiles[:4], tokens - t, rows)
        tma.store_wait(0)
        meet()
        dQ, dK, dV, dS = gradients(chunk_tiles, (i_row, i_column), dS, memory, vectors, known, total, scale, DECAYS, DG, rows, mma)
        decay = total
        if DECAYS:
            total = sums_of_decays(coming, vectors, 1 - known, scale)
        expect(tiles, bars, c + STAGES, c + STAGES < chunks)
        meet()
        at = [place[0] + t, columns[2]]
        store(dQ, dK, dV, memory, (dq_tiles, dk_tiles, dv_tiles), (dq, dk, dv), at, token, t, tokens, H, head, mma)
        load_chunk(tiles, rings, bars, place, columns, c + STAGES)
        if DG:
            of_state = gl.sum(memory.of_state.load(line), 0) * decay
            d_gate = gradients_of_decays(memory.of_queries.load(line), memory.of_keys.load(line), of_state, d, i >= tokens - t)
            store_decays(dg, d_gate, chunk, i, tokens - t, H, STATIC)
        if DECAYS:
            d = coming
    if FIRST:
        first += (owner * H + head) * (C * C) + i_row * C + i_column
        gl.store(first, dS.to(first.dtype.element_ty))
    tma.store_wait(0)
