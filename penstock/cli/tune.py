"""``penstock tune``: measure block sizes of the Triton kernels on this GPU, and write the best to a launch table."""

from __future__ import annotations

from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from .. import __version__
from ..bench.cases import default_cases
from ..bench.report import duration
from ..errors import Complaints, RangeError
from ..gpu.target import power
from ..recurrence.triton.table_file import Entry, read, user_path, write
from ..recurrence.triton.table_file import target as target_of
from ..recurrence.variants import VARIANTS
from ..tables import Numbers
from ..verify.inputs import Shape
from .options import check_device, check_names, check_seed
from .outputs import check_outputs

if TYPE_CHECKING:
    from ..tune.tune import Tuned

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def tune(
    variants: Annotated[
        list[str] | None, typer.Argument(metavar="VARIANT", help=f"Any of {', '.join(VARIANTS)}.", show_default="all")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="B,T,H,K[,V]", help="Repeatable.", show_default="the variant's first model in bench --list")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Dtype of q, k and v: {', '.join(DTYPES)}.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
    file: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write to this file.", show_default="~/.config/penstock/launch-ARCH.json")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Write nothing.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
) -> None:
    """Measure block sizes of the Triton kernels on this GPU, and write the best to a table.

    For every kernel of the forward pass, the backward pass, short sequences and the decode step, candidates are compiled in
    parallel. Then each is compared with the float64 chunkwise form and timed, as the median of 20 calls. A candidate that fails
    or is wrong is listed and never chosen. Entries of the same key in the table are replaced; others stay.

    The library reads the table in $XDG_CONFIG_HOME/penstock (~/.config/penstock) at the first kernel launch. Its entries take
    precedence over the shipped table. The library itself never measures block sizes.

    [bold]Examples[/bold]

      penstock tune rwkv6

      penstock tune gla simple_gla --shape 8,2048,32,64 --shape 4,2048,16,128 --dry

      penstock tune --write penstock/recurrence/triton/tables/sm_90.json
    """
    check_outputs("tune", {"--write": file})
    names = list(dict.fromkeys(variants or VARIANTS))
    shapes = _checked(names, shape or [], dtype, device, seed)
    from ..tune.ahead import check_compiler

    check_compiler("tune")
    from ..tune.tune import Tuner  # needs Triton

    gpu = torch.device(device if ":" in device else f"cuda:{torch.cuda.current_device()}")
    target, console = target_of(gpu), Console()
    path = file or user_path(target.arch)
    if not dry:
        check_outputs("tune", {"--write": path})
    table = read(path, target.arch)  # raises for a malformed table before anything is measured
    versions = f"penstock {__version__}, torch {torch.__version__}, triton {version('triton')}"
    for variant in names:
        for one in shapes or [default_cases(variant, False)[0].shape]:
            with console.status(f"{variant}, {one.text}: compiling and measuring", spinner="line"):
                for tuned in Tuner(variant, one, DTYPES[dtype], str(gpu), target, seed).run():
                    print_tuned(console, tuned)
                    entry = entry_of(tuned, torch.cuda.get_device_name(gpu), versions)
                    if entry is not None:
                        table[entry.key] = entry
                        if not dry:
                            write(path, target.arch, table.values())
    console.print("nothing written" if dry else f"table: {path}", highlight=False, soft_wrap=True)


def _checked(variants: list[str], shapes: list[str], dtype: str, device: str, seed: int) -> list[Shape]:
    complaints = Complaints("tune")
    check_names(complaints, "variant", variants, VARIANTS)
    check_names(complaints, "dtype", [dtype], DTYPES)
    parsed = [Shape.parse(text, "tune") for text in shapes]
    sizes = [(power(one.K), power(one.V)) for one in parsed]
    if len(set(sizes)) < len(sizes):
        remedy = "A table has one entry for all of these: choose one."
        complaints.add(RangeError, "shape", "the only one of its K and V, up to the next power of two", " ".join(shapes), remedy)
    for one in parsed:
        if one.K > 256 or one.V > 512:
            complaints.add(RangeError, "shape", "of at most K = 256 and V = 512", one.text, "This is the limit of the chunked kernels.")
    check_device(complaints, device, ("cuda",), "Block sizes are measured on GPUs only.")
    check_seed(complaints, seed)
    complaints.raise_any()
    return parsed


def entry_of(tuned: Tuned, gpu: str, versions: str) -> Entry | None:
    """The table entry of a kernel; None if no candidate is right."""
    best = tuned.chosen
    if best is None or best.milliseconds is None:
        return None
    today = datetime.now(timezone.utc).date().isoformat()
    return Entry(tuned.key, best.config, round(best.milliseconds, 5), tuned.call, gpu, versions, today)


def print_tuned(console: Console, tuned: Tuned) -> None:
    """Print all candidates of a kernel, the fastest first, then those that cannot be chosen."""
    names = [name for name in tuned.before._fields if len({getattr(one.config, name) for one in tuned.outcomes}) > 1]
    table = Numbers("time", [*names, "error", ""], title=f"{tuned.key.kernel}: {tuned.call}", left=[""])
    for one in sorted(tuned.outcomes, key=lambda one: (one.reason is not None, one.milliseconds or 0.0)):
        marks = ["chosen"] * (one is tuned.chosen) + ["in use"] * (one.config == tuned.before) + [one.reason or ""]
        style = "bold green" if one is tuned.chosen else "red" if one.reason else ""
        time = "-" if one.milliseconds is None else duration(one.milliseconds)
        error = "-" if one.error is None else f"{one.error:.0e}"
        sizes = [str(getattr(one.config, name)) for name in names]
        table.add(time, *sizes, error, Text(", ".join(mark for mark in marks if mark)), style=style)
    table.print(console)
    if tuned.chosen is None:
        console.print(f"  WRONG: no candidate of {tuned.key} is right", style="bold red", soft_wrap=True)
