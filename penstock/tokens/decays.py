"""Log decays: the rule for their values, and those of RetNet's heads (Sun et al. 2023, arXiv 2307.08621)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..call import private
from ..call.declaration import Options, Sizes, Wrong
from .dtypes import state_dtype

FASTEST = -math.exp(-0.5)
"""The bound of RWKV-7's log decays, -exp(-1/2) sigmoid(x) (Peng et al. 2025, arXiv 2503.14456)."""
LARGEST = 60.0
"""The exponential of a larger exponent is that of this one in decays: exp(-exp(60)) is 0, and exp(60) times a gradient is finite."""
SMALLEST = -78.0
"""The exponential of a smaller A_log is that of this one: numbers up to 1e4 divided by it are finite in float32."""
REMEDY = "Pass log(decay): for RWKV checkpoints -exp(w), for GLA logsigmoid(x) / 16."


def distinct(x: Tensor) -> Tensor:
    """X without the values that expanded axes repeat."""
    return x[tuple([slice(None) if stride else slice(1) for stride in x.stride()])]


def log_decay(g: Tensor, sizes: Sizes, options: Options, remedy: str = REMEDY) -> Wrong | None:
    """The rule for values of a decay. ``remedy``: what the message recommends."""
    g = distinct(g)
    if not g.numel() or float(g.amax()) <= 0:  # False for NaN, which amax propagates
        return None
    missing, largest = int(g.isnan().sum()), float(g.nan_to_num(nan=-torch.inf, posinf=torch.inf).amax())
    found = [f"a largest value of {largest:g}"] * (largest > 0) + [f"{missing} times NaN"] * (missing > 0)
    return Wrong("a log decay, natural logarithm, nowhere above 0 or NaN", " and ".join(found), remedy)


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
