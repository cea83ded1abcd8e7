"""The token-serial forward kernel. Decode steps are forward passes on a pool of states.

One program holds a block of V of one head's state in registers and processes one token after another, in float32. Both products with the
state, of a and of q, read the same state, so a token has one phase of sums over K::

    one stream    S~ = exp(g) o S    u = beta (v - k S~)    o = scale (q S~ + (q . k) u)              S' = S~ + k^T u
    two streams   w = a S            o = scale ((q o exp(g)) S + (q . b) w + (q . k) v)               S' = exp(g) o S + b^T w + k^T v

Over many tokens (PENDING) decays stay pending, see ``gpu/pending.py``. Raw inputs are computed here as in ``raw.py``, bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, FLOOR, NONE, decayed, exp
from ....gpu.pending import apply_or_pend, log_decay, nothing_pending
from ....gpu.tiles import after_loads, rounded, sum_of_rows, tokens_of
from .raw import SIGMOID, log_decay_of, rate_of, root_of_squares, sigmoid


@triton.jit
def gate_of_token(x, gate, DECAY: tl.constexpr, RAW: tl.constexpr):
    """The log decay of a raw gate; finite or NaN."""
    if RAW > 0:
        rate, bias, bound = gate
        x = tl.maximum(log_decay_of(x.to(tl.float32) + bias, rate, bound, RAW), FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def load_gate(g, j, g_k, there, DECAY: tl.constexpr, RAW: tl.constexpr):
    """A token's log decay, or its raw gate."""
    if RAW == 0:
        x = log_decay(g, j, g_k, there, DECAY)
    elif DECAY == CHANNEL:
        x = tl.load(g + j * g_k, mask=there, other=0.0)
    else:
        x = tl.load(g)
    return x


@triton.jit
def unit(x, pointer, UNIT: tl.constexpr):
    """X divided by its norm and rounded to its dtype, if UNIT."""
    if UNIT:
        x = (x / root_of_squares(x[:, None])).to(pointer.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def one_stream(
    S, P, rest, read, q, k, v, g, beta, output, scale, j, g_k, there, mine, gate,
    DECAY: tl.constexpr, PENDING: tl.constexpr, CUDA: tl.constexpr, UNIT: tl.constexpr, LOGITS: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """The state after a token, with what is pending. All but S to read are pointers to the token's; its output is stored."""
    qt = tl.load(q, mask=there, other=0.0)
    kt = tl.load(k, mask=there, other=0.0)
    vt = tl.load(v, mask=mine, other=0.0)
    strength = tl.load(beta).to(tl.float32)
    if DECAY != NONE:
        gt = load_gate(g, j, g_k, there, DECAY, RAW)
        if DECAY == CHANNEL:
            gt = after_loads(gt, CUDA)
        gt = gate_of_token(gt, gate, DECAY, RAW)
    if LOGITS > 0:
        strength = sigmoid(strength) * LOGITS
    qt = unit(after_loads(qt, CUDA), q, UNIT) * scale
    kt = unit(after_loads(kt, CUDA), k, UNIT)
    vt = after_loads(vt, CUDA)
    if DECAY != NONE:
        S, P, rest, read = apply_or_pend(S, P, rest, read, gt, DECAY, PENDING)
    own = sum_of_rows((qt * kt)[:, None])
    if PENDING:
        qt *= read
        removed = sum_of_rows((kt * read)[:, None] * S)
        kt /= read
    else:
        removed = sum_of_rows(kt[:, None] * S)
    u = strength * (vt - removed)
    o = sum_of_rows(qt[:, None] * S) + own * u
    tl.store(output, o.to(output.dtype.element_ty), mask=mine)
    return S + kt[:, None] * u[None, :], P, rest, read


@triton.jit
def two_streams(
    S, P, rest, read, q, k, v, g, a, b, output, scale, j, g_k, there, mine, gate,
    DECAY: tl.constexpr, PENDING: tl.constexpr, CUDA: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """The same, of a removal that reads the state before the decay."""
    qt = tl.load(q, mask=there, other=0.0)
    kt = tl.load(k, mask=there, other=0.0)
    at = tl.load(a, mask=there, other=0.0)
    bt = tl.load(b, mask=there, other=0.0)
    vt = tl.load(v, mask=mine, other=0.0)
    gt = load_gate(g, j, g_k, there, DECAY, RAW)
    if DECAY == CHANNEL:
        gt = after_loads(gt, CUDA)
    gt = gate_of_token(gt, gate, DECAY, RAW)
    qt = after_loads(qt, CUDA) * scale
    kt = after_loads(kt, CUDA)
    at = after_loads(at, CUDA)
    bt = after_loads(bt, CUDA)
    vt = after_loads(vt, CUDA)
    own = sum_of_rows((qt * bt)[:, None])
    late = sum_of_rows((qt * kt)[:, None])
    if PENDING:
        at *= read
    w = sum_of_rows(at[:, None] * S)
    o = sum_of_rows((qt * read * exp(gt))[:, None] * S) if PENDING else sum_of_rows((qt * exp(gt))[:, None] * S)
    tl.store(output, (o + own * w + late * vt).to(output.dtype.element_ty), mask=mine)
    S, P, rest, read = apply_or_pend(S, P, rest, read, gt, DECAY, PENDING)
    if PENDING:
        bt /= read
        kt /= read
    return S + bt[:, None] * w[None, :] + kt[:, None] * vt[None, :], P, rest, read


@triton.jit(do_not_specialize=["T"])
def penstock_delta_recurrent(
    q, k, v, g, beta, a, b, A_log, dt_bias, initial_state, output, final_state, cu_seqlens, slots, scale, bound, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, beta_b, beta_t, beta_h,
    a_b, a_t, a_h, a_k, b_b, b_t, b_h, b_k, A_log_h, dt_bias_h, dt_bias_k, s_n, s_h, s_k, s_v, f_n, f_h, f_k, f_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STREAMS: tl.constexpr, DECAY: tl.constexpr,
    INITIAL: tl.constexpr, PACKED: tl.constexpr, SLOTS: tl.constexpr, PENDING: tl.constexpr, PIECE: tl.constexpr,
    ONE: tl.constexpr, CUDA: tl.constexpr, UNIT: tl.constexpr, LOGITS: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """S_t = exp(g_t) o S_{t-1} + b_t^T w_t + k_t^T v_t with w_t = a_t S_{t-1}; one stream: S~ + beta_t k_t^T (v_t - k_t S~).

    Reads q, k, a, b [B,T,H,K], v [B,T,H,V], g [B,T,H,K], beta [B,T,H] and states [N,H,K,V] or a pool [P,H,K,V], all by strides. Writes
    output [B,T,H,V] and the states. Program (sequence, head, block of V): token by token. With SLOTS, sequence n uses state ``slots[n]``.

    PIECE > 0: updates in place, of the tokens after the whole pieces of PIECE tokens. After each token the state is as if stored and
    loaded. If a slot is negative, an output of 0 is stored. ONE: sequences have one token. CUDA: compiled for a GPU of NVIDIA. UNIT,
    LOGITS, RAW and BIAS: see ``raw.py``; with RAW, g are raw gates.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    y = pid % NV * BV + tl.arange(0, BV)
    j = tl.arange(0, BK)
    h = (pid // NV % H).to(tl.int64)
    n, batch, row, _step, _begin, _done, length = tokens_of((pid // NV // H).to(tl.int64), cu_seqlens, 0, T, 0, False, PACKED, False)
    own = n
    if SLOTS:
        own = tl.load(slots + n).to(tl.int64)
    there = j < K
    mine = y < V
    inside = there[:, None] & mine[None, :]
    output += ((batch * T + row) * H + h) * V + y
    first = length * 0
    if PIECE > 0:
        first = length // PIECE * PIECE
        if own < 0:
            for _t in tl.range(0, length):
                tl.store(output, tl.zeros((BV,), output.dtype.element_ty), mask=mine)
                output += H * V
            return
        if first == length:
            return
    row += first
    q += batch * q_b + row * q_t + h * q_h + j * q_k
    k += batch * k_b + row * k_t + h * k_h + j * k_k
    v += batch * v_b + row * v_t + h * v_h + y * v_v
    g += batch * g_b + row * g_t + h * g_h
    beta += batch * beta_b + row * beta_t + h * beta_h
    a += batch * a_b + row * a_t + h * a_h + j * a_k
    b += batch * b_b + row * b_t + h * b_h + j * b_k
    output += first * H * V
    state = initial_state + own * s_n + h * s_h + j[:, None] * s_k + y[None, :] * s_v
    if INITIAL:
        S = tl.load(state, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    P = nothing_pending(BK, DECAY)
    rest = P
    read = P + 1.0
    rate = 1.0
    bias = 0.0
    if RAW > 0:
        if RAW != SIGMOID:
            rate = rate_of(tl.load(A_log + h * A_log_h))
        if BIAS:
            if DECAY == CHANNEL:
                bias = tl.load(dt_bias + h * dt_bias_h + j * dt_bias_k, mask=there, other=0.0).to(tl.float32)
            else:
                bias = tl.load(dt_bias + h * dt_bias_h).to(tl.float32)
    gate = (rate, bias, bound)
    if ONE:
        if STREAMS == 1:
            S, P, rest, read = one_stream(
                S, P, rest, read, q, k, v, g, beta, output, scale, j, g_k, there, mine, gate, DECAY, PENDING, CUDA, UNIT, LOGITS, RAW
            )
        else:
            S, P, rest, read = two_streams(
                S, P, rest, read, q, k, v, g, a, b, output, scale, j, g_k, there, mine, gate, DECAY, PENDING, CUDA, RAW
            )
    else:
        for _t in tl.range(first, length):
            if STREAMS == 1:
                S, P, rest, read = one_stream(
                    S, P, rest, read, q, k, v, g, beta, output, scale, j, g_k, there, mine, gate, DECAY, PENDING, CUDA, UNIT, LOGITS, RAW
                )
            else:
                S, P, rest, read = two_streams(
                    S, P, rest, read, q, k, v, g, a, b, output, scale, j, g_k, there, mine, gate, DECAY, PENDING, CUDA, RAW
                )
            if PIECE > 0:
                S = rounded(S, final_state)
            q += q_t
            k += k_t
            v += v_t
            g += g_t
            beta += beta_t
            a += a_t
            b += b_t
            output += H * V
    if PIECE == 0:
        if PENDING:
            S = decayed(S, P, DECAY)
        state = final_state + own * f_n + h * f_h + j[:, None] * f_k + y[None, :] * f_v
    tl.store(state, S.to(final_state.dtype.element_ty), mask=inside)
