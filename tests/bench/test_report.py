"""Records and pictures of measurements."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from measurements import SMALL, measured, refusing

from penstock import RangeError
from penstock.bench import plot, strengths
from penstock.bench.candidates import Candidate, ours
from penstock.bench.loop import token_loop
from penstock.bench.measure import Untimed, measure
from penstock.bench.plot import plot_measurements
from penstock.bench.record import Record, joined
from penstock.errors import MissingExtra
from penstock.tokens.distributions import GATES, STRENGTHS
from penstock.tokens.shape import Shape
from penstock.verify import oracle
from penstock.verify.inputs import inputs
from penstock.verify.machine import Machine

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_record_is_json_and_is_read_back(tmp_path):
    x = inputs("gla", SMALL)
    peer_ = Candidate("peer", refusing, token_loop, oracle.budget)
    measured = measure("small", x, "fwd", [ours("auto", x, "fwd"), peer_], seconds=0.002, keep_going=True)
    record = Record.of("penstock bench gla", "cpu", [measured], Machine.here())
    record.write(tmp_path / "new" / "record.json")
    content = json.loads((tmp_path / "new" / "record.json").read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert content["measurements"][0]["shape"] == SMALL._asdict()
    timing = content["measurements"][0]["timings"][0]
    assert timing["milliseconds"] == measured.timings[0].milliseconds
    assert timing["results"]["output"] == {"error": timing["error"], "allowed": 2e-6}
    assert Record.read(tmp_path / "new" / "record.json") == record


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_records_are_read(path):
    record = Record.read(path)
    assert record.measurements
    assert record.place.startswith(record.device)
    for measurement in record.measurements:
        assert (measurement.baseline is None) is (measurement.first in [one.candidate for one in measurement.untimed])


def test_other_files_are_refused(tmp_path):
    for content in ("{", "[]", "{}", '{"measurements": [3]}'):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(RangeError, match="file must be a record that penstock bench --json wrote"):
            Record.read(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [("mode", "sideways"), ("variant", 3), ("moved_bytes", None), ("shape", {"B": "x", "T": 1, "H": 1, "K": 1, "V": 1})],
)
def test_records_with_wrong_values_are_refused(tmp_path, name, value):
    path = tmp_path / "a.json"
    Record.of("penstock bench gla", "cpu", [measured("gla", SMALL, "fwd", "loop")], Machine.here()).write(path)
    content = json.loads(path.read_text())
    content["measurements"][0][name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(RangeError, match="file must be a record that penstock bench --json wrote"):
        Record.read(path)


@pytest.mark.parametrize(("name", "value"), [("milliseconds", "x"), ("milliseconds", 0), ("quartiles", [1.0]), ("error", None)])
def test_records_with_wrong_times_are_refused(tmp_path, name, value):
    path = tmp_path / "a.json"
    Record.of("penstock bench gla", "cpu", [measured("gla", SMALL, "fwd", "loop")], Machine.here()).write(path)
    content = json.loads(path.read_text())
    content["measurements"][0]["timings"][0][name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(RangeError, match="file must be a record that penstock bench --json wrote"):
        Record.read(path)


def test_drawing_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"pip install 'penstock-lm\[plot\]'"):
        plot_measurements([], tmp_path / "a.png")


ONE, LONG, WIDE = Shape(1, 8, 2, 4, 4), Shape(1, 16, 2, 4, 4), Shape(2, 8, 4, 4, 4)


TWO = ("loop", "auto (cpu)")


def recording(called, name, function):
    return lambda *given: called.add(name) or function(*given)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("_lines", [measured("gla", ONE, "fwd", *TWO), measured("gla", LONG, "fwd", *TWO)]),
        ("_lines", [measured("gla", ONE, "fwd", *TWO), measured("gla", ONE._replace(B=3), "fwd", *TWO)]),
        ("_bars", [measured("gla", ONE, "fwd", *TWO), measured("gla", WIDE, "fwd", "loop", "auto (reference)")]),
        ("_bars", [measured("gla", ONE, mode, *TWO) for mode in ("fwd", "fwdbwd")] + [measured("rwkv6", ONE, "fwd", *TWO)]),
        ("_bars", [measured("gla", shape, "fwd", "auto (cpu)", untimed=(Untimed("loop", "refuses", False),)) for shape in (ONE, WIDE)]),
        ("_bars", [measured("gla", shape, "fwd", untimed=(Untimed("loop", "refuses", False),) * 2) for shape in (ONE, WIDE)]),
        ("_bars", [measured("gla", shape, "fwd", "loop", "auto (cpu)", "chunkwise") for shape in (ONE, WIDE)]),
        ("_gates", [replace(measured("gla", ONE, mode, *TWO), case=f"gla-{x}-a") for mode in ("fwd", "fwdbwd") for x in GATES]),
        ("_dots", [replace(measured("gla", ONE, "fwd", *TWO), case="gla-mu2-a")]),
        ("draw", [replace(measured("kda", ONE, mode, *TWO), case=f"kda-{x}-a") for mode in ("fwd", "fwdbwd") for x in STRENGTHS]),
        ("_dots", [measured("gla", ONE, "fwd", *TWO)]),
        ("_dots", [measured("gla", shape, "fwd", "auto (cpu)") for shape in (ONE, WIDE)]),
    ],
)
def test_pictures_show_what_differs_between_measurements(kind, rows, tmp_path, monkeypatch):
    drawn = set()
    for name in ("_lines", "_bars", "_dots", "_gates"):
        monkeypatch.setattr(plot, name, recording(drawn, name, getattr(plot, name)))
    monkeypatch.setattr(strengths, "draw", recording(drawn, "draw", strengths.draw))
    plot_measurements(rows, tmp_path / "a.png", "somewhere")
    assert drawn == {kind}
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_each_shape_has_a_picture_of_its_strengths(tmp_path):
    rows = [replace(measured("kda", shape, "fwd", *TWO), case=f"kda-{x}-a") for shape in (ONE, LONG) for x in ("zero", "slow")]
    rows += [replace(measured("gated_delta_rule", ONE, "fwd", *TWO), case="gated_delta_rule-slow-a", groups=1)]
    found = plot_measurements(rows, tmp_path / "a.png")
    assert [path.name for path in found] == ["a-kda-1x8x2x4.png", "a-kda-1x16x2x4.png", "a-gated_delta_rule-1x8x1of2x4.png"]
    assert all(path.stat().st_size for path in found)


def test_marks_say_why_something_was_not_timed(tmp_path, monkeypatch):
    """A row of marks for each candidate that was not timed somewhere; its line has a gap there."""
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, *_: figures.append(figure))
    missing = {"slow": "wrong: its output is 0.5 from the float64 token loop", "resets": "refuses: RuntimeError: no"}
    rows = [replace(measured("kda", ONE, "fwd", *TWO), case=f"kda-{x}-a") for x in ("zero", "slow", "mu2", "resets")]
    for n, row in enumerate(rows):
        if row.gates in missing:
            untimed = (Untimed("loop", missing[row.gates], False), Untimed("cudnn", "refuses: it is not installed", False))
            rows[n] = replace(row, timings=row.timings[1:], untimed=untimed)
    plot_measurements(rows, tmp_path / "a.png")
    (axes,) = figures[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert [y != y for y in lines["loop"].get_ydata()] == [False, True, False, True]
    assert all(y == y for y in lines["auto"].get_ydata())
    marks = {(line.get_label(), line.get_xdata()[0], line.get_marker()) for line in axes.lines if line.get_label() in ("_loop", "_cudnn")}
    assert marks == {("_loop", 1, "x"), ("_loop", 3, "_"), ("_cudnn", 1, "_"), ("_cudnn", 3, "_")}


def run_of(*timed, untimed=(), device="a GPU", mode="fwd", packages=None):
    """A record of one measurement: milliseconds by candidate."""
    one = measured("kda", ONE, mode, *(name for name, _ in timed), untimed=untimed)
    one = replace(one, timings=tuple(replace(x, milliseconds=time) for x, (_, time) in zip(one.timings, timed)))
    return Record("penstock bench", device, (one,), Machine.here(), packages=packages or {})


def test_runs_of_the_same_calls_are_joined():
    """Each candidate keeps the run of its median time; what any run timed is timed."""
    runs = [
        run_of(("fla", 5.0), ("auto (cpu)", 3.0), packages={"flash-qla": "0.1.3"}),
        run_of(("cudnn", 2.0), ("auto (cpu)", 1.0), untimed=(Untimed("fla", "refuses: no", False), Untimed("x", "wrong: 1", False))),
        run_of(("auto (cpu)", 2.0), packages={"tilelang": "0.1.15"}),
        run_of(("auto (cpu)", 9.0), mode="fwdbwd"),
    ]
    found = joined(runs)
    first, second = found.measurements
    assert {one.candidate: one.milliseconds for one in first.timings} == {"fla": 5.0, "auto (cpu)": 2.0, "cudnn": 2.0}
    assert [one.candidate for one in first.untimed] == ["x"]
    assert [one.milliseconds for one in second.timings] == [9.0]
    assert found.packages == {"flash-qla": "0.1.3", "tilelang": "0.1.15"}
    assert joined(runs[:1]) is runs[0]


def test_runs_on_several_devices_are_not_joined():
    with pytest.raises(RangeError, match="--from must be given for records of one device, got a GPU, another"):
        joined([run_of(("fla", 5.0)), run_of(("fla", 5.0), device="another")])


def test_records_name_the_versions_of_timed_peers(tmp_path):
    one = run_of(("flash_qla", 5.0), packages={"flash-qla": "0.1.3", "FlashRWKV2": "0.1.0a17"})
    one.write(tmp_path / "a.json")
    again = Record.read(tmp_path / "a.json")
    assert again.packages == one.packages
    assert ", flash_qla 0.1.3;" in again.place
    assert "FlashRWKV2" not in again.place
    assert "fla " not in again.place


def test_pictures_distinguish_implementations_of_softmax_attention():
    names = ["sdpa (flash)", "penstock (triton)", "penstock (reference)"]
    assert plot._names([measured("softmax_attention", ONE, "fwd", *names)]) == {"sdpa": names[0], names[1]: names[1], names[2]: names[2]}


def test_pictures_name_what_auto_ran_only_if_it_is_the_same_everywhere():
    assert plot._names([measured("gla", ONE, "fwd", *TWO)]) == {"loop": "loop", "auto": "penstock (cpu)"}
    both = [measured("gla", ONE, "fwd", "auto (cpu)"), measured("gla", LONG, "fwd", "auto (reference)")]
    assert plot._names(both) == {"auto": "penstock"}
