"""The calls whose kernels are compiled ahead of time: every kind of launch of the models on every supported GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...gpu.plan import Planned
from ...gpu.target import Target
from ...gpu.targets import SMALL
from ..operators import ATTENTION
from . import plan


@dataclass(frozen=True)
class Configuration:
    """A call of softmax attention."""

    H: int
    G: int
    D: int
    dtype: str = "bfloat16"
    window: int | None = None
    packed: bool = False

    @property
    def name(self) -> str:
        """The name in tables and in the record."""
        more = f" window={self.window}" * (self.window is not None) + " packed" * self.packed
        return f"softmax_attention 1,4096,{self.H},{self.G},{self.D} {self.dtype}{more}"

    def planned(self, target: Target) -> Iterator[tuple[str, Planned]]:
        """Yield each pass and its plan on a GPU."""
        dtype = getattr(torch, self.dtype)
        q, k = (torch.empty(1, 4096, heads, self.D, dtype=dtype, device="meta") for heads in (self.H, self.G))
        lse, ends = torch.empty(q.shape[:3], device="meta"), torch.empty(5, dtype=torch.int64, device="meta") if self.packed else None
        call = ATTENTION.checked("softmax_attention", (q, k, k, ends, ends), (True, None, self.window, False))
        tensors = {"q": q, "k": k, "v": k, "cu_seqlens": q if ends is None else ends, "cu_seqlens_k": q if ends is None else ends}
        more = {"output": q, "d_output": q, "lse": lse, "d_lse": q}
        yield "forward", Planned(plan.forward_plan(call, target).at(call.sizes), tensors)
        yield "backward", Planned(plan.backward_plan(call, q, None, target).at(call.sizes), tensors | more)


CONFIGURATIONS = (
    Configuration(16, 16, 128),
    Configuration(32, 8, 64, packed=True),
    Configuration(32, 8, 128, "float16", window=1024),
    Configuration(8, 4, 256),
    Configuration(16, 16, 64, "float32"),
    Configuration(8, 8, 128, "float32"),
    Configuration(6, 6, 100),
)
IN_PART = (CONFIGURATIONS[0], CONFIGURATIONS[3], CONFIGURATIONS[5])
"""Those for ``SMALL`` GPUs."""


def configurations(arch: str) -> tuple[Configuration, ...]:
    """The calls that are compiled for an architecture."""
    return IN_PART if arch in SMALL else CONFIGURATIONS
