"""States between chunks: for parallelism over segments of a sequence, and for kernels that need the state before each chunk.

``penstock_chunk_states`` processes sequences, or segments of L tokens in parallel. Forward in time it sums k_t^T v_t: states. Backward
in time it sums (scale q_t)^T dO_t: gradients of states. Segments start from zero. Then ``penstock_segment_scan`` computes the state
before each segment: the transition is diagonal, so a segment multiplies the state by a factor per channel and adds a sum. If the states
before all chunks are needed, the segments are processed again from these states.

Operands of the products are inputs, or inputs times factors of at most 1, so float16 inputs can be multiplied in float16 ("f16").
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.tiles import LOG2E, product, slot_of, tile, tokens_of
from .tiles import CHANNEL, FLOOR, NONE, SCALAR, constant_decay, decays, scalar_sums, sums


@triton.jit(do_not_specialize=["N", "T", "L"])
def penstock_chunk_states(
    x, y, g, first, chunk_states, behind, last_states, last, segment_decays, cu_seqlens, scale, N, T, L, H,
    x_b, x_t, x_h, x_k, y_b, y_t, y_h, y_v, g_b, g_t, g_h, g_k, s_n, s_h, s_k, s_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, STATIC: tl.constexpr, ADJOINT: tl.constexpr, PREVIOUS: tl.constexpr, SEGMENTS: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, CHUNKS: tl.constexpr, PACKED: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr, STAGES: tl.constexpr, IN_ROWS: tl.constexpr,
):  # fmt: skip
    """Program (segment, head, block of K, block of V).

    It starts from ``first`` if INITIAL, else from zero. It stores the state before each chunk in ``chunk_states`` [chunk slots,H,K,V]
    (if CHUNKS) and the final state in ``last`` (if FINAL). If SEGMENTS, ``first`` and ``last`` are per segment, and FINAL also stores
    ``segment_decays`` [slots,H,K], log2; else segments are whole sequences. ADJOINT: time runs backward, x is q, y is dO, and the
    states are gradients of states.

    IN_ROWS > 0, only ADJOINT: K is IN_ROWS * C, and the states of whole chunks are in the rows of their tokens: the first C channels in
    ``chunk_states`` [B,T,H,V], the others in ``behind``, which is like it. The state of a shorter chunk, the last of its sequence, is in
    ``last_states`` [N,H,K,V].
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    vb = pid % NV
    kb = pid // NV % NK
    h = (pid // (NV * NK) % H).to(tl.int64)
    slot = pid // (NV * NK) // H
    n, b, row, step, begin, done, tokens = tokens_of(slot, cu_seqlens, N, T, L, True, PACKED, REVERSE)
    if tokens <= 0 and (done > 0 or SEGMENTS):
        return
    first_chunk = slot_of(n, begin, done, T, C, PACKED)
    slot = slot.to(tl.int64)

    zero = tl.zeros((), tl.int64)
    i = tl.arange(0, C)
    dk = kb * BK + tl.arange(0, BK)
    dv = vb * BV + tl.arange(0, BV)
    x += b * x_b + row * x_t + h * x_h
    y += b * y_b + row * y_t + h * y_h
    g += b * g_b + row * g_t + h * g_h
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    owner = slot if SEGMENTS else n.to(tl.int64)
    if INITIAL:
        S = tl.load(first + owner * s_n + h * s_h + dk[:, None] * s_k + dv[None, :] * s_v, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    D = tl.zeros((BK,), tl.float32)
    if DECAY == CHANNEL:
        lower = (i[:, None] >= i[None, :]).to(tl.bfloat16)  # with 2 warps, products read it from registers
    constant = 0.0
    if DECAY == SCALAR and STATIC:
        constant = constant_decay(g)
    chunks = tl.cdiv(tokens, C)
    if CHUNKS and IN_ROWS > 0:
        shorter = last_states + ((n.to(tl.int64) * H + h) * K + dk[:, None]) * V + dv[None, :]
        tl.store(shorter, S.to(last_states.dtype.element_ty), mask=inside & (tokens % C > 0))
    for c in tl.range(0, chunks, num_stages=STAGES):
        chunk = c
        if ADJOINT:
            chunk = chunks - 1 - c
        t = chunk * C
        at = zero + t * step
        live = t + i < tokens
        if CHUNKS and IN_ROWS > 0:
            place = ((b * T + row + t + dk % C) * H + h)[:, None] * V + dv[None, :]
            whole = inside & (tokens - t >= C)
            tl.store(chunk_states + place, S.to(chunk_states.dtype.element_ty), mask=whole & (dk < C)[:, None])
            if IN_ROWS > 1:
                tl.store(behind + place, S.to(behind.dtype.element_ty), mask=whole & (dk >= C)[:, None])
        elif CHUNKS:
            place = (first_chunk + chunk) * H + h
            tl.store(chunk_states + (place * K + dk[:, None]) * V + dv[None, :], S.to(chunk_states.dtype.element_ty), mask=inside)
        X = tile(x + at * x_t, i * step, live, x_t, dk, x_k, K, BK)
        Y = tile(y + at * y_t, i * step, live, y_t, dv, y_v, V, BV)
        if DECAY == NONE:
            made = product(tl.trans(X), Y, PRECISION)
        elif DECAY == SCALAR:
            _, read, rest, total = scalar_sums(g + at * g_t, constant, step, tl.minimum(tokens - t, C), i, g_t, C, STATIC, LIMIT)
            factor = read if ADJOINT else rest
            made = product(tl.trans(X), Y * tl.exp2(factor)[:, None], PRECISION)
            S *= tl.exp2(total)
            D += total
        else:
            if ADJOINT and not PREVIOUS:
                d = decays(g + at * g_t, i * step, live, g_t, dk, g_k, K, BK)
                total = tl.sum(d, 0)
                factor = sums(d, lower, PRECISION)
            elif ADJOINT:
                d = decays(g + (at - step) * g_t, i * step, live & (i > 0), g_t, dk, g_k, K, BK)
                edge = tl.minimum(C, tokens - t) - 1
                latest = tl.load(g + (at + edge * step) * g_t + dk * g_k, mask=dk < K, other=0.0).to(tl.float32)
                total = tl.sum(d, 0) + tl.maximum(latest * LOG2E, FLOOR)
                factor = sums(d, lower, PRECISION)
            else:
                later = live & (t + i + 1 < tokens) & (i < C - 1)
                d = decays(g + (at + step) * g_t, i * step, later, g_t, dk, g_k, K, BK)
                edge = tl.load(g + at * g_t + dk * g_k, mask=dk < K, other=0.0).to(tl.float32)
                total = tl.sum(d, 0) + tl.maximum(edge * LOG2E, FLOOR)
                factor = sums(d, lower, PRECISION, REVERSE=True)
            made = product(tl.trans(X.to(tl.float32) * tl.exp2(factor)), Y, PRECISION)
            S *= tl.exp2(total)[:, None]
            D += total
        if ADJOINT:
            made *= scale
        S += made
    if FINAL:
        place = last + ((owner * H + h) * K + dk[:, None]) * V + dv[None, :]
        tl.store(place, S.to(last.dtype.element_ty), mask=inside)
        if DECAY != NONE and SEGMENTS and vb == 0:
            tl.store(segment_decays + (slot * H + h) * K + dk, D, mask=dk < K)


@triton.jit(do_not_specialize=["N", "T", "L"])
def penstock_segment_scan(
    segment_states, segment_decays, initial_state, final_state, cu_seqlens, N, T, L, H, s_n, s_h, s_k, s_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, ADJOINT: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, block of K, block of V): replaces each segment's sum by the state before the segment.

    ADJOINT: from the last segment to the first; ``initial_state`` is the gradient of the final state, ``final_state`` that of the initial.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    dv = pid % NV * BV + tl.arange(0, BV)
    dk = pid // NV % NK * BK + tl.arange(0, BK)
    h = (pid // (NV * NK) % H).to(tl.int64)
    n = (pid // (NV * NK) // H).to(tl.int64)
    begin = tl.zeros((), tl.int64)
    length = begin + T
    if PACKED:
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        length = tl.load(cu_seqlens + n + 1).to(tl.int64) - begin
    first = slot_of(n, begin, 0, T, L, PACKED)
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    if INITIAL:
        S = tl.load(initial_state + n * s_n + h * s_h + dk[:, None] * s_k + dv[None, :] * s_v, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    count = tl.cdiv(length, L).to(tl.int32)
    for s in tl.range(0, count):
        slot = first + s
        if ADJOINT:
            slot = first + count - 1 - s
        place = segment_states + ((slot * H + h) * K + dk[:, None]) * V + dv[None, :]
        made = tl.load(place, mask=inside, other=0.0)
        tl.store(place, S, mask=inside)
        if DECAY != NONE:
            S *= tl.exp2(tl.load(segment_decays + (slot * H + h) * K + dk, mask=dk < K, other=0.0))[:, None]
        S += made
    if FINAL:
        tl.store(final_state + ((n * H + h) * K + dk[:, None]) * V + dv[None, :], S.to(final_state.dtype.element_ty), mask=inside)


@triton.jit
def chunk_state(chunk_states, j, y, K: tl.constexpr, V: tl.constexpr):
    """A block [BK,BV] of a chunk's state [K,V], loaded from ``chunk_states``."""
    return tl.load(chunk_states + j[:, None] * V + y[None, :], mask=(j < K)[:, None] & (y < V)[None, :], other=0.0)
