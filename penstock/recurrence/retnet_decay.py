"""The decays of RetNet's heads (Sun et al. 2023, arXiv 2307.08621), the default of retention."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..call import private
from .declaration import state_dtype


def retnet_decay(v: Tensor) -> Tensor:
    """log(1 - 2 ** (-5 - h)) for the heads of v [B,T,H,V], float32 or float64."""
    if not isinstance(v, Tensor):
        return torch.zeros(1)  # validation refuses v
    if v.dim() != 4:
        return v  # validation refuses v
    made = v.shape[2], state_dtype(v.dtype), v.device
    keeps = private.fast((v,)) and not (v.is_cuda and torch.cuda.is_current_stream_capturing())
    return _kept(*made) if keeps else _made(*made)


def _made(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    h = torch.arange(heads, dtype=torch.float64, device=device)
    return torch.log1p(-torch.exp2(-5 - h)).to(dtype)


@lru_cache(maxsize=256)
def _kept(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same, cached. Its memory must not belong to a CUDA graph, nor be an inference tensor, which autograd cannot save."""
    with torch.inference_mode(False):
        return _made(heads, dtype, device)
