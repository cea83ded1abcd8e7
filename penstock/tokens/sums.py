"""Sums in one order, which depends on nothing but their length."""

from __future__ import annotations

import torch
from torch import Tensor


def by_halves(x: Tensor) -> Tensor:
    """The sum over the last axis, which keeps it: first halves are added to second halves, and so on."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([pairs, x[..., 2 * half :]], -1) if x.shape[-1] % 2 else pairs
    return x
