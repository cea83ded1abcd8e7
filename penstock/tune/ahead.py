"""Ahead-of-time compilation for GPUs that may be absent, and the registers, spills and shared memory of the machine code.

Triton's JIT specialises a launch (types, numbers that are 1 or divisible by 16, pointer ranges) as in a call on the GPU. It gets a driver
that only knows its target, and tensors without memory. The result is the code that runs on the GPU, and a later call on the GPU finds
it in Triton's cache.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import Complaints, RangeError, installing
from ..gpu.target import interpreting
from .workers import Failure, side_by_side

if TYPE_CHECKING:
    from ..gpu.hopper import Tile
    from ..gpu.launch import Noted
    from ..gpu.plan import Planned  # imports Triton, which check_compiler reports if it is missing


TENSOR_MEMORY = 512
"""Columns of tensor memory of a program on sm_100. With more, Triton's machine code is a trap."""


class Memory(NamedTuple):
    """A tensor argument of the JIT."""

    dtype: torch.dtype
    elements: int
    tile: Tile | None = None
    """The tile of a TMA copy, or None."""

    def tensor(self) -> Any:
        """The tensor, without memory."""
        if self.tile is not None:
            from ..gpu.hopper import described, description

            x = torch.empty(1, self.tile.rows, 1, self.tile.columns, dtype=self.dtype, device="meta")
            return described(x, description(x, self.tile))
        return torch.empty(self.elements, dtype=self.dtype, device="meta")


class Job(NamedTuple):
    """One launch to compile. It is plain data, which can be sent to another process."""

    arch: str
    kernel: str
    """Module and name of the kernel."""
    arguments: tuple[Memory | int | float | str, ...]
    options: tuple[tuple[str, int], ...]
    """Options of Triton's compiler."""


class Resources(NamedTuple):
    """Registers, spills and shared memory of a program."""

    registers: int
    """Registers per thread."""
    spill: int
    """Spilled bytes per thread."""
    shared: int
    """Bytes of shared memory."""


def check_compiler(function: str) -> None:
    """Raise RangeError unless this process has Triton's compiler."""
    complaints = Complaints(function)
    if interpreting():
        complaints.add(RangeError, "TRITON_INTERPRET", "unset, because interpreted kernels are not compiled", "1", "Unset it.")
    complaints.raise_any()
    try:
        import_module("triton")
    except ImportError:
        complaints.add(RangeError, "triton", "installed", "nothing", f"Run {installing('triton')}.")
    complaints.raise_any()


def jobs(made: Planned, arch: str) -> list[Job]:
    """The launches of a plan."""
    plan, tensors = made
    given = {name: Memory(x.dtype, x.untyped_storage().size() // x.element_size()) for name, x in tensors.items()}
    given |= {name: Memory(dtype, torch.Size(shape).numel()) for name, (shape, dtype) in plan.memory.items()}
    constants = {name: function(*rest, torch.device("cpu")) for name, (function, *rest) in plan.constants.items()}
    given |= {name: Memory(x.dtype, x.numel()) for name, x in constants.items()}
    found = []
    for one in plan.launches:
        memory = [given[name]._replace(tile=tile) for name, tile in zip_longest(one.tensors, one.tiles)]
        found.append(Job(arch, kernel_name(one.kernel), (*memory, *one.typed, *one.constants), one.options))
    return found


def noted_job(arch: str, one: Noted) -> Job:
    """A launch that did not run."""
    names, given = one.kernel.arg_names, list(map(_typed, one.arguments))
    given += [one.options[name] for name in names[len(given) :]]
    options = tuple((name, value) for name, value in one.options.items() if name not in names)
    return Job(arch, kernel_name(one.kernel), tuple(given), options)


def _typed(x: Any) -> Memory | int | float | str:
    """An argument of a launch, without the memory of a tensor."""
    if isinstance(x, Tensor):
        return Memory(x.dtype, x.untyped_storage().size() // x.element_size())
    if isinstance(x, int | float | str):
        return x
    from ..gpu.hopper import Tile

    return Memory(x.base.dtype, x.base.numel(), Tile(*x.block_shape))


def kernel_name(kernel: Any) -> str:
    """Module and name of a kernel."""
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def distinct(many: Iterable[Job]) -> dict[Job, Job]:
    """Map each job to the first job that compiles to the same code."""
    from triton import knobs

    firsts: dict[tuple[str, str, str], Job] = {}
    found: dict[Job, Job] = {}
    seen: list[str] = []

    def note(*, key: str, **_: object) -> bool:
        seen.append(key)
        return True  # skips the compilation

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        for job in many:
            if job not in found:
                _compile(job)
                found[job] = firsts.setdefault((job.arch, job.kernel, seen.pop()), job)
    finally:
        knobs.runtime.jit_cache_hook = before
    return found


def compile_all(many: Iterable[Job], seconds: float) -> dict[Job, Resources | Failure]:
    """Compile jobs on all cores, each within ``seconds``. Jobs with the same code are compiled once."""
    firsts = distinct(many)
    todo = list(dict.fromkeys(firsts.values()))
    found = dict(zip(todo, side_by_side(resources, todo, seconds)))
    return {job: found[first] for job, first in firsts.items()}


def resources(job: Job) -> Resources:
    """Compile a job, or find it in Triton's cache, and read its resources."""
    with _stderr_hidden():
        kernel = _compile(job)
    shared, columns = kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", None) or 0
    if columns > TENSOR_MEMORY:
        raise RuntimeError(f"{columns} columns of tensor memory, a program has {TENSOR_MEMORY}")
    if "amdgcn" in kernel.asm:
        found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", kernel.asm["amdgcn"]))
        return Resources(int(found["vgpr_count"]), int(found["private_segment_fixed_size"]), shared)
    registers, stack = _usage(kernel.asm["cubin"])
    return Resources(registers, stack, shared)


@contextmanager
def _stderr_hidden() -> Iterator[None]:
    """Hide the intermediate code that a failing compiler writes to standard error. The failure itself is raised."""
    terminal = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a CUDA kernel. The kernels have no local arrays: their stack holds spills and the frames of calls."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        output = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", output)[0]
    return int(registers), int(stack)


def _compile(job: Job) -> Any:
    """Triton's compiled kernel; None if a hook skips the compilation."""
    module, _, name = job.kernel.rpartition(".")
    kernel = getattr(import_module(module), name)
    arguments = [x.tensor() if isinstance(x, Memory) else x for x in job.arguments]
    with _compiling_for(job.arch):
        return kernel.warmup(*arguments, grid=(1,), **dict(job.options))


@contextmanager
def _compiling_for(arch: str) -> Iterator[None]:
    """Give Triton a driver for a GPU that may be absent."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    target = (
        GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    )

    class TargetOnly(DriverBase):  # type: ignore[misc]
        """A driver that knows its target and cannot launch."""

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

    before = dict(vars(driver))  # names differ between versions; asking for the active driver would look for a GPU
    driver.set_active(TargetOnly())
    try:
        yield
    finally:
        vars(driver).update(before)
