"""Linear maps. Those of few tokens without gradients run kernels that read the weights once: a native one on a CPU, Triton's on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call import private
from ..recurrence.cpu import linear as native
from .triton import kernels

ROWS = 32
"""Tokens of a linear map on a GPU, at most, that are few."""
SHARED_ROWS = 256
"""Of several maps in one launch, which has enough programs for larger tiles."""
PARTS = 5
"""Linear maps of one launch, at most."""


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
        found = linears([x], [weight])
        if found is None:
            return F.linear(x, weight, bias)
        (y,) = found
    else:
        y = native.linear(x, weight)
    return y if bias is None else y + bias


def linears(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], activations: Sequence[str | None] = (), gate: Tensor | None = None
) -> list[Tensor] | None:
    """Linear maps of few tokens by one kernel on a GPU, ``activation_i(x_i W_i^T)``, or None where it does not compute them.

    Activations are "tanh", "relu_squared" or None. With ``gate`` the first result is multiplied by sigmoid(gate).
    """
    x = inputs[0]
    K, launch = x.shape[-1], kernels("few_rows_launch", *inputs, *weights, gate)
    if (
        launch is None
        or torch.is_grad_enabled()
        or not 0 < x.numel() <= (ROWS if len(weights) == 1 else SHARED_ROWS) * K
        or x.element_size() != 2
        or any(one.dtype != x.dtype or one.shape != x.shape for one in inputs)
        or any(one.dtype != x.dtype or not (one.is_contiguous() or (one is weights[0] and one.T.is_contiguous())) for one in weights)
        or (gate is not None and gate.dtype != x.dtype)
        or private.autocasting()
    ):
        return None
    gates = None if gate is None else gate.reshape(-1, gate.shape[-1]).contiguous()
    found = launch.products([one.reshape(-1, K).contiguous() for one in inputs], weights, activations, gates)
    return [y.view(*x.shape[:-1], -1) for y in found]
