"""Options NAME=FILE of ``penstock serve``: initial states and adapters that requests choose by the name of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import Complaints, RangeError
from ..models import load_adapter, load_tuned_state

NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)", re.ASCII)
"""A path with "=" in it may be written as ./a=b."""


def split(complaints: Complaints, option: str, given: Iterable[str], plain: bool) -> tuple[str | None, dict[str, str]]:
    """The value without a name, where ``plain`` allows one, and those with names."""
    alone: list[str] = []
    named: dict[str, str] = {}
    for value in given:
        match = NAMED.fullmatch(value)
        if match is None and plain:
            alone.append(value)
        elif match is None:
            complaints.add(RangeError, option, "NAME=VALUE with a name of letters, digits, '.', '_' and '-'", repr(value))
        elif match[1] in named:
            complaints.add(RangeError, option, "of different names", f"{match[1]!r} twice")
        else:
            named[match[1]] = match[2]
    if len(alone) > 1:
        complaints.add(RangeError, option, "one file without a name", f"{len(alone)}: {', '.join(alone)}", "Name the others: NAME=FILE.")
    return alone[0] if alone else None, named


def alphas(complaints: Complaints, given: Iterable[str], adapters: Iterable[str]) -> dict[str, float]:
    """``--adapter-alpha NAME=NUMBER``."""
    found, names = {}, set(adapters)
    for name, value in split(complaints, "adapter_alpha", given, plain=False)[1].items():
        if name not in names:
            complaints.add(RangeError, "adapter_alpha", "of names of --adapter", repr(name))
        try:
            found[name] = float(value)
        except ValueError:
            complaints.add(RangeError, "adapter_alpha", "NAME=NUMBER", repr(f"{name}={value}"))
    return found


def read(base: Path, states: dict[str, str], adapters: dict[str, str], alpha: dict[str, float]) -> dict[str, Any]:
    """The arguments ``states`` and ``adapters`` of ``Engine``. ``base`` is the checkpoint of the model."""
    return {
        "states": {name: load_tuned_state(path, base) for name, path in states.items()},
        "adapters": {name: load_adapter(path, base, adapter_alpha=alpha.get(name)) for name, path in adapters.items()},
    }
