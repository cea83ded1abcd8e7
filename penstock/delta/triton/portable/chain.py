"""The states before the segments of a sequence, from what each segment does to a state: M S + L."""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.tiles import slot_of, tokens_of
from .products import product


@triton.jit
def through_memory(
    S, matrix, sums, state, j, y, inside, K: tl.constexpr, V: tl.constexpr, BJ: tl.constexpr, ADJOINT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """M S + L (ADJOINT: M^T S + L), of which BJ rows at a time are computed and stored in ``state`` [K,V]."""
    for first in tl.range(0, K, BJ, num_stages=1):
        r = first + tl.arange(0, BJ)
        square = (r < K)[:, None] & (j < K)[None, :]
        if ADJOINT:
            M = tl.load(matrix + r[:, None] + j[None, :] * K, mask=square, other=0.0)
        else:
            M = tl.load(matrix + r[:, None] * K + j[None, :], mask=square, other=0.0)
        rows = r[:, None] * V + y[None, :]
        mask = (r < K)[:, None] & (y < V)[None, :]
        tl.store(state + rows, product(M, S, PRECISION) + tl.load(sums + rows, mask=mask, other=0.0), mask=mask)
    tl.debug_barrier()
    S = tl.load(state + j[:, None] * V + y[None, :], mask=inside, other=0.0)
    tl.debug_barrier()
    return S


@triton.jit(do_not_specialize=["N", "T", "L"])
def penstock_delta_chain(
    matrices, sums, first, states, last, cu_seqlens, N, T, L, H, s_n, s_h, s_k, s_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, ADJOINT: tl.constexpr, INITIAL: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S_{i+1} = M_i S_i + L_i over segments i of L tokens. ADJOINT: dS_i = M_i^T dS_{i+1} + dL_i, from the last segment to the first.

    Reads ``matrices`` [slots,H,K,K], ``sums`` [slots,H,K,V] and, if INITIAL, the states ``first`` [N,H,K,V] by strides; else it begins with
    zeros. Writes ``states`` [slots,H,K,V], those before segments (ADJOINT: after), and ``last`` [N,H,K,V], those after all segments.
    Program (sequence, head, block of V). BJ: rows of M that are in registers at once. If fewer than BK, states go through ``last``.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    h = (pid // NV % H).to(tl.int64)
    n, _batch, _row, _step, begin, _done, tokens = tokens_of(pid // NV // H, cu_seqlens, N, T, L, False, PACKED, False)
    slot = slot_of(n, begin, 0, T, L, PACKED).to(tl.int64)
    own = n.to(tl.int64)
    j = tl.arange(0, BK)
    y = pid % NV * BV + tl.arange(0, BV)
    inside = (j < K)[:, None] & (y < V)[None, :]
    square = (j < K)[:, None] & (j < K)[None, :]
    if INITIAL:
        S = tl.load(first + own * s_n + h * s_h + j[:, None] * s_k + y[None, :] * s_v, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    count = tl.cdiv(tokens, L)
    for step in tl.range(0, count, num_stages=1):
        segment = step
        if ADJOINT:
            segment = count - 1 - step
        here = ((slot + segment) * H + h) * K
        if BJ == BK:
            M = tl.load(matrices + (here + j[:, None]) * K + j[None, :], mask=square, other=0.0)
            made = tl.load(sums + (here + j[:, None]) * V + y[None, :], mask=inside, other=0.0)
            tl.store(states + (here + j[:, None]) * V + y[None, :], S, mask=inside)
            if ADJOINT:
                M = tl.trans(M)
            S = product(M, S, PRECISION) + made
        else:
            tl.store(states + (here + j[:, None]) * V + y[None, :], S, mask=inside)
            state = last + (own * H + h) * K * V
            S = through_memory(S, matrices + here * K, sums + here * V, state, j, y, inside, K, V, BJ, ADJOINT, PRECISION)
    tl.store(last + ((own * H + h) * K + j[:, None]) * V + y[None, :], S, mask=inside)
