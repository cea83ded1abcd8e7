"""Tensors that are adjacent in a row of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64
"""The alignment in bytes: every tensor of a row begins at a multiple of this."""


class Place(NamedTuple):
    """The position of a tensor in a row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """In bytes."""

    def view(self, memory: Tensor) -> Tensor:
        """The tensor of rows [N,W] of 64-bit words: [N,*shape]."""
        size = self.dtype.itemsize * math.prod(self.shape)
        part = memory[:, self.offset // 8 : self.offset // 8 + -(-size // 8)]
        return part.view(self.dtype)[:, : size // self.dtype.itemsize].view(memory.shape[0], *self.shape)


def placed(tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[Place], int]:
    """The places of tensors [1,...] by their names, and the bytes of a row."""
    layout, end = list[Place](), 0
    for name, x in tensors:
        layout.append(Place(name, x.dtype, tuple(x.shape[1:]), end))
        end += -(-x[0].numel() * x.element_size() // ALIGNMENT) * ALIGNMENT
    return layout, end
