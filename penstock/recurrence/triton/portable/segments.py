"""States between chunks: for parallelism over segments of a sequence, and for kernels that need the state before each chunk.

Forward in time a state is a sum of k_t^T v_t. Backward in time it is a sum of (scale q_t)^T dO_t: the gradient of a state.

- ``penstock_segment_sums`` computes the sums of all segments in parallel, each from zero. The transition is diagonal, so a segment
  multiplies the state by a factor per channel and adds its sum: ``penstock_segment_scan`` computes the states between segments. If segments
  are single chunks, these are the states before all chunks.
- ``penstock_chunk_states`` walks over the chunks of sequences, or of segments whose first states are known.

Operands of the products are inputs, or inputs times factors of at most 1, so float16 inputs can be multiplied in float16 ("f16").
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from ....gpu.decays import CHANNEL, FLOOR, NONE, SCALAR, decays
from ....gpu.tiles import LN2, LOG2E, product, slot_of, tile, tokens_of, uniform
from .tiles import constant_decay, scalar_sums, sums


@triton.jit
def chunk_operands(
    x, y, g, constant, lower, step, t, tokens, i, dk, dv, x_t, x_k, y_t, y_v, g_t, g_k,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, STATIC: tl.constexpr,
    ADJOINT: tl.constexpr, PREVIOUS: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The tiles of the chunk that begins after t of ``tokens`` tokens: X [C,BK] and Y [C,BV]; and its decays in log2 units.

    These are the decays between each token and the state after the chunk (ADJOINT: before it), [C,BK] or [C], and those of the whole
    chunk, [BK] or a scalar; 0 without decays.
    """
    at = tl.zeros((), tl.int64) + t * step
    live = t + i < tokens
    X = tile(x + at * x_t, i * step, live, x_t, dk, x_k, K, BK)
    Y = tile(y + at * y_t, i * step, live, y_t, dv, y_v, V, BV)
    if DECAY == NONE:
        between = 0.0
        total = 0.0
    elif DECAY == SCALAR:
        _, read, rest, total = scalar_sums(g + at * g_t, constant, step, tl.minimum(tokens - t, C), i, g_t, C, STATIC, LIMIT)
        between = read if ADJOINT else rest
    elif ADJOINT and not PREVIOUS:
        d = decays(g + at * g_t, i * step, live, g_t, dk, g_k, K, BK)
        total = tl.sum(d, 0)
        between = sums(d, lower, PRECISION)
    elif ADJOINT:
        d = decays(g + (at - step) * g_t, i * step, live & (i > 0), g_t, dk, g_k, K, BK)
        edge = tl.minimum(C, tokens - t) - 1
        latest = tl.load(g + (at + edge * step) * g_t + dk * g_k, mask=dk < K, other=0.0).to(tl.float32)
        total = tl.sum(d, 0) + tl.maximum(latest * LOG2E, FLOOR)
        between = sums(d, lower, PRECISION)
    else:
        later = live & (t + i + 1 < tokens) & (i < C - 1)
        d = decays(g + (at + step) * g_t, i * step, later, g_t, dk, g_k, K, BK)
        edge = tl.load(g + at * g_t + dk * g_k, mask=dk < K, other=0.0).to(tl.float32)
        total = tl.sum(d, 0) + tl.maximum(edge * LOG2E, FLOOR)
        between = sums(d, lower, PRECISION, REVERSE=True)
    return X, Y, between, total


@triton.jit
def next_state(S, X, Y, between, total, scale, DECAY: tl.constexpr, ADJOINT: tl.constexpr, PRECISION: tl.constexpr):
    """The state after a chunk (ADJOINT: its gradient before it), from the state S [BK,BV] on its other side."""
    if DECAY == NONE:
        made = product(tl.trans(X), Y, PRECISION)
    elif DECAY == SCALAR:
        made = product(tl.trans(X), Y * tl.exp2(between)[:, None], PRECISION)
        S *= tl.exp2(total)
    else:
        made = product(tl.trans(X.to(tl.float32) * tl.exp2(between)), Y, PRECISION)
        S *= tl.exp2(total)[:, None]
    if ADJOINT:
        made *= scale
    return S + made


@triton.jit
def triangle(i, DECAY: tl.constexpr):
    """The ones [C,C] of ``sums`` for decays per channel."""
    if DECAY == CHANNEL:
        lower = (i[:, None] >= i[None, :]).to(tl.bfloat16)  # with 2 warps, products read it from registers
    else:
        lower = 0.0
    return lower


@triton.jit
def store_in_rows(S, states, upper, token, h, H, dk, dv, inside, V: tl.constexpr, C: tl.constexpr, IN_ROWS: tl.constexpr):
    """Store a state in the rows of its chunk, whose first is ``token``: C channels in ``states``, the others in ``upper``."""
    place = ((token + dk % C) * H + h)[:, None] * V + dv[None, :]
    tl.store(states + place, S.to(states.dtype.element_ty), mask=inside & (dk < C)[:, None])
    if IN_ROWS > 1:
        tl.store(upper + place, S.to(upper.dtype.element_ty), mask=inside & (dk >= C)[:, None])


@triton.jit(do_not_specialize=["N", "T", "L"])
def penstock_segment_sums(
    x, y, g, segment_sums, segment_decays, cu_seqlens, scale, N, T, L, H,
    x_b, x_t, x_h, x_k, y_b, y_t, y_h, y_v, g_b, g_t, g_h, g_k,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, STATIC: tl.constexpr,
    ADJOINT: tl.constexpr, PREVIOUS: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    LIMIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """sum_n = sum_t (x_t o exp(decays after t))^T y_t and decay_n = sum_t g_t over the tokens t of segment n.

    Reads x, g [B,T,H,K] and y [B,T,H,V] by strides. Writes ``segment_sums`` [slots,H,K,V] and ``segment_decays`` [slots,H,K], log2. Program
    (segment of L tokens, head, block of K, block of V).

    The sum is the state after the segment, if that before it is zero. ADJOINT: time runs backward, x is q, y is dO.
    """
    tl.static_assert(DECAY == CHANNEL or not PREVIOUS, "the previous state is read with decays per channel only")
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    vb = pid % NV
    kb = pid // NV % NK
    h = (pid // (NV * NK) % H).to(tl.int64)
    slot = pid // (NV * NK) // H
    _, b, row, step, _, _, tokens = tokens_of(slot, cu_seqlens, N, T, L, True, PACKED, REVERSE)
    if tokens <= 0:
        return

    i = tl.arange(0, C)
    dk = kb * BK + tl.arange(0, BK)
    dv = vb * BV + tl.arange(0, BV)
    x += b * x_b + row * x_t + h * x_h
    y += b * y_b + row * y_t + h * y_h
    g += b * g_b + row * g_t + h * g_h
    lower = triangle(i, DECAY)
    constant = 0.0
    if DECAY == SCALAR and STATIC:
        constant = constant_decay(g)
    S = tl.zeros((BK, BV), tl.float32)
    D = tl.zeros((BK,), tl.float32) if DECAY == CHANNEL else tl.zeros((), tl.float32)
    chunks = tl.cdiv(tokens, C)
    for c in tl.range(0, chunks, num_stages=STAGES):
        chunk = c
        if ADJOINT:
            chunk = chunks - 1 - c
        X, Y, between, total = chunk_operands(
            x, y, g, constant, lower, step, chunk * C, tokens, i, dk, dv, x_t, x_k, y_t, y_v, g_t, g_k,
            K, V, BK, BV, C, DECAY, STATIC, ADJOINT, PREVIOUS, PRECISION, LIMIT,
        )  # fmt: skip
        S = next_state(S, X, Y, between, total, scale, DECAY, ADJOINT, PRECISION)
        D += total
    place = (slot.to(tl.int64) * H + h) * K + dk
    tl.store(segment_sums + place[:, None] * V + dv[None, :], S, mask=(dk < K)[:, None] & (dv < V)[None, :])
    if DECAY != NONE and vb == 0:
        tl.store(segment_decays + place, tl.zeros((BK,), tl.float32) + D, mask=dk < K)


@triton.jit(do_not_specialize=["N", "T", "L"])
def penstock_segment_scan(
    segment_sums, segment_decays, first, states, upper, last_states, last, cu_seqlens, N, T, L, H, s_n, s_h, s_k, s_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, EACH: tl.constexpr, AT_ONCE: tl.constexpr,
    DECAY: tl.constexpr, ADJOINT: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, PACKED: tl.constexpr,
    IN_ROWS: tl.constexpr, EARLY: tl.constexpr, SUMMARY: tl.constexpr,
):  # fmt: skip
    """S_{n+1} = 2^(decay_n) o S_n + sum_n over segments n of L tokens.

    Reads ``segment_sums`` [slots,H,K,V] and ``segment_decays`` [slots,H,K]. Writes ``states`` [slots of L * EACH tokens,H,K,V], those
    before every EACH segments. Program (sequence, head, block of K, block of V): segment by segment.

    It starts from ``first`` [N,H,K,V] if INITIAL, else from zero, and stores ``last`` [N,H,K,V] if FINAL. ADJOINT: from the last segment to
    the first, so states are gradients of states after segments. ``states`` may be ``segment_sums`` if EACH is 1. The sums of AT_ONCE
    segments are loaded before the first of them is used.

    IN_ROWS: as in ``penstock_chunk_states``; segments are chunks of C tokens. EARLY: this launch and the next one may begin early.
    SUMMARY: ``states`` [N,H,K] gets the sum of all log decays, natural logarithm; no states are stored but ``last``.
    """
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    dv = pid % NV * BV + tl.arange(0, BV)
    dk = pid // NV % NK * BK + tl.arange(0, BK)
    h = (pid // (NV * NK) % H).to(tl.int64)
    n, b, row, _, begin, _, tokens = tokens_of(pid // (NV * NK) // H, cu_seqlens, N, T, L, False, PACKED, False)
    owner = n.to(tl.int64) * H + h
    from_slot = slot_of(n, begin, 0, T, L, PACKED).to(tl.int64)
    to_slot = slot_of(n, begin, 0, T, L * EACH, PACKED).to(tl.int64)
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    if INITIAL:
        S = tl.load(first + n.to(tl.int64) * s_n + h * s_h + dk[:, None] * s_k + dv[None, :] * s_v, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    if IN_ROWS > 0:
        shorter = last_states + (owner * K + dk[:, None]) * V + dv[None, :]
        tl.store(shorter, S.to(last_states.dtype.element_ty), mask=inside & uniform(tokens % C > 0))
    count = tl.cdiv(tokens, L)
    D = tl.zeros((BK,), tl.float32)
    for done in tl.range(0, count, AT_ONCE):
        made = ()
        decay = ()
        for one in tl.static_range(AT_ONCE):
            s = done + one
            there = uniform(s < count)
            if ADJOINT:
                s = count - 1 - s
            place = ((from_slot + s) * H + h) * K + dk
            made = made + (tl.load(segment_sums + place[:, None] * V + dv[None, :], mask=inside & there, other=0.0),)
            if DECAY != NONE:
                decay = decay + (tl.load(segment_decays + place, mask=(dk < K) & there, other=0.0),)
        for one in tl.static_range(AT_ONCE):
            s = done + one
            wanted = uniform(s < count)
            if ADJOINT:
                s = count - 1 - s
                wanted = wanted & ((s % EACH == EACH - 1) | (s == count - 1))
            else:
                wanted = wanted & (s % EACH == 0)
            if IN_ROWS > 0:
                whole = inside & wanted & uniform(tokens - s * C >= C)
                store_in_rows(S, states, upper, b * T + row + s * C, h, H, dk, dv, whole, V, C, IN_ROWS)
            elif not SUMMARY:
                place = ((to_slot + s // EACH) * H + h) * K + dk
                tl.store(states + place[:, None] * V + dv[None, :], S.to(states.dtype.element_ty), mask=inside & wanted)
            if DECAY != NONE:
                S *= tl.exp2(decay[one])[:, None]
                D += decay[one]
            S += made[one]
    if SUMMARY:
        tl.store(states + owner * K + dk, D * LN2, mask=(dk < K) & uniform(pid % NV == 0))
    if FINAL:
        tl.store(last + (owner * K + dk[:, None]) * V + dv[None, :], S.to(last.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "T", "L"])
def penstock_chunk_states(
    x, y, g, first, chunk_states, upper, last_states, last, cu_seqlens, scale, N, T, L, H,
    x_b, x_t, x_h, x_k, y_b, y_t, y_h, y_v, g_b, g_t, g_h, g_k, s_n, s_h, s_k, s_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, STATIC: tl.constexpr, ADJOINT: tl.constexpr, PREVIOUS: tl.constexpr, SEGMENTS: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, PACKED: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr, STAGES: tl.constexpr, IN_ROWS: tl.constexpr,
):  # fmt: skip
    """S <- 2^G o S + sum_t (x_t o 2^(R_t))^T y_t over the tokens t of a chunk, G all decays of the chunk and R_t those after t.

    Reads x, g [B,T,H,K] and y [B,T,H,V] by strides. Writes the state before each chunk to ``chunk_states`` [slots,H,K,V]. Program
    (sequence, head, block of K, block of V): chunk by chunk. SEGMENTS: (segment of L tokens, ...), and ``first`` is per segment.

    It starts from ``first`` [N,H,K,V] if INITIAL, else from zero, and stores the final state in ``last`` [N,H,K,V] if FINAL. ADJOINT: time
    runs backward, x is q, y is dO, and the states are gradients of states.

    IN_ROWS > 0, only ADJOINT: K is IN_ROWS * C, and the states of whole chunks are in the rows of their tokens: the first C channels in
    ``chunk_states`` [B,T,H,V], the others in ``upper``, which is like it. The state of a shorter chunk, the last of its sequence, is in
    ``last_states`` [N,H,K,V].
    """
    tl.static_assert(DECAY == CHANNEL or not PREVIOUS, "the previous state is read with decays per channel only")
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    vb = pid % NV
    kb = pid // NV % NK
    h = (pid // (NV * NK) % H).to(tl.int64)
    slot = pid // (NV * NK) // H
    n, b, row, step, begin, done, tokens = tokens_of(slot, cu_seqlens, N, T, L, SEGMENTS, PACKED, REVERSE)
    if tokens <= 0 and (done > 0 or SEGMENTS):
        return
    first_chunk = slot_of(n, begin, done, T, C, PACKED)

    i = tl.arange(0, C)
    dk = kb * BK + tl.arange(0, BK)
    dv = vb * BV + tl.arange(0, BV)
    x += b * x_b + row * x_t + h * x_h
    y += b * y_b + row * y_t + h * y_h
    g += b * g_b + row * g_t + h * g_h
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    owner = slot.to(tl.int64)
    if INITIAL:
        S = tl.load(first + owner * s_n + h * s_h + dk[:, None] * s_k + dv[None, :] * s_v, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    lower = triangle(i, DECAY)
    constant = 0.0
    if DECAY == SCALAR and STATIC:
        constant = constant_decay(g)
    chunks = tl.cdiv(tokens, C)
    if IN_ROWS > 0:
        shorter = last_states + ((n.to(tl.int64) * H + h) * K + dk[:, None]) * V + dv[None, :]
        tl.store(shorter, S.to(last_states.dtype.element_ty), mask=inside & uniform(tokens % C > 0))
    for c in tl.range(0, chunks, num_stages=STAGES):
        chunk = c
        if ADJOINT:
            chunk = chunks - 1 - c
        t = chunk * C
        if IN_ROWS > 0:
            store_in_rows(S, chunk_states, upper, b * T + row + t, h, H, dk, dv, inside & uniform(tokens - t >= C), V, C, IN_ROWS)
        else:
            place = (first_chunk + chunk) * H + h
            tl.store(chunk_states + (place * K + dk[:, None]) * V + dv[None, :], S.to(chunk_states.dtype.element_ty), mask=inside)
        X, Y, between, total = chunk_operands(
            x, y, g, constant, lower, step, t, tokens, i, dk, dv, x_t, x_k, y_t, y_v, g_t, g_k,
            K, V, BK, BV, C, DECAY, STATIC, ADJOINT, PREVIOUS, PRECISION, LIMIT,
        )  # fmt: skip
        S = next_state(S, X, Y, between, total, scale, DECAY, ADJOINT, PRECISION)
    if FINAL:
        place = last + ((owner * H + h) * K + dk[:, None]) * V + dv[None, :]
        tl.store(place, S.to(last.dtype.element_ty), mask=inside)


@triton.jit
def chunk_state(chunk_states, j, y, K: tl.constexpr, V: tl.constexpr):
    """A block [BK,BV] of a chunk's state [K,V], loaded from ``chunk_states``."""
    return tl.load(chunk_states + j[:, None] * V + y[None, :], mask=(j < K)[:, None] & (y < V)[None, :], other=0.0)
