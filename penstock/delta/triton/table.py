"""Block sizes of the kernels, by rule."""

from __future__ import annotations

from typing import NamedTuple

from ...gpu.target import Target, from_registers, power

LEAST = 64
"""Blocks of the chunk kernels: with 32 columns and chunks of 64, Triton 3.6 made code that read out of bounds on Hopper."""


class KernelConfig(NamedTuple):
    """Sizes of a launch."""

    warps: int
    BV: int = 64
    """Value channels per program."""
    BJ: int = 64
    """Key channels that are in registers at once, of kernels whose programs take all of them in turn."""
    stages: int = 1
    """Of the software pipeline."""


def config(kernel: str, K: int, V: int, precision: str, target: Target) -> KernelConfig:
    """Sizes for a kernel on a GPU. Nothing is measured: they are those with the least spills.

    Where all operands of products are registers (``from_registers``), 8 warps and blocks of 32 key channels. Elsewhere blocks have at least
    ``LEAST`` channels, though the sums of ``penstock_delta_gradients`` then spill.
    """
    if kernel in ("recurrent", "step"):
        return KernelConfig(1 if K <= 64 else 2, BV=min(power(V), 64 if target.interpreted else 16))
    if from_registers(target):
        return KernelConfig(8, BJ=32 if kernel in ("prepare", "gradients") else LEAST)
    wide = K > LEAST
    if kernel == "prepare":
        return KernelConfig(8 if wide else 4)
    if kernel in ("gradients", "scalar_gradients"):
        return KernelConfig(8)
    return KernelConfig(4, stages=2 if kernel == "walk" and precision == "bf16" else 1)
