"""Device functions for chunks that are cut into levels, and the matrices of ``dyadic.py`` on a GPU.

One launch makes the matrices: a graph that is captured makes them anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import dyadic
from .launch import on_device_of
from .tiles import in_two, to_bfloat16


@triton.jit
def sums_of_rows(chosen, x, start=0.0):
    """``start`` plus the sums of the rows of x that the rows of ``chosen`` [C,C], bfloat16 of 0 and 1, select, on tensor cores.

    x is multiplied in two parts of 8 bits: the error is 2^-17 per term.
    """
    high, low = in_two(x)
    return tl.dot(chosen, low, tl.dot(chosen, high, tl.zeros_like(x) + start))


@triton.jit
def selected(x, levels, n, i, C: tl.constexpr, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """Sums of the rows of x [C,BK] that matrix n [C,C] of ``levels`` selects, see ``dyadic.py``: on tensor cores, no differences.

    TRANSPOSED: row t is the sum of the rows whose sums have row t otherwise.
    """
    chosen = tl.load(levels + n * (C * C) + i[:, None] * C + i[None, :])
    if TRANSPOSED:
        chosen = tl.trans(chosen)
    if PRECISION == "bf16" or PRECISION == "tf32":
        s = sums_of_rows(chosen, x)
    else:
        s = tl.dot(chosen.to(tl.float32), x, input_precision=PRECISION)
    return s


@triton.jit
def sums_by_parts(chosen, x, PRECISION: tl.constexpr):
    """The sums of the rows of x that the rows of ``chosen`` [C,C], bfloat16 of 0 and 1, select, in a loop over parts of x of 8 bits.

    Two parts, three where products are as exact as float32. If a result of a product is an operand of another product, Triton assigns all
    columns to each warp. With 8 warps and 64 rows, the second four warps then repeat the work of the first, and a tile takes twice the
    registers. What leaves a loop is no operand in this sense.
    """
    if PRECISION == "ieee":
        return tl.dot(chosen.to(tl.float32), x, input_precision=PRECISION)
    PARTS: tl.constexpr = 3 if PRECISION == "tf32x3" else 2
    s = tl.zeros_like(x)
    for _ in tl.range(PARTS, num_stages=1):
        high = to_bfloat16(x)
        s = tl.dot(chosen, high.to(tl.bfloat16), s)
        x -= high
    return s


@triton.jit
def selected_by_parts(x, levels, n, i, C: tl.constexpr, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """The same as ``selected``, by ``sums_by_parts``."""
    chosen = tl.load(levels + n * (C * C) + i[:, None] * C + i[None, :])
    if TRANSPOSED:
        chosen = tl.trans(chosen)
    return sums_by_parts(chosen, x, PRECISION)


@triton.jit
def apart(i, L):
    """Whether tokens i (columns) are in the first half and tokens i (rows) in the second half of the same block of 2 L tokens: [C,C]."""
    middle = i & -L
    return ((i & L) != 0)[:, None] & (i[None, :] < middle[:, None]) & (i[None, :] >= middle[:, None] - L)


@triton.jit
def penstock_levels(levels, C: tl.constexpr, LEVELS: tl.constexpr, PREVIOUS: tl.constexpr, LOW: tl.constexpr):
    """levels_n = the 0 or 1 of ``dyadic.levels``: whether the decay of token u is in the factor of token t at level n.

    Writes levels [LEVELS + 3,C,C]; with LOW one more. Program n writes matrix n.
    """
    n = tl.program_id(0)
    t = tl.arange(0, C)[:, None]
    u = tl.arange(0, C)[None, :]
    LAST: tl.constexpr = LEVELS - 1 if LEVELS > 0 else 0
    L = C // 2 >> tl.minimum(n, LAST)
    if PREVIOUS:
        read = u < t
    else:
        read = u <= t
    chosen = (t // L == u // L) & (((t // L % 2 == 1) & read) | ((t // L % 2 == 0) & (u > t)))
    chosen = (n < LEVELS) & chosen
    triangle = n - LEVELS
    if LOW > 0:
        chosen |= (n == LEVELS) & (t // LOW == u // LOW) & read
        triangle -= 1
    chosen = chosen | ((triangle == 0) & (u <= t)) | ((triangle == 1) & (u < t)) | ((triangle == 2) & (u > t))
    tl.store(levels + (n * C + t) * C + u, tl.where(chosen, 1.0, 0.0).to(levels.dtype.element_ty))


def levels(C: int, previous: bool, low: int, device: torch.device) -> Tensor:
    """[levels + 3, C, C], or [levels + 4, C, C] if ``low``, see ``dyadic.levels``."""
    if device.type != "cuda":
        return dyadic.levels(C, previous, low, device)
    count = len(dyadic.lengths(C, low))
    made = torch.empty(count + 3 + (low > 0), C, C, dtype=torch.bfloat16, device=device)
    on_device_of(made, penstock_levels)[(len(made),)](made, C=C, LEVELS=count, PREVIOUS=previous, LOW=low)
    return made
