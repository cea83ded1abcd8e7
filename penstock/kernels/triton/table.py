"""Block sizes per kernel and head size, from measurements on one NVIDIA H200 (benchmarks/NOTES.md, "Triton")."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def config(kernel: str, x: Tensor, K: int, V: int, decay: int = 2) -> dict[str, Any]:
    """Sizes of a launch: C tokens in a chunk, blocks BK and BV, warps, pipeline stages, programs per multiprocessor to aim at."""
    wide = x.dtype != torch.bfloat16  # products of float32 operands
    if kernel == "recurrent":
        if not x.is_cuda:
            return {"BV": 64, "warps": 1}  # the interpreter's time goes by programs
        return {"BV": 16, "warps": 1} if K <= 128 else {"BV": 8, "warps": 4}
    if kernel == "states":  # bf16 (8,2048,32,64), both directions: 0.190 ms; 4 warps 0.282; BK 64 and 4 warps 0.199
        return {"BK": 32, "BV": 64, "warps": 2, "stages": 1 if wide else 3, "fill": 4}
    if kernel == "backward":  # bf16 (8,2048,32,64): 0.585 ms; 8 warps 1.11; C 32 0.746
        return {"C": 32 if wide or K > 128 else 64, "BK": 64, "BV": 64, "warps": 4}
    if wide:
        return {"C": 32 if K <= 64 else 16, "BV": 64, "warps": 4 if K <= 64 else 8, "stages": 1, "fill": 2}
    if K <= 64:  # gla, bf16 (8,2048,32,64): C 64 0.146 ms, C 32 0.173; linear attention: C 64 0.124, C 32 0.080
        return {"C": 64 if decay else 32, "BV": 64, "warps": 4, "stages": 3, "fill": 3}
    return {"C": 32, "BV": 64, "warps": 4 if K <= 128 else 8, "stages": 3, "fill": 1}  # bf16 (4,2048,16,128): 0.232 ms; C 64 0.289
