"""The chunkwise forward kernel: one program processes the chunks of a sequence or segment, with its block of the state in registers.

G are the cumulative sums of decays in a chunk. Gq are the sums that a token's query uses: without the token's own decay if the previous
state is read. S is the state before the chunk, and M is half of the chunk's total decay::

    A_ij = sum_d q_id 2^(Gq_id - M_d) 2^(M_d - G_jd) k_jd   for j < i, and on the diagonal q . k, or q . (u o k)
    O    = scale (A V + (q o 2^(Gq - M)) (2^M o S))
    S'   = 2^M o (2^M o S + (k o 2^(M - G))^T V)

A, the sums and the states between chunks are not stored in memory. M halves the exponents. 2^(M - G) is used only if every channel of
the chunk decays by at most 2^SUITS. Otherwise A is computed by levels (``tiles.weights_by_levels``), and q and k have the factors 2^Gq and
2^(G_L - G). All of these are exponentials of sums and at most 1, so every decay is exact. The chunk's own decays alone decide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, NONE, SCALAR, decays
from ....gpu.levels import selected
from ....gpu.tiles import LOG2E, product, rounded, sequence_with_pieces, slot_of, tile, tokens_of
from .tiles import SUITS, constant_decay, factors, ones, scalar_sums, weights_by_levels


@triton.jit
def chunk_by_anchor(
    S, saved, save, queries, keys, values, gates, bonus, constant, triangles, outputs, step, left, i, dk, dv, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, STATIC: tl.constexpr, PREVIOUS: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The state after a chunk of ``left`` tokens [BK,BV], from the state S before it, and whether all decays suit; stores the outputs.

    ``queries``, ``keys``, ``values``, ``gates``: the pointer to the chunk's first token, the strides of tokens and of channels.
    ``outputs``: the same pointer and the stride of tokens. If decays per channel do not suit one anchor, the results are invalid, and S is
    stored at ``saved`` (pointers and mask [BK,BV]) if ``save``.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    q, q_t, q_k = queries
    k, k_t, k_k = keys
    v, v_t, v_v = values
    g, g_t, g_k = gates
    o, o_t = outputs
    live = i < left
    suits = left > 0
    Q = tile(q, i * step, live, q_t, dk, q_k, K, BK)
    Kt = tile(k, i * step, live, k_t, dk, k_k, K, BK)
    Vt = tile(v, i * step, live, v_t, dv, v_v, V, BV)
    if DECAY == NONE:
        A = tl.where(i[:, None] >= i[None, :], product(Q, tl.trans(Kt), PRECISION), 0.0)
        O = product(Q, S, PRECISION)
        S += product(tl.trans(Kt), Vt, PRECISION)
    elif DECAY == SCALAR:
        between, read, rest, total = scalar_sums(g, constant, step, tl.minimum(left, C), i, g_t, C, STATIC, LIMIT)
        A = product(Q, tl.trans(Kt), PRECISION) * tl.exp2(between)
        O = product(Q, S, PRECISION) * tl.exp2(read)[:, None]
        S = S * tl.exp2(total) + product(tl.trans(Kt), Vt * tl.exp2(rest)[:, None], PRECISION)
    else:
        d = tile(g, i * step, live, g_t, dk, g_k, K, BK).to(tl.float32)
        lower, strict = triangles
        grow, shrink, before, after, total = factors(d, lower, strict, PREVIOUS, PRECISION)
        suits = tl.min(total, 0) >= -SUITS
        pointers, inside = saved
        if (not suits) & save:
            tl.store(pointers, S, mask=inside)
        kt = (Kt.to(tl.float32) * shrink).to(OPERAND)
        qt = (Q.to(tl.float32) * grow).to(OPERAND)
        A = product(qt, tl.trans(kt), PRECISION)
        S *= before[:, None]
        O = product(qt, S, PRECISION)
        S = after[:, None] * (S + product(tl.trans(kt), Vt, PRECISION))
        if PREVIOUS:
            own = tl.sum(Q.to(tl.float32) * bonus[None, :] * Kt.to(tl.float32), 1)
            A = tl.where(i[:, None] > i[None, :], A, tl.where(i[:, None] == i[None, :], own[:, None], 0.0))
        else:
            A = tl.where(i[:, None] >= i[None, :], A, 0.0)
    O = (O + product(A, Vt, PRECISION)) * scale
    tl.store(o + (i * step)[:, None] * o_t + dv[None, :], O.to(o.dtype.element_ty), mask=live[:, None] & (dv < V)[None, :])
    return S, suits


@triton.jit
def chunk_by_levels(
    S, queries, keys, values, gates, bonus, levels, outputs, step, left, i, dk, dv, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    PREVIOUS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for any decays per channel. The product for O is the last one, see ``weights_by_levels``."""
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    q, q_t, q_k = queries
    k, k_t, k_k = keys
    v, v_t, v_v = values
    g, g_t, g_k = gates
    o, o_t = outputs
    live = i < left
    d = decays(g, i * step, live, g_t, dk, g_k, K, BK)
    A, read = weights_by_levels(queries, keys, d, levels, i, i * step, live, dk, K, BK, C, LEVELS, LEVELS + PREVIOUS, PRECISION)
    Q = tile(q, i * step, live, q_t, dk, q_k, K, BK).to(tl.float32)
    Kt = tile(k, i * step, live, k_t, dk, k_k, K, BK).to(tl.float32)
    own = Q * Kt
    if PREVIOUS:
        own *= bonus[None, :]
    A = tl.where(i[:, None] == i[None, :], tl.sum(own, 1)[:, None], A)
    Vt = tile(v, i * step, live, v_t, dv, v_v, V, BV)
    kt = (Kt * tl.exp2(selected(d, levels, LEVELS + 2, i, C, PRECISION))).to(OPERAND)
    after = tl.exp2(tl.sum(d, 0))[:, None] * S + product(tl.trans(kt), Vt, PRECISION)
    O = (product((Q * tl.exp2(read)).to(OPERAND), S, PRECISION) + product(A, Vt, PRECISION)) * scale
    tl.store(o + (i * step)[:, None] * o_t + dv[None, :], O.to(o.dtype.element_ty), mask=live[:, None] & (dv < V)[None, :])
    return after


@triton.jit
def suited(gates, step, left, i, dk, K: tl.constexpr, BK: tl.constexpr):
    """Whether the decays per channel of a chunk suit one anchor, as in ``chunk_by_anchor``."""
    g, g_t, g_k = gates
    d = tile(g, i * step, i < left, g_t, dk, g_k, K, BK).to(tl.float32)
    return tl.min(tl.sum(d, 0) * LOG2E, 0) >= -SUITS


@triton.jit(do_not_specialize=["N", "T", "L"])
def penstock_chunk_fwd(
    q, k, v, g, u, levels, initial_state, output, final_state, chunk_states, resume, cu_seqlens, slots, scale, N, T, L, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, u_h, u_k, s_n, s_h, s_k, s_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, SEGMENTS: tl.constexpr,
    DECAY: tl.constexpr, STATIC: tl.constexpr, PREVIOUS: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, EVERY: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr, STAGES: tl.constexpr,
    PART: tl.constexpr, PIECE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """S_t = exp(g_t) o S_{t-1} + k_t^T v_t, o_t = scale q_t S_t; PREVIOUS: o_t = scale q_t (S_{t-1} + u o k_t^T v_t).

    Reads q, k [B,T,H,K], v [B,T,H,V], g [B,T,H,K], u [H,K] and the initial state [N,H,K,V], all by strides. Writes output [B,T,H,V] and
    final_state [N,H,K,V]. Program (sequence, head, block of V): chunks of C tokens, one after another. SEGMENTS: (segment of L tokens,
    head, block of V), and initial states are per segment.

    ``chunk_states`` [slots of EVERY tokens,H,K,V]: the state before every EVERY tokens, for the backward pass; EVERY = 0: not stored.

    PART: 1 and 2 are the launches of decays per channel, 0 is the launch of others. The first has only the code for chunks that suit one
    anchor: a branch, or a second loop, would cost registers and the pipeline of loads. It stores the state before the first other chunk,
    and in ``resume`` [programs] the number of tokens before it. The second starts at that chunk, with a branch for each chunk; if all
    chunks suit, it returns at once.

    PIECE > 0: updates in place (see ``in_place.py``). The states are rows of a pool, with SLOTS row ``slots[n]``. Only whole pieces of
    PIECE tokens are processed. Decays per channel have the second launch alone, so a chunk's results do not depend on the chunks before it.
    After each piece the state is rounded to the pool's dtype. If PACKED, the programs are those of the sequences that have a piece, at
    most T // PIECE.
    """
    tl.static_assert(DECAY == CHANNEL or not PREVIOUS, "the previous state is read with decays per channel only")
    NV: tl.constexpr = (V + BV - 1) // BV
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
    first = initial_state + slot * s_n + h * s_h + dk[:, None] * s_k + dv[None, :] * s_v
    last = first if PIECE > 0 else final_state + ((slot * H + h) * K + dk[:, None]) * V + dv[None, :]
    saved = first if SEGMENTS else last
    triangles = (0.0, 0.0)
    if DECAY == CHANNEL:
        lower = ones(levels, LEVELS, i, C, PRECISION)
        triangles = (lower, ones(levels, LEVELS + 1, i, C, PRECISION) if PREVIOUS else lower)
    bonus = 1.0
    if PREVIOUS:
        bonus = tl.load(u + h * u_h + dk * u_k, mask=dk < K, other=0.0).to(tl.float32)
    constant = 0.0
    if DECAY == SCALAR and STATIC:
        constant = constant_decay(g)

    if PART < 2:
        suit = tokens
        if INITIAL:
            S = tl.load(first, mask=inside, other=0.0).to(tl.float32)
        else:
            S = tl.zeros((BK, BV), tl.float32)
        for t in tl.range(0, tokens, C, num_stages=STAGES):
            at = zero + t * step
            if EVERY > 0:
                if t % EVERY == 0:
                    kept = chunk_states + (((first_kept + t // EVERY) * H + h) * K + dk[:, None]) * V + dv[None, :]
                    tl.store(kept, S.to(chunk_states.dtype.element_ty), mask=inside)
            queries, keys, values = (q + at * q_t, q_t, q_k), (k + at * k_t, k_t, k_k), (v + at * v_t, v_t, v_v)
            gates, outputs = (g + at * g_t, g_t, g_k), (output + at * H * V, H * V)
            S, suits = chunk_by_anchor(
                S, (saved, inside), t < suit, queries, keys, values, gates, bonus, constant, triangles, outputs, step, tokens - t,
                i, dk, dv, scale, K, V, BK, BV, C, DECAY, STATIC, PREVIOUS, PRECISION, LIMIT,
            )  # fmt: skip
            if DECAY == CHANNEL:
                suit = tl.where(suits, suit, tl.minimum(suit, t))
            if PIECE > 0:
                if (t + C) % PIECE == 0:
                    S = rounded(S, final_state)
        if PART == 1:
            tl.store(resume + pid, suit)
        if FINAL:
            if suit >= tokens:
                tl.store(last, S.to(final_state.dtype.element_ty), mask=inside)
    else:
        suit = 0
        if PIECE == 0:
            suit = tl.load(resume + pid)
        if suit < tokens:
            S = tl.load(saved, mask=inside, other=0.0).to(tl.float32)
            for t in tl.range(suit, tokens, C, num_stages=1):
                at = zero + t * step
                if EVERY > 0:
                    if t % EVERY == 0:
                        kept = chunk_states + (((first_kept + t // EVERY) * H + h) * K + dk[:, None]) * V + dv[None, :]
                        tl.store(kept, S.to(chunk_states.dtype.element_ty), mask=inside)
                queries, keys, values = (q + at * q_t, q_t, q_k), (k + at * k_t, k_t, k_k), (v + at * v_t, v_t, v_v)
                gates, outputs = (g + at * g_t, g_t, g_k), (output + at * H * V, H * V)
                if suited(gates, step, tokens - t, i, dk, K, BK):
                    S, _ = chunk_by_anchor(
                        S, (saved, inside), False, queries, keys, values, gates, bonus, constant, triangles, outputs, step, tokens - t,
                        i, dk, dv, scale, K, V, BK, BV, C, DECAY, STATIC, PREVIOUS, PRECISION, LIMIT,
                    )  # fmt: skip
                else:
                    S = chunk_by_levels(
                        S, queries, keys, values, gates, bonus, levels, outputs, step, tokens - t, i, dk, dv, scale,
                        K, V, BK, BV, C, LEVELS, PREVIOUS, PRECISION,
                    )  # fmt: skip
                if PIECE > 0:
                    if (t + C) % PIECE == 0:
                        S = rounded(S, final_state)
            if FINAL:
                tl.store(last, S.to(final_state.dtype.element_ty), mask=inside)
