"""The backward pass without decays per channel on Hopper, in Gluon: a program walks over a whole sequence of one head of 64 or 128
key channels and 64 value channels.

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

A program has two groups of four warps, and two programs fit on a multiprocessor: 128 registers a thread and 78 (K = 64) or 109 KB of
shared memory, so there is one stage of tiles. Tiles of the next chunk are loaded as soon as no product needs the memory: k, dO and S during
the products of dk, q and v while gradients are stored. While a program waits for them, the other one computes. Addresses of tiles are
computed in the loop: as loop invariants they spilled.

Each group has half of the columns of every tile but dS, of which it has half of the key channels. So the weights are operands in shared
memory. Sums over columns are stored by halves, one of each group. v is multiplied by 2^R in place, so both terms of dk are products of one
sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_decays import C, decay_vectors, factors_between, gradients_of_decays, log_decays, sums_of_decays
from ....gpu.hopper_tiles import async_store, meet, reinterpret, unknown
from ....gpu.ring import barriers, expect, invalidate, load_tiles
from ....gpu.tiles import slot_of, tokens_of
from ..heads import MEDIUM, SMALL
from .scalar_decays import place_of_decays, store_decays, zero_padding

STAGES = gl.constexpr(1)


@gluon.jit
def halves(x):
    """The sums over the columns of each group of warps, [rows,2]."""
    return gl.sum(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 2)


class Memory(NamedTuple):
    """Shared memory of a program besides the rings. The first three have a leading axis of 1 or 2 tiles."""

    dS: Any
    """dS [K,C] as operand, later dk [C,K]."""
    dA: Any
    """dA^T [C,C] as operand, later dv."""
    both: Any
    """A^T [C,C] as operand and scale 2^G o dO, later dq [C,K]."""
    of_queries: Any
    of_pairs: Any
    of_keys: Any
    """Terms of dg [C,2]: a column for each group of warps."""
    of_state: Any
    """rowsum(S o dS) [K]."""
    e: Any


@gluon.jit
def memory_of(K: gl.constexpr, half: gl.constexpr):
    """The shared memory of a program besides the rings, and the vectors of ``sums_of_decays``."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dS = gl.allocate_shared_memory(gl.bfloat16, [1, K, C], half)
    dA = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], half)
    both = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], half)
    vectors = decay_vectors()
    of_queries = gl.allocate_shared_memory(gl.float32, [C, 2], plain2)
    of_pairs = gl.allocate_shared_memory(gl.float32, [C, 2], plain2)
    of_keys = gl.allocate_shared_memory(gl.float32, [C, 2], plain2)
    of_state = gl.allocate_shared_memory(gl.float32, [K], plain)
    e = gl.allocate_shared_memory(gl.float32, [C], plain)
    return Memory(dS, dA, both, of_queries, of_pairs, of_keys, of_state, e), vectors


class Chunk(NamedTuple):
    """Tiles of a chunk in shared memory."""

    q: Any
    k: Any
    v: Any
    o: Any
    S: Any
    dS: Any
    dA: Any
    A: Any
    read: Any
    dq: Any
    dk: Any


@gluon.jit
def chunk_of(rings, memory, zero, half: gl.constexpr):
    """The tiles of a chunk. ``zero``: 0, opaque to the compiler."""
    K: gl.constexpr = rings[0].shape[2]
    q = rings[0].index(zero)
    k = rings[1].index(zero)
    v = rings[2].index(zero)
    o = rings[3].index(zero)
    S = rings[4].index(zero)
    dS = memory.dS.index(zero)
    dA = memory.dA.index(zero)
    A = memory.both.index(zero)
    read = memory.both.index(zero + 1)
    dq = reinterpret(memory.both, gl.bfloat16, [2 * C // K, C, K], half).index(zero)
    dk = reinterpret(memory.dS, gl.bfloat16, [1, C, K], half).index(zero)
    return Chunk(q, k, v, o, S, dS, dA, A, read, dq, dk)


@gluon.jit
def first_products(
    x, dS, memory, vectors, known, scale,
    DECAYS: gl.constexpr, DG: gl.constexpr, rows: gl.constexpr, square: gl.constexpr, of_dS: gl.constexpr,
):  # fmt: skip
    """K Q^T, V dO^T, K dS, with dS rounded; stores scale 2^G o dO, e and the terms of S o dS."""
    x.dS.store(dS.to(gl.bfloat16))
    factor = scale
    if DECAYS:
        factor = vectors[2].index(known).load(gl.SliceLayout(1, rows))[:, None]
    O = x.o.load(rows).to(gl.float32)
    x.read.store((O * factor).to(gl.bfloat16))
    if DG:
        memory.e.store(gl.sum(O * x.v.load(rows).to(gl.float32), 1) * scale)
        memory.of_state.store(gl.sum(x.S.load(of_dS).to(gl.float32) * dS, 1))
    fence_async_shared()
    meet()
    A = warpgroup_mma(x.k, x.q.permute((1, 0)), gl.zeros([C, C], gl.float32, square), use_acc=False, is_async=True)
    dA = warpgroup_mma(x.v, x.o.permute((1, 0)), gl.zeros([C, C], gl.float32, square), use_acc=False, is_async=True)
    dV = warpgroup_mma(x.k, x.dS, gl.zeros([C, C], gl.float32, square), use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, [A, dA, dV])


@gluon.jit
def store_weights(
    x, A, dA, dV, indices, memory, vectors, known, scale, DECAYS: gl.constexpr, DG: gl.constexpr, square: gl.constexpr
):  # fmt: skip
    """Store A^T, dA^T, 2^R o V and terms of dg. Returns 2^R o K dS."""
    i_row, i_column = indices
    D = scale
    if DECAYS:
        D = factors_between(vectors, known, scale, True, square)
        rest = vectors[3].index(known).load(gl.SliceLayout(1, square))[:, None]
        dV = dV * rest
        V = x.v.load(square).to(gl.float32)
        if DG:
            memory.of_keys.store(halves(V * dV))
        V = (V * rest).to(gl.bfloat16)
    if DG:
        dA = gl.where(i_row < i_column, dA * D, 0.0).to(gl.bfloat16)
        memory.of_pairs.store(halves(dA.to(gl.float32) * A))
    else:
        dA = gl.where(i_row <= i_column, dA * D, 0.0).to(gl.bfloat16)
    x.A.store(gl.where(i_row <= i_column, A * D, 0.0).to(gl.bfloat16))
    x.dA.store(dA)
    if DECAYS:
        meet()  # v is read by both groups
        x.v.store(V)
    return dV


@gluon.jit
def store_rows(to, y, token, tokens, H, head, layout: gl.constexpr):
    """Store the first ``tokens`` rows of y [C,N] from row ``token`` of a contiguous tensor on."""
    N: gl.constexpr = y.shape[1]
    i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    where = ((token + i) * H + head) * N + gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]
    gl.store(to + where, y, mask=i < tokens)


@gluon.jit
def second_products(x, dV, dS, wide: gl.constexpr):
    """dv, dq without the diagonal, and dS before the chunk."""
    K: gl.constexpr = x.k.shape[1]
    dV = warpgroup_mma(x.A, x.o, dV, is_async=True)
    dQ = warpgroup_mma(x.read, x.S.permute((1, 0)), gl.zeros([C, K], gl.float32, wide), use_acc=False, is_async=True)
    dQ = warpgroup_mma(x.dA.permute((1, 0)), x.k, dQ, is_async=True)
    dS = warpgroup_mma(x.q.permute((1, 0)), x.read, dS, is_async=True)
    return warpgroup_mma_wait(0, [dV, dQ, dS])


@gluon.jit
def store_tiles(dV, dK, x, tiles, at, columns):
    """Store a whole chunk of dv, dk and, already in ``x.dq``, dq by TMA."""
    dq_tiles, dk_tiles, dv_tiles = tiles
    x.dA.store(dV)
    x.dk.store(dK)
    fence_async_shared()
    meet()
    async_store(dq_tiles, [at, columns[0]], x.dq)
    async_store(dv_tiles, [at, columns[1]], x.dA)
    async_store(dk_tiles, [at, columns[0]], x.dk)


@gluon.jit
def store_gate_gradient(memory, dg, chunk, d, decay, i, tokens, H, STATIC: gl.constexpr, line: gl.constexpr):
    """Store dg of a chunk from its terms. ``decay``: 2^(G_L)."""
    WARPS: gl.constexpr = gl.num_warps()
    channels: gl.constexpr = gl.BlockedLayout([memory.of_state.shape[0] // 32], [32], [WARPS], [0])
    pairs: gl.constexpr = gl.BlockedLayout([2, 2], [32, 1], [WARPS, 1], [1, 0])
    queries = gl.convert_layout(gl.sum(memory.of_queries.load(pairs) - memory.of_pairs.load(pairs), 1), line, assert_trivial=True)
    keys = gl.convert_layout(gl.sum(memory.of_keys.load(pairs), 1), line, assert_trivial=True)
    of_state = gl.sum(memory.of_state.load(channels), 0) * decay
    d_gate = gradients_of_decays(queries, keys, of_state, d, i >= tokens)
    store_decays(dg, d_gate, chunk, i, tokens, H, STATIC)


@gluon.jit(do_not_specialize=["N", "T"])
def penstock_scalar_bwd_sm90(
    q_tiles, k_tiles, v_tiles, o_tiles, state_tiles, dq_tiles, dk_tiles, dv_tiles, g, last, dq, dk, dv, dg, first, cu_seqlens,
    scale, N, T, H, q_h, k_h, g_b, g_t, g_h, s_n, s_h, s_k, s_v,
    DECAYS: gl.constexpr, STATIC: gl.constexpr, DG: gl.constexpr, LAST: gl.constexpr, FIRST: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dS <- 2^(G_L) dS + scale Q^T (2^G o dO), dv = A'^T dO + 2^R o K dS, dk = dA'^T Q + 2^R o V dS^T, dq = dA' K + scale 2^G o dO S^T.

    Reads q, k [B,T,H,K], v, dO [B,T,H,C] and S before each chunk [slots,H,K,C], as TMA tiles: [C,K] of q, k and their gradients, [C,C] of v
    and dO, [K,C] of states; g [B,T,H]. Writes dq, dk, dv and dg [B,T,H]. Program (sequence, head): from the last chunk to the first.

    ``q_h`` and ``k_h`` are K, or 0 if all heads share q or k. dq, dk, dv and dg are contiguous; a constant decay's dg is [slots, H].
    LAST: ``last`` [N,H,K,C] is the gradient of the final state. FIRST: that of the initial state is stored in ``first``, contiguous.
    """
    K: gl.constexpr = q_tiles.block_shape[1]
    gl.static_assert(K == SMALL or K == MEDIUM)
    gl.static_assert(q_tiles.dtype == gl.bfloat16)
    WARPS: gl.constexpr = 8
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, K // 2, 16])
    of_dS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
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
    i_row = gl.arange(0, C, gl.SliceLayout(1, square))[:, None]
    i_column = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    key = gl.arange(0, K, gl.SliceLayout(1, of_dS))[:, None]
    value = gl.arange(0, C, gl.SliceLayout(0, of_dS))[None, :]
    dS = gl.zeros([K, C], gl.float32, of_dS)
    if LAST:
        last += owner * s_n + head * s_h + key.to(gl.int64) * s_k + value.to(gl.int64) * s_v
        dS = gl.load(last).to(gl.float32)
    g += b * g_b + row * g_t + head * g_h
    token = b * T + row
    dg = place_of_decays(dg, first_chunk, token, n, begin + tokens, chunks, H, head, STATIC, DG and PACKED)

    q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], half)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], half)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, K, C], half)
    memory, vectors = memory_of(K, half)
    bars = (barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1))
    fence_async_shared()
    meet()
    line_of = token.to(gl.int32)
    state_of = ((first_chunk * H + h) * K).to(gl.int32)
    late, late_s, late_bars, late_columns = (q_tiles, v_tiles), (q_s, v_s), (bars[0], bars[2]), (h * q_h, h * C)
    early, early_s, early_bars = (k_tiles, o_tiles, state_tiles), (k_s, o_s, state_s), (bars[1], bars[3], bars[4])
    early_columns = (h * k_h, h * C)
    at = line_of + (chunks - 1) * C
    state_at = state_of + (chunks - 1) * (H * K)
    expect(late, late_bars, 0, chunks * 0 < chunks)
    expect(early, early_bars, 0, chunks * 0 < chunks)
    meet()
    load_tiles(late, late_s, late_bars, ([at, late_columns[0]], [at, late_columns[1]]), 0, chunks > 0)
    load_tiles(early, early_s, early_bars, ([at, early_columns[0]], [at, early_columns[1]], [state_at, 0]), 0, chunks > 0)
    total = 1.0
    d = gl.zeros([C], gl.float32, line)
    if DECAYS:
        start = gl.maximum(chunks - 1, 0) * C
        d = log_decays(g + start.to(gl.int64) * g_t, g_t, tokens - start, i)
        total = sums_of_decays(d, vectors, chunks * 0, scale)

    for c in range(chunks):
        chunk = chunks - 1 - c
        t = chunk * C
        known = c % 2
        x = chunk_of((q_s, k_s, v_s, o_s, state_s), memory, unknown(c * 0), half)
        if DECAYS:
            coming = log_decays(g + (gl.maximum(t, C) - C).to(gl.int64) * g_t, g_t, gl.minimum(tokens, C), i)
        for tensor in gl.static_range(5):
            mbarrier.wait(bars[tensor].index(0), c & 1)
        if t + C > tokens:
            zero_padding((x.q, x.k, x.v, x.o), tokens - t, rows)
        tma.store_wait(0)
        meet()
        A, dA, dV = first_products(x, dS, memory, vectors, known, scale, DECAYS, DG, rows, square, of_dS)
        dV = store_weights(x, A, dA, dV, (i_row, i_column), memory, vectors, known, scale, DECAYS, DG, square)
        if DECAYS:
            dS = dS * total
        fence_async_shared()
        meet()
        dV, dQ, dS = second_products(x, dV, dS, wide)
        dV = dV.to(gl.bfloat16)
        if DG:
            memory.of_queries.store(halves(x.q.load(wide).to(gl.float32) * dQ))
            dQ += memory.e.load(gl.SliceLayout(1, wide))[:, None] * x.k.load(wide).to(gl.float32)
        dQ = dQ.to(gl.bfloat16)
        expect(early, early_bars, 0, c + 1 < chunks)
        fence_async_shared()
        meet()
        at = line_of + t
        before = ([at - C, early_columns[0]], [at - C, early_columns[1]], [state_of + (chunk - 1) * (H * K), 0])
        load_tiles(early, early_s, early_bars, before, 0, t > 0)
        if t + C <= tokens:
            x.dq.store(dQ)
        else:
            store_rows(dq, dQ, token + t, tokens - t, H, head, wide)
        dK = warpgroup_mma(x.v, x.dS.permute((1, 0)), gl.zeros([C, K], gl.float32, wide), use_acc=False, is_async=True)
        dK = warpgroup_mma(x.dA, x.q, dK, is_async=True)
        decay = total
        if DECAYS:
            total = sums_of_decays(coming, vectors, 1 - known, scale)
        dK = warpgroup_mma_wait(0, [dK])
        if DG:
            dK += memory.e.load(gl.SliceLayout(1, wide))[:, None] * x.q.load(wide).to(gl.float32)
        dK = dK.to(gl.bfloat16)
        expect(late, late_bars, 0, c + 1 < chunks)
        fence_async_shared()
        meet()
        load_tiles(late, late_s, late_bars, ([at - C, late_columns[0]], [at - C, late_columns[1]]), 0, t > 0)
        if t + C <= tokens:
            store_tiles(dV, dK, x, (dq_tiles, dk_tiles, dv_tiles), at, (h * K, h * C))
        else:
            store_rows(dv, dV, token + t, tokens - t, H, head, square)
            store_rows(dk, dK, token + t, tokens - t, H, head, wide)
        if DG:
            store_gate_gradient(memory, dg, chunk, d, decay, i, tokens - t, H, STATIC, line)
        if DECAYS:
            d = coming
    if FIRST:
        first += (owner * H + head) * (K * C) + key * C + value
        gl.store(first, dS.to(first.dtype.element_ty))
    tma.store_wait(0)
    invalidate(bars)
