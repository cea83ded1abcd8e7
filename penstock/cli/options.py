"""Options that several commands share: checks of their values, and the width of tables."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from ..bench import raw
from ..bench.peers import peer_names
from ..bench.softmax import FUNCTION
from ..call.declaration import FLOATS
from ..call.families import functions
from ..errors import Complaints, DeviceError, RangeError
from ..verify.machine import Machine, using_threads

State = Annotated[Path | None, typer.Option(metavar="FILE", help="Tuned initial states for an RWKV-6 or RWKV-7, of RWKV-PEFT.")]
Quantize = Annotated[str | None, typer.Option(metavar="KIND", help="Weights of 8 or 4 bits: int8 or int4. See docs/models.md.")]
MAX_THREADS = 1024
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", min=1, max=MAX_THREADS, help="CPU threads.", show_default="as many as cores may be used"),
]
"""The option of every command that computes on a CPU; ``use_cores`` takes its value."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
MAX_SEED = 2**63 - 1
"""``torch.Generator.manual_seed`` takes 64 bits; commands also use the seeds that follow the given one."""
WIDTH = 140
"""Columns of the output if it is not a terminal: wide enough for every table."""


def wide_console() -> Console:
    """The terminal; or, for redirected output without COLUMNS in the environment, ``WIDTH`` columns."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def use_cores(context: typer.Context, threads: int | None, device: str = "cpu") -> Machine:
    """Set the number of threads until the command ends, and warn if the device is a CPU whose cores other processes use."""
    context.with_resource(using_threads(threads))
    machine = Machine.here()
    if machine.busy is not None and device == "cpu":
        Console(stderr=True).print(Text(machine.busy, style="yellow"), soft_wrap=True)
    return machine


def check_names(complaints: Complaints, argument: str, names: Iterable[str], known: Iterable[str], of: str = "", remedy: str = "") -> None:
    """Add a complaint for each name that is not known."""
    known = list(known)
    for name in names:
        if name not in known:
            complaints.add(RangeError, argument, f"one of {', '.join(known)}{of}", repr(name), remedy)


def check_device(complaints: Complaints, device: str, kinds: Sequence[str] = ("cpu", "cuda"), remedy: str = "") -> None:
    """Check that a device is one of these kinds and that torch can use it."""
    match = re.fullmatch(r"cpu|cuda(?::(0|[1-9][0-9]*))?", device, re.ASCII)
    if match is None or device.partition(":")[0] not in kinds:
        rule = " or ".join((*kinds, "cuda:N")) if len(kinds) == 1 else f"{', '.join(kinds)} or cuda:N"
        complaints.add(RangeError, "device", rule, repr(device), remedy)
    elif device != "cpu" and int(match[1] or 0) >= torch.cuda.device_count():
        complaints.add(DeviceError, "device", "one that torch can use", repr(device), f"It sees {torch.cuda.device_count()} GPUs here.")


def check_seconds(complaints: Complaints, seconds: float) -> None:
    """Check a time limit."""
    if not (seconds > 0 and math.isfinite(seconds)):
        complaints.add(RangeError, "seconds", "a finite number above 0", seconds)


def check_seed(complaints: Complaints, seed: int) -> None:
    """Check the seed of the random inputs."""
    if not 0 <= seed <= MAX_SEED:
        complaints.add(RangeError, "seed", f"from 0 to {MAX_SEED}", seed)


def check_candidates(complaints: Complaints, variant: str, impls: Iterable[str], peers: Iterable[str]) -> None:
    """Check the names of implementations and peers for a variant of the recurrence or for softmax attention."""
    of, argument = (f" for {variant}", repr(variant)) if variant == FUNCTION else ("", "")
    names = ["auto", *(one.name for one in functions()[variant].family.implementations), *raw.names(variant)]
    check_names(complaints, "impl", impls, names, of, f"See penstock.implementations({argument}).")
    check_names(complaints, "peer", peers, (*peer_names(variant), "none"), of)
