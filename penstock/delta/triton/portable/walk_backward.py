"""The walk over the chunks of a sequence backward in time, with the tiles of ``prepare.py``: gradients of states and values.

dS' is the gradient of the state after a chunk, dS of that before it::

    Z  = Ap^T dO + Bt dS'       Y = beta o Z        dS = total o dS' + Qr^T dO + Ar^T Y
    dV = Y (one stream)         dV = Aq_k^T dO + Aa_k^T Y + Kr dS' (two streams)

Without decays per channel Qr^T dO and Ar^T Y are q^T (scale read o dO) and -k^T (read o Y).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.decays import CHANNEL, SCALAR
from ....gpu.tiles import slot_of, tile, tokens_of
from .levels import EXCLUSIVE, INCLUSIVE, ordered, scalar_factors, strengths, where_written
from .products import product, product_apart


@triton.jit(do_not_specialize=["N", "T", "L"])
def penstock_delta_walk_bwd(
    q, k, g, beta, ap, bt, qr, ar, kr, late, total, d_output, d_final_state, z, dv, d_chunk_states, d_initial_state, cu_seqlens,
    scale, N, T, L, H,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, g_b, g_t, g_h, g_k, beta_b, beta_t, beta_h, o_b, o_t, o_h, o_v, s_n, s_h, s_k, s_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STREAMS: tl.constexpr, GATE: tl.constexpr,
    D_FINAL: tl.constexpr, SEGMENTS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Z = Ap^T dO + Bt dS', dS = total o dS' + Qr^T dO + Ar^T (beta o Z), chunk after chunk from the last to the first.

    Reads q, k [B,T,H,K], g, beta [B,T,H], dO [B,T,H,V] and the gradient of the final state [N,H,K,V], all by strides, and the tiles of
    ``penstock_delta_prepare``. Writes ``z`` [slots,H,C,V], dv [B,T,H,V], ``d_chunk_states`` (dS') [slots,H,K,V] and ``d_initial_state``
    [N,H,K,V]. Program (sequence, head, block of V). SEGMENTS: (segment of L tokens, head, block of V), and the gradients of final and
    initial states are those of segments.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    h = (pid // NV % H).to(tl.int64)
    sequence = pid // NV // H
    n, batch, row, _step, begin, done, tokens = tokens_of(sequence, cu_seqlens, N, T, L, SEGMENTS, PACKED, False)
    if SEGMENTS:
        if tokens <= 0:
            return
    share = slot_of(n, begin, done, T, C, PACKED).to(tl.int64) * H + h
    own = (sequence if SEGMENTS else n).to(tl.int64)
    i = tl.arange(0, C)
    j = tl.arange(0, BK)
    y = pid % NV * BV + tl.arange(0, BV)
    at = i[:, None] * C + i[None, :]
    tiles = i[:, None] * BK + j[None, :]
    inside = (j < K)[:, None] & (y < V)[None, :]
    q += batch * q_b + row * q_t + h * q_h
    k += batch * k_b + row * k_t + h * k_h
    g += batch * g_b + row * g_t + h * g_h
    beta += batch * beta_b + row * beta_t + h * beta_h
    d_output += batch * o_b + row * o_t + h * o_h
    if D_FINAL:
        dS = tl.load(d_final_state + own * s_n + h * s_h + j[:, None] * s_k + y[None, :] * s_v, mask=inside, other=0.0).to(tl.float32)
    else:
        dS = tl.zeros((BK, BV), tl.float32)
    zero = tl.zeros((), tl.int64)
    once = tl.minimum(tokens, 1)
    APART: tl.constexpr = STAGES == 1
    chunks = tl.cdiv(tokens, C)
    for back in tl.range(0, chunks, num_stages=STAGES):
        to = zero + (chunks - 1 - back) * C
        here = share + to // C * H
        live = i < tokens - to
        strength = strengths(beta + to * beta_t, i, live, beta_t, STREAMS)[:, None]
        dO = tile(d_output + to * o_t, i, live, o_t, y, o_v, V, BV)
        tl.store(d_chunk_states + (here * K + j[:, None]) * V + y[None, :], dS.to(d_chunk_states.dtype.element_ty), mask=inside)
        Z = product_apart(tl.trans(tl.load(ap + here * (C * C) + at)), dO, once, APART, PRECISION)
        Z += product_apart(tl.load(bt + here * (C * BK) + tiles), dS, once, APART, PRECISION)
        tl.store(z + (here * C + i[:, None]) * V + y[None, :], Z.to(z.dtype.element_ty), mask=(y < V)[None, :])
        Y = where_written(strength, strength) * Z
        dV = Y
        if STREAMS == 2:
            after = late + here * (2 * C * C) + at
            dV = product(tl.trans(tl.load(after, mask=ordered(i, INCLUSIVE), other=0.0)), dO, PRECISION)
            dV += product(tl.trans(tl.load(after + C * C, mask=ordered(i, EXCLUSIVE), other=0.0)), Y, PRECISION)
            dV += product(tl.load(kr + here * (C * BK) + tiles), dS, PRECISION)
        place = dv + ((batch * T + row + to + i[:, None]) * H + h) * V + y[None, :]
        tl.store(place, dV.to(dv.dtype.element_ty), mask=live[:, None] & (y < V)[None, :])
        if GATE == CHANNEL:
            dS *= tl.load(total + here * BK + j)[:, None]
            dS += product(tl.trans(tl.load(qr + here * (C * BK) + tiles)), dO, PRECISION)
            dS += product(tl.trans(tl.load(ar + here * (C * BK) + tiles)), Y, PRECISION)
        else:
            dQ = dO.to(tl.float32) * scale
            if GATE == SCALAR:
                _between, read, _rest, decay = scalar_factors(g + to * g_t, i, live, g_t, True)
                dS *= decay
                dQ *= read[:, None]
                Y *= read[:, None]
            dS += product(tl.trans(tile(q + to * q_t, i, live, q_t, j, q_k, K, BK)), dQ, PRECISION)
            dS -= product(tl.trans(tile(k + to * k_t, i, live, k_t, j, k_k, K, BK)), Y, PRECISION)
    place = d_initial_state + ((own * H + h) * K + j[:, None]) * V + y[None, :]
    tl.store(place, dS.to(d_initial_state.dtype.element_ty), mask=inside)
