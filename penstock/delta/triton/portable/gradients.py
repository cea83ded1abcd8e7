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
from ....gpu.levels import selected_by_parts
from ....gpu.tiles import tile
from .levels import (
    EXCLUSIVE,
    INCLUSIVE,
    LATER,
    chunk_of,
    factor_of_removals,
    factors_of_level,
    halves_of_level,
    pairs_of_level,
    strengths,
    where_written,
)
from .prepare import channels
from .products import product


@triton.jit
def products_with_states(
    z, u, states, d_states, d_outputs, written, j, i, live, once,
    K: tl.constexpr, BJ: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dO S^T, Y S^T, with COLUMNS U dS'^T [C,BJ], and rowsum(S o dS') [BJ], of key channels j. ``once``: see ``gradients_of_level``."""
    d_output, o_t, o_v = d_outputs
    dq = tl.zeros((C, BJ), tl.float32)
    da = tl.zeros((C, BJ), tl.float32)
    db = tl.zeros((C, BJ), tl.float32)
    kept = tl.zeros((BJ,), tl.float32)
    for first in tl.range(0, V * once, BV, num_stages=STAGES):
        y = first + tl.arange(0, BV)
        inside = (j < K)[:, None] & (y < V)[None, :]
        place = j[:, None] * V + y[None, :]
        S = tl.load(states + place, mask=inside, other=0.0)
        dS = tl.load(d_states + place, mask=inside, other=0.0)
        kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        Z = tile(z, i, live, V, y, 1, V, BV)
        dq += product(tile(d_output, i, live, o_t, y, o_v, V, BV), tl.trans(S), PRECISION)
        da += product((Z.to(tl.float32) * written).to(Z.dtype), tl.trans(S), PRECISION)
        if COLUMNS:
            db += product(tile(u, i, live, V, y, 1, V, BV), tl.trans(dS), PRECISION)
    return dq, da, db, kept


@triton.jit
def gradients_of_columns(
    values, d_states, j, i, live, once,
    K: tl.constexpr, BJ: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """U dS'^T or V dS'^T [C,BJ], of key channels j."""
    v, v_t, v_v = values
    db = tl.zeros((C, BJ), tl.float32)
    for first in tl.range(0, V * once, BV, num_stages=1):
        y = first + tl.arange(0, BV)
        inside = (j < K)[:, None] & (y < V)[None, :]
        dS = tl.load(d_states + j[:, None] * V + y[None, :], mask=inside, other=0.0)
        db += product(tile(v, i, live, v_t, y, v_v, V, BV), tl.trans(dS), PRECISION)
    return db


@triton.jit
def rows_with_state_factors(
    dq, da, kept, queries, removals, gates, triangles, i, live, j, scale,
    K: tl.constexpr, BJ: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr,
    DG: tl.constexpr,
):  # fmt: skip
    """The state's part of dq and da, from the products with states, and that of dg."""
    g, g_t, g_k = gates
    d = decays(g, i, live, g_t, j, g_k, K, BJ)
    read = tl.exp2(selected_by_parts(d, triangles, INCLUSIVE, i, C, PRECISION))
    dq *= read * scale
    if AFTER:
        da *= read
    else:
        da *= tl.exp2(selected_by_parts(d, triangles, EXCLUSIVE, i, C, PRECISION))
    dg = tl.zeros((C, BJ), tl.float32)
    if DG:
        of_rows = channels(queries, i, live, j, K, BJ) * dq
        of_removals = channels(removals, i, live, j, K, BJ) * da * (-1.0 if STREAMS == 1 else 1.0)
        if AFTER:
            of_rows += of_removals
        else:
            dg += selected_by_parts(of_removals, triangles, LATER, i, C, PRECISION)
        dg += selected_by_parts(of_rows, triangles, INCLUSIVE, i, C, PRECISION, TRANSPOSED=True)
        dg += (kept * tl.exp2(tl.sum(d, 0)))[None, :]
    return dq, da, dg


@triton.jit
def columns_with_state_factors(
    db, dg, writes, gates, triangles, i, live, j, K: tl.constexpr, BJ: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    DG: tl.constexpr,
):  # fmt: skip
    """The state's part of db, from the product with the gradient of the state, and dg with that of b."""
    g, g_t, g_k = gates
    d = decays(g, i, live, g_t, j, g_k, K, BJ)
    db *= tl.exp2(selected_by_parts(d, triangles, LATER, i, C, PRECISION))
    if DG:
        dg += selected_by_parts(channels(writes, i, live, j, K, BJ) * db, triangles, EXCLUSIVE, i, C, PRECISION)
    return db, dg


@triton.jit
def gradients_of_level(
    dXb, X, Xb, weights, i, level, once, C: tl.constexpr, LEVELS: tl.constexpr, ANCHOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P Xb, and dXb + P^T X, where P are the gradients of pairs (pointers [C,C]) under the mask of a level.

    In a loop of one iteration, because Triton does not share work between warps if results of products are operands of others, see
    ``selected_by_parts``. The compiler must not know ``once``, which is 1.
    """
    dX = tl.zeros_like(dXb)
    for n in tl.range(once, num_stages=1):
        P = tl.load(weights + n * (C * C) + i[:, None] * C + i[None, :])
        P = tl.where(pairs_of_level(i, level + n, C, LEVELS, ANCHOR), P, 0.0)
        dX += product(P, Xb, PRECISION)
        dXb += product(tl.trans(P), X, PRECISION)
    return dX, dXb


@triton.jit
def add_level(
    dq, da, db, dg, queries, removals, writes, gates, matrices, level, weights, i, live, j, once,
    K: tl.constexpr, BJ: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, AFTER: tl.constexpr, LEVELS: tl.constexpr,
    ANCHOR: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr, DG: tl.constexpr,
):  # fmt: skip
    """The gradients with those of the pairs of a level, of one stream: ``writes`` and db are b and db, or k and dk.

    If STREAMS is 1, db is db - da, and da is not computed. Sums of dg multiply the same rounded tiles on both sides of an anchor.
    """
    inclusive, exclusive = matrices
    later, earlier = halves_of_level(i, live, level, C, LEVELS, ANCHOR)
    g, g_t, g_k = gates
    d = decays(g, i, later | earlier, g_t, j, g_k, K, BJ)
    query, key = factors_of_level(d, inclusive, i, level, C, LEVELS, ANCHOR, PRECISION)
    Xb = (channels(writes, i, earlier, j, K, BJ) * key).to(OPERAND)
    removal = factor_of_removals(query, d, exclusive, i, level, C, AFTER, PRECISION)
    X = (channels(removals, i, later, j, K, BJ) * removal * (-1.0 if STREAMS == 1 else 1.0)).to(OPERAND)
    dX, dXb = gradients_of_level(tl.zeros_like(d), X, Xb, weights + C * C, i, level, once, C, LEVELS, ANCHOR, PRECISION)
    if STREAMS == 1:
        db -= dX * removal
    else:
        da += dX * removal
    of_rows = dX * X.to(tl.float32)
    if DG and not AFTER:
        dg += selected_by_parts(of_rows, exclusive, level, i, C, PRECISION, TRANSPOSED=True)
        of_rows = tl.zeros_like(d)
    X = (channels(queries, i, later, j, K, BJ) * query).to(OPERAND)
    dX, dXb = gradients_of_level(dXb, X, Xb, weights, i, level, once, C, LEVELS, ANCHOR, PRECISION)
    dq += dX * query
    db += dXb * key
    if DG:
        of_columns = dXb * Xb.to(tl.float32)
        if ANCHOR:
            of_columns = tl.where(level == LEVELS, -of_columns, of_columns)
        of_rows += dX * X.to(tl.float32) + of_columns
        dg += selected_by_parts(of_rows, inclusive, level, i, C, PRECISION, TRANSPOSED=True)
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
    once = tl.cdiv(tokens, C)
    i = tl.arange(0, C)
    j = tl.program_id(0) % NK * BJ + tl.arange(0, BJ)
    live = i < tokens
    queries = (q + batch * q_b + row * q_t + h * q_h, q_t, q_k)
    removals = (a + batch * a_b + row * a_t + h * a_h, a_t, a_k)
    gates = (g + batch * g_b + row * g_t + h * g_h, g_t, g_k)
    d_outputs = (d_output + batch * o_b + row * o_t + h * o_h, o_t, o_v)
    k += batch * k_b + row * k_t + h * k_h
    v += batch * v_b + row * v_t + h * v_h
    b += batch * b_b + row * b_t + h * b_h
    x += share * (C * V)
    weights += share * (2 * C * C)
    late += share * (2 * C * C)
    triangles = levels + (LEVELS + ANCHOR) * (C * C)
    strength = strengths(beta + batch * beta_b + row * beta_t + h * beta_h, i, live, beta_t, STREAMS)
    d_chunk_states += share * (K * V)
    place = ((batch * T + row) * H + h) * K
    dQ, dA, _dB, kept = products_with_states(
        z + share * (C * V), x, chunk_states + share * (K * V), d_chunk_states, d_outputs, where_written(strength, strength)[:, None],
        j, i, live, once, K, BJ, V, BV, C, PRECISION, False, 1,
    )  # fmt: skip
    dQ, dA, dG = rows_with_state_factors(
        dQ, dA, kept, queries, removals, gates, triangles, i, live, j, scale, K, BJ, C, STREAMS, AFTER, PRECISION, DG
    )
    for stream in tl.range(STREAMS * once, num_stages=1):
        writes = (b, b_t, b_k)
        pairs = weights
        d_writes = dk if STREAMS == 1 else db
        if STREAMS == 2:
            of_b = stream == 0
            writes = (tl.where(of_b, b, k), tl.where(of_b, b_t, k_t), tl.where(of_b, b_k, k_k))
            pairs = tl.where(of_b, weights, late)
            d_writes = tl.where(of_b, db, dk)
        if STREAMS == 2 and stream == 1:
            dB = gradients_of_columns((v, v_t, v_v), d_chunk_states, j, i, live, once, K, BJ, V, BV, C, PRECISION)
        else:
            dB = gradients_of_columns((x, V, 1), d_chunk_states, j, i, live, once, K, BJ, V, BV, C, PRECISION)
        dB, dG = columns_with_state_factors(dB, dG, writes, gates, triangles, i, live, j, K, BJ, C, PRECISION, DG)
        own = tl.load(pairs + i * (C + 1)).to(tl.float32)[:, None]
        dQ += own * channels(writes, i, live, j, K, BJ)
        dB += own * channels(queries, i, live, j, K, BJ)
        if STREAMS == 1:
            dB -= dA
        for level in tl.range(LEVELS + ANCHOR, num_stages=1):
            dQ, dA, dB, dG = add_level(
                dQ, dA, dB, dG, queries, removals, writes, gates, (levels, levels_before), level, pairs, i, live, j, once,
                K, BJ, C, STREAMS, AFTER, LEVELS, ANCHOR, PRECISION, OPERAND, DG,
            )  # fmt: skip
        store_columns(d_writes + place, H * K, dB, i, live, j, K)
    if STREAMS == 2:
        store_columns(da + place, H * K, dA, i, live, j, K)
    store_columns(dq + place, H * K, dQ, i, live, j, K)
    if DG:
        store_columns(dg + place, H * K, dG, i, live, j, K)
