"""The chunkwise backward kernel for heads that share q and k: one program per chunk and part of a group, which loops over its heads.

Formulas are those of ``chunk_backward`` for scalar decays or none. q and k are the same for every head h of a group, so their product is
computed once, and gradients of q and k are sums over heads, which stay in registers::

    QK   = scale q k^T
    A_h  = 2^(G_i - G_j) o QK                                             for j <= i
    dA_h = 2^(G_i - G_j) o dO_h V_h^T                                     for j <= i
    dq   = scale ((sum_h dA_h) k + sum_h 2^G o (dO_h S_h^T))
    dk   = scale (sum_h dA_h)^T q + sum_h 2^R o (V_h dS_h^T)
    dv_h = A_h^T dO_h + 2^R o (k dS_h)

The terms of dg that are sums over channels need no gradient of q and k of a head: q_i . (dO S^T)_i = dO_i . (q S)_i,
k_j . (V dS^T)_j = v_j . (k dS)_j, and the sum over i of pairs (i, j) is v_j . (A^T dO)_j without the diagonal.

Sums of decays over tokens and of dg are computed for many heads at once, before and after the loop over heads. They are exchanged through
memory that only this program uses, so a barrier of the program is enough. In the loop each would be a scan with several barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, FLOOR, SCALAR
from ....gpu.tiles import LOG2E, product, span_of
from ..heads import GROUPED
from .chunk_gradients import first_row, pointers, rows
from .segments import chunk_state
from .tiles import constant_decay

COARSE = tl.constexpr(786432.0)  # 1.5 * 2^19: adding and subtracting it rounds to multiples of 2^-4


@triton.jit
def store_sums(vectors, g, span, g_t, g_h, HEADS: tl.constexpr, AT_ONCE: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr):
    """Store the sums of scalar decays up to each token, for all heads, in two parts, log2 units: ``vectors`` [HEADS,SIZE].

    The first part is a sum of multiples of 2^-4, which is exact: at most 2^20. The second is a sum of at most C 2^-5. So differences of
    both parts are accurate for every decay.
    """
    i, r, live, _, _ = span
    for first in tl.range(0, HEADS, AT_ONCE, num_stages=1):
        h = first + tl.arange(0, AT_ONCE)
        there = (h < HEADS)[:, None]
        d = tl.load(g + h[:, None] * g_h + r[None, :] * g_t, mask=there & live[None, :], other=0.0)
        d = tl.maximum(d.to(tl.float32) * LOG2E, FLOOR)
        coarse = (d + COARSE) - COARSE
        place = vectors + h[:, None] * SIZE + i[None, :]
        tl.store(place, tl.cumsum(coarse, 1), mask=there)
        tl.store(place + C, tl.cumsum(d - coarse, 1), mask=there)


@triton.jit
def sums_of_decays(g, sums, i, tokens, C: tl.constexpr, STATIC: tl.constexpr):
    """Both parts of the sums of a head's decays up to each token [C], and those of the chunk, see ``store_sums``."""
    if STATIC:
        constant = constant_decay(g)
        multiple = (constant + COARSE) - COARSE
        coarse = (i + 1).to(tl.float32) * multiple
        fine = (i + 1).to(tl.float32) * (constant - multiple)
        coarse_end = tokens.to(tl.float32) * multiple
        fine_end = tokens.to(tl.float32) * (constant - multiple)
    else:
        coarse = tl.load(sums + i)
        fine = tl.load(sums + C + i)
        coarse_end = tl.load(sums + C - 1)
        fine_end = tl.load(sums + 2 * C - 1)
    return coarse, fine, coarse_end, fine_end


@triton.jit
def store_gradients_of_decays(
    vectors, dg, g, span, place, g_t, g_h, H,
    HEADS: tl.constexpr, AT_ONCE: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr,
    STATIC: tl.constexpr,
):  # fmt: skip
    """Store dg of all heads from ``vectors``: the terms of tokens from t on, those of tokens before t, and sums of S o dS."""
    i, r, live, _, _ = span
    for first in tl.range(0, HEADS, AT_ONCE, num_stages=1):
        h = first + tl.arange(0, AT_ONCE)
        there = (h < HEADS)[:, None]
        own = vectors + h[:, None] * SIZE
        queries = tl.load(own + 2 * C + i[None, :], mask=there, other=0.0)
        keys = tl.load(own + (3 * C - 1) + i[None, :], mask=there & (i > 0)[None, :], other=0.0)
        states = tl.sum(tl.load(own + 4 * C + i[None, :], mask=there, other=0.0), 1)[:, None]
        d = tl.load(g + h[:, None] * g_h + r[None, :] * g_t, mask=there & live[None, :], other=0.0)
        d = tl.maximum(d.to(tl.float32) * LOG2E, FLOOR)
        if STATIC:
            total = tl.sum(tl.where(live[None, :], d, 0.0), 1)[:, None]
        else:
            ends = own + (C - 1)
            total = tl.load(ends, mask=there, other=0.0) + tl.load(ends + C, mask=there, other=0.0)
        dg_t = tl.cumsum(queries, 1, reverse=True) + tl.cumsum(keys, 1) + states * tl.exp2(total)
        dg_t = tl.where(d < -126.0, 0.0, dg_t)
        if STATIC:
            tl.store(dg + h, tl.sum(tl.where(live[None, :], dg_t, 0.0), 1), mask=h < HEADS)
        else:
            tl.store(dg + place + r[None, :] * H + h[:, None], dg_t.to(dg.dtype.element_ty), mask=there & live[None, :])


@triton.jit(do_not_specialize=["N", "T"])
def penstock_chunk_bwd_groups(
    q, k, v, g, d_output, chunk_states, d_chunk_states, dq, dk, dv, dg, vectors, cu_seqlens, scale, N, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, o_b, o_t, o_h, o_v,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, STATIC: tl.constexpr, DG: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq = scale (sum_h (dA_h k + 2^G o dO_h S_h^T)), dk alike, dv_h = A_h^T dO_h + 2^R o (k dS_h) for heads h that share q and k.

    Reads q, k [B,T,H,K], v, dO [B,T,H,V] and g [B,T,H] by strides; S and dS [slots,H,K,V]. Writes dq, dk [B,T,H / HEADS,K], dv [B,T,H,V]
    and dg [B,T,H] or, of constant decays, [slots,H]. Program (chunk, HEADS heads that share q and k). K is one block. V is a block of C
    channels, so its tiles are as those of pairs.

    ``vectors`` [slots,H,5 C] is the program's own memory: for each head both parts of the sums of decays, the terms of dg of tokens from t
    on and of tokens before t, and the sums over key channels of S o dS.
    """
    tl.static_assert(DECAY != CHANNEL)
    tl.static_assert(K <= GROUPED and V <= C)
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    BY_PRODUCT: tl.constexpr = chunk_states.dtype.element_ty == tl.bfloat16  # else products would round S and dS
    AT_ONCE: tl.constexpr = 32 if HEADS > 16 else 16
    BLOCKS: tl.constexpr = 2 if BK <= 128 else BK // 64
    SIZE: tl.constexpr = 5 * C
    parts = H // HEADS
    part = (tl.program_id(0) % parts).to(tl.int64)
    slot = tl.program_id(0) // parts
    sequence, begin, end, done = span_of(slot, cu_seqlens, N, T, C, PACKED)
    tokens = tl.minimum(end - begin - done, C).to(tl.int32)
    first = part * HEADS
    share = slot.to(tl.int64) * H + first
    if tokens <= 0:
        if STATIC and DG:
            for h in tl.range(HEADS):
                tl.store(dg + share + h, 0.0)
        return
    row, step, b = first_row(sequence, begin, end, done, PACKED, REVERSE)
    i = tl.arange(0, C)
    j = tl.arange(0, BK)
    y = i
    live = i < tokens
    span = (i, i * step, live, step, tokens)
    queries, keys = (q + b * q_b + row * q_t + first * q_h, q_t, q_k), (k + b * k_b + row * k_t + first * k_h, k_t, k_k)
    v += b * v_b + row * v_t
    d_output += b * o_b + row * o_t
    g += b * g_b + row * g_t + first * g_h
    chunk_states += share * (K * V)
    d_chunk_states += share * (K * V)
    place = (b * T + row) * H + first
    dv += place * V
    vectors += share * SIZE
    if DECAY == SCALAR and not STATIC:
        store_sums(vectors, g, span, g_t, g_h, HEADS, AT_ONCE, SIZE, C)
        tl.debug_barrier()

    # In a loop of at least two blocks: Triton gives a warp all columns of a product whose result is seen to be a factor of operands
    QK = tl.zeros((C, C), tl.float32)
    for kb in tl.range(BLOCKS, num_stages=1):
        part_of_k = kb * 64 + tl.arange(0, 64)
        within = (i, i * step, live & (kb * 64 < K), step, tokens)
        QK += product(rows(queries, within, part_of_k, K, 64), tl.trans(rows(keys, within, part_of_k, K, 64)), PRECISION)
    QK *= scale
    own = tl.sum(tl.where(i[:, None] == i[None, :], QK, 0.0), 1)[:, None]
    QK = tl.where(i[:, None] > i[None, :], QK, 0.0)
    qt = rows(queries, span, j, K, BK).to(OPERAND)
    kt = rows(keys, span, j, K, BK).to(OPERAND)
    dQ = tl.zeros((C, BK), tl.float32)
    dK = tl.zeros((C, BK), tl.float32)
    dA_sum = tl.zeros((C, C), tl.float32)
    for h in tl.range(HEADS, num_stages=STAGES):
        dO = rows((d_output + (first + h) * o_h, o_t, o_v), span, y, V, C)
        Vt = rows((v + (first + h) * v_h, v_t, v_v), span, y, V, C)
        S = chunk_state(chunk_states + h * (K * V), j, y, K, V)
        dS = chunk_state(d_chunk_states + h * (K * V), j, y, K, V)
        if DECAY == SCALAR:
            coarse, fine, coarse_end, fine_end = sums_of_decays(g + h * g_h, vectors + h * SIZE, i, tokens, C, STATIC)
            shares = tl.exp2(tl.minimum((coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :]), 0.0))
            read = tl.exp2(coarse + fine)[:, None]
            rest = tl.exp2(tl.minimum((coarse_end - coarse) + (fine_end - fine), 0.0))[:, None]
        if DG and DECAY == SCALAR:
            qS = product(qt, S.to(OPERAND), PRECISION)
        pairs = product(dO, tl.trans(Vt), PRECISION)
        A = QK
        dA = pairs
        if DECAY == SCALAR:
            A = A * shares
            dA = dA * shares
        dA_sum += dA
        A = A.to(OPERAND)
        if DG and DECAY == SCALAR:
            of_tokens = dO.to(tl.float32) * qS * (read * scale) + pairs * A.to(tl.float32)
        dV = product(tl.trans(A), dO, PRECISION)
        if DG and DECAY == SCALAR:
            of_tokens -= Vt.to(tl.float32) * dV
            tl.store(vectors + h * SIZE + 2 * C + i, tl.sum(of_tokens, 1))
        W = product(kt, dS.to(OPERAND), PRECISION)
        if DECAY == SCALAR:
            W *= rest
        dV += W + dO.to(tl.float32) * own
        inside = live[:, None]
        if V != C:
            inside = inside & (y < V)[None, :]
        tl.store(pointers(dv, h, span, y, H, V), dV.to(dv.dtype.element_ty), mask=inside)
        if DG and DECAY == SCALAR:
            tl.store(vectors + h * SIZE + 3 * C + i, tl.sum(Vt.to(tl.float32) * W, 1))
            if BY_PRODUCT:
                products = tl.sum(tl.where(y[:, None] == y[None, :], product(tl.trans(S), dS, PRECISION), 0.0), 1)
            else:
                products = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
            tl.store(vectors + h * SIZE + 4 * C + i, products)
        from_states = product(dO, tl.trans(S.to(OPERAND)), PRECISION)
        if DECAY == SCALAR:
            from_states *= read
        dQ += from_states
        from_states = product(Vt, tl.trans(dS.to(OPERAND)), PRECISION)
        if DECAY == SCALAR:
            from_states *= rest
        dK += from_states

    dA = tl.where(i[:, None] >= i[None, :], dA_sum, 0.0).to(OPERAND)
    dQ = (dQ + product(dA, kt, PRECISION)) * scale
    dK += product(tl.trans(dA), qt, PRECISION) * scale
    mask = live[:, None] & (j < K)[None, :]
    at = (b * T + row) * parts + part
    tl.store(pointers(dq, at, span, j, parts, K), dQ.to(dq.dtype.element_ty), mask=mask)
    tl.store(pointers(dk, at, span, j, parts, K), dK.to(dk.dtype.element_ty), mask=mask)
    if DG and DECAY == SCALAR:
        tl.debug_barrier()
        if STATIC:
            dg += share
        store_gradients_of_decays(vectors, dg, g, span, place, g_t, g_h, H, HEADS, AT_ONCE, SIZE, C, STATIC)
