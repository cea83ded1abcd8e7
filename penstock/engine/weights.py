"""The weights of tokens: exp((logit - largest) / temperature), with equal bits on every device.

Only operations that IEEE 754 rounds in one way are used, in float32: exp is 2 to the power of a whole number n, times 2 to the power of a
rest f between -1/2 and 1/2, a polynomial. Its error is at most 1 ulp, beside that of the difference of the logits. Sums are of whole
numbers of 1 / ``ONE``, which have no order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ONE = 2.0**44
"""The weight of the most likely token as a whole number."""
MOST_TOKENS = 2**19 - 1
"""Sums of so many weights fit int64."""
COLDEST, HOTTEST = 2.0**-100, 2.0**120
"""Temperatures beyond these are replaced by them: numbers of float32 hold what is computed from them. Below the lower one the most likely
token has all weight; above the upper one all tokens have equal weights."""
LOG2_E, LN_2 = 1 / math.log(2), math.log(2)
LEAST_POWER = -50.0
"""n, at least. The weights of such tokens are 0."""
POLYNOMIAL = (0.693147182, 0.240226477, 0.0555033237, 0.00961843692, 0.0013398875, 0.00015353362)
"""Coefficients of f, f**2 ... of 2**f: a minimax fit, whose error is 2e-9 before rounding."""
MAGIC = 12582912.0
"""1.5 * 2**23. Added to a number of float32 it leaves the nearest whole number in the lowest bits."""
SHORT = -256
"""A mask that leaves 16 bits of the fraction of a float32: its product with n is exact."""


def weights(logits: Tensor, largest: Tensor, temperatures: Tensor, least: Tensor | float = 1 / ONE) -> Tensor:
    """float32 [R,V] of logits [R,V] in float32, at most 1; 0 where they are below ``least``.

    largest : [R,1] float32
        Of each row; finite.
    temperatures : [R,1] float64
    """
    c = temperatures * LN_2
    scale, lowest = (1.0 / temperatures * LOG2_E).float(), (c * LEAST_POWER).float()
    high = (c.float().view(torch.int32) & SHORT).view(torch.float32)
    low = (c - high).float()
    d = torch.maximum(logits - largest, lowest)
    shifted = d * scale + MAGIC
    n = shifted - MAGIC
    f = ((d - n * high) - n * low) * scale
    p = torch.full_like(f, POLYNOMIAL[-1])
    for factor in (*POLYNOMIAL[-2::-1], 1.0):
        p = p.mul_(f).add_(factor)
    found = (p.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)
    return found.masked_fill_(found < least, 0)


def whole(found: Tensor) -> Tensor:
    """Weights as whole numbers of 1 / ``ONE``: int64."""
    return (found * ONE).long()
