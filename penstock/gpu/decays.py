"""Device functions for decays: the kinds that kernels know, and the product of a state and a decay."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import LOG2E, tile

FLOOR = tl.constexpr(-16384.0)  # log2 units: 2 ** FLOOR is 0 in float32, and sums of clamped decays are finite
NONE, SCALAR, CHANNEL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # DECAY: absent, one per head, one per channel
SIGN = tl.constexpr(-(2**31))  # the sign bit of a float32


@triton.jit
def exp(x):
    """The exponential of x, with range reduction. The error of exp2(x * log2(e)) grows with x."""
    n = tl.floor(x * LOG2E + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4  # ln2 in two parts
    return tl.exp2(n) * tl.exp2(r * LOG2E)


@triton.jit
def change(g):
    """What ``decayed`` multiplies by: of weak decays exp(g) - 1, with the sign bit set, of others exp(g).

    S exp(g) has the same rounding error of exp(g) at every decode step, so of weak decays the state gets S (exp(g) - 1) added. Of strong
    decays that would leave S with an error as large as before.
    """
    near = tl.maximum(g, -0.5)
    series = 1.0 + near * (1.0 / 7.0) * (1.0 + near * (1.0 / 8.0))
    series = 1.0 + near * (1.0 / 5.0) * (1.0 + near * (1.0 / 6.0) * series)
    series = 1.0 + near * (1.0 / 3.0) * (1.0 + near * (1.0 / 4.0) * series)
    series = near * (1.0 + near * (1.0 / 2.0) * series)
    negative = (series.to(tl.int32, bitcast=True) | SIGN).to(tl.float32, bitcast=True)  # -x is 0 - x on a GPU, for 0 without a sign
    return tl.where((g > -0.5) & (g <= 0.0), negative, exp(g))


@triton.jit
def by_row(x, DECAY: tl.constexpr):
    """A factor per channel or a scalar factor, in the shape that broadcasts over a state [BK,BV]."""
    if DECAY == CHANNEL:
        x = x[:, None]
    return x


@triton.jit
def decayed(S, g, DECAY: tl.constexpr):
    """S exp(g), as S + S (exp(g) - 1) for weak decays. The sign of a factor selects: an operand for that would take a register a row."""
    f = by_row(change(g), DECAY)
    kept = S.to(tl.int32, bitcast=True) & (f.to(tl.int32, bitcast=True) >> 31)
    return kept.to(tl.float32, bitcast=True) + S * f


@triton.jit
def decays(base, i, live, stride_i, j, stride_j, J: tl.constexpr, BJ: tl.constexpr):
    """A tile of log decays in log2 units, 0 outside the mask: [len(i), BJ]."""
    return tl.maximum(tile(base, i, live, stride_i, j, stride_j, J, BJ).to(tl.float32) * LOG2E, FLOOR)
