"""Block sizes of the kernels, by rule."""

from __future__ import annotations

from typing import NamedTuple

from ...gpu.target import Target, power

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
    """Sizes for a kernel on a GPU."""
    wide = K > LEAST
    if kernel == "prepare":
        return KernelConfig(8 if wide else 4)
    if kernel == "walk":
        return KernelConfig(4, stages=2 if precision == "bf16" else 1)
    if kernel in ("walk_backward", "pairs_backward"):
        return KernelConfig(4)
    if kernel == "scalar_gradients":
        return KernelConfig(8)
    if kernel == "gradients":  # of 64 channels, sums of gradients take more registers than there are
        return KernelConfig(4, BJ=32)
    return KernelConfig(1 if K <= 64 else 2, BV=min(power(V), 64 if target.interpreted else 16))
