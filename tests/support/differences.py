"""Derivatives by finite differences."""

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def slope(loss: Callable[[], Tensor], weight: Tensor, direction: Tensor, size: float = 1e-5) -> Tensor:
    """The derivative of a loss along a direction of a weight, which it reads; the weight is moved there and back."""
    losses = []
    for sign in (1, -1):
        weight.add_(sign * size * direction)
        losses.append(loss())
        weight.sub_(sign * size * direction)
    return (losses[0] - losses[1]) / (2 * size)
