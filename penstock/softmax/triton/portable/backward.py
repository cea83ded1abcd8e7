"""Softmax attention backward, on tensor cores, from the log-sum-exp of the forward pass.

p is recomputed. With delta = rowsum(dO o O) - d lse::

    dv = p^T dO    ds = p o (dO v^T - delta)    dq = scale ds k    dk = scale ds^T q

in two kernels without atomics: one program per block of keys, and one per block of queries. Only tiles on the border of the mask are
masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.tiles import LOG2E, tile
from .tiles import dot, exponents, keys_of, place_of, queries_of, sees, tokens


@triton.jit(do_not_specialize=["rows", "T"])
def penstock_attention_delta(
    output, d_output, lse, d_lse, delta, rows, T, o_b, o_t, o_h, o_d, l_b, l_t, l_h,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, D_LSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO o O) - d lse, 0 for queries without keys.

    Reads output, d_output [B,T,H,D], lse, d_lse [B,T,H]; strides are those of the gradients. Writes delta [B,T,H]. A program has BM of the
    rows [B T H].
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    live = row < rows
    d = tl.arange(0, BD)
    mask = live[:, None] & (d < D)[None, :]
    b = row // H // T
    t = row // H % T
    h = row % H
    O = tl.load(output + row[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    dO = tl.load(d_output + (b * o_b + t * o_t + h * o_h)[:, None] + d[None, :] * o_d, mask=mask, other=0.0).to(tl.float32)
    x = tl.sum(O * dO, 1)
    if D_LSE:
        x -= tl.load(d_lse + b * l_b + t * l_t + h * l_h, mask=live, other=0.0).to(tl.float32)
        x = tl.where(tl.load(lse + row, mask=live, other=0.0) == float("-inf"), 0.0, x)  # the gradient may be NaN
    tl.store(delta + row, x, mask=live)


@triton.jit
def walk_queries(
    state, K, V, q, d_output, lse, delta, low, high, start, j, c, window, queries, q_t, q_d, o_t, o_d,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A part of the loop over queries, in the kernel by keys."""
    dk, dv = state
    d = tl.arange(0, BD)
    zero = tl.zeros((), tl.int64)
    for at in tl.range(low, high, BM, num_stages=STAGES):
        i = at + tl.arange(0, BM)
        live = i < queries
        Q = tokens(q + (zero + at) * q_t, tl.arange(0, BM), live, q_t, d, q_d, D, BD, MASKED)
        dO = tokens(d_output + (zero + at) * o_t, tl.arange(0, BM), live, o_t, d, o_d, D, BD, MASKED)
        e = exponents(lse, (zero + i) * H, live, MASKED)
        s = dot(K, tl.trans(Q), tl.zeros((K.shape[0], BM), tl.float32), PRECISION) * c
        s -= e[None, :]
        if MASKED:
            s = tl.where(sees(start + i[None, :], j[:, None], window, CAUSAL, WINDOW), s, float("-inf"))
        p = tl.exp2(s)
        dv = dot(p.to(dO.dtype), dO, dv, PRECISION)
        dp = dot(V, tl.trans(dO), tl.zeros((K.shape[0], BM), tl.float32), PRECISION)
        if MASKED:
            x = tl.load(delta + (zero + i) * H, mask=live, other=0.0)
        else:
            x = tl.load(delta + (zero + i) * H)
        ds = p * (dp - x[None, :])
        dk = dot(ds.to(Q.dtype), Q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["N", "Tq", "Tk"])
def penstock_attention_bwd_dkdv(
    q, k, v, d_output, lse, delta, dk, dv, cu_seqlens, cu_seqlens_k, scale, window, N, Tq, Tk,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, o_b, o_t, o_h, o_d,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dv = p^T dO, dk = scale ds^T q, ds = p o (dO v^T - delta), p = exp(scale q k^T - lse).

    Reads q, dO [B,Tq,H,D], k, v [B,Tk,G,D] by strides, lse [B,Tq,H] and delta. Writes dk, dv [B,Tk,G,D]. Program (head of keys, span of BN
    keys), for all heads of queries of this head.
    """
    slots = tl.num_programs(0) // G
    pid = tl.program_id(0)
    head = (pid // slots).to(tl.int64)
    slot = pid % slots
    b, begin, done, keys, first, queries = place_of(slot, cu_seqlens_k, cu_seqlens, N, Tk, Tq, BN, PACKED)
    if done >= keys:
        return
    d = tl.arange(0, BD)
    n = tl.arange(0, BN)
    live = done + n < keys
    row = begin + done
    K = tile(k + b * k_b + row * k_t + head * k_h, n, live, k_t, d, k_d, D, BD)
    V = tile(v + b * v_b + row * v_t + head * v_h, n, live, v_t, d, v_d, D, BD)
    start = keys - queries
    j = done + n
    c = scale * LOG2E
    state = (tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BD), tl.float32))
    ends = queries_of(done, BN, start, queries, window, BM, CAUSAL, WINDOW)
    for one in range(H // G):
        h = head * (H // G) + one
        q_ = q + b * q_b + first * q_t + h * q_h
        o_ = d_output + b * o_b + first * o_t + h * o_h
        lse_ = lse + (b * Tq + first) * H + h
        delta_ = delta + (b * Tq + first) * H + h
        for part in tl.static_range(0 if CAUSAL or WINDOW else 1, 3):
            state = walk_queries(
                state, K, V, q_, o_, lse_, delta_, ends[part], ends[part + 1], start, j, c, window, queries, q_t, q_d, o_t, o_d,
                H, D, BD, BM, CAUSAL, WINDOW, part != 1, PRECISION, STAGES,
            )  # fmt: skip
    dk_, dv_ = state
    where = ((b * Tk + row + n) * G + head)[:, None] * D + d[None, :]
    mask = live[:, None] & (d < D)[None, :]
    tl.store(dk + where, (dk_ * scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + where, dv_.to(dv.dtype.element_ty), mask=mask)


@triton.jit
def walk_keys(
    dq, Q, dO, e, delta, k, v, low, high, place, c, window, Tk, k_t, k_d, v_t, v_d,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A part of the loop over keys, in the kernel by queries."""
    d = tl.arange(0, BD)
    zero = tl.zeros((), tl.int64)
    for at in tl.range(low, high, BN, num_stages=STAGES):
        j = at + tl.arange(0, BN)
        K = tokens(k + (zero + at) * k_t, tl.arange(0, BN), j < Tk, k_t, d, k_d, D, BD, MASKED)
        V = tokens(v + (zero + at) * v_t, tl.arange(0, BN), j < Tk, v_t, d, v_d, D, BD, MASKED)
        s = dot(Q, tl.trans(K), tl.zeros((Q.shape[0], BN), tl.float32), PRECISION) * c
        s -= e[:, None]
        if MASKED:
            s = tl.where((j < Tk)[None, :] & sees(place[:, None], j[None, :], window, CAUSAL, WINDOW), s, float("-inf"))
        p = tl.exp2(s)
        dp = dot(dO, tl.trans(V), tl.zeros((Q.shape[0], BN), tl.float32), PRECISION)
        ds = p * (dp - delta[:, None])
        dq = dot(ds.to(K.dtype), K, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=["N", "Tq", "Tk"])
def penstock_attention_bwd_dq(
    q, k, v, d_output, lse, delta, dq, cu_seqlens, cu_seqlens_k, scale, window, N, Tq, Tk,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, o_b, o_t, o_h, o_d,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq = scale ds k, ds = p o (dO v^T - delta), p = exp(scale q k^T - lse).

    Reads q, dO [B,Tq,H,D], k, v [B,Tk,G,D] by strides, lse [B,Tq,H] and delta. Writes dq [B,Tq,H,D]. Program (head, span of BM queries);
    programs with the longest loops start first.
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
    k += b * k_b + first * k_t + h // (H // G) * k_h
    v += b * v_b + first * v_t + h // (H // G) * v_h
    start = done + keys - queries
    place = start + i
    c = scale * LOG2E
    Q = tile(q + b * q_b + row * q_t + h * q_h, i, live, q_t, d, q_d, D, BD)
    dO = tile(d_output + b * o_b + row * o_t + h * o_h, i, live, o_t, d, o_d, D, BD)
    where = (b * Tq + row + i) * H + h
    e = exponents(lse, where, live, True)
    x = tl.load(delta + where, mask=live, other=0.0)
    ends = keys_of(start, BM, keys, window, BN, CAUSAL, WINDOW)
    dq_ = tl.zeros((BM, BD), tl.float32)
    for part in tl.static_range(0 if WINDOW else 1, 3):
        dq_ = walk_keys(
            dq_, Q, dO, e, x, k, v, ends[part], ends[part + 1], place, c, window, keys, k_t, k_d, v_t, v_d,
            D, BD, BN, CAUSAL, WINDOW, part != 1, PRECISION, STAGES,
        )  # fmt: skip
    tl.store(dq + where[:, None] * D + d[None, :], (dq_ * scale).to(dq.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
