"""torch.autocast: casts the arguments of a call, and disables autocast inside implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import private

T = TypeVar("T")


def autocasting(kind: str) -> bool:
    """Whether autocast is on for devices of this kind."""
    return private.autocasting() and kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def cast(tensors: Sequence[Tensor | None], which: Sequence[bool]) -> Sequence[Tensor | None]:
    """Under autocast, cast the floating-point tensors that ``which`` selects to its dtype, as for a matrix product, except float64."""
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
    """Disable autocast: implementations choose their own precision."""
    if not private.autocasting() or x is None or not autocasting(x.device.type):
        return _NOTHING
    return torch.autocast(x.device.type, enabled=False)


def without_autocast(x: Tensor, function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)`` under ``no_autocast(x)``. If autocast is off, no context is entered, which would take 1 us."""
    if not private.autocasting():
        return function(*arguments)
    with no_autocast(x):
        return function(*arguments)
