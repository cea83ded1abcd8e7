"""Rows of state pools that Triton kernels read and write in place, without a copy of the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .triton import kernels


class PoolRows(NamedTuple):
    """Rows of a pool. Some kernels read them in place; others need a copy."""

    pool: Tensor
    """[P,C]"""
    slots: Tensor
    """[N]; negative ones are skipped."""
    read: Callable[[], Tensor]
    """Makes a copy of the rows, [N,C]."""


def reads_rows(x: Tensor, pool: Tensor) -> bool:
    """Whether kernels for tokens x read rows of a pool in place."""
    return not torch.is_grad_enabled() and pool.shape[0] > 0 and pool[0].is_contiguous() and kernels("launch", x, pool) is not None


def write_rows(states: Tensor, pool: Tensor, slots: Tensor, ends: Tensor | None = None) -> bool:
    """Write states [N,...] to rows of a pool, except for negative slots. Returns whether a kernel did it.

    With ends [N+1]: write the last of the packed tokens [T,...] of each sequence, nothing for an empty one.
    """
    rows = kernels("rows", states, pool)
    if rows is None or not (states[0].is_contiguous() and pool[0].is_contiguous()):
        return False
    rows.write_rows(states, pool, slots.contiguous(), None if ends is None else ends.contiguous())
    return True
