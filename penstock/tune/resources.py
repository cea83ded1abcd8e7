"""Registers, spills and shared memory of compiled kernels, compared with a record. No GPU is needed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.text import Text

from ..errors import Complaints, RangeError
from ..gpu.targets import TARGETS
from ..tables import Numbers
from .ahead import Job, Resources, compile_all
from .shipped import configurations, launches
from .workers import Failure

NONE: Mapping[str, Mapping[str, Iterable[str]]] = MappingProxyType({})
RECORDED = Path(__file__).with_name("resources.json")
MOST_SPILLED = 128
"""Bytes that a thread may spill; more needs a waiver in the record."""
SECONDS = 300.0
"""Time limit for one kernel. On an idle core the slowest takes 11 s."""


@dataclass(frozen=True)
class RecordedResources:
    """Resources of launches, by architecture and name."""

    triton: str
    """The version that compiled the kernels. Other versions can allocate registers differently."""
    launches: dict[str, dict[str, Resources]] = field(default_factory=dict)
    waivers: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By reason and architecture: names of launches that spill more than ``MOST_SPILLED`` bytes."""

    def waived(self, arch: str) -> set[str]:
        """Names of the launches that may spill more than ``MOST_SPILLED`` bytes."""
        return {name for of_archs in self.waivers.values() for name in of_archs.get(arch, ())}

    @classmethod
    def read(cls, path: Path = RECORDED) -> RecordedResources:
        """Read a record that ``write`` wrote."""
        content = json.loads(path.read_text("utf-8"))
        launches = {arch: {name: Resources(**one) for name, one in found.items()} for arch, found in content["launches"].items()}
        return cls(content["triton"], launches, content["waivers"])

    @classmethod
    def of(cls, triton: str, findings: Iterable[Finding], waivers: Mapping[str, Mapping[str, Iterable[str]]] = NONE) -> RecordedResources:
        """A record of these findings, with those of the waivers that they need."""
        launches: dict[str, dict[str, Resources]] = defaultdict(dict)
        for finding in findings:
            if finding.found is not None:
                launches[finding.arch][finding.launch] = finding.found
        needed: dict[str, dict[str, list[str]]] = {}
        for reason, archs in waivers.items():
            for arch, names in archs.items():
                if kept := [name for name in names if name in launches[arch] and launches[arch][name].spill > MOST_SPILLED]:
                    needed.setdefault(reason, {})[arch] = kept
        return cls(triton, dict(launches), needed)

    def write(self, path: Path) -> None:
        """Write the record as JSON, with one line for each launch."""
        archs = []
        for arch, found in self.launches.items():
            lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(one._asdict())}" for name, one in found.items())
            archs.append(f"  {json.dumps(arch)}: {{\n{lines}\n  }}")
        path.parent.mkdir(parents=True, exist_ok=True)
        waivers = json.dumps(self.waivers, indent=1).replace("\n", "\n ")
        text = f'{{"triton": {json.dumps(self.triton)},\n "waivers": {waivers},\n "launches": {{\n' + ",\n".join(archs) + "\n }}\n"
        path.write_text(text, "utf-8")


@dataclass(frozen=True)
class Finding:
    """The resources of one launch, and what is wrong with them."""

    arch: str
    launch: str
    found: Resources | None
    recorded: Resources | None
    wrong: str | None
    """The fault, or None."""

    def as_json(self) -> dict[str, Any]:
        """The finding as plain data for JSON."""
        found, recorded = (None if x is None else x._asdict() for x in (self.found, self.recorded))
        return {"arch": self.arch, "launch": self.launch, "found": found, "recorded": recorded, "wrong": self.wrong}


def chosen(archs: Iterable[str], only: Iterable[str]) -> dict[tuple[str, str], Job]:
    """Launches by architecture and name: for these architectures (default: all) and with one of these texts in their name."""
    complaints, archs, only = Complaints("check"), list(archs), list(only)
    for arch in archs:
        if arch not in TARGETS:
            complaints.add(RangeError, "arch", f"one of {', '.join(TARGETS)}", repr(arch))
    complaints.raise_any()
    every = {(arch, name): job for arch in archs or TARGETS for one in configurations(arch) for name, job in launches(one, TARGETS[arch])}
    for text in only:
        if not any(text in name for _, name in every):
            known = f"a part of a launch's name, such as {next(iter(every))[1].partition(':')[0]!r}"
            complaints.add(RangeError, "only", known, repr(text), "penstock check --compile --json lists them.")
    complaints.raise_any()
    return {(arch, name): job for (arch, name), job in every.items() if not only or any(text in name for text in only)}


def compiled(launches: Mapping[tuple[str, str], Job]) -> dict[tuple[str, str], Resources | Failure]:
    """Compile all launches on all cores. Launches with the same code are compiled once."""
    found = compile_all(launches.values(), SECONDS)
    return {where: found[job] for where, job in launches.items()}


def compared(record: RecordedResources | None, triton: str, found: Mapping[tuple[str, str], Resources | Failure]) -> list[Finding]:
    """Compare resources with a record. Spills are compared only if the record has the same Triton version."""
    known = record if record is not None and record.triton == triton else None
    return [_finding(arch, name, one, known) for (arch, name), one in found.items()]


def _finding(arch: str, name: str, found: Resources | Failure, record: RecordedResources | None) -> Finding:
    recorded = None if record is None else record.launches.get(arch, {}).get(name)
    if isinstance(found, Failure):
        return Finding(arch, name, None, recorded, f"does not compile: {found.reason}")
    limit, wrong = TARGETS[arch].shared_memory, []
    if found.shared > limit:
        wrong.append(f"{found.shared} bytes of shared memory, {arch} has {limit}")
    if recorded is not None and found.spill > recorded.spill:
        wrong.append(f"spills {found.spill} bytes, the record has {recorded.spill}")
    if record is not None and found.spill > MOST_SPILLED and name not in record.waived(arch):
        wrong.append(f"spills {found.spill} bytes: more than {MOST_SPILLED} need a waiver in resources.json")
    if recorded is None and record is not None:
        wrong.append("not in the record: write a new record with --record")
    return Finding(arch, name, found, recorded, "; ".join(wrong) or None)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Print a row for each architecture, configuration and pass: most registers, spills and shared memory. Then the faults."""
    for arch in dict.fromkeys(finding.arch for finding in findings):
        title = f"{arch}: {TARGETS[arch].shared_memory / 1024:.0f} KiB of shared memory"
        table = Numbers("call", ["kernels", "registers", "spills,\nbytes", "shared,\nKiB"], title=title)
        rows: dict[str, list[Finding]] = defaultdict(list)
        for finding in findings:
            if finding.arch == arch:
                rows[finding.launch.rpartition(": ")[0]].append(finding)
        for call, group in rows.items():
            compiled = [finding.found for finding in group if finding.found is not None]
            failed = len(group) - len(compiled)
            most = Resources(*(max(column) for column in zip(*compiled))) if compiled else Resources(0, 0, 0)
            style = "bold red" if any(finding.wrong for finding in group) else ""
            count = f"{len(group)}" + f" ({failed} failed)" * bool(failed)
            table.add(Text(call, style=style), count, str(most.registers), str(most.spill), f"{most.shared / 1024:.0f}")
        table.print(console)
    for finding in findings:
        if finding.wrong:
            console.print(Text(f"  WRONG: {finding.arch}: {finding.launch}: {finding.wrong}", style="bold red"), soft_wrap=True)
