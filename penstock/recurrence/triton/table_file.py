"""Tables of measured block sizes as files: one a GPU architecture, shipped with the package or the user's own, in one format.

    {"arch": "sm_90",
     "entries": [{"kernel": "forward", "decay": "channel", "read": "updated", "precision": "bf16", "K": 64, "V": 64,
                  "config": {"warps": 4, "BV": 64, "BK": 64, "C": 64, "stages": 3, "programs_per_sm": 3, "form": ""},
                  "milliseconds": 0.146, "call": "gla 8,2048,32,64 bfloat16 forward",
                  "gpu": "NVIDIA H200", "versions": "torch 2.11.0, triton 3.6.0", "date": "2026-11-21"}]}

``milliseconds`` is the time of the pass that the kernel is a part of. The user's entries stand before the shipped ones of the
same key; ``penstock tune`` writes both kinds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import Complaints, RangeError
from ...gpu.target import Target
from .table import DECAYS, KERNELS, PRECISIONS, READS, KernelConfig, Key


class Entry(NamedTuple):
    """Block sizes, and what they took."""

    key: Key
    config: KernelConfig
    milliseconds: float
    """Of the whole pass."""
    call: str
    """Variant, shape, dtype and pass that were timed."""
    gpu: str
    versions: str
    date: str

    @property
    def plain(self) -> dict[str, Any]:
        """As in a file."""
        return self.key._asdict() | {"config": self.config._asdict()} | {name: getattr(self, name) for name in self._fields[2:]}


Rule = tuple[str, Callable[[Any], bool]]


def _one_of(names: tuple[str, ...]) -> Rule:
    return f"one of {', '.join(names)}", lambda x: x in names


def _power(low: int, high: int) -> Rule:
    return f"a power of two from {low} to {high}", lambda x: _whole(x) and low <= x <= high and x & (x - 1) == 0


def _from(low: int, high: int) -> Rule:
    return f"a whole number from {low} to {high}", lambda x: _whole(x) and low <= x <= high


def _whole(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


TEXT: Rule = "a text", lambda x: isinstance(x, str) and bool(x)
ENTRY: dict[str, Rule] = {
    "kernel": _one_of(KERNELS),
    "decay": _one_of(DECAYS),
    "read": _one_of(READS),
    "precision": _one_of(PRECISIONS),
    "K": _power(16, 512),
    "V": _power(16, 512),
    "config": ("an object with at least warps", lambda x: isinstance(x, dict) and "warps" in x),
    "milliseconds": ("a number above 0", lambda x: isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < float("inf")),
    "call": TEXT,
    "gpu": TEXT,
    "versions": TEXT,
    "date": TEXT,
}
CONFIG: dict[str, Rule] = {
    "warps": _power(1, 32),
    "BV": _power(8, 512),
    "BK": _power(8, 512),
    "stages": _from(1, 8),
    "programs_per_sm": _from(0, 64),
}
CONFIG["form"] = _one_of(("", "hopper"))
CHUNK, NO_CHUNK = _power(16, 256), ("0: this kernel has no chunks of its own", lambda x: x == 0)


def user_path(arch: str) -> Path:
    """Where this user's table for a GPU architecture is looked for."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "penstock" / f"launch-{arch}.json"


def shipped_path(arch: str) -> Path:
    """Where the package's own table is, if it has one."""
    return Path(__file__).with_name("tables") / f"{arch}.json"


def shipped(arch: str) -> dict[Key, Entry]:
    """The entries that come with the package."""
    return read(shipped_path(arch), arch)


@cache
def in_use(arch: str) -> Mapping[Key, Entry]:
    """Shipped entries, and before them the user's. Read once in a process, when its first launch is planned."""
    return shipped(arch) | read(user_path(arch), arch)


@cache
def target(device: torch.device) -> Target:
    """The GPU of this device, with the measured configurations for its architecture. The tables are read once."""
    found = Target.of(device)
    return found if found.interpreted else found._replace(table={key: entry.config for key, entry in in_use(found.arch).items()})


def read(path: Path, arch: str) -> dict[Key, Entry]:
    """The entries of a file; none if there is no file. Raises RangeError that names every broken rule of a malformed one."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return {}
    complaints = Complaints(f"launch table {path}")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        content = None
        complaints.add(RangeError, "the file", "JSON", f"something else: {error}", REMEDY)
    entries: list[Entry] = []
    if content is not None:
        _check_top(complaints, content, arch)
        if not complaints.found:
            entries = [entry for n, plain in enumerate(content["entries"]) if (entry := _entry(complaints, n, plain)) is not None]
            _check_once(complaints, entries)
    complaints.raise_any()
    return {entry.key: entry for entry in entries}


REMEDY = "Correct it, or delete the file: penstock tune writes a new one."


def _check_top(complaints: Complaints, content: Any, arch: str) -> None:
    if not isinstance(content, dict) or set(content) != {"arch", "entries"} or not isinstance(content["entries"], list):
        complaints.add(RangeError, "the file", "an object with arch and entries, a list", json.dumps(content)[:60], REMEDY)
    elif content["arch"] != arch:
        complaints.add(RangeError, "arch", repr(arch), repr(content["arch"]), REMEDY)


def _entry(complaints: Complaints, n: int, plain: Any) -> Entry | None:
    """One entry of a file, or None with complaints."""
    where, before = f"entries[{n}]", len(complaints.found)
    if not isinstance(plain, dict) or set(plain) != set(ENTRY):
        complaints.add(RangeError, where, f"an object with exactly {', '.join(ENTRY)}", json.dumps(plain)[:120], REMEDY)
        return None
    for name, (rule, holds) in ENTRY.items():
        if not holds(plain[name]):
            complaints.add(RangeError, f"{where}.{name}", rule, json.dumps(plain[name]), REMEDY)
    sizes = plain["config"] if isinstance(plain["config"], dict) else {}
    rules = CONFIG | {"C": CHUNK if plain["kernel"] in ("forward", "backward") else NO_CHUNK}
    for name, size in sizes.items():
        rule, holds = rules.get(name, (f"left out, being none of {', '.join(KernelConfig._fields)}", lambda x: False))
        if not holds(size):
            complaints.add(RangeError, f"{where}.config.{name}", rule, json.dumps(size), REMEDY)
    if len(complaints.found) > before:
        return None
    key = Key(*(plain[name] for name in Key._fields))
    return Entry(key, KernelConfig(**sizes), *(plain[name] for name in Entry._fields[2:]))


def _check_once(complaints: Complaints, entries: list[Entry]) -> None:
    keys = [entry.key for entry in entries]
    for key in dict.fromkeys(key for key in keys if keys.count(key) > 1):
        complaints.add(RangeError, "entries", "of different keys", f"{keys.count(key)} for {key}", REMEDY)


def write(path: Path, arch: str, entries: Iterable[Entry]) -> None:
    """Write a table, an entry a line; folders are made."""
    lines = [json.dumps(entry.plain) for entry in sorted(entries)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"arch": {json.dumps(arch)},\n "entries": [\n  ' + ",\n  ".join(lines) + "\n]}\n", "utf-8")
