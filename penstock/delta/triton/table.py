"""Block sizes of the kernels, by rule."""

from __future__ import annotations

from typing import NamedTuple

from ...gpu.target import Target, from_registers, power, tensor_memory

LEAST = 64
"""Blocks of the chunk kernels: with 32 columns of 16 bits and chunks of 64, Triton 3.6 made code that read out of bounds on Hopper."""
NARROW = 128
"""Key channels of a head up to which 4 warps have a state of 64 value channels in registers. With more, walks have other sizes."""
STREAMING = ("scalar_prepare", "scalar_gradients", "pairs_backward")
"""Kernels of all chunks in parallel whose loops over channels load operands of products alone: bfloat16 is loaded a step ahead."""


class KernelConfig(NamedTuple):
    """Sizes of a launch."""

    warps: int
    BV: int = 64
    """Value channels per program."""
    BJ: int = 64
    """Key channels, or rows of a matrix of key channels, that are in registers at once."""
    stages: int = 1
    """Of the software pipeline."""
    registers: int = 0
    """Of a thread at most; 0: the compiler's choice."""
    programs_per_sm: int = 0
    """The target of programs per multiprocessor: the blocks of a step get fewer columns."""


def config(kernel: str, K: int, V: int, precision: str, target: Target) -> KernelConfig:
    """Sizes for a kernel on a GPU. Those of steps are measured, the others are those with the least spills.

    Where all operands of products are registers (``from_registers``), blocks are small, and smallest for operands of 32 bits. So they are
    for float32 where sums and operands are in tensor memory. On Hopper blocks have at least ``LEAST`` channels, but 32 value channels of
    float32 beside more key channels (kda, heads of 128, H100: 0.89 of the time with 64, both passes 0.92; rwkv7, heads of 64: 1.05, 1.03).
    8 warps share the work, see ``portable/products.py``.
    """
    sizes = _sizes(kernel, K, V, precision, target)
    if kernel not in STREAMING or precision != "bf16":
        return sizes
    few = kernel == "scalar_prepare" and target.nvidia and not from_registers(target)  # it needs little more than two programs have
    return sizes._replace(stages=2, registers=128 if few else 0)


def _sizes(kernel: str, K: int, V: int, precision: str, target: Target) -> KernelConfig:
    """Sizes but for loads ahead."""
    if kernel in ("recurrent", "step") and target.interpreted:
        return KernelConfig(1, BV=min(power(V), 64))
    if kernel == "recurrent":
        return KernelConfig(1 if K <= 64 else 2, BV=min(power(V), 16))
    if kernel == "step":  # 64 float32 of the state a thread; kda, 1024 sequences: rows of 64 take 1.49 ms, 32 1.54, 128 2.00
        BV = min(power(V), 64)
        return KernelConfig(max(power(K) * BV // 2048, 1), BV=BV, programs_per_sm=4)
    if kernel == "chain":
        narrow = KernelConfig(8, BV=_sizes("walk", K, V, precision, target).BV)
        return narrow if K <= NARROW else KernelConfig(8, BV=32, BJ=16)
    if K > NARROW and kernel in ("walk", "walk_backward"):
        return _wide(kernel, precision, target)
    if target.amd:
        if kernel == "walk" and precision == "ieee":
            return KernelConfig(4, BV=32)
        small = kernel in ("prepare", "scalar_prepare", "prepare_anchored", "gradients")
        return KernelConfig(4 if small else 8, BJ=32 if small else LEAST)
    if from_registers(target):
        return _of_registers(kernel, precision)
    if precision == "tf32x3" and tensor_memory(target):
        return KernelConfig(8, BV=16 if kernel == "walk_backward" else 32, BJ=32 if "gradients" in kernel else LEAST)
    if kernel == "walk" and precision == "bf16":  # 8 warps would repeat the work of 4 on Hopper
        return KernelConfig(8 if tensor_memory(target) and K > LEAST else 4, stages=2)
    if precision == "tf32x3" and K > LEAST:
        return KernelConfig(8, BV=32)
    few = K <= LEAST and precision == "bf16" and kernel in ("walk_backward", "pairs_backward")
    return KernelConfig(4 if few else 8)


def _of_registers(kernel: str, precision: str) -> KernelConfig:
    """Sizes on GPUs of NVIDIA whose tensor cores read registers."""
    if precision != "bf16":
        return KernelConfig(8, BV=16, BJ=16)
    if kernel in ("walk", "walk_backward"):
        return KernelConfig(8, BV=32)
    return KernelConfig(8, BV=32 if kernel in ("scalar_gradients", "pairs_backward") else LEAST, BJ=32)


def _wide(kernel: str, precision: str, target: Target) -> KernelConfig:
    """Sizes of a walk with a state of more than ``NARROW`` key channels.

    sm_100: larger accumulators do not fit its 512 columns of tensor memory. sm_80: without a limit of registers ptxas takes 32 for operands
    of 32 bits and spills 9 KB; with a limit of 255 it spills up to 0.7. sm_90: backward, two streams with blocks of 64 need 256 KB of
    shared memory for float32.
    """
    registers = from_registers(target)
    if precision == "bf16":
        return KernelConfig(8, BV=16 if registers and kernel == "walk" else 32 if registers or tensor_memory(target) else LEAST)
    if target.nvidia and registers:
        return KernelConfig(8, BV=16, registers=255)
    if tensor_memory(target):
        return KernelConfig(8, BV=32 if precision == "tf32" else 16)
    return KernelConfig(8, BV=16 if registers else 32 if kernel == "walk_backward" and precision == "tf32x3" else LEAST)
