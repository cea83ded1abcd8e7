"""Softmax attention by Triton kernels. Triton itself is imported when they first run."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from ...kernels.triton import interpreting
from ..problem import Attention

INSTALLED, INTERPRETED = find_spec("triton") is not None, interpreting()
"""Found out once, not in each call: torch.compile cannot look through caches."""
LARGEST = 256
"""Elements of a head."""


def refuses(a: Attention) -> str | None:
    """Why it does not take this call, or None."""
    device = a.q.device
    if not INSTALLED:
        return "Triton is not installed: pip install 'penstock[triton]'"
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        return f"its tensors are on {device}, it works on a GPU (or under Triton's interpreter: TRITON_INTERPRET=1 before Python starts)"
    if a.q.dtype == torch.float64:
        return "it computes in float32, and the inputs are float64"
    if INTERPRETED and a.q.dtype == torch.bfloat16:
        return "Triton's interpreter cuts bfloat16 off where it should round"
    return f"heads have at most {LARGEST} elements, these have {a.sizes['D']}" if a.sizes["D"] > LARGEST else None


def avoids(a: Attention) -> str | None:
    """Why "auto" had better pass it over, or None."""
    return "it runs under the interpreter" if INTERPRETED else None


def attend(a: Attention, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Output [B,Tq,H,D] and log-sum-exp [B,Tq,H], which there is anyway."""
    from . import operator  # noqa: F401

    output, lse = torch.ops.penstock.softmax_forward(a.q, a.k, a.v, a.cu_seqlens, a.cu_seqlens_k, a.causal, a.scale, a.window)
    return output, lse
