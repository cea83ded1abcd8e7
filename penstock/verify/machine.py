"""Description of this machine: processor, instruction set, GPUs and versions."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import __version__
from ..call.dispatch import Available
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
    """Number of cores that other processes use."""
    gpus: tuple[str, ...]
    system: str
    python: str
    torch: str
    penstock: str
    triton: str | None
    fla: str | None = None

    @classmethod
    def here(cls) -> Machine:
        """Describe the current machine."""
        return cls(
            processor=_processor(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            instructions=torch.backends.cpu.get_cpu_capability(),
            load=_load(),
            gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count())),
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            torch=torch.__version__,
            penstock=__version__,
            triton=_installed("triton"),
            fla=_installed("fla-core") or _installed("flash-linear-attention"),
        )

    def device_name(self, device: str) -> str:
        """Name of the processor or the GPU."""
        return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else self.processor

    @property
    def busy(self) -> str | None:
        """A warning if other processes use the machine, or None."""
        if self.load < 0.2 * (os.cpu_count() or 1):
            return None
        return f"Other processes use {self.load:.1f} of {os.cpu_count()} cores: times will be too long and will vary."

    def lines(self) -> list[tuple[str, str]]:
        """Names and values for a table."""
        return [
            ("processor", f"{self.processor}, {self.cores} cores, {self.threads} threads in use, {self.instructions}"),
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
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _load() -> float:
    """Busy cores during 0.2 s, from /proc/stat; without that file, the load average of the last minute."""
    statistics = Path("/proc/stat")
    if not statistics.exists():
        return os.getloadavg()[0]
    totals = []
    for _ in range(2):
        user, nice, system, idle, waiting, *rest = map(int, statistics.read_text().partition("\n")[0].split()[1:9])
        totals.append((user + nice + system + sum(rest), idle + waiting))
        time.sleep(0.2 if len(totals) == 1 else 0)
    busy, free = totals[1][0] - totals[0][0], totals[1][1] - totals[0][1]
    return busy / max(busy + free, 1) * float(os.cpu_count() or 1)


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"


def _installed(package: str) -> str | None:
    """The version of a package from its metadata, without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
