"""Products of tiles of the delta rule: those of ``gpu/tiles.py``, and others for operands of 32 bits.

Triton assigns all columns to each warp where an operand of a product is the result of another, and keeps all parts of the operands of three
TF32 products in registers. What leaves a loop is no operand in this sense, and a loop over the three products has one part at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu import tiles
from ....gpu.tiles import in_two, rounded_bits

LARGE = tl.constexpr(2.0**128 - 2.0**116)  # what is rounded to 2^128 or more


@triton.jit
def tf32_part(x, n, OWN: tl.constexpr):
    """The operand x of product n of three: x rounded to 11 significant bits, of product OWN the rest. Large x and NaN have no rest."""
    part = rounded_bits(tl.where(n == OWN, x - rounded_bits(x, 13), x), 13)
    return tl.where(tl.abs(x) < LARGE, part, tl.where(n < 2, 0.0, x))


@triton.jit
def product_in_three(a, b):
    """The product of float32 tiles as three of TF32: rest times first bits, first bits times rest, first bits.

    An error of at most 2^-21 per term, of either sign. Operands below 2^-114 lose bits; those of 2^128 - 2^116 or more have 11 bits; inf
    times what has no first bits, below 2^-137, is NaN, and so may be a product beyond the range of float32.
    """
    c = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
    for n in tl.range(3, num_stages=1):
        c = tl.dot(tf32_part(a, n, 0), tf32_part(b, n, 1), c, input_precision="tf32")
    return c


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """The product a b with float32 sums, see ``gpu.tiles.product``."""
    if PRECISION == "tf32x3":
        c = product_in_three(a.to(tl.float32), b.to(tl.float32))
    else:
        c = tiles.product(a, b, PRECISION)
    return c


@triton.jit
def product_apart(a, b, once, APART: tl.constexpr, PRECISION: tl.constexpr):
    """The product a b, whose result makes operands of others. With APART it leaves a loop of ``once`` iterations.

    ``once`` is 1, which the compiler must not know. Triton does not load tiles ahead in a loop that has another in it.
    """
    if APART and (PRECISION == "bf16" or PRECISION == "tf32"):
        c = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
        for _ in tl.range(once, num_stages=1):
            c += product(a, b, PRECISION)
    else:
        c = product(a, b, PRECISION)
    return c


@triton.jit
def product_with_T(a, b, SOLVE: tl.constexpr):
    """The product of float32 tiles, one of which is T or makes it. "bf16": each operand is two bfloat16 tiles, 16 significant bits."""
    if SOLVE == "bf16":
        a_high, a_low = in_two(a)
        b_high, b_low = in_two(b)
        c = tl.dot(a_low, b_high)
        c = tl.dot(a_high, b_low, c)
        c = tl.dot(a_high, b_high, c)
    else:
        c = product(a, b, SOLVE)
    return c
