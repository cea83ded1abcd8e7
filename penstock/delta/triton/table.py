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
    programs_per_sm: int = 0
    """The target of programs per multiprocessor: the blocks of a step get fewer columns."""


def config(kernel: str, K: int, V: int, precision: str, target: Target) -> KernelConfig:
    """Sizes for a kernel on a GPU. Those of steps are measured, the others are those with the least spills.

    Where all operands of products are registers (``from_registers``), 8 warps and blocks of 32 key channels. Elsewhere blocks have at least
    ``LEAST`` channels, though the sums of ``penstock_delta_gradients`` then spill.
    """
    if kernel in ("recurrent", "step") and target.interpreted:
        return KernelConfig(1, BV=min(power(V), 64))
    if kernel == "recurrent":
        return KernelConfig(1 if K <= 64 else 2, BV=min(power(V), 16))
    if kernel == "step":  # 64 float32 of the state a thread; kda, 1024 sequences: rows of 64 take 1.49 ms, 32 1.54, 128 2.00
        BV = min(power(V), 64)
        return KernelConfig(max(power(K) * BV // 2048, 1), BV=BV, programs_per_sm=4)
    if from_registers(target):
        return KernelConfig(8, BJ=32 if kernel in ("prepare", "gradients") else LEAST)
    wide = K > LEAST
    if kernel == "prepare":
        return KernelConfig(8 if wide else 4)
    if kernel in ("gradients", "scalar_gradients"):
        return KernelConfig(8)
    return KernelConfig(4, stages=2 if kernel == "walk" and precision == "bf16" else 1)
