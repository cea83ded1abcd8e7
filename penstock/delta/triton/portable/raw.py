"""Raw inputs of the delta rule: normalised q and k, beta and log decays, one pass over memory, and their gradients.

    q, k      x / sqrt(sum x^2 + 1e-6)                    over K
    beta      sigmoid(x), 2 sigmoid(x)
    g         -exp(A_log) softplus(x + dt_bias)           SOFTPLUS
              bound sigmoid(exp(A_log) (x + dt_bias))     BOUNDED
              -exp(-1/2) sigmoid(x)                       SIGMOID

Tiles are [channels, tokens]. Sums over channels have the order of ``sum_of_rows``, so no result depends on the other tokens of a call.
Derivatives of sigmoid are products of sigmoid(x) and sigmoid(-x): 1 - y loses digits where y is near 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, exp
from ....gpu.tiles import sum_of_rows
from ....tokens import decays

EPSILON = tl.constexpr(1e-6)
FASTEST = tl.constexpr(decays.FASTEST)
FARTHEST = tl.constexpr(104.0)  # exp(-104) is 0 in float32
ALL = tl.constexpr(tl.PropagateNan.ALL)
SMALLEST, LARGEST = tl.constexpr(decays.SMALLEST), tl.constexpr(decays.LARGEST)
SOFTPLUS, BOUNDED, SIGMOID = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # RAW: how log decays follow from raw gates; 0: none are raw


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), for all x; NaN for NaN."""
    x = tl.maximum(x, -FARTHEST, propagate_nan=ALL)
    return 1.0 / (1.0 + exp(-tl.minimum(x, FARTHEST, propagate_nan=ALL)))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), for all x: max(x, 0) + 2 artanh(z / (2 + z)) with z = exp(-|x|). The series has a relative error of 1e-8."""
    z = exp(-tl.minimum(tl.abs(x), FARTHEST))
    s = z / (2.0 + z)
    y = s * s
    series = 1.0 / 11.0 + y * (1.0 / 13.0 + y * (1.0 / 15.0))
    series = 1.0 / 5.0 + y * (1.0 / 7.0 + y * (1.0 / 9.0 + y * series))
    series = 1.0 + y * (1.0 / 3.0 + y * series)
    return tl.maximum(x, 0.0, propagate_nan=ALL) + 2.0 * s * series


@triton.jit
def root_of_squares(x):
    """The square root of the sum of squares of x [BK,R], and of EPSILON: [R]."""
    return tl.sqrt(sum_of_rows(x * x) + EPSILON)


@triton.jit
def rate_of(A_log):
    """exp(A_log), a finite number above 0: so 0 and infinite gates have products with it."""
    A = tl.maximum(A_log.to(tl.float32), SMALLEST, propagate_nan=ALL)
    return exp(tl.minimum(A, LARGEST, propagate_nan=ALL))


@triton.jit
def log_decay_of(x, rate, bound, RAW: tl.constexpr):
    """The log decay of a raw gate with its bias; ``rate`` is exp(A_log)."""
    if RAW == SOFTPLUS:
        g = -rate * softplus(x)
    elif RAW == BOUNDED:
        g = bound * sigmoid(rate * x)
    else:
        g = FASTEST * sigmoid(x)
    return g


@triton.jit
def gradients_of_gate(d, x, rate, bound, RAW: tl.constexpr):
    """From the gradient d of a log decay: those of its raw gate and of A_log. An infinite gate has none of A_log."""
    if RAW == SOFTPLUS:
        of_gate = -rate * d * sigmoid(x)
        of_rate = -rate * d * softplus(x)
    elif RAW == BOUNDED:
        of_rate = bound * d * sigmoid(rate * x) * sigmoid(-rate * x)
        of_gate = of_rate * rate
        of_rate = of_rate * rate * x
    else:
        of_gate = FASTEST * d * sigmoid(x) * sigmoid(-x)
        of_rate = of_gate * 0.0
    return of_gate, tl.where(tl.abs(x) == float("inf"), 0.0, of_rate)


@triton.jit
def channels_of(base, j, r, stride_t, stride_k, K: tl.constexpr, live):
    """A tile [BK,R] of tokens r, float32; 0 outside."""
    mask = (j < K)[:, None] & live[None, :]
    return tl.load(base + j[:, None] * stride_k + r[None, :] * stride_t, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_channels(base, x, j, r, stride_t, K: tl.constexpr, live):
    """Store a tile [BK,R] in the rows of a tensor whose channels are contiguous."""
    place = base + j[:, None] + r[None, :] * stride_t
    tl.store(place, x.to(base.dtype.element_ty), mask=(j < K)[:, None] & live[None, :])


@triton.jit
def gate_of(raw, A_log, dt_bias, h, j, r, raw_t, raw_k, A_log_h, dt_bias_h, dt_bias_k, live,
            K: tl.constexpr, GATE: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Raw gates with their bias, [BK,R] or [R], and exp(A_log)."""
    if GATE == CHANNEL:
        x = channels_of(raw, j, r, raw_t, raw_k, K, live)
        if BIAS:
            x += tl.load(dt_bias + h * dt_bias_h + j * dt_bias_k, mask=j < K, other=0.0).to(tl.float32)[:, None]
    else:
        x = tl.load(raw + r * raw_t, mask=live, other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(dt_bias + h * dt_bias_h).to(tl.float32)
    rate = 1.0
    if RAW != SIGMOID:
        rate = rate_of(tl.load(A_log + h * A_log_h))
    return x, rate


@triton.jit
def tokens_of_block(T, HEADS: tl.constexpr, R: tl.constexpr):
    """The head of a program, its batch row, its first token, the tokens of its block [R] and which of them exist; its block."""
    pid = tl.program_id(0)
    h = (pid % HEADS).to(tl.int64)
    block = pid // HEADS
    blocks = tl.cdiv(T, R)
    batch = (block // blocks).to(tl.int64)
    first = (block % blocks * R).to(tl.int64)
    r = tl.arange(0, R)
    return h, batch, first, r, r < T - first, block


@triton.jit(do_not_specialize=["T"])
def penstock_delta_raw_fwd(
    q, k, raw, beta, A_log, dt_bias, unit_q, unit_k, log_decay, strength, bound, T,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, raw_b, raw_t, raw_h, raw_k, beta_b, beta_t, beta_h, A_log_h, dt_bias_h, dt_bias_k,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, UNIT: tl.constexpr, LOGITS: tl.constexpr,
    RAW: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Normalised q and k, beta = LOGITS sigmoid(x) and log decays of raw inputs.

    Reads q, k [B,T,G,K], raw [B,T,H,K] or [B,T,H], beta [B,T,H], A_log [H] and dt_bias [H,K] or [H], all by strides. Writes ``unit_q`` and
    ``unit_k`` [B,T,G,K] if UNIT, ``strength`` [B,T,H] if LOGITS, ``log_decay`` (axes of raw) if RAW. Program (block of R tokens, head).
    """
    HEADS: tl.constexpr = G if G > H else H
    h, batch, first, r, live, _block = tokens_of_block(T, HEADS, R)
    j = tl.arange(0, BK)
    row = batch * T + first
    if UNIT:
        if h < G:
            x = channels_of(q + batch * q_b + first * q_t + h * q_h, j, r, q_t, q_k, K, live)
            store_channels(unit_q + (row * G + h) * K, x / root_of_squares(x)[None, :], j, r, G * K, K, live)
            x = channels_of(k + batch * k_b + first * k_t + h * k_h, j, r, k_t, k_k, K, live)
            store_channels(unit_k + (row * G + h) * K, x / root_of_squares(x)[None, :], j, r, G * K, K, live)
    if h < H:
        if LOGITS > 0:
            x = tl.load(beta + batch * beta_b + first * beta_t + h * beta_h + r * beta_t, mask=live, other=0.0).to(tl.float32)
            tl.store(strength + row * H + h + r * H, sigmoid(x) * LOGITS, mask=live)
        if RAW > 0:
            raw += batch * raw_b + first * raw_t + h * raw_h
            x, rate = gate_of(raw, A_log, dt_bias, h, j, r, raw_t, raw_k, A_log_h, dt_bias_h, dt_bias_k, live, K, GATE, RAW, BIAS)
            g = log_decay_of(x, rate, bound, RAW)
            if GATE == CHANNEL:
                store_channels(log_decay + (row * H + h) * K, g, j, r, H * K, K, live)
            else:
                tl.store(log_decay + row * H + h + r * H, g, mask=live)


@triton.jit
def store_gradient_of_unit(x, d, out, j, r, step, K: tl.constexpr, live):
    """Store the gradient of x from that of y = x / n, n the root of its squares: (d - y sum(y d)) / n."""
    n = root_of_squares(x)[None, :]
    y = x / n
    store_channels(out, (d - y * sum_of_rows(y * d)[None, :]) / n, j, r, step, K, live)


@triton.jit(do_not_specialize=["T"])
def penstock_delta_raw_bwd(
    q, k, raw, beta, A_log, dt_bias, d_unit_q, d_unit_k, d_log_decay, d_strength, dq, dk, draw, dbeta, rates, biases, bound, T,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, raw_b, raw_t, raw_h, raw_k, beta_b, beta_t, beta_h, A_log_h, dt_bias_h, dt_bias_k,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, UNIT: tl.constexpr, LOGITS: tl.constexpr,
    RAW: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """dx = (d - y sum(y d)) / |x| of q and k, dbeta = LOGITS d sigmoid(x) sigmoid(-x), and the gradients of raw gates.

    Reads what ``penstock_delta_raw_fwd`` reads, and the gradients of what it writes, which are contiguous. Writes ``dq``, ``dk``
    [B,T,G,K] if UNIT, ``dbeta`` [B,T,H] if LOGITS, ``draw`` (axes of raw) if RAW; of A_log and dt_bias the sums over the tokens of a
    block, ``rates`` [blocks,H] and ``biases`` [blocks,H,K] or [blocks,H]. Program (block of R tokens, head).
    """
    HEADS: tl.constexpr = G if G > H else H
    h, batch, first, r, live, block = tokens_of_block(T, HEADS, R)
    j = tl.arange(0, BK)
    row = batch * T + first
    if UNIT:
        if h < G:
            own = (row * G + h) * K
            x = channels_of(q + batch * q_b + first * q_t + h * q_h, j, r, q_t, q_k, K, live)
            d = channels_of(d_unit_q + own, j, r, G * K, 1, K, live)
            store_gradient_of_unit(x, d, dq + own, j, r, G * K, K, live)
            x = channels_of(k + batch * k_b + first * k_t + h * k_h, j, r, k_t, k_k, K, live)
            d = channels_of(d_unit_k + own, j, r, G * K, 1, K, live)
            store_gradient_of_unit(x, d, dk + own, j, r, G * K, K, live)
    if h < H:
        own = row * H + h + r * H
        if LOGITS > 0:
            x = tl.load(beta + batch * beta_b + first * beta_t + h * beta_h + r * beta_t, mask=live, other=0.0).to(tl.float32)
            d = tl.load(d_strength + own, mask=live, other=0.0).to(tl.float32) * LOGITS * sigmoid(x) * sigmoid(-x)
            tl.store(dbeta + own, d.to(dbeta.dtype.element_ty), mask=live)
        if RAW > 0:
            raw += batch * raw_b + first * raw_t + h * raw_h
            x, rate = gate_of(raw, A_log, dt_bias, h, j, r, raw_t, raw_k, A_log_h, dt_bias_h, dt_bias_k, live, K, GATE, RAW, BIAS)
            share = block.to(tl.int64) * H + h
            if GATE == CHANNEL:
                d = channels_of(d_log_decay + (row * H + h) * K, j, r, H * K, 1, K, live)
                of_gate, of_rate = gradients_of_gate(d, x, rate, bound, RAW)
                store_channels(draw + (row * H + h) * K, of_gate, j, r, H * K, K, live)
                of_rate = tl.sum(tl.where((j < K)[:, None] & live[None, :], of_rate, 0.0), 0)
                if BIAS:
                    of_bias = tl.sum(tl.where(live[None, :], of_gate, 0.0), 1)
                    tl.store(biases + share * K + j, of_bias, mask=j < K)
            else:
                d = tl.load(d_log_decay + own, mask=live, other=0.0).to(tl.float32)
                of_gate, of_rate = gradients_of_gate(d, x, rate, bound, RAW)
                tl.store(draw + own, of_gate.to(draw.dtype.element_ty), mask=live)
                of_rate = tl.where(live, of_rate, 0.0)
                if BIAS:
                    tl.store(biases + share, tl.sum(tl.where(live, of_gate, 0.0), 0))
            if RAW != SIGMOID:
                A = tl.load(A_log + h * A_log_h)
                tl.store(rates + share, tl.where((A < SMALLEST) | (A > LARGEST), 0.0, tl.sum(of_rate, 0)))


@triton.jit(do_not_specialize=["blocks"])
def penstock_delta_raw_sums(
    rates, biases, dA_log, ddt_bias, blocks,
    H: tl.constexpr, K: tl.constexpr, BJ: tl.constexpr, R: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """dA_log = sum of rates, ddt_bias = sum of biases, over the blocks of tokens in one order.

    Reads ``rates`` [blocks,H] and ``biases`` [blocks,H,K], writes dA_log [H] and ddt_bias [H,K]. K is 1 for a bias of a head.
    Program (head, block of BJ channels).
    """
    NJ: tl.constexpr = (K + BJ - 1) // BJ
    h = tl.program_id(0) // NJ
    j = tl.program_id(0) % NJ * BJ + tl.arange(0, BJ)
    r = tl.arange(0, R)
    of_rate = tl.zeros((R,), tl.float32)
    of_bias = tl.zeros((R, BJ), tl.float32)
    for first in tl.range(0, blocks, R):
        share = (first + r).to(tl.int64) * H + h
        live = first + r < blocks
        of_rate += tl.load(rates + share, mask=live, other=0.0)
        if BIAS:
            of_bias += tl.load(biases + share[:, None] * K + j[None, :], mask=live[:, None] & (j < K)[None, :], other=0.0)
    if BIAS:
        tl.store(ddt_bias + h * K + j, tl.sum(of_bias, 0).to(ddt_bias.dtype.element_ty), mask=j < K)
    if tl.program_id(0) % NJ == 0:
        tl.store(dA_log + h, tl.sum(of_rate, 0).to(dA_log.dtype.element_ty))
