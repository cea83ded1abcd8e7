"""Native CPU kernels of layers, and what all of them ask about a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...call import private
from ...cpu import DTYPES, unavailable

NARROW = frozenset(DTYPES) - {torch.float64}
"""The dtypes of the kernels."""


def elsewhere(device: torch.device) -> str | None:
    """Why no native kernel works on a device, or None."""
    return None if device.type == "cpu" else f"its tensors are on {device.type}, it works on a CPU"


def absent(function: str, device: torch.device) -> str | None:
    """Why a device has no code of a function of the native library, or None."""
    return elsewhere(device) or unavailable(function)


def freed(*tensors: Tensor | None) -> str | None:
    """Why the memory of tensors cannot be read, or None: its storage was resized to 0, as that of sharded parameters is between passes."""
    return "a tensor has no memory" if any([x is not None and not x.data_ptr() and x.numel() for x in tensors]) else None


def refusal(function: str, tensors: Sequence[Tensor | None], *, alike: bool = False) -> str | None:
    """Why a function of the native library takes no call with these tensors, of which the first is not None, or None.

    ``alike``: they must have one dtype.
    """
    if not tensors[0].is_cpu:  # type: ignore[union-attr]
        return elsewhere(tensors[0].device)  # type: ignore[union-attr]
    if (why := unavailable(function)) is not None:
        return why
    if torch.is_grad_enabled():
        return "gradients are on"
    if private.autocasting():
        return "autocast is on"
    if not private.fast(tensors):
        return "the call is traced, transformed or in a mode, or a tensor is of a subclass"
    given = [x for x in tensors if x is not None]
    dtypes = {x.dtype for x in given}
    if not (dtypes <= NARROW and all([x.is_cpu for x in given])):
        return "it takes tensors of float16, bfloat16 and float32 on a CPU"
    return "it takes one dtype" if alike and len(dtypes) > 1 else freed(*given)
