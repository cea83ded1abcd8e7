"""Dtypes of sums over time."""

from __future__ import annotations

import torch


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of final states and of sums over time: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
