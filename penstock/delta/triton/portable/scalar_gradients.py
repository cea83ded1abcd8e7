"""Gradients of a chunk's tokens with one decay per token or none, for all chunks in parallel, from those of pairs (``pairs_backward.py``),
the states S before chunks and the gradients dS' of the states after them; a = -k, b = k::

    dq    = Pq k + scale read o (dO S^T)         da = Pa k + read o (Y S^T)      db = Pq^T q + Pa^T a + rest o (U dS'^T)      dk = db - da
    dg_t  = pairs + sum i >= t of (q . dq + a . da)_i + sum s < t of (b . db)_s + total sum(S o dS')

Pq and Pa are the gradients of pairs times the decays between tokens. dg has the gradients of the state's part alone, and every term has
tokens or a state on both sides of t: nothing cancels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import SCALAR
from .gradients import products_with_states, store_columns
from .levels import EXCLUSIVE, INCLUSIVE, chunk_of, ordered, scalar_factors, strengths, where_written
from .prepare import channels
from .products import product


@triton.jit(do_not_specialize=["N", "T"])
def penstock_delta_scalar_gradients(
    q, k, g, beta, weights, x, z, chunk_states, d_chunk_states, d_output, straddling, dq, dk, dg, cu_seqlens, scale, N, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, g_b, g_t, g_h, g_k, beta_b, beta_t, beta_h,
    o_b, o_t, o_h, o_v,
    K: tl.constexpr, V: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq = Pq k + scale read o (dO S^T), dk = Pq^T q - (Pa + Pa^T) k - read o (Y S^T) + rest o (U dS'^T), and dg, of every chunk.

    Reads q, k [B,T,H,K], dO [B,T,H,V], g and beta [B,T,H] by strides; the gradients of pairs, U (``x``) and ``straddling`` of
    ``penstock_delta_pairs_bwd``; ``z`` [slots,H,C,V], S and dS' [slots,H,K,V] of the walks. Writes dq, dk [B,T,H,K] and dg [B,T,H]. Program
    (chunk, head): blocks of BJ key channels one after another.
    """
    batch, row, tokens, h, share = chunk_of(tl.program_id(0), cu_seqlens, N, T, H, C, PACKED)
    if tokens <= 0:
        return
    i = tl.arange(0, C)
    live = i < tokens
    at = i[:, None] * C + i[None, :]
    queries = (q + batch * q_b + row * q_t + h * q_h, q_t, q_k)
    keys = (k + batch * k_b + row * k_t + h * k_h, k_t, k_k)
    d_outputs = (d_output + batch * o_b + row * o_t + h * o_h, o_t, o_v)
    weights += share * (2 * C * C)
    place = (batch * T + row) * H + h
    strength = strengths(beta + batch * beta_b + row * beta_t + h * beta_h, i, live, beta_t, 1)
    _between, read, rest, total = scalar_factors(g + batch * g_b + row * g_t + h * g_h, i, live, g_t, GATE == SCALAR)
    of_rows = tl.zeros((C,), tl.float32)
    of_columns = tl.zeros((C,), tl.float32)
    of_states = 0.0
    written = where_written(strength, strength)[:, None]
    for first in tl.range(0, K, BJ, num_stages=1):
        j = first + tl.arange(0, BJ)
        dQ, dA, dB, kept = products_with_states(
            z + share * (C * V), x + share * (C * V), chunk_states + share * (K * V), d_chunk_states + share * (K * V), d_outputs, written,
            j, i, live, 1, K, BJ, V, BV, C, PRECISION, True, STAGES,
        )  # fmt: skip
        dQ *= read[:, None] * scale
        dA *= read[:, None]
        dB *= rest[:, None]
        Q = channels(queries, i, live, j, K, BJ)
        B = channels(keys, i, live, j, K, BJ)
        if GATE == SCALAR:
            of_rows += tl.sum(Q * dQ - B * dA, 1)
            of_columns += tl.sum(B * dB, 1)
            of_states += tl.sum(kept, 0)
        Pq = tl.where(ordered(i, INCLUSIVE), tl.load(weights + at), 0.0)
        Pa = tl.where(ordered(i, EXCLUSIVE), tl.load(weights + C * C + at), 0.0)
        dQ += product(Pq, B, PRECISION)
        dA += product(Pa, B, PRECISION)
        dB += product(tl.trans(Pq), Q, PRECISION) - product(tl.trans(Pa), B, PRECISION)
        store_columns(dq + place * K, H * K, dQ, i, live, j, K)
        store_columns(dk + place * K, H * K, dB - dA, i, live, j, K)
    if GATE == SCALAR:
        dG = tl.load(straddling + share * C + i) + tl.cumsum(of_rows, 0, reverse=True) + (tl.cumsum(of_columns, 0) - of_columns)
        tl.store(dg + place + i * H, (dG + of_states * total).to(dg.dtype.element_ty), mask=live)
