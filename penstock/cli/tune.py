"""``penstock tune``: measure block sizes of the Triton kernels on this GPU, and write the best to a launch table."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from .. import __version__
from ..bench.cases import default_cases
from ..bench.report import duration
from ..errors import Complaints
from ..tables import Numbers
from ..tokens.shape import Shape
from ..tune.passes import tuned as tuned_variants
from ..tune.passes import tuning_of
from .options import check_device, check_names, check_seed
from .outputs import check_outputs

if TYPE_CHECKING:
    from ..tune.tune import Tuned

VARIANTS = tuple(tuned_variants())
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
    console, paths = Console(), dict.fromkeys(_path(name, gpu, file) for name in names)
    if not dry:
        for path in paths:
            check_outputs("tune", {"--write": path})
    for variant in names:
        tables, path = tuning_of(variant).tables, _path(variant, gpu, file)
        target = tables.target(gpu)
        table = tables.read(path, target.arch)  # raises for a malformed table before anything is measured
        for one in shapes or [default_cases(variant, False)[0].shape]:
            with console.status(f"{variant}, {one.text}: compiling and measuring", spinner="line"):
                for tuned in Tuner(variant, one, DTYPES[dtype], str(gpu), target, seed).run():
                    print_tuned(console, tuned)
                    entry = entry_of(tuned, gpu, tables.Entry)
                    if entry is not None:
                        table[entry.key] = entry
                        if not dry:
                            tables.write(path, target.arch, table.values())
    for path in paths:
        console.print("nothing written" if dry else f"table: {path}", highlight=False, soft_wrap=True)


def _path(variant: str, gpu: torch.device, file: Path | None) -> Path:
    """The table that gets the entries of a variant."""
    tables = tuning_of(variant).tables
    found: Path = file or tables.user_path(tables.target(gpu).arch)
    return found


def _checked(variants: list[str], shapes: list[str], dtype: str, device: str, seed: int) -> list[Shape]:
    complaints = Complaints("tune")
    check_names(complaints, "variant", variants, VARIANTS)
    check_names(complaints, "dtype", [dtype], DTYPES)
    parsed = [Shape.parse(text, "tune") for text in shapes]
    for tuning in {id(one): one for one in (tuning_of(name) for name in variants if name in VARIANTS)}.values():
        tuning.check(complaints, parsed)
    check_device(complaints, device, ("cuda",), "Block sizes are measured on GPUs only.")
    check_seed(complaints, seed)
    complaints.raise_any()
    return parsed


def entry_of(tuned: Tuned, gpu: torch.device, entry: Callable[..., Any]) -> Any:
    """The entry of a kernel in a table, made by ``entry``; None if no candidate is right."""
    best = tuned.chosen
    if best is None or best.milliseconds is None:
        return None
    today = datetime.now(timezone.utc).date().isoformat()
    versions = f"penstock {__version__}, torch {torch.__version__}, triton {version('triton')}"
    name = torch.cuda.get_device_name(gpu)
    return entry(tuned.key, best.config, round(best.milliseconds, 5), tuned.call, name, versions, today)


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
