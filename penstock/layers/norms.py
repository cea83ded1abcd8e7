"""RMS norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call.autocast import autocasting
from ..tokens.dtypes import state_dtype
from .as_written import altered, remembered


@remembered
class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` in the dtype of its weight. Results have that of x, under autocast that of the weight, as those of layer norms."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [...,C] to the same shape."""
        return rms_norm(x, self.weight, self.normalized_shape, self.eps)


def rms_norm(x: Tensor, weight: Tensor | None, shape: Sequence[int], eps: float | None) -> Tensor:
    """``RMSNorm``."""
    if weight is None:
        return F.rms_norm(x, shape, None, eps)
    normed = F.rms_norm(x.to(weight.dtype), shape, weight, eps)
    return normed if autocasting(x.device.type) else normed.to(x.dtype)


def refuses_group_norm(norm: nn.GroupNorm, heads: int) -> str | None:
    """Why kernels do not compute the norm of heads by a group norm, or None."""
    if (why := altered(norm, nn.GroupNorm)) is not None:
        return why
    if norm.weight is None or norm.bias is None:
        return "has no weight or bias"
    return None if norm.num_groups == heads else f"has {norm.num_groups} groups for {heads} heads"


@remembered
class GroupedRMSNorm(nn.Module):
    """RMS norm of ``x * silu(gate)`` over each group of channels, computed in float32 for narrower dtypes."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map x and gate [B,T,size] to the same shape."""
        return grouped_rms_norm(x, gate, self.weight, self.groups, self.eps)


def grouped_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """``GroupedRMSNorm``."""
    dtype = state_dtype(x.dtype)
    gated = (x.to(dtype) * F.silu(gate.to(dtype))).unflatten(-1, (groups, -1))
    normed = F.rms_norm(gated, gated.shape[-1:], eps=eps).flatten(-2)
    return (normed * weight.to(dtype)).to(x.dtype)
