"""``penstock profile``: one call of every implementation under torch.profiler."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..bench.plot import MissingExtra, draw_profile
from ..bench.profile import MODES, candidates, hidden, profiled
from ..bench.record import Record
from ..bench.report import print_profile
from ..recurrence.variants import VARIANTS
from ..verify.inputs import Shape, inputs
from ..verify.machine import Machine, using_threads
from .options import DTYPES, checked, wide_console
from .outputs import Folder, check_outputs


def profile(
    variant: Annotated[str, typer.Argument(metavar="VARIANT", help=f"One of {', '.join(VARIANTS)}.")],
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Heads of the layer.")] = 32,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 54,
    head_dim: Annotated[int, typer.Option(min=1, help="Key channels of a head.")] = 64,
    value_dim: Annotated[int | None, typer.Option(min=1, help="Value channels of a head.", show_default="as --head-dim")] = None,
    dtype: Annotated[str, typer.Option(help=f"Of q, k and v: {', '.join(DTYPES)}.")] = "float16",
    mode: Annotated[str, typer.Option(help="fwd or fwdbwd.")] = "fwd",
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="a GPU if torch can use one")] = None,
    impl: Annotated[
        list[str] | None, typer.Option(help="auto, or an implementation. Repeatable.", show_default="all that take the call")
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option("--peer", help="loop, fla, fla_recurrent or none. The first is the baseline.", show_default="all that take the call"),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="as torch chooses")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Of the clock, for each candidate.")] = 0.4,
    steps: Annotated[int, typer.Option(min=1, help="Calls that the profiler records, after one it ignores and one to warm up.")] = 3,
    soft: Annotated[bool, typer.Option("--soft", help="Decays logsigmoid(x) for all channels, as others measure rwkv6.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where traces and the picture go.")] = Path("penstock-profile"),
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers here.")] = None,
) -> None:
    """Look into one call: where the time goes in the token loop, in every implementation here, and in flash-linear-attention.

    Every candidate is first held to the float64 oracle; a wrong one is reported, not timed, and if it is ours the exit code is 1.
    Then all are timed in turn without the profiler, and then watched by it. Shown are the time end to end, the time of all kernels, the
    slowest kernel, how many were launched, and the time of those that only move data. On a CPU, operators take the place of kernels.

    The inputs lie in memory as [B,T,H*n], the way a model's projections leave them, and are handed over as views [B,T,H,n].

    For every candidate, a folder in --output has a trace to open in TensorBoard or in ui.perfetto.dev; beside them is a picture.

    [bold]Examples[/bold]

      penstock profile rwkv6

      penstock profile rwkv6 --batch 1 --heads 32 --length 54 --head-dim 64 --dtype float16

      penstock profile gla --length 1024 --heads 4 --head-dim 256 --value-dim 512 --mode fwdbwd --impl cpu --impl chunkwise
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    (taken,) = checked("profile", [variant], tuple(VARIANTS), [mode], MODES, impl or [], peers or [], dtype, device)
    shape = Shape(batch, length, heads, head_dim, value_dim or head_dim)
    picture = output / "profile.png"
    check_outputs("profile", {"--json": json_file}, Folder("--output", output, (picture.name,)))
    console, machine = wide_console(), Machine.here()
    if machine.busy is not None and device == "cpu":
        console.print(machine.busy, style="yellow", highlight=False)
    with using_threads(threads), console.status(f"{variant}, {mode}, {shape.text}", spinner="dots"):
        x = hidden(inputs(variant, shape, DTYPES[dtype], device, seed, soft))
        every, refused = candidates(x, taken, impl or [], peers or [])
        found = profiled(f"{variant}{'-soft' * soft}-profile", x, taken, every, output, seconds, steps)
    found = replace(found, untimed=(*refused, *found.untimed))
    record = Record.of(shlex.join(["penstock", *sys.argv[1:]]), device, [found], machine)
    print_profile(console, found)
    if json_file is not None:
        record.write(json_file)
        console.print(f"numbers: {json_file}", highlight=False, soft_wrap=True)
    if found.timings:
        console.print(f"traces: {output}, for ui.perfetto.dev or tensorboard --logdir {output}", highlight=False, soft_wrap=True)
    try:
        draw_profile(found, picture, record.place)
        console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    except MissingExtra as missing:
        console.print(f"no picture: {missing}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if any(one.fault for one in found.untimed):
        raise typer.Exit(1)
