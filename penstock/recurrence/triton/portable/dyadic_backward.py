"""Gradients of a chunk whose decays per channel are too strong for one anchor: by levels, see ``gpu/dyadic.py``.

X = f o (q in second halves, k in first halves) of a level, where f are the decays between a token and the middle of its block. read, rest
and total are the decays from the chunk's beginning to a token, from a token to the chunk's end, and of the whole chunk::

    P      = scale dO V^T below the diagonal, and its transpose above
    Y      = P X, for the pairs of the level             f o Y is dq in second halves and dk in first halves
    dq     = scale read o (dO S^T) + levels + e u o k    dk = rest o (V dS^T) + levels + e u o q
    dv     = scale A^T dO + (k o rest) dS
    dg_t   = sum over levels and over tokens i whose f has the decay of t of (X o Y)_i
           + sum_{i>=t} (q o read o scale dO S^T)_i + sum_{j<t} (k o rest o V dS^T)_j + total o rowsum(S o dS)

The first sum over the state begins after t if the previous state is read; u is 1 without a bonus, and e_i = scale dO_i . v_i. All factors
are exponentials of sums and at most 1, and every term of dg has tokens, or a state, on both sides of t. So nothing overflows or cancels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import decays
from ....gpu.levels import apart, selected
from ....gpu.tiles import product, tile
from .segments import chunk_state
from .tiles import halves, weights_by_levels


@triton.jit
def weights_and_dv(
    queries, keys, gates, d_outputs, bonuses, levels, d_chunk_states, dv, r, live, i, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    PREVIOUS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dv at the pointers ``dv`` and steps of tokens and columns."""
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    NK: tl.constexpr = (K + BK - 1) // BK
    q, q_t, q_k = queries
    k, k_t, k_k = keys
    g, g_t, g_k = gates
    dO_, o_t, o_v = d_outputs
    u, u_k = bonuses
    at, dv_t = dv
    A = tl.zeros((C, C), tl.float32)
    kt = tl.zeros((C, BK), OPERAND)
    for kb in tl.range(NK, num_stages=1):
        j = kb * BK + tl.arange(0, BK)
        Q = tile(q, r, live, q_t, j, q_k, K, BK)
        Kt = tile(k, r, live, k_t, j, k_k, K, BK)
        d = decays(g, r, live, g_t, j, g_k, K, BK)
        pairs, rest = weights_by_levels(queries, keys, d, levels, i, r, live, j, K, BK, C, LEVELS, LEVELS + 2, PRECISION)
        A += pairs
        own = Q.to(tl.float32) * Kt.to(tl.float32)
        if PREVIOUS:
            own *= tl.load(u + j * u_k, mask=j < K, other=0.0).to(tl.float32)[None, :]
        A += tl.where(i[:, None] == i[None, :], tl.sum(own, 1)[:, None], 0.0)
        kt = (Kt.to(tl.float32) * tl.exp2(rest)).to(OPERAND)
    A = (A * scale).to(OPERAND)
    for vb in tl.range((V + BV - 1) // BV, num_stages=1):
        y = vb * BV + tl.arange(0, BV)
        dv_ = product(tl.trans(A), tile(dO_, r, live, o_t, y, o_v, V, BV), PRECISION)
        for kb in tl.range(NK, num_stages=1):
            j = kb * BK + tl.arange(0, BK)
            if NK > 1:
                d = decays(g, r, live, g_t, j, g_k, K, BK)
                rest = tl.exp2(selected(d, levels, LEVELS + 2, i, C, PRECISION))
                kt = (tile(k, r, live, k_t, j, k_k, K, BK).to(tl.float32) * rest).to(OPERAND)
            dv_ += product(kt, chunk_state(d_chunk_states, j, y, K, V), PRECISION)
        tl.store(at + r[:, None] * dv_t + y[None, :], dv_.to(at.dtype.element_ty), mask=live[:, None] & (y < V)[None, :])


@triton.jit
def with_own(
    dq, dk, e, queries, keys, bonuses, du, share, r, live, j, K: tl.constexpr, BK: tl.constexpr, PREVIOUS: tl.constexpr,
):  # fmt: skip
    """dq and dk with the terms of each token's own key and query, e u o k and e u o q. Stores the chunk's du if PREVIOUS."""
    q, q_t, q_k = queries
    k, k_t, k_k = keys
    Q = tile(q, r, live, q_t, j, q_k, K, BK).to(tl.float32)
    Kt = tile(k, r, live, k_t, j, k_k, K, BK).to(tl.float32)
    eq, ek = e * Q, e * Kt
    if PREVIOUS:
        u, u_k = bonuses
        tl.store(du + share * K + j, tl.sum(Q * ek, 0), mask=j < K)
        bonus = tl.load(u + j * u_k, mask=j < K, other=0.0).to(tl.float32)[None, :]
        eq *= bonus
        ek *= bonus
    return dq + ek, dk + eq


@triton.jit
def gradients_by_levels(
    q, k, v, g, u, levels, d_output, chunk_states, d_chunk_states, dq, dk, dv, dg, du, place, share, step, tokens, scale, H,
    q_t, q_k, k_t, k_k, v_t, v_v, g_t, g_k, u_k, o_t, o_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    STATIC: tl.constexpr, DG: tl.constexpr, PREVIOUS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store all gradients of a chunk, for any decay per channel. Input pointers are those of its first token; the rest as in the kernel."""
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i = tl.arange(0, C)
    r = i * step
    live = i < tokens
    queries, keys, gates, d_outputs, bonuses = (q, q_t, q_k), (k, k_t, k_k), (g, g_t, g_k), (d_output, o_t, o_v), (u, u_k)
    weights_and_dv(
        queries, keys, gates, d_outputs, bonuses, levels, d_chunk_states, (dv + place * V, H * V), r, live, i, scale,
        K, V, BK, BV, C, LEVELS, PREVIOUS, PRECISION,
    )  # fmt: skip

    dA = tl.zeros((C, C), tl.float32)
    for vb in tl.range(NV, num_stages=1):
        y = vb * BV + tl.arange(0, BV)
        dO = tile(d_output, r, live, o_t, y, o_v, V, BV)
        dA += product(dO, tl.trans(tile(v, r, live, v_t, y, v_v, V, BV)), PRECISION)
    dA *= scale
    e = tl.sum(tl.where(i[:, None] == i[None, :], dA, 0.0), 1)[:, None]
    P = tl.where(i[:, None] > i[None, :], dA, tl.trans(dA)).to(OPERAND)

    for kb in tl.range(NK, num_stages=1):
        j = kb * BK + tl.arange(0, BK)
        dq_ = tl.zeros((C, BK), tl.float32)
        dk_ = tl.zeros((C, BK), tl.float32)
        kept = tl.zeros((BK,), tl.float32)
        for vb in tl.range(NV, num_stages=1):
            y = vb * BV + tl.arange(0, BV)
            S = chunk_state(chunk_states, j, y, K, V)
            dS = chunk_state(d_chunk_states, j, y, K, V)
            dq_ += product(tile(d_output, r, live, o_t, y, o_v, V, BV), tl.trans(S), PRECISION)
            dk_ += product(tile(v, r, live, v_t, y, v_v, V, BV), tl.trans(dS), PRECISION)
            if DG:
                kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        d = decays(g, r, live, g_t, j, g_k, K, BK)
        dq_ *= tl.exp2(selected(d, levels, LEVELS + PREVIOUS, i, C, PRECISION)) * scale
        dk_ *= tl.exp2(selected(d, levels, LEVELS + 2, i, C, PRECISION))
        Q = tile(q, r, live, q_t, j, q_k, K, BK).to(tl.float32)
        Kt = tile(k, r, live, k_t, j, k_k, K, BK).to(tl.float32)
        dg_ = tl.zeros((C, BK), tl.float32)
        if DG:
            dg_ += (kept * tl.exp2(tl.sum(d, 0)))[None, :]
            dg_ += selected(Q * dq_, levels, LEVELS + PREVIOUS, i, C, PRECISION, True)
            dg_ += selected(Kt * dk_, levels, LEVELS + 2, i, C, PRECISION, True)
        if BK <= 64:  # else q and k take registers
            dq_, dk_ = with_own(dq_, dk_, e, queries, keys, bonuses, du, share, r, live, j, K, BK, PREVIOUS)
        for level in tl.range(LEVELS, num_stages=1):
            L = C // 2 >> level
            second = (i & L) != 0
            f = tl.exp2(selected(d, levels, level, i, C, PRECISION))
            x = f * halves(queries, keys, r, live, second, j, K, BK).to(tl.float32)
            pairs = apart(i, L)
            Y = product(tl.where(pairs | tl.trans(pairs), P, 0.0), x.to(OPERAND), PRECISION)
            if DG:
                dg_ += selected(x * Y, levels, level, i, C, PRECISION, True)
            Y *= f
            dq_ += tl.where(second[:, None], Y, 0.0)
            dk_ += tl.where(second[:, None], 0.0, Y)
        if BK > 64:
            dq_, dk_ = with_own(dq_, dk_, e, queries, keys, bonuses, du, share, r, live, j, K, BK, PREVIOUS)
        mask = live[:, None] & (j < K)[None, :]
        at = place * K + r[:, None] * (H * K) + j[None, :]
        tl.store(dq + at, dq_.to(dq.dtype.element_ty), mask=mask)
        tl.store(dk + at, dk_.to(dk.dtype.element_ty), mask=mask)
        if DG and STATIC:
            tl.store(dg + share * K + j, tl.sum(tl.where(live[:, None], dg_, 0.0), 0), mask=j < K)
        elif DG:
            tl.store(dg + at, dg_.to(dg.dtype.element_ty), mask=mask)
