"""Softmax attention forward, by online softmax on tensor cores.

Scores are in log2 units, s = scale log2(e) q k^T. A program has BM queries and loops over their visible keys with the running maximum m,
the running denominator l, and the unnormalised output acc::

    m' = max(m, rowmax(s))    p = 2^(s - m')    l' = 2^(m - m') l + rowsum(p)    acc' = 2^(m - m') acc + p v

and divides once at the end. Only tiles on the border of the mask are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.tiles import LOG2E, tile
from .tiles import dot, keys_of, place_of, sees, tokens


@triton.jit
def walk(
    state, Q, k, v, low, high, place, c, window, Tk, k_t, k_d, v_t, v_d,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A part of the forward loop over keys."""
    m, l, acc = state
    d = tl.arange(0, BD)
    zero = tl.zeros((), tl.int64)
    for at in tl.range(low, high, BN, num_stages=STAGES):
        j = at + tl.arange(0, BN)
        K = tokens(k + (zero + at) * k_t, tl.arange(0, BN), j < Tk, k_t, d, k_d, D, BD, MASKED)
        s = dot(Q, tl.trans(K), tl.zeros((Q.shape[0], BN), tl.float32), PRECISION) * c
        if MASKED:
            s = tl.where((j < Tk)[None, :] & sees(place[:, None], j[None, :], window, CAUSAL, WINDOW), s, float("-inf"))
        highest = tl.maximum(m, tl.max(s, 1))
        base = highest
        if MASKED:
            base = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(s - base[:, None])
        rest = tl.exp2(m - base)
        V = tokens(v + (zero + at) * v_t, tl.arange(0, BN), j < Tk, v_t, d, v_d, D, BD, MASKED)
        acc = dot(p.to(V.dtype), V, acc * rest[:, None], PRECISION)
        l = l * rest + tl.sum(p, 1)
        m = highest
    return m, l, acc


@triton.jit(do_not_specialize=["N", "Tq", "Tk"])
def penstock_attention_fwd(
    q, k, v, output, lse, cu_seqlens, cu_seqlens_k, scale, window, N, Tq, Tk,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """o = softmax(scale q k^T) v, lse = log(sum(exp(scale q k^T))).

    Reads q [B,Tq,H,D], k, v [B,Tk,G,D] by strides. Writes output [B,Tq,H,D] and lse [B,Tq,H]. Program (head, span of BM queries): block by
    block of BN keys; the longest loops start first.
    """
    slots = tl.num_programs(0) // H
    pid = tl.program_id(0)
    h = (pid // slots).to(tl.int64)
    slot = slots - 1 - pid % slots
    b, begin, done, queries, first, keys = place_of(slot, cu_seqlens, cu_seqlens_k, N, Tq, Tk, BM, PACKED)
    if done >= queries:
        return
    d = tl.arange(0, BD)
    i = tl.arange(0, BM)
    live = done + i < queries
    row = begin + done
    q += b * q_b + row * q_t + h * q_h
    k += b * k_b + first * k_t + h // (H // G) * k_h
    v += b * v_b + first * v_t + h // (H // G) * v_h
    start = done + keys - queries
    place = start + i
    c = scale * LOG2E
    Q = tile(q, i, live, q_t, d, q_d, D, BD)
    state = (tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM, BD), tl.float32))
    ends = keys_of(start, BM, keys, window, BN, CAUSAL, WINDOW)
    for part in tl.static_range(0 if WINDOW else 1, 3):
        state = walk(
            state, Q, k, v, ends[part], ends[part + 1], place, c, window, keys, k_t, k_d, v_t, v_d,
            D, BD, BN, CAUSAL, WINDOW, part != 1, PRECISION, STAGES,
        )  # fmt: skip
    m, l, acc = state
    none = l == 0.0
    l = tl.where(none, 1.0, l)
    acc = acc / l[:, None]
    where = (b * Tq + row + i) * H + h
    tl.store(lse + where, tl.where(none, float("-inf"), (m + tl.log2(l)) / LOG2E), mask=live)
    tl.store(output + where[:, None] * D + d[None, :], acc.to(output.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
