"""The cores of this process: those that it may run on, how much of them its control groups allow, and how busy others keep them."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path, PurePosixPath

import torch

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""With one of them in the environment, torch has the number of threads that its user chose."""
SYSTEM = Path("/")


def affinity() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quota(system: Path = SYSTEM) -> float | None:
    """The number of cores whose time this process may use, as a container's limit; None without a limit.

    Reads control groups of version 1 and 2. The group of the process and each group above it may have a limit; the lowest one holds.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    limits = []
    for _, controllers, group in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = ("cpu", controllers) if controllers else ("", "unified")
        # in a container the name may be that on the host, which is not below the container's own mount
        groups = [PurePosixPath(), *map(PurePosixPath, _ancestors(group))]
        limits += [_limit(system / "sys/fs/cgroup" / mount / one) for mount in mounts for one in groups]
    found = [limit for limit in limits if limit is not None]
    return min(found, default=None)


def _ancestors(group: str) -> list[str]:
    parts = [part for part in group.split("/") if part]
    return [] if ".." in parts else ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _limit(folder: Path) -> float | None:
    """The limit of one group, in cores."""
    try:
        if (folder / "cpu.max").is_file():
            allowed, period = (folder / "cpu.max").read_text("utf-8").split()
        else:
            allowed, period = ((folder / f"cpu.cfs_{name}_us").read_text("utf-8").strip() for name in ("quota", "period"))
        return int(allowed) / int(period) if allowed not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def default_threads(system: Path = SYSTEM) -> int:
    """Threads of the commands: torch's number, which follows from the cores and the environment, within the quota of a container."""
    threads, limit = torch.get_num_threads(), quota(system)
    if limit is None or any(name in os.environ for name in THREAD_VARIABLES):
        return threads
    return max(1, min(threads, math.ceil(limit)))


def load(system: Path = SYSTEM) -> float:
    """How many of the cores of this process are busy during 0.2 s; where that is not known, the load average of the last minute."""
    before = _times(system)
    if before is None:
        return os.getloadavg()[0]
    time.sleep(0.2)
    after = _times(system) or before
    busy, free = after[0] - before[0], after[1] - before[1]
    return busy / max(busy + free, 1) * len(affinity())


def _times(system: Path) -> tuple[int, int] | None:
    """Busy and idle time of the cores of this process since the machine started, in ticks."""
    try:
        lines = (system / "proc/stat").read_text("utf-8").splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in affinity()}
    rows = [[int(one) for one in line.split()[1:9]] for line in lines if line.partition(" ")[0] in names]
    if not rows:
        return None
    user, nice, system_time, idle, waiting, *rest = (sum(column) for column in zip(*rows))
    return user + nice + system_time + sum(rest), idle + waiting
