"""When the Hopper kernels replace the plain chunk kernels, and their launch parameters.

``hopper_forward`` and ``hopper_backward`` take any decay. At K = 256 there are not enough registers for the state and the tiles of all
levels. ``hopper_anchored`` then replaces the plain kernel's first loop; a launch of the plain kernel computes what follows.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from ...gpu.hopper import Tile, modules, tiled
from ...gpu.target import Target
from ..declaration import Advance, Recurrence, Tokens
from .table import KernelConfig

FORM = "hopper"
"""The name of the Hopper kernels in the tables."""
C, BV = 64, 64
"""Tokens in a chunk, and value channels in a block."""
STAGES, SLOTS = 2, 4
"""Stages of tiles of q, k and v, and slots for tiles with factors. With these, two programs fit on a multiprocessor at K = 64."""
FORWARD = {64: (4, 136, 128), 128: (8, 152, 168)}
"""By K: warps of ``prepare``, registers of their threads, and registers of every thread at launch. With fewer, ``prepare`` spills; with
more, the warps that hold the state spill."""
ANCHORED = {256: (8, 128, 168)}
"""The same for the anchored kernel."""
BACKWARD = {64: (8, 128), 128: (8, 255)}
"""By K: warps, and registers of their threads. At K = 64 two programs fit on a multiprocessor."""


def kernels() -> tuple[Any, Any] | None:
    """The forward and the backward kernel; None if this Triton has no Gluon for Hopper."""
    found = modules(__package__)
    return found and (found[0].penstock_chunk_fwd_hopper, found[1].penstock_chunk_bwd_hopper)


class Forward(NamedTuple):
    """A forward kernel and its launch."""

    kernel: Any
    every_decay: bool
    """Whether the kernel takes every decay, so that no second launch is needed."""
    tiles: tuple[Tile, ...]
    registers: int
    """Registers of each thread at launch."""
    constants: dict[str, Any]


def forward(p: Recurrence | Advance, config: KernelConfig, target: Target, precision: str) -> Forward | None:
    """The forward kernel and its launch if the table selects it and it supports this problem, or None."""
    K, V = p.sizes["K"], p.sizes["V"]
    found = kernels() if config.BV == BV and V % BV == 0 and _suits(p, config, target, precision) else None
    tiles = Tile(C, K), Tile(C, K), Tile(C, BV), Tile(C, BV)
    if found and K in FORWARD:
        warps, registers, first = FORWARD[K]
        constants = {"STAGES": STAGES, "SLOTS": SLOTS, "WARPS": warps, "REGISTERS": registers, "TILED": decays_in_tiles(p)}
        return Forward(found[0], True, (*tiles, Tile(C, K)), first, constants)
    if found and K in ANCHORED:
        warps, registers, first = ANCHORED[K]
        kernel = import_module(".hopper_anchored", __package__).penstock_chunk_fwd_hopper_anchored
        return Forward(kernel, False, tiles, first, {"BLOCKS": 1, "STAGES": 2, "COLUMNS": 2, "WARPS": warps, "REGISTERS": registers})
    return None


def backward(p: Recurrence, config: KernelConfig, target: Target, precision: str, *d_output: Tensor) -> Any:
    """The backward kernel, or None. The plain kernel computes constant decays and calls of one chunk."""
    sizes = p.sizes
    square = sizes["K"] == sizes["V"] in BACKWARD
    suits = square and "T" in p.variant.decay and sizes["T"] > C and _suits(p, config, target, precision, *d_output)
    found = kernels() if suits else None
    return found and found[1]


def _suits(p: Recurrence | Advance, config: KernelConfig, target: Target, precision: str, *d_output: Tensor) -> bool:
    """Whether the call has decays per channel, bfloat16 products, and tensors that the tensor memory accelerator can copy."""
    sizes = p.sizes
    return (
        config.form == FORM
        and target.arch == "sm_90"
        and precision == "bf16"
        and "K" in p.variant.decay
        and not p.reverse
        and not p.partial
        and 0 < sizes["B"] * sizes["T"] < 1 << 31
        and all(map(tiled, (p.q, p.k, p.v, *d_output)))
    )


def decays_in_tiles(p: Tokens) -> bool:
    """Whether the tensor memory accelerator can copy the decays too."""
    return p.g is not None and "T" in p.variant.decay and tiled(p.g)


def backward_tiles(K: int) -> tuple[Tile, ...]:
    """The tiles of the backward kernel's first tensors: q, k, v, dO, states and their gradients."""
    return *[Tile(C, K)] * 4, Tile(K, K, 3), Tile(K, K, 3)
