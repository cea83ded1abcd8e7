"""``penstock profile``: one call of every implementation under torch.profiler."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..bench.candidates import Mode
from ..bench.clock import one_line
from ..bench.measure import Measurement
from ..bench.plot import plot_profile
from ..bench.profile import MODES, candidates, hidden, profiled, trace_folder
from ..bench.record import Record
from ..bench.report import print_profile
from ..call.families import variants
from ..errors import Complaints, MissingExtra, PenstockError
from ..tokens.shape import Shape
from ..verify.inputs import inputs
from .options import DTYPES, Threads, check_candidates, check_device, check_names, check_seconds, check_seed, use_cores, wide_console
from .outputs import Folder, check_outputs

PICTURE = "profile.png"
VARIANTS = variants(drawn=True)


def profile(
    context: typer.Context,
    variant: Annotated[str, typer.Argument(metavar="VARIANT", help=f"One of {', '.join(VARIANTS)}.")],
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 32,
    length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 54,
    head_dim: Annotated[int, typer.Option(min=1, help="Key channels per head.")] = 64,
    value_dim: Annotated[int | None, typer.Option(min=1, help="Value channels per head.", show_default="as --head-dim")] = None,
    dtype: Annotated[str, typer.Option(help=f"Dtype of q, k and v: {', '.join(DTYPES)}.")] = "float16",
    mode: Annotated[str, typer.Option(help="fwd or fwdbwd.")] = "fwd",
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="a GPU if torch can use one")] = None,
    impl: Annotated[
        list[str] | None, typer.Option(help="auto, or an implementation. Repeatable.", show_default="all that take the call")
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option("--peer", help="loop, fla, fla_recurrent or none. The first is the baseline.", show_default="all that take the call"),
    ] = None,
    threads: Threads = None,
    seconds: Annotated[float, typer.Option(help="Time for each candidate without the profiler.")] = 0.4,
    steps: Annotated[int, typer.Option(min=1, help="Calls that the profiler records, after two warm-up calls.")] = 3,
    soft: Annotated[bool, typer.Option("--soft", help="Use logsigmoid(x) as the decays of all channels, as other projects do.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the traces and the picture.")] = Path("penstock-profile"),
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers to this file.")] = None,
) -> None:
    """Profile one call: the token loop, every implementation that runs here, and flash-linear-attention.

    Every candidate is first compared with the float64 oracle. A wrong one is reported and not timed; if it belongs to this library,
    the exit code is 1. Then all candidates are timed in turn without the profiler, and run once more under the profiler. The table shows
    the end-to-end time, the time of all kernels, the slowest kernel, the number of launches, and the time of kernels that only move
    data. On a CPU, operators are shown instead of kernels.

    The inputs lie in memory as [B,T,H*n], as the projections of a model write them, and are passed as views [B,T,H,n].

    --output gets a folder for each candidate with a trace for TensorBoard or ui.perfetto.dev, and a picture.

    [bold]Examples[/bold]

      penstock profile rwkv6

      penstock profile rwkv6 --batch 1 --heads 32 --length 54 --head-dim 64 --dtype float16

      penstock profile gla --length 1024 --heads 4 --head-dim 256 --value-dim 512 --mode fwdbwd --impl cpu --impl chunkwise
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    checked_mode = _checked(variant, mode, impl or [], peers or [], dtype, device, seconds, seed)
    check_outputs("profile", {"--json": json_file}, Folder("--output", output, (PICTURE,)))
    shape = Shape(batch, length, heads, head_dim, value_dim or head_dim)
    console, machine = wide_console(), use_cores(context, threads, device)
    try:
        with console.status(f"{variant}, {mode}, {shape.text}", spinner="line"):
            x = hidden(inputs(variant, shape, DTYPES[dtype], device, seed, "soft" * soft))
            chosen, refused = candidates(x, checked_mode, impl or [], peers or [])
            folders = tuple(trace_folder(one.name) for one in chosen)
            check_outputs("profile", {"--json": json_file}, Folder("--output", output, (PICTURE,), folders))
            found = profiled(f"{variant}{'-soft' * soft}-profile", x, checked_mode, chosen, output, seconds, steps)
    except PenstockError:
        raise
    except Exception as failure:  # out of memory, for example
        console.print(
            f"{variant}, {mode}, {shape.text} was not measured: {one_line(failure)}", style="bold red", markup=False, soft_wrap=True
        )
        raise typer.Exit(1) from None
    found = replace(found, untimed=(*refused, *found.untimed))
    record = Record.of(shlex.join(["penstock", *sys.argv[1:]]), device, [found], machine)
    if json_file is not None:
        record.write(json_file)
    _print(console, found, record, json_file, output)
    if any(one.fault for one in found.untimed):
        raise typer.Exit(1)


def _checked(variant: str, mode: str, impls: list[str], peers: list[str], dtype: str, device: str, seconds: float, seed: int) -> Mode:
    """Raise for every wrong option; return the mode."""
    complaints = Complaints("profile")
    check_names(complaints, "variant", [variant], VARIANTS)
    check_names(complaints, "mode", [mode], MODES)
    if not complaints.found:
        check_candidates(complaints, variant, impls, peers)
    check_names(complaints, "dtype", [dtype], DTYPES)
    check_device(complaints, device)
    check_seconds(complaints, seconds)
    check_seed(complaints, seed)
    complaints.raise_any()
    return next(one for one in MODES if one == mode)


def _print(console: Console, found: Measurement, record: Record, json_file: Path | None, output: Path) -> None:
    """Print the table and the paths of what was written; draw the picture."""
    print_profile(console, found)
    if json_file is not None:
        console.print(f"numbers: {json_file}", highlight=False, soft_wrap=True)
    if found.timings:
        console.print(f"traces: {output}, for ui.perfetto.dev or tensorboard --logdir {output}", highlight=False, soft_wrap=True)
    try:
        plot_profile(found, output / PICTURE, record.place)
        console.print(f"picture: {output / PICTURE}", highlight=False, soft_wrap=True)
    except MissingExtra as missing:
        console.print(f"no picture: {missing}", style="yellow", markup=False, highlight=False, soft_wrap=True)
