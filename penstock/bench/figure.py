"""Shared by all pictures: files, colours of candidates, titles, logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import Complaints, MissingExtra, RangeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

OURS = "#0072b2"
"""Penstock's colour. It and those of peers are shades of Okabe and Ito's palette, which colour-blind readers can tell apart."""
PEERS = {
    "token loop": "#009e73",
    "fla": "#d55e00",
    "fla_recurrent": "#8a3d00",
    "fla_bounded": "#f0915c",
    "flash_kda": "#cc79a7",
    "cudnn": "#56b4a0",
    "flash_qla": "#b8a000",
    "flash_rwkv": "#7b5cc4",
    "sdpa": "#e69f00",
    "rung-atomics": "#4a1d38",
    "rung-register": "#72305a",
    "rung-wide": "#98477a",
    "rung-block": "#b8659a",
    "rung-shared": "#cf86b5",
}
"""Colours of peers by name. Every other candidate is Penstock's."""
MARKERS = "osD^vP"
INK, FAINT, GRID = "#222222", "#8a8a8a", "#e4e4e4"
FORMATS = (".png", ".pdf", ".svg")
LABELS = 3
"""Labelled ticks that a logarithmic axis has at least."""
APART = 0.1
"""Distance of sizes whose labels do not overlap, as a share of the axis."""


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


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes in inches."""
    return _figures()(figsize=(width, height), dpi=160, facecolor="white", layout="constrained")  # type: ignore[no-any-return]


def save(figure: Figure, path: Path, subtitle: str) -> None:
    """Write the figure, with the subtitle at its foot, in the format of the path's suffix. Makes missing folders."""
    if subtitle:
        figure.text(0.995, 0.004, subtitle, ha="right", va="bottom", fontsize=7.5, color=FAINT)
        below = 0.22 / figure.get_figheight()
        figure.set_layout_engine("constrained", rect=(0, below, 1, 1 - below))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def write_title(axes: Axes, text: str, below: str, pad: float = 24, at: float = 1.025) -> None:
    """Write a title, and a line ``below`` it at the height ``at`` in axes; style the frame."""
    axes.set_title(text, loc="left", fontsize=12, fontweight="bold", color=INK, pad=pad)
    axes.text(0, at, below, transform=axes.transAxes, fontsize=9, color=FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, which="both", labelsize=9)


def plain_name(candidate: str) -> str:
    """The candidate's name without the part that depends on the shape: the implementation that ran, or the backend of "sdpa"."""
    return candidate.partition(" (")[0] if candidate.startswith(("auto (", "raw (", "sdpa (")) else candidate


def colours(candidates: Iterable[str]) -> dict[str, str]:
    """A colour for each candidate of a picture: a peer's own, and Penstock's, with lighter ones for its further implementations."""
    names = list(dict.fromkeys(map(plain_name, candidates)))
    own = [name for name in names if name not in PEERS]
    return {name: PEERS.get(name) or lighter(OURS, 0.7 * own.index(name) / len(own)) for name in names}


def lighter(colour: str, share: float) -> str:
    """The colour mixed with this share of white."""
    return "#" + "".join(f"{round(255 * share + int(colour[n : n + 2], 16) * (1 - share)):02x}" for n in (1, 3, 5))


def grid(axes: Axes, axis: Literal["x", "y", "both"]) -> None:
    """Draw lines at the ticks of ``axis``, below everything else."""
    axes.grid(axis=axis, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def spread(places: Sequence[float], spacing: float) -> list[float]:
    """Move positions, in ascending order, as little as possible so that they are at least ``spacing`` apart."""
    groups: list[tuple[float, int]] = []  # centre and number of adjacent positions
    for place in places:
        centre, count = place, 1
        while groups and centre - groups[-1][0] < spacing * (count + groups[-1][1]) / 2:
            before, touching = groups.pop()
            centre, count = (before * touching + centre * count) / (touching + count), count + touching
        groups.append((centre, count))
    return [centre + spacing * (n - (count - 1) / 2) for centre, count in groups for n in range(count)]


def logarithmic(axis: Axis) -> None:
    """Make an axis with final limits logarithmic, with ticks that are labelled by round numbers, at least LABELS of them."""
    _scale(axis, 10)
    ticks = _round(*_interval(axis))
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])


def logarithmic_sizes(axis: Axis, sizes: Sequence[float]) -> None:
    """Make an axis logarithmic, labelled at the sizes that were measured, and at others if these are fewer than LABELS."""
    _scale(axis, 2)
    low, high = _interval(axis)
    powers = [2.0**n for n in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    near = APART * math.log(high / low)
    ticks = sorted(sizes)
    shown = [size for size, larger in zip(ticks, [*ticks[1:], math.inf]) if math.log(larger / size) >= near]
    for others in (powers, [1.5 * power for power in powers], _round(low, high)):
        if len(shown) < LABELS:
            for other in others:
                if low <= other <= high and all(abs(math.log(other / one)) >= near for one in shown):
                    shown.append(other)
    ticks = sorted({*ticks, *shown})
    axis.set_ticks(ticks, [f"{tick:g}" if tick in shown else "" for tick in ticks])


def _scale(axis: Axis, base: int) -> None:
    from matplotlib.ticker import NullFormatter

    (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log", base=base)
    axis.set_minor_formatter(NullFormatter())


def _interval(axis: Axis) -> tuple[float, float]:
    low, high = sorted(axis.get_view_interval())
    return low, high


def _round(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to ``high``: powers of 10; where these are fewer than LABELS, more of them."""
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high))
    every = max(1, (last - first) // 8)
    found: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        tens = range(first, last + 1, every)
        found = [value for ten in tens for digit in digits if low <= (value := float(f"{digit}e{ten}")) <= high]
        if len(found) >= LABELS:
            return found
    from matplotlib.ticker import MaxNLocator

    return [float(value) for value in MaxNLocator(4, min_n_ticks=LABELS + 2).tick_values(low, high) if low <= value <= high]
