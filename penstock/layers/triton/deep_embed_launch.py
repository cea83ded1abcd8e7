"""The launch of the kernel of DeepEmbed. There are no gradients. All tensors are contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from ...gpu.launch import on_device_of
from ...gpu.target import power
from . import launch
from .deep_embed import penstock_deep_embed

LARGEST = 64
"""The most rows of a matrix."""
COLUMNS = 128
"""The channels of a program."""


def deep_embed(
    k: Tensor, hidden: Tensor, ids: Tensor, table: Tensor, part: Tensor, up: Tensor, offset: Tensor, *, early: bool = False
) -> Tensor:
    """The squares k [R,F] times the factors of tokens ids [R]. ``early``: no earlier kernel still writes up and offset."""
    (R, F), E, y = k.shape, hidden.shape[1], torch.empty_like(k)
    if R:
        pdl = launch.early(k.device)
        on_device_of(k, penstock_deep_embed)[R, launch.blocks(F, COLUMNS)](
            k, hidden, ids, table, part, up, offset, y, F, E=E, BE=power(E, 16), BF=COLUMNS, EARLY=early, PDL=bool(pdl), num_warps=4, **pdl
        )
    return y
