"""Gradients of a chunk's tokens for bounded decays with two streams, one anchor and no levels, from both walks.

Tiles are stacked: rows are those of q, then those of a; columns are those of b, then those of k::

    U   = T X                   P = [scale dO; Z] [U; V]^T        of q s <= t, of a s < t
    dXr = [scale dO; Z] S^T + P [Xb; Xk]                          dq = exp(G) o dXq          da = exp(G - g) o dXa
    dXc = P^T [Xq; Xa]          W = rest o ([U; V] dS'^T)         [db; dk] = exp(-G) o dXc + W
    dg_t = sum i >= t of (Xq o dXq)_i + sum i > t of (Xa o dXa)_i - sum s >= t of (Xb o dXb + Xk o dXk)_s
         + sum s < t of (b o Wb + k o Wk)_s + total o rowsum(S o dS')

Xq, Xa, Xb and Xk are q exp(G), a exp(G - g), b exp(-G) and k exp(-G). dg is a difference of sums over the same rounded operands, so their
rounding cancels. No matrix of pairs goes through memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import decays
from ....gpu.tiles import product, tile
from .anchored import chosen_sums, product_with_T
from .levels import chunk_of


@triton.jit
def stacked(first, second, top, i, j):
    """Pointers [2C,BK] of the rows i of two matrices, of the second one after those of the first."""
    x, x_t, x_k = first
    y, y_t, y_k = second
    return tl.where(top[:, None], x + i[:, None] * x_t + j[None, :] * x_k, y + i[:, None] * y_t + j[None, :] * y_k)


@triton.jit
def stack(x, y):
    """[x; y], from matrices of the same shape."""
    return tl.reshape(tl.permute(tl.join(x, y), (2, 0, 1)), [2 * x.shape[0], x.shape[1]])


@triton.jit(do_not_specialize=["N", "T"])
def penstock_delta_gradients_anchored(
    q, k, v, g, a, b, solved, x, z, chunk_states, d_chunk_states, d_output, dq, dk, dg, da, db, cu_seqlens, scale, N, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, g_k, a_b, a_t, a_h, a_k, b_b, b_t, b_h, b_k,
    o_b, o_t, o_h, o_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DG: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq = exp(G) o (scale dO S^T + P [Xb; Xk]), dk, da and db alike, and dg, of every chunk.

    Reads q, k, a, b, g [B,T,H,K], v and dO [B,T,H,V] by strides; T - I (``solved``) of ``penstock_delta_prepare_anchored``; ``x`` and ``z``
    [slots,H,C,V], S and dS' [slots,H,K,V] of the walks. Writes dq, dk, da, db, dg [B,T,H,K]. Program (chunk, head).
    """
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    batch, row, tokens, h, share = chunk_of(tl.program_id(0), cu_seqlens, N, T, H, C, PACKED)
    if tokens <= 0:
        return
    t = tl.arange(0, C)
    r = tl.arange(0, 2 * C)
    i = r % C
    top = r < C
    j = tl.arange(0, BK)
    y = tl.arange(0, BV)
    live = t < tokens
    inside = (i < tokens)[:, None] & (j < K)[None, :]
    place = ((batch * T + row) * H + h) * K
    q += batch * q_b + row * q_t + h * q_h
    k += batch * k_b + row * k_t + h * k_h
    a += batch * a_b + row * a_t + h * a_h
    b += batch * b_b + row * b_t + h * b_h
    v += batch * v_b + row * v_t + h * v_h
    d_output += batch * o_b + row * o_t + h * o_h
    z += share * (C * V)

    X = tile(x + share * (C * V), t, live, V, y, 1, V, BV).to(tl.float32)
    E = tl.load(solved + share * (C * C) + t[:, None] * C + t[None, :])
    U = (X + product_with_T(E, X, PRECISION)).to(OPERAND)
    UV = stack(U, tile(v, t, live, v_t, y, v_v, V, BV).to(OPERAND))
    dO = tile(d_output, t, live, o_t, y, o_v, V, BV).to(OPERAND)
    dOZ = stack(dO, tile(z, t, live, V, y, 1, V, BV).to(OPERAND))
    scales = tl.where(top, scale, 1.0)[:, None]
    earlier = (i[None, :] <= i[:, None]) & (top[:, None] | (i[None, :] < i[:, None]))
    P = tl.where(earlier, product(dOZ, tl.trans(UV), PRECISION) * scales, 0.0).to(OPERAND)

    d = decays(g + batch * g_b + row * g_t + h * g_h, t, live, g_t, j, g_k, K, BK)
    read = tl.exp2(chosen_sums((t[None, :] < i[:, None]) | (top[:, None] & (t[None, :] == i[:, None])), d, PRECISION))
    inverted = tl.exp2(-chosen_sums(t[None, :] <= i[:, None], d, PRECISION))
    Xr = tl.load(stacked((q, q_t, q_k), (a, a_t, a_k), top, i, j), mask=inside, other=0.0).to(tl.float32)
    Xr = (Xr * read).to(OPERAND)
    of_columns = stacked((b, b_t, b_k), (k, k_t, k_k), top, i, j)
    Xc = (tl.load(of_columns, mask=inside, other=0.0).to(tl.float32) * inverted).to(OPERAND)
    of_state = share * (K * V) + j[:, None] * V + y[None, :]
    S = tl.load(chunk_states + of_state, mask=(j < K)[:, None] & (y < V)[None, :], other=0.0)
    dS = tl.load(d_chunk_states + of_state, mask=(j < K)[:, None] & (y < V)[None, :], other=0.0)
    total = tl.sum(d, 0)
    kept = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1) * tl.exp2(total)
    dX = product(dOZ, tl.trans(S), PRECISION) * scales
    dX += product(P, Xc, PRECISION)
    to = stacked((dq + place, H * K, 1), (da + place, H * K, 1), top, i, j)
    tl.store(to, (dX * read).to(dq.dtype.element_ty), mask=inside)
    straddling = dX * Xr.to(tl.float32)

    rest = tl.exp2(chosen_sums(t[None, :] > i[:, None], d, PRECISION))
    W = product(UV, tl.trans(dS), PRECISION)
    dX = product(tl.trans(P), Xr, PRECISION)
    to = stacked((db + place, H * K, 1), (dk + place, H * K, 1), top, i, j)
    tl.store(to, ((dX * tl.exp2(-total)[None, :] + W) * rest).to(db.dtype.element_ty), mask=inside)
    if DG:
        W *= rest * tl.load(of_columns, mask=inside, other=0.0).to(tl.float32)
        kept += tl.sum(W, 0)
        W += dX * Xc.to(tl.float32)
        strict = (i[None, :] > t[:, None]) | (top[None, :] & (i[None, :] == t[:, None]))
        dG = chosen_sums(strict, straddling - W, PRECISION) + kept[None, :]
        dG -= chosen_sums((i[None, :] == t[:, None]) & ~top[None, :], W, PRECISION)
        to = dg + place + t[:, None] * (H * K) + j[None, :]
        tl.store(to, dG.to(dg.dtype.element_ty), mask=live[:, None] & (j < K)[None, :])
