"""The chunkwise backward kernel: one program per chunk, between the state before it and the state's gradient after it.

With S the state before the chunk, dS the gradient of the state after it (both from ``segments``), A and the sums G, Gq as
in ``chunk_forward``, strictly below the diagonal, R_j the sum of decays after token j and L the chunk's last token::

    dA  = scale dO V^T                                       for j < i
    dq  = 2^Gq o (dA (k o 2^-G) + scale dO S^T)              + scale e u o k      e_i = dO_i . v_i
    dk  = 2^-G o (dA^T (q o 2^Gq)) + 2^R o (V dS^T)          + scale e u o q
    dv  = scale A^T dO + (k o 2^R) dS                        + scale (q . u o k) dO
    dg_t = sum_{i>=t} (q o 2^Gq o dA (k o 2^-G) - k o 2^-G o dA^T (q o 2^Gq))_i
           + sum_{i>=t} (q o 2^Gq o scale dO S^T)_i + sum_{j<t} (k o 2^R o V dS^T)_j + 2^(G_L) rowsum(S o dS)

dg omits the terms on the diagonal, which do not depend on a decay. Sums over i of q's terms begin after t if the previous state is read.
In the difference all pairs of tokens after t cancel; its terms are products of the same rounded operands, so they cancel up to float32
sums. One scalar decay per head needs no difference: its dg_t is the sum of (dA o A)_ij over i >= t > j. Without a bonus, u is 1. Programs
share no memory that they write, so there are no atomics.

Chunks that decay by more than 2^SUITS in a channel are computed by levels (``dyadic_backward``). The chunk's own decays alone decide.

Registers limit this kernel. The factor 2^R is written as 2^-G o 2^(G_L), and 2^(G_L) is applied to the rows of dS. Tensors that are
operands of several products are cast once and stay in shared memory. q and k are loaded again for each use.

The device functions of its phases, and the tuples that they take, are in ``chunk_gradients``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, SCALAR
from ....gpu.tiles import product, span_of
from .chunk_gradients import (
    bonus_row,
    first_row,
    masked,
    operands_of_block,
    pointers,
    query_gradient,
    rounded,
    rows,
    scalar_factors,
    state_gradient,
    state_products,
    store_channel_decay_gradient,
    store_scalar_decay_gradient,
    store_zero_shares,
    strongest,
    weights,
)
from .dyadic_backward import gradients_by_levels
from .segments import chunk_state

MILD = tl.constexpr(3.125)
"""Log2 units a token: the strongest mean decay of a channel over a chunk whose dg is a difference of sums. At 3.125, 2^200 in 64 tokens,
the difference is a ninth of the sums, and errors of sums are no larger than those of rounded operands."""


@triton.jit
def store_value_gradient(
    A, factored, queries, keys, gates, d_outputs, levels, d_chunk_states, dv, place, span, rest, scale, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, DECAY: tl.constexpr,
    PREVIOUS: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Store dv = scale A^T dO + (k o 2^R) dS. Returns dO [C,BV] and dS [BK,BV] of the last blocks: all of them, if there is one block."""
    FACTORS: tl.constexpr = DECAY == CHANNEL
    live = span[2]
    dO = tl.zeros((C, BV), d_outputs[0].dtype.element_ty)
    dS = tl.zeros((BK, BV), OPERAND)
    for vb in tl.range((V + BV - 1) // BV, num_stages=1):
        y = vb * BV + tl.arange(0, BV)
        dv_ = tl.zeros((C, BV), tl.float32)
        for kb in tl.range((K + BK - 1) // BK, num_stages=1):
            j = kb * BK + tl.arange(0, BK)
            _, kt, _, _, _, after = operands_of_block(
                factored, queries, keys, gates, levels, span, j, scale, K, BK, C, LEVELS, DECAY, PREVIOUS, PRECISION, OPERAND
            )
            dS = state_gradient(d_chunk_states, after, j, y, K, V, FACTORS, OPERAND)
            dv_ += product(kt, dS, PRECISION)
        if DECAY == SCALAR:
            dv_ *= rest
        dO = rows(d_outputs, span, y, V, BV)
        dv_ += product(tl.trans(A), dO, PRECISION)
        tl.store(pointers(dv, place, span, y, H, V), dv_.to(dv.dtype.element_ty), mask=live[:, None] & (y < V)[None, :])
    return dO, dS


@triton.jit
def gradients_by_anchor(
    queries, keys, values, gates, d_outputs, bonuses, levels, chunk_states, d_chunk_states, dq, dk, dv, dg, du,
    place, share, span, scale, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, DECAY: tl.constexpr,
    STATIC: tl.constexpr, DG: tl.constexpr, PREVIOUS: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store all gradients of a chunk: decays per channel of at most 2^SUITS, or other decays."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    FACTORS: tl.constexpr = DECAY == CHANNEL
    BY_PRODUCT: tl.constexpr = FACTORS and BK <= 64 and chunk_states.dtype.element_ty == tl.bfloat16  # rowsum(S o dS)
    i, live = span[0], span[2]
    columns_k = tl.arange(0, BK)
    columns_v = tl.arange(0, BV)
    strict = i[:, None] > i[None, :]
    diagonal = i[:, None] == i[None, :]
    shares, read, rest, total_s, constant = scalar_factors(gates, span, C, DECAY, STATIC, LIMIT)
    A, own, factored = weights(queries, keys, gates, bonuses, levels, span, scale, K, BK, C, LEVELS, DECAY, PREVIOUS, PRECISION, OPERAND)
    A = masked(A, own, shares, strict, diagonal, scale, FACTORS, DECAY, PREVIOUS).to(OPERAND)

    dO, dS = store_value_gradient(
        A, factored, queries, keys, gates, d_outputs, levels, d_chunk_states, dv, place, span, rest, scale, H,
        K, V, BK, BV, C, LEVELS, DECAY, PREVIOUS, PRECISION, OPERAND,
    )  # fmt: skip

    # dq, dk and dg, by blocks of K
    Vt = tl.zeros((C, BV), values[0].dtype.element_ty)
    S = tl.zeros((BK, BV), chunk_states.dtype.element_ty)
    same = columns_k[:, None] == columns_k[None, :]
    of_pairs = tl.zeros((C,), tl.float32)
    of_queries = tl.zeros((C,), tl.float32)
    of_keys = tl.zeros((C,), tl.float32)
    of_states = tl.zeros((), tl.float32)
    for kb in tl.range(NK, num_stages=1):
        j = kb * BK + columns_k
        mask = live[:, None] & (j < K)[None, :]
        block = operands_of_block(
            factored, queries, keys, gates, levels, span, j, scale, K, BK, C, LEVELS, DECAY, PREVIOUS, PRECISION, OPERAND
        )
        bonus = 1.0
        if PREVIOUS:
            bonus = bonus_row(bonuses, j, K)

        # dA = scale dO V^T;  dq = 2^Gq o (dA (k o 2^-G) + scale dO S^T) + scale e u o k
        dA = tl.zeros((C, C), tl.float32)
        dq_ = tl.zeros((C, BK), tl.float32)
        for vb in tl.range(NV, num_stages=1):
            y = vb * BV + columns_v
            if NV > 1:
                dO = rows(d_outputs, span, y, V, BV)
            Vt = rows(values, span, y, V, BV)
            S = chunk_state(chunk_states, j, y, K, V)
            dA += product(dO, tl.trans(Vt), PRECISION)
            dq_ += product(dO, tl.trans(S), PRECISION)
        e = tl.sum(tl.where(diagonal, dA, 0.0), 1)[:, None] * scale
        dA = tl.where(strict, dA, 0.0)
        if DG and DECAY == SCALAR:  # dA o A twice, as sums over j and over i: pairs of tokens after t cancel
            pairs = dA * A.to(tl.float32)
            of_pairs = tl.sum(pairs, 1) - tl.sum(pairs, 0)
        if not FACTORS:
            dA *= scale
        if DECAY == SCALAR:
            dA *= shares
        dA = dA.to(OPERAND)
        if DG and DECAY == SCALAR:
            of_queries += tl.sum(rows(queries, span, j, K, BK).to(tl.float32) * (dq_ * (read * scale)), 1)
        dq_ = query_gradient(dq_, dA, block, read, scale, DECAY, PRECISION)
        Q = rows(queries, span, j, K, BK)
        if DECAY == CHANNEL:
            if DG:
                of_query = rounded(Q.to(tl.float32) * block[2], PRECISION) * dq_
            dq_ *= block[2]
        ek = e * rows(keys, span, j, K, BK).to(tl.float32)
        if PREVIOUS:
            tl.store(du + share * K + j, tl.sum(Q.to(tl.float32) * ek, 0), mask=j < K)
        tl.store(pointers(dq, place, span, j, H, K), (dq_ + ek * bonus).to(dq.dtype.element_ty), mask=mask)

        # dk = 2^-G o (dA^T (q o 2^Gq)) + 2^R o (V dS^T) + scale e u o q;  kept = rowsum(S o dS)
        _, _, _, _, before, after = block
        dk_ = tl.zeros((C, BK), tl.float32)
        kept = tl.zeros((BK,), tl.float32)
        for vb in tl.range(NV, num_stages=1):
            y = vb * BV + columns_v
            if NV > 1:
                Vt = rows(values, span, y, V, BV)
                if DG and BY_PRODUCT:
                    S = chunk_state(chunk_states, j, y, K, V)
            if NK > 1 or NV > 1:
                dS = state_gradient(d_chunk_states, after, j, y, K, V, FACTORS, OPERAND)
            dk_ += product(Vt, tl.trans(dS), PRECISION)
            if DG and BY_PRODUCT:  # S and dS are operands already
                kept += tl.sum(tl.where(same, product(S, tl.trans(dS), PRECISION), 0.0), 1)
        Kt = rows(keys, span, j, K, BK)
        if DECAY == CHANNEL:
            if DG:
                k_ = rounded(Kt.to(tl.float32) * block[3], PRECISION)
                carry = tl.sum(k_ * dk_, 0)
        elif DECAY == SCALAR:
            dk_ *= rest
            if DG:
                of_keys += tl.sum(Kt.to(tl.float32) * dk_, 1)
        dk_ += product(tl.trans(dA), block[0], PRECISION)
        if DECAY == CHANNEL:
            if DG:
                of_key = k_ * dk_
                difference = of_query - of_key
            dk_ *= block[3]
        own_dk = e * rows(queries, span, j, K, BK).to(tl.float32) * bonus
        tl.store(pointers(dk, place, span, j, H, K), (dk_ + own_dk).to(dk.dtype.element_ty), mask=mask)

        # dg
        if DG and not BY_PRODUCT:
            kept = state_products(chunk_states, d_chunk_states, j, K, V, BK, BV)
            if FACTORS:
                kept *= after
        if DG and DECAY == SCALAR:
            of_states += tl.sum(kept * tl.exp2(total_s), 0)
        elif DG and DECAY == CHANNEL:
            start = (carry + kept * before)[None, :]
            store_channel_decay_gradient(
                dg, difference, start, of_key, levels, span, place, share, j, H, K, C, LEVELS, STATIC, PREVIOUS, PRECISION
            )

    if DG and DECAY == SCALAR:
        store_scalar_decay_gradient(dg, of_queries + of_pairs, of_keys, of_states, constant, gates, span, place, share, H, STATIC)


@triton.jit(do_not_specialize=["N", "T"])
def penstock_chunk_bwd(
    q, k, v, g, u, levels, d_output, chunk_states, d_chunk_states, dq, dk, dv, dg, du, strong, cu_seqlens, scale, N, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, u_h, u_k, o_b, o_t, o_h, o_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    DECAY: tl.constexpr, STATIC: tl.constexpr, DG: tl.constexpr, PREVIOUS: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv, dg and du of the recurrence, a chunk at a time: dA = scale dO V^T, dv = scale A^T dO + (k o 2^R) dS (the module has all).

    Reads q, k [B,T,H,K], v, dO [B,T,H,V], g [B,T,H,K] and u [H,K], all by strides; S before and dS after each chunk [slots,H,K,V]. Writes
    dq, dk, dg [B,T,H,K], dv [B,T,H,V], and for each chunk du and a constant decay's dg, [slots,H,K] or [slots,H]. Program (chunk, head).

    Without DG dg is not computed.

    PART: 1 and 2 are the launches of decays per channel, 0 is the launch of others. The first computes chunks with one anchor and stores in
    ``strong`` [programs] whether a chunk needs levels; the second computes these. In one kernel both would share registers and spill.
    """
    tl.static_assert(DECAY == CHANNEL or not PREVIOUS, "the previous state is read with decays per channel only")
    pid = tl.program_id(0)
    if PART == 2:
        if tl.load(strong + pid) == 0:
            return
    h = (pid % H).to(tl.int64)
    slot = pid // H
    share = slot.to(tl.int64) * H + h
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, C, PACKED)
    tokens = tl.minimum(end - begin - done, C).to(tl.int32)
    if tokens <= 0:
        if PART == 1:
            tl.store(strong + pid, 0)
        store_zero_shares(du, dg, share, K, BK, DECAY, STATIC and DG, PREVIOUS)
        return
    row, step, b = first_row(n, begin, end, done, PACKED, REVERSE)
    place = (b * T + row) * H + h
    chunk_states += share * (K * V)
    d_chunk_states += share * (K * V)
    i = tl.arange(0, C)
    span = (i, i * step, i < tokens, step, tokens)
    queries, keys = (q + b * q_b + row * q_t + h * q_h, q_t, q_k), (k + b * k_b + row * k_t + h * k_h, k_t, k_k)
    values, d_outputs = (v + b * v_b + row * v_t + h * v_h, v_t, v_v), (d_output + b * o_b + row * o_t + h * o_h, o_t, o_v)
    gates, bonuses = (g + b * g_b + row * g_t + h * g_h, g_t, g_k), (u + h * u_h, u_k)

    if PART == 2:
        gradients_by_levels(
            queries[0], keys[0], values[0], gates[0], bonuses[0], levels, d_outputs[0], chunk_states, d_chunk_states,
            dq, dk, dv, dg, du, place, share, step, tokens, scale, H, q_t, q_k, k_t, k_k, v_t, v_v, g_t, g_k, u_k, o_t, o_v,
            K, V, BK, BV, C, LEVELS, STATIC, DG, PREVIOUS, PRECISION,
        )  # fmt: skip
    else:
        if PART == 1:
            levels_needed = strongest(gates, span, K, BK) < -MILD * C
            tl.store(strong + pid, levels_needed.to(tl.int32))
            if levels_needed:
                return
        gradients_by_anchor(
            queries, keys, values, gates, d_outputs, bonuses, levels, chunk_states, d_chunk_states,
            dq, dk, dv, dg, du, place, share, span, scale, H,
            K, V, BK, BV, C, LEVELS, DECAY, STATIC, DG, PREVIOUS, PRECISION, LIMIT,
        )  # fmt: skip
