"""torch.autocast: the dtype that a call runs in, and none inside of implementations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from . import private


def autocasting(kind: str) -> bool:
    """Whether autocast is on for devices of this kind."""
    return private.autocasting() and kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def cast(tensors: Sequence[Tensor | None], which: Sequence[bool]) -> Sequence[Tensor | None]:
    """Under autocast, floating-point tensors in its dtype, as for a matrix product, where ``which`` says so. float64 stays."""
    first = tensors[0]
    if not isinstance(first, Tensor) or not autocasting(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        x.to(dtype) if some and isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x, some in zip(tensors, which)
    )


_NOTHING = nullcontext()


def no_autocast(x: Tensor | None) -> AbstractContextManager[object]:
    """Implementations choose their own precision."""
    if not private.autocasting() or x is None or not autocasting(x.device.type):
        return _NOTHING
    return torch.autocast(x.device.type, enabled=False)
