"""The walk over the chunks of a sequence with tiles that do not depend on the state, see ``prepare.py``: forward in time.

    X  = beta o (R + Ar S)                    R = V (one stream), Aa_k V (two streams)
    O  = Ap X + Qr S   [+ Aq_k V]             S' = total o S + Bt^T X   [+ Kr^T V]

Without decays per channel Ar S and Qr S are -read o (k S) and scale read o (q S): the tiles are q and k themselves. From chunk to chunk
there are two products that depend on each other, Ar S and Bt^T X.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, SCALAR
from ....gpu.tiles import rounded, sequence_with_pieces, slot_of, tile, tokens_of
from .levels import EXCLUSIVE, INCLUSIVE, ordered, scalar_factors, strengths, where_written
from .products import product, product_apart


@triton.jit(do_not_specialize=["N", "T", "L"])
def penstock_delta_walk(
    q, k, v, g, beta, ap, bt, qr, ar, kr, late, total, initial_state, output, final_state, x, chunk_states, cu_seqlens, slots,
    scale, N, T, L, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, beta_b, beta_t, beta_h, s_n, s_h, s_k, s_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, GATE: tl.constexpr,
    INITIAL: tl.constexpr, OUTPUT: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr, PIECE: tl.constexpr, SLOTS: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """X = beta o (R + Ar S), O = Ap X + Qr S, S' = total o S + Bt^T X, chunk after chunk.

    Reads q, k [B,T,H,K], v [B,T,H,V], g [B,T,H], beta [B,T,H] and the initial state [N,H,K,V], all by strides, and the tiles of
    ``penstock_delta_prepare``. Writes ``output`` [B,T,H,V] if OUTPUT, and ``final_state`` [N,H,K,V]. If KEEP, also ``x`` [slots,H,C,V] and
    the states before chunks, ``chunk_states`` [slots,H,K,V]. Program (sequence, head, block of V). SEGMENTS: (segment of L tokens, head,
    block of V), and initial and final states are those of segments.

    PIECE > 0: updates in place, of whole chunks only. States are rows of a pool, with SLOTS row ``slots[n]``; the state is rounded to the
    pool's dtype after each chunk. If PACKED, the programs are those of the sequences that have a piece, at most T // PIECE.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    h = (pid // NV % H).to(tl.int64)
    sequence = pid // NV // H
    if PIECE > 0 and PACKED:
        sequence = sequence_with_pieces(sequence, cu_seqlens, N, PIECE)
        if sequence == N:
            return
    n, batch, row, _step, begin, done, tokens = tokens_of(sequence, cu_seqlens, N, T, L, SEGMENTS, PACKED, False)
    if SEGMENTS:
        if tokens <= 0:
            return
    share = slot_of(n, begin, done, T, C, PACKED).to(tl.int64) * H + h
    own = (sequence if SEGMENTS else n).to(tl.int64)
    if PIECE > 0:
        tokens = tokens // PIECE * PIECE
        if SLOTS:
            own = tl.load(slots + n).to(tl.int64)
        if tokens == 0 or own < 0:
            return
    i = tl.arange(0, C)
    j = tl.arange(0, BK)
    y = pid % NV * BV + tl.arange(0, BV)
    at = i[:, None] * C + i[None, :]
    tiles = i[:, None] * BK + j[None, :]
    inside = (j < K)[:, None] & (y < V)[None, :]
    q += batch * q_b + row * q_t + h * q_h
    k += batch * k_b + row * k_t + h * k_h
    v += batch * v_b + row * v_t + h * v_h
    g += batch * g_b + row * g_t + h * g_h
    beta += batch * beta_b + row * beta_t + h * beta_h
    first = initial_state + own * s_n + h * s_h + j[:, None] * s_k + y[None, :] * s_v
    if INITIAL:
        S = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    zero = tl.zeros((), tl.int64)
    once = tl.minimum(tokens, 1)
    APART: tl.constexpr = STAGES == 1
    for t in tl.range(0, tokens, C, num_stages=STAGES):
        to = zero + t
        here = share + to // C * H
        live = i < tokens - t
        if KEEP:
            tl.store(chunk_states + (here * K + j[:, None]) * V + y[None, :], S.to(chunk_states.dtype.element_ty), mask=inside)
        Vt = tile(v + to * v_t, i, live, v_t, y, v_v, V, BV)
        strength = strengths(beta + to * beta_t, i, live, beta_t, STREAMS)[:, None]
        if GATE == CHANNEL:
            X = product_apart(tl.load(ar + here * (C * BK) + tiles), S, once, APART, PRECISION)
            O = product_apart(tl.load(qr + here * (C * BK) + tiles), S, once, APART, PRECISION)
            S *= tl.load(total + here * BK + j)[:, None]
        else:
            X = -product_apart(tile(k + to * k_t, i, live, k_t, j, k_k, K, BK), S, once, APART, PRECISION)
            O = product_apart(tile(q + to * q_t, i, live, q_t, j, q_k, K, BK), S, once, APART, PRECISION) * scale
            if GATE == SCALAR:
                _between, read, _rest, decay = scalar_factors(g + to * g_t, i, live, g_t, True)
                X *= read[:, None]
                O *= read[:, None]
                S *= decay
        if STREAMS == 1:
            X = (strength * (Vt.to(tl.float32) + X)).to(OPERAND)
        else:
            after = late + here * (2 * C * C) + at
            pairs = tl.load(after + C * C, mask=ordered(i, EXCLUSIVE), other=0.0)
            X = (X + product_apart(pairs, Vt, once, APART, PRECISION)).to(OPERAND)
        if KEEP:
            tl.store(x + (here * C + i[:, None]) * V + y[None, :], X.to(x.dtype.element_ty), mask=(y < V)[None, :])
        if STREAMS == 1:
            X = where_written(strength, X)
        S += product(tl.trans(tl.load(bt + here * (C * BK) + tiles)), X, PRECISION)
        if STREAMS == 2:
            S += product(tl.trans(tl.load(kr + here * (C * BK) + tiles)), Vt, PRECISION)
        if OUTPUT:
            O += product(tl.load(ap + here * (C * C) + at), X, PRECISION)
            if STREAMS == 2:
                O += product(tl.load(after, mask=ordered(i, INCLUSIVE), other=0.0), Vt, PRECISION)
            place = output + ((batch * T + row + to + i[:, None]) * H + h) * V + y[None, :]
            tl.store(place, O.to(output.dtype.element_ty), mask=live[:, None] & (y < V)[None, :])
        if PIECE > 0:
            S = rounded(S, final_state)
    if PIECE == 0:
        first = final_state + ((own * H + h) * K + j[:, None]) * V + y[None, :]
    tl.store(first, S.to(final_state.dtype.element_ty), mask=inside)
