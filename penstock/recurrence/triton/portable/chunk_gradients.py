"""Device functions of the chunkwise backward kernel: rows of matrices, operands and weights of a chunk, and parts of its gradients.

The formulas are those of ``chunk_backward``. Several functions take these tuples:

- a matrix: the pointer to the program's first token, the strides of tokens and of channels;
- ``span``: indices of tokens i, their row offsets r, the mask of tokens that exist, the step between rows, the number of tokens;
- ``factored``: what ``operands`` returns first: qt, kt, grow, shrink, before, after.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, SCALAR
from ....gpu.tiles import LOG2E, product, tile, to_tf32
from .segments import chunk_state
from .tiles import constant_decay, factors, ones, scalar_decays, scalar_sums, sums


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

    Between tokens [C,C], of the state at each query and of each key after the chunk [C,1], the chunk's decay and a constant decay (log2).
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
def strongest(gates, span, K: tl.constexpr, BK: tl.constexpr):
    """The strongest decay of a channel over the chunk, log2 units."""
    g, g_t, g_k = gates
    lowest = tl.zeros((), tl.float32)
    for kb in tl.range((K + BK - 1) // BK, num_stages=1):
        d = tile(g, span[1], span[2], g_t, kb * BK + tl.arange(0, BK), g_k, K, BK).to(tl.float32)
        lowest = tl.minimum(lowest, tl.min(tl.sum(d, 0), 0))
    return lowest * LOG2E


@triton.jit
def operands(
    Q, Kt, levels, gates, span, j, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, DECAY: tl.constexpr, PREVIOUS: tl.constexpr,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """q and k as operands of products, the factors of dq and dk [C,BK], two factors of states [BK].

    Decays per channel: q and k times their factors, scale 2^(Gq - M), 2^(M - G), 2^M and 2^(G_L - M), see ``tiles.factors``.
    """
    g, g_t, g_k = gates
    i, r, live, _, _ = span
    grow = tl.zeros((C, BK), tl.float32)
    shrink = grow
    before = tl.full((BK,), 1.0, tl.float32)
    after = before
    qt = Q.to(OPERAND)
    kt = Kt.to(OPERAND)
    if DECAY == CHANNEL:
        d = tile(g, r, live, g_t, j, g_k, K, BK).to(tl.float32)
        lower = ones(levels, LEVELS, i, C, PRECISION)
        strict = ones(levels, LEVELS + 1, i, C, PRECISION) if PREVIOUS else lower
        grow, shrink, before, after, _ = factors(d, lower, strict, PREVIOUS, PRECISION)
        grow *= scale
        qt = (Q.to(tl.float32) * grow).to(OPERAND)
        kt = (Kt.to(tl.float32) * shrink).to(OPERAND)
    return qt, kt, grow, shrink, before, after


@triton.jit
def weights(
    queries, keys, gates, bonuses, levels, span, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, DECAY: tl.constexpr, PREVIOUS: tl.constexpr,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """A [C,C] without its mask, its diagonal [C], and the operands of the last block of K.

    If K is one block, later products use these operands again.
    """
    A = tl.zeros((C, C), tl.float32)
    own = tl.zeros((C,), tl.float32)
    qt = tl.zeros((C, BK), OPERAND)
    kt = qt
    grow = tl.zeros((C, BK), tl.float32)
    shrink = grow
    before = tl.full((BK,), 1.0, tl.float32)
    after = before
    for kb in tl.range((K + BK - 1) // BK, num_stages=1):
        j = kb * BK + tl.arange(0, BK)
        Q = rows(queries, span, j, K, BK)
        Kt = rows(keys, span, j, K, BK)
        if PREVIOUS:
            own += tl.sum(Q.to(tl.float32) * bonus_row(bonuses, j, K) * Kt.to(tl.float32), 1)
        factored = operands(Q, Kt, levels, gates, span, j, scale, K, BK, C, LEVELS, DECAY, PREVIOUS, PRECISION, OPERAND)
        qt, kt, grow, shrink, before, after = factored
        A += product(qt, tl.trans(kt), PRECISION)
    return A, own, (qt, kt, grow, shrink, before, after)


@triton.jit
def operands_of_block(
    factored, queries, keys, gates, levels, span, j, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, DECAY: tl.constexpr, PREVIOUS: tl.constexpr,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The operands of a block of K: computed again if there are several blocks, else as given."""
    if K > BK:
        Q = rows(queries, span, j, K, BK)
        Kt = rows(keys, span, j, K, BK)
        factored = operands(Q, Kt, levels, gates, span, j, scale, K, BK, C, LEVELS, DECAY, PREVIOUS, PRECISION, OPERAND)
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
def state_gradient(
    d_chunk_states, after, j, y,
    K: tl.constexpr, V: tl.constexpr, FACTORS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """dS as operand [BK,BV]; with FACTORS times 2^(G_L - M)."""
    dS = chunk_state(d_chunk_states, j, y, K, V)
    if FACTORS:
        dS = dS.to(tl.float32) * after[:, None]
    return dS.to(OPERAND)


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """x as ``product`` multiplies it, float32."""
    if PRECISION == "bf16":
        x = x.to(tl.bfloat16).to(tl.float32)
    elif PRECISION == "tf32":
        x = to_tf32(x)
    return x


@triton.jit
def state_products(
    chunk_states, d_chunk_states, j,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """rowsum(S o dS), the share of the state in dg: [BK]."""
    kept = tl.zeros((BK,), tl.float32)
    for vb in tl.range((V + BV - 1) // BV, num_stages=1):
        y = vb * BV + tl.arange(0, BV)
        S = chunk_state(chunk_states, j, y, K, V)
        dS = chunk_state(d_chunk_states, j, y, K, V)
        kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    return kept


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


@triton.jit
def query_gradient(dq, dA, factored, read, scale, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """dq from dO S^T and dA, without the diagonal, and the factors of decays per channel: [C,BK]."""
    _, kt, _, _, before, _ = factored
    if DECAY == CHANNEL:
        dq = dq * before[None, :] + product(dA, kt, PRECISION)
    elif DECAY == SCALAR:
        dq = product(dA, kt, PRECISION) + dq * (read * scale)
    else:
        dq = product(dA, kt, PRECISION) + dq * scale
    return dq


@triton.jit
def store_scalar_decay_gradient(dg, queries, keys, states, constant, gates, span, place, share, H, STATIC: tl.constexpr):
    """Store dg of scalar decays: ``queries`` [C] of tokens from t on, ``keys`` [C] of tokens before t, and ``states``."""
    g, g_t, _ = gates
    i, r, live, _, _ = span
    decay = constant if STATIC else scalar_decays(g, r, live, g_t)
    dg_t = tl.sum(tl.where(i[None, :] >= i[:, None], queries[None, :], keys[None, :]), 1) + states
    dg_t = tl.where(decay < -126.0, 0.0, dg_t)
    if STATIC:
        tl.store(dg + share, tl.sum(tl.where(live, dg_t, 0.0), 0))
    else:
        tl.store(dg + place + r * H, dg_t.to(dg.dtype.element_ty), mask=live)


@triton.jit
def store_channel_decay_gradient(
    dg, difference, start, of_key, levels, span, place, share, j, H,
    K: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, STATIC: tl.constexpr, PREVIOUS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dg of decays per channel: sums of ``difference`` [C,BK] over tokens from t on, plus ``start`` [1,BK], the terms of the states.

    PREVIOUS: without token t's own terms. That of its query is not part of the sum; that of its key, ``of_key``, is subtracted before.
    """
    i, _, live, _, _ = span
    if PREVIOUS:
        start -= of_key
    triangle = ones(levels, LEVELS + PREVIOUS, i, C, PRECISION)
    dg_ = sums(difference, triangle, PRECISION, REVERSE=True, OWN=not PREVIOUS, start=start)
    if STATIC:
        tl.store(dg + share * K + j, tl.sum(tl.where(live[:, None], dg_, 0.0), 0), mask=j < K)
    else:
        mask = live[:, None] & (j < K)[None, :]
        tl.store(pointers(dg, place, span, j, H, K), dg_.to(dg.dtype.element_ty), mask=mask)
