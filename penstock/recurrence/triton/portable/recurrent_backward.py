"""The token-serial backward kernel: the definition of the recurrence in float32, for all decays and sizes, see ``recurrent``.

It first walks forward and stores the state every SPAN tokens. Then, from the last span to the first, it computes the states of the span
again, and dq; and it walks backward over its tokens with the state's gradient dS in registers, for dk, dv and dg.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, NONE, SCALAR, decayed, exp
from ....gpu.pending import add, apply_or_pend, log_decay, nothing_pending
from ....gpu.tiles import tokens_of
from .recurrent import advance


@triton.jit
def state_or_zeros(at, inside, BK: tl.constexpr, BV: tl.constexpr, GIVEN: tl.constexpr):
    """A state [BK,BV], float32: loaded if GIVEN, else 0."""
    if GIVEN:
        S = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    return S


@triton.jit
def store_state(slot, within, beside, S, P, rest, BK: tl.constexpr, PENDING: tl.constexpr):
    """Store a state in a slot of scratch memory, with its pending decay."""
    tl.store(slot + within, S)
    if PENDING:
        tl.store(slot + beside, P)
        tl.store(slot + beside + BK, rest)


@triton.jit
def store_gradient(dg, row, dg_t, j, there, K: tl.constexpr, DECAY: tl.constexpr):
    """Store a gradient of decays [BK] in row ``row`` of ``dg``: its sum, if the decay is a scalar."""
    if DECAY == SCALAR:
        tl.store(dg + row, tl.sum(dg_t, 0))
    else:
        tl.store(dg + row * K + j, dg_t, mask=there)


@triton.jit(do_not_specialize=["N", "T", "rows"])
def penstock_recurrent_bwd(
    q, k, v, g, u, initial_state, d_output, d_final_state, dq, dk, dv, dg, du, d_initial_state, kept, cu_seqlens, scale, N, T, H, rows,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, u_h, u_k,
    s_n, s_h, s_k, s_v, o_b, o_t, o_h, o_v, f_n, f_h, f_k, f_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, STATIC: tl.constexpr,
    PREVIOUS: tl.constexpr, INITIAL: tl.constexpr, D_FINAL: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    SPAN: tl.constexpr, PENDING: tl.constexpr,
):  # fmt: skip
    """dS_{t-1} = exp(g_t) o dS_t, dk_t = v_t dS_t^T, dv_t = k_t dS_t, dg_t = exp(g_t) o rowsum(S_{t-1} o dS_t), dq_t = scale dO_t S_t^T.

    Reads q, k, g [B,T,H,K], v, dO [B,T,H,V], u [H,K] and states [N,H,K,V], all by strides. Writes dv [B,T,H,V], d_initial_state [N,H,K,V]
    and partial sums. Program (sequence, head, block of V): token by token.

    dq, dk [NV,B,T,H,K], dg [NV,B,T,H,K] (constant decays: [NV,N,H,K]; scalar decays: without K) and du [NV,N,H,K] are partial sums
    for each block of V, float32; the caller sums them. dv is complete. ``kept`` [N,H,NV,SPAN + 1 + ceil(T / SPAN),BK,BV + 2] is scratch
    memory for states: one state every SPAN tokens with its pending decay, and all states of the current span with their read factors.
    """
    SLOT: tl.constexpr = BK * (BV + 2)
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    vb = pid % NV
    jv = vb * BV + tl.arange(0, BV)
    jk = tl.arange(0, BK)
    h = (pid // NV % H).to(tl.int64)
    n, b, row, step, begin, _, length = tokens_of((pid // NV // H).to(tl.int64), cu_seqlens, 0, T, 0, False, PACKED, REVERSE)
    zero = tl.zeros((), tl.int64)
    first_state = pid.to(tl.int64) * (SPAN + tl.cdiv(T, SPAN))
    if PACKED:
        first_state = (begin // SPAN + n * (SPAN + 1)) * (H * NV) + (h * NV + vb) * (SPAN + tl.cdiv(length, SPAN))
    there, mine = jk < K, jv < V
    inside = there[:, None] & mine[None, :]
    q += b * q_b + row * q_t + h * q_h + jk * q_k
    k += b * k_b + row * k_t + h * k_h + jk * k_k
    v += b * v_b + row * v_t + h * v_h + jv * v_v
    g += b * g_b + row * g_t + h * g_h
    d_output += b * o_b + row * o_t + h * o_h + jv * o_v
    place = (b * T + row) * H + h
    share = (zero + vb) * rows * H
    within = jk[:, None] * BV + tl.arange(0, BV)[None, :]
    beside = BK * BV
    if DECAY == CHANNEL:
        beside += jk
    kept += first_state * SLOT
    every = kept + SPAN * SLOT
    S = state_or_zeros(initial_state + n * s_n + h * s_h + jk[:, None] * s_k + jv[None, :] * s_v, inside, BK, BV, INITIAL)
    dS = state_or_zeros(d_final_state + n * f_n + h * f_h + jk[:, None] * f_k + jv[None, :] * f_v, inside, BK, BV, D_FINAL)
    if PREVIOUS:
        bonus = tl.load(u + h * u_h + jk * u_k, mask=there, other=0.0).to(tl.float32)
        du_ = tl.zeros((BK,), tl.float32)
        du_rest = du_
    if STATIC:
        dg_ = tl.zeros((BK,), tl.float32)
        dg_rest = dg_

    P = nothing_pending(BK, DECAY)
    rest, read = P, P + 1.0
    for t in tl.range(0, length):
        if t % SPAN == 0:
            store_state(every + (t // SPAN) * SLOT, within, beside, S, P, rest, BK, PENDING)
        at = zero + t * step
        S, P, rest, read = advance(S, P, rest, read, k + at * k_t, v + at * v_t, g + at * g_t, jk, g_k, there, mine, DECAY, PENDING)

    Q = nothing_pending(BK, DECAY)
    rest_after, read_after = Q, Q + 1.0
    spans = tl.cdiv(length, SPAN)
    for back in tl.range(0, spans):
        first = (spans - 1 - back) * SPAN
        last = tl.minimum(first + SPAN, length)
        tl.debug_barrier()
        slot = every + (first // SPAN) * SLOT
        S = tl.load(slot + within)
        if PENDING:
            P = tl.load(slot + beside)
            rest = tl.load(slot + beside + BK)
            read = exp(P)
        for t in tl.range(first, last):
            slot = kept + (t - first) * SLOT
            at = zero + t * step
            where = place + at * H
            dot = tl.load(d_output + at * o_t, mask=mine, other=0.0).to(tl.float32)
            if DECAY != NONE:
                tl.store(slot + within, S)
            if PENDING:
                tl.store(slot + beside, read)
            if PREVIOUS:
                kt = tl.load(k + at * k_t, mask=there, other=0.0).to(tl.float32)
                vt = tl.load(v + at * v_t, mask=mine, other=0.0).to(tl.float32)
                dq_t = read * tl.sum(S * dot[None, :], 1) + bonus * kt * tl.sum(dot * vt, 0)
            S, P, rest, read = advance(S, P, rest, read, k + at * k_t, v + at * v_t, g + at * g_t, jk, g_k, there, mine, DECAY, PENDING)
            if not PREVIOUS:
                dq_t = read * tl.sum(S * dot[None, :], 1)
            tl.store(dq + (share + where) * K + jk, (dq_t * scale).to(dq.dtype.element_ty), mask=there)
        tl.debug_barrier()
        for s in tl.range(0, last - first):
            t = last - 1 - s
            at = zero + t * step
            where = place + at * H
            qt = tl.load(q + at * q_t, mask=there, other=0.0).to(tl.float32) * scale
            kt = tl.load(k + at * k_t, mask=there, other=0.0).to(tl.float32)
            vt = tl.load(v + at * v_t, mask=mine, other=0.0).to(tl.float32)
            dot = tl.load(d_output + at * o_t, mask=mine, other=0.0).to(tl.float32)
            if not PREVIOUS:
                dS += (qt / read_after)[:, None] * dot[None, :]
            dk_t = read_after * tl.sum(dS * vt[None, :], 1)
            dv_t = tl.sum(dS * (kt * read_after)[:, None], 0)
            if PREVIOUS:
                e = tl.sum(dot * vt, 0)
                dk_t += qt * bonus * e
                dv_t += tl.sum(qt * bonus * kt, 0) * dot
                du_, du_rest = add(du_, du_rest, qt * kt * e)
            if DECAY != NONE:
                slot = kept + (t - first) * SLOT
                gt = log_decay(g + at * g_t, jk, g_k, there, DECAY)
                S = tl.load(slot + within)
                dg_t = tl.sum(S * dS, 1)
                if PENDING:
                    dg_t *= tl.load(slot + beside) * read_after
                dg_t *= exp(gt)
                if STATIC:
                    dg_, dg_rest = add(dg_, dg_rest, dg_t)
                else:
                    store_gradient(dg, share + where, dg_t, jk, there, K, DECAY)
                dS, Q, rest_after, read_after = apply_or_pend(dS, Q, rest_after, read_after, gt, DECAY, PENDING)
            tl.store(dk + (share + where) * K + jk, dk_t.to(dk.dtype.element_ty), mask=there)
            tl.store(dv + where * V + jv, dv_t.to(dv.dtype.element_ty), mask=mine)
            if PREVIOUS:
                dS += (qt / read_after)[:, None] * dot[None, :]
    if PENDING:
        dS = decayed(dS, Q, DECAY)
    sums = (vb * N + n) * H + h
    if PREVIOUS:
        tl.store(du + sums * K + jk, du_, mask=there)
    if STATIC:
        store_gradient(dg, sums, dg_, jk, there, K, DECAY)
    place_s = d_initial_state + ((n * H + h) * K + jk[:, None]) * V + jv[None, :]
    tl.store(place_s, dS.to(d_initial_state.dtype.element_ty), mask=inside)
