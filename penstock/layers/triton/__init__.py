"""Triton kernels of layers: fused chains of element-wise operations with backward passes, and linear maps with few rows."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...call import private
from ...gpu.target import unavailable

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def kernels(name: str, *tensors: Tensor | None) -> Any:
    """The launching module ``name``, or None where PyTorch computes: not on a GPU, float64, compiled graphs, transforms."""
    given = [x for x in tensors if x is not None]
    if given[0].device.type != "cuda" or any(x.dtype not in DTYPES for x in given) or not private.fast(given):
        return None
    return None if unavailable() else import_module("." + name, __name__)
