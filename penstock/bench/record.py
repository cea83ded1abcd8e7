"""What a run of measurements leaves behind: the numbers, and where, when and with what they were taken."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..errors import Complaints, RangeError
from ..verify.inputs import Shape
from ..verify.machine import Machine
from .exact import Apart
from .measure import Measurement, OnGpu, Timing, Untimed
from .trace import Profile


@dataclass(frozen=True)
class Record:
    """One run."""

    command: str
    device: str
    """Name of the processor or GPU that computed."""
    measurements: tuple[Measurement, ...]
    machine: Machine
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    @classmethod
    def of(cls, command: str, device: str, measurements: list[Measurement], machine: Machine) -> Record:
        """Note the machine, as it was before, and the date."""
        return cls(command, machine.device_name(device), tuple(measurements), machine)

    @property
    def place(self) -> str:
        """Where and with what, in one line."""
        machine = self.machine
        count = self.measurements[0].copy.threads
        threads = f", {count} thread{'s' * (count > 1)}" if self.device == machine.processor else ""
        timed = [timing.candidate for one in self.measurements for timing in one.timings]
        beside = f", fla {machine.fla}" if any(name.startswith("fla") for name in timed) else ""
        return f"{self.device}{threads}; penstock {machine.penstock}, torch {machine.torch}{beside}; {self.date[:10]}"

    def write(self, path: Path) -> None:
        """Write everything as JSON; folders are made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = asdict(self)
        for plain, measurement in zip(content["measurements"], self.measurements):
            plain["shape"] = measurement.shape._asdict()
            plain["bandwidth_bytes_per_second"] = measurement.bandwidth
            for timing, known in zip(plain["timings"], measurement.timings):
                timing["results"] = {name: apart._asdict() for name, apart in known.results.items()}
        path.write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read what ``write`` wrote, now or in an earlier version: what was not measured then is left out."""
        try:
            content = json.loads(path.read_text())
            machine = content["machine"]
            machine["gpus"] = tuple(machine["gpus"])
            measurements = tuple(_measurement(one) for one in content["measurements"])
            if not measurements:
                raise ValueError("it has no measurements")
            return cls(content["command"], content["device"], measurements, _known(Machine, machine), content["date"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
            complaints = Complaints("bench")
            rule = "a record that penstock bench --json wrote"
            complaints.add(RangeError, "file", rule, f"{str(path)!r} ({type(failure).__name__}: {failure})")
            complaints.raise_any()
            raise


def _known(kind: type[Any], content: dict[str, Any]) -> Any:
    """Make a dataclass from those of the entries that it has fields for."""
    names = {one.name for one in fields(kind)}
    return kind(**{name: value for name, value in content.items() if name in names})


def _measurement(content: dict[str, Any]) -> Measurement:
    read = {
        "shape": Shape(**content["shape"]),
        "copy": _timing(content["copy"]),
        "timings": tuple(_timing(one) for one in content["timings"]),
        "untimed": tuple(_known(Untimed, one) for one in content.get("untimed", ())),
    }
    return _known(Measurement, content | read)  # type: ignore[no-any-return]


def _timing(content: dict[str, Any]) -> Timing:
    gpu, profile = content.get("gpu"), content.get("profile")
    read = {
        "quartiles": tuple(content["quartiles"]),
        "results": {name: Apart(**apart) for name, apart in content.get("results", {}).items()},
        "gpu": None if gpu is None else _known(OnGpu, gpu | {"quartiles": gpu["quartiles"] and tuple(gpu["quartiles"])}),
        "profile": None if profile is None else _known(Profile, profile),
    }
    return _known(Timing, content | read)  # type: ignore[no-any-return]
