"""What a chunk's tokens do to any state, for all chunks in parallel: the first launch of both passes.

read_t = exp(sum u <= t of g_u), rest_s = exp(sum u > s), total = read of the last token; reada is read if the removal reads the state
after the decay, else exp(sum u < t). Pairs are products by levels (``levels.py``) or, with one decay per token, times the decays between::

    Aq = scale q_t decay(s..t) b_s   s <= t          Aa = a_t decay(s..t) b_s   s < t         two streams: Aq_k, Aa_k with k for b
    T  = (I - diag(beta) Aa)^-1                      unit lower triangular
    Ap = Aq T                                        Bt = T^T (b o rest)
    Qr = scale q o read                              Ar = a o reada                           two streams: Kr = k o rest

T is the operand of no value and no state: its entries multiply Aq and b alone. 16x16 diagonal blocks of T are substituted forward in
float32. Then pairs of blocks are merged, T21 = T22 (N21 T11). T - I is the operand, and the identity is added in float32.

Memory that only this program uses, ``pairs`` and ``solved``, carries tiles from one phase to the next: a barrier of the program is enough.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, SCALAR, decays
from ....gpu.tiles import apart, product, span_of, tile
from .levels import (
    EXCLUSIVE,
    INCLUSIVE,
    LATER,
    factors_of_level,
    ordered,
    pairs_of_level,
    scalar_factors,
    strengths,
    sums,
    within,
)

SUBCHUNK = tl.constexpr(16)  # tokens of a block that is solved by substitution


@triton.jit
def scaled(matrix, f, r, live, j, K: tl.constexpr, BK: tl.constexpr, OPERAND: tl.constexpr):
    """A tile of a matrix times its factors, as the operand of a product: [C,BK]."""
    x, x_t, x_k = matrix
    return (tile(x, r, live, x_t, j, x_k, K, BK).to(tl.float32) * f).to(OPERAND)


@triton.jit
def store_pairs(pairs, late, rows, columns, factors, mask, at, r, live, j, scale, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
                STREAMS: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr):  # fmt: skip
    """Store the pairs under a mask: of q and a with b in ``pairs`` [2,C,C], with k in ``late`` [2,C,C]."""
    query, removal, key = factors
    sign: tl.constexpr = -1.0 if STREAMS == 1 else 1.0
    b = tl.trans(scaled(columns[0], key, r, live, j, K, BK, OPERAND))
    q = scaled(rows[0], query, r, live, j, K, BK, OPERAND)
    tl.store(pairs + at, product(q, b, PRECISION) * scale, mask=mask)
    a = scaled(rows[1], removal, r, live, j, K, BK, OPERAND)
    tl.store(pairs + C * C + at, product(a, b, PRECISION) * sign, mask=mask)
    if STREAMS == 2:
        k = tl.trans(scaled(columns[1], key, r, live, j, K, BK, OPERAND))
        tl.store(late + at, (product(q, k, PRECISION) * scale).to(late.dtype.element_ty), mask=mask)
        tl.store(late + C * C + at, product(a, k, PRECISION).to(late.dtype.element_ty), mask=mask)


@triton.jit
def solved_blocks(pairs, beta, tokens, beta_t, C: tl.constexpr, STREAMS: tl.constexpr):
    """T - I of the diagonal blocks [C/16,16,16], by forward substitution: row r of T is row r of I plus N[r,:r] T[:r]."""
    block = tl.arange(0, C // SUBCHUNK) * SUBCHUNK
    r = tl.arange(0, SUBCHUNK)
    t = tl.zeros((C // SUBCHUNK, SUBCHUNK, SUBCHUNK), tl.float32)
    for row in tl.range(1, SUBCHUNK, num_stages=1):
        token = block + row
        strength = strengths(beta, token, token < tokens, beta_t, STREAMS)
        base = pairs + C * C + (token * C + block)[:, None]
        n = tl.load(base + r[None, :], mask=(r < row)[None, :], other=0.0) * strength[:, None]
        made = n + tl.sum(n[:, :, None] * t, 1)
        t = tl.where((r == row)[None, :, None], made[:, None, :], t)
    return t


@triton.jit
def solve(pairs, solved, beta, tokens, beta_t, i, C: tl.constexpr, STREAMS: tl.constexpr, SOLVE: tl.constexpr):
    """T - I [C,C], also stored in ``solved``. Entries of ``pairs`` outside of the diagonal blocks are read once for each merge."""
    t = solved_blocks(pairs, beta, tokens, beta_t, C, STREAMS)
    block = tl.arange(0, C // SUBCHUNK)[:, None, None] * SUBCHUNK
    r = tl.arange(0, SUBCHUNK)
    tl.store(solved + (block + r[None, :, None]) * C + block + r[None, None, :], t)
    tl.debug_barrier()
    at = i[:, None] * C + i[None, :]
    T = tl.load(solved + at, mask=within(i, SUBCHUNK), other=0.0)
    strength = strengths(beta, i, i < tokens, beta_t, STREAMS)[:, None]
    L: tl.constexpr = SUBCHUNK
    for level in tl.static_range(2):
        between = apart(i, L << level)
        N = tl.load(pairs + C * C + at, mask=between, other=0.0) * strength
        N += product(N, T, SOLVE)
        N += product(T, N, SOLVE)
        T += tl.where(between, N, 0.0)
    tl.debug_barrier()
    tl.store(solved + at, T)
    return T


@triton.jit(do_not_specialize=["N", "T"])
def penstock_delta_prepare(
    q, k, g, beta, a, b, pairs, late, solved, ap, bt, qr, ar, kr, total, cu_seqlens, scale, N, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, g_b, g_t, g_h, g_k, beta_b, beta_t, beta_h, a_b, a_t, a_h, a_k, b_b, b_t, b_h, b_k,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, AFTER: tl.constexpr, GATE: tl.constexpr,
    LEVELS: tl.constexpr, ANCHOR: tl.constexpr, PACKED: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """Ap = Aq T and Bt = T^T (b o rest) with T = (I - diag(beta) Aa)^-1, of every chunk.

    Reads q, k, a, b [B,T,H,K], g [B,T,H,K] and beta [B,T,H] by strides; with one stream a and b are k, and a has the sign -1. Writes ``ap``
    and ``solved`` (T - I) [slots,H,C,C], ``bt`` [slots,H,C,BK]; with decays per channel ``qr``, ``ar`` [slots,H,C,BK] and ``total``
    [slots,H,BK]; with two streams ``kr`` [slots,H,C,BK] and ``late`` (Aq_k, Aa_k) [slots,H,2,C,C]. ``pairs`` (Aq, Aa) [slots,H,2,C,C]. Of
    pairs and late, entries above the diagonal are undefined. Program (chunk, head). Rows of tokens that do not exist are 0.

    LEVELS: dyadic levels. ANCHOR: one anchor in blocks of C >> LEVELS tokens. PIECE: only chunks of C tokens are processed.
    """
    tl.static_assert(GATE == CHANNEL or AFTER)
    tl.static_assert(STREAMS == 1 or GATE == CHANNEL)
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    h = (tl.program_id(0) % H).to(tl.int64)
    slot = tl.program_id(0) // H
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, C, PACKED)
    tokens = tl.minimum(end - begin - done, C).to(tl.int32)
    if tokens <= 0:
        return
    if PIECE > 0:
        if tokens < C:
            return
    batch = n.to(tl.int64)
    if PACKED:
        batch = batch * 0
    row = begin + done
    i = tl.arange(0, C)
    j = tl.arange(0, BK)
    live = i < tokens
    at = i[:, None] * C + i[None, :]
    share = slot.to(tl.int64) * H + h
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
    tiles = share * (C * BK) + i[:, None] * BK + j[None, :]

    if GATE == CHANNEL:
        d = decays(g, i, live, g_t, j, g_k, K, BK)
        for level in tl.range(LEVELS + ANCHOR, num_stages=1):
            factors = factors_of_level(d, i, level, C, LEVELS, AFTER, PRECISION)
            store_pairs(pairs, late, (queries, removals), (writes, keys), factors, pairs_of_level(i, level, C, LEVELS), at, i, live, j,
                        scale, K, BK, C, STREAMS, PRECISION, OPERAND)  # fmt: skip
        Q = tile(queries[0], i, live, q_t, j, q_k, K, BK).to(tl.float32) * scale
        B = tile(writes[0], i, live, b_t, j, b_k, K, BK).to(tl.float32)
        tl.store(pairs + i * (C + 1), tl.sum(Q * B, 1))
        G = sums(ordered(i, INCLUSIVE), d, PRECISION)
        tl.store(qr + tiles, (Q * tl.exp2(G)).to(qr.dtype.element_ty))
        if STREAMS == 2:
            Kt = tile(keys[0], i, live, k_t, j, k_k, K, BK).to(tl.float32)
            tl.store(late + i * (C + 1), tl.sum(Q * Kt, 1).to(late.dtype.element_ty))
        if not AFTER:
            G = sums(ordered(i, EXCLUSIVE), d, PRECISION)
        removal = tile(removals[0], i, live, a_t, j, a_k, K, BK).to(tl.float32) * (-1.0 if STREAMS == 1 else 1.0)
        tl.store(ar + tiles, (removal * tl.exp2(G)).to(ar.dtype.element_ty))
        rest = tl.exp2(sums(ordered(i, LATER), d, PRECISION))
        B *= rest
        if STREAMS == 2:
            tl.store(kr + tiles, (Kt * rest).to(kr.dtype.element_ty))
        tl.store(total + share * BK + j, tl.exp2(tl.sum(d, 0)))
    else:
        between, _, rest, _ = scalar_factors(g, i, live, g_t, GATE == SCALAR)
        B = tile(writes[0], i, live, b_t, j, b_k, K, BK)
        Aq = product(tile(queries[0], i, live, q_t, j, q_k, K, BK), tl.trans(B), PRECISION)
        tl.store(pairs + at, Aq * between * scale)
        Aa = product(tile(removals[0], i, live, a_t, j, a_k, K, BK), tl.trans(B), PRECISION)
        tl.store(pairs + C * C + at, -Aa * between)
        B = B.to(tl.float32) * rest[:, None]
    tl.debug_barrier()

    E = solve(pairs, solved, beta, tokens, beta_t, i, C, STREAMS, SOLVE)
    B += product(tl.trans(E), B, SOLVE)
    tl.store(bt + tiles, B.to(bt.dtype.element_ty))
    Aq = tl.load(pairs + at, mask=ordered(i, INCLUSIVE), other=0.0)
    Aq += product(Aq, E, SOLVE)
    tl.store(ap + at, Aq.to(ap.dtype.element_ty))
