"""Configurations that are compiled ahead of time: every kind of launch of the models on every supported GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..gpu.plan import Launch
from ..gpu.target import Target
from ..recurrence.triton.table_file import shipped
from ..softmax.operators import ATTENTION
from ..softmax.triton import plan as softmax
from ..verify.inputs import Shape
from .ahead import Job, jobs
from .passes import PASSES, Pass, planned, without_memory

TARGETS = {
    "sm_80": Target("sm_80", 108, 163 << 10),  # A100
    "sm_86": Target("sm_86", 82, 99 << 10),  # RTX 3090, A10
    "sm_89": Target("sm_89", 128, 99 << 10),  # RTX 4090, L4, L40S
    "sm_90": Target("sm_90", 132, 227 << 10),  # H100, H200
    "sm_100": Target("sm_100", 148, 227 << 10),  # B200
    "sm_120": Target("sm_120", 170, 99 << 10),  # RTX 5090
    "gfx942": Target("gfx942", 304, 64 << 10),  # MI300X
}
"""Multiprocessors and shared memory per program, by architecture. Of GPUs with several models, those of the first."""


@dataclass(frozen=True)
class Configuration:
    """A call of the recurrence."""

    variant: str
    shape: Shape
    dtype: str = "bfloat16"
    passes: tuple[Pass, ...] = PASSES
    packed: bool = False
    groups: int = 0
    """Heads of q and k, if not H."""

    @property
    def name(self) -> str:
        """The name in tables and in the record."""
        return f"{self.variant} {self.shape.text} {self.dtype}" + " packed" * self.packed + f" G={self.groups}" * (self.groups > 0)

    def launches(self, arch: str) -> Iterator[tuple[str, Job]]:
        """Yield each launch with its name."""
        target = TARGETS[arch]._replace(table={key: entry.config for key, entry in shipped(arch).items()})
        for which in self.passes:
            shape = self.shape._replace(T=self.shape.T if which in ("forward", "backward", "pieces") else 1 if which == "step" else 8)
            ends = torch.empty(5, dtype=torch.int64, device="meta") if self.packed and which != "step" else None
            made = planned(which, without_memory(self.variant, shape, getattr(torch, self.dtype), self.groups), target, ends)
            times: Counter[str] = Counter()
            for launch, job in zip(made.plan.launches, jobs(made.plan, made.tensors, arch)):
                name = f"{self.name}: {which}: {_kernel(launch)}"
                times[name] += 1
                yield name + f" {times[name]}" * (times[name] > 1), job


@dataclass(frozen=True)
class Softmax:
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

    def launches(self, arch: str) -> Iterator[tuple[str, Job]]:
        """Yield each launch with its name."""
        dtype, target = getattr(torch, self.dtype), TARGETS[arch]
        q, k = (torch.empty(1, 4096, heads, self.D, dtype=dtype, device="meta") for heads in (self.H, self.G))
        lse, ends = torch.empty(q.shape[:3], device="meta"), torch.empty(5, dtype=torch.int64, device="meta") if self.packed else None
        call = ATTENTION.checked("softmax_attention", (q, k, k, ends, ends), (True, None, self.window, False))
        tensors = {"q": q, "k": k, "v": k, "cu_seqlens": q if ends is None else ends, "cu_seqlens_k": q if ends is None else ends}
        more = {"output": q, "d_output": q, "lse": lse, "d_lse": q}
        for which, made in (("forward", softmax.forward_plan(call, target)), ("backward", softmax.backward_plan(call, q, None, target))):
            given = tensors | (more if which == "backward" else {})
            bound = made.at(call.sizes)
            for launch, job in zip(bound.launches, jobs(bound, given, arch)):
                yield f"{self.name}: {which}: {_kernel(launch)}", job


def _kernel(launch: Launch) -> str:
    """Name of the kernel, with the flags that distinguish several launches of a pass."""
    first = len(launch.tensors) + len(launch.numbers)
    constants = dict(zip(launch.kernel.arg_names[first:], launch.constants))
    name: str = launch.kernel.fn.__name__
    return name + " adjoint" * bool(constants.get("ADJOINT")) + " levels" * (constants.get("PART") == 2)


PROMPT, LONG, BATCH, DECODE = (1, 1024), (1, 8192), (8, 2048), (256, 1)
"""B and T of a prompt, which is cut into segments; of a longer prompt, whose segments are walked; of training data, which is not cut; and
of decode steps that fill the GPU."""

CONFIGURATIONS: tuple[Configuration | Softmax, ...] = (
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
    Softmax(16, 16, 128),
    Softmax(32, 8, 64, packed=True),
    Softmax(32, 8, 128, "float16", window=1024),
    Softmax(8, 4, 256),
    Softmax(16, 16, 64, "float32"),
    Softmax(8, 8, 128, "float32"),
    Softmax(6, 6, 100),
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

SMALL = ("sm_86", "sm_89", "sm_120")
"""GPUs with 99 KiB of shared memory. They have the products of sm_80, and block sizes by rule, limited by the same memory. So a part of the
configurations covers all their code."""
IN_PART = (
    "retention 1,1024,8,256,512 bfloat16", "gla 1,1024,4,256,512 bfloat16", "gla 1,1024,16,128 bfloat16", "gla 8,2048,32,64 bfloat16",
    "rwkv6 1,1024,32,64 bfloat16", "rwkv6 1,1024,32,64 float32", "softmax_attention 1,4096,16,16,128 bfloat16",
    "softmax_attention 1,4096,8,4,256 bfloat16", "softmax_attention 1,4096,8,8,128 float32",
)  # fmt: skip
"""Their names."""


def configurations(arch: str) -> tuple[Configuration | Softmax, ...]:
    """The configurations that are compiled for an architecture."""
    if arch in SMALL:
        return tuple(one for one in CONFIGURATIONS if one.name in IN_PART)
    return CONFIGURATIONS + HOPPER * (arch == "sm_90")
