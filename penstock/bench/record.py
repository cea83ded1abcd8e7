"""What a run of measurements leaves behind: the numbers, and where, when and with what they were taken."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from .machine import Machine
from .measure import Measurement


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
        threads = f", {self.measurements[0].copy.threads} threads" if self.device == machine.processor else ""
        return f"{self.device}{threads}; penstock {machine.penstock}, torch {machine.torch}; {self.date[:10]}"

    def write(self, path: Path) -> None:
        """Write everything as JSON; folders are made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = asdict(self)
        for plain, measurement in zip(content["measurements"], self.measurements):
            plain["shape"] = measurement.shape._asdict()
            plain["bandwidth_bytes_per_second"] = measurement.bandwidth
        path.write_text(json.dumps(content, indent=2) + "\n")
