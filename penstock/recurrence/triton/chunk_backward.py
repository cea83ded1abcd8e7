"""The chunkwise backward kernel: one program per chunk, between the state before it and the state's gradient behind it.

With S the state before the chunk, dS the gradient of the state behind it (both from ``segments``), A and the sums G, Gq as
in ``chunk_forward``, strictly below the diagonal, R_j the sum of decays behind token j and L the chunk's last token::

    dA  = scale dO V^T                                       for j < i
    dq  = 2^Gq o (dA (k o 2^-G) + scale dO S^T)              + scale e u o k      e_i = dO_i . v_i
    dk  = 2^-G o (dA^T (q o 2^Gq)) + 2^R o (V dS^T)          + scale e u o q
    dv  = scale A^T dO + (k o 2^R) dS                        + scale (q . u o k) dO
    dg_t = sum_{i>=t} (q o dq)_i - sum_{j>=t} (k o dk)_j + sum_j (k o 2^R o V dS^T)_j + 2^(G_L) rowsum(S o dS)

where dg leaves out the terms on the diagonal (they do not depend on a decay) and its first sum begins behind t where the
previous state is read; u is 1 where there is no bonus. Nothing is shared between programs, so there are no atomics.

Registers are what it is short of. So the factor 2^R is written 2^-G o 2^(G_L), the latter over the rows of dS; tensors that are
in a product again and again are cast for it once, and are then in shared memory; and q and k are loaded again where they are
needed again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.tiles import product, span_of, tile
from .chunk_forward import weights_by_stretches
from .segments import chunk_state
from .tiles import (
    CHANNEL,
    SCALAR,
    SUITS,
    constant_decay,
    decays,
    factors,
    read_factors,
    rest_factors,
    scalar_decays,
    scalar_sums,
    stretch,
    sums,
    triangle,
)


@triton.jit
def operands(
    Q, Kt, ones, g, step, tokens, i, j, g_t, g_k, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, W: tl.constexpr, DECAY: tl.constexpr, PREVIOUS: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """q and k as products take them, the factors of dq and dk, two factors of states, and the chunk's whole decay.

    With decays per channel these are scale 2^(Gq - M) and q times that, 2^(M - G) and k times that, 2^M and 2^(G_L - M), see
    ``tiles.factors``. If EXACT: scale 2^Gq and q, 2^R and k times that, 1 and 2^G_L.
    """
    grow = tl.zeros((C, BK), tl.float32)
    shrink = grow
    total = tl.zeros((BK,), tl.float32)
    before = total + 1.0
    behind = before
    qt = Q.to(OPERAND)
    kt = Kt.to(OPERAND)
    if EXACT:
        total = tl.sum(decays(g, i * step, i < tokens, g_t, j, g_k, K, BK), 0)
        behind = tl.exp2(total)
        grow = read_factors(g, step, tokens, i, j, g_t, g_k, K, BK, PREVIOUS) * scale
        shrink = rest_factors(g, step, tokens, i, j, g_t, g_k, K, BK, C)
        kt = (Kt.to(tl.float32) * shrink).to(OPERAND)
    elif DECAY == CHANNEL:
        d = tile(g, i * step, i < tokens, g_t, j, g_k, K, BK).to(tl.float32)
        lower, strict = triangle(ones, i, W, True, PRECISION), triangle(ones, i, W, False, PRECISION)
        grow, shrink, before, behind, total = factors(d, lower, strict, PREVIOUS, PRECISION)
        grow *= scale
        qt = (Q.to(tl.float32) * grow).to(OPERAND)
        kt = (Kt.to(tl.float32) * shrink).to(OPERAND)
    return qt, kt, grow, shrink, before, behind, total


@triton.jit
def gradients_by_stretches(
    q, k, g, dq, dA, step, left, i, j, q_t, q_k, k_t, k_k, g_t, g_k,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PREVIOUS: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """dq and what dA adds to it, and what it gives to dk, for any decay."""
    dk = tl.zeros((C, BK), tl.float32)
    m = tl.zeros((), tl.int32)
    while m < left:
        n, eq, ek = stretch(g, step, left, m, i, j, g_t, g_k, K, BK, C, PREVIOUS, LIMIT)
        kt = tile(k, i * step, i < left, k_t, j, k_k, K, BK).to(tl.float32) * ek
        dq += eq * product(dA, kt, PRECISION)
        qt = tile(q, i * step, i < left, q_t, j, q_k, K, BK).to(tl.float32) * eq
        dk += ek * product(tl.trans(dA), qt, PRECISION)
        m = n
    return dq, dk


@triton.jit
def no_share(du, dg, share, K: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr, DG: tl.constexpr, PREVIOUS: tl.constexpr):
    """Zeros where a program without tokens would write its share of du (if PREVIOUS) and of a constant decay's dg (if DG)."""
    for kb in tl.range((K + BK - 1) // BK, num_stages=1):
        j = kb * BK + tl.arange(0, BK)
        if PREVIOUS:
            tl.store(du + share * K + j, tl.zeros((BK,), tl.float32), mask=j < K)
        if DG and DECAY == CHANNEL:
            tl.store(dg + share * K + j, tl.zeros((BK,), tl.float32), mask=j < K)
    if DG and DECAY == SCALAR:
        tl.store(dg + share, 0.0)


@triton.jit(do_not_specialize=["N", "T"])
def penstock_chunk_bwd(
    q, k, v, g, u, ones, d_output, chunk_states, d_chunk_states,
    dq, dk, dv, dg, du, todo, noted, cu_seqlens, scale, N, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, u_h, u_k, o_b, o_t, o_h, o_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, STATIC: tl.constexpr, DG: tl.constexpr, PREVIOUS: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr,
    HALVES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head). dq, dk, dv, dg are contiguous; du and a constant decay's dg are [shares, H, K] or [shares, H].

    Decays per channel take more launches than one: the first notes [programs] the chunks that 2^-G does not suit, and what it
    writes there is worthless; what is ``noted`` is the next one's ``todo``. Long chunks are done again by HALVES, program
    (chunk, head, half) with C tokens of the chunk's 2 C, and what does not suit then either is noted again; the last launch is
    EXACT. Shares are chunk slots, then, where there are halves, the second ones of chunk slots. Without DG there is no dg.
    """
    W: tl.constexpr = 2 * C if HALVES else C
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    FACTORS: tl.constexpr = DECAY == CHANNEL and not EXACT
    BY_PRODUCT: tl.constexpr = DECAY == CHANNEL and BK <= 64 and chunk_states.dtype.element_ty == tl.bfloat16  # of S and dS; else no gain
    pid = tl.program_id(0)
    program = pid // 2 if HALVES else pid
    half = pid % 2 if HALVES else 0
    h = (program % H).to(tl.int64)
    slot = program // H
    chunk = slot.to(tl.int64) * H + h
    share = chunk
    if HALVES:
        share += half * (tl.num_programs(0) // 2)
    if HALVES and not EXACT:
        if tl.load(todo + program) == 0:
            tl.store(noted + pid, 0)
            if half == 1:
                no_share(du, dg, share, K, BK, DECAY, STATIC and DG, PREVIOUS)
            return
    elif EXACT:
        if tl.load(todo + pid) == 0:
            return
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, W, PACKED)
    tokens = tl.minimum(end - begin - done, W).to(tl.int32)
    others = 0
    if HALVES:  # of the chunk's tokens those of the other half, too
        others = C if half == 1 else tl.maximum(tokens - C, 0)
        tokens = tokens - C if half == 1 else tl.minimum(tokens, C)
        done += half * C
    i = tl.arange(0, C)
    columns = tl.arange(0, BK)
    values = tl.arange(0, BV)
    if tokens <= 0:
        no_share(du, dg, share, K, BK, DECAY, STATIC and DG, PREVIOUS)
        if DECAY == CHANNEL and not EXACT:
            tl.store(noted + pid, 0)
        return
    row = begin + done
    step = 1
    if REVERSE:
        row = end - 1 - done
        step = -1
    b = n.to(tl.int64)
    if PACKED:
        b = tl.zeros((), tl.int64)
    q += b * q_b + row * q_t + h * q_h
    k += b * k_b + row * k_t + h * k_h
    v += b * v_b + row * v_t + h * v_h
    g += b * g_b + row * g_t + h * g_h
    d_output += b * o_b + row * o_t + h * o_h
    place = (b * T + row) * H + h
    chunk_states += chunk * (K * V)
    d_chunk_states += chunk * (K * V)
    away = (1 - 2 * half) * C * step  # the other half's rows
    other = (half, others, i, step, 1.0, k + away * k_t, v + away * v_t, g + away * g_t, k_t, k_k, v_t, v_v, g_t, g_k)
    d_other = (half, others, i, step, scale, q + away * q_t, d_output + away * o_t, g + away * g_t, q_t, q_k, o_t, o_v, g_t, g_k)
    live = i < tokens
    r = i * step
    strict = i[:, None] > i[None, :]
    diagonal = i[:, None] == i[None, :]

    if DECAY == SCALAR:
        constant = 0.0
        if STATIC:
            constant = constant_decay(g)
        between, read, rest, total_s = scalar_sums(g, constant, step, tokens, i, g_t, C, STATIC, LIMIT)
        shares = tl.exp2(between)
        read = tl.exp2(read)[:, None]
        rest = tl.exp2(rest)[:, None]
        dg_scalar = tl.zeros((C,), tl.float32)
        carry_scalar = tl.zeros((), tl.float32)

    # A. Where K or V is one block, what a loop leaves behind is used again further down; blocks of several are made anew.
    A = tl.zeros((C, C), tl.float32)
    own = tl.zeros((C,), tl.float32)
    lowest = tl.zeros((), tl.float32)
    qt = tl.zeros((C, BK), OPERAND)
    kt = qt
    grow = tl.zeros((C, BK), tl.float32)
    shrink = grow
    total = tl.zeros((BK,), tl.float32)
    before = total + 1.0
    behind = before
    for kb in tl.range(NK, num_stages=1):
        j = kb * BK + columns
        Q = tile(q, r, live, q_t, j, q_k, K, BK)
        Kt = tile(k, r, live, k_t, j, k_k, K, BK)
        if PREVIOUS:
            bonus = tl.load(u + h * u_h + j * u_k, mask=j < K, other=0.0).to(tl.float32)[None, :]
            own += tl.sum(Q.to(tl.float32) * bonus * Kt.to(tl.float32), 1)
        elif EXACT:
            own += tl.sum(Q.to(tl.float32) * Kt.to(tl.float32), 1)
        qt, kt, grow, shrink, before, behind, total = operands(
            Q, Kt, ones, g, step, tokens, i, j, g_t, g_k, scale, K, BK, C, W, DECAY, PREVIOUS, PRECISION, EXACT, OPERAND
        )
        if EXACT:
            A += weights_by_stretches(q, k, g, step, tokens, i, j, q_t, q_k, k_t, k_k, g_t, g_k, K, BK, C, PREVIOUS, PRECISION, LIMIT)
        else:
            A += product(qt, tl.trans(kt), PRECISION)
        lowest = tl.minimum(lowest, tl.min(total, 0))
    if FACTORS:
        tl.store(noted + pid, (lowest < -SUITS).to(tl.int32))
    else:
        A *= scale
    if DECAY == SCALAR:
        A *= shares
    if PREVIOUS or EXACT:
        A = tl.where(diagonal, own[:, None] * scale, A)
    A = tl.where(strict | diagonal, A, 0.0).to(OPERAND)

    # dv
    dO = tl.zeros((C, BV), d_output.dtype.element_ty)
    dS = tl.zeros((BK, BV), OPERAND)
    for vb in tl.range(NV, num_stages=1):
        y = vb * BV + values
        dv_ = tl.zeros((C, BV), tl.float32)
        for kb in tl.range(NK, num_stages=1):
            j = kb * BK + columns
            if NK > 1:
                Q = tile(q, r, live, q_t, j, q_k, K, BK)
                Kt = tile(k, r, live, k_t, j, k_k, K, BK)
                qt, kt, grow, shrink, before, behind, total = operands(
                    Q, Kt, ones, g, step, tokens, i, j, g_t, g_k, scale, K, BK, C, W, DECAY, PREVIOUS, PRECISION, EXACT, OPERAND
                )
            d_state = chunk_state(d_chunk_states, d_other, True, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)
            if FACTORS:
                d_state = d_state.to(tl.float32) * behind[:, None]
            dS = d_state.to(OPERAND)
            dv_ += product(kt, dS, PRECISION)
        if DECAY == SCALAR:
            dv_ *= rest
        dO = tile(d_output, r, live, o_t, y, o_v, V, BV)
        dv_ += product(tl.trans(A), dO, PRECISION)
        tl.store(dv + place * V + r[:, None] * (H * V) + y[None, :], dv_.to(dv.dtype.element_ty), mask=live[:, None] & (y < V)[None, :])

    # dq from the states before, then dk from the gradients behind; dg from both
    Vt = tl.zeros((C, BV), v.dtype.element_ty)
    S = tl.zeros((BK, BV), chunk_states.dtype.element_ty)
    same = columns[:, None] == columns[None, :]
    for kb in tl.range(NK, num_stages=1):
        j = kb * BK + columns
        mask = live[:, None] & (j < K)[None, :]
        if NK > 1:
            Q = tile(q, r, live, q_t, j, q_k, K, BK)
            Kt = tile(k, r, live, k_t, j, k_k, K, BK)
            qt, kt, grow, shrink, before, behind, total = operands(
                Q, Kt, ones, g, step, tokens, i, j, g_t, g_k, scale, K, BK, C, W, DECAY, PREVIOUS, PRECISION, EXACT, OPERAND
            )
        bonus = 1.0
        if PREVIOUS:
            bonus = tl.load(u + h * u_h + j * u_k, mask=j < K, other=0.0).to(tl.float32)[None, :]

        dA = tl.zeros((C, C), tl.float32)
        dq_ = tl.zeros((C, BK), tl.float32)
        for vb in tl.range(NV, num_stages=1):
            y = vb * BV + values
            if NV > 1:
                dO = tile(d_output, r, live, o_t, y, o_v, V, BV)
            Vt = tile(v, r, live, v_t, y, v_v, V, BV)
            S = chunk_state(chunk_states, other, False, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)
            dA += product(dO, tl.trans(Vt), PRECISION)
            dq_ += product(dO, tl.trans(S), PRECISION)
        e = tl.sum(tl.where(diagonal, dA, 0.0), 1)[:, None] * scale
        if not FACTORS:
            dA *= scale
        dA = tl.where(strict, dA, 0.0)
        if DECAY == SCALAR:
            dA *= shares
        dA = dA.to(OPERAND)
        if FACTORS:
            dq_ = grow * (dq_ * before[None, :] + product(dA, kt, PRECISION))
        elif EXACT:
            dq_, inner = gradients_by_stretches(
                q, k, g, dq_ * grow, dA, step, tokens, i, j, q_t, q_k, k_t, k_k, g_t, g_k, K, BK, C, PREVIOUS, PRECISION, LIMIT
            )
        elif DECAY == SCALAR:
            dq_ = product(dA, kt, PRECISION) + dq_ * (read * scale)
        else:
            dq_ = product(dA, kt, PRECISION) + dq_ * scale
        Q = tile(q, r, live, q_t, j, q_k, K, BK)
        ek = e * tile(k, r, live, k_t, j, k_k, K, BK).to(tl.float32)
        if DG:
            qdq = Q.to(tl.float32) * dq_
        if PREVIOUS:
            tl.store(du + share * K + j, tl.sum(Q.to(tl.float32) * ek, 0), mask=j < K)
        tl.store(dq + place * K + r[:, None] * (H * K) + j[None, :], (dq_ + ek * bonus).to(dq.dtype.element_ty), mask=mask)

        dk_ = tl.zeros((C, BK), tl.float32)
        kept = tl.zeros((BK,), tl.float32)
        for vb in tl.range(NV, num_stages=1):
            y = vb * BV + values
            if NV > 1:
                Vt = tile(v, r, live, v_t, y, v_v, V, BV)
                if DG and BY_PRODUCT:
                    S = chunk_state(chunk_states, other, False, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)
            if NK > 1 or NV > 1:
                d_state = chunk_state(d_chunk_states, d_other, True, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)
                if FACTORS:
                    d_state = d_state.to(tl.float32) * behind[:, None]
                dS = d_state.to(OPERAND)
            dk_ += product(Vt, tl.trans(dS), PRECISION)
            if DG and BY_PRODUCT:  # both are operands already
                kept += tl.sum(tl.where(same, product(S, tl.trans(dS), PRECISION), 0.0), 1)
        Kt = tile(k, r, live, k_t, j, k_k, K, BK)
        if FACTORS:
            if DG:
                carry = tl.sum(Kt.to(tl.float32) * (shrink * dk_), 0)
            dk_ = shrink * (dk_ + product(tl.trans(dA), qt, PRECISION))
        elif EXACT:
            dk_ *= shrink
            if DG:
                carry = tl.sum(Kt.to(tl.float32) * dk_, 0)
            dk_ += inner
        else:
            if DECAY == SCALAR:
                dk_ *= rest
            if DG:
                carry = tl.sum(Kt.to(tl.float32) * dk_, 0)
            dk_ += product(tl.trans(dA), qt, PRECISION)
        if DG:
            difference = qdq - Kt.to(tl.float32) * dk_
        own_dk = e * tile(q, r, live, q_t, j, q_k, K, BK).to(tl.float32) * bonus
        tl.store(dk + place * K + r[:, None] * (H * K) + j[None, :], (dk_ + own_dk).to(dk.dtype.element_ty), mask=mask)

        if DG and not BY_PRODUCT:
            for vb in tl.range(NV, num_stages=1):
                y = vb * BV + values
                S = chunk_state(chunk_states, other, False, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)
                d_state = chunk_state(d_chunk_states, d_other, True, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)
                kept += tl.sum(S.to(tl.float32) * d_state.to(tl.float32), 1)
            if FACTORS:
                kept *= behind
        if DG and DECAY == SCALAR:
            dg_scalar += tl.sum(difference, 1)
            carry_scalar += tl.sum(carry + kept * tl.exp2(total_s), 0)
        elif DG and DECAY == CHANNEL:
            start = (carry + kept * (before if FACTORS else behind))[None, :]
            if PREVIOUS:
                start -= qdq
            dg_ = sums(difference, triangle(ones, i, W, True, PRECISION), PRECISION, REVERSE=True, start=start)
            if EXACT:  # dg_t has a factor 2^(g_t), which the difference of sums only shows up to its rounding
                dg_ = tl.where(decays(g, r, live, g_t, j, g_k, K, BK) < -126.0, 0.0, dg_)
            if STATIC:
                tl.store(dg + share * K + j, tl.sum(tl.where(live[:, None], dg_, 0.0), 0), mask=j < K)
            else:
                tl.store(dg + place * K + r[:, None] * (H * K) + j[None, :], dg_.to(dg.dtype.element_ty), mask=mask)

    if DG and DECAY == SCALAR:
        d_s = constant if STATIC else scalar_decays(g, r, live, g_t)
        dg_t = tl.where(d_s < -126.0, 0.0, tl.cumsum(dg_scalar, 0, reverse=True) + carry_scalar)
        if STATIC:
            tl.store(dg + share, tl.sum(tl.where(live, dg_t, 0.0), 0))
        else:
            tl.store(dg + place + r * H, dg_t.to(dg.dtype.element_ty), mask=live)
