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
    given = [one for one in (x, weight, bias) if one is not None]
    if (
        x.device.type != "cpu"
        or not private.fast(given)
        or not native.takes(x, weight)
        or private.autocasting()
        or (torch.is_grad_enabled() and any(one.requires_grad for one in given))
    ):
        return F.linear(x, weight, bias)
    y = native.linear(x, weight)
    return y if bias is None else y + bias
