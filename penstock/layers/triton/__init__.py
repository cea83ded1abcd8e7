"""Triton kernels of layers: fused chains of element-wise operations with backward passes, and linear maps with few rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...call import private
from ...gpu.target import Target, standing_in, unavailable

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEVICES: tuple[str, ...] = ("cuda",)
"""Devices on which the kernels run. Tests add the CPU, for Triton's interpreter."""


def elsewhere(x: Tensor) -> str | None:
    """Why no kernel takes tensors on the device of x, or None."""
    kind = x.device.type
    return None if kind in DEVICES else f"its tensors are on {kind}, it works on a GPU"


def absent(device: torch.device) -> str | None:
    """Why a device has no code of the kernels, or None."""
    return unavailable() if device.type in DEVICES else f"this is a {device.type}, it works on a GPU"


def refusal(*tensors: Tensor | None) -> str | None:
    """Why no kernel takes these tensors, of which the first is not None, or None."""
    if (why := elsewhere(tensors[0])) is not None:  # type: ignore[arg-type]
        return why
    place = tensors[0].get_device()  # type: ignore[union-attr]
    for x in tensors:
        if x is not None:
            if x.dtype not in DTYPES:
                return f"it takes float16, bfloat16 and float32, got {str(x.dtype).removeprefix('torch.')}"
            if x.get_device() != place:
                return "its tensors are on several devices"
    if not private.fast(tensors):
        return "the call is traced, transformed or in a mode, or a tensor is of a subclass"
    return unavailable()


@cache
def launching(name: str) -> Any:
    """A module of this package with launches. Only where ``refusal`` is None."""
    return import_module("." + name, __name__)


@contextmanager
def launches_for(target: Target) -> Iterator[list[Any]]:
    """Collect the launches of calls with tensors on a CPU, as on a GPU that may be absent. They do not run: results are undefined.

    Inside this block, in the whole process. Yields ``gpu.launch.Noted`` launches.
    """
    global DEVICES
    from ...gpu.launch import noted  # needs Triton

    devices, early = DEVICES, launching("launch").early
    DEVICES = (*devices, "cpu")
    early.cache_clear()
    try:
        with standing_in(target), noted() as found:
            yield found
    finally:
        DEVICES = devices
        early.cache_clear()
