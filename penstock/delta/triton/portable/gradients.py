"""Gradients of a chunk's tokens with decays per channel, for all chunks in parallel, from those of pairs (``pairs_backward.py``), the
states S before chunks and the gradients dS' of the states after them::

    dq    = scale read o (dO S^T)     da  = reada o (Y S^T)    db = rest o (U dS'^T)    dk = rest o (V dS'^T)
    own     e_t = dAq_tt:  dq += e b (+ e_k k),  db += e q,  dk += e_k q
    level   P = mask o dA, factors f of a token:  dXq = Pq Xb (+ Pq_k Xk), dXa alike, dXb = Pq^T Xq + Pa^T Xa, dXk alike;  dq += f o dXq ...
    dg_t  = sum over levels of rows of (Xq o dXq + Xa o dXa + Xb o dXb + Xk o dXk) whose factor has the decay of t
          + sum i >= t of (q o dq)_i + sum i >= t ("before": i > t) of (a o da)_i + sum s < t of (b o db + k o dk)_s
          + total o rowsum(S o dS')

The last two lines have the gradients of the state's part alone. Every term of dg has tokens or a state on both sides of t: nothing cancels.
With one stream dk = db - da.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import decays
from ....gpu.levels import selected
from ....gpu.tiles import product, tile
from .levels import EXCLUSIVE, INCLUSIVE, LATER, chunk_of, factors_of_level, halves_of_level, pairs_of_level, strengths, where_written
from .prepare import channels


@triton.jit
def gradients_of_states(
    x, z, states, d_states, d_outputs, strength, j, i, live,
    K: tl.constexpr, BJ: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dO S^T, Y S^T, U dS'^T [C,BJ] and rowsum(S o dS') [BJ], of key channels j."""
    d_output, o_t, o_v = d_outputs
    dq = tl.zeros((C, BJ), tl.float32)
    da = tl.zeros((C, BJ), tl.float32)
    db = tl.zeros((C, BJ), tl.float32)
    kept = tl.zeros((BJ,), tl.float32)
    written = where_written(strength, strength)[:, None]
    for first in tl.range(0, V, BV, num_stages=1):
        y = first + tl.arange(0, BV)
        mask = live[:, None] & (y < V)[None, :]
        inside = (j < K)[:, None] & (y < V)[None, :]
        rows = i[:, None] * V + y[None, :]
        place = j[:, None] * V + y[None, :]
        S = tl.load(states + place, mask=inside, other=0.0)
        dS = tl.load(d_states + place, mask=inside, other=0.0)
        kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        Y = (tl.load(z + rows, mask=mask, other=0.0).to(tl.float32) * written).to(z.dtype.element_ty)
        dq += product(tile(d_output, i, live, o_t, y, o_v, V, BV), tl.trans(S), PRECISION)
        da += product(Y, tl.trans(S), PRECISION)
        db += product(tl.load(x + rows, mask=mask, other=0.0), tl.trans(dS), PRECISION)
    return dq, da, db, kept


@triton.jit
def gradient_of_keys(
    values, d_states, j, i, live,
    K: tl.constexpr, BJ: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """V dS'^T [C,BJ], of key channels j."""
    v, v_t, v_v = values
    dk = tl.zeros((C, BJ), tl.float32)
    for first in tl.range(0, V, BV, num_stages=1):
        y = first + tl.arange(0, BV)
        inside = (j < K)[:, None] & (y < V)[None, :]
        dS = tl.load(d_states + j[:, None] * V + y[None, :], mask=inside, other=0.0)
        dk += product(tile(v, i, live, v_t, y, v_v, V, BV), tl.trans(dS), PRECISION)
    return dk


@triton.jit
def with_state_factors(
    dq, da, db, kept, queries, removals, writes, d, triangles, i, live, j, scale,
    K: tl.constexpr, BJ: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr,
    DG: tl.constexpr,
):  # fmt: skip
    """The state's part of dq, da and db, from the products with states, and that of dg."""
    read = tl.exp2(selected(d, triangles, INCLUSIVE, i, C, PRECISION))
    dq *= read * scale
    if AFTER:
        da *= read
    else:
        da *= tl.exp2(selected(d, triangles, EXCLUSIVE, i, C, PRECISION))
    db *= tl.exp2(selected(d, triangles, LATER, i, C, PRECISION))
    dg = tl.zeros((C, BJ), tl.float32)
    if DG:
        of_rows = channels(queries, i, live, j, K, BJ) * dq
        of_removals = channels(removals, i, live, j, K, BJ) * da * (-1.0 if STREAMS == 1 else 1.0)
        of_columns = channels(writes, i, live, j, K, BJ) * db
        if AFTER:
            of_rows += of_removals
        else:
            dg += selected(of_removals, triangles, LATER, i, C, PRECISION)
        dg += selected(of_rows, triangles, INCLUSIVE, i, C, PRECISION, TRANSPOSED=True)
        dg += selected(of_columns, triangles, EXCLUSIVE, i, C, PRECISION) + (kept * tl.exp2(tl.sum(d, 0)))[None, :]
    return dq, da, db, dg


@triton.jit
def add_level(
    dq, da, db, dg, queries, removals, writes, d, matrices, level, weights, at, i, live, j,
    K: tl.constexpr, BJ: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, AFTER: tl.constexpr, LEVELS: tl.constexpr,
    ANCHOR: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr, DG: tl.constexpr,
):  # fmt: skip
    """The gradients with those of the pairs of a level, of one stream: ``writes`` and db are b and db, or k and dk.

    If STREAMS is 1, db is db - da, and da is not computed. Sums of dg multiply the same rounded tiles on both sides of an anchor.
    """
    query, removal, key = factors_of_level(d, matrices, i, level, C, LEVELS, ANCHOR, AFTER, PRECISION)
    mask = pairs_of_level(i, level, C, LEVELS, ANCHOR)
    later, earlier = halves_of_level(i, live, level, C, LEVELS, ANCHOR)
    Pq = tl.where(mask, tl.load(weights + at), 0.0)
    Pa = tl.where(mask, tl.load(weights + C * C + at), 0.0)
    Xq = (channels(queries, i, later, j, K, BJ) * query).to(OPERAND)
    Xa = (channels(removals, i, later, j, K, BJ) * removal * (-1.0 if STREAMS == 1 else 1.0)).to(OPERAND)
    Xb = (channels(writes, i, earlier, j, K, BJ) * key).to(OPERAND)
    dXb = product(tl.trans(Pq), Xq, PRECISION) + product(tl.trans(Pa), Xa, PRECISION)
    dXq = product(Pq, Xb, PRECISION)
    dXa = product(Pa, Xb, PRECISION)
    dq += dXq * query
    db += dXb * key
    if STREAMS == 1:
        db -= dXa * removal
    else:
        da += dXa * removal
    if DG:
        inclusive, exclusive = matrices
        of_rows = dXq * Xq.to(tl.float32)
        of_columns = dXb * Xb.to(tl.float32)
        if ANCHOR:
            of_columns = tl.where(level == LEVELS, -of_columns, of_columns)
        of_rows += of_columns
        of_removals = dXa * Xa.to(tl.float32)
        if AFTER:
            of_rows += of_removals
        else:
            dg += selected(of_removals, exclusive, level, i, C, PRECISION, TRANSPOSED=True)
        dg += selected(of_rows, inclusive, level, i, C, PRECISION, TRANSPOSED=True)
    return dq, da, db, dg


@triton.jit
def store_columns(base, tensor_t, x, i, live, j, K: tl.constexpr):
    """Store the columns j of a gradient [T,K] whose rows are ``tensor_t`` apart."""
    tl.store(base + i[:, None] * tensor_t + j[None, :], x.to(base.dtype.element_ty), mask=live[:, None] & (j < K)[None, :])


@triton.jit(do_not_specialize=["N", "T"])
def penstock_delta_gradients(
    q, k, v, g, beta, a, b, levels, levels_before, weights, late, x, z, chunk_states, d_chunk_states, d_output,
    dq, dk, dg, da, db, cu_seqlens, scale, N, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, beta_b, beta_t, beta_h,
    a_b, a_t, a_h, a_k, b_b, b_t, b_h, b_k, o_b, o_t, o_h, o_v,
    K: tl.constexpr, V: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, AFTER: tl.constexpr,
    LEVELS: tl.constexpr, ANCHOR: tl.constexpr, DG: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq = scale read o (dO S^T) + pairs, dk, da and db alike, and dg, of every chunk.

    Reads q, k, a, b, g [B,T,H,K], v, dO [B,T,H,V] and beta [B,T,H] by strides; the gradients of pairs and U (``x``) of
    ``penstock_delta_pairs_bwd``; ``z`` [slots,H,C,V], S and dS' [slots,H,K,V] of the walks. Writes dq, dk, da, db, dg [B,T,H,K]. Program
    (chunk, head, block of K): with two streams the pairs of b, then those of k, because the sums of both need too many registers.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    NK: tl.constexpr = (K + BJ - 1) // BJ
    batch, row, tokens, h, share = chunk_of(tl.program_id(0) // NK, cu_seqlens, N, T, H, C, PACKED)
    if tokens <= 0:
        return
    i = tl.arange(0, C)
    j = tl.program_id(0) % NK * BJ + tl.arange(0, BJ)
    live = i < tokens
    at = i[:, None] * C + i[None, :]
    queries = (q + batch * q_b + row * q_t + h * q_h, q_t, q_k)
    keys = (k + batch * k_b + row * k_t + h * k_h, k_t, k_k)
    values = (v + batch * v_b + row * v_t + h * v_h, v_t, v_v)
    removals = (a + batch * a_b + row * a_t + h * a_h, a_t, a_k)
    writes = (b + batch * b_b + row * b_t + h * b_h, b_t, b_k)
    d_outputs = (d_output + batch * o_b + row * o_t + h * o_h, o_t, o_v)
    weights += share * (2 * C * C)
    late += share * (2 * C * C)
    triangles = levels + (LEVELS + ANCHOR) * (C * C)
    strength = strengths(beta + batch * beta_b + row * beta_t + h * beta_h, i, live, beta_t, STREAMS)
    d_chunk_states += share * (K * V)
    place = ((batch * T + row) * H + h) * K
    dQ, dA, dB, kept = gradients_of_states(
        x + share * (C * V), z + share * (C * V), chunk_states + share * (K * V), d_chunk_states, d_outputs, strength, j, i, live,
        K, BJ, V, BV, C, PRECISION,
    )  # fmt: skip
    d = decays(g + batch * g_b + row * g_t + h * g_h, i, live, g_t, j, g_k, K, BJ)
    dQ, dA, dB, dG = with_state_factors(
        dQ, dA, dB, kept, queries, removals, writes, d, triangles, i, live, j, scale, K, BJ, C, STREAMS, AFTER, PRECISION, DG
    )
    own = tl.load(weights + i * (C + 1)).to(tl.float32)[:, None]
    dQ += own * channels(writes, i, live, j, K, BJ)
    dB += own * channels(queries, i, live, j, K, BJ)
    if STREAMS == 1:
        dB -= dA
    for level in tl.range(LEVELS + ANCHOR, num_stages=1):
        dQ, dA, dB, dG = add_level(
            dQ, dA, dB, dG, queries, removals, writes, d, (levels, levels_before), level, weights, at, i, live, j,
            K, BJ, C, STREAMS, AFTER, LEVELS, ANCHOR, PRECISION, OPERAND, DG,
        )  # fmt: skip
    if STREAMS == 1:
        store_columns(dk + place, H * K, dB, i, live, j, K)
    else:
        store_columns(db + place, H * K, dB, i, live, j, K)
        dK = gradient_of_keys(values, d_chunk_states, j, i, live, K, BJ, V, BV, C, PRECISION)
        dK *= tl.exp2(selected(d, triangles, LATER, i, C, PRECISION))
        if DG:
            dG += selected(channels(keys, i, live, j, K, BJ) * dK, triangles, EXCLUSIVE, i, C, PRECISION)
        own = tl.load(late + i * (C + 1)).to(tl.float32)[:, None]
        dQ += own * channels(keys, i, live, j, K, BJ)
        dK += own * channels(queries, i, live, j, K, BJ)
        for level in tl.range(LEVELS + ANCHOR, num_stages=1):
            dQ, dA, dK, dG = add_level(
                dQ, dA, dK, dG, queries, removals, keys, d, (levels, levels_before), level, late, at, i, live, j,
                K, BJ, C, STREAMS, AFTER, LEVELS, ANCHOR, PRECISION, OPERAND, DG,
            )  # fmt: skip
        store_columns(dk + place, H * K, dK, i, live, j, K)
        store_columns(da + place, H * K, dA, i, live, j, K)
    store_columns(dq + place, H * K, dQ, i, live, j, K)
    if DG:
        store_columns(dg + place, H * K, dG, i, live, j, K)
