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
    if x.device.type != "cpu" or (torch.is_grad_enabled() and any(one.requires_grad for one in given)):
        return F.linear(x, weight, bias)
    compiling = torch.compiler.is_compiling()
    plain = not torch.is_autocast_enabled("cpu") if compiling else private.fast(given) and not private.autocasting()
    if not plain or not native.takes(x, weight):
        return F.linear(x, weight, bias)
    y = _few_rows(x, weight) if compiling else native.linear(x, weight)
    return y if bias is None else y + bias


@torch.library.custom_op("penstock::linear_of_few_rows", mutates_args=())
def _few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """The native kernel in compiled graphs."""
    return native.linear(x, weight)


@_few_rows.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
