"""Linear maps. On a CPU, those of few tokens without gradients run the native kernel, which reads the weights once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call import private
from ..recurrence.cpu import linear as native


class Linear(nn.Linear):
    """``nn.Linear`` by way of ``linear``."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [...,inputs] to [...,outputs]."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``."""
    given = (x, weight) if bias is None else (x, weight, bias)
    if (
        x.device.type != "cpu"
        or (torch.is_grad_enabled() and any(one.requires_grad for one in given))
        or not private.fast(given)
        or private.autocasting()
        or not native.takes(x, weight)
    ):
        return F.linear(x, weight, bias)
    y = native.linear(x, weight)
    return y if bias is None else y + bias
