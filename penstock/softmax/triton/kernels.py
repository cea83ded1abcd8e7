"""Softmax attention on tensor cores: the forward pass by online softmax, and the backward pass from its log-sum-exp.

Scores are in log2 units, s = scale log2(e) q k^T. A program of the forward pass has BM queries and walks the keys that they see
with a running maximum m, the denominator l of what was seen, and the output as it was so far::

    m' = max(m, rowmax(s))    p = 2^(s - m')    l' = 2^(m - m') l + rowsum(p)    acc' = 2^(m - m') acc + p v

and divides once at the end. The backward pass makes p again from the log-sum-exp, with delta = rowsum(dO o O) - d lse::

    dv = p^T dO    ds = p o (dO v^T - delta)    dq = scale ds k    dk = scale ds^T q

in two kernels, by keys and by queries, so that nothing is added up by atomics. Only tiles on the border of what is seen are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton.tiles import LOG2E, span_of, tile, to_tf32


@triton.jit
def dot(a, b, c, PRECISION: tl.constexpr):
    """c + a @ b. PRECISION "half": operands as they are, in 16 bits; else how tl.dot takes float32 operands."""
    if PRECISION == "half":
        d = tl.dot(a, b, c)
    elif PRECISION == "tf32":
        d = tl.dot(to_tf32(a), to_tf32(b), c, input_precision="tf32")
    else:
        d = tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision=PRECISION)
    return d


@triton.jit
def tokens(base, n, live, stride_t, d, stride_d, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """A tile of tokens n, zeros where they are not live; all are unless MASKED."""
    if MASKED:
        x = tile(base, n, live, stride_t, d, stride_d, D, BD)
    elif D == BD:
        x = tl.load(base + n[:, None] * stride_t + d[None, :] * stride_d)
    else:
        x = tl.load(base + n[:, None] * stride_t + d[None, :] * stride_d, mask=(d < D)[None, :], other=0.0)
    return x


@triton.jit
def sees(place, j, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether queries that stand at ``place`` see keys j, both with all axes of the result."""
    if CAUSAL:
        seen = j <= place
    else:
        seen = j >= 0
    if WINDOW:
        seen = seen & (j > place - window)
        if not CAUSAL:
            seen = seen & (j < place + window)
    return seen


@triton.jit
def keys_of(first, rows, Tk, window, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Of queries that stand at ``first`` and on: the keys [low, high) that any sees, and among them those [begin, end) that all do.

    ``low``, ``begin`` and ``end`` are multiples of BN.
    """
    low = first * 0
    high = first * 0 + Tk
    begin = low
    end = high
    if CAUSAL:
        high = tl.minimum(high, first + rows)
        end = tl.minimum(end, first + 1)
    if WINDOW:
        low = tl.maximum(first - window + 1, 0) // BN * BN
        begin = tl.maximum(tl.cdiv(tl.maximum(first + rows - window, 0), BN) * BN, low)
        if not CAUSAL:
            high = tl.minimum(high, first + rows - 1 + window)
            end = tl.minimum(end, first + window)
    high = tl.maximum(high, low)
    begin = tl.minimum(begin, tl.cdiv(high, BN) * BN)
    end = tl.maximum(tl.maximum(end, 0) // BN * BN, begin)
    return low, begin, end, high


@triton.jit
def queries_of(first, columns, shift, Tq, window, BM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Of keys from ``first`` on: the queries [low, high) that see any of them, and among them those [begin, end) that see all.

    A query i stands at i + shift. ``low``, ``begin`` and ``end`` are multiples of BM.
    """
    low = first * 0
    high = first * 0 + Tq
    begin = low
    end = high
    if CAUSAL:
        low = tl.maximum(first - shift, 0) // BM * BM
        begin = tl.cdiv(tl.maximum(first + columns - 1 - shift, 0), BM) * BM
    if WINDOW:
        high = tl.minimum(high, first + columns - 1 + window - shift)
        end = tl.minimum(end, tl.maximum(first + window - shift, 0))
        if not CAUSAL:
            low = tl.maximum(first - window + 1 - shift, 0) // BM * BM
            begin = tl.cdiv(tl.maximum(first + columns - window - shift, 0), BM) * BM
    high = tl.maximum(high, low)
    begin = tl.maximum(tl.minimum(begin, tl.cdiv(high, BM) * BM), low)
    end = tl.maximum(end // BM * BM, begin)
    return low, begin, end, high


@triton.jit
def place_of(slot, cu_seqlens, cu_other, N, T, other, L: tl.constexpr, PACKED: tl.constexpr):
    """Where stretch ``slot`` of L tokens is: the row of the batch, its sequence's first token, how many tokens come before and are in all.

    Then the first token of the sequence on the other axis, and how many there are.
    """
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, L, PACKED)
    b = n.to(tl.int64)
    first = begin * 0
    there = other + 0 * n
    if PACKED:
        b = b * 0
        first = tl.load(cu_other + n).to(tl.int64)
        there = (tl.load(cu_other + n + 1).to(tl.int64) - first).to(tl.int32)
    return b, begin, done.to(tl.int32), (end - begin).to(tl.int32), first, there


@triton.jit
def walk(
    state, Q, k, v, low, high, place, c, window, Tk, k_t, k_d, v_t, v_d,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of the forward pass's walk over keys."""
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
def forward(
    q, k, v, output, lse, cu_seqlens, cu_seqlens_k, scale, window, N, Tq, Tk,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (head, stretch of BM queries), the longest walks first. ``output`` [B,Tq,H,D] and ``lse`` [B,Tq,H] are contiguous."""
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
    low, all_from, all_to, high = keys_of(start, BM, keys, window, BN, CAUSAL, WINDOW)
    if WINDOW:
        state = walk(
            state, Q, k, v, low, all_from, place, c, window, keys, k_t, k_d, v_t, v_d, D, BD, BN, CAUSAL, WINDOW, True, PRECISION, STAGES
        )
    state = walk(
        state, Q, k, v, all_from, all_to, place, c, window, keys, k_t, k_d, v_t, v_d, D, BD, BN, CAUSAL, WINDOW, False, PRECISION, STAGES
    )
    state = walk(
        state, Q, k, v, all_to, high, place, c, window, keys, k_t, k_d, v_t, v_d, D, BD, BN, CAUSAL, WINDOW, True, PRECISION, STAGES
    )
    m, l, acc = state
    some = l > 0.0
    acc = acc / tl.where(some, l, 1.0)[:, None]
    where = (b * Tq + row + i) * H + h
    tl.store(lse + where, tl.where(some, (m + tl.log2(tl.where(some, l, 1.0))) / LOG2E, float("-inf")), mask=live)
    tl.store(output + where[:, None] * D + d[None, :], acc.to(output.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["rows", "T"])
def deltas(
    output, d_output, d_lse, delta, rows, T, o_b, o_t, o_h, o_d, l_b, l_t, l_h,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, D_LSE: tl.constexpr,
):  # fmt: skip
    """rowsum(dO o O) - d lse of BM of the rows [B T H]; ``output`` and ``delta`` are contiguous, strides are those of the gradients."""
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
    tl.store(delta + row, x, mask=live)


@triton.jit
def exponents(lse, where, live, MASKED: tl.constexpr):
    """Log-sum-exps in log2 units. If MASKED, inf where no key was seen and where there is no query, so that p is 0."""
    if MASKED:
        x = tl.load(lse + where, mask=live, other=float("-inf")) * LOG2E
        x = tl.where(x == float("-inf"), float("inf"), x)
    else:
        x = tl.load(lse + where) * LOG2E
    return x


@triton.jit
def walk_queries(
    state, K, V, q, d_output, lse, delta, low, high, start, j, c, window, queries, q_t, q_d, o_t, o_d,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of the walk of the kernel by keys over queries."""
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
def backward_by_keys(
    q, k, v, d_output, lse, delta, dk, dv, cu_seqlens, cu_seqlens_k, scale, window, N, Tq, Tk,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, o_b, o_t, o_h, o_d,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (head of keys, stretch of BN keys), for all heads of queries that it serves. ``dk`` and ``dv`` [B,Tk,G,D] are contiguous."""
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
    low, all_from, all_to, high = queries_of(done, BN, start, queries, window, BM, CAUSAL, WINDOW)
    for one in range(H // G):
        h = head * (H // G) + one
        q_ = q + b * q_b + first * q_t + h * q_h
        o_ = d_output + b * o_b + first * o_t + h * o_h
        lse_ = lse + (b * Tq + first) * H + h
        delta_ = delta + (b * Tq + first) * H + h
        if CAUSAL or WINDOW:
            state = walk_queries(
                state, K, V, q_, o_, lse_, delta_, low, all_from, start, j, c, window, queries, q_t, q_d, o_t, o_d,
                H, D, BD, BM, CAUSAL, WINDOW, True, PRECISION, STAGES,
            )  # fmt: skip
        state = walk_queries(
            state, K, V, q_, o_, lse_, delta_, all_from, all_to, start, j, c, window, queries, q_t, q_d, o_t, o_d,
            H, D, BD, BM, CAUSAL, WINDOW, False, PRECISION, STAGES,
        )  # fmt: skip
        state = walk_queries(
            state, K, V, q_, o_, lse_, delta_, all_to, high, start, j, c, window, queries, q_t, q_d, o_t, o_d,
            H, D, BD, BM, CAUSAL, WINDOW, True, PRECISION, STAGES,
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
    """One stretch of the walk of the kernel by queries over keys."""
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
def backward_by_queries(
    q, k, v, d_output, lse, delta, dq, cu_seqlens, cu_seqlens_k, scale, window, N, Tq, Tk,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, o_b, o_t, o_h, o_d,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (head, stretch of BM queries), the longest walks first. ``dq`` [B,Tq,H,D] is contiguous."""
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
    low, all_from, all_to, high = keys_of(start, BM, keys, window, BN, CAUSAL, WINDOW)
    dq_ = tl.zeros((BM, BD), tl.float32)
    if WINDOW:
        dq_ = walk_keys(
            dq_,
            Q,
            dO,
            e,
            x,
            k,
            v,
            low,
            all_from,
            place,
            c,
            window,
            keys,
            k_t,
            k_d,
            v_t,
            v_d,
            D,
            BD,
            BN,
            CAUSAL,
            WINDOW,
            True,
            PRECISION,
            STAGES,
        )
    dq_ = walk_keys(
        dq_,
        Q,
        dO,
        e,
        x,
        k,
        v,
        all_from,
        all_to,
        place,
        c,
        window,
        keys,
        k_t,
        k_d,
        v_t,
        v_d,
        D,
        BD,
        BN,
        CAUSAL,
        WINDOW,
        False,
        PRECISION,
        STAGES,
    )
    dq_ = walk_keys(
        dq_, Q, dO, e, x, k, v, all_to, high, place, c, window, keys, k_t, k_d, v_t, v_d, D, BD, BN, CAUSAL, WINDOW, True, PRECISION, STAGES
    )
    tl.store(dq + where[:, None] * D + d[None, :], (dq_ * scale).to(dq.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
