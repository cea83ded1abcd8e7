"""``penstock bench``: time implementations and peers, after comparing each with the oracle."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console

from ..bench import raw, softmax
from ..bench.candidates import MODES, Mode
from ..bench.cases import Case, case_named, default_cases
from ..bench.clock import one_line
from ..bench.figure import check_plot
from ..bench.measure import Measurement, check_decode_shape, measure
from ..bench.peers import peer, peer_names
from ..bench.plot import plot_measurements, plot_profile
from ..bench.record import Record, joined
from ..bench.report import print_cases, print_measurements, print_profile
from ..bench.softmax import FUNCTION
from ..bench.suites import LADDER, PLAIN, Suite, suite_named
from ..call.families import variants as known_variants
from ..errors import Complaints, PenstockError, RangeError
from ..tokens.shape import Shape
from ..verify.inputs import inputs
from ..verify.machine import Machine
from .options import DTYPES, Threads, check_candidates, check_device, check_names, check_seconds, check_seed, use_cores, wide_console
from .outputs import check_outputs

VARIANTS = known_variants()


def bench(
    context: typer.Context,
    variants: Annotated[
        list[str] | None,
        typer.Argument(metavar="VARIANT", help=f"Any of {', '.join(VARIANTS)}; or {LADDER} alone.", show_default=False),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="B,T,H,K[,V]", help="A shape for every variant named. Repeatable.")] = None,
    case: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A shape of a real model, see --list. Repeatable.")] = None,
    suite: Annotated[
        str | None, typer.Option(metavar="NAME", help="A list of cases with its own defaults for the options below, see --list.")
    ] = None,
    mode: Annotated[list[str] | None, typer.Option(help="fwd, fwdbwd or decode. Repeatable.", show_default=", ".join(PLAIN.modes))] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            help="auto, or an implementation; for rwkv7 and kda also raw: auto with raw decays. Repeatable.",
            show_default=", ".join(PLAIN.impls),
        ),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            help=f"loop, fla, fla_recurrent or a rung of wkv-ladder; of the delta rule also fla_bounded, flash_kda, cudnn, flash_qla or"
            f" flash_rwkv; sdpa for {FUNCTION}; or none. The first is the baseline.",
            show_default=f"loop; sdpa for {FUNCTION}",
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Dtype of q, k and v: {', '.join(DTYPES)}.", show_default=PLAIN.dtype)] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default=PLAIN.device)] = None,
    threads: Threads = None,
    seconds: Annotated[float | None, typer.Option(help="Time for each candidate on each shape.", show_default=f"{PLAIN.seconds:g}")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers to this file, after each case.")
    ] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a picture to this png, pdf or svg file.")] = None,
    from_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", metavar="FILE", help="Measure nothing: show, and draw, a file that --json wrote. Repeatable: runs on one device."
        ),
    ] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and the suites, and stop.")] = False,
) -> None:
    """Time variants of the recurrence and of the delta rule beside the token loop or other projects, or softmax attention beside torch's.

    Every candidate is first compared with the float64 oracle. A wrong one is reported and not timed, and the exit code is 1. Then the
    candidates are timed in turn, so that noise of the machine affects all of them. The table shows the median, the quartiles, the speed
    relative to the baseline, the error, and the floor: a copy of as many bytes as the call must move, timed in the same turns. On a GPU
    it also shows the GPU time, the host time, the peak memory and the first call. The first call compiles what is not in a cache; empty
    Triton's cache on disk to measure a cold start.

    Without --shape, --case and --suite, a variant is measured at its first model in --list.

    [bold]Examples[/bold]

      penstock bench rwkv6

      penstock bench rwkv6 gla --shape 1,1024,32,64 --mode fwd --mode fwdbwd

      penstock bench rwkv6 --shape 1,64,32,64 --shape 1,256,32,64 --shape 1,1024,32,64 --plot time.png

      penstock bench --case rwkv6-7b-decode-64 --mode decode --impl cpu --impl chunkwise --json decode.json

      penstock bench gla --shape 8,2048,32,64 --device cuda --dtype bfloat16 --peer fla --peer loop

      penstock bench softmax_attention --device cuda --dtype bfloat16 --impl triton

      penstock bench --suite gpu-training --json training.json --plot training.png

      penstock bench --suite gates --json gates.json --plot gates.png

      penstock bench kda --suite delta-gates --peer fla --json kda-fla.json

      penstock bench --from kda-fla.json --from kda-cudnn.json --plot kda.png

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
    if from_files:
        _check_alone(variants, shape, case, suite, mode, impl, peers, dtype, device, threads, seconds, json_file)
        _show_record(console, joined([Record.read(path) for path in from_files]), plot_file)
        return
    if variants == [LADDER] and suite is None:
        variants, suite = None, LADDER
    defaults = PLAIN if suite is None else suite_named(suite)
    seconds = defaults.seconds if seconds is None else seconds
    options = Options(dtype or defaults.dtype, device or defaults.device, seconds, seed)
    modes = _checked(variants or [], mode or defaults.modes, options)
    jobs = _jobs(variants or [], shape or [], case or [], impl or [], peers or [], defaults, modes)
    machine = use_cores(context, threads, options.device)
    command = shlex.join(["penstock", *sys.argv[1:]])
    measurements, failed = _measure_all(console, jobs, options, command, machine, json_file)
    timed = any(measurement.timings for measurement in measurements)
    if measurements:
        print_measurements(console, measurements)
        if json_file is not None:
            console.print(f"numbers: {json_file}", highlight=False, soft_wrap=True)
    if timed:
        _plot(console, Record.of(command, options.device, measurements, machine), plot_file)
    for line in [*failed, *["Nothing was measured."] * (not timed)]:
        console.print(line, style="bold red", markup=False, highlight=False, soft_wrap=True)
    if failed or not timed or any(one.fault for measurement in measurements for one in measurement.untimed):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Options:
    """Options that all jobs share."""

    dtype: str
    device: str
    seconds: float
    seed: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]


class Job(NamedTuple):
    """A case in a mode, with the names of its candidates."""

    case: Case
    mode: Mode
    impls: Sequence[str]
    peers: Sequence[str]


def _checked(variants: Sequence[str], modes: Sequence[str], options: Options) -> list[Mode]:
    """Raise for every wrong option; return the modes, each once."""
    complaints = Complaints("bench")
    check_names(complaints, "variant", variants, VARIANTS)
    check_names(complaints, "mode", modes, MODES)
    check_names(complaints, "dtype", [options.dtype], DTYPES)
    check_device(complaints, options.device)
    check_seconds(complaints, options.seconds)
    check_seed(complaints, options.seed)
    complaints.raise_any()
    return [mode for mode in MODES if mode in modes]


def _check_alone(*others: object) -> None:
    """Raise RangeError if an option that asks for a measurement is given together with --from."""
    if any(one is not None and one != [] for one in others):
        complaints = Complaints("bench")
        complaints.add(RangeError, "--from", "given without variants and with no option but --plot", "others", "It measures nothing.")
        complaints.raise_any()


def _jobs(
    variants: Sequence[str],
    shapes: Sequence[str],
    case_names: Sequence[str],
    impls: Sequence[str],
    peers: Sequence[str],
    defaults: Suite,
    modes: Sequence[Mode],
) -> list[Job]:
    """List what to measure; raise for every option that does not fit the others."""
    jobs = []
    for mode in modes:
        for case in _cases(variants, shapes, case_names, defaults, mode):
            known = peer_names(case.variant)
            default_peers = [name for name in defaults.peers if name in known] or known[:1]
            chosen = peers or ([] if "none" in defaults.peers else default_peers)
            default_impls = [name for name in defaults.impls if name != raw.NAME or name in raw.names(case.variant)]
            jobs.append(Job(case, mode, impls or default_impls, [name for name in chosen if name != "none"]))
    complaints = Complaints("bench")
    for variant in dict.fromkeys(job.case.variant for job in jobs):
        check_candidates(complaints, variant, impls, peers)
    complaints.raise_any()
    for job in jobs:
        if job.case.variant == FUNCTION:
            softmax.check_case(job.mode, job.case.shape)
        else:
            check_decode_shape(job.mode, job.case.shape)
    return jobs


def _cases(variants: Sequence[str], shapes: Sequence[str], case_names: Sequence[str], suite: Suite, mode: Mode) -> list[Case]:
    """List the cases of a mode. Variants select among a suite's cases; every variant given must have a case."""
    named = [case_named(name) for name in case_names]
    selected = [case for case in suite.cases if not variants or case.variant in variants]
    complaints = Complaints("bench")
    if not variants and not named and not selected:
        rule = f"given: one or more of {', '.join(VARIANTS)}"
        complaints.add(RangeError, "variant", rule, "none", "Or name a --case; --list shows them.")
    if shapes and not variants:
        complaints.add(RangeError, "variant", "given with --shape", "none", "For example penstock bench rwkv6 --shape 1,54,32,64.")
    for case in named:
        if variants and case.variant not in variants:
            complaints.add(RangeError, "case", f"a shape of {' or '.join(variants)}", f"{case.name!r}, of {case.variant}", "Use --shape.")
    with_case = {case.variant for case in named + selected}
    for variant in variants:
        if suite.cases and not shapes and variant not in with_case:
            complaints.add(RangeError, "variant", f"one of suite {suite.name}", repr(variant), "Use --shape.")
    complaints.raise_any()
    if FUNCTION in (*variants, *with_case):
        softmax.check_case(mode)
    cases = named + selected
    for variant in variants:
        cases += [Case(text, variant, Shape.parse(text), "given by --shape") for text in shapes]
        if not shapes and variant not in with_case:
            cases += default_cases(variant, mode == "decode")
    return cases


def _measure_all(
    console: Console, jobs: Sequence[Job], options: Options, command: str, machine: Machine, json_file: Path | None
) -> tuple[list[Measurement], list[str]]:
    """Measure the jobs; also return a line for each that failed. Writes the file after each job, for runs that are interrupted."""
    measurements: list[Measurement] = []
    failed: list[str] = []
    with console.status("measuring", spinner="line") as status:
        for job in jobs:
            status.update(f"{job.case.variant}, {job.mode}, {job.case.shape.text}")
            try:
                measurements.append(_measured(job, options))
            except PenstockError:
                raise
            except Exception as failure:  # out of memory, for example: the other jobs are still measured
                failed.append(f"{job.case.name}, {job.mode}, was not measured: {one_line(failure)}")
                continue
            if json_file is not None:
                Record.of(command, options.device, measurements, machine).write(json_file)
    return measurements, failed


def _measured(job: Job, options: Options) -> Measurement:
    case, mode = job.case, job.mode
    if case.variant == FUNCTION:
        return softmax.measure(case, mode, options.torch_dtype, options.device, options.seconds, job.impls, job.peers, options.seed)
    given = options.torch_dtype, options.device, options.seed, case.gates, case.groups, case.slots and mode == "decode"
    x = inputs(case.variant, case.shape, *given)
    candidates = [peer(name, x, mode) for name in job.peers] + [raw.own(name, x, mode) for name in job.impls]
    return measure(case.name, x, mode, candidates, options.seconds, keep_going=True)


def _show_record(console: Console, record: Record, plot_file: Path | None) -> None:
    """Print the tables of a record, and draw it."""
    profiles = [one for one in record.measurements if one.profiled]
    for measurement in profiles:
        print_profile(console, measurement)
    if len(profiles) < len(record.measurements):
        print_measurements(console, [one for one in record.measurements if not one.profiled])
    _plot(console, record, plot_file)


def _plot(console: Console, record: Record, path: Path | None) -> None:
    if path is None:
        return
    paths = [path]
    if len(record.measurements) == 1 and record.measurements[0].profiled:
        plot_profile(record.measurements[0], path, record.place)
    else:
        paths = plot_measurements(record.measurements, path, record.place)
    for drawn in paths:
        console.print(f"picture: {drawn}", highlight=False, soft_wrap=True)
