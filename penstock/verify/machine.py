"""Description of this machine: processor, instruction set, GPUs and versions."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import __version__
from ..call.dispatch import Available
from ..cores import affinity, load, quota
from ..explain import implementations


@dataclass(frozen=True)
class Machine:
    """The description of a machine in records and bug reports."""

    processor: str
    cores: int
    """Cores this process may run on."""
    threads: int
    """Threads of torch and of this library."""
    instructions: str
    """The instruction set that torch uses."""
    load: float
    """The number of these cores that other processes use."""
    gpus: tuple[str, ...]
    system: str
    python: str
    torch: str
    penstock: str
    triton: str | None
    fla: str | None = None
    quota: float | None = None
    """Cores whose time a container allows; None without a limit."""

    @classmethod
    def here(cls) -> Machine:
        """Describe the current machine."""
        return cls(
            processor=_processor(),
            cores=len(affinity()),
            threads=torch.get_num_threads(),
            instructions=torch.backends.cpu.get_cpu_capability(),
            load=load(),
            gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count())),
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            torch=torch.__version__,
            penstock=__version__,
            triton=installed("triton"),
            fla=installed("fla-core") or installed("flash-linear-attention"),
            quota=quota(),
        )

    def device_name(self, device: str) -> str:
        """Name of the processor or the GPU."""
        return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else self.processor

    @property
    def busy(self) -> str | None:
        """A warning if other processes use the cores, or None."""
        if self.load < 0.2 * self.cores:
            return None
        text = f"Other processes use {self.load:.1f} of {self.cores} cores: times will be too long and will vary."
        free = max(1, round(self.cores - self.load))
        return text + f" Fewer threads (--threads {free}) may be faster." * (free < self.threads)

    def lines(self) -> list[tuple[str, str]]:
        """Names and values for a table."""
        cores, threads = (f"{count} {name}{'s' * (count != 1)}" for count, name in ((self.cores, "core"), (self.threads, "thread")))
        limit = "" if self.quota is None else f" of which a quota allows {self.quota:g}"
        return [
            ("processor", f"{self.processor}, {cores}{limit}, {threads} in use, {self.instructions}"),
            ("GPUs", "; ".join(self.gpus) or "none that torch can use"),
            ("software", f"penstock {self.penstock}, torch {self.torch}, triton {self.triton or 'not installed'}, Python {self.python}"),
            *((f"impl {one.name}", _state(one)) for one in implementations()),
        ]


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Set the number of CPU threads of torch and of this library within a block; None keeps it."""
    before = torch.get_num_threads()
    if threads not in (None, before):
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _state(one: Available) -> str:
    return one.summary if one.reason is None else f"not available: {one.reason}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"


def installed(package: str) -> str | None:
    """The version of a package from its metadata, without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
