"""Pictures: every function that draws one has readable axes, whole texts and the colours of candidates."""

import importlib
import itertools
import pkgutil
import sys
import types
from dataclasses import replace

import matplotlib.figure
import pytest
from measurements import measured
from sampling import every

import penstock.bench
from penstock.bench import delta_peers, fla, ladder
from penstock.bench.candidates import loop
from penstock.bench.figure import FAINT, INK, OURS, PEERS, colours, lighter, plain_name, spread
from penstock.bench.measure import GpuTiming, Untimed
from penstock.bench.plot import KERNELS, plot_losses, plot_measurements, plot_profile
from penstock.bench.serving.load import Load, Run, Times
from penstock.bench.serving.report import Report, plot_runs
from penstock.bench.serving.workload import Lengths, Workload
from penstock.bench.trace import Profile
from penstock.recurrence.operators import FAMILY
from penstock.tokens.distributions import GATES, STRENGTHS
from penstock.tokens.shape import Shape
from penstock.verify.inputs import inputs

ONE, WIDE = Shape(1, 64, 2, 4, 4), Shape(2, 8, 4, 4, 4)
NAMES = ("fla", "token loop", "auto (triton_chunkwise)", "sdpa (flash)", "fla_recurrent")


def cases(*shapes, names=NAMES, scale=1.0):
    """A measurement of each shape; times grow with it."""
    found = []
    for n, shape in enumerate(shapes):
        one = measured("gla", shape, "fwd", *names)
        times = [scale * 1.7**n * 0.5**m for m in range(len(names))]
        timings = tuple(replace(x, milliseconds=time, quartiles=(0.9 * time, 1.2 * time)) for x, time in zip(one.timings, times))
        found.append(replace(one, timings=timings))
    return found


def profiled(**times):
    """A measurement whose candidates were profiled: milliseconds by name."""
    one = measured("gla", ONE, "fwd", *times)
    seen = [replace(one.timings[n], milliseconds=time, profile=counts(time / 3)) for n, time in enumerate(times.values())]
    return replace(one, timings=tuple(seen))


def counts(milliseconds):
    return Profile(3 * milliseconds, milliseconds, "kernel", milliseconds, 3.0, 0.0, 9, "")


def served(*loads):
    times = [Times(0.011 * 1.4**n, 0.0123 * 1.4**n) for n in range(len(loads))]
    runs = tuple(Run(load, 10, 5.0, 100, 0, 500, one, one, one) for load, one in zip(loads, times))
    return Report("penstock bench-serve", "http://127.0.0.1:8000", "model", Workload(Lengths(5, 5), Lengths(2, 4)), runs)


def lengths(*values):
    return [ONE._replace(T=value) for value in values]


GATED = [replace(cases(ONE)[0], mode=mode, case=f"gla-{gates}-a") for mode in ("fwd", "fwdbwd") for gates in GATES]
STRONG = [
    replace(
        cases(ONE, names=("fla", "auto (triton_chunkwise)", "raw (triton_chunkwise)"))[0],
        variant="kda",
        mode=mode,
        case=f"kda-{strength}-a",
        groups=1,
        untimed=(
            Untimed("fla_bounded", "wrong: its output has values that are not finite", False),
            Untimed("cudnn", "refuses: it is not installed", False),
        ),
    )
    for mode in ("fwd", "fwdbwd")
    for strength in STRENGTHS
]
PICTURES = {
    "two lengths": lambda path: plot_measurements(cases(*lengths(64, 128)), path, "somewhere"),
    "close lengths": lambda path: plot_measurements(cases(*lengths(64, 66)), path),
    "ragged lengths": lambda path: plot_measurements(cases(*lengths(54, 64, 2048)), path),
    "many lengths": lambda path: plot_measurements(cases(*lengths(*(2**n for n in range(1, 18)))), path),
    "batches": lambda path: plot_measurements(cases(ONE, ONE._replace(B=3), ONE._replace(B=256)), path),
    "close times": lambda path: plot_measurements(cases(*lengths(64, 65), names=NAMES[2:3], scale=1e-3), path),
    "bars": lambda path: plot_measurements(cases(ONE, WIDE), path, "somewhere"),
    "gates": lambda path: plot_measurements(GATED, path, "somewhere"),
    "strengths": lambda path: plot_measurements(STRONG, path, "somewhere"),
    "strengths, one of them timed": lambda path: plot_measurements([STRONG[0], replace(STRONG[1], timings=())], path),
    "dots": lambda path: plot_measurements(cases(ONE), path, "somewhere"),
    "one dot": lambda path: plot_measurements(cases(ONE, names=NAMES[2:3]), path),
    "profile": lambda path: plot_profile(profiled(fla=4.58, fla_recurrent=0.598, auto=0.195, cuda=0.0874), path, "somewhere"),
    "one profile": lambda path: plot_profile(profiled(auto=1.0), path),
    "losses": lambda path: plot_losses([0.0, 1.0, 2.0, 3.0], [5.0, 4.0, 3.0, 2.5], (5.1, 2.6), path, "A model", "somewhere"),
    "two steps": lambda path: plot_losses(
        [0.5, 1.0], [5.7, 4.4], (5.65, 3.7), path, "A model of 1,024,512 parameters, on bytes", "somewhere"
    ),
    "one load": lambda path: plot_runs(served(Load(clients=4)), path),
    "two loads": lambda path: plot_runs(served(Load(clients=1), Load(clients=2)), path),
    "rates": lambda path: plot_runs(served(Load(rate=0.5), Load(rate=3.0), Load(rate=3.5), Load(clients=1)), path),
    "many loads": lambda path: plot_runs(served(*(Load(clients=2**n) for n in range(11))), path),
}


@pytest.fixture(params=every(2, PICTURES), scope="module")
def picture(request, tmp_path_factory):
    """The figure, drawn."""
    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, path: figures.append(figure))
        PICTURES[request.param](tmp_path_factory.mktemp("pictures") / "a.png")
    (figure,) = figures
    figure.draw_without_rendering()
    return figure


def panels(figure):
    return [axes for axes in figure.axes if axes.get_visible()]


def ticks(axis):
    """The labelled ticks within the axis's limits."""
    low, high = sorted(axis.get_view_interval())
    return [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high and tick.label1.get_text()]


def test_every_function_that_draws_is_tested():
    modules = [importlib.import_module(one.name) for one in pkgutil.walk_packages(penstock.bench.__path__, "penstock.bench.")]
    drawing = {name for module in modules for name in vars(module) if name.startswith("plot_")}
    assert drawing == {name for draw in PICTURES.values() for name in draw.__code__.co_names if name.startswith("plot_")}


def test_logarithmic_axes_have_three_labelled_ticks(picture):
    for axis in (axis for axes in panels(picture) for axis in (axes.xaxis, axes.yaxis)):
        if axis.get_scale() == "log":
            assert len(ticks(axis)) >= 3
            assert not any(tick.label1.get_text() for tick in axis.get_minor_ticks())


def texts(figure):
    """All texts that are shown."""
    axes = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    labels = {tick.label1 for axis in axes for tick in axis.get_major_ticks()}
    hidden = labels - {tick.label1 for axis in axes if axis.axes.get_visible() for tick in ticks(axis)}
    return [one for one in figure.findobj(matplotlib.text.Text) if one.get_text() and one.get_visible() and one not in hidden]


def test_texts_do_not_overlap(picture):
    level = [text for text in texts(picture) if text.get_rotation() in (0, 90)]
    for one, other in itertools.combinations(level, 2):
        assert not one.get_window_extent().padded(-1).overlaps(other.get_window_extent().padded(-1)), (one, other)


def test_texts_are_within_the_picture(picture):
    edge = picture.bbox
    for text in texts(picture):
        box = text.get_window_extent()
        assert edge.x0 - 1 <= box.x0, text
        assert box.x1 <= edge.x1 + 1, text
        assert edge.y0 - 1 <= box.y0, text
        assert box.y1 <= edge.y1 + 1, text


def test_penstock_and_each_peer_have_one_colour(picture):
    drawn = {(line.get_label(), matplotlib.colors.to_hex(line.get_color())) for axes in panels(picture) for line in axes.lines}
    for axes in panels(picture):
        drawn |= {(bars.get_label(), matplotlib.colors.to_hex(bar.get_facecolor())) for bars in axes.containers for bar in bars}
    seen = {(plain_name(label.removeprefix("_")), colour) for label, colour in drawn}
    series = {
        "auto": OURS,
        "training text": OURS,
        "output": OURS,
        "p50": OURS,
        "p99": lighter(OURS, 0.5),
        "raw": lighter(OURS, 0.35),
        **PEERS,
    }
    known = {(name, shade) for name, colour in series.items() for shade in (colour, lighter(colour, KERNELS))}
    assert {(name, colour) for name, colour in seen if name in series} <= known
    assert any(colour == OURS for _, colour in seen)
    others = {colour for name, colour in seen if name not in series}
    assert others <= {shade for colour in (FAINT, INK, OURS) for shade in (colour, lighter(colour, KERNELS))}


def test_strengths_mark_times_end_to_end(tmp_path, monkeypatch):
    """A candidate whose calls cannot be captured has no GPU time."""
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, path: figures.append(figure))
    on_host = [replace(timing, gpu=GpuTiming(None, None, "it waits", 9.0, 1, 1)) for timing in STRONG[0].timings[:1]]
    plot_measurements([replace(one, timings=(*on_host, *one.timings[1:])) for one in STRONG[: len(STRENGTHS)]], tmp_path / "a.png")
    found = [text.get_text() for text in texts(figures[0])]
    assert [text for text in found if "end to end" in text] == ["fla (end to end)"]
    assert {"penstock", "penstock, raw"} <= {*found}


def test_every_peer_has_a_colour_of_its_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops", types.ModuleType("fla.ops"))
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    own = {
        loop(inputs("gla", ONE)).name,
        fla.candidate().name,
        fla.candidate(recurrent=True).name,
        fla.candidate(bounded=True).name,
        "sdpa",
    }
    assert own | {*ladder.RUNGS, *delta_peers.PACKAGES} == set(PEERS)
    assert len({OURS, *PEERS.values()}) == len(PEERS) + 1
    assert not set(PEERS) & {one.name for one in FAMILY.implementations}


def test_implementations_beside_each_other_are_shades():
    found = colours(["token loop", "auto (cpu)", "chunkwise", "reference"])
    assert (found["token loop"], found["auto"]) == (PEERS["token loop"], OURS)
    assert len(set(found.values())) == 4
    assert colours(["fla", "chunkwise"])["chunkwise"] == OURS


@pytest.mark.parametrize(
    ("places", "moved"), [([1.0, 5.0], [1, 5]), ([1.0, 1.0], [0.5, 1.5]), ([0.0, 0.9, 1.0], [-0.3667, 0.6333, 1.6333]), ([], [])]
)
def test_labels_are_moved_as_little_as_needed(places, moved):
    assert spread(places, 1.0) == pytest.approx(moved, abs=1e-3)
