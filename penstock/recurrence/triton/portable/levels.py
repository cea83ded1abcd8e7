"""The matrices of ``recurrence.levels`` on a GPU, by one launch: a graph that is captured makes them anew."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....gpu.launch import on_device_of
from ... import levels as plain


@triton.jit
def penstock_levels(levels, C: tl.constexpr, LEVELS: tl.constexpr, PREVIOUS: tl.constexpr):
    """levels_n = the 0 or 1 of ``recurrence.levels``: whether the decay of token u is in the factor of token t at level n.

    Writes levels [LEVELS + 3,C,C]. Program n writes matrix n.
    """
    n = tl.program_id(0)
    t = tl.arange(0, C)[:, None]
    u = tl.arange(0, C)[None, :]
    L = C // 2 >> tl.minimum(n, LEVELS - 1)
    if PREVIOUS:
        read = u < t
    else:
        read = u <= t
    chosen = (t // L == u // L) & (((t // L % 2 == 1) & read) | ((t // L % 2 == 0) & (u > t)))
    chosen = ((n < LEVELS) & chosen) | ((n == LEVELS) & (u <= t)) | ((n == LEVELS + 1) & (u < t)) | ((n == LEVELS + 2) & (u > t))
    tl.store(levels + (n * C + t) * C + u, tl.where(chosen, 1.0, 0.0).to(levels.dtype.element_ty))


def levels(C: int, previous: bool, device: torch.device) -> Tensor:
    """[levels + 3, C, C], see ``recurrence.levels``."""
    if device.type != "cuda":
        return plain.levels(C, previous, device)
    count = len(plain.lengths(C))
    made = torch.empty(count + 3, C, C, dtype=torch.bfloat16, device=device)
    on_device_of(made, penstock_levels)[(count + 3,)](made, C=C, LEVELS=count, PREVIOUS=previous)
    return made
