"""The token-serial forward kernel. Decode steps are forward passes on a pool of states.

One program holds a block of V of one head's state in registers and processes one token after another. It computes the recurrence by its
definition, in float32, for all decays and sizes.

Over many tokens (PENDING) decays stay pending: a row of the state is exp(P) times the stored row. Reads are multiplied by exp(P) and
writes by exp(-P). The row is multiplied by exp(P) when P is below -0.5 and before the final state is stored. Without this, the rounding
of the state loses weak decays. Over few tokens this loss is small, and pending decays only cost registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from ....gpu.decays import CHANNEL, NONE, decayed
from ....gpu.pending import apply_or_pend, log_decay, nothing_pending
from ....gpu.tiles import after_loads, rounded, sum_of_rows, tokens_of


@triton.jit
def advance(S, P, rest, read, k, v, g, j, g_k, there, mine, DECAY: tl.constexpr, PENDING: tl.constexpr):
    """S_t from S_{t-1}. k, v and g are pointers to the token's k, v and decay."""
    kt = tl.load(k, mask=there, other=0.0).to(tl.float32)
    vt = tl.load(v, mask=mine, other=0.0).to(tl.float32)
    if DECAY != NONE:
        S, P, rest, read = apply_or_pend(S, P, rest, read, log_decay(g, j, g_k, there, DECAY), DECAY, PENDING)
    if PENDING:
        kt /= read
    return S + kt[:, None] * vt[None, :], P, rest, read


@triton.jit
def token(
    S, P, rest, read, q, k, v, g, output, bonus, scale, j, g_k, there, mine,
    DECAY: tl.constexpr, PREVIOUS: tl.constexpr, PENDING: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """S_t from S_{t-1}, with what is pending. q, k, v, g and output are pointers to the token's; its output is stored."""
    qt = tl.load(q, mask=there, other=0.0)
    kt = tl.load(k, mask=there, other=0.0)
    vt = tl.load(v, mask=mine, other=0.0)
    if DECAY != NONE:
        gt = log_decay(g, j, g_k, there, DECAY)
        if DECAY == CHANNEL:
            gt = after_loads(gt, CUDA)
    if PREVIOUS:
        bonus = after_loads(bonus, CUDA)
    qt = after_loads(qt, CUDA) * scale
    kt = after_loads(kt, CUDA)
    vt = after_loads(vt, CUDA)
    if PREVIOUS:
        seen = qt * read if PENDING else qt
        o = sum_of_rows(seen[:, None] * S) + sum_of_rows((qt * bonus * kt)[:, None]) * vt
    if DECAY != NONE:
        S, P, rest, read = apply_or_pend(S, P, rest, read, gt, DECAY, PENDING)
    if PENDING:
        kt /= read
    S += kt[:, None] * vt[None, :]
    if not PREVIOUS:
        seen = qt * read if PENDING else qt
        o = sum_of_rows(seen[:, None] * S)
    tl.store(output, o.to(output.dtype.element_ty), mask=mine)
    return S, P, rest, read


@triton.jit(do_not_specialize=["T"])
def penstock_recurrent_fwd(
    q, k, v, g, u, initial_state, output, final_state, cu_seqlens, slots, scale, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, u_h, u_k,
    s_n, s_h, s_k, s_v, f_n, f_h, f_k, f_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, PREVIOUS: tl.constexpr,
    INITIAL: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, SLOTS: tl.constexpr, PENDING: tl.constexpr, PIECE: tl.constexpr,
    ONE: tl.constexpr, CUDA: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """S_t = exp(g_t) o S_{t-1} + k_t^T v_t, o_t = scale q_t S_t; PREVIOUS: o_t = scale q_t (S_{t-1} + u o k_t^T v_t).

    Reads q, k [B,T,H,K], v [B,T,H,V], g [B,T,H,K], u [H,K] and states [N,H,K,V] or a pool [P,H,K,V], all by strides. Writes output
    [B,T,H,V] and the states. Program (sequence, head, block of V): token by token. With SLOTS, sequence n uses state ``slots[n]``.

    PIECE > 0: updates in place (see ``in_place.py``), of the tokens after the whole pieces of PIECE tokens. After each token the state is
    as if stored and loaded. If a slot is negative, an output of 0 is stored.
    ONE: sequences have one token. CUDA: compiled for a GPU of NVIDIA. EARLY: if T >= PIECE, this launch may begin while the launch of the
    whole pieces runs. Programs of sequences with a piece wait for it, so this launch ends after it. The others share no memory with it. If
    T < PIECE there is no such launch, and the kernel ahead may write everything that this one reads, the slots too.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    dv = pid % NV * BV + tl.arange(0, BV)
    dk = tl.arange(0, BK)
    h = (pid // NV % H).to(tl.int64)
    if EARLY:
        if T < PIECE:
            cuda.gdc_wait()
    n, b, row, step, _, _, length = tokens_of((pid // NV // H).to(tl.int64), cu_seqlens, 0, T, 0, False, PACKED, REVERSE)
    slot = n
    if SLOTS:
        slot = tl.load(slots + n).to(tl.int64)
    there = dk < K
    mine = dv < V
    inside = there[:, None] & mine[None, :]
    output += ((b * T + row) * H + h) * V + dv
    first = length * 0
    if PIECE > 0:
        first = length // PIECE * PIECE
        if EARLY:
            if (first > 0) | (slot < 0):
                cuda.gdc_wait()
        if slot < 0:
            for _t in tl.range(0, length):
                tl.store(output, tl.zeros((BV,), output.dtype.element_ty), mask=mine)
                output += H * V
            return
        if first == length:
            return
    row += first * step
    q += b * q_b + row * q_t + h * q_h + dk * q_k
    k += b * k_b + row * k_t + h * k_h + dk * k_k
    v += b * v_b + row * v_t + h * v_h + dv * v_v
    g += b * g_b + row * g_t + h * g_h
    output += first * step * H * V
    state = initial_state + slot * s_n + h * s_h + dk[:, None] * s_k + dv[None, :] * s_v
    if INITIAL:
        S = tl.load(state, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    bonus = 0.0
    if PREVIOUS:
        bonus = tl.load(u + h * u_h + dk * u_k, mask=there, other=0.0)
    P = nothing_pending(BK, DECAY)
    rest = P
    read = P + 1.0
    if ONE:
        S, P, rest, read = token(S, P, rest, read, q, k, v, g, output, bonus, scale, dk, g_k, there, mine, DECAY, PREVIOUS, PENDING, CUDA)
    else:
        for _t in tl.range(first, length):
            S, P, rest, read = token(
                S, P, rest, read, q, k, v, g, output, bonus, scale, dk, g_k, there, mine, DECAY, PREVIOUS, PENDING, CUDA
            )
            if PIECE > 0:
                S = rounded(S, final_state)
            q += q_t * step
            k += k_t * step
            v += v_t * step
            g += g_t * step
            output += H * V * step
    if PIECE == 0:
        if PENDING:
            S = decayed(S, P, DECAY)
        state = final_state + slot * f_n + h * f_h + dk[:, None] * f_k + dv[None, :] * f_v
    tl.store(state, S.to(final_state.dtype.element_ty), mask=inside)
