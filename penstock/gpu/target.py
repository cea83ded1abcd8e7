"""The GPU that launches are planned for, or Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..call.versions import version
from ..errors import installing


@cache
def interpreting() -> bool:
    """Whether this process runs Triton's kernels under the interpreter: on CPU tensors, without rounding to bfloat16."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


@cache
def unavailable() -> str | None:
    """Why Triton kernels cannot run on this machine, or None."""
    if find_spec("triton") is None:
        return f"Triton is not installed: {installing('triton')}"
    if interpreting() or torch.cuda.is_available() or _stand_in is not None:
        return None
    return "torch sees no GPU here (for Triton's interpreter set TRITON_INTERPRET=1 before Python starts)"


def refuses(x: torch.Tensor) -> str | None:
    """Why Triton kernels cannot take tensors like this one, or None."""
    if x.device.type != "cuda" and not (x.device.type == "cpu" and interpreting()):
        return f"its tensors are on {x.device}, it works on a GPU"
    if x.dtype == torch.float64:
        return "it computes in float32, and the inputs are float64"
    if interpreting() and x.dtype == torch.bfloat16:
        return "Triton's interpreter truncates to bfloat16 where it should round"
    return None


class Target(NamedTuple):
    """A GPU."""

    arch: str
    """"sm_90", "gfx942", ...; "interpreter"."""
    multiprocessors: int
    shared_memory: int
    """Bytes available to one program."""
    table: Mapping[Any, Any] = MappingProxyType({})
    """Measured configurations of a family's kernels."""
    forms: frozenset[str] = frozenset()
    """Names of forms that run wherever they can, though others are faster (``launch.trying``)."""

    @property
    def interpreted(self) -> bool:
        """Whether this is Triton's interpreter."""
        return self.arch == "interpreter"

    @property
    def nvidia(self) -> bool:
        """Whether this is a GPU of NVIDIA."""
        return self.arch.startswith("sm_")

    @property
    def amd(self) -> bool:
        """Whether this is a GPU of AMD."""
        return self.arch.startswith("gfx")

    @classmethod
    @cache
    def of(cls, device: torch.device) -> Target:
        """The GPU of this device. The interpreter gets a few multiprocessors, so that tests cover segments."""
        if device.type != "cuda":
            return _stand_in or cls("interpreter", 4, 1 << 20)
        gpu = torch.cuda.get_device_properties(device)
        arch = gpu.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"
        return cls(arch, gpu.multi_processor_count, getattr(gpu, "shared_memory_per_block_optin", 1 << 16))


_stand_in: Target | None = None


@contextmanager
def standing_in(target: Target) -> Iterator[None]:
    """Inside this block, in the whole process, tensors on a CPU stand for those of a GPU that may be absent. Nothing may be launched."""
    before = _stand_in
    try:
        _become(target)
        yield
    finally:
        _become(before)


def _become(target: Target | None) -> None:
    global _stand_in
    _stand_in = target
    Target.of.cache_clear()
    unavailable.cache_clear()


def uncompiled(x: torch.Tensor) -> str | None:
    """Why Triton does not compile kernels with several products for the GPU of x, or None. Those of one product compile."""
    if x.device.type != "cuda" or not Target.of(x.device).arch.startswith("sm_10") or version("triton") >= (3, 5):
        return None
    return "Triton 3.4 does not compile it for this GPU (sm_100): install Triton 3.5 or newer"


def power(x: int, least: int = 16) -> int:
    """The smallest power of two that is at least x and ``least``."""
    return max(least, 1 << max(x - 1, 0).bit_length())


def from_registers(target: Target) -> bool:
    """Whether all operands of products come from registers. On sm_90 and sm_100 many come from shared memory."""
    return target.arch.startswith(("sm_8", "sm_12", "gfx"))


def tensor_memory(target: Target) -> bool:
    """Whether sums and operands of products are in a memory of their own, of which a program has 512 columns of 32 bits."""
    return target.arch.startswith("sm_10")


def precision(dtype: torch.dtype, target: Target) -> str:
    """The precision of a kernel's products.

    float32 follows ``torch.get_float32_matmul_precision()``: three TF32 products, as exact as float32, or one where that setting allows it.
    bfloat16 operands are multiplied as bfloat16. float16 operands are multiplied as TF32, which has as many significant bits and a wider
    exponent; kernels that bound or scale float16 operands multiply them as float16.
    """
    if not target.nvidia:
        return "bf16" if dtype == torch.bfloat16 and not target.interpreted else "ieee"
    if dtype == torch.bfloat16:
        return "bf16"
    return "tf32" if dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest" else "tf32x3"
