"""Device functions that the softmax kernels share: products, tiles of tokens, and masks.

Query i of a sequence has position i + Tk - Tq, so the last query is aligned with the last key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.tiles import LOG2E, span_of, tile, to_tf32


@triton.jit
def dot(a, b, c, PRECISION: tl.constexpr):
    """c + a @ b. PRECISION "half": operands as they are, in 16 bits; else how tl.dot takes float32 operands."""
    if PRECISION == "half":
        d = tl.dot(a, b, c)
    elif PRECISION == "tf32":
        d = tl.dot(to_tf32(a), to_tf32(b), c, input_precision="tf32")
    else:
        d = tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision=PRECISION)
    return d


@triton.jit
def tokens(base, n, live, stride_t, d, stride_d, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """A tile of tokens n, zeros where they are not live. Without MASKED all tokens are live."""
    if MASKED:
        x = tile(base, n, live, stride_t, d, stride_d, D, BD)
    elif D == BD:
        x = tl.load(base + n[:, None] * stride_t + d[None, :] * stride_d)
    else:
        x = tl.load(base + n[:, None] * stride_t + d[None, :] * stride_d, mask=(d < D)[None, :], other=0.0)
    return x


@triton.jit
def sees(place, j, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether queries at positions ``place`` attend to keys j; both have all axes of the result."""
    if CAUSAL:
        seen = j <= place
    else:
        seen = j >= 0
    if WINDOW:
        seen = seen & (j > place - window)
        if not CAUSAL:
            seen = seen & (j < place + window)
    return seen


@triton.jit
def keys_of(first, rows, Tk, window, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """For ``rows`` queries from position ``first``: the keys [low, high) visible to any of them, and the keys [begin, end) visible to all.

    ``low``, ``begin`` and ``end`` are multiples of BN.
    """
    low = first * 0
    high = first * 0 + Tk
    begin = low
    end = high
    if CAUSAL:
        high = tl.minimum(high, first + rows)
        end = tl.minimum(end, first + 1)
    if WINDOW:
        low = tl.maximum(first - window + 1, 0) // BN * BN
        begin = tl.maximum(tl.cdiv(tl.maximum(first + rows - window, 0), BN) * BN, low)
        if not CAUSAL:
            high = tl.minimum(high, first + rows - 1 + window)
            end = tl.minimum(end, first + window)
    high = tl.maximum(high, low)
    begin = tl.minimum(begin, tl.cdiv(high, BN) * BN)
    end = tl.maximum(tl.maximum(end, 0) // BN * BN, begin)
    return low, begin, end, high


@triton.jit
def queries_of(first, columns, shift, Tq, window, BM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """For ``columns`` keys from ``first``: the queries [low, high) that attend to any of them, and [begin, end) that attend to all.

    Query i has position i + shift. ``low``, ``begin`` and ``end`` are multiples of BM.
    """
    low = first * 0
    high = first * 0 + Tq
    begin = low
    end = high
    if CAUSAL:
        low = tl.maximum(first - shift, 0) // BM * BM
        begin = tl.cdiv(tl.maximum(first + columns - 1 - shift, 0), BM) * BM
    if WINDOW:
        high = tl.minimum(high, first + columns - 1 + window - shift)
        end = tl.minimum(end, tl.maximum(first + window - shift, 0))
        if not CAUSAL:
            low = tl.maximum(first - window + 1 - shift, 0) // BM * BM
            begin = tl.cdiv(tl.maximum(first + columns - window - shift, 0), BM) * BM
    high = tl.maximum(high, low)
    begin = tl.maximum(tl.minimum(begin, tl.cdiv(high, BM) * BM), low)
    end = tl.maximum(end // BM * BM, begin)
    return low, begin, end, high


@triton.jit
def place_of(slot, cu_seqlens, cu_other, N, T, other, L: tl.constexpr, PACKED: tl.constexpr):
    """For span ``slot`` of L tokens: the batch row, the begin of its sequence, the tokens before the span, and the sequence's length.

    Then the begin and the length of the sequence on the other axis.
    """
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, L, PACKED)
    b = n.to(tl.int64)
    first = begin * 0
    there = other + 0 * n
    if PACKED:
        b = b * 0
        first = tl.load(cu_other + n).to(tl.int64)
        there = (tl.load(cu_other + n + 1).to(tl.int64) - first).to(tl.int32)
    return b, begin, done.to(tl.int32), (end - begin).to(tl.int32), first, there


@triton.jit
def exponents(lse, where, live, MASKED: tl.constexpr):
    """Log-sum-exps in log2 units. If MASKED, inf for padding and for queries without keys, so that p is 0."""
    if MASKED:
        x = tl.load(lse + where, mask=live, other=float("-inf")) * LOG2E
        x = tl.where(x == float("-inf"), float("inf"), x)
    else:
        x = tl.load(lse + where) * LOG2E
    return x
