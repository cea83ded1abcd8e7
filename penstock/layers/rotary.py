"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import Complaints, RangeError


def check_base(complaints: Complaints, base: float) -> None:
    """Check the base of a configuration."""
    if base == 0:
        complaints.add(RangeError, "rope_theta", "above 0", base)


def rotary(positions: Tensor, size: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles ``position * base ** (-2 i / size)``, [B,T,1,size/2]; the angles are float64."""
    frequencies = float(base) ** (-torch.arange(0, size, 2, dtype=torch.float64, device=positions.device) / size)
    angles = (positions.double()[..., None] * frequencies)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B,T,H,K]: channel i with channel i + K/2.

    Source: Su et al. 2021, arXiv 2104.09864; the halves as in GPT-NeoX.

    >>> rotated(torch.tensor([[[[1.0, 0.0]]]]), *rotary(torch.tensor([[1]]), 2, 1e4, torch.float32)).flatten()
    tensor([0.5403, 0.8415])
    """
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
