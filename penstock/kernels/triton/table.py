"""Block sizes per kernel and head size, from measurements on one NVIDIA H200 (benchmarks/NOTES.md, "Triton")."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Target(NamedTuple):
    """The GPU that launches are planned for."""

    arch: str
    """"sm_90", "gfx942", ...; "interpreter"."""
    multiprocessors: int
    shared_memory: int
    """Bytes that one program may take."""

    @property
    def interpreted(self) -> bool:
        """Whether this is Triton's interpreter."""
        return self.arch == "interpreter"

    @classmethod
    @cache
    def of(cls, device: torch.device) -> Target:
        """The GPU of this device. The interpreter gets a few multiprocessors, so that segments are walked there too."""
        if device.type != "cuda":
            return cls("interpreter", 4, 1 << 20)
        gpu = torch.cuda.get_device_properties(device)
        arch = gpu.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"
        return cls(arch, gpu.multi_processor_count, getattr(gpu, "shared_memory_per_block_optin", 1 << 16))


class Blocks(NamedTuple):
    """Sizes of a launch."""

    warps: int
    BV: int = 64
    """Value channels of a program."""
    BK: int = 64
    """Key channels it takes at a time; kernels that hold a state take all."""
    C: int = 0
    """Tokens in a chunk."""
    stages: int = 1
    """Of the software pipeline."""
    fill: int = 0
    """Programs per multiprocessor to aim at, where a sequence can be cut into segments."""


def blocks(kernel: str, target: Target, K: int, V: int, precision: str, decay: int, previous: bool) -> Blocks:
    """Sizes for "forward", "backward", "states" or "recurrent"."""
    wide = precision != "bf16"  # products of float32 operands
    if kernel == "recurrent":
        if target.interpreted:
            return Blocks(1, BV=64)  # the interpreter's time goes by programs
        return Blocks(1, BV=16) if K <= 128 else Blocks(4, BV=8)
    if kernel == "states":  # bf16 (8,2048,32,64), both directions: 0.190 ms; 4 warps 0.282; BK 64 and 4 warps 0.199
        return Blocks(2, BK=32, stages=1 if wide else 3, fill=4)
    if kernel == "backward":  # bf16 (8,2048,32,64): 0.585 ms; 8 warps 1.11; C 32 0.746
        return Blocks(4, C=32 if wide or K > 128 else 64)
    if wide:
        return Blocks(4, C=32, fill=2) if K <= 64 else Blocks(8, C=16, fill=2)
    if K <= 64:  # gla, bf16 (8,2048,32,64): C 64 0.146 ms, C 32 0.173; linear attention: C 64 0.124, C 32 0.080
        return Blocks(4, C=64 if decay else 32, stages=3, fill=3)
    return Blocks(4 if K <= 128 else 8, C=32, stages=3, fill=1)  # bf16 (4,2048,16,128): 0.232 ms; C 64 0.289
