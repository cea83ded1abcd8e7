"""Gradients of the pairs of a chunk's tokens, for all chunks in parallel, from X, Z and Y = beta o Z of the walks::

    U     = T X                          dbeta = rowsum(Z o U) / beta
    dAq_b = dO U^T    dAa_b = Y U^T      two streams: dAq_k = dO V^T, dAa_k = Y V^T

With one decay per token, its gradient has the sum over s < t <= i of (dAq o Aq + dAa o Aa)_is, and the gradients of pairs are multiplied by
the decays between tokens. No gradient passes through the inverse T.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, SCALAR
from ....gpu.tiles import tile
from .levels import EXCLUSIVE, INCLUSIVE, chunk_of, ordered, scalar_factors, strengths, where_written
from .products import product


@triton.jit
def gradients_of_pairs(
    x, z, solved, late, values, d_outputs, dbeta, strength, at, i, live, scale,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Store U in place of X, the gradients of k's pairs in ``late`` and dbeta. Returns dO U^T and Y U^T [C,C]."""
    v, v_t, v_v = values
    d_output, o_t, o_v = d_outputs
    qb = tl.zeros((C, C), tl.float32)
    ab = tl.zeros((C, C), tl.float32)
    qk = tl.zeros((C, C), tl.float32)
    ak = tl.zeros((C, C), tl.float32)
    of_beta = tl.zeros((C,), tl.float32)
    for first in tl.range(0, V, BV, num_stages=STAGES):
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
    return qb, ab


@triton.jit(do_not_specialize=["N", "T"])
def penstock_delta_pairs_bwd(
    v, g, beta, pairs, weights, late, solved, x, z, d_output, straddling, dbeta, cu_seqlens, scale, N, T, H,
    v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, beta_b, beta_t, beta_h, o_b, o_t, o_h, o_v,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, GATE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dAq = scale dO U^T, dAa = Y U^T and dbeta = rowsum(Z o U) / beta with U = T X, of every chunk.

    Reads v, dO [B,T,H,V], g and beta [B,T,H] by strides; T - I and the pairs of ``penstock_delta_prepare``; ``x`` and ``z`` [slots,H,C,V]
    of the walks. Writes ``weights`` (dAq_b, dAa_b) [slots,H,2,C,C], dbeta [B,T,H]; with one decay per token ``straddling`` [slots,H,C], its
    gradient by pairs. U replaces ``x``, and with two streams dAq_k and dAa_k replace ``late``. Program (chunk, head).
    """
    batch, row, tokens, h, share = chunk_of(tl.program_id(0), cu_seqlens, N, T, H, C, PACKED)
    if tokens <= 0:
        return
    i = tl.arange(0, C)
    live = i < tokens
    at = i[:, None] * C + i[None, :]
    values = (v + batch * v_b + row * v_t + h * v_h, v_t, v_v)
    d_outputs = (d_output + batch * o_b + row * o_t + h * o_h, o_t, o_v)
    strength = strengths(beta + batch * beta_b + row * beta_t + h * beta_h, i, live, beta_t, STREAMS)
    dAq, dAa = gradients_of_pairs(
        x + share * (C * V), z + share * (C * V), solved + share * (C * C), late + share * (2 * C * C), values, d_outputs,
        (dbeta + (batch * T + row) * H + h, H), strength, at, i, live, scale, V, BV, C, STREAMS, PRECISION, SOLVE, STAGES,
    )  # fmt: skip
    if GATE != CHANNEL:
        if GATE == SCALAR:
            lower = ordered(i, EXCLUSIVE)
            pairs += share * (2 * C * C)
            both = tl.load(pairs + at, mask=lower, other=0.0) * dAq + tl.load(pairs + C * C + at, mask=lower, other=0.0) * dAa
            before = tl.cumsum(both, 1) - both
            tl.store(straddling + share * C + i, tl.sum(tl.where(ordered(i, INCLUSIVE), before, 0.0), 0))
        between, _read, _rest, _total = scalar_factors(g + batch * g_b + row * g_t + h * g_h, i, live, g_t, GATE == SCALAR)
        dAq *= between
        dAa *= between
    weights += share * (2 * C * C)
    tl.store(weights + at, (dAq * scale).to(weights.dtype.element_ty))
    tl.store(weights + C * C + at, dAa.to(weights.dtype.element_ty))
