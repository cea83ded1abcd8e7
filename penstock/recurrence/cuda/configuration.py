"""The CUDA sources with the compile-time parameters of a call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

HERE = Path(__file__).parent
TYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double"}
INDICES = {torch.int32: "int", torch.int64: "long long"}


@dataclass(frozen=True)
class Configuration:
    """A kernel and its compile-time parameters. The dtype of a missing tensor has no effect."""

    direction: Literal["forward", "backward"]
    head: int
    """K = V."""
    tokens: torch.dtype
    """The dtype of q, k, v, output and their gradients."""
    gate: torch.dtype
    bonus: torch.dtype = torch.float32
    initial_state: torch.dtype = torch.float32
    final_state: torch.dtype = torch.float32
    """The dtype of states: float32, or the dtype of the pool that a decode step updates."""
    indices: torch.dtype = torch.int64
    """The dtype of cu_seqlens or slots."""
    static: bool = False
    """Whether all tokens have the same decay."""

    @property
    def kernel(self) -> str:
        """The function's name, as a profile shows it."""
        return {"forward": "penstock_wkv_fwd", "backward": "penstock_wkv_bwd"}[self.direction]

    @property
    def source(self) -> str:
        """The source as one text, so that NVRTC need not find headers."""
        return "\n".join((HERE / name).read_text("utf-8") for name in ("gpu.cuh", "tokens.cuh", "decays.cuh", f"{self.direction}.cu"))

    @property
    def macros(self) -> dict[str, str]:
        """Macros that the source expects."""
        return {
            "HEAD": str(self.head),
            "X": TYPES[self.tokens],
            "G": TYPES[self.gate],
            "U": TYPES[self.bonus],
            "S0": TYPES[self.initial_state],
            "F": TYPES[self.final_state],
            "I": INDICES[self.indices],
            "STATIC": str(self.static).lower(),
        }

    @property
    def threads(self) -> int:
        """Threads per block; tokens.cuh describes what each thread computes."""
        return 2 * self.head
