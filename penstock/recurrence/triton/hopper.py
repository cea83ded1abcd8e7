"""Where ``hopper_forward`` and ``hopper_backward`` take the place of the chunk kernels' first launches, and what theirs are told."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...gpu.hopper import Tile, modules, tiled
from ...gpu.target import Target
from ..declaration import Recurrence
from .table import KernelConfig

FORM = "hopper"
"""Its name in the tables."""
C, BV = 64, 64
"""Tokens in a chunk, and value channels in a block: what one program of the forward launch that follows has."""
STAGES, SLOTS = 2, 4
"""Tiles of q, k and v in flight, and tiles with factors. With these, two programs share a multiprocessor at K = 64."""
FORWARD = {64: (4, 136, 128), 128: (8, 152, 168)}
"""By K: warps that prepare, registers for their threads, and for every thread before they are divided anew. With fewer they spill; with
more, those that hold the state do."""
BACKWARD = {64: (8, 128), 128: (8, 255)}
"""By K: warps, and registers for their threads. At K = 64 two programs share a multiprocessor."""


def kernels() -> tuple[Any, Any] | None:
    """Forward and backward, if there are."""
    found = modules(__package__)
    return found and (found[0].penstock_chunk_fwd_hopper, found[1].penstock_chunk_bwd_hopper)


def forward(p: Recurrence, config: KernelConfig, target: Target, precision: str) -> Any:
    """The kernel of the forward pass if the table wants it and it can compute this problem, or None."""
    sizes = p.sizes
    suits = config.BV == BV and sizes["K"] in FORWARD and sizes["V"] % BV == 0 and _suits(p, config, target, precision)
    found = kernels() if suits else None
    return found and found[0]


def backward(p: Recurrence, config: KernelConfig, target: Target, precision: str, *d_output: Tensor) -> Any:
    """That of the backward pass, or None; a constant decay's gradient is left to the plain kernel, and so is a call of one chunk."""
    sizes = p.sizes
    square = sizes["K"] == sizes["V"] in BACKWARD
    suits = square and "T" in p.variant.decay and sizes["T"] > C and _suits(p, config, target, precision, *d_output)
    found = kernels() if suits else None
    return found and found[1]


def _suits(p: Recurrence, config: KernelConfig, target: Target, precision: str, *d_output: Tensor) -> bool:
    """Decays per channel, bfloat16, tensors that the hardware can copy in tiles."""
    sizes = p.sizes
    return (
        config.form == FORM
        and target.arch == "sm_90"
        and precision == "bf16"
        and "K" in p.variant.decay
        and not p.reverse
        and 0 < sizes["B"] * sizes["T"] < 1 << 31
        and all(map(tiled, (p.q, p.k, p.v, *d_output)))
    )


def constants(K: int, in_tiles: bool) -> dict[str, Any]:
    """What the forward kernel is compiled for besides the problem."""
    warps, registers, _ = FORWARD[K]
    return {"STAGES": STAGES, "SLOTS": SLOTS, "WARPS": warps, "REGISTERS": registers, "TILED": in_tiles}


def decays_in_tiles(p: Recurrence) -> bool:
    """Whether the hardware can copy the decays in tiles too."""
    return p.g is not None and "T" in p.variant.decay and tiled(p.g)


def forward_tiles(K: int) -> tuple[Tile, ...]:
    """Of its first tensors: q, k, v, the output and the decays."""
    return Tile(C, K), Tile(C, K), Tile(C, BV), Tile(C, BV), Tile(C, K)


def backward_tiles(K: int) -> tuple[Tile, ...]:
    """Of its first tensors: q, k, v, the output's gradient, states and their gradients."""
    return *[Tile(C, K)] * 4, Tile(K, K, 3), Tile(K, K, 3)
