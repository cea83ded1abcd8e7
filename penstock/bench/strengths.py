"""A panel of time against the strength of decays: a line for each implementation, and a row of marks for what was not timed.

A line has gaps where its implementation was not timed. Its row above the lines marks why: a wrong result, or a refusal or failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ..tokens.decays import FASTEST
from ..tokens.distributions import BOUND, STRENGTHS
from .figure import FAINT, INK, MARKERS, colours, grid, logarithmic, plain_name, spread
from .measure import Measurement, Untimed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "zero": "0",
    "tiny": r"$-10^{-8}$",
    "slow": r"log $\sigma(x)$ / 16",
    "fast": r"10 log $\sigma(x)$",
    "bounded": r"b $\sigma(2 x)$",
    "bound": r"b $\sigma(x + 6)$",
    "mu2": r"$-\exp(x + 2)$",
    "channels": "5 % at -100",
    "spikes": "1 % at -2661",
    "resets": "1 % at -inf",
}
"""What the axis says of each strength; the last three are as the third elsewhere."""
ROW = 0.065
"""Height of a row of marks, as a share of the panel."""
MARKS = {"wrong result": "x", "refuses or fails": "_"}


def is_by_strength(measurements: Sequence[Measurement]) -> bool:
    """Whether all have one of ``STRENGTHS``, and they differ in it."""
    found = {measurement.gates for measurement in measurements}
    return len(found) > 1 and found <= set(STRENGTHS)


def mark(one: Untimed) -> str:
    """The mark of a candidate that was not timed."""
    return MARKS["wrong result" if one.reason.startswith("wrong") else "refuses or fails"]


def draw(axes: Axes, panel: Sequence[Measurement], names: Mapping[str, str]) -> None:
    """Draw the panel of one variant, mode, dtype and shape. ``names``: what a candidate is called, by its plain name."""
    panel = sorted(panel, key=lambda measurement: STRENGTHS.index(measurement.gates))
    seen = [one.candidate for measurement in panel for one in measurement.timings]
    seen += [one.candidate for measurement in panel for one in measurement.untimed]
    kinds = list(dict.fromkeys(map(plain_name, seen)))
    shades = colours(kinds)
    ends = [_line(axes, [one.floor for one in panel], "copy of the\nsame bytes", FAINT, linestyle=(0, (4, 3)), linewidth=1.4)]
    rows = []
    for kind, marker in zip(kinds, cycle(MARKERS)):
        times = [
            next((one.own_milliseconds for one in measurement.timings if plain_name(one.candidate) == kind), None) for measurement in panel
        ]
        missing = {
            place: mark(one)
            for place, measurement in enumerate(panel)
            for one in measurement.untimed
            if plain_name(one.candidate) == kind and times[place] is None
        }
        name = names.get(kind, kind).partition(" (")[0]
        if any(time is not None for time in times):
            clock = " (end to end)" if _not_captured(panel, kind) else ""
            ends.append(_line(axes, times, name + clock, shades[kind], label=kind, marker=marker, markersize=5.5, linewidth=2.2))
        if missing:
            rows.append((kind, name, shades[kind], missing))
    _make_room(axes, min(time for measurement in panel for time in (measurement.floor, *_own_times(measurement))), len(rows))
    axes.set_xlim(-0.4, len(panel) - 0.6)
    axes.set_xticks(range(len(panel)), [LABELS[measurement.gates] for measurement in panel], rotation=30, ha="right")
    bound = FASTEST if panel[0].variant == "rwkv7" else BOUND
    axes.set_xlabel(f"log decays, x normal, b = {bound:.3g}", color=INK)
    axes.set_ylabel("time of one call, milliseconds" if panel[0].device == "cpu" else "GPU time of one call, milliseconds", color=INK)
    grid(axes, "y")
    _draw_rows(axes, rows, len(panel))
    _label(axes, ends, len(rows))


def explain_marks(figure: Figure) -> None:
    """Draw the legend of the marks."""
    marks = [figure.axes[0].plot([], [], marker=mark, color=INK, linestyle="none", label=text)[0] for text, mark in MARKS.items()]
    figure.legend(handles=marks, loc="outside upper right", ncols=len(marks), fontsize=9, frameon=False)


def _line(axes: Axes, times: Sequence[float | None], name: str, colour: str, **style: Any) -> tuple[float, float, str, str]:
    """Draw a line with gaps; return its end, name and colour."""
    axes.plot(range(len(times)), [float("nan") if time is None else time for time in times], color=colour, **style)
    place, time = [(place, time) for place, time in enumerate(times) if time is not None][-1]
    return time, float(place), name, colour


def _not_captured(panel: Sequence[Measurement], kind: str) -> bool:
    """Whether GPU times of a candidate are not known, so that its times end to end are drawn."""
    timings = (one for measurement in panel for one in measurement.timings if plain_name(one.candidate) == kind)
    return any(one.gpu is not None and one.gpu.milliseconds is None for one in timings)


def _own_times(measurement: Measurement) -> list[float]:
    return [one.own_milliseconds for one in measurement.timings]


def _make_room(axes: Axes, least: float, rows: int) -> None:
    """Make the axis logarithmic from below the least time, and move its top up by the rows of marks."""
    low, high = least / 1.3, axes.get_ylim()[1] * 1.15
    axes.set_ylim(low, low * (high / low) ** (1 / (1 - ROW * (rows + 0.5))))
    logarithmic(axes.yaxis)


def _draw_rows(axes: Axes, rows: Sequence[tuple[str, str, str, Mapping[int, str]]], across: int) -> None:
    """Draw the marks, and the name of each row at its end."""
    where = axes.get_xaxis_transform()
    for n, (kind, name, colour, marks) in enumerate(rows):
        height = 1 - ROW * (n + 0.5)
        for place, shape in marks.items():
            style: dict[str, Any] = {"marker": shape, "markersize": 7, "markeredgewidth": 2, "color": colour, "label": f"_{kind}"}
            axes.plot([place], [height], transform=where, linestyle="none", **style)
        axes.annotate(name, (across - 0.5, height), xycoords=where, fontsize=9.5, color=colour, va="center", annotation_clip=False)


def _label(axes: Axes, ends: list[tuple[float, float, str, str]], rows: int) -> None:
    """Write the name of each line right of the panel, below the names of rows; names that would overlap are moved."""
    to_share = axes.transData + axes.transAxes.inverted()
    ends = sorted(ends)
    heights = spread([float(to_share.transform((0, y))[1]) for y, *_ in ends], 0.075)
    excess = max(0.0, heights[-1] - (1 - ROW * (rows + 0.6)))
    right = axes.get_xlim()[1] + 0.1
    for (_, _, name, colour), height in zip(ends, heights):
        place = right, height - excess
        axes.annotate(name, place, xycoords=axes.get_xaxis_transform(), fontsize=9.5, color=colour, va="center", annotation_clip=False)
