"""``penstock bench``: time implementations and peers, each checked first."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..bench import softmax
from ..bench.candidates import MODES, Mode, ours
from ..bench.cases import Case, case_named, default_cases
from ..bench.clock import named
from ..bench.measure import Measurement, measure
from ..bench.peers import peer
from ..bench.plot import check_plot, draw, draw_profile
from ..bench.record import Record
from ..bench.report import print_cases, print_measurements, print_profile
from ..bench.suites import LADDER, PLAIN, Suite, suite_named
from ..errors import Complaints, PenstockError, RangeError
from ..recurrence.variants import VARIANTS
from ..softmax import FUNCTION
from ..verify.inputs import Shape, inputs
from ..verify.machine import Machine, using_threads
from .options import DTYPES, checked, wide_console
from .outputs import check_outputs


def bench(
    variants: Annotated[
        list[str] | None,
        typer.Argument(metavar="VARIANT...", help=f"Any of {', '.join((*VARIANTS, FUNCTION))}; or {LADDER} alone.", show_default=False),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="B,T,H,K[,V]", help="A shape for every variant named. Repeatable.")] = None,
    case: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A shape of a real model, see --list. Repeatable.")] = None,
    suite: Annotated[
        str | None, typer.Option(metavar="NAME", help="Many cases, and its own defaults for the options below, see --list.")
    ] = None,
    mode: Annotated[list[str] | None, typer.Option(help="fwd, fwdbwd or decode. Repeatable.", show_default=", ".join(PLAIN.modes))] = None,
    impl: Annotated[
        list[str] | None, typer.Option(help="auto, or an implementation. Repeatable.", show_default=", ".join(PLAIN.impls))
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            help="loop, fla, fla_recurrent, a rung of wkv-ladder, or none. The first is the baseline.",
            show_default=", ".join(PLAIN.peers),
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Of q, k and v: {', '.join(DTYPES)}.", show_default=PLAIN.dtype)] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default=PLAIN.device)] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="as torch chooses")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Time for each candidate on each shape.", show_default=f"{PLAIN.seconds:g}")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers here, after each case.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw here: png, pdf or svg.")] = None,
    from_file: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Measure nothing: show, and draw, what --json wrote.")
    ] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and the suites, and stop.")] = False,
) -> None:
    """Time variants of the recurrence: ours beside the token loop, or beside flash-linear-attention.

    Every candidate is first held to the float64 oracle; a wrong one is reported, not timed, and the exit code is 1. Then all
    take turns, so that noise of the machine hits them alike. Shown are the median, the quartiles, how many times as fast as
    the baseline, the error, and the floor: a copy of as many bytes as the call has to move, timed in the same turns. On a GPU
    also the GPU's time alone, the host's, the most memory, and the first call. That one compiles what nothing compiled
    before: empty the caches of Triton on disk first if it is to be a cold one.

    Without --shape, --case and --suite, a variant is measured at its first model in --list.

    [bold]Examples[/bold]

      penstock bench rwkv6

      penstock bench rwkv6 gla --shape 1,1024,32,64 --mode fwd --mode fwdbwd

      penstock bench rwkv6 --shape 1,64,32,64 --shape 1,256,32,64 --shape 1,1024,32,64 --plot time.png

      penstock bench --case rwkv6-7b-decode-64 --mode decode --impl cpu --impl chunkwise --json decode.json

      penstock bench gla --shape 8,2048,32,64 --device cuda --dtype bfloat16 --peer fla --peer loop

      penstock bench --suite gpu-training --json training.json --plot training.png

      penstock bench wkv-ladder --json ladder.json

      penstock bench --from training.json --plot training.pdf
    """
    console = wide_console()
    if list_cases:
        print_cases(console)
        return
    check_outputs("bench", {"--json": json_file, "--plot": plot_file})
    if plot_file is not None:
        check_plot(plot_file)
    if from_file is not None:
        _refuse_both(variants, shape, case, suite, json_file)
        record = Record.read(from_file)
        profiles = [one for one in record.measurements if one.profiled]
        for profile in profiles:
            print_profile(console, profile)
        if len(profiles) < len(record.measurements):
            print_measurements(console, [one for one in record.measurements if not one.profiled])
        _draw(console, record, plot_file)
        return
    if variants == [LADDER] and suite is None:
        variants, suite = None, LADDER
    usual = PLAIN if suite is None else suite_named(suite)
    names, impls = [name for name in peers or usual.peers if name != "none"], impl or list(usual.impls)
    dtype, device, seconds = dtype or usual.dtype, device or usual.device, usual.seconds if seconds is None else seconds
    modes = checked("bench", variants or [], (*VARIANTS, FUNCTION), mode or usual.modes, MODES, impls, peers or [], dtype, device)
    jobs = [(one, job) for one in modes for job in _jobs(variants or [], shape or [], case or [], usual, one)]
    machine = Machine.here()
    if machine.busy is not None and device == "cpu":
        console.print(machine.busy, style="yellow", highlight=False)
    with using_threads(threads), console.status("measuring", spinner="dots") as status:
        measurements: list[Measurement] = []
        failed: list[str] = []
        for one, job in jobs:
            status.update(f"{job.variant}, {one}, {job.shape.text}")
            try:
                if job.variant == FUNCTION:
                    measurements.append(softmax.measure(job, one, DTYPES[dtype], device, seconds, impls[0], seed))
                else:
                    x = inputs(job.variant, job.shape, DTYPES[dtype], device, seed, job.soft)
                    candidates = [peer(name, x, one) for name in names] + [ours(name, x, one) for name in impls]
                    measurements.append(measure(job.name, x, one, candidates, seconds, go_on=True))
            except PenstockError:
                raise
            except Exception as failure:  # out of memory while timing, say: the other cases are still worth their time
                failed.append(f"{job.name}, {one}, was not measured: {named(failure)}")
                continue
            record = Record.of(shlex.join(["penstock", *sys.argv[1:]]), device, measurements, machine)
            if json_file is not None:  # each time, so that a run cut short leaves what it measured
                record.write(json_file)
    timed = any(measurement.timings for measurement in measurements)
    if measurements:
        print_measurements(console, measurements)
        if json_file is not None:
            console.print(f"numbers: {json_file}", highlight=False, soft_wrap=True)
    if timed:
        _draw(console, record, plot_file)
    for line in [*failed, *["Nothing was measured."] * (not timed)]:
        console.print(line, style="bold red", markup=False, highlight=False, soft_wrap=True)
    if failed or not timed or any(one.fault for measurement in measurements for one in measurement.untimed):
        raise typer.Exit(1)


def _draw(console: Console, record: Record, path: Path | None) -> None:
    if path is not None:
        if len(record.measurements) == 1 and record.measurements[0].profiled:
            draw_profile(record.measurements[0], path, record.place)
        else:
            draw(record.measurements, path, record.place)
        console.print(f"picture: {path}", highlight=False, soft_wrap=True)


def _refuse_both(*given: object) -> None:
    """Raise if anything is to be measured while numbers come from a file."""
    if any(given):
        complaints = Complaints("bench")
        rule = "given without variants, --shape, --case, --suite and --json"
        complaints.add(RangeError, "--from", rule, "both", "It shows what was measured and measures nothing.")
        complaints.raise_any()


def _jobs(variants: list[str], shapes: list[str], cases: list[str], suite: Suite, mode: Mode) -> list[Case]:
    """List what to measure in a mode; everything that was named must take part. Variants choose among a suite's cases."""
    named = [case_named(name) for name in cases]
    chosen = [case for case in suite.cases if not variants or case.variant in variants]
    complaints = Complaints("bench")
    if not variants and not named and not chosen:
        rule = f"given: one or more of {', '.join((*VARIANTS, FUNCTION))}"
        complaints.add(RangeError, "variant", rule, "none", "Or name a --case; --list shows them.")
    if shapes and not variants:
        complaints.add(RangeError, "variant", "given with --shape", "none", "For example penstock bench rwkv6 --shape 1,54,32,64.")
    for case in named:
        if variants and case.variant not in variants:
            complaints.add(RangeError, "case", f"a shape of {' or '.join(variants)}", f"{case.name!r}, of {case.variant}", "Use --shape.")
    known = {case.variant for case in named + chosen}
    for variant in variants:
        if suite.cases and not shapes and variant not in known:
            complaints.add(RangeError, "variant", f"one of suite {suite.name}", repr(variant), "Use --shape.")
    if mode == "decode" and FUNCTION in (*variants, *known):
        complaints.add(RangeError, "mode", f"fwd or fwdbwd for {FUNCTION}", repr(mode))
    complaints.raise_any()
    jobs = named + chosen
    for variant in variants:
        jobs += [Case(text, variant, Shape.parse(text), "given by --shape") for text in shapes]
        if not shapes and variant not in known:
            jobs += default_cases(variant, mode == "decode")
    return jobs
