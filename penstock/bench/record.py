"""A run of measurements as JSON: the numbers, the command, the machine and the date."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from typing import Any

from ..errors import Complaints, RangeError
from ..tokens.shape import Shape
from ..verify.machine import Machine
from . import delta_peers
from .candidates import MODES
from .exact import Deviation
from .measure import GpuTiming, Measurement, Timing, Untimed
from .trace import Profile

FLA = {"fla", "fla_recurrent", "fla_bounded"}
"""Candidates of flash-linear-attention."""


@dataclass(frozen=True)
class Record:
    """One run."""

    command: str
    device: str
    """Name of the processor or GPU that was measured."""
    measurements: tuple[Measurement, ...]
    machine: Machine
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    packages: dict[str, str] = field(default_factory=delta_peers.installed)
    """Versions of installed packages whose kernels are peers of the delta rule."""

    @classmethod
    def of(cls, command: str, device: str, measurements: list[Measurement], machine: Machine) -> Record:
        """A record with today's date; ``machine`` is from before the measurements."""
        return cls(command, machine.device_name(device), tuple(measurements), machine)

    @property
    def place(self) -> str:
        """Device, versions and date in one line."""
        machine = self.machine
        count = self.measurements[0].copy.threads
        threads = f", {count} thread{'s' * (count > 1)}" if self.device == machine.processor else ""
        timed = [timing.candidate for one in self.measurements for timing in one.timings]
        versions = {name: self.packages.get(package.distribution) for name, package in delta_peers.PACKAGES.items()}
        versions = {"fla": machine.fla} | {name: versions[name] for name in versions if name in timed}
        peers = "".join(f", {name} {text}" for name, text in versions.items() if name != "fla" or FLA & {*timed})
        return f"{self.device}{threads}; penstock {machine.penstock}, torch {machine.torch}{peers}; {self.date[:10]}"

    def write(self, path: Path) -> None:
        """Write everything as JSON. Makes missing folders."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = asdict(self)
        for plain, measurement in zip(content["measurements"], self.measurements):
            plain["shape"] = measurement.shape._asdict()
            plain["bandwidth_bytes_per_second"] = measurement.bandwidth
            for timing, known in zip(plain["timings"], measurement.timings):
                timing["results"] = {name: one._asdict() for name, one in known.results.items()}
        path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a file that ``write`` wrote, in this or an earlier version. Fields missing in an earlier version get their default."""
        try:
            content = json.loads(path.read_text("utf-8"))
            machine = content["machine"]
            machine["gpus"] = tuple(machine["gpus"])
            measurements = tuple(_measurement(one) for one in content["measurements"])
            if not measurements:
                raise ValueError("it has no measurements")
            texts = content["command"], content["device"], content["date"]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("command, device and date must be texts")
            packages = {str(name): str(text) for name, text in content.get("packages", {}).items()}
            return cls(texts[0], texts[1], measurements, _from_fields(Machine, machine), texts[2], packages)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
            complaints = Complaints("bench")
            rule = "a record that penstock bench --json wrote"
            complaints.add(RangeError, "file", rule, f"{str(path)!r} ({type(failure).__name__}: {failure})")
            complaints.raise_any()
            raise


def joined(records: Sequence[Record]) -> Record:
    """One record of several of one device: runs that each measured some candidates of the same calls.

    A candidate of a call in several runs keeps the run of its median time; one that was timed in any is timed.
    """
    if len(records) == 1:
        return records[0]
    devices = list(dict.fromkeys(record.device for record in records))
    if len(devices) > 1:
        complaints = Complaints("bench")
        complaints.add(RangeError, "--from", "given for records of one device", ", ".join(devices), "Compare times of one device only.")
        complaints.raise_any()
    calls: dict[tuple[object, ...], list[Measurement]] = {}
    for one in (one for record in records for one in record.measurements):
        calls.setdefault((one.variant, one.case, one.shape, one.groups, one.mode, one.dtype), []).append(one)
    command = "; ".join(dict.fromkeys(record.command for record in records))
    packages = {name: text for record in records for name, text in record.packages.items()}
    return replace(records[0], command=command, measurements=tuple(map(_joined, calls.values())), packages=packages)


def _joined(runs: Sequence[Measurement]) -> Measurement:
    """One measurement of several of the same call."""
    timings: dict[str, list[Timing]] = {}
    for timing in (timing for run in runs for timing in run.timings):
        timings.setdefault(timing.candidate, []).append(timing)
    untimed = {one.candidate: one for run in runs for one in run.untimed if one.candidate not in timings}
    return replace(
        runs[0], copy=_median([run.copy for run in runs]), timings=tuple(map(_median, timings.values())), untimed=tuple(untimed.values())
    )


def _median(timings: Sequence[Timing]) -> Timing:
    return sorted(timings, key=lambda timing: timing.own_milliseconds)[(len(timings) - 1) // 2]


def _from_fields(kind: type[Any], content: dict[str, Any]) -> Any:
    """Make a dataclass from the entries that are fields of it."""
    names = {one.name for one in fields(kind)}
    return kind(**{name: value for name, value in content.items() if name in names})


def _measurement(content: dict[str, Any]) -> Measurement:
    read = {
        "shape": Shape(**content["shape"]),
        "copy": _timing(content["copy"]),
        "timings": tuple(_timing(one) for one in content["timings"]),
        "untimed": tuple(_from_fields(Untimed, one) for one in content.get("untimed", ())),
    }
    found: Measurement = _from_fields(Measurement, content | read)
    for name in ("variant", "case", "dtype", "device"):
        if not isinstance(getattr(found, name), str):
            raise ValueError(f"{name} must be a text, got {getattr(found, name)!r}")
    if found.mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {found.mode!r}")
    _check_positive("sizes", *found.shape, found.moved_bytes)
    if any(timing.error is None for timing in found.timings):
        raise ValueError("error must be a number, got None")
    return found


def _timing(content: dict[str, Any]) -> Timing:
    gpu, profile = content.get("gpu"), content.get("profile")
    first, third = content["quartiles"]
    read = {
        "quartiles": (first, third),
        "results": {name: Deviation(**one) for name, one in content.get("results", {}).items()},
        "gpu": None if gpu is None else _from_fields(GpuTiming, gpu | {"quartiles": gpu["quartiles"] and tuple(gpu["quartiles"])}),
        "profile": None if profile is None else _from_fields(Profile, profile),
    }
    found: Timing = _from_fields(Timing, content | read)
    _check_positive("times", found.milliseconds, first, third, found.threads)
    return found


def _check_positive(what: str, *values: object) -> None:
    if not all(isinstance(value, int | float) and 0 < value < inf for value in values):
        raise ValueError(f"{what} must be numbers above 0, got {values}")
