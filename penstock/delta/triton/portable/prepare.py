"""What a chunk's tokens do to any state, for all chunks in parallel: the first launch of both passes.

read_t = exp(sum u <= t of g_u), rest_s = exp(sum u > s), total = read of the last token; reada is read if the removal reads the state
after the decay, else exp(sum u < t). Pairs are products by levels (``levels.py``) or, with one decay per token, times the decays between::

    Aq = scale q_t decay(s..t) b_s   s <= t          Aa = a_t decay(s..t) b_s   s < t         two streams: Aq_k, Aa_k with k for b
    T  = (I - diag(beta) Aa)^-1                      unit lower triangular
    Ap = Aq T                                        Bt = T^T (b o rest)
    Qr = scale q o read                              Ar = a o reada                           two streams: Kr = k o rest

T is the operand of no value and no state: its entries multiply Aq and b alone. See ``inverse.py``.

Memory that only this program uses, ``pairs`` and ``solved``, carries tiles from one phase to the next: a barrier of the program is enough.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, SCALAR, decays
from ....gpu.levels import selected_by_parts
from ....gpu.tiles import tile
from .inverse import solve, store_product_with_T
from .levels import (
    EXCLUSIVE,
    INCLUSIVE,
    LATER,
    chunk_of,
    factor_of_removals,
    factors_of_level,
    halves_of_level,
    pairs_of_level,
    scalar_factors,
)
from .products import product, product_with_T


@triton.jit
def channels(matrix, r, live, j, K: tl.constexpr, BK: tl.constexpr):
    """The columns j of a matrix's rows, float32, 0 from column K on. All j are less than K rounded up to a multiple of BK."""
    x, x_t, x_k = matrix
    return tile(x, r, live, x_t, j, x_k, K, BK).to(tl.float32)


@triton.jit
def store_pairs(
    queries, removals, writes, keys, gates, matrices, level, pairs, late, at, i, live, scale,
    K: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, AFTER: tl.constexpr,
    LEVELS: tl.constexpr, ANCHOR: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Store the pairs of a level: of q and a with b in ``pairs`` [2,C,C], with k in ``late`` [2,C,C]."""
    g, g_t, g_k = gates
    inclusive, exclusive = matrices
    qb = tl.zeros((C, C), tl.float32)
    ab = tl.zeros((C, C), tl.float32)
    qk = tl.zeros((C, C), tl.float32)
    ak = tl.zeros((C, C), tl.float32)
    later, earlier = halves_of_level(i, live, level, C, LEVELS, ANCHOR)
    for first in tl.range(0, BK, BJ, num_stages=1):
        j = first + tl.arange(0, BJ)
        d = decays(g, i, live, g_t, j, g_k, K, BK)
        query, key = factors_of_level(d, inclusive, i, level, C, LEVELS, ANCHOR, PRECISION)
        removal = factor_of_removals(query, d, exclusive, i, level, C, AFTER, PRECISION)
        q = (channels(queries, i, later, j, K, BK) * query).to(OPERAND)
        a = (channels(removals, i, later, j, K, BK) * removal).to(OPERAND)
        b = tl.trans((channels(writes, i, earlier, j, K, BK) * key).to(OPERAND))
        qb += product(q, b, PRECISION)
        ab += product(a, b, PRECISION)
        if STREAMS == 2:
            k = tl.trans((channels(keys, i, earlier, j, K, BK) * key).to(OPERAND))
            qk += product(q, k, PRECISION)
            ak += product(a, k, PRECISION)
    mask = pairs_of_level(i, level, C, LEVELS, ANCHOR)
    tl.store(pairs + at, qb * scale, mask=mask)
    tl.store(pairs + C * C + at, ab * (-1.0 if STREAMS == 1 else 1.0), mask=mask)
    if STREAMS == 2:
        tl.store(late + at, (qk * scale).to(late.dtype.element_ty), mask=mask)
        tl.store(late + C * C + at, ak.to(late.dtype.element_ty), mask=mask)


@triton.jit
def store_state_factors(
    queries, removals, keys, gates, triangles, qr, ar, kr, total, j, i, live, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the columns j of Qr, Ar, Kr (pointers [C,BJ]) and of the decay of the chunk (pointers [BJ])."""
    g, g_t, g_k = gates
    d = decays(g, i, live, g_t, j, g_k, K, BK)
    G = selected_by_parts(d, triangles, INCLUSIVE, i, C, PRECISION)
    tl.store(qr, (channels(queries, i, live, j, K, BK) * scale * tl.exp2(G)).to(qr.dtype.element_ty))
    if not AFTER:
        G = selected_by_parts(d, triangles, EXCLUSIVE, i, C, PRECISION)
    removal = channels(removals, i, live, j, K, BK) * (-1.0 if STREAMS == 1 else 1.0)
    tl.store(ar, (removal * tl.exp2(G)).to(ar.dtype.element_ty))
    if STREAMS == 2:
        rest = tl.exp2(selected_by_parts(d, triangles, LATER, i, C, PRECISION))
        tl.store(kr, (channels(keys, i, live, j, K, BK) * rest).to(kr.dtype.element_ty))
    tl.store(total, tl.exp2(tl.sum(d, 0)))


@triton.jit
def own_pairs(queries, writes, i, live, K: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, C: tl.constexpr):
    """q_t . b_t of every token [C]."""
    own = tl.zeros((C,), tl.float32)
    for first in tl.range(0, BK, BJ, num_stages=1):
        j = first + tl.arange(0, BJ)
        own += tl.sum(channels(queries, i, live, j, K, BK) * channels(writes, i, live, j, K, BK), 1)
    return own


@triton.jit
def store_scalar_pairs(
    queries, removals, between, pairs, at, i, live, scale,
    K: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the pairs of q and -k with k in ``pairs`` [2,C,C], from the decays between tokens."""
    q, q_t, q_k = queries
    k, k_t, k_k = removals
    qb = tl.zeros((C, C), tl.float32)
    ab = tl.zeros((C, C), tl.float32)
    for first in tl.range(0, BK, BJ, num_stages=STAGES):
        j = first + tl.arange(0, BJ)
        b = tile(k, i, live, k_t, j, k_k, K, BK)
        qb += product(tile(q, i, live, q_t, j, q_k, K, BK), tl.trans(b), PRECISION)
        ab += product(b, tl.trans(b), PRECISION)
    tl.store(pairs + at, qb * between * scale)
    tl.store(pairs + C * C + at, -ab * between)


@triton.jit(do_not_specialize=["N", "T"])
def penstock_delta_prepare(
    q, k, g, beta, a, b, levels, levels_before, pairs, late, solved, ap, bt, qr, ar, kr, total, cu_seqlens, scale, N, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, g_b, g_t, g_h, g_k, beta_b, beta_t, beta_h, a_b, a_t, a_h, a_k, b_b, b_t, b_h, b_k,
    K: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, AFTER: tl.constexpr, GATE: tl.constexpr,
    LEVELS: tl.constexpr, ANCHOR: tl.constexpr, PACKED: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Ap = Aq T and Bt = T^T (b o rest) with T = (I - diag(beta) Aa)^-1, of every chunk.

    Reads q, k, a, b [B,T,H,K], g [B,T,H,K] and beta [B,T,H] by strides; with one stream a and b are k, and a has the sign -1. Writes ``ap``
    and ``solved`` (T - I) [slots,H,C,C], ``bt`` [slots,H,C,BK]; with decays per channel ``qr``, ``ar`` [slots,H,C,BK] and ``total``
    [slots,H,BK]; with two streams ``kr`` [slots,H,C,BK] and ``late`` (Aq_k, Aa_k) [slots,H,2,C,C]. ``pairs`` (Aq, Aa) [slots,H,2,C,C]. Of
    pairs and late, entries above the diagonal are undefined. Program (chunk, head). Rows of tokens that do not exist are 0.

    BJ: key channels that are in registers at once. LEVELS: dyadic levels. ANCHOR: one anchor in blocks of C >> LEVELS tokens. PIECE: only
    chunks of C tokens are processed.
    """
    tl.static_assert(GATE == CHANNEL or AFTER)
    tl.static_assert(STREAMS == 1 or GATE == CHANNEL)
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    batch, row, tokens, h, share = chunk_of(tl.program_id(0), cu_seqlens, N, T, H, C, PACKED)
    if tokens <= 0:
        return
    if PIECE > 0:
        if tokens < C:
            return
    i = tl.arange(0, C)
    live = i < tokens
    at = i[:, None] * C + i[None, :]
    queries = (q + batch * q_b + row * q_t + h * q_h, q_t, q_k)
    keys = (k + batch * k_b + row * k_t + h * k_h, k_t, k_k)
    removals = (a + batch * a_b + row * a_t + h * a_h, a_t, a_k)
    writes = (b + batch * b_b + row * b_t + h * b_h, b_t, b_k)
    g += batch * g_b + row * g_t + h * g_h
    beta += batch * beta_b + row * beta_t + h * beta_h
    pairs += share * (2 * C * C)
    if STREAMS == 2:
        late += share * (2 * C * C)
    ap += share * (C * C)
    solved += share * (C * C)
    tiles = share * (C * BK) + i[:, None] * BK

    gates = (g, g_t, g_k)
    triangles = levels + (LEVELS + ANCHOR) * (C * C)
    if GATE == CHANNEL:
        for level in tl.range(LEVELS + ANCHOR, num_stages=1):
            store_pairs(
                queries, removals, writes, keys, gates, (levels, levels_before), level, pairs, late, at, i, live, scale,
                K, BK, BJ, C, STREAMS, AFTER, LEVELS, ANCHOR, PRECISION, OPERAND,
            )  # fmt: skip
        tl.store(pairs + i * (C + 1), own_pairs(queries, writes, i, live, K, BK, BJ, C) * scale)
        if STREAMS == 2:
            own = own_pairs(queries, keys, i, live, K, BK, BJ, C) * scale
            tl.store(late + i * (C + 1), own.to(late.dtype.element_ty))
        for first in tl.range(0, BK, BJ, num_stages=1):
            j = first + tl.arange(0, BJ)
            to = tiles + j[None, :]
            store_state_factors(
                queries, removals, keys, gates, triangles, qr + to, ar + to, kr + to, total + share * BK + j, j, i, live, scale,
                K, BK, C, STREAMS, AFTER, PRECISION,
            )  # fmt: skip
    else:
        between, _read, _rest, _total = scalar_factors(g, i, live, g_t, GATE == SCALAR)
        store_scalar_pairs(queries, removals, between, pairs, at, i, live, scale, K, BK, BJ, C, PRECISION, STAGES)

    solve(pairs + C * C, solved, beta, tokens, beta_t, i, C, STREAMS, SOLVE)
    store_product_with_T(ap, pairs, solved, i, C, BJ, SOLVE)
    Et = tl.trans(tl.load(solved + at))
    if GATE != CHANNEL:
        _between, _read, rest, _total = scalar_factors(g, i, live, g_t, GATE == SCALAR)
    for first in tl.range(0, BK, BJ, num_stages=STAGES):
        j = first + tl.arange(0, BJ)
        B = channels(writes, i, live, j, K, BK)
        if GATE == CHANNEL:
            B *= tl.exp2(selected_by_parts(decays(g, i, live, g_t, j, g_k, K, BK), triangles, LATER, i, C, PRECISION))
        else:
            B *= rest[:, None]
        tl.store(bt + tiles + j[None, :], (B + product_with_T(Et, B, SOLVE)).to(bt.dtype.element_ty))
