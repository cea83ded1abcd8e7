"""Pictures of measurements.

- Cases of several distributions of decays: lines of GPU time against the distribution.
- Cases of several strengths of decays: a picture for each shape, of lines against the strength (``strengths.py``).
- Every variant at several lengths or batch sizes, other sizes equal: lines of time against size on logarithmic axes.
- Several cases and more than one candidate: bars of the speed relative to the baseline.
- Otherwise: dots of the time of every candidate.
- Profiles: two bars for every candidate, the end-to-end time and the time of its kernels.
- A training run: its losses against time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from ..tokens.distributions import GATES
from . import strengths
from .figure import (
    FAINT,
    INK,
    MARKERS,
    OURS,
    check_plot,
    colours,
    grid,
    lighter,
    logarithmic,
    logarithmic_sizes,
    new_figure,
    plain_name,
    save,
    spread,
    write_title,
)
from .measure import Measurement, Timing
from .report import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KERNELS = 0.55
"""Share of white in the colours of kernels in pictures of profiles."""
MODES = {"fwd": "forward", "fwdbwd": "forward and backward", "decode": "decode step"}


def plot_measurements(measurements: Sequence[Measurement], path: Path, subtitle: str = "") -> list[Path]:
    """Draw lines, bars or dots, see the docstring of this file. ``subtitle`` names the device and the versions.

    Returns the paths of the pictures: ``path``, or with several a path beside it for each.
    """
    check_plot(path)
    if strengths.is_by_strength(measurements):
        return _plot_strengths(measurements, path, subtitle)
    _plot(measurements, path, subtitle)
    return [path]


def _plot_strengths(measurements: Sequence[Measurement], path: Path, subtitle: str) -> list[Path]:
    """Draw a picture for each variant, shape and dtype, with a panel for each mode."""
    shapes: dict[tuple[str, str, str], dict[tuple[str, ...], list[Measurement]]] = {}
    for one in measurements:
        panels = shapes.setdefault((one.variant, one.sizes, one.dtype), {})
        panels.setdefault((one.variant, one.mode, one.dtype), []).append(one)
    names, found = _names(measurements), []
    dtypes = {dtype for *_, dtype in shapes}
    for (variant, sizes, dtype), panels in shapes.items():
        end = "-".join((variant, sizes.replace(",", "x").replace("/", "of"), *([dtype] if len(dtypes) > 1 else [])))
        found.append(path if len(shapes) == 1 else path.with_name(f"{path.stem}-{end}{path.suffix}"))
        figure = _panels(panels, lambda axes, panel: strengths.draw(axes, panel, names), across=2, width=7.2)
        strengths.explain_marks(figure)
        save(figure, found[-1], subtitle)
    return found


def _plot(measurements: Sequence[Measurement], path: Path, subtitle: str) -> None:
    panels: dict[tuple[str, ...], list[Measurement]] = {}
    if all(measurement.gates in GATES for measurement in measurements):
        for measurement in measurements:
            panels.setdefault((measurement.variant, measurement.mode, measurement.dtype, measurement.shape.text), []).append(measurement)
        if any(len(panel) > 1 for panel in panels.values()):
            save(_panels(panels, _gates, across=2), path, subtitle)
            return
        panels = {}
    for measurement in measurements:
        panels.setdefault((measurement.kind, measurement.mode, measurement.dtype), []).append(measurement)
    lines = all(_axis(panel) for panel in panels.values())
    cases = {(measurement.kind, measurement.shape) for measurement in measurements}
    if not lines and len(cases) > 1 and all(len(one.timings) + len(one.untimed) > 1 for one in measurements):
        figure = _bars(measurements)
    else:
        figure = _panels(panels, _lines if lines else _dots)
    save(figure, path, subtitle)


def plot_profile(measurement: Measurement, path: Path, subtitle: str = "") -> None:
    """Draw two bars for each profiled candidate: the end-to-end time of a call, and the time of its kernels."""
    check_plot(path)
    rows = [(timing, timing.profile) for timing in measurement.timings if timing.profile is not None]
    work = "operators" if measurement.device == "cpu" else "kernels"
    figure = new_figure(8.4, 0.62 * len(rows) + 1.8)
    axes = figure.subplots()
    bars = [(place, timing.milliseconds, seen.kernel_milliseconds) for place, (timing, seen) in enumerate(rows)]
    shortest = min((min(times) for _, *times in bars), default=1.0)
    for place, *times in bars:
        name = rows[place][0].candidate
        colour = colours([name])[plain_name(name)]
        for time, offset, shade in zip(times, (-0.2, 0.2), (colour, lighter(colour, KERNELS))):
            axes.barh(place + offset, time, height=0.38, color=shade, label=f"_{name}")
            axes.annotate(duration(time), (time, place + offset), (5, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)
    axes.set_xlim(shortest / 3, max((max(times) for _, *times in bars), default=1.0) * 3)
    logarithmic(axes.xaxis)
    axes.set_yticks(range(len(rows)), [timing.candidate for timing, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("milliseconds of one call, logarithmic", color=INK)
    write_title(axes, f"{measurement.kind}: {MODES[measurement.mode]}, {measurement.dtype}", _shared_sizes([measurement]))
    for label, colour in (("end to end", FAINT), (f"{work} only", lighter(FAINT, KERNELS))):
        axes.barh(0, 0, color=colour, label=label)
    figure.legend(loc="outside upper right", ncols=2, fontsize=9, frameon=False)
    save(figure, path, subtitle)


def plot_losses(
    seconds: Sequence[float], losses: Sequence[float], held_out: tuple[float, float], path: Path, title: str, subtitle: str = ""
) -> None:
    """Draw a curve of training losses against time, and the losses of held-out text before and after the training as points."""
    check_plot(path)
    figure = new_figure(7.6, 4.2)
    axes = figure.subplots()
    axes.plot(seconds, losses, color=OURS, linewidth=2.2, label="training text")
    axes.plot((0, seconds[-1]), held_out, color=INK, marker="o", markersize=8, linestyle="none", clip_on=False, zorder=3)
    for colour, text, at, loss, right, up in (
        (OURS, "training text", seconds[len(seconds) // 3], losses[len(losses) // 3], 6, 10),
        (INK, f"held-out text: {held_out[0]:.2f}", 0.0, held_out[0], 10, 0),
        (INK, f"held-out text: {held_out[1]:.2f}", seconds[-1], held_out[1], -100, -16),
    ):
        axes.annotate(text, (at, loss), (right, up), textcoords="offset points", va="center", color=colour)
    axes.set_ylim(0, 1.12 * max(*losses, *held_out))  # room for labels above the curve
    axes.set_xlim(0, None)
    axes.set_xlabel("seconds of training", color=INK)
    axes.set_ylabel("loss, nats per byte", color=INK)
    grid(axes, "y")
    write_title(axes, title, "", pad=12)
    save(figure, path, subtitle)


def _panels(
    panels: dict[tuple[str, ...], list[Measurement]], kind: Callable[[Axes, list[Measurement]], None], across: int = 3, width: float = 5.6
) -> Figure:
    """One panel for each variant, mode, dtype and further part of its key, side by side."""
    across = min(len(panels), across)
    down = -(-len(panels) // across)
    figure = new_figure(max(7.6, width * across), 4.6 * down + 0.3)
    places = figure.subplots(down, across, squeeze=False).flat
    for axes, ((variant, mode, dtype, *_), panel) in zip(places, panels.items()):
        kind(axes, panel)
        write_title(axes, f"{variant}: {MODES[mode]}, {dtype}", _shared_sizes(panel))
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    return figure


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
    texts = {name: f"{name} = {values.copy().pop()}" for name, values in shared if len(values) == 1}
    if panel[0].groups is not None and "H" in texts:
        texts["H"] += f" ({panel[0].groups} of q and k)"
    return ",  ".join(texts.values())


def _names(measurements: Sequence[Measurement]) -> dict[str, str]:
    """Names of the candidates in the picture, with the implementation or backend that ran if it is the same everywhere."""
    names: dict[str, set[str]] = {}
    for name in (timing.candidate for measurement in measurements for timing in measurement.timings):
        names.setdefault(plain_name(name), set()).add(name)
    shown = {kind: next(iter(full)) if len(full) == 1 else kind for kind, full in names.items()}
    own = {"auto": "penstock", "raw": "penstock, raw"}
    return {kind: own[kind] + name.removeprefix(kind) if kind in own else name for kind, name in shown.items()}


def _timing(measurement: Measurement, kind: str) -> Timing | None:
    """The fastest of the candidates of a kind, such as the backends of "sdpa"; None if none was timed."""
    found = (timing for timing in measurement.timings if plain_name(timing.candidate) == kind)
    return min(found, key=lambda timing: timing.milliseconds, default=None)


def _lines(axes: Axes, panel: list[Measurement]) -> None:
    axis = _axis(panel) or "T"
    panel = sorted(panel, key=lambda measurement: getattr(measurement.shape, axis))
    values = [getattr(measurement.shape, axis) for measurement in panel]
    floor = [measurement.copy.milliseconds for measurement in panel]
    axes.plot(values, floor, color=FAINT, linestyle=(0, (4, 3)), linewidth=1.4)
    ends = [(floor[-1], values[-1], "copy of the\nsame bytes", FAINT)]
    names = _names(panel)
    shades = colours(names)
    for (kind, name), marker in zip(names.items(), cycle(MARKERS)):
        colour = shades[kind]
        points = [(getattr(one.shape, axis), timing) for one in panel if (timing := _timing(one, kind)) is not None]
        x = [size for size, _ in points]
        axes.fill_between(
            x, [one.quartiles[0] for _, one in points], [one.quartiles[1] for _, one in points], color=colour, alpha=0.18, linewidth=0
        )
        axes.plot(x, [one.milliseconds for _, one in points], color=colour, marker=marker, markersize=5.5, linewidth=2.2, label=kind)
        ends.append((points[-1][1].milliseconds, x[-1], name, colour))
    logarithmic_sizes(axes.xaxis, values)
    logarithmic(axes.yaxis)
    axes.set_xlabel({"T": "tokens T", "B": "sequences B"}[axis], color=INK)
    axes.set_ylabel("time of one call, milliseconds", color=INK)
    grid(axes, "y")
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
    names = _names(panel)
    shades = colours(names)
    for (kind, name), marker in zip(names.items(), cycle(MARKERS)):
        colour = shades[kind]
        for part in parts:
            points = [(places[one.gates], timing.own_milliseconds) for one in part if (timing := _timing(one, kind)) is not None]
            axes.plot(*zip(*points), color=colour, marker=marker, markersize=5.5, linewidth=2.2, label=kind)
        if (last := _timing(panel[-1], kind)) is not None:
            ends.append((last.own_milliseconds, len(panel) - 1.0, name.partition(" (")[0], colour))
    axes.set_ylim(bottom=0)
    labels = [f"$\\mu$ = {gates[2:]}" if gates.startswith("mu") else gates for gates in places]
    axes.set_xticks(range(len(panel)), labels, rotation=30, ha="right")
    axes.set_xlabel(r"log decays $g = -\exp(x + \mu)$, x normal", color=INK)
    axes.set_ylabel("GPU time of one call, milliseconds", color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    grid(axes, "y")
    ends = sorted(ends)
    heights = spread([y for y, *_ in ends], axes.get_ylim()[1] * 0.085)
    for (y, x_end, name, colour), at in zip(ends, heights):
        axes.annotate(name, (x_end, y), (x_end + 0.25, at), fontsize=9.5, color=colour, va="center", annotation_clip=False)


def _label(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write the name of each line at its end; move labels that would overlap."""
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    ends = sorted(ends)
    heights = spread([math.log(y) for y, *_ in ends], 0.085 * math.log(high / low))
    for (y, x, name, colour), at in zip(ends, heights):
        place = (x * (right / left) ** 0.025, math.exp(at))
        axes.annotate(name, (x, y), place, textcoords=axes.transData, fontsize=9.5, color=colour, va="center", annotation_clip=False)


def _dots(axes: Axes, panel: list[Measurement]) -> None:
    """One row for each candidate and shape. Dots, because a logarithmic axis has no zero for bars."""
    rows = [(measurement, timing) for measurement in panel for timing in measurement.timings]
    shades = colours(_names(panel))
    for place, (_, timing) in enumerate(rows):
        first, third = timing.quartiles
        colour = shades[plain_name(timing.candidate)]
        axes.plot(
            [first, third], [place, place], color=colour, linewidth=6, alpha=0.3, solid_capstyle="round", label=f"_{timing.candidate}"
        )
        axes.plot(timing.milliseconds, place, color=colour, marker="o", markersize=9, label=timing.candidate)
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
    logarithmic(axes.xaxis)
    axes.set_xlabel("time of one call, milliseconds", color=INK)
    grid(axes, "both")


def _bars(measurements: Sequence[Measurement]) -> Figure:
    """One panel for each mode and dtype; a block of rows for each variant, a row for each shape, a bar for each candidate."""
    panels: dict[tuple[str, str], list[Measurement]] = {}
    for measurement in measurements:
        panels.setdefault((measurement.mode, measurement.dtype), []).append(measurement)
    first = _first(measurements[0])
    names = _names(measurements)
    others = [kind for kind in names if kind != plain_name(first)]
    shades = colours(others)
    places, headers = _places(measurements, max(1, len(others)))
    height = max(places.values()) + max(1, len(others))
    figure = new_figure(1.6 + 4.7 * len(panels), 0.25 * height + 1.6)
    sides = figure.subplots(1, len(panels), squeeze=False, sharey=True).flat
    for axes, ((mode, dtype), panel) in zip(sides, panels.items()):
        fastest = max((times for one in panel for times in _times(one).values()), default=1.0)
        axes.set_xlim(0, max(1.2, fastest) * 1.34)  # room for the label of the longest bar
        axes.axvline(1, color=FAINT, linestyle=(0, (4, 3)), linewidth=1.2, zorder=3)
        for measurement in panel:
            place = places[measurement.kind, measurement.shape.text]
            for one in measurement.timings:
                if plain_name(one.candidate) != plain_name(first):
                    kind = plain_name(one.candidate)
                    _bar(axes, measurement, one, place + others.index(kind), shades[kind])
        axes.set_ylim(height, -0.6)
        axes.set_xlabel(f"times as fast as {first}", color=INK)
        grid(axes, "x")
        write_title(
            axes, f"{MODES[mode]}, {dtype}", f"beside the bars: time of one call; {first} is the dashed line", pad=20, at=1 + 0.35 / height
        )
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    axes = sides[0]
    axes.set_yticks([place + max(0, len(others) - 1) / 2 for place in places.values()], [text for _, text in places])
    for variant, place in headers.items():
        where = axes.get_yaxis_transform()
        axes.annotate(variant, (0, place), (-3.5, 0), where, "offset points", ha="right", va="center", fontweight="bold", color=INK)
    marks = [axes.barh(0, 0, color=shades[kind], label=names[kind]) for kind in others]
    figure.legend(
        handles=marks, loc="outside upper right", ncols=max(1, min(len(marks), int(figure.get_figwidth() / 2.4))), fontsize=9, frameon=False
    )
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
        axes.barh(place, times, height=0.72, color=colour, zorder=2, label=f"_{timing.candidate}")
    at = max(length, 1.0)  # right of the dashed line
    axes.annotate(text, (at, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK if times else FAINT)
