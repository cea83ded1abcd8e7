"""Pictures of measurements.

- Cases of several distributions of decays: lines of GPU time against the distribution.
- Every variant at several lengths or batch sizes, other sizes equal: lines of time against size on logarithmic axes.
- Several cases and more than one candidate: bars of the speed relative to the baseline.
- Otherwise: dots of the time of every candidate.
- Profiles: two bars for every candidate, the end-to-end time and the time of its kernels.
- A training run: its losses against time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Complaints, MissingExtra, RangeError
from ..verify.inputs import GATES
from .measure import Measurement, Timing
from .report import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette, safe for colour-blind readers."""
MARKERS = "osD^vP"
INK, FAINT = "#222222", "#8a8a8a"
FORMATS = (".png", ".pdf", ".svg")
MODES = {"fwd": "forward", "fwdbwd": "forward and backward", "decode": "decode step"}


def check_plot(path: Path) -> None:
    """Raise RangeError for an unknown file type, MissingExtra without matplotlib."""
    if path.suffix not in FORMATS:
        complaints = Complaints("plot")
        complaints.add(RangeError, "file", f"named *{', *'.join(FORMATS)}", repr(path.name))
        complaints.raise_any()
    _figures()


def _figures() -> Any:
    try:
        from matplotlib.figure import Figure  # needs no display, and does not change the global state of pyplot
    except ImportError as error:
        raise MissingExtra.of("plot", "matplotlib", "plot") from error
    return Figure


def plot_measurements(measurements: Sequence[Measurement], path: Path, subtitle: str = "") -> None:
    """Draw lines, bars or dots, see the docstring of this file. ``subtitle`` names the device and the versions."""
    check_plot(path)
    panels: dict[tuple[str, ...], list[Measurement]] = {}
    if all(measurement.gates for measurement in measurements):
        for measurement in measurements:
            panels.setdefault((measurement.variant, measurement.mode, measurement.dtype, measurement.shape.text), []).append(measurement)
        if any(len(panel) > 1 for panel in panels.values()):
            _save(_grid(panels, _gates, across=2), path, subtitle)
            return
        panels = {}
    for measurement in measurements:
        panels.setdefault((measurement.kind, measurement.mode, measurement.dtype), []).append(measurement)
    lines = all(_axis(panel) for panel in panels.values())
    cases = {(measurement.kind, measurement.shape) for measurement in measurements}
    if not lines and len(cases) > 1 and all(len(one.timings) + len(one.untimed) > 1 for one in measurements):
        figure = _bars(measurements)
    else:
        figure = _grid(panels, _lines if lines else _dots)
    _save(figure, path, subtitle)


def plot_profile(measurement: Measurement, path: Path, subtitle: str = "") -> None:
    """Draw two bars for each profiled candidate: the end-to-end time of a call, and the time of its kernels."""
    check_plot(path)
    rows = [(timing, timing.profile) for timing in measurement.timings if timing.profile is not None]
    work = "operators" if measurement.device == "cpu" else "kernels"
    figure = _figure(8.4, 0.62 * len(rows) + 1.8)
    axes = figure.subplots()
    bars = [(place, timing.milliseconds, seen.kernel_milliseconds) for place, (timing, seen) in enumerate(rows)]
    axes.set_xscale("log")
    shortest = min((min(times) for _, *times in bars), default=1.0)
    for place, *times in bars:
        for time, offset, colour in zip(times, (-0.2, 0.2), (COLOURS[0], COLOURS[4])):
            axes.barh(place + offset, time, height=0.38, color=colour)
            axes.annotate(duration(time), (time, place + offset), (5, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)
    axes.set_xlim(shortest / 3, max((max(times) for _, *times in bars), default=1.0) * 3)
    axes.set_yticks(range(len(rows)), [timing.candidate for timing, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("milliseconds of one call, logarithmic", color=INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _title(axes, f"{measurement.kind}: {MODES[measurement.mode]}, {measurement.dtype}", _shared_sizes([measurement]), pad=24, at=1.025)
    for label, colour in (("end to end", COLOURS[0]), (f"{work} only", COLOURS[4])):
        axes.barh(0, 0, color=colour, label=label)
    figure.legend(loc="outside upper right", ncols=2, fontsize=9, frameon=False)
    _save(figure, path, subtitle)


def plot_losses(
    seconds: Sequence[float], losses: Sequence[float], held_out: tuple[float, float], path: Path, title: str, subtitle: str = ""
) -> None:
    """Draw a curve of training losses against time, and the losses of held-out text before and after the training as points."""
    check_plot(path)
    figure = _figure(7.6, 4.2)
    axes = figure.subplots()
    axes.plot(seconds, losses, color=COLOURS[0], linewidth=2.2)
    axes.plot((0, seconds[-1]), held_out, color=COLOURS[1], marker="o", markersize=8, linestyle="none", clip_on=False, zorder=3)
    for n, text, at, loss, right, up in (
        (0, "training text", seconds[len(seconds) // 3], losses[len(losses) // 3], 6, 10),
        (1, f"held-out text: {held_out[0]:.2f}", 0.0, held_out[0], 10, 0),
        (1, f"held-out text: {held_out[1]:.2f}", seconds[-1], held_out[1], -100, -16),
    ):
        axes.annotate(text, (at, loss), (right, up), textcoords="offset points", va="center", color=COLOURS[n])
    axes.set_ylim(0, None)
    axes.set_xlim(0, None)
    axes.set_xlabel("seconds of training", color=INK)
    axes.set_ylabel("loss, nats per byte", color=INK)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    _title(axes, title, "", pad=12, at=1.025)
    _save(figure, path, subtitle)


def _save(figure: Figure, path: Path, subtitle: str) -> None:
    """Write the figure, with the subtitle at its foot, in the format of the path's suffix. Makes missing folders."""
    if subtitle:
        figure.text(0.995, 0.004, subtitle, ha="right", va="bottom", fontsize=7.5, color=FAINT)
        below = 0.22 / figure.get_figheight()
        figure.set_layout_engine("constrained", rect=(0, below, 1, 1 - below))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _figure(width: float, height: float) -> Figure:
    return _figures()(figsize=(width, height), dpi=160, facecolor="white", layout="constrained")  # type: ignore[no-any-return]


def _grid(panels: dict[tuple[str, ...], list[Measurement]], kind: Callable[[Axes, list[Measurement]], None], across: int = 3) -> Figure:
    """One panel for each variant, mode, dtype and further part of its key, side by side."""
    across = min(len(panels), across)
    down = -(-len(panels) // across)
    figure = _figure(max(7.6, 5.6 * across), 4.6 * down + 0.3)
    grid = figure.subplots(down, across, squeeze=False)
    for axes, ((variant, mode, dtype, *_), panel) in zip(grid.flat, panels.items()):
        kind(axes, panel)
        _title(axes, f"{variant}: {MODES[mode]}, {dtype}", _shared_sizes(panel), pad=24, at=1.025)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    return figure


def _title(axes: Axes, text: str, below: str, pad: float, at: float) -> None:
    axes.set_title(text, loc="left", fontsize=12, fontweight="bold", color=INK, pad=pad)
    axes.text(0, at, below, transform=axes.transAxes, fontsize=9, color=FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, which="both", labelsize=9)


def _axis(panel: list[Measurement]) -> str | None:
    """The only size that differs within the panel, T or B; None if there is a single shape or several sizes differ."""
    for axis in ("T", "B"):
        others = {measurement.shape._replace(**{axis: 0}) for measurement in panel}
        if len(others) == 1 and len({measurement.shape for measurement in panel}) == len(panel) > 1:
            return axis
    return None


def _shared_sizes(panel: list[Measurement]) -> str:
    """The sizes that all shapes share, as text."""
    shared = [(name, {getattr(measurement.shape, name) for measurement in panel}) for name in panel[0].shape._fields]
    return ",  ".join(f"{name} = {values.copy().pop()}" for name, values in shared if len(values) == 1)


def _kind(candidate: str) -> str:
    """The candidate's name without what differs from shape to shape: the implementation that "auto" ran, or the backend of "sdpa"."""
    return candidate.partition(" (")[0] if candidate.startswith(("auto (", "sdpa (")) else candidate


def _names(measurements: Sequence[Measurement]) -> dict[str, str]:
    """Names of the candidates in the picture. "auto" and "sdpa" get the implementation or backend if it is the same everywhere."""
    names: dict[str, set[str]] = {}
    for name in (timing.candidate for measurement in measurements for timing in measurement.timings):
        names.setdefault(_kind(name), set()).add(name)
    shown = {kind: next(iter(full)) if len(full) == 1 else kind for kind, full in names.items()}
    return {kind: "penstock" + name.removeprefix("auto") if kind == "auto" else name for kind, name in shown.items()}


def _lines(axes: Axes, panel: list[Measurement]) -> None:
    axis = _axis(panel) or "T"
    panel = sorted(panel, key=lambda measurement: getattr(measurement.shape, axis))
    values = [getattr(measurement.shape, axis) for measurement in panel]
    floor = [measurement.copy.milliseconds for measurement in panel]
    axes.plot(values, floor, color=FAINT, linestyle=(0, (4, 3)), linewidth=1.4)
    ends = [(floor[-1], values[-1], "copy of the\nsame bytes", FAINT)]
    for (kind, name), colour, marker in zip(_names(panel).items(), COLOURS * 3, MARKERS * 3):
        points = [
            (getattr(measurement.shape, axis), timing)
            for measurement in panel
            for timing in measurement.timings
            if _kind(timing.candidate) == kind
        ]
        x = [size for size, _ in points]
        axes.fill_between(
            x, [one.quartiles[0] for _, one in points], [one.quartiles[1] for _, one in points], color=colour, alpha=0.18, linewidth=0
        )
        axes.plot(x, [one.milliseconds for _, one in points], color=colour, marker=marker, markersize=5.5, linewidth=2.2)
        ends.append((points[-1][1].milliseconds, x[-1], name, colour))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    close = [value for value, following in pairwise(values) if following < 1.6 * value]  # their tick labels would overlap
    axes.set_xticks(values, ["" if value in close else str(value) for value in values])
    axes.set_xlabel({"T": "tokens T", "B": "sequences B"}[axis], color=INK)
    axes.set_ylabel("time of one call, milliseconds", color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    _label(axes, ends)


def _gates(axes: Axes, panel: list[Measurement]) -> None:
    """GPU time against the distribution of decays. Log-normal ones are joined by lines, the others are separate points."""
    panel = sorted(panel, key=lambda measurement: GATES.index(measurement.gates))
    places = {measurement.gates: float(place) for place, measurement in enumerate(panel)}
    parts = [[one for one in panel if one.gates.startswith("mu")], *([one] for one in panel if not one.gates.startswith("mu"))]
    for part in parts:
        x = [places[measurement.gates] for measurement in part]
        axes.plot(x, [one.floor for one in part], color=FAINT, linestyle=(0, (4, 3)), marker="_", linewidth=1.4)
    ends = [(panel[-1].floor, len(panel) - 1.0, "copy of the\nsame bytes", FAINT)]
    for (kind, name), colour, marker in zip(_names(panel).items(), COLOURS[1::-1] + COLOURS[2:], MARKERS):
        for part in parts:
            points = [
                (places[one.gates], timing.own_milliseconds) for one in part for timing in one.timings if _kind(timing.candidate) == kind
            ]
            axes.plot([x for x, _ in points], [y for _, y in points], color=colour, marker=marker, markersize=5.5, linewidth=2.2)
        last = [timing.own_milliseconds for timing in panel[-1].timings if _kind(timing.candidate) == kind]
        ends += [(time, len(panel) - 1.0, name.partition(" (")[0], colour) for time in last]
    axes.set_ylim(bottom=0)
    labels = [f"$\\mu$ = {gates[2:]}" if gates.startswith("mu") else gates for gates in places]
    axes.set_xticks(range(len(panel)), labels, rotation=30, ha="right")
    axes.set_xlabel(r"log decays $g = -\exp(x + \mu)$, x normal", color=INK)
    axes.set_ylabel("GPU time of one call, milliseconds", color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    spacing, at = axes.get_ylim()[1] * 0.085, 0.0
    for y, x_end, name, colour in sorted(ends):
        at = max(y, at + spacing)
        axes.annotate(name, (x_end, y), (x_end + 0.25, at), fontsize=9.5, color=colour, va="center", annotation_clip=False)


def _label(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write the name of each line at its end; move labels that would overlap."""
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    spacing, last = (high / low) ** 0.085, 0.0
    for y, x, name, colour in sorted(ends):
        at = max(y, last * spacing)
        last = at
        axes.annotate(name, (x, y), (x, at), textcoords=axes.transData, fontsize=9.5, color=colour, va="center", annotation_clip=False)
        axes.texts[-1].set_position((x * (right / left) ** 0.025, at))


def _dots(axes: Axes, panel: list[Measurement]) -> None:
    """One row for each candidate and shape. Dots, because a logarithmic axis has no zero for bars."""
    rows = [(measurement, timing) for measurement in panel for timing in measurement.timings]
    names = list(_names(panel))
    for place, (_, timing) in enumerate(rows):
        first, third = timing.quartiles
        colour = COLOURS[names.index(_kind(timing.candidate)) % len(COLOURS)]
        axes.plot([first, third], [place, place], color=colour, linewidth=6, alpha=0.3, solid_capstyle="round")
        axes.plot(timing.milliseconds, place, color=colour, marker="o", markersize=9)
        axes.annotate(
            duration(timing.milliseconds),
            (timing.milliseconds, place),
            (0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=9.5,
            color=INK,
        )
    several = len(panel) > 1
    labels = [f"{timing.candidate}\n{measurement.shape.text}" if several else timing.candidate for measurement, timing in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.7)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, high / 20) / 1.3, high * 1.3)
    axes.set_xlabel("time of one call, milliseconds", color=INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


def _bars(measurements: Sequence[Measurement]) -> Figure:
    """One panel for each mode and dtype; a block of rows for each variant, a row for each shape, a bar for each candidate."""
    panels: dict[tuple[str, str], list[Measurement]] = {}
    for measurement in measurements:
        panels.setdefault((measurement.mode, measurement.dtype), []).append(measurement)
    first = _first(measurements[0])
    names = _names(measurements)
    others = [kind for kind in names if kind != _kind(first)]
    places, headers = _places(measurements, max(1, len(others)))
    height = max(places.values()) + max(1, len(others))
    figure = _figure(1.6 + 4.7 * len(panels), 0.25 * height + 1.6)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)
    for axes, ((mode, dtype), panel) in zip(grid.flat, panels.items()):
        fastest = max((times for one in panel for times in _times(one).values()), default=1.0)
        axes.set_xlim(0, max(1.2, fastest) * 1.34)  # room for the label of the longest bar
        axes.axvline(1, color=FAINT, linestyle=(0, (4, 3)), linewidth=1.2, zorder=3)
        for measurement in panel:
            place = places[measurement.kind, measurement.shape.text]
            for one in measurement.timings:
                if _kind(one.candidate) != _kind(first):
                    row = others.index(_kind(one.candidate))
                    _bar(axes, measurement, one, place + row, COLOURS[(row + 1) % len(COLOURS)])
        axes.set_ylim(height, -0.6)
        axes.set_xlabel(f"times as fast as {first}", color=INK)
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        _title(
            axes, f"{MODES[mode]}, {dtype}", f"beside the bars: time of one call; {first} is the dashed line", pad=20, at=1 + 0.35 / height
        )
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    axes = grid[0, 0]
    axes.set_yticks([place + max(0, len(others) - 1) / 2 for place in places.values()], [text for _, text in places])
    for variant, place in headers.items():
        where = axes.get_yaxis_transform()
        axes.annotate(variant, (0, place), (-3.5, 0), where, "offset points", ha="right", va="center", fontweight="bold", color=INK)
    marks = [axes.barh(0, 0, color=COLOURS[(row + 1) % len(COLOURS)], label=names[kind]) for row, kind in enumerate(others)]
    figure.legend(handles=marks, loc="outside upper right", ncols=max(1, len(marks)), fontsize=9, frameon=False)
    return figure


def _first(measurement: Measurement) -> str:
    """Name of the baseline."""
    return measurement.first or measurement.timings[0].candidate


def _times(measurement: Measurement) -> dict[str, float]:
    """Speed of each candidate relative to the baseline; empty if the baseline was not timed."""
    base = measurement.baseline
    return {} if base is None else {one.candidate: base.milliseconds / one.milliseconds for one in measurement.timings if one is not base}


def _places(measurements: Sequence[Measurement], rows: int) -> tuple[dict[tuple[str, str], float], dict[str, float]]:
    """Position of the first bar of each variant and shape, and of the name of each variant."""
    places: dict[tuple[str, str], float] = {}
    headers: dict[str, float] = {}
    at = 0.0
    for variant in dict.fromkeys(measurement.kind for measurement in measurements):
        headers[variant] = at
        at += 1
        for text in dict.fromkeys(one.shape.text for one in measurements if one.kind == variant):
            places[variant, text] = at
            at += rows + (0.4 if rows > 1 else 0)
        at += 0.3
    return places, headers


def _bar(axes: Axes, measurement: Measurement, timing: Timing, place: float, colour: str) -> None:
    times = _times(measurement).get(timing.candidate)
    if times is None:
        text, length = f"{duration(timing.milliseconds)} ({_first(measurement)} was not timed)", 0.0
    else:
        text, length = f"{times:.1f}x  {duration(timing.milliseconds)}", times
        axes.barh(place, times, height=0.72, color=colour, zorder=2)
    at = max(length, 1.0)  # right of the dashed line
    axes.annotate(text, (at, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK if times else FAINT)
