"""The token-serial kernels: forward (decode steps are forward passes on a pool of states) and backward.

One program holds a block of V of one head's state in registers and takes token after token. No decay is too strong or too
weak for it, and no size odd: this is the recurrence as it is defined, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.tiles import LOG2E
from .tiles import FLOOR, NONE, SCALAR


@triton.jit
def loss_of(base, j, stride_j, there, DECAY: tl.constexpr):
    """exp(g) - 1 of one token, per channel or one for all: what the state loses. Exact where decays are weak and losses add up."""
    if DECAY == SCALAR:
        g = tl.load(base)
    else:
        g = tl.load(base + j * stride_j, mask=there, other=0.0)
    g = tl.maximum(g.to(tl.float32), FLOOR)
    near = tl.maximum(g, -0.5)
    series = 1.0 + near * (1.0 / 7.0) * (1.0 + near * (1.0 / 8.0))
    series = 1.0 + near * (1.0 / 5.0) * (1.0 + near * (1.0 / 6.0) * series)
    series = 1.0 + near * (1.0 / 3.0) * (1.0 + near * (1.0 / 4.0) * series)
    series = near * (1.0 + near * (1.0 / 2.0) * series)
    return tl.where(g > -0.5, series, tl.exp2(g * LOG2E) - 1.0)


@triton.jit
def decayed(S, g, j, g_k, there, DECAY: tl.constexpr):
    """The state without what one token's decay takes."""
    if DECAY == SCALAR:
        S += S * loss_of(g, j, g_k, there, DECAY)
    elif DECAY != NONE:
        S += S * loss_of(g, j, g_k, there, DECAY)[:, None]
    return S


@triton.jit
def next_state(S, k, v, g, j, g_k, there, mine, DECAY: tl.constexpr):
    """S_t from S_{t-1}, with pointers to the token's k, v and decay."""
    kt = tl.load(k, mask=there, other=0.0).to(tl.float32)
    vt = tl.load(v, mask=mine, other=0.0).to(tl.float32)
    return decayed(S, g, j, g_k, there, DECAY) + kt[:, None] * vt[None, :]


@triton.jit(do_not_specialize=["T"])
def penstock_recurrent_fwd(
    q, k, v, g, u, initial_state, output, final_state, cu_seqlens, slots, scale, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, u_h, u_k,
    s_n, s_h, s_k, s_v, f_n, f_h, f_k, f_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, PREVIOUS: tl.constexpr,
    INITIAL: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, block of V)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    dv = pid % NV * BV + tl.arange(0, BV)
    dk = tl.arange(0, BK)
    h = (pid // NV % H).to(tl.int64)
    n = (pid // NV // H).to(tl.int64)
    zero = tl.zeros((), tl.int64)
    begin = zero
    length = T
    b = n
    if PACKED:
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - begin).to(tl.int32)
        b = zero
    row = begin
    step = 1
    if REVERSE:
        row = begin + length - 1
        step = -1
    there = dk < K
    mine = dv < V
    inside = there[:, None] & mine[None, :]
    q += b * q_b + row * q_t + h * q_h + dk * q_k
    k += b * k_b + row * k_t + h * k_h + dk * k_k
    v += b * v_b + row * v_t + h * v_h + dv * v_v
    g += b * g_b + row * g_t + h * g_h
    output += ((b * T + row) * H + h) * V + dv
    slot = n
    if SLOTS:
        slot = tl.load(slots + n).to(tl.int64)
        if slot < 0:
            for _ in tl.range(0, length):
                tl.store(output, tl.zeros((BV,), output.dtype.element_ty), mask=mine)
                output += H * V
            return
    if INITIAL:
        S = tl.load(initial_state + slot * s_n + h * s_h + dk[:, None] * s_k + dv[None, :] * s_v, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    if PREVIOUS:
        bonus = tl.load(u + h * u_h + dk * u_k, mask=there, other=0.0).to(tl.float32)
    for _ in tl.range(0, length):
        qt = tl.load(q, mask=there, other=0.0).to(tl.float32) * scale
        kt = tl.load(k, mask=there, other=0.0).to(tl.float32)
        vt = tl.load(v, mask=mine, other=0.0).to(tl.float32)
        if PREVIOUS:
            o = tl.sum(qt[:, None] * S, 0) + tl.sum(qt * bonus * kt, 0) * vt
        S = decayed(S, g, dk, g_k, there, DECAY) + kt[:, None] * vt[None, :]
        if not PREVIOUS:
            o = tl.sum(qt[:, None] * S, 0)
        tl.store(output, o.to(output.dtype.element_ty), mask=mine)
        q += q_t * step
        k += k_t * step
        v += v_t * step
        g += g_t * step
        output += H * V * step
    place = final_state + slot * f_n + h * f_h + dk[:, None] * f_k + dv[None, :] * f_v
    tl.store(place, S.to(final_state.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "T", "rows"])
def penstock_recurrent_bwd(
    q, k, v, g, u, initial_state, d_output, d_final_state, dq, dk, dv, dg, du, d_initial_state, kept, cu_seqlens, scale, N, T, H, rows,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, u_h, u_k,
    s_n, s_h, s_k, s_v, o_b, o_t, o_h, o_v, f_n, f_h, f_k, f_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, STATIC: tl.constexpr,
    PREVIOUS: tl.constexpr, INITIAL: tl.constexpr, D_FINAL: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, block of V).

    dq, dk [NV,B,T,H,K], dg [NV,B,T,H,K] (a constant decay's: [NV,N,H,K]; a scalar's without K) and du [NV,N,H,K] are the shares of
    blocks of V, float32, to be summed; dv is whole. ``kept`` [N,H,NV,SPAN + 1 + ceil(T / SPAN),BK,BV] holds states: one every SPAN
    tokens, and those within a span while it is walked backwards.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    vb = pid % NV
    jv = vb * BV + tl.arange(0, BV)
    jk = tl.arange(0, BK)
    h = (pid // NV % H).to(tl.int64)
    n = (pid // NV // H).to(tl.int64)
    zero = tl.zeros((), tl.int64)
    begin = zero
    length = T
    b = n
    first_state = pid.to(tl.int64) * (SPAN + tl.cdiv(T, SPAN))
    if PACKED:
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - begin).to(tl.int32)
        b = zero
        first_state = (begin // SPAN + n * (SPAN + 1)) * (H * NV) + (h * NV + vb) * (SPAN + tl.cdiv(length, SPAN))
    row = begin
    step = 1
    if REVERSE:
        row = begin + length - 1
        step = -1
    there = jk < K
    mine = jv < V
    inside = there[:, None] & mine[None, :]
    q += b * q_b + row * q_t + h * q_h + jk * q_k
    k += b * k_b + row * k_t + h * k_h + jk * k_k
    v += b * v_b + row * v_t + h * v_h + jv * v_v
    g += b * g_b + row * g_t + h * g_h
    d_output += b * o_b + row * o_t + h * o_h + jv * o_v
    place = (b * T + row) * H + h
    share = (zero + vb) * rows * H
    within = jk[:, None] * BV + tl.arange(0, BV)[None, :]
    kept += first_state * (BK * BV)
    every = kept + SPAN * (BK * BV)
    if INITIAL:
        S = tl.load(initial_state + n * s_n + h * s_h + jk[:, None] * s_k + jv[None, :] * s_v, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    if D_FINAL:
        dS = tl.load(d_final_state + n * f_n + h * f_h + jk[:, None] * f_k + jv[None, :] * f_v, mask=inside, other=0.0).to(tl.float32)
    else:
        dS = tl.zeros((BK, BV), tl.float32)
    if PREVIOUS:
        bonus = tl.load(u + h * u_h + jk * u_k, mask=there, other=0.0).to(tl.float32)
        du_ = tl.zeros((BK,), tl.float32)
    if STATIC:
        dg_ = tl.zeros((BK,), tl.float32)

    for t in tl.range(0, length):
        if t % SPAN == 0:
            tl.store(every + (t // SPAN) * (BK * BV) + within, S)
        at = zero + t * step
        S = next_state(S, k + at * k_t, v + at * v_t, g + at * g_t, jk, g_k, there, mine, DECAY)

    spans = tl.cdiv(length, SPAN)
    for back in tl.range(0, spans):
        first = (spans - 1 - back) * SPAN
        last = tl.minimum(first + SPAN, length)
        tl.debug_barrier()
        S = tl.load(every + (first // SPAN) * (BK * BV) + within)
        for t in tl.range(first, last):
            tl.store(kept + (t - first) * (BK * BV) + within, S)
            at = zero + t * step
            S = next_state(S, k + at * k_t, v + at * v_t, g + at * g_t, jk, g_k, there, mine, DECAY)
        tl.debug_barrier()
        for s in tl.range(0, last - first):
            t = last - 1 - s
            at = zero + t * step
            qt = tl.load(q + at * q_t, mask=there, other=0.0).to(tl.float32) * scale
            kt = tl.load(k + at * k_t, mask=there, other=0.0).to(tl.float32)
            vt = tl.load(v + at * v_t, mask=mine, other=0.0).to(tl.float32)
            dot = tl.load(d_output + at * o_t, mask=mine, other=0.0).to(tl.float32)
            S = tl.load(kept + (t - first) * (BK * BV) + within)
            if DECAY == NONE:
                decayed = S
            elif DECAY == SCALAR:
                loss = loss_of(g + at * g_t, jk, g_k, there, DECAY)
                decayed = S + S * loss
            else:
                loss = loss_of(g + at * g_t, jk, g_k, there, DECAY)
                decayed = S + S * loss[:, None]
            if PREVIOUS:
                e = tl.sum(dot * vt, 0)
                dq_t = (tl.sum(S * dot[None, :], 1) + bonus * kt * e) * scale
                dk_t = tl.sum(dS * vt[None, :], 1) + qt * bonus * e
                dv_t = tl.sum(dS * kt[:, None], 0) + tl.sum(qt * bonus * kt, 0) * dot
                du_ += qt * kt * e
            else:
                dS += qt[:, None] * dot[None, :]
                dq_t = tl.sum((decayed + kt[:, None] * vt[None, :]) * dot[None, :], 1) * scale
                dk_t = tl.sum(dS * vt[None, :], 1)
                dv_t = tl.sum(dS * kt[:, None], 0)
            where = place + at * H
            if DECAY != NONE:
                dg_t = tl.sum(decayed * dS, 1)
                if STATIC:
                    dg_ += dg_t
                elif DECAY == SCALAR:
                    tl.store(dg + share + where, tl.sum(dg_t, 0))
                else:
                    tl.store(dg + (share + where) * K + jk, dg_t, mask=there)
            tl.store(dq + (share + where) * K + jk, dq_t.to(dq.dtype.element_ty), mask=there)
            tl.store(dk + (share + where) * K + jk, dk_t.to(dk.dtype.element_ty), mask=there)
            tl.store(dv + where * V + jv, dv_t.to(dv.dtype.element_ty), mask=mine)
            if DECAY == SCALAR:
                dS += dS * loss
            elif DECAY != NONE:
                dS += dS * loss[:, None]
            if PREVIOUS:
                dS += qt[:, None] * dot[None, :]
    sums = (vb * N + n) * H + h
    if PREVIOUS:
        tl.store(du + sums * K + jk, du_, mask=there)
    if STATIC and DECAY == SCALAR:
        tl.store(dg + sums, tl.sum(dg_, 0))
    elif STATIC:
        tl.store(dg + sums * K + jk, dg_, mask=there)
    place_s = d_initial_state + ((n * H + h) * K + jk[:, None]) * V + jv[None, :]
    tl.store(place_s, dS.to(d_initial_state.dtype.element_ty), mask=inside)
