"""``penstock demo``: its output at usual terminal widths, and its files."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from measurements import measured
from rich.console import Console
from typer.testing import CliRunner

from penstock.bench.record import Record
from penstock.bench.report import print_findings, print_machine
from penstock.call.families import trials
from penstock.cli import main
from penstock.cli.demo import MODEL_ROWS, print_models
from penstock.demo.serve import Answer
from penstock.demo.train import DEFAULT, MODELS, Point
from penstock.recurrence.operators import FAMILY
from penstock.recurrence.variants import VARIANTS
from penstock.softmax.operators import FAMILY as SOFTMAX
from penstock.verify.finding import Finding
from penstock.verify.machine import Machine
from penstock.verify.verify import findings

DEMO = sys.modules["penstock.cli.demo"]
"""The module. Its package has the command under the same name."""


@pytest.fixture
def lines(capsys):
    """Return the lines printed on a console of this width, and check that they fit."""

    def shown(width, show, *given):
        show(Console(width=width), *given)
        found = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert max(map(len, found)) <= width
        assert not any("…" in line for line in found), "text is cut off"
        return found

    return shown


@pytest.mark.parametrize("width", [80, 100, 140])
def test_model_table_has_two_header_lines_at_every_width(lines, width):
    slow = [replace(measured(case.variant, case.shape, "fwd", "loop", "auto (cpu)"), case=case.name) for case in MODEL_ROWS]
    slow = [
        replace(one, timings=(replace(one.timings[0], milliseconds=1370.0), replace(one.timings[1], milliseconds=11.1))) for one in slow
    ]
    _, title, *names, rule = lines(width, print_models, slow)[:5]
    assert title == "One layer's recurrence, forward, float32"
    assert set(rule) == {"─"}
    assert [name.split() for name in names] == [
        ["token", "times"],
        ["variant,", "as", "in", "B,T,H,K,V", "loop", "penstock", "as", "fast", "error"],
    ]
    rows = lines(width, print_models, slow)[5:]
    assert len(rows) == 2 * len(MODEL_ROWS), "a variant, and its model below"
    assert [row.split()[0] for row in rows[::2]] == [case.variant for case in MODEL_ROWS]
    assert rows[2].split() == ["retention", "1,1024,8,256,512", "1.37", "s", "11.1", "ms", "123", "1e-06"]


def test_absent_and_refusing_implementations_take_one_line(lines, monkeypatch, at_full_speed):
    """A reason that all dtypes share is printed once. Why an implementation is absent is printed with the machine."""
    right = FAMILY.named("reference")
    absent = [replace(right, name=f"absent_{n}", available=lambda: "this machine has none") for n in range(2)]
    picky = replace(right, name="picky", refuses=lambda problem, mode: "it takes other tensors")
    monkeypatch.setattr(FAMILY, "implementations", (right, *absent, picky))
    found = list(findings((trials()[0], trials()[-1])))
    for width in (80, 100, 140):
        shown = lines(width, print_findings, found)
        text = " ".join(shown[next(n for n, line in enumerate(shown) if line.startswith("not available")) :])
        assert text.startswith("not available on this machine: absent_0, absent_1")
        assert text.count("picky did not run float16, bfloat16, float32, float64: it takes other tensors") == 1
        assert not re.search(r"absent_\d did not run", text)
        machine = " ".join(" ".join(lines(width, print_machine, Machine.here(), [("sm_90", "no entries of yours")])).split())
        assert machine.count("not available: this machine has none") == 2
        assert machine.endswith("table sm_90 no entries of yours")


@pytest.mark.parametrize("reason", [None, "torch sees no GPU here"])
def test_softmax_kernels_are_absent_without_a_gpu(monkeypatch, reason):
    refused = {"refuses": lambda problem, mode: "its tensors are on cpu", "forms": lambda: ()}
    triton = replace(SOFTMAX.named("triton"), available=lambda: reason, **refused)
    monkeypatch.setattr(SOFTMAX, "implementations", (triton, SOFTMAX.named("sdpa"), SOFTMAX.named("reference")))
    of_softmax = tuple([one for one in trials() if one.operator.family is SOFTMAX])
    found = [one for one in findings(of_softmax, (torch.float32,)) if one.implementation == "triton"]
    wanted = {"its tensors are on cpu"} if reason is None else {reason}
    assert {(one.reason, one.absent, one.failed) for one in found} == {(text, reason is not None, False) for text in wanted}


@pytest.mark.parametrize("model", list(MODELS))
def test_demo_runs_through(model, tmp_path, monkeypatch, at_full_speed, check_in_float32):
    called = {}

    def train(folder, seconds, console, seed, architecture):
        called.update(folder=folder, seconds=seconds, seed=seed, architecture=architecture)
        return SimpleNamespace(
            parameters=10,
            tokens=20,
            seconds=1.0,
            loss_before=5.5,
            loss_after=2.25,
            sample="it says [this]",
            weights=folder / "weights.pth",
            curve=[Point(0.5, 10, 4.0), Point(1.0, 20, 2.5)],
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(DEMO, "train", train)
    monkeypatch.setattr(DEMO, "ask", lambda weights, prompt: Answer("http://127.0.0.1:1", f"[{weights.name}]", 19, 7))
    done = CliRunner().invoke(main, ["demo", "--quick", *([] if model == DEFAULT else ["--model", model])])
    assert done.exit_code == 0, done.output
    assert called == {"folder": Path("penstock-demo"), "seconds": 1.0, "seed": 0, "architecture": model}
    assert "it says [this]" in done.output
    assert "5.500" in done.output
    assert "POST http://127.0.0.1:1/v1/completions: 19 tokens in, 7 out" in done.output
    assert f"The with statement [{model}-bytes.pth]" in done.output
    for name in ("numbers.json", "speed.png", "training.png"):
        assert (tmp_path / "penstock-demo" / name).exists()
        assert f"penstock-demo/{name}" in done.output
    training = json.loads((tmp_path / "penstock-demo" / "numbers.json").read_text())["training"]
    assert training["loss_after"] == 2.25
    assert training["curve"][1] == {"seconds": 1.0, "tokens": 20, "loss": 2.5}
    assert Record.read(tmp_path / "penstock-demo" / "numbers.json").measurements
    assert max(map(len, done.output.splitlines())) <= 80


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1"])
def test_training_time_must_be_finite_and_positive(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(DEMO, "print_check", lambda *_: pytest.fail("work began"))
    done = CliRunner().invoke(main, ["demo", "--folder", str(tmp_path), "--seconds", seconds])
    assert done.exit_code == 2
    assert done.output == f"demo: seconds must be a finite number above 0, got {float(seconds)}.\n"


def test_other_models_are_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(DEMO, "print_check", lambda *_: pytest.fail("work began"))
    done = CliRunner().invoke(main, ["demo", "--folder", str(tmp_path), "--model", "gla"])
    assert done.exit_code == 2
    assert done.output == "demo: model must be one of rwkv6, rwkv7, got 'gla'.\n"


def test_a_missing_training_text_is_found_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    monkeypatch.setattr(DEMO, "print_check", lambda *_: pytest.fail("work began"))
    done = CliRunner().invoke(main, ["demo", "--folder", str(tmp_path / "new")])
    assert done.exit_code == 2
    assert done.output.startswith("python_topics: the standard library must be whole, got one without pydoc_data.topics.")
    assert not (tmp_path / "new").exists()


IMPLEMENTATIONS = ("cpu", "triton_chunkwise", "triton_recurrent", "reference")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("error", "budget", "shown", "limit", "failed"),
    [
        (3.9e-3, 3.90625e-3, "3.9e-3", "3.9e-3", False),
        (3.95e-3, 3.90625e-3, "4.0e-3", "3.9e-3", True),
        (3.91e-3, 3.90625e-3, "3.910e-3", "3.906e-3", True),
        (3.906e-3, 3.90625e-3, "3.9e-3", "3.9e-3", False),
        (6.3e-16, 1e-12, "6.3e-16", "1.0e-12", False),
        (0.0, 2e-6, "0", "2.0e-6", False),
    ],
)
def test_errors_can_be_compared_with_what_is_allowed(lines, width, error, budget, shown, limit, failed):
    width = 120 if failed else width  # lines about failures are wrapped by the terminal
    found = [
        Finding(name, "cpu", variant, dtype, "output", error, budget, failed=failed)
        for name in IMPLEMENTATIONS
        for variant in VARIANTS
        for dtype in ("float16", "float64")
    ]
    text = lines(width, print_findings, found)
    rows = [line.split() for line in text if "float64 " in line and "WRONG" not in line and "Largest" not in line]
    assert len(rows) == len(IMPLEMENTATIONS)
    for row in rows:
        assert row[-len(VARIANTS) - 1 :] == [shown] * len(VARIANTS) + [limit]
        assert (float(shown) <= float(limit)) is not failed
    wrong = [line for line in text if "WRONG" in line]
    assert len(wrong) == failed * len(found)
    assert all(line.endswith(f"error {shown}, allowed {limit}") for line in wrong)
