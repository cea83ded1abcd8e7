"""Tables for the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..call.families import families
from ..tables import Numbers
from ..verify.finding import LAYERS, Finding
from ..verify.machine import Machine
from .cases import CASES
from .measure import Measurement, Timing
from .suites import SUITES


def print_machine(console: Console, machine: Machine, tables: Iterable[tuple[str, str]]) -> None:
    """Print the machine and the launch tables in use. Long lines are wrapped within their column."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in (*machine.lines(), *((f"table {arch}", line) for arch, line in tables)):
        table.add_row(Text(f"  {name}"), Text(text))
    console.print(table)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Print a table of each family for each device, then the refusals and the failures."""
    for device in dict.fromkeys(finding.device for finding in findings):
        here = [finding for finding in findings if finding.device == device]
        for family in families():
            selected = [finding for finding in here if finding.variant in family.variants]
            if selected:
                console.print(f"\nLargest error against the float64 {family.oracle}, on {device}", style="table.title", highlight=False)
                console.print(_errors(family.variants, selected))
        if of_chains := [finding for finding in here if finding.variant == LAYERS]:
            title = f"Largest error of fused chains of layers against their formulas in float64, on {device}"
            console.print("\n" + title, style="table.title", highlight=False)
            console.print(_errors_of_chains(of_chains))
        _print_refusals(console, here)
    for finding in findings:
        if finding.failed:
            pair = finding.error or 0.0, finding.budget or 0.0
            digits = visible_digits([pair])
            detail = finding.reason or f"error {_exponent(pair[0], digits)}, allowed {_exponent(pair[1], digits)}"
            form = f" ({finding.form})" if finding.form else ""
            where = f"{finding.implementation}{form}, {finding.variant}, {finding.dtype} on {finding.device}"
            console.print(Text(f"  WRONG: {where}: {finding.result}: {detail}", style="bold red"), soft_wrap=True)


def _print_refusals(console: Console, here: list[Finding]) -> None:
    """Print one line for all implementations that cannot run on this machine, and one for each other reason."""
    console.print()
    absent = dict.fromkeys(finding.implementation for finding in here if finding.absent)
    if absent:
        console.print(Text(f"not available on this machine: {', '.join(absent)}", style="dim"))
    refused: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for finding in here:
        if finding.reason is not None and not finding.failed and not finding.absent:
            refused[finding.implementation, finding.reason][finding.dtype] = None
    for (implementation, reason), dtypes in refused.items():
        console.print(Text(f"{implementation} did not run {', '.join(dtypes)}: {reason}", style="dim"))


def _errors(variants: Sequence[str], findings: list[Finding]) -> Table:
    """A block of rows for each implementation, one for each dtype: its largest error for every variant."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    table.add_column("impl")
    table.add_column("dtype")
    for variant in variants:
        table.add_column(variant.replace("_", "\n"), justify="right", vertical="bottom")
    table.add_column("limit", justify="right", style="dim", vertical="bottom")
    blocks: dict[str, dict[str, list[Finding]]] = defaultdict(lambda: defaultdict(list))
    for finding in findings:
        blocks[finding.implementation][finding.dtype].append(finding)
    for implementation, dtypes in blocks.items():
        ran = {dtype: found for dtype, found in dtypes.items() if any(one.error is not None or one.failed for one in found)}
        rows = [[Text(dtype), *_cells(variants, found)] for dtype, found in ran.items()]
        if rows:
            table.add_row(implementation.replace("_", "_\n"), *(Text("\n").join(column) for column in zip(*rows)))
    return table


def _errors_of_chains(findings: list[Finding]) -> Table:
    """A row for each form: in each dtype the error that is largest relative to the allowed one, which differs between results."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    dtypes = list(dict.fromkeys(finding.dtype for finding in findings if finding.dtype != "all"))
    for name in ("chain", "form"):
        table.add_column(name)
    for dtype in dtypes:
        table.add_column(dtype, justify="right")
    rows: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        rows[finding.implementation, finding.form].append(finding)
    for (chain, form), found in rows.items():
        worst = [_worst([finding for finding in found if finding.dtype in (dtype, "all")]) for dtype in dtypes]
        table.add_row(chain, form, *(_cell(one, 1) for one in worst))
    return table


def _cells(variants: Sequence[str], found: list[Finding]) -> list[Text]:
    """The worst result of every variant, and the largest budget."""
    limit = max((finding.budget for finding in found if finding.budget), default=None)
    worst = [_worst([finding for finding in found if finding.variant == variant]) for variant in variants]
    digits = visible_digits([(one.error or 0.0, one.budget or 0.0) for one in worst if isinstance(one, Finding)], limit)
    return [*(_cell(one, digits) for one in worst), Text("" if limit is None else _exponent(limit, digits))]


def _worst(found: list[Finding]) -> Finding | str:
    """The error that is largest relative to its budget; or a word if there is none."""
    if any(finding.failed and finding.error is None for finding in found):
        return "failed"
    measured = [finding for finding in found if finding.error is not None and finding.budget]
    return max(measured, key=lambda finding: (finding.error or 0) / (finding.budget or 1)) if measured else "-"


def _cell(worst: Finding | str, digits: int) -> Text:
    if isinstance(worst, str):
        return Text(worst, style="bold red" if worst == "failed" else "dim")
    return Text(_exponent(worst.error or 0.0, digits), style="bold red" if worst.failed else "green")


def visible_digits(pairs: Iterable[tuple[float, float]], limit: float | None = None) -> int:
    """The decimals with which an error is visibly within its budget or above it. ``limit``: the budget shown for all errors.

    >>> visible_digits([(1e-7, 2e-6)]), visible_digits([(3.92e-3, 3.91e-3)])
    (1, 2)
    """
    for digits in range(1, 16):
        shown = [(float(_exponent(error, digits)), float(_exponent(budget, digits)), error <= budget) for error, budget in pairs]
        limited = limit is None or all(error <= float(_exponent(limit, digits)) for error, _, right in shown if right)
        if limited and all((error <= budget) is right for error, budget, right in shown):
            return digits
    return 16


def _exponent(value: float, digits: int) -> str:
    """A number with a short exponent.

    >>> _exponent(3.9e-3, 1), _exponent(0.0, 1)
    ('3.9e-3', '0')
    """
    if not value:
        return "0"
    mantissa, exponent, power = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}e{int(power)}" if exponent else mantissa


def print_measurements(console: Console, measurements: Sequence[Measurement]) -> None:
    """Print one table for each variant and mode, with a block of rows for each shape and distribution of decays."""
    groups: dict[tuple[str, str, str], list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        groups[measurement.variant, measurement.mode, measurement.dtype].append(measurement)
    for (variant, mode, dtype), group in groups.items():
        gpu, threads = group[0].copy.gpu is not None, group[0].copy.threads
        title = f"{variant}, {mode}, {dtype} on {group[0].device}" + ("" if gpu else f", {threads} thread{'s' * (threads > 1)}")
        table = Numbers("B,T,H,K,V", _columns(gpu), title=title)
        for measurement in group:
            _add_rows(table, measurement)
        table.print(console)
        for measurement in group:
            for one in measurement.untimed:
                reason = f"  {_shape(measurement)}: {one.candidate} {one.reason}"
                console.print(Text(reason, style="bold red" if one.fault else "yellow"), soft_wrap=True)
    notes = (
        "times as fast: relative to the baseline. floor: a copy of as many bytes as the call must move, timed in turn.\n"
        "of floor: the floor's time over the candidate's. error: against the float64 oracle, checked before timing."
    )
    if any(one.copy.gpu is not None for one in measurements):
        notes += (
            "\nmedian, quartiles: end to end. GPU: GPU time, from a replayed CUDA graph; of floor: by GPU time.\n"
            "host: until the call returns. memory: peak beyond the inputs. first call: with compilation and autotuning."
        )
    console.print(Text(notes, style="dim"))
    for name, why in dict.fromkeys(_without_graph(measurements)):
        console.print(Text(f"No GPU time of {name}: {why}", style="dim"), soft_wrap=True)


def _columns(gpu: bool) -> list[str]:
    gpu_times, more = (["GPU", "host"], ["memory", "first\ncall"]) if gpu else ([], [])
    return ["median", "quartiles", *gpu_times, "times\nas fast", "of\nfloor", "error", *more]


def _without_graph(measurements: Sequence[Measurement]) -> Iterator[tuple[str, str]]:
    for measurement in measurements:
        for timing in measurement.timings:
            if timing.gpu is not None and timing.gpu.not_captured is not None:
                yield f"{timing.candidate}, {measurement.variant}, {measurement.mode}", timing.gpu.not_captured


def _shape(measurement: Measurement) -> str:
    return f"{measurement.sizes}  {measurement.gates}".rstrip()


def _add_rows(table: Numbers, measurement: Measurement) -> None:
    base = measurement.baseline
    best = min((one.milliseconds for one in measurement.timings), default=0.0)
    table.add(Text(_shape(measurement), style="bold"))
    for timing in measurement.timings:
        name = f"  {timing.candidate}" + (f", {timing.threads} thread" if timing.threads < measurement.copy.threads else "")
        median = Text(duration(timing.milliseconds), style="bold green" if timing.milliseconds == best else "")
        times = "-" if base is None else _digits(base.milliseconds / timing.milliseconds)
        gpu_times, more = _gpu_cells(timing)
        cells = [*gpu_times, times, f"{measurement.of_floor(timing):.1%}", f"{timing.error:.0e}", *more]
        table.add(name, median, _spread(timing), *cells)
    moved = f"{_digits(measurement.moved_bytes / 1e6)} MB, {_digits(measurement.bandwidth / 1e9)} GB/s"
    gpu_times, _ = _gpu_cells(measurement.copy)
    table.add("  floor", duration(measurement.copy.milliseconds), moved, *gpu_times, style="dim", ends=True)


def _gpu_cells(timing: Timing) -> tuple[list[str], list[str]]:
    """Cells of GPU time and host time, and cells of memory and the first call. Empty on a CPU."""
    gpu = timing.gpu
    if gpu is None:
        return [], []
    gpu_time = "-" if gpu.milliseconds is None else duration(gpu.milliseconds)
    first = "" if timing.first_call_seconds is None else duration(timing.first_call_seconds * 1e3)
    return [gpu_time, duration(gpu.host_microseconds * 1e-3)], [f"{gpu.peak_bytes / 2**20:.0f} MiB", first]


def _spread(timing: Timing) -> str:
    """The first and the third quartile, in the unit of the median."""
    if timing.samples == 1:
        return "one sample"
    factor, _ = _unit(timing.milliseconds)
    return " - ".join(_digits(quartile * factor) for quartile in timing.quartiles)


def _unit(milliseconds: float) -> tuple[float, str]:
    return next(((factor, unit) for factor, unit in ((1e-3, "s"), (1.0, "ms")) if milliseconds * factor >= 1), (1e3, "us"))


def _digits(value: float) -> str:
    """A number with three digits and no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def duration(milliseconds: float) -> str:
    """A time with three digits, in s, ms or us.

    >>> duration(0.0213), duration(14.31), duration(2540.0)
    ('21.3 us', '14.3 ms', '2.54 s')
    """
    factor, unit = _unit(milliseconds)
    return f"{_digits(milliseconds * factor)} {unit}"


def print_cases(console: Console) -> None:
    """Print the table of cases, then each suite with one row for each shape and its variants."""
    in_suites = {case.name for suite in SUITES for case in suite.cases}
    cases = [case for case in CASES if case.name not in in_suites]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("case", "B,T,H,K,V"):
        table.add_column(name, overflow="fold")
    table.add_column("model")
    for variant in dict.fromkeys(case.variant for case in cases):
        table.add_row(Text(variant, style="bold"))
        here = [case for case in cases if case.variant == variant]
        for case in here:
            table.add_row(f"  {case.name}", case.shape.text, case.model, end_section=case is here[-1])
    console.print(table)
    for suite in SUITES:
        console.print(Text.assemble((f"--suite {suite.name}", "bold"), f": {suite.summary}"))
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("case", overflow="fold")
        table.add_column("variants")
        previous = ""
        for shape in dict.fromkeys(case.shape for case in suite.cases):
            here = [case for case in suite.cases if case.shape == shape]
            more, previous = (f"\n{here[0].model}" if here[0].model != previous else ""), here[0].model
            name = here[0].name.replace(here[0].kind, "VARIANT")
            table.add_row(name, Text.assemble(" ".join(case.kind for case in here), (more, "dim")))
        console.print(table)


def print_profile(console: Console, measurement: Measurement) -> None:
    """Print one row for each candidate: the end-to-end time and the counts of the profiler. Then the candidates that were not profiled."""
    gpu, base = measurement.device != "cpu", measurement.baseline
    work, threads = ("kernel", "") if gpu else ("operator", f", {measurement.copy.threads} thread{'s' * (measurement.copy.threads > 1)}")
    title = f"{measurement.kind}, {measurement.mode}, {measurement.dtype} on {measurement.device}{threads}"
    columns = ["end\nto end", "times\nas fast", "error", f"all\n{work}s", f"slowest {work}", "its\ntime"]
    columns += ["launches" if gpu else "operators", "layout\nconversion", "end to end\nprofiled"]
    table = Numbers(f"B,T,H,K,V\n{','.join(map(str, measurement.shape))}", columns, title=title, left=[f"slowest {work}"])
    for one in measurement.timings:
        seen = one.profile
        if seen is not None:
            times = "-" if base is None else _digits(base.milliseconds / one.milliseconds)
            clock = [one.candidate, duration(one.milliseconds), times, f"{one.error:.0e}"]
            slowest = seen.slowest if len(seen.slowest) <= 40 else f"{seen.slowest[:37]}..."
            work_of_a_call = [duration(seen.kernel_milliseconds), slowest, duration(seen.slowest_milliseconds), f"{seen.launches:.0f}"]
            table.add(*clock, *work_of_a_call, duration(seen.layout_milliseconds), Text(duration(seen.milliseconds), "dim"))
    table.print(console)
    for refused in measurement.untimed:
        console.print(Text(f"  {refused.candidate} {refused.reason}", "bold red" if refused.fault else "yellow"), soft_wrap=True)
    counted = "kernels, copies and fills on the GPU" if gpu else "operators of torch and native kernels, by self time"
    notes = (
        "end to end: the median, without the profiler. The columns after error are means of torch.profiler's counts.\n"
        f"{work}s: {counted}. layout conversion: those that only move data.\n"
        "end to end, profiled: with the overhead of the profiler."
    )
    console.print(Text(notes, style="dim"))
