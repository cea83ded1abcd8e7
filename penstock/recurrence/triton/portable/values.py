"""The gradient of v for heads whose value channels are in several blocks, from what the Hopper backward kernel stores.

dV = A^T dO + (k o rest) dS
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.tiles import powers_of_two, product, span_of


@triton.jit
def operand(x, other):
    """x as an operand of a product with ``other``, and the factor of the product: a power of two for float16, 1 for bfloat16."""
    up = 1.0
    if other.dtype == tl.float16:
        down, up = powers_of_two(tl.max(tl.max(tl.abs(x), 1), 0))
        x = x * down
    return x.to(other.dtype), up


@triton.jit
def multiplied(a, b, PRECISION: tl.constexpr):
    """The product a b."""
    if PRECISION == "own":
        c = tl.dot(a, b)
    else:
        c = product(a, b, PRECISION)
    return c


@triton.jit(do_not_specialize=["N", "T"])
def penstock_chunk_dv(
    weights, rest, d_output, dS, dv, cu_seqlens, N, T, H, o_b, o_t, o_h, o_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """dV = A^T dO + rest dS for each chunk.

    Reads ``weights`` A [slots,H,BLOCKS,C,C] float32, ``rest`` [B,T,H,K], dO [B,T,H,V] by strides and dS [slots,H,K,V]. Writes dv [B,T,H,V].
    Program (chunk, head, block of V).

    BLOCKS: of key channels, over which A is the sum of ``weights``.
    PRECISION: of products, see ``product``; "own": of operands of 16 bits.
    """
    NV: tl.constexpr = V // BV
    pid = tl.program_id(0)
    dv_ = pid % NV * BV + tl.arange(0, BV)
    h = (pid // NV % H).to(tl.int64)
    slot = pid // NV // H
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, C, PACKED)
    tokens = tl.minimum(end - begin - done, C).to(tl.int32)
    if tokens <= 0:
        return
    b = n.to(tl.int64)
    if PACKED:
        b = b * 0
    i = tl.arange(0, C)
    live = (i < tokens)[:, None]
    row = begin + done + i
    place = (b * T + row) * H + h
    head = slot.to(tl.int64) * H + h
    weights += head * (BLOCKS * C * C) + i[:, None] * C + i[None, :]
    A = tl.load(weights)
    for one in tl.static_range(1, BLOCKS):
        A += tl.load(weights + one * (C * C))
    O = tl.load(d_output + b * o_b + row[:, None] * o_t + h * o_h + dv_[None, :] * o_v, mask=live, other=0.0)
    A, of_A = operand(A, O)
    total = multiplied(tl.trans(A), O, PRECISION) * of_A
    j = tl.arange(0, BK)
    for first in tl.range(0, K, BK):
        k = tl.load(rest + place[:, None] * K + (first + j)[None, :], mask=live, other=0.0)
        D = tl.load(dS + (head * K + (first + j)[:, None]) * V + dv_[None, :])
        D, of_D = operand(D, k)
        total += multiplied(k, D, PRECISION) * of_D
    tl.store(dv + place[:, None] * V + dv_[None, :], total.to(dv.dtype.element_ty), mask=live)
