"""Records and pictures of measurements."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from measurements import SMALL, measured, refusing

from penstock import RangeError
from penstock.bench import plot
from penstock.bench.candidates import Candidate, ours
from penstock.bench.loop import token_loop
from penstock.bench.measure import Untimed, measure
from penstock.bench.plot import plot_measurements
from penstock.bench.record import Record
from penstock.errors import MissingExtra
from penstock.tokens.distributions import GATES
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
    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[plot\]'"):
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
        ("_dots", [measured("gla", ONE, "fwd", *TWO)]),
        ("_dots", [measured("gla", shape, "fwd", "auto (cpu)") for shape in (ONE, WIDE)]),
    ],
)
def test_pictures_show_what_differs_between_measurements(kind, rows, tmp_path, monkeypatch):
    drawn = set()
    for name in ("_lines", "_bars", "_dots", "_gates"):
        monkeypatch.setattr(plot, name, recording(drawn, name, getattr(plot, name)))
    plot_measurements(rows, tmp_path / "a.png", "somewhere")
    assert drawn == {kind}
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_pictures_distinguish_implementations_of_softmax_attention():
    names = ["sdpa (flash)", "penstock (triton)", "penstock (reference)"]
    assert plot._names([measured("softmax_attention", ONE, "fwd", *names)]) == {"sdpa": names[0], names[1]: names[1], names[2]: names[2]}


def test_pictures_name_what_auto_ran_only_if_it_is_the_same_everywhere():
    assert plot._names([measured("gla", ONE, "fwd", *TWO)]) == {"loop": "loop", "auto": "penstock (cpu)"}
    both = [measured("gla", ONE, "fwd", "auto (cpu)"), measured("gla", LONG, "fwd", "auto (reference)")]
    assert plot._names(both) == {"auto": "penstock"}
