"""What a chunk's tokens do to any state, for bounded decays with two streams: ``prepare.py`` with one anchor and no levels.

    Xq = scale q exp(G)      Xa = a exp(G - g)      Xb = b exp(-G)      Xk = k exp(-G)
    Aq = Xq Xb^T, Xq Xk^T    s <= t                 Aa = Xa Xb^T, Xa Xk^T    s < t
    T  = (I - Aa_b)^-1       Ap = Aq_b T            Bt = T^T (b o rest)      Kr = k o rest

The anchor is the beginning of the chunk. G_t are the sums of decays up to and including token t, in log2 units, rest_s = exp(sum u > s).
So the rows of pairs, Xq and Xa, are those that meet the state before the chunk, Qr and Ar, and there are no levels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import decays
from ....gpu.levels import sums_by_parts
from .inverse import solve
from .levels import EXCLUSIVE, INCLUSIVE, chunk_of, ordered
from .prepare import channels
from .products import product, product_with_T


@triton.jit(do_not_specialize=["N", "T"])
def penstock_delta_prepare_anchored(
    q, k, g, a, b, late, solved, ap, bt, qr, ar, kr, total, cu_seqlens, scale, N, T, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, g_b, g_t, g_h, g_k, a_b, a_t, a_h, a_k, b_b, b_t, b_h, b_k,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
):  # fmt: skip
    """Ap = Aq T and Bt = T^T (b o rest) with T = (I - Aa)^-1, of every chunk.

    Reads q, k, a, b and g [B,T,H,K] by strides. Writes ``ap`` and ``solved`` (T - I) [slots,H,C,C], ``late`` (Aq_k, Aa_k) [slots,H,2,C,C],
    ``bt``, ``qr``, ``ar``, ``kr`` [slots,H,C,BK] and ``total`` [slots,H,BK]. Program (chunk, head). Rows of tokens that do not exist are 0.
    PIECE: only chunks of C tokens are processed.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    batch, row, tokens, h, share = chunk_of(tl.program_id(0), cu_seqlens, N, T, H, C, PACKED)
    if tokens <= 0:
        return
    if PIECE > 0:
        if tokens < C:
            return
    i = tl.arange(0, C)
    j = tl.arange(0, BK)
    live = i < tokens
    at = i[:, None] * C + i[None, :]
    tiles = share * (C * BK) + i[:, None] * BK + j[None, :]
    late += share * (2 * C * C) + at

    d = decays(g + batch * g_b + row * g_t + h * g_h, i, live, g_t, j, g_k, K, BK)
    lower = ordered(i, INCLUSIVE)
    strict = ordered(i, EXCLUSIVE)
    G = sums_by_parts(tl.where(lower, 1.0, 0.0).to(tl.bfloat16), d, PRECISION)  # the interpreter's cast makes 0 of True
    later = sums_by_parts(tl.where(lower, 0.0, 1.0).to(tl.bfloat16), d, PRECISION)
    tl.store(total + share * BK + j, tl.exp2(tl.sum(d, 0)))
    after = tl.exp2(G)
    before = tl.exp2(G - d)
    inverted = tl.exp2(-G)
    rest = tl.exp2(later)
    Xq = (channels((q + batch * q_b + row * q_t + h * q_h, q_t, q_k), i, live, j, K, BK) * scale * after).to(OPERAND)
    tl.store(qr + tiles, Xq)
    Xa = (channels((a + batch * a_b + row * a_t + h * a_h, a_t, a_k), i, live, j, K, BK) * before).to(OPERAND)
    tl.store(ar + tiles, Xa)
    keys = channels((k + batch * k_b + row * k_t + h * k_h, k_t, k_k), i, live, j, K, BK)
    tl.store(kr + tiles, (keys * rest).to(kr.dtype.element_ty))
    Xk = tl.trans((keys * inverted).to(OPERAND))
    tl.store(late, tl.where(lower, product(Xq, Xk, PRECISION), 0.0).to(late.dtype.element_ty))
    tl.store(late + C * C, tl.where(strict, product(Xa, Xk, PRECISION), 0.0).to(late.dtype.element_ty))
    B = channels((b + batch * b_b + row * b_t + h * b_h, b_t, b_k), i, live, j, K, BK)
    Xb = tl.trans((B * inverted).to(OPERAND))
    B *= rest
    solved += share * (C * C)
    tl.store(solved + at, product(Xa, Xb, PRECISION))
    Aq = tl.where(lower, product(Xq, Xb, PRECISION), 0.0)
    solve(solved, solved, late, tokens, 0, i, C, 2, SOLVE)
    tl.store(ap + share * (C * C) + at, (Aq + product_with_T(Aq, tl.load(solved + at), SOLVE)).to(ap.dtype.element_ty))
    tl.store(bt + tiles, (B + product_with_T(tl.trans(tl.load(solved + at)), B, SOLVE)).to(bt.dtype.element_ty))
