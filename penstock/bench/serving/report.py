"""Runs as a table, a file of numbers and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ... import __version__
from ...tables import Numbers
from ..figure import INK, MARKERS, OURS, check_plot, grid, lighter, logarithmic, logarithmic_sizes, new_figure, save, write_title
from .load import Load, Run, Times
from .workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Report:
    """All runs of a command."""

    command: str
    url: str
    model: str
    workload: Workload
    runs: tuple[Run, ...]

    def write(self, path: Path) -> None:
        """Write everything as JSON. Makes missing folders."""
        content = {"penstock": __version__, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **asdict(self)}
        for plain, one in zip(content["runs"], self.runs):
            plain |= {"output_tokens_per_second": one.output_rate, "total_tokens_per_second": one.total_rate}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def print_runs(console: Console, runs: Sequence[Run]) -> None:
    """Print one row a run, and the reasons of failures."""
    columns = ["requests", "failed", "requests\n/s", "output\ntokens/s", "all\ntokens/s", "first\ntoken", "between\ntokens", "request"]
    table = Numbers("load", [*columns, "cached"])
    for one in runs:
        failed = sum(one.failed.values())
        table.add(
            str(one.load), str(one.requests), str(failed), f"{(one.requests - failed) / one.seconds:.2f}", f"{one.output_rate:.0f}",
            f"{one.total_rate:.0f}", _text(one.first), _text(one.between), _text(one.whole), f"{100 * one.cached_share:.0f} %",
        )  # fmt: skip
    table.print(console)
    console.print(Text("Times in milliseconds: 50th / 99th percentile.", style="dim"))
    for one in runs:
        for reason, count in one.failed.items():
            console.print(Text(f"  {one.load}: {count} failed: {reason}", style="bold red"), soft_wrap=True)


def _text(times: Times | None) -> str:
    return "-" if times is None else f"{1e3 * times.p50:.1f} / {1e3 * times.p99:.1f}"


def plot_runs(report: Report, path: Path) -> None:
    """Draw throughput and latencies against the number of clients and against the rate, for those that were measured."""
    check_plot(path)
    parts = [[one for one in report.runs if (one.load.clients is None) is opened] for opened in (False, True)]
    parts = [part for part in parts if part]
    figure = new_figure(11.4, 3.9 * len(parts) + 0.4)
    for row, part in zip(figure.subplots(len(parts), 3, squeeze=False), parts):
        part = sorted(part, key=lambda one: _place(one.load))
        x = [_place(one.load) for one in part]
        name = "requests a second" if part[0].load.clients is None else "clients"
        _line(row[0], x, [one.output_rate for one in part], "output", 0)
        write_title(row[0], "Throughput", "generated tokens a second")
        row[0].set_ylim(bottom=0)
        for axes, title, below, kind in (
            (row[1], "First token", "milliseconds", "first"),
            (row[2], "Between tokens", "milliseconds", "between"),
        ):
            for n, share in enumerate(("p50", "p99")):
                known = [(place, getattr(one, kind)) for place, one in zip(x, part) if getattr(one, kind) is not None]
                _line(axes, [place for place, _ in known], [1e3 * getattr(times, share) for _, times in known], share, n)
            write_title(axes, title, below)
            logarithmic(axes.yaxis)
            axes.legend(frameon=False, fontsize=9)
        for axes in row:
            logarithmic_sizes(axes.xaxis, x)
            axes.set_xlabel(name, color=INK)
            grid(axes, "y")
    save(figure, path, f"{report.model} at {report.url}; penstock {__version__}")


def _place(load: Load) -> float:
    return float(load.clients if load.clients is not None else load.rate or 0)


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], label: str, n: int) -> None:
    axes.plot(x, y, color=lighter(OURS, 0.5 * n), marker=MARKERS[n], markersize=5.5, linewidth=2.2, label=label)
