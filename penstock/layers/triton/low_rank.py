"""The kernel of low-rank maps of decode steps: several products of small matrices in one grid."""

import triton
import triton.language as tl

from .few_rows import begin, selected
from .gates import SIGMOID, TANH
from .token_shift import tanh


@triton.jit
def _values(x, r, k, R, K, kind, ACTIVATED: tl.constexpr):
    """Columns k of rows r of x [R,K], activated."""
    values = tl.load(x + r[:, None] * K + k[None, :], (r < R)[:, None] & (k < K)[None, :], other=0.0)
    if ACTIVATED:
        z = values.to(tl.float32)
        z = tl.where(kind == TANH, tanh(z), tl.where(kind == SIGMOID, tl.sigmoid(z), z))
        values = tl.where((k < K)[None, :], z, 0.0).to(values.dtype)
    return values


@triton.jit(do_not_specialize=["R"])
def penstock_low_rank_products(
    x0, x1, x2, x3,  # [R,K]
    w0, w1, w2, w3,  # [K,N]
    y0, y1, y2, y3,  # [R,N]
    k0, k1, k2, k3, n0, n1, n2, n3,  # K and N of each part, in units of UNIT
    b1, b2, b3,  # the first block of each part
    R,
    PARTS: tl.constexpr, ACTIVATED: tl.constexpr, A0: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr, A3: tl.constexpr,
    UNIT: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y_i = x_i W_i, with ACTIVATED y_i = activation_i(x_i) W_i. A0 to A3: SIGMOID, TANH, or another number for none.

    Reads x_i [R,K], W_i [K,N]. Writes y_i [R,N]. Program (BN columns of a part, BR rows). WHOLE: K is at most BK, and weights are loaded
    before the wait for the previous kernel.
    """
    block = tl.program_id(0)
    part = (block >= b1).to(tl.int32) + (block >= b2).to(tl.int32) + (block >= b3).to(tl.int32)
    block -= selected(part, part * 0, b1, b2, b3, b3, PARTS)
    x = selected(part, x0, x1, x2, x3, x3, PARTS)
    w = selected(part, w0, w1, w2, w3, w3, PARTS)
    y = selected(part, y0, y1, y2, y3, y3, PARTS)
    K = selected(part, k0, k1, k2, k3, k3, PARTS) * UNIT
    N = selected(part, n0, n1, n2, n3, n3, PARTS) * UNIT
    kind = selected(part, part * 0 + A0, part * 0 + A1, part * 0 + A2, part * 0 + A3, part * 0, PARTS)
    n = block * BN + tl.arange(0, BN)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    if WHOLE:
        k = tl.arange(0, BK)
        weights = tl.load(w + k[:, None] * N + n[None, :], (k < K)[:, None] & (n < N)[None, :], other=0.0)
        begin(PDL)
        values = _values(x, r, k, R, K, kind, ACTIVATED)
        sums = tl.dot(values, weights, input_precision="ieee")
    else:
        sums = tl.zeros([BR, BN], tl.float32)
        begin(PDL)
        for first in tl.range(0, K, BK, num_stages=STAGES):
            k = first + tl.arange(0, BK)
            values = _values(x, r, k, R, K, kind, ACTIVATED)
            weights = tl.load(w + k[:, None] * N + n[None, :], (k < K)[:, None] & (n < N)[None, :], other=0.0)
            sums = tl.dot(values, weights, sums, input_precision="ieee")
    tl.store(y + r[:, None] * N + n[None, :], sums.to(y.dtype.element_ty), (r < R)[:, None] & (n < N)[None, :])
