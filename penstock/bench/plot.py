"""A picture of measurements: time against tokens or batch, both logarithmic; dots where there is only one size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Complaints, PenstockError, RangeError
from .measure import Measurement
from .report import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette, told apart with any kind of colour vision."""
MARKERS = "osD^vP"
INK, FAINT = "#222222", "#8a8a8a"
FORMATS = (".png", ".pdf", ".svg")
MODES = {"fwd": "forward", "fwdbwd": "forward and backward", "decode": "decode step"}


class MissingExtra(PenstockError, ImportError):
    """An optional package is needed and not installed."""


def check_plot(path: Path) -> None:
    """Raise, before anything is measured, if no picture could be written."""
    if path.suffix not in FORMATS:
        complaints = Complaints("plot")
        complaints.add(RangeError, "file", f"named *{', *'.join(FORMATS)}", repr(path.name))
        complaints.raise_any()
    _figures()


def _figures() -> Any:
    try:
        from matplotlib.figure import Figure  # draws without a display and leaves the global state of pyplot alone
    except ImportError as error:
        raise MissingExtra("plot: matplotlib is needed to draw, and not installed. pip install 'penstock[plot]'") from error
    return Figure


def draw(measurements: Sequence[Measurement], path: Path, subtitle: str = "") -> None:
    """One panel for each variant and mode, beside each other. ``subtitle`` says where it was measured."""
    check_plot(path)
    panels: dict[tuple[str, str, str], list[Measurement]] = {}
    for measurement in measurements:
        panels.setdefault((measurement.variant, measurement.mode, measurement.dtype), []).append(measurement)
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    figure = _figures()(figsize=(max(7.6, 5.6 * across), 4.6 * down + 0.3), dpi=160, facecolor="white", layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes, ((variant, mode, dtype), panel) in zip(grid.flat, panels.items()):
        (_lines if len(_sizes(panel)[1]) > 1 else _dots)(axes, panel)
        axes.set_title(f"{variant}: {MODES[mode]}, {dtype}", loc="left", fontsize=12, fontweight="bold", color=INK, pad=24)
        axes.text(0, 1.025, _held(panel), transform=axes.transAxes, fontsize=9, color=FAINT)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, which="both", labelsize=9)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    if subtitle:
        figure.text(0.995, 0.004, subtitle, ha="right", va="bottom", fontsize=7.5, color=FAINT)
        figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _sizes(panel: list[Measurement]) -> tuple[str, list[int]]:
    """Which size the panel runs over, T or B, and its values; T with one value if the panel has a single shape."""
    for axis in ("T", "B"):
        values = [getattr(measurement.shape, axis) for measurement in panel]
        if len(set(values)) == len(panel) > 1:
            return axis, values
    return "T", [panel[0].shape.T]


def _held(panel: list[Measurement]) -> str:
    """Name the sizes that all shapes share."""
    shared = [(name, {getattr(measurement.shape, name) for measurement in panel}) for name in panel[0].shape._fields]
    return ",  ".join(f"{name} = {values.copy().pop()}" for name, values in shared if len(values) == 1)


def _names(panel: list[Measurement]) -> list[str]:
    return list(dict.fromkeys(timing.candidate for measurement in panel for timing in measurement.timings))


def _lines(axes: Axes, panel: list[Measurement]) -> None:
    axis, _ = _sizes(panel)
    panel = sorted(panel, key=lambda measurement: getattr(measurement.shape, axis))
    values = [getattr(measurement.shape, axis) for measurement in panel]
    floor = [measurement.copy.milliseconds for measurement in panel]
    axes.plot(values, floor, color=FAINT, linestyle=(0, (4, 3)), linewidth=1.4)
    ends = [(floor[-1], values[-1], "copy of the\nsame bytes", FAINT)]
    for name, colour, marker in zip(_names(panel), COLOURS * 3, MARKERS * 3):
        points = [
            (getattr(measurement.shape, axis), timing)
            for measurement in panel
            for timing in measurement.timings
            if timing.candidate == name
        ]
        x = [size for size, _ in points]
        axes.fill_between(
            x, [one.quartiles[0] for _, one in points], [one.quartiles[1] for _, one in points], color=colour, alpha=0.18, linewidth=0
        )
        axes.plot(x, [one.milliseconds for _, one in points], color=colour, marker=marker, markersize=5.5, linewidth=2.2)
        ends.append((points[-1][1].milliseconds, x[-1], name, colour))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(values, [str(value) for value in values])
    axes.set_xlabel({"T": "tokens T", "B": "sequences B"}[axis], color=INK)
    axes.set_ylabel("time of one call, milliseconds", color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    _label(axes, ends)


def _label(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write each line's name at its end, moved apart where two would overlap."""
    low, high = axes.get_ylim()
    apart, last = (high / low) ** 0.085, 0.0
    for y, x, name, colour in sorted(ends):
        at = max(y, last * apart)
        last = at
        axes.annotate(name, (x, y), (x, at), textcoords=axes.transData, fontsize=9.5, color=colour, va="center", annotation_clip=False)
        axes.texts[-1].set_position((x * 1.13, at))


def _dots(axes: Axes, panel: list[Measurement]) -> None:
    """One row for each candidate and shape; a logarithmic axis has no zero for a bar to stand on."""
    rows = [(measurement, timing) for measurement in panel for timing in measurement.timings]
    names = _names(panel)
    for place, (_, timing) in enumerate(rows):
        first, third = timing.quartiles
        colour = COLOURS[names.index(timing.candidate) % len(COLOURS)]
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
