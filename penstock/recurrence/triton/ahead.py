"""The calls whose kernels are compiled ahead of time: every kind of launch of the models on every supported GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...gpu.plan import Planned
from ...gpu.target import Target
from ...gpu.targets import SMALL
from ...tokens.shape import Shape
from ..declaration import Tokens
from ..operators import ADVANCE, RECURRENCE
from .table_file import shipped
from .tuning import IN_PLACE, PASSES, planned, without_memory


@dataclass(frozen=True)
class Configuration:
    """A call of the recurrence."""

    variant: str
    shape: Shape
    dtype: str = "bfloat16"
    passes: tuple[str, ...] = PASSES
    packed: bool = False
    groups: int = 0
    """Heads of q and k, if not H."""

    @property
    def name(self) -> str:
        """The name in tables and in the record."""
        return f"{self.variant} {self.shape.text} {self.dtype}" + " packed" * self.packed + f" G={self.groups}" * (self.groups > 0)

    def planned(self, target: Target) -> Iterator[tuple[str, Planned]]:
        """Yield each pass and its plan on a GPU, with the block sizes of the shipped table."""
        target = target._replace(table={key: entry.config for key, entry in shipped(target.arch).items()})
        for which in self.passes:
            yield which, planned(which, self._problem(which), target)

    def _problem(self, which: str) -> Tokens:
        """The problem of a pass, without memory. Short sequences have 8 tokens."""
        shape = self.shape._replace(T=self.shape.T if which in ("forward", "backward", "pieces") else 1 if which == "step" else 8)
        given = without_memory(self.variant, shape, getattr(torch, self.dtype), self.groups)
        if self.packed and which != "step":
            given["cu_seqlens"] = torch.empty(5, dtype=torch.int64, device="meta")
        if which not in IN_PLACE:
            return RECURRENCE.checked(self.variant, [given.get(name) for name in RECURRENCE.names], (None, False, True))
        given["state"] = torch.empty(4 if "cu_seqlens" in given else shape.B, *shape.state[1:], device="meta")
        return ADVANCE.checked(f"advance({self.variant!r})", [given.get(name) for name in ADVANCE.names], (None,))


PROMPT, LONG, BATCH, DECODE = (1, 1024), (1, 8192), (8, 2048), (256, 1)
"""B and T of a prompt, which is cut into segments; of a longer prompt, whose segments are walked; of training data, which is not cut; and
of decode steps that fill the GPU."""

CONFIGURATIONS: tuple[Configuration, ...] = (
    Configuration("linear_attention", Shape(*PROMPT, 16, 64, 64)),
    Configuration("linear_attention", Shape(*PROMPT, 16, 64, 64), "float16"),
    Configuration("linear_attention", Shape(*BATCH, 32, 64, 64), passes=("forward", "backward")),
    Configuration("retention", Shape(*PROMPT, 8, 256, 512)),
    Configuration("retention", Shape(*PROMPT, 16, 64, 64)),
    Configuration("simple_gla", Shape(*PROMPT, 64, 128, 64)),
    Configuration("simple_gla", Shape(*PROMPT, 32, 64, 64), packed=True),
    Configuration("simple_gla", Shape(*BATCH, 32, 64, 64), passes=("forward", "backward")),
    Configuration("simple_gla", Shape(2, 4096, 80, 128, 64), passes=("forward", "backward")),
    Configuration("gla", Shape(*PROMPT, 4, 256, 512)),
    Configuration("gla", Shape(*PROMPT, 16, 128, 128)),
    Configuration("gla", Shape(*PROMPT, 16, 100, 100)),
    Configuration("gla", Shape(*LONG, 32, 64, 64), passes=("backward",)),
    Configuration("gla", Shape(*BATCH, 32, 64, 64)),
    Configuration("gla", Shape(*BATCH, 16, 128, 128), "float16", passes=("forward", "backward")),
    Configuration("gla", Shape(*PROMPT, 32, 64, 64), "float32"),
    Configuration("rwkv5", Shape(*PROMPT, 32, 64, 64)),
    Configuration("rwkv6", Shape(*PROMPT, 32, 64, 64)),
    Configuration("rwkv6", Shape(*BATCH, 32, 64, 64), "float16", passes=("forward", "backward", "pieces")),
    Configuration("rwkv6", Shape(*PROMPT, 32, 64, 64), "float32"),
    Configuration("retention", Shape(*DECODE, 8, 256, 512), passes=("step",)),
    Configuration("gla", Shape(*DECODE, 16, 128, 128), passes=("step",)),
    Configuration("gla", Shape(*DECODE, 32, 64, 64), passes=("step",)),
    Configuration("rwkv6", Shape(*DECODE, 32, 64, 64), passes=("step",)),
)

HOPPER = (
    Configuration("gla", Shape(*BATCH, 4, 256, 512), "float16", passes=("forward", "backward")),
    Configuration("gla", Shape(*BATCH, 16, 128, 128), "float32", passes=("forward", "backward")),
    Configuration("simple_gla", Shape(2, 4096, 80, 128, 64), passes=("backward",), groups=1),
    Configuration("simple_gla", Shape(2, 4096, 80, 128, 64), passes=("backward",), groups=8),
    Configuration("retention", Shape(*BATCH, 32, 128, 64), passes=("backward",), groups=1),
    Configuration("linear_attention", Shape(*BATCH, 32, 64, 64), passes=("backward",), groups=1),
)
"""Only for sm_90: walks of float16, heads of float32 in blocks, heads that share q and k."""
IN_PART = (
    "retention 1,1024,8,256,512 bfloat16", "gla 1,1024,4,256,512 bfloat16", "gla 1,1024,16,128 bfloat16", "gla 8,2048,32,64 bfloat16",
    "rwkv6 1,1024,32,64 bfloat16", "rwkv6 1,1024,32,64 float32",
)  # fmt: skip
"""The names of those for ``SMALL`` GPUs."""


def configurations(arch: str) -> tuple[Configuration, ...]:
    """The calls that are compiled for an architecture."""
    if arch in SMALL:
        return tuple(one for one in CONFIGURATIONS if one.name in IN_PART)
    return CONFIGURATIONS + HOPPER * (arch == "sm_90")
