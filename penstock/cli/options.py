"""What the commands that measure have in common: names that are checked, and room for their tables."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from rich.console import Console

from ..bench.candidates import Mode
from ..bench.ladder import RUNGS
from ..bench.peers import PEERS
from ..call.declaration import FLOATS
from ..errors import Complaints, DeviceError, RangeError
from ..recurrence.operators import FAMILY

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
WIDTH = 140
"""Columns where the output is no terminal: room for every number."""


def wide_console() -> Console:
    """The terminal, or a wide page where the output goes elsewhere and nobody asked for another width."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def checked(
    function: str,
    variants: Sequence[str],
    known_variants: Sequence[str],
    modes: Sequence[str],
    known_modes: Sequence[Mode],
    impls: Sequence[str],
    peers: Sequence[str],
    dtype: str,
    device: str,
) -> list[Mode]:
    """Raise for every name that nobody knows; the modes, typed."""
    complaints = Complaints(function)
    known: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        "variant": (variants, known_variants),
        "mode": (modes, known_modes),
        "peer": (peers, (*PEERS, *RUNGS, "none")),
        "dtype": ([dtype], tuple(DTYPES)),
    }
    for argument, (given, allowed) in known.items():
        for name in given:
            if name not in allowed:
                complaints.add(RangeError, argument, f"one of {', '.join(allowed)}", repr(name))
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        complaints.add(RangeError, "device", "cpu, cuda or cuda:N", repr(device))
    elif kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        complaints.add(DeviceError, "device", "one that torch can use", repr(device), f"It sees {torch.cuda.device_count()} GPUs here.")
    complaints.raise_any()
    for name in impls:
        FAMILY.check_name(function, name)
    return [mode for mode in known_modes if mode in modes]
