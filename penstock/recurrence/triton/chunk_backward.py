"""The chunkwise backward kernel: one program per chunk, between the state before it and the state's gradient behind it.

With S the state before the chunk, dS the gradient of the state behind it (both from ``segments``), A and the sums G, Gq as
in ``chunk_forward``, strictly below the diagonal, R_j the sum of decays behind token j and L the chunk's last token::

    dA  = scale dO V^T                                       for j < i
    dq  = 2^Gq o (dA (k o 2^-G) + scale dO S^T)              + scale e u o k      e_i = dO_i . v_i
    dk  = 2^-G o (dA^T (q o 2^Gq)) + 2^R o (V dS^T)          + scale e u o q
    dv  = scale A^T dO + (k o 2^R) dS                        + scale (q . u o k) dO
    dg_t = sum_{i>=t} (q o dq)_i - sum_{j>=t} (k o dk)_j + sum_j (k o 2^R o V dS^T)_j + 2^(G_L) rowsum(S o dS)

dg omits the terms on the diagonal, which do not depend on a decay. Its first sum begins behind t if the previous state is read.
Without a bonus, u is 1. Programs share no memory that they write, so there are no atomics.

Registers limit this kernel. The factor 2^R is written as 2^-G o 2^(G_L), and 2^(G_L) is applied to the rows of dS. Tensors that are
operands of several products are cast once and stay in shared memory. q and k are loaded again for each use.

Several device functions take these tuples:

- a matrix: the pointer to the program's first token, the strides of tokens and of channels;
- ``span``: indices of tokens i, their row offsets r, the mask of tokens that exist, the step between rows, the number of tokens;
- ``factored``: what ``operands`` returns first: qt, kt, grow, shrink, before, behind;
- ``states``: the pointer to a chunk's state or to its gradient, and the other half's tensors (see ``segments.through``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.tiles import product, span_of, tile
from .chunk_forward import weights_by_subchunks
from .segments import chunk_state
from .tiles import (
    CHANNEL,
    SCALAR,
    SUITS,
    constant_decay,
    decays,
    factors,
    read_factors,
    rest_factors,
    scalar_decays,
    scalar_sums,
    subchunk,
    sums,
    triangle,
)


@triton.jit
def tokens_of_half(slot, half, cu_seqlens, N, T, C: tl.constexpr, HALVES: tl.constexpr, PACKED: tl.constexpr):
    """The tokens of chunk ``slot`` or, with HALVES, of one half of its 2 C tokens.

    Returns the sequence, its begin and end, the number of its tokens before these, the number of these (0 or less: none) and of the
    chunk's tokens in the other half.
    """
    W: tl.constexpr = 2 * C if HALVES else C
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, W, PACKED)
    tokens = tl.minimum(end - begin - done, W).to(tl.int32)
    others = 0
    if HALVES:
        others = C if half == 1 else tl.maximum(tokens - C, 0)
        tokens = tokens - C if half == 1 else tl.minimum(tokens, C)
        done += half * C
    return n, begin, end, done, tokens, others


@triton.jit
def first_row(n, begin, end, done, PACKED: tl.constexpr, REVERSE: tl.constexpr):
    """The row of a span's first token, the step to the next token's row, and the batch row."""
    row = begin + done
    step = 1
    if REVERSE:
        row = end - 1 - done
        step = -1
    b = n.to(tl.int64)
    if PACKED:
        b = tl.zeros((), tl.int64)
    return row, step, b


@triton.jit
def rows(matrix, span, j, J: tl.constexpr, BJ: tl.constexpr):
    """The span's rows and the columns j of a matrix [T,J]: [C,BJ], 0 outside."""
    x, x_t, x_j = matrix
    _, r, live, _, _ = span
    return tile(x, r, live, x_t, j, x_j, J, BJ)


@triton.jit
def pointers(base, place, span, j, H, J: tl.constexpr):
    """Pointers to the span's rows and the columns j of a contiguous tensor [B,T,H,J]: [C,BJ]; ``place``: the first token and head."""
    _, r, _, _, _ = span
    return base + place * J + r[:, None] * (H * J) + j[None, :]


@triton.jit
def bonus_row(bonuses, j, K: tl.constexpr):
    """A head's bonus u, float32: [1,BK]."""
    u, u_k = bonuses
    return tl.load(u + j * u_k, mask=j < K, other=0.0).to(tl.float32)[None, :]


@triton.jit
def scalar_factors(gates, span, C: tl.constexpr, DECAY: tl.constexpr, STATIC: tl.constexpr, LIMIT: tl.constexpr):
    """Factors of scalar decays; zeros for other decays.

    Between tokens [C,C], of the state at each query and of each key behind the chunk [C,1], the chunk's decay and a constant decay (log2).
    """
    shares = 0.0
    read = 0.0
    rest = 0.0
    total = 0.0
    constant = 0.0
    if DECAY == SCALAR:
        g, g_t, _ = gates
        i, _, _, step, tokens = span
        if STATIC:
            constant = constant_decay(g)
        between, read, rest, total = scalar_sums(g, constant, step, tokens, i, g_t, C, STATIC, LIMIT)
        shares = tl.exp2(between)
        read = tl.exp2(read)[:, None]
        rest = tl.exp2(rest)[:, None]
    return shares, read, rest, total, constant


@triton.jit
def operands(
    Q, Kt, ones, gates, span, j, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, W: tl.constexpr, DECAY: tl.constexpr, PREVIOUS: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """q and k as operands of products, the factors of dq and dk [C,BK], two factors of states and the chunk's decay (log2) [BK].

    Decays per channel: q and k times their factors, scale 2^(Gq - M), 2^(M - G), 2^M and 2^(G_L - M), see ``tiles.factors``.
    EXACT: q, k 2^R, scale 2^Gq, 2^R, 1 and 2^G_L.
    """
    g, g_t, g_k = gates
    i, r, live, step, tokens = span
    grow = tl.zeros((C, BK), tl.float32)
    shrink = grow
    total = tl.zeros((BK,), tl.float32)
    before = total + 1.0
    behind = before
    qt = Q.to(OPERAND)
    kt = Kt.to(OPERAND)
    if EXACT:
        total = tl.sum(decays(g, r, live, g_t, j, g_k, K, BK), 0)
        behind = tl.exp2(total)
        grow = read_factors(g, step, tokens, i, j, g_t, g_k, K, BK, PREVIOUS) * scale
        shrink = rest_factors(g, step, tokens, i, j, g_t, g_k, K, BK, C)
        kt = (Kt.to(tl.float32) * shrink).to(OPERAND)
    elif DECAY == CHANNEL:
        d = tile(g, r, live, g_t, j, g_k, K, BK).to(tl.float32)
        lower, strict = triangle(ones, i, W, True, PRECISION), triangle(ones, i, W, False, PRECISION)
        grow, shrink, before, behind, total = factors(d, lower, strict, PREVIOUS, PRECISION)
        grow *= scale
        qt = (Q.to(tl.float32) * grow).to(OPERAND)
        kt = (Kt.to(tl.float32) * shrink).to(OPERAND)
    return (qt, kt, grow, shrink, before, behind), total


@triton.jit
def weights(
    queries, keys, gates, bonuses, ones, span, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, W: tl.constexpr, DECAY: tl.constexpr, PREVIOUS: tl.constexpr,
    PRECISION: tl.constexpr, LIMIT: tl.constexpr, EXACT: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """A [C,C] without its mask, its diagonal [C], the strongest decay of a channel (log2), and the operands of the last block of K.

    If K is one block, later products use these operands again.
    """
    i, _, _, step, tokens = span
    A = tl.zeros((C, C), tl.float32)
    own = tl.zeros((C,), tl.float32)
    lowest = tl.zeros((), tl.float32)
    qt = tl.zeros((C, BK), OPERAND)
    kt = qt
    grow = tl.zeros((C, BK), tl.float32)
    shrink = grow
    total = tl.zeros((BK,), tl.float32)
    before = total + 1.0
    behind = before
    for kb in tl.range((K + BK - 1) // BK, num_stages=1):
        j = kb * BK + tl.arange(0, BK)
        Q = rows(queries, span, j, K, BK)
        Kt = rows(keys, span, j, K, BK)
        if PREVIOUS:
            own += tl.sum(Q.to(tl.float32) * bonus_row(bonuses, j, K) * Kt.to(tl.float32), 1)
        elif EXACT:
            own += tl.sum(Q.to(tl.float32) * Kt.to(tl.float32), 1)
        factored, total = operands(Q, Kt, ones, gates, span, j, scale, K, BK, C, W, DECAY, PREVIOUS, PRECISION, EXACT, OPERAND)
        qt, kt, grow, shrink, before, behind = factored
        if EXACT:
            q, q_t, q_k = queries
            k, k_t, k_k = keys
            g, g_t, g_k = gates
            A += weights_by_subchunks(q, k, g, step, tokens, i, j, q_t, q_k, k_t, k_k, g_t, g_k, K, BK, C, PREVIOUS, PRECISION, LIMIT)
        else:
            A += product(qt, tl.trans(kt), PRECISION)
        lowest = tl.minimum(lowest, tl.min(total, 0))
    return A, own, lowest, (qt, kt, grow, shrink, before, behind)


@triton.jit
def operands_of_block(
    factored, queries, keys, gates, ones, span, j, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, W: tl.constexpr, DECAY: tl.constexpr, PREVIOUS: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The operands of a block of K: computed again if there are several blocks, else as given."""
    if K > BK:
        Q = rows(queries, span, j, K, BK)
        Kt = rows(keys, span, j, K, BK)
        factored, _ = operands(Q, Kt, ones, gates, span, j, scale, K, BK, C, W, DECAY, PREVIOUS, PRECISION, EXACT, OPERAND)
    return factored


@triton.jit
def masked(A, own, shares, strict, diagonal, scale, SCALED: tl.constexpr, DECAY: tl.constexpr, OWN: tl.constexpr):
    """A [C,C] on and below the diagonal, with its scale (unless SCALED), scalar decays and, if OWN, the diagonal."""
    if not SCALED:
        A *= scale
    if DECAY == SCALAR:
        A *= shares
    if OWN:
        A = tl.where(diagonal, own[:, None] * scale, A)
    return tl.where(strict | diagonal, A, 0.0)


@triton.jit
def state(
    states, ADJOINT: tl.constexpr, j, y,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PREVIOUS: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """S before the program's tokens or, if ADJOINT, dS behind them: [BK,BV], as stored."""
    at, other = states
    return chunk_state(at, other, ADJOINT, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)


@triton.jit
def state_gradient(
    d_states, behind, j, y,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PREVIOUS: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr, FACTORS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """dS as an operand of products, with FACTORS 2^(G_L - M) o dS: [BK,BV]."""
    dS = state(d_states, True, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)
    if FACTORS:
        dS = dS.to(tl.float32) * behind[:, None]
    return dS.to(OPERAND)


@triton.jit
def gradients_by_subchunks(
    queries, keys, gates, dq, dA, span, j,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PREVIOUS: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """dq plus the share of dA, and the share of dA in dk, for any decay: [C,BK] each."""
    g, g_t, g_k = gates
    i, _, _, step, left = span
    dk = tl.zeros((C, BK), tl.float32)
    m = tl.zeros((), tl.int32)
    while m < left:
        n, eq, ek = subchunk(g, step, left, m, i, j, g_t, g_k, K, BK, C, PREVIOUS, LIMIT)
        kt = rows(keys, span, j, K, BK).to(tl.float32) * ek
        dq += eq * product(dA, kt, PRECISION)
        qt = rows(queries, span, j, K, BK).to(tl.float32) * eq
        dk += ek * product(tl.trans(dA), qt, PRECISION)
        m = n
    return dq, dk


@triton.jit
def query_gradient(
    dq, dA, factored, read, queries, keys, gates, span, j, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, PREVIOUS: tl.constexpr,
    PRECISION: tl.constexpr, LIMIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dq without the diagonal from dO S^T and dA: [C,BK]; if EXACT also the share of dA in dk, else 0."""
    _, kt, grow, _, before, _ = factored
    inner = 0.0
    if EXACT:
        dq, inner = gradients_by_subchunks(queries, keys, gates, dq * grow, dA, span, j, K, BK, C, PREVIOUS, PRECISION, LIMIT)
    elif DECAY == CHANNEL:
        dq = grow * (dq * before[None, :] + product(dA, kt, PRECISION))
    elif DECAY == SCALAR:
        dq = product(dA, kt, PRECISION) + dq * (read * scale)
    else:
        dq = product(dA, kt, PRECISION) + dq * scale
    return dq, inner


@triton.jit
def key_gradient(
    dk, dA, factored, rest, inner, Kt,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, DG: tl.constexpr,
):  # fmt: skip
    """dk without the diagonal from V dS^T and dA: [C,BK]; and, if DG, the share of V dS^T in dg, sum_j (k o 2^R o V dS^T)_j: [BK]."""
    qt, _, _, shrink, _, _ = factored
    carry = 0.0
    if EXACT:
        dk *= shrink
        if DG:
            carry = tl.sum(Kt.to(tl.float32) * dk, 0)
        dk += inner
    elif DECAY == CHANNEL:
        if DG:
            carry = tl.sum(Kt.to(tl.float32) * (shrink * dk), 0)
        dk = shrink * (dk + product(tl.trans(dA), qt, PRECISION))
    else:
        if DECAY == SCALAR:
            dk *= rest
        if DG:
            carry = tl.sum(Kt.to(tl.float32) * dk, 0)
        dk += product(tl.trans(dA), qt, PRECISION)
    return dk, carry


@triton.jit
def state_products(
    states, d_states, j,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PREVIOUS: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """rowsum(S o dS), the share of the state in dg: [BK]."""
    kept = tl.zeros((BK,), tl.float32)
    for vb in tl.range((V + BV - 1) // BV, num_stages=1):
        y = vb * BV + tl.arange(0, BV)
        S = state(states, False, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)
        dS = state(d_states, True, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)
        kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    return kept


@triton.jit
def channel_decay_gradient(
    difference, qdq, carry, ones, gates, span, j,
    K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, PREVIOUS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dg [C,BK] from the difference q o dq - k o dk, and ``carry`` [BK], the sum of the terms that do not depend on the token."""
    g, g_t, g_k = gates
    i, r, live, _, _ = span
    start = carry[None, :]
    if PREVIOUS:
        start -= qdq
    dg = sums(difference, triangle(ones, i, W, True, PRECISION), PRECISION, REVERSE=True, start=start)
    if EXACT:  # dg_t has a factor 2^(g_t); the difference of sums is exact only up to rounding
        dg = tl.where(decays(g, r, live, g_t, j, g_k, K, BK) < -126.0, 0.0, dg)
    return dg


@triton.jit
def store_scalar_decay_gradient(dg, dg_sums, carry, constant, gates, span, place, share, H, STATIC: tl.constexpr):
    """Store dg of scalar decays from the sums over channels of q o dq - k o dk [C] and of the terms that do not depend on the token."""
    g, g_t, _ = gates
    _, r, live, _, _ = span
    decay = constant if STATIC else scalar_decays(g, r, live, g_t)
    dg_t = tl.where(decay < -126.0, 0.0, tl.cumsum(dg_sums, 0, reverse=True) + carry)
    if STATIC:
        tl.store(dg + share, tl.sum(tl.where(live, dg_t, 0.0), 0))
    else:
        tl.store(dg + place + r * H, dg_t.to(dg.dtype.element_ty), mask=live)


@triton.jit
def store_zero_shares(du, dg, share, K: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr, DG: tl.constexpr, PREVIOUS: tl.constexpr):
    """Store zeros as the shares of a program without tokens: of du if PREVIOUS, of a constant decay's dg if DG."""
    for kb in tl.range((K + BK - 1) // BK, num_stages=1):
        j = kb * BK + tl.arange(0, BK)
        if PREVIOUS:
            tl.store(du + share * K + j, tl.zeros((BK,), tl.float32), mask=j < K)
        if DG and DECAY == CHANNEL:
            tl.store(dg + share * K + j, tl.zeros((BK,), tl.float32), mask=j < K)
    if DG and DECAY == SCALAR:
        tl.store(dg + share, 0.0)


@triton.jit(do_not_specialize=["N", "T"])
def penstock_chunk_bwd(
    q, k, v, g, u, ones, d_output, chunk_states, d_chunk_states,
    dq, dk, dv, dg, du, todo, noted, cu_seqlens, scale, N, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, u_h, u_k, o_b, o_t, o_h, o_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, STATIC: tl.constexpr, DG: tl.constexpr, PREVIOUS: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr,
    HALVES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head). dq, dk, dv, dg are contiguous; du and a constant decay's dg are [shares, H, K] or [shares, H].

    Decays per channel need several launches. The first sets ``noted`` [programs] for chunks whose decay is too strong for 2^-G; its
    results for them are invalid. ``noted`` is ``todo`` of the next launch, which computes only these chunks. Long chunks are computed
    by HALVES: program (chunk, head, half) with C of the chunk's 2 C tokens, again with ``noted`` for halves whose decay is too strong.
    The last launch is EXACT. Shares are chunk slots; with halves, those of the first halves and then those of the second. Without DG
    dg is not computed.
    """
    W: tl.constexpr = 2 * C if HALVES else C
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    FACTORS: tl.constexpr = DECAY == CHANNEL and not EXACT
    BY_PRODUCT: tl.constexpr = DECAY == CHANNEL and BK <= 64 and chunk_states.dtype.element_ty == tl.bfloat16  # rowsum(S o dS)
    pid = tl.program_id(0)
    program = pid // 2 if HALVES else pid
    half = pid % 2 if HALVES else 0
    h = (program % H).to(tl.int64)
    slot = program // H
    chunk = slot.to(tl.int64) * H + h
    share = chunk
    if HALVES:
        share += half * (tl.num_programs(0) // 2)
    if HALVES and not EXACT:
        if tl.load(todo + program) == 0:
            tl.store(noted + pid, 0)
            if half == 1:
                store_zero_shares(du, dg, share, K, BK, DECAY, STATIC and DG, PREVIOUS)
            return
    elif EXACT:
        if tl.load(todo + pid) == 0:
            return
    n, begin, end, done, tokens, others = tokens_of_half(slot, half, cu_seqlens, N, T, C, HALVES, PACKED)
    i = tl.arange(0, C)
    columns_k = tl.arange(0, BK)
    columns_v = tl.arange(0, BV)
    if tokens <= 0:
        store_zero_shares(du, dg, share, K, BK, DECAY, STATIC and DG, PREVIOUS)
        if FACTORS:
            tl.store(noted + pid, 0)
        return
    row, step, b = first_row(n, begin, end, done, PACKED, REVERSE)
    q += b * q_b + row * q_t + h * q_h
    k += b * k_b + row * k_t + h * k_h
    v += b * v_b + row * v_t + h * v_h
    g += b * g_b + row * g_t + h * g_h
    d_output += b * o_b + row * o_t + h * o_h
    place = (b * T + row) * H + h
    chunk_states += chunk * (K * V)
    d_chunk_states += chunk * (K * V)
    away = (1 - 2 * half) * C * step  # the other half's rows
    other = (half, others, i, step, 1.0, k + away * k_t, v + away * v_t, g + away * g_t, k_t, k_k, v_t, v_v, g_t, g_k)
    d_other = (half, others, i, step, scale, q + away * q_t, d_output + away * o_t, g + away * g_t, q_t, q_k, o_t, o_v, g_t, g_k)
    live = i < tokens
    span = (i, i * step, live, step, tokens)
    queries, keys, values, gates, d_outputs = (q, q_t, q_k), (k, k_t, k_k), (v, v_t, v_v), (g, g_t, g_k), (d_output, o_t, o_v)
    states, d_states = (chunk_states, other), (d_chunk_states, d_other)
    bonuses = (u + h * u_h, u_k)
    strict = i[:, None] > i[None, :]
    diagonal = i[:, None] == i[None, :]

    shares, read, rest, total_s, constant = scalar_factors(gates, span, C, DECAY, STATIC, LIMIT)
    A, own, lowest, factored = weights(
        queries, keys, gates, bonuses, ones, span, scale, K, BK, C, W, DECAY, PREVIOUS, PRECISION, LIMIT, EXACT, OPERAND
    )
    if FACTORS:
        tl.store(noted + pid, (lowest < -SUITS).to(tl.int32))
    A = masked(A, own, shares, strict, diagonal, scale, FACTORS, DECAY, PREVIOUS or EXACT).to(OPERAND)

    # dv = scale A^T dO + (k o 2^R) dS
    dO = tl.zeros((C, BV), d_output.dtype.element_ty)
    dS = tl.zeros((BK, BV), OPERAND)
    for vb in tl.range(NV, num_stages=1):
        y = vb * BV + columns_v
        dv_ = tl.zeros((C, BV), tl.float32)
        for kb in tl.range(NK, num_stages=1):
            j = kb * BK + columns_k
            _, kt, _, _, _, behind = operands_of_block(
                factored, queries, keys, gates, ones, span, j, scale, K, BK, C, W, DECAY, PREVIOUS, PRECISION, EXACT, OPERAND
            )
            dS = state_gradient(d_states, behind, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES, FACTORS, OPERAND)
            dv_ += product(kt, dS, PRECISION)
        if DECAY == SCALAR:
            dv_ *= rest
        dO = rows(d_outputs, span, y, V, BV)
        dv_ += product(tl.trans(A), dO, PRECISION)
        tl.store(pointers(dv, place, span, y, H, V), dv_.to(dv.dtype.element_ty), mask=live[:, None] & (y < V)[None, :])

    # dq, dk and dg, by blocks of K
    Vt = tl.zeros((C, BV), v.dtype.element_ty)
    S = tl.zeros((BK, BV), chunk_states.dtype.element_ty)
    same = columns_k[:, None] == columns_k[None, :]
    dg_scalar = tl.zeros((C,), tl.float32)
    carry_scalar = tl.zeros((), tl.float32)
    for kb in tl.range(NK, num_stages=1):
        j = kb * BK + columns_k
        mask = live[:, None] & (j < K)[None, :]
        block = operands_of_block(
            factored, queries, keys, gates, ones, span, j, scale, K, BK, C, W, DECAY, PREVIOUS, PRECISION, EXACT, OPERAND
        )
        bonus = 1.0
        if PREVIOUS:
            bonus = bonus_row(bonuses, j, K)

        # dA = scale dO V^T;  dq = 2^Gq o (dA (k o 2^-G) + scale dO S^T) + scale e u o k
        dA = tl.zeros((C, C), tl.float32)
        dq_ = tl.zeros((C, BK), tl.float32)
        for vb in tl.range(NV, num_stages=1):
            y = vb * BV + columns_v
            if NV > 1:
                dO = rows(d_outputs, span, y, V, BV)
            Vt = rows(values, span, y, V, BV)
            S = state(states, False, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)
            dA += product(dO, tl.trans(Vt), PRECISION)
            dq_ += product(dO, tl.trans(S), PRECISION)
        e = tl.sum(tl.where(diagonal, dA, 0.0), 1)[:, None] * scale
        if not FACTORS:
            dA *= scale
        dA = tl.where(strict, dA, 0.0)
        if DECAY == SCALAR:
            dA *= shares
        dA = dA.to(OPERAND)
        dq_, inner = query_gradient(
            dq_, dA, block, read, queries, keys, gates, span, j, scale, K, BK, C, DECAY, PREVIOUS, PRECISION, LIMIT, EXACT
        )
        Q = rows(queries, span, j, K, BK)
        ek = e * rows(keys, span, j, K, BK).to(tl.float32)
        if DG:
            qdq = Q.to(tl.float32) * dq_
        if PREVIOUS:
            tl.store(du + share * K + j, tl.sum(Q.to(tl.float32) * ek, 0), mask=j < K)
        tl.store(pointers(dq, place, span, j, H, K), (dq_ + ek * bonus).to(dq.dtype.element_ty), mask=mask)

        # dk = 2^-G o (dA^T (q o 2^Gq)) + 2^R o (V dS^T) + scale e u o q;  kept = rowsum(S o dS)
        _, _, _, _, before, behind = block
        dk_ = tl.zeros((C, BK), tl.float32)
        kept = tl.zeros((BK,), tl.float32)
        for vb in tl.range(NV, num_stages=1):
            y = vb * BV + columns_v
            if NV > 1:
                Vt = rows(values, span, y, V, BV)
                if DG and BY_PRODUCT:
                    S = state(states, False, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)
            if NK > 1 or NV > 1:
                dS = state_gradient(d_states, behind, j, y, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES, FACTORS, OPERAND)
            dk_ += product(Vt, tl.trans(dS), PRECISION)
            if DG and BY_PRODUCT:  # S and dS are operands already
                kept += tl.sum(tl.where(same, product(S, tl.trans(dS), PRECISION), 0.0), 1)
        Kt = rows(keys, span, j, K, BK)
        dk_, carry = key_gradient(dk_, dA, block, rest, inner, Kt, DECAY, PRECISION, EXACT, DG)
        if DG:
            difference = qdq - Kt.to(tl.float32) * dk_
        own_dk = e * rows(queries, span, j, K, BK).to(tl.float32) * bonus
        tl.store(pointers(dk, place, span, j, H, K), (dk_ + own_dk).to(dk.dtype.element_ty), mask=mask)

        # dg_t = sum_{i>=t} (q o dq - k o dk)_i + sum_j (k o 2^R o V dS^T)_j + 2^(G_L) rowsum(S o dS)
        if DG and not BY_PRODUCT:
            kept = state_products(states, d_states, j, K, V, BK, BV, C, PREVIOUS, PRECISION, HALVES)
            if FACTORS:
                kept *= behind
        if DG and DECAY == SCALAR:
            dg_scalar += tl.sum(difference, 1)
            carry_scalar += tl.sum(carry + kept * tl.exp2(total_s), 0)
        elif DG and DECAY == CHANNEL:
            carry += kept * (before if FACTORS else behind)
            dg_ = channel_decay_gradient(difference, qdq, carry, ones, gates, span, j, K, BK, W, PREVIOUS, PRECISION, EXACT)
            if STATIC:
                tl.store(dg + share * K + j, tl.sum(tl.where(live[:, None], dg_, 0.0), 0), mask=j < K)
            else:
                tl.store(pointers(dg, place, span, j, H, K), dg_.to(dg.dtype.element_ty), mask=mask)

    if DG and DECAY == SCALAR:
        store_scalar_decay_gradient(dg, dg_scalar, carry_scalar, constant, gates, span, place, share, H, STATIC)
