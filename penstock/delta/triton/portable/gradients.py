"""Gradients of a chunk's tokens, for all chunks in parallel, from the states before them and the gradients of the states after them.

X, Z and Y = beta o Z are those of the walks, S the state before the chunk and dS' the gradient of that after it::

    U     = T X                                            dbeta = rowsum(Z o U) / beta
    dAq   = scale dO U^T  (s <= t)    dAa = Y U^T (s < t)    two streams: dAq_k, dAa_k with V for U
    dq    = scale read o (dO S^T)     da  = reada o (Y S^T)    db = rest o (U dS'^T)    dk = rest o (V dS'^T)
    own     e_t = dAq_tt:  dq += e b (+ e_k k),  db += e q,  dk += e_k q
    level   P = mask o dA, factors f of a token:  dXq = Pq Xb (+ Pq_k Xk), dXa alike, dXb = Pq^T Xq + Pa^T Xa, dXk alike;  dq += f o dXq ...
    dg_t  = sum over levels of rows of (Xq o dXq + Xa o dXa + Xb o dXb + Xk o dXk) whose factor has the decay of t
          + sum i >= t of (q o dq)_i + sum i >= t ("before": i > t) of (a o da)_i + sum s < t of (b o db + k o dk)_s + total o rowsum(S o dS')

The last line has the gradients of the state's part alone. Every term of dg has tokens or a state on both sides of t, so nothing cancels.
With one stream dk = db - da. With one decay per token all pairs are one level, P is multiplied by the decays between tokens, and
dg_t = sum over s < t <= i of (dAq o Aq + dAa o Aa)_is and the same sums of the state's part over channels.

U replaces X, and dA the pairs, in memory that only this program uses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, SCALAR, decays
from ....gpu.tiles import product, span_of, tile
from .levels import (
    EXCLUSIVE,
    INCLUSIVE,
    LATER,
    factors_of_level,
    of_level,
    ordered,
    pairs_of_level,
    scalar_factors,
    strengths,
    sums,
    where_written,
)
from .prepare import channels


@triton.jit
def gradients_of_pairs(
    x, z, solved, pairs, late, values, d_outputs, dbeta, strength, at, i, live, scale,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """Store U in place of X, the gradients of k's pairs in ``late`` and dbeta. Returns scale dO U^T and Y U^T [C,C]."""
    v, v_t, v_v = values
    d_output, o_t, o_v = d_outputs
    qb = tl.zeros((C, C), tl.float32)
    ab = tl.zeros((C, C), tl.float32)
    qk = tl.zeros((C, C), tl.float32)
    ak = tl.zeros((C, C), tl.float32)
    of_beta = tl.zeros((C,), tl.float32)
    for first in tl.range(0, V, BV, num_stages=1):
        y = first + tl.arange(0, BV)
        mask = live[:, None] & (y < V)[None, :]
        rows = i[:, None] * V + y[None, :]
        X = tl.load(x + rows, mask=mask, other=0.0).to(tl.float32)
        Z = tl.load(z + rows, mask=mask, other=0.0).to(tl.float32)
        dO = tile(d_output, i, live, o_t, y, o_v, V, BV)
        U = X + product(tl.load(solved + at), X, SOLVE)
        of_beta += tl.sum(Z * U, 1)
        U = where_written(strength[:, None], U).to(x.dtype.element_ty)
        tl.store(x + rows, U, mask=mask)
        Y = (Z * where_written(strength, strength)[:, None]).to(x.dtype.element_ty)
        qb += product(dO, tl.trans(U), PRECISION)
        ab += product(Y, tl.trans(U), PRECISION)
        if STREAMS == 2:
            Vt = tile(v, i, live, v_t, y, v_v, V, BV)
            qk += product(dO, tl.trans(Vt), PRECISION)
            ak += product(Y, tl.trans(Vt), PRECISION)
    pointers, of_token = dbeta
    if STREAMS == 1:
        tl.store(pointers + i * of_token, (of_beta / strength).to(pointers.dtype.element_ty), mask=live)
    else:
        tl.store(late + at, (qk * scale).to(late.dtype.element_ty))
        tl.store(late + C * C + at, ak.to(late.dtype.element_ty))
    return qb * scale, ab


@triton.jit
def gradients_of_states(
    x, z, states, d_states, values, d_outputs, strength, j, i, live,
    K: tl.constexpr, BJ: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dO S^T, Y S^T, U dS'^T, V dS'^T [C,BJ] and rowsum(S o dS') [BJ], of key channels j."""
    v, v_t, v_v = values
    d_output, o_t, o_v = d_outputs
    dq = tl.zeros((C, BJ), tl.float32)
    da = tl.zeros((C, BJ), tl.float32)
    db = tl.zeros((C, BJ), tl.float32)
    dk = tl.zeros((C, BJ), tl.float32)
    kept = tl.zeros((BJ,), tl.float32)
    for first in tl.range(0, V, BV, num_stages=1):
        y = first + tl.arange(0, BV)
        mask = live[:, None] & (y < V)[None, :]
        inside = (j < K)[:, None] & (y < V)[None, :]
        rows = i[:, None] * V + y[None, :]
        place = j[:, None] * V + y[None, :]
        S = tl.load(states + place, mask=inside, other=0.0)
        dS = tl.load(d_states + place, mask=inside, other=0.0)
        kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        Y = (tl.load(z + rows, mask=mask, other=0.0).to(tl.float32) * where_written(strength, strength)[:, None]).to(z.dtype.element_ty)
        dq += product(tile(d_output, i, live, o_t, y, o_v, V, BV), tl.trans(S), PRECISION)
        da += product(Y, tl.trans(S), PRECISION)
        db += product(tl.load(x + rows, mask=mask, other=0.0), tl.trans(dS), PRECISION)
        if STREAMS == 2:
            dk += product(tile(v, i, live, v_t, y, v_v, V, BV), tl.trans(dS), PRECISION)
    return dq, da, db, dk, kept


@triton.jit
def masked_pairs(at, mask, like):
    """Gradients of pairs under a mask, as operands of products with tiles of a dtype: [C,C]."""
    return tl.load(at, mask=mask, other=0.0).to(like)


@triton.jit
def add_level(
    dq, da, db, dk, dg, queries, removals, writes, keys, d, level, pairs, late, at, i, live, j,
    K: tl.constexpr, BJ: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, AFTER: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr, DG: tl.constexpr,
):  # fmt: skip
    """The gradients with those of the pairs of a level. Sums of dg multiply the same rounded tiles on both sides of an anchor."""
    query, removal, key = factors_of_level(d, i, level, C, LEVELS, AFTER, PRECISION)
    mask = pairs_of_level(i, level, C, LEVELS)
    Pq = masked_pairs(pairs + at, mask, OPERAND)
    Pa = masked_pairs(pairs + C * C + at, mask, OPERAND)
    Xq = (channels(queries, i, live, j, K, BJ) * query).to(OPERAND)
    Xa = (channels(removals, i, live, j, K, BJ) * removal * (-1.0 if STREAMS == 1 else 1.0)).to(OPERAND)
    Xb = (channels(writes, i, live, j, K, BJ) * key).to(OPERAND)
    dXq = product(Pq, Xb, PRECISION)
    dXa = product(Pa, Xb, PRECISION)
    dXb = product(tl.trans(Pq), Xq, PRECISION) + product(tl.trans(Pa), Xa, PRECISION)
    of_columns = dXb * Xb.to(tl.float32)
    db += dXb * key
    if STREAMS == 2:
        Pq = masked_pairs(late + at, mask, OPERAND)
        Pa = masked_pairs(late + C * C + at, mask, OPERAND)
        Xk = (channels(keys, i, live, j, K, BJ) * key).to(OPERAND)
        dXq += product(Pq, Xk, PRECISION)
        dXa += product(Pa, Xk, PRECISION)
        dXk = product(tl.trans(Pq), Xq, PRECISION) + product(tl.trans(Pa), Xa, PRECISION)
        of_columns += dXk * Xk.to(tl.float32)
        dk += dXk * key
    dq += dXq * query
    da += dXa * removal
    if DG:
        of_columns = tl.where(level == LEVELS, -of_columns, of_columns)
        of_rows = dXq * Xq.to(tl.float32) + of_columns
        of_removals = dXa * Xa.to(tl.float32)
        if AFTER:
            of_rows += of_removals
        else:
            dg += sums(of_level(i, level, C, LEVELS, False, True), of_removals, PRECISION)
        dg += sums(of_level(i, level, C, LEVELS, True, True), of_rows, PRECISION)
    return dq, da, db, dk, dg


@triton.jit
def store_columns(base, tensor_t, x, i, live, j, K: tl.constexpr):
    """Store the columns j of a gradient [T,K] whose rows are ``tensor_t`` apart."""
    tl.store(base + i[:, None] * tensor_t + j[None, :], x.to(base.dtype.element_ty), mask=live[:, None] & (j < K)[None, :])


@triton.jit(do_not_specialize=["N", "T"])
def penstock_delta_gradients(
    q, k, v, g, beta, a, b, pairs, late, solved, x, z, chunk_states, d_chunk_states, d_output, dq, dk, dg, dbeta, da, db, cu_seqlens,
    scale, N, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, beta_b, beta_t, beta_h,
    a_b, a_t, a_h, a_k, b_b, b_t, b_h, b_k, o_b, o_t, o_h, o_v,
    K: tl.constexpr, V: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, AFTER: tl.constexpr,
    GATE: tl.constexpr, LEVELS: tl.constexpr, ANCHOR: tl.constexpr, DG: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
):  # fmt: skip
    """dq = scale read o (dO S^T) + pairs, dk alike, dbeta = rowsum(Z o U) / beta and dg, of every chunk.

    Reads q, k, a, b [B,T,H,K], v, dO [B,T,H,V], g [B,T,H,K] and beta [B,T,H] by strides; T - I and the pairs of ``penstock_delta_prepare``;
    ``x`` and ``z`` [slots,H,C,V], S and dS' [slots,H,K,V] of the walks. Writes dq, dk, da, db [B,T,H,K], dbeta [B,T,H] and dg [B,T,H,K] or
    [B,T,H]. Overwrites ``x``, ``pairs`` and ``late``. Program (chunk, head): blocks of BJ key channels one after another.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    h = (tl.program_id(0) % H).to(tl.int64)
    slot = tl.program_id(0) // H
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, C, PACKED)
    tokens = tl.minimum(end - begin - done, C).to(tl.int32)
    if tokens <= 0:
        return
    batch = n.to(tl.int64)
    if PACKED:
        batch = batch * 0
    row = begin + done
    i = tl.arange(0, C)
    live = i < tokens
    at = i[:, None] * C + i[None, :]
    share = slot.to(tl.int64) * H + h
    queries = (q + batch * q_b + row * q_t + h * q_h, q_t, q_k)
    keys = (k + batch * k_b + row * k_t + h * k_h, k_t, k_k)
    values = (v + batch * v_b + row * v_t + h * v_h, v_t, v_v)
    removals = (a + batch * a_b + row * a_t + h * a_h, a_t, a_k)
    writes = (b + batch * b_b + row * b_t + h * b_h, b_t, b_k)
    d_outputs = (d_output + batch * o_b + row * o_t + h * o_h, o_t, o_v)
    g += batch * g_b + row * g_t + h * g_h
    place = (batch * T + row) * H + h
    pairs += share * (2 * C * C)
    late += share * (2 * C * C)
    x += share * (C * V)
    z += share * (C * V)
    chunk_states += share * (K * V)
    d_chunk_states += share * (K * V)
    strength = strengths(beta + batch * beta_b + row * beta_t + h * beta_h, i, live, beta_t, STREAMS)

    dAq, dAa = gradients_of_pairs(
        x, z, solved + share * (C * C), pairs, late, values, d_outputs, (dbeta + place, H), strength, at, i, live, scale,
        V, BV, C, STREAMS, PRECISION, SOLVE,
    )  # fmt: skip
    own = tl.sum(tl.where(i[:, None] == i[None, :], dAq, 0.0), 1)[:, None]
    if GATE != CHANNEL:
        between, read, rest, total = scalar_factors(g, i, live, g_t, GATE == SCALAR)
        if GATE == SCALAR and DG:
            lower = ordered(i, EXCLUSIVE)
            H_ = tl.load(pairs + at, mask=lower, other=0.0) * dAq * (1.0 / scale)
            H_ += tl.load(pairs + C * C + at, mask=lower, other=0.0) * dAa
            straddling = tl.cumsum(H_, 1) - H_
            of_scalar = tl.sum(tl.where(ordered(i, INCLUSIVE), straddling, 0.0), 0)
            of_queries = tl.zeros((C,), tl.float32)
            of_keys = tl.zeros((C,), tl.float32)
            of_states = 0.0
            tl.debug_barrier()
        dAq *= between
        dAa *= between
    tl.store(pairs + at, dAq)
    tl.store(pairs + C * C + at, dAa)
    tl.debug_barrier()
    if STREAMS == 2:
        own_key = tl.load(late + i * (C + 1)).to(tl.float32)[:, None]

    for first in tl.range(0, K, BJ, num_stages=1):
        j = first + tl.arange(0, BJ)
        dq_, da_, db_, dk_, kept = gradients_of_states(
            x, z, chunk_states, d_chunk_states, values, d_outputs, strength, j, i, live, K, BJ, V, BV, C, STREAMS, PRECISION
        )
        dg_ = tl.zeros((C, BJ), tl.float32)
        if GATE == CHANNEL:
            d = decays(g, i, live, g_t, j, g_k, K, BJ)
            read_ = tl.exp2(sums(ordered(i, INCLUSIVE), d, PRECISION))
            rest_ = tl.exp2(sums(ordered(i, LATER), d, PRECISION))
            dq_ *= read_ * scale
            if AFTER:
                da_ *= read_
            else:
                da_ *= tl.exp2(sums(ordered(i, EXCLUSIVE), d, PRECISION))
            db_ *= rest_
            dk_ *= rest_
        else:
            dq_ *= read[:, None] * scale
            da_ *= read[:, None]
            db_ *= rest[:, None]
        Q = channels(queries, i, live, j, K, BJ)
        A = channels(removals, i, live, j, K, BJ) * (-1.0 if STREAMS == 1 else 1.0)
        B = channels(writes, i, live, j, K, BJ)
        if GATE == CHANNEL and DG:
            of_rows = Q * dq_
            of_columns = B * db_
            if STREAMS == 2:
                of_columns += channels(keys, i, live, j, K, BJ) * dk_
            if AFTER:
                of_rows += A * da_
            else:
                dg_ += sums(ordered(i, LATER), A * da_, PRECISION)
            dg_ += sums(ordered(i, LATER) | (i[:, None] == i[None, :]), of_rows, PRECISION)
            dg_ += sums(ordered(i, EXCLUSIVE), of_columns, PRECISION) + (kept * tl.exp2(tl.sum(d, 0)))[None, :]
        if GATE == SCALAR and DG:
            of_queries += tl.sum(Q * dq_ + A * da_, 1)
            of_keys += tl.sum(B * db_, 1)
            of_states += tl.sum(kept, 0)
        if GATE == CHANNEL:
            dq_ += own * B
            db_ += own * Q
            if STREAMS == 2:
                dq_ += own_key * channels(keys, i, live, j, K, BJ)
                dk_ += own_key * Q
            for level in tl.range(LEVELS + ANCHOR, num_stages=1):
                dq_, da_, db_, dk_, dg_ = add_level(
                    dq_, da_, db_, dk_, dg_, queries, removals, writes, keys, d, level, pairs, late, at, i, live, j,
                    K, BJ, C, STREAMS, AFTER, LEVELS, PRECISION, OPERAND, DG,
                )  # fmt: skip
        else:
            Pq = masked_pairs(pairs + at, ordered(i, INCLUSIVE), OPERAND)
            Pa = masked_pairs(pairs + C * C + at, ordered(i, EXCLUSIVE), OPERAND)
            dq_ += product(Pq, B, PRECISION)
            da_ += product(Pa, B, PRECISION)
            db_ += product(tl.trans(Pq), Q, PRECISION) + product(tl.trans(Pa), A, PRECISION)
        store_columns(dq + place * K, H * K, dq_, i, live, j, K)
        if STREAMS == 1:
            store_columns(dk + place * K, H * K, db_ - da_, i, live, j, K)
        else:
            store_columns(dk + place * K, H * K, dk_, i, live, j, K)
            store_columns(da + place * K, H * K, da_, i, live, j, K)
            store_columns(db + place * K, H * K, db_, i, live, j, K)
        if GATE == CHANNEL and DG:
            store_columns(dg + place * K, H * K, dg_, i, live, j, K)
    if GATE == SCALAR and DG:
        of_scalar += tl.cumsum(of_queries, 0, reverse=True) + (tl.cumsum(of_keys, 0) - of_keys) + of_states * total
        tl.store(dg + place + i * H, of_scalar.to(dg.dtype.element_ty), mask=live)
