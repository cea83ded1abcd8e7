"""Copies between host and device that the host does not wait for.

A copy from pageable memory, or to it, waits for all earlier work of the stream: with it, no step could be launched while another runs.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor


def to_device(values: Items[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of Python numbers."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def fill(memory: Tensor, values: Items[Any]) -> None:
    """Write Python numbers to a tensor."""
    memory.copy_(torch.tensor(values, dtype=memory.dtype, pin_memory=memory.is_cuda), non_blocking=True)


class ToHost:
    """A tensor on its way to the host."""

    def __init__(self, x: Tensor) -> None:
        self._copy = x.to("cpu", non_blocking=True)  # to page-locked memory
        self._arrived: torch.cuda.Event | None = None
        if x.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tolist(self) -> list[Any]:
        """Its values. Waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[Any] = self._copy.tolist()
        return found
