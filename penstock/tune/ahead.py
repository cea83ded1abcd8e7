"""Compiles launches for a GPU that need not be there, and reads from the machine code what they take.

What a call compiles to (types, which numbers are 1 or divisible by 16, ranges of pointers) Triton's own JIT decides, as in a call
on the GPU: it meets a driver that knows its target and nothing else, and tensors without memory. So what is compiled here is
what runs there, and it is in Triton's cache when a call on the GPU looks for it.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import Complaints, RangeError
from ..gpu.target import interpreting

if TYPE_CHECKING:
    from ..gpu.hopper import Tile
    from ..gpu.plan import Plan  # which imports Triton: this module also says that it is not installed


class Memory(NamedTuple):
    """A tensor as the JIT sees it."""

    dtype: torch.dtype
    elements: int
    tile: Tile | None = None
    """What the hardware copies of it at a time, if it does."""

    def made(self) -> Any:
        """Make it, without memory."""
        if self.tile is not None:
            from ..gpu.hopper import described, description

            x = torch.empty(1, self.tile.rows, 1, self.tile.columns, dtype=self.dtype, device="meta")
            return described(x, description(x, self.tile))
        return torch.empty(self.elements, dtype=self.dtype, device="meta")


class Job(NamedTuple):
    """One launch to compile: plain data, for another process."""

    arch: str
    kernel: str
    """Module and name."""
    arguments: tuple[Memory | int | float | str, ...]
    options: tuple[tuple[str, int], ...]
    """For Triton's compiler."""


class Resources(NamedTuple):
    """What a program takes of its multiprocessor."""

    registers: int
    """For each thread."""
    spill: int
    """Bytes for each thread that found no register and lie in memory."""
    shared: int
    """Bytes of shared memory."""


def check_compiler(function: str) -> None:
    """Raise unless this process has Triton's compiler."""
    complaints = Complaints(function)
    if interpreting():
        complaints.add(RangeError, "TRITON_INTERPRET", "unset: its kernels are interpreted here, not compiled", "1", "Unset it.")
    complaints.raise_any()
    try:
        import_module("triton")
    except ImportError:
        complaints.add(RangeError, "triton", "installed", "nothing", "Run pip install 'penstock[triton]'.")
    complaints.raise_any()


def jobs(plan: Plan, tensors: Mapping[str, Tensor], arch: str) -> list[Job]:
    """The launches of a plan, for tensors by name."""
    given = {name: Memory(x.dtype, x.untyped_storage().size() // x.element_size()) for name, x in tensors.items()}
    given |= {name: Memory(dtype, torch.Size(shape).numel()) for name, (shape, dtype) in plan.memory.items()}
    given["ones"] = Memory(torch.bfloat16, plan.ones * (plan.ones + 1))
    found = []
    for one in plan.launches:
        memory = [given[name]._replace(tile=tile) for name, tile in zip_longest(one.tensors, one.tiles)]
        found.append(Job(arch, kernel_name(one.kernel), (*memory, *one.numbers, *one.constants), one.options))
    return found


def kernel_name(kernel: Any) -> str:
    """Its module and name."""
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def distinct(many: Iterable[Job]) -> dict[Job, Job]:
    """For each job the first of those that compile to the same code."""
    from triton import knobs

    firsts: dict[tuple[str, str, str], Job] = {}
    found: dict[Job, Job] = {}
    seen: list[str] = []

    def note(*, key: str, **_: object) -> bool:
        seen.append(key)
        return True  # it need not be compiled

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        for job in many:
            if job not in found:
                _compile(job)
                found[job] = firsts.setdefault((job.arch, job.kernel, seen.pop()), job)
    finally:
        knobs.runtime.jit_cache_hook = before
    return found


def resources(job: Job) -> Resources:
    """Compile a job, or find it in Triton's cache, and read what it takes."""
    with _quiet():
        kernel = _compile(job)
    shared = kernel.metadata.shared
    if "amdgcn" in kernel.asm:
        found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", kernel.asm["amdgcn"]))
        return Resources(int(found["vgpr_count"]), int(found["private_segment_fixed_size"]), shared)
    registers, stack = _usage(kernel.asm["cubin"])
    return Resources(registers, stack, shared)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the compiler writes where it gives up: pages of its inner language. That it did, it raises."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack of a CUDA kernel. Ours have no arrays of their own and call nothing: their stack holds what was spilled."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        told = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", told)[0]
    return int(registers), int(stack)


def _compile(job: Job) -> Any:
    """Triton's compiled kernel; None if a hook said that it need not be compiled."""
    module, _, name = job.kernel.rpartition(".")
    kernel = getattr(import_module(module), name)
    arguments = [x.made() if isinstance(x, Memory) else x for x in job.arguments]
    with _compiling_for(job.arch):
        return kernel.warmup(*arguments, grid=(1,), **dict(job.options))


@contextmanager
def _compiling_for(arch: str) -> Iterator[None]:
    """Give Triton a driver of an absent GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    target = (
        GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    )

    class Absent(DriverBase):  # type: ignore[misc]
        """Knows its target; there is nothing to launch on."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

        def get_active_torch_device(self) -> torch.device:
            return torch.device("meta")

        def get_current_target(self) -> Any:
            return target

        def get_current_device(self) -> str:
            return arch

        def get_current_stream(self, device: object) -> int:
            return 0

    before = driver._active
    driver.set_active(Absent())
    try:
        yield
    finally:
        driver._active = before
