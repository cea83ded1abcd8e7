"""The chunkwise forward kernel: one program processes the chunks of a sequence or segment, with its block of the state in registers.

G are the cumulative sums of decays in a chunk. Gq are the sums that a token's query uses: without the token's own decay if the previous
state is read. S is the state before the chunk, and M is half of the chunk's total decay::

    A_ij = sum_d q_id 2^(Gq_id - M_d) 2^(M_d - G_jd) k_jd   for j < i, and on the diagonal q . k, or q . (u o k)
    O    = scale (A V + (q o 2^(Gq - M)) (2^M o S))
    S'   = 2^M o (2^M o S + (k o 2^(M - G))^T V)

A, the sums and the states between chunks are not stored in memory. M halves the exponents. 2^(M - G) is used only if the chunk
decays by at most 2^SUITS. Otherwise A is computed by subchunks, each with its own anchor, and S' from reversed sums, whose factors
are at most 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.tiles import product, slot_of, tile, tokens_of
from .tiles import (
    CHANNEL,
    NONE,
    SCALAR,
    SUITS,
    constant_decay,
    factors,
    read_factors,
    rest_factors,
    rounded,
    scalar_sums,
    sequence_with_pieces,
    subchunk,
    triangle,
)


@triton.jit
def weights_by_subchunks(
    q, k, g, step, left, i, j, q_t, q_k, k_t, k_k, g_t, g_k,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PREVIOUS: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """A [C,C] strictly below the diagonal, for any decay. Tiles are loaded again, so this rare case needs no registers elsewhere."""
    A = tl.zeros((C, C), tl.float32)
    m = tl.zeros((), tl.int32)
    while m < left:
        n, eq, ek = subchunk(g, step, left, m, i, j, g_t, g_k, K, BK, C, PREVIOUS, LIMIT)
        qt = tile(q, i * step, i < left, q_t, j, q_k, K, BK).to(tl.float32) * eq
        kt = tile(k, i * step, i < left, k_t, j, k_k, K, BK).to(tl.float32) * ek
        A += product(qt, tl.trans(kt), PRECISION)
        m = n
    return tl.where(i[:, None] > i[None, :], A, 0.0)


@triton.jit(do_not_specialize=["N", "T", "L"])
def penstock_chunk_fwd(
    q, k, v, g, u, ones, initial_state, output, final_state, chunk_states, resume, cu_seqlens, slots, scale, N, T, L, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, u_h, u_k, s_n, s_h, s_k, s_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SEGMENTS: tl.constexpr,
    DECAY: tl.constexpr, STATIC: tl.constexpr, PREVIOUS: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, EVERY: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr, STAGES: tl.constexpr,
    HALVES: tl.constexpr, EXACT: tl.constexpr, PIECE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, block of V); if SEGMENTS (segment of L tokens, head, block of V), and initial states are per segment.

    ``chunk_states`` [slots of EVERY tokens,H,K,V]: the state before every EVERY tokens, for the backward pass; EVERY = 0: not stored.

    Decays per channel need several launches. The first has no code for chunks whose decay is too strong for 2^-G. At the first such
    chunk it stores its state, and the token in ``resume`` [programs]. The next launch resumes there if tokens are left: with HALVES,
    it computes long chunks as two chunks of C tokens each, and stops at the first half whose decay is too strong. The last launch is
    EXACT: for any decay. So the rare case costs the frequent case no registers and no branches.

    PIECE > 0: updates in place (see ``in_place.py``). The states are rows of a pool, with SLOTS row ``slots[n]``. Only whole pieces of
    PIECE tokens are processed, in one launch, which is EXACT. Behind each piece the state is rounded to the pool's dtype. If PACKED, the
    programs are those of the sequences that have a piece, at most T // PIECE.
    """
    W: tl.constexpr = 2 * C if HALVES else C
    NV: tl.constexpr = (V + BV - 1) // BV
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    pid = tl.program_id(0)
    vb = pid % NV
    h = (pid // NV % H).to(tl.int64)
    slot = pid // NV // H
    if PIECE > 0 and PACKED:
        slot = sequence_with_pieces(slot, cu_seqlens, N, PIECE)
        if slot == N:
            return
    n, b, row, step, begin, done, tokens = tokens_of(slot, cu_seqlens, N, T, L, SEGMENTS, PACKED, REVERSE)
    if EVERY > 0:
        first_kept = slot_of(n, begin, done, T, EVERY, PACKED).to(tl.int64)
    slot = slot.to(tl.int64)
    if PIECE > 0:
        tokens = tokens // PIECE * PIECE
        if SLOTS:
            slot = tl.load(slots + n).to(tl.int64)
        if tokens == 0 or slot < 0:
            return

    zero = tl.zeros((), tl.int64)
    i = tl.arange(0, C)
    dk = tl.arange(0, BK)
    dv = vb * BV + tl.arange(0, BV)
    q += b * q_b + row * q_t + h * q_h
    k += b * k_b + row * k_t + h * k_h
    v += b * v_b + row * v_t + h * v_h
    g += b * g_b + row * g_t + h * g_h
    output += ((b * T + row) * H + h) * V
    inside = (dk < K)[:, None] & (dv < V)[None, :]
    start = 0
    first = initial_state + slot * s_n + h * s_h + dk[:, None] * s_k + dv[None, :] * s_v
    last = first if PIECE > 0 else final_state + ((slot * H + h) * K + dk[:, None]) * V + dv[None, :]
    left_behind = first if SEGMENTS else last
    if HALVES or (EXACT and PIECE == 0):
        start = tl.load(resume + pid)
        if start >= tokens:
            return
        S = tl.load(left_behind, mask=inside, other=0.0).to(tl.float32)
    elif INITIAL:
        S = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    suited = tokens
    if DECAY == CHANNEL:
        lower = triangle(ones, i, W, True, PRECISION)
        strict = triangle(ones, i, W, False, PRECISION) if PREVIOUS else lower
    if PREVIOUS:
        bonus = tl.load(u + h * u_h + dk * u_k, mask=dk < K, other=0.0).to(tl.float32)

    constant = 0.0
    if DECAY == SCALAR and STATIC:
        constant = constant_decay(g)

    for t in tl.range(start, tokens, C, num_stages=STAGES):
        at = zero + t * step
        live = t + i < tokens
        if EVERY > 0:
            if t % EVERY == 0:
                kept = chunk_states + (((first_kept + t // EVERY) * H + h) * K + dk[:, None]) * V + dv[None, :]
                tl.store(kept, S.to(chunk_states.dtype.element_ty), mask=inside)
        Q = tile(q + at * q_t, i * step, live, q_t, dk, q_k, K, BK)
        Kt = tile(k + at * k_t, i * step, live, k_t, dk, k_k, K, BK)
        Vt = tile(v + at * v_t, i * step, live, v_t, dv, v_v, V, BV)
        if DECAY == NONE:
            A = tl.where(i[:, None] >= i[None, :], product(Q, tl.trans(Kt), PRECISION), 0.0)
            O = product(Q, S, PRECISION)
            S += product(tl.trans(Kt), Vt, PRECISION)
        elif DECAY == SCALAR:
            between, read, rest, total = scalar_sums(g + at * g_t, constant, step, tl.minimum(tokens - t, C), i, g_t, C, STATIC, LIMIT)
            A = product(Q, tl.trans(Kt), PRECISION) * tl.exp2(between)
            O = product(Q, S, PRECISION) * tl.exp2(read)[:, None]
            S = S * tl.exp2(total) + product(tl.trans(Kt), Vt * tl.exp2(rest)[:, None], PRECISION)
        else:
            d = tile(g + at * g_t, i * step, live, g_t, dk, g_k, K, BK).to(tl.float32)
            grow, shrink, before, behind, total = factors(d, lower, strict, PREVIOUS, PRECISION)
            suits = tl.min(total, 0) >= -SUITS
            if not EXACT:
                if (not suits) & (t < suited):
                    tl.store(left_behind, S, mask=inside)
                    suited = t
            if (not EXACT) or suits:
                kt = (Kt.to(tl.float32) * shrink).to(OPERAND)
                qt = (Q.to(tl.float32) * grow).to(OPERAND)
                A = product(qt, tl.trans(kt), PRECISION)
                S *= before[:, None]
                O = product(qt, S, PRECISION)
                S = behind[:, None] * (S + product(tl.trans(kt), Vt, PRECISION))
            else:
                left = tl.minimum(tokens - t, C)
                qc = q + at * q_t
                kc = k + at * k_t
                gc = g + at * g_t
                A = weights_by_subchunks(qc, kc, gc, step, left, i, dk, q_t, q_k, k_t, k_k, g_t, g_k, K, BK, C, PREVIOUS, PRECISION, LIMIT)
                if not PREVIOUS:
                    A += tl.where(i[:, None] == i[None, :], tl.sum(Q.to(tl.float32) * Kt.to(tl.float32), 1)[:, None], 0.0)
                read = read_factors(gc, step, left, i, dk, g_t, g_k, K, BK, PREVIOUS)
                qt = (tile(qc, i * step, live, q_t, dk, q_k, K, BK).to(tl.float32) * read).to(OPERAND)
                O = product(qt, S, PRECISION)
                rest = rest_factors(gc, step, left, i, dk, g_t, g_k, K, BK, C)
                kt = (tile(kc, i * step, live, k_t, dk, k_k, K, BK).to(tl.float32) * rest).to(OPERAND)
                S = (before * behind)[:, None] * S + product(tl.trans(kt), Vt, PRECISION)
            if PREVIOUS:
                own = tl.sum(Q.to(tl.float32) * bonus[None, :] * Kt.to(tl.float32), 1)
                A = tl.where(i[:, None] > i[None, :], A, tl.where(i[:, None] == i[None, :], own[:, None], 0.0))
            else:
                A = tl.where(i[:, None] >= i[None, :], A, 0.0)
        O = (O + product(A, Vt, PRECISION)) * scale
        mask = live[:, None] & (dv < V)[None, :]
        tl.store(output + (at * H * V) + (i * step)[:, None] * (H * V) + dv[None, :], O.to(output.dtype.element_ty), mask=mask)
        if PIECE > 0:
            if (t + C) % PIECE == 0:
                S = rounded(S, final_state)

    if DECAY == CHANNEL and not EXACT:
        tl.store(resume + pid, suited)
        if FINAL and suited >= tokens:
            tl.store(last, S.to(final_state.dtype.element_ty), mask=inside)
    elif FINAL:
        tl.store(last, S.to(final_state.dtype.element_ty), mask=inside)
