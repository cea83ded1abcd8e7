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
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_forward import weights_by_stretches
from .tiles import (
    CHANNEL,
    FAR,
    NEAR,
    NONE,
    SCALAR,
    decays,
    product,
    read_factors,
    rest_factors,
    scalar_decays,
    scalar_factors,
    slot_of,
    span_of,
    stretch,
    sums,
    tile,
)


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
def true_state(
    chunk_states,
    chunk_decays,
    segment_states,
    chunk,
    segment,
    dk,
    dv,
    K: tl.constexpr,
    V: tl.constexpr,
    DECAY: tl.constexpr,
    CARRIED: tl.constexpr,
):
    """A chunk's state: what its segment made before it and, if anything was carried into the segment, what is left of that."""
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    S = tl.load(chunk_states + (chunk * K + dk[:, None]) * V + dv[None, :], mask=inside, other=0.0)
    if CARRIED:
        carried = tl.load(segment_states + (segment * K + dk[:, None]) * V + dv[None, :], mask=inside, other=0.0)
        if DECAY != NONE:
            carried *= tl.exp2(tl.load(chunk_decays + chunk * K + dk, mask=dk < K, other=0.0))[:, None]
        S = S.to(tl.float32) + carried
    return S


@triton.jit(do_not_specialize=["N", "T"])
def backward(
    q, k, v, g, u, d_output, chunk_states, chunk_decays, segment_states, d_chunk_states, d_chunk_decays, d_segment_states,
    dq, dk, dv, dg, du, todo, cu_seqlens, scale, N, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, u_h, u_k, o_b, o_t, o_h, o_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    DECAY: tl.constexpr, STATIC: tl.constexpr, PREVIOUS: tl.constexpr, CARRIED: tl.constexpr, D_CARRIED: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head). dq, dk, dv, dg are contiguous; du and a constant decay's dg are [chunk slots, H, K] or [chunk slots, H].

    Decays per channel take two launches: the first notes in ``todo`` [programs] the chunks that 2^-G does not suit, the
    second, EXACT, does those.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    ANCHOR: tl.constexpr = FAR if LIMIT > 100.0 else NEAR
    pid = tl.program_id(0)
    h = (pid % H).to(tl.int64)
    slot = pid // H
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, C, PACKED)
    tokens = tl.minimum(end - begin - done, C).to(tl.int32)
    slot = slot.to(tl.int64)
    i = tl.arange(0, C)
    columns = tl.arange(0, BK)
    values = tl.arange(0, BV)
    if EXACT:
        if tl.load(todo + pid) == 0:
            return
    if tokens <= 0:
        for kb in tl.range(NK, num_stages=1):
            j = kb * BK + columns
            if PREVIOUS:
                tl.store(du + (slot * H + h) * K + j, tl.zeros((BK,), tl.float32), mask=j < K)
            if STATIC and DECAY == CHANNEL:
                tl.store(dg + (slot * H + h) * K + j, tl.zeros((BK,), tl.float32), mask=j < K)
        if STATIC and DECAY == SCALAR:
            tl.store(dg + slot * H + h, 0.0)
        if DECAY == CHANNEL:
            tl.store(todo + pid, 0)
        return
    row = begin + done
    step = 1
    if REVERSE:
        row = end - 1 - done
        step = -1
    b = n.to(tl.int64)
    if PACKED:
        b = tl.zeros((), tl.int64)
    segment = slot_of(n, begin, done, T, L, PACKED) * H + h
    chunk = slot * H + h
    q += b * q_b + row * q_t + h * q_h
    k += b * k_b + row * k_t + h * k_h
    v += b * v_b + row * v_t + h * v_h
    g += b * g_b + row * g_t + h * g_h
    d_output += b * o_b + row * o_t + h * o_h
    place = (b * T + row) * H + h
    live = i < tokens
    r = i * step
    strict = i[:, None] > i[None, :]
    diagonal = i[:, None] == i[None, :]

    if DECAY == CHANNEL and not EXACT:
        lowest = tl.zeros((), tl.float32)
        for kb in tl.range(NK, num_stages=1):
            d = decays(g, r, live, g_t, kb * BK + columns, g_k, K, BK)
            lowest = tl.minimum(lowest, tl.min(tl.sum(d, 0), 0))
        unsuited = lowest < -LIMIT
        tl.store(todo + pid, unsuited.to(tl.int32))
        if unsuited:
            return
    if DECAY == SCALAR:
        d_s = scalar_decays(g, r, live, g_t)
        shares = tl.where(strict, scalar_factors(d_s, i, C, LIMIT), 0.0)
        read = tl.exp2(tl.cumsum(d_s, 0))[:, None]
        rest = tl.exp2(tl.cumsum(scalar_decays(g + step * g_t, r, live & (i + 1 < tokens), g_t), 0, reverse=True))[:, None]
        kept = tl.exp2(tl.sum(d_s, 0))
        dg_scalar = tl.zeros((C,), tl.float32)
        carry_scalar = tl.zeros((), tl.float32)

    # A, and with it dv
    A = tl.zeros((C, C), tl.float32)
    own = tl.zeros((C,), tl.float32)
    for kb in tl.range(NK, num_stages=1):
        j = kb * BK + columns
        Q = tile(q, r, live, q_t, j, q_k, K, BK)
        Kt = tile(k, r, live, k_t, j, k_k, K, BK)
        if PREVIOUS:
            bonus = tl.load(u + h * u_h + j * u_k, mask=j < K, other=0.0).to(tl.float32)[None, :]
            own += tl.sum(Q.to(tl.float32) * bonus * Kt.to(tl.float32), 1)
        elif EXACT:
            own += tl.sum(Q.to(tl.float32) * Kt.to(tl.float32), 1)
        if DECAY != CHANNEL:
            A += product(Q, tl.trans(Kt), PRECISION)
        elif EXACT:
            A += weights_by_stretches(q, k, g, step, tokens, i, j, q_t, q_k, k_t, k_k, g_t, g_k, K, BK, C, PREVIOUS, PRECISION, LIMIT)
        else:
            d = decays(g, r, live, g_t, j, g_k, K, BK)
            G = sums(d, i, False, PRECISION) + ANCHOR
            qt = Q.to(tl.float32) * tl.exp2(G - d if PREVIOUS else G)
            A += product(qt, tl.trans(Kt.to(tl.float32) * tl.exp2(-G)), PRECISION)
    if DECAY == SCALAR:
        A = tl.where(diagonal, A, A * shares)
    if PREVIOUS or EXACT:
        A = tl.where(diagonal, own[:, None], A)
    A = tl.where(strict | diagonal, A, 0.0) * scale

    dA = tl.zeros((C, C), tl.float32)
    for vb in tl.range(NV, num_stages=1):
        y = vb * BV + values
        dO = tile(d_output, r, live, o_t, y, o_v, V, BV)
        Vt = tile(v, r, live, v_t, y, v_v, V, BV)
        dA += product(dO, tl.trans(Vt), PRECISION)
        dv_ = product(tl.trans(A), dO, PRECISION)
        for kb in tl.range(NK, num_stages=1):
            j = kb * BK + columns
            ks = tile(k, r, live, k_t, j, k_k, K, BK)
            if DECAY == SCALAR:
                ks = ks.to(tl.float32) * rest
            elif EXACT:
                ks = ks.to(tl.float32) * rest_factors(g, step, tokens, i, j, g_t, g_k, K, BK, C)
            elif DECAY == CHANNEL:
                d = decays(g, r, live, g_t, j, g_k, K, BK)
                G = sums(d, i, False, PRECISION) + ANCHOR
                ks = ks.to(tl.float32) * tl.exp2(-G) * tl.exp2(tl.sum(d, 0) + ANCHOR)[None, :]
            dS = true_state(d_chunk_states, d_chunk_decays, d_segment_states, chunk, segment, j, y, K, V, DECAY, D_CARRIED)
            dv_ += product(ks, dS, PRECISION)
        tl.store(dv + place * V + r[:, None] * (H * V) + y[None, :], dv_.to(dv.dtype.element_ty), mask=live[:, None] & (y < V)[None, :])
    dA *= scale
    e = tl.sum(tl.where(diagonal, dA, 0.0), 1)[:, None]
    dA = tl.where(strict, dA, 0.0)
    if DECAY == SCALAR:
        dA *= shares

    # dq from the states before, then dk from the gradients behind; dg from both
    for kb in tl.range(NK, num_stages=1):
        j = kb * BK + columns
        mask = live[:, None] & (j < K)[None, :]
        if PREVIOUS:
            bonus = tl.load(u + h * u_h + j * u_k, mask=j < K, other=0.0).to(tl.float32)[None, :]
        if DECAY == CHANNEL:
            d = decays(g, r, live, g_t, j, g_k, K, BK)
            last = tl.sum(d, 0)
            if not EXACT:
                G = sums(d, i, False, PRECISION) + ANCHOR

        dq_ = tl.zeros((C, BK), tl.float32)
        for vb in tl.range(NV, num_stages=1):
            y = vb * BV + values
            dO = tile(d_output, r, live, o_t, y, o_v, V, BV)
            S = true_state(chunk_states, chunk_decays, segment_states, chunk, segment, j, y, K, V, DECAY, CARRIED)
            dq_ += product(dO, tl.trans(S), PRECISION)
        qf = tile(q, r, live, q_t, j, q_k, K, BK).to(tl.float32)
        kf = tile(k, r, live, k_t, j, k_k, K, BK).to(tl.float32)
        if DECAY == NONE:
            dq_ = product(dA, kf, PRECISION) + dq_ * scale
        elif DECAY == SCALAR:
            dq_ = product(dA, kf, PRECISION) + dq_ * (read * scale)
        elif EXACT:
            dq_ *= read_factors(g, step, tokens, i, j, g_t, g_k, K, BK, PREVIOUS) * scale
            dq_, dk_ = gradients_by_stretches(
                q, k, g, dq_, dA, step, tokens, i, j, q_t, q_k, k_t, k_k, g_t, g_k, K, BK, C, PREVIOUS, PRECISION, LIMIT
            )
        else:
            dq_ = (product(dA, kf * tl.exp2(-G), PRECISION) + dq_ * (scale * tl.exp2(-ANCHOR))) * tl.exp2(G - d if PREVIOUS else G)
        z = qf * dq_
        own_dq = e * kf
        if PREVIOUS:
            own_dq *= bonus
            tl.store(du + chunk * K + j, tl.sum(e * qf * kf, 0), mask=j < K)
        tl.store(dq + place * K + r[:, None] * (H * K) + j[None, :], (dq_ + own_dq).to(dq.dtype.element_ty), mask=mask)

        carry = tl.zeros((BK,), tl.float32)
        to_state = tl.zeros((C, BK), tl.float32)
        for vb in tl.range(NV, num_stages=1):
            y = vb * BV + values
            Vt = tile(v, r, live, v_t, y, v_v, V, BV)
            dS = true_state(d_chunk_states, d_chunk_decays, d_segment_states, chunk, segment, j, y, K, V, DECAY, D_CARRIED)
            to_state += product(Vt, tl.trans(dS), PRECISION)
            if DECAY != NONE:
                S = true_state(chunk_states, chunk_decays, segment_states, chunk, segment, j, y, K, V, DECAY, CARRIED)
                carry += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        if DECAY == NONE:
            dk_ = product(tl.trans(dA), qf, PRECISION) + to_state
        elif DECAY == SCALAR:
            to_state *= rest
            dk_ = product(tl.trans(dA), qf, PRECISION) + to_state
            dg_scalar += tl.sum(z - kf * dk_, 1)
            carry_scalar += kept * tl.sum(carry, 0) + tl.sum(tl.sum(kf * to_state, 1), 0)
        elif EXACT:
            to_state *= rest_factors(g, step, tokens, i, j, g_t, g_k, K, BK, C)
            dk_ += to_state
            carry = tl.exp2(last) * carry + tl.sum(kf * to_state, 0)
        else:
            to_state *= tl.exp2(last + ANCHOR)[None, :]
            ek = tl.exp2(-G)
            carry = tl.exp2(last) * carry + tl.sum(kf * ek * to_state, 0)
            dk_ = ek * (product(tl.trans(dA), qf * tl.exp2(G - d if PREVIOUS else G), PRECISION) + to_state)
        if DECAY == CHANNEL:
            dg_ = sums(z - kf * dk_, i, True, PRECISION) + carry[None, :]
            if PREVIOUS:
                dg_ -= z
            if EXACT:  # dg_t has a factor 2^(g_t), which the difference of sums only shows up to its rounding
                dg_ = tl.where(d < -126.0, 0.0, dg_)
            if STATIC:
                tl.store(dg + chunk * K + j, tl.sum(tl.where(live[:, None], dg_, 0.0), 0), mask=j < K)
            else:
                tl.store(dg + place * K + r[:, None] * (H * K) + j[None, :], dg_.to(dg.dtype.element_ty), mask=mask)
        own_dk = e * qf
        if PREVIOUS:
            own_dk *= bonus
        tl.store(dk + place * K + r[:, None] * (H * K) + j[None, :], (dk_ + own_dk).to(dk.dtype.element_ty), mask=mask)

    if DECAY == SCALAR:
        dg_t = tl.where(d_s < -126.0, 0.0, tl.cumsum(dg_scalar, 0, reverse=True) + carry_scalar)
        if STATIC:
            tl.store(dg + chunk, tl.sum(tl.where(live, dg_t, 0.0), 0))
        else:
            tl.store(dg + place + r * H, dg_t.to(dg.dtype.element_ty), mask=live)
