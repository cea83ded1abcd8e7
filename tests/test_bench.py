"""Cases, the token loop, the floor, and the rule that a wrong result is never timed."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from penstock import RangeError, ShapeError
from penstock.bench import oracle, verify
from penstock.bench.calls import moved_bytes
from penstock.bench.candidates import MODES, Candidate, loop, ours, peer
from penstock.bench.cases import CASES, MODELS, Inputs, Shape, default_cases, inputs
from penstock.bench.clock import in_turn
from penstock.bench.exact import Reach, WrongResult
from penstock.bench.loop import token_loop
from penstock.bench.machine import Machine, using_threads
from penstock.bench.measure import measure
from penstock.bench.plot import MissingExtra, draw
from penstock.bench.record import Record
from penstock.errors import ImplementationRefused
from penstock.variants import VARIANTS

SMALL = Shape(2, 9, 2, 5, 7)


@pytest.fixture(autouse=True)
def one_thread():
    with using_threads(1):
        yield


def test_every_variant_has_a_model_and_decode_batches_from_1_to_256():
    assert {case.variant for case in MODELS} == set(VARIANTS)
    assert len({case.name for case in CASES}) == len(CASES)
    for variant in VARIANTS:
        batches = [case.shape.B for case in default_cases(variant, decode=True)]
        assert batches[0] == 1
        assert batches[-1] == 256


def test_shapes_are_read_and_shown():
    assert Shape.parse("1,54,32,64") == Shape(1, 54, 32, 64, 64)
    assert Shape.parse("1, 54,4,256,512").text == "1,54,4,256,512"
    for text in ("", "1,2,3", "1,2,3,4,5,6", "1,2,3,x", "1,0,3,4", "1,-2,3,4"):
        with pytest.raises(RangeError, match="B,T,H,K"):
            Shape.parse(text)


@pytest.mark.parametrize("variant", VARIANTS)
def test_inputs_are_those_of_a_valid_call_and_repeat(variant):
    one, again, other = (inputs(variant, SMALL, torch.bfloat16, seed=seed) for seed in (3, 3, 4))
    assert one.run("reference").shape == one.v.shape
    assert one.q.dtype == torch.bfloat16
    assert all(torch.equal(x, y) for x, y in zip(one.tensors.values(), again.tensors.values()))
    assert not torch.equal(one.q, other.q)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_token_loop_is_the_recurrence(variant):
    x, state = inputs(variant, SMALL), torch.randn(SMALL.state)
    output, final_state = oracle.exact_forward(x, state)
    with torch.no_grad():
        found = token_loop(x, state)
    assert oracle.error(found[0], output) < 1e-6
    assert oracle.error(found[1], final_state) < 1e-6
    leaves, d_output = x.with_gradients(), torch.randn(x.v.shape)
    gradients = torch.autograd.grad(token_loop(leaves)[0], list(leaves.tensors.values()), d_output)
    for gradient, exact in zip(gradients, oracle.exact_gradients(x, d_output).values()):
        assert oracle.error(gradient, exact) < 1e-6


@pytest.mark.parametrize(
    ("variant", "dtype", "mode", "expected"),
    [
        ("gla", torch.bfloat16, "fwd", 12 * 1000),  # 2 for each of q, k, v, o and 4 for g
        ("gla", torch.bfloat16, "fwdbwd", (12 + 22) * 1000),  # again these, and 2 for dq, dk, dv and 4 for dg
        ("linear_attention", torch.bfloat16, "fwd", 8 * 1000),
        ("linear_attention", torch.float32, "fwdbwd", (16 + 16 + 12) * 1000),
        ("retention", torch.float32, "fwd", 16 * 1000 + 4 * 2),  # g [H]
        ("simple_gla", torch.float32, "fwd", 16 * 1000 + 4 * 50),  # g [B, T, H]
        ("rwkv5", torch.float32, "fwd", 16 * 1000 + 4 * 2 * 40),  # w and u [H, K]
        ("rwkv6", torch.float64, "fwd", 40 * 1000 + 8 * 40),  # u [H, K]
        ("rwkv6", torch.float32, "decode", 2 * 4 * 2 * 20 * 20),
        ("rwkv6", torch.bfloat16, "decode", 2 * 4 * 2 * 20 * 20),  # states are float32
    ],
)
def test_the_floor_counts_every_input_and_result_once(variant, dtype, mode, expected):
    shape = Shape(1, 25, 2, 20, 20)  # 1000 elements
    assert moved_bytes(inputs(variant, shape, dtype), mode) == expected


def test_the_floor_of_the_published_shape():
    x = inputs("gla", Shape(1, 2048, 4, 64, 64), torch.bfloat16)
    assert moved_bytes(x, "fwd") / 4.24e12 * 8 * 8 == pytest.approx(0.095e-3, rel=0.01)  # 8 sequences of 32 heads, at 4.24 TB/s


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_measurements_of_every_variant_and_mode(variant, mode):
    x = inputs(variant, SMALL)
    found = measure("small", x, mode, [loop(x), ours("auto", x, mode)], seconds=0.002)
    assert found.timings[0].candidate == "token loop"
    for timing in found.timings:
        assert timing.samples >= 1
        assert timing.quartiles[0] <= timing.milliseconds <= timing.quartiles[1]
        assert timing.error is not None
        assert timing.error < 1e-5
    assert found.bandwidth > 0


def wrong(mode: str) -> Candidate:
    def forward(x: Inputs) -> torch.Tensor:
        output = x.run("chunkwise")
        return output + 1e-4 * output.detach().abs().max() if mode == "fwd" else output * (1 + 1e-4)

    def step(x: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, state = token_loop(x, state)
        return output, state * (1 + 1e-4)

    return Candidate("wrong", forward, step, oracle.budget)


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_implementation_is_never_timed(mode, monkeypatch):
    monkeypatch.setattr("penstock.bench.clock.in_turn", lambda *_: pytest.fail("a wrong result was timed"))
    x = inputs("rwkv6", SMALL)
    with pytest.raises(WrongResult, match=r"wrong is wrong and was not timed.*is allowed"):
        measure("small", x, mode, [ours("auto", x, mode), wrong(mode)], seconds=0.002)


def test_not_a_number_is_wrong():
    assert oracle.error(torch.tensor([1.0, float("nan")]), torch.ones(2, dtype=torch.float64)) == float("inf")


def test_long_calls_are_checked_on_their_first_tokens(monkeypatch):
    monkeypatch.setattr("penstock.bench.exact.CHECKED", {mode: Reach(4 * 2 * 2 * 5 * 7, 1000) for mode in MODES})
    for variant in ("rwkv5", "rwkv6"):
        x = inputs(variant, SMALL)
        for mode in ("fwd", "fwdbwd"):
            assert measure("small", x, mode, [ours("auto", x, mode)], seconds=0.002).checked_tokens == 4
            with pytest.raises(WrongResult):
                measure("small", x, mode, [wrong(mode)], seconds=0.002)


def test_decoding_takes_few_tokens():
    x = inputs("gla", Shape(1, 17, 1, 4, 4))
    with pytest.raises(ShapeError, match="at most 16"):
        measure("small", x, "decode", [loop(x)], seconds=0.002)


def test_candidates_take_turns():
    order = []
    samples = in_turn([lambda: order.append("a"), lambda: order.append("b")], torch.device("cpu"), 0.002)
    assert all(len(taken) >= 3 for taken in samples)
    turns = [name for name, before in zip(order, [None, *order]) if name != before]
    assert turns[:6] == ["a", "b"] * 3


def test_peers_say_why_they_cannot_be_had():
    x = inputs("rwkv5", SMALL)
    with pytest.raises(ImplementationRefused, match="fla cannot be timed here"):
        peer("fla", x, "fwd")
    with pytest.raises(RangeError, match="peer must be"):
        peer("flash", x, "fwd")


def test_every_implementation_is_right(at_full_speed):
    found = list(verify.findings(("rwkv6",), (torch.float32, torch.bfloat16)))
    assert not [finding for finding in found if finding.failed]
    results = {finding.result for finding in found if finding.implementation == "reference"}
    assert {"output", "final state", "decode output", "decode states", "gradient of q", "gradient of initial state"} <= results


def test_wrong_and_broken_implementations_are_found(monkeypatch):
    from penstock import dispatch

    right = dispatch.IMPLEMENTATIONS[-1]

    def shifted(problem):
        output, state = right.forward(problem)
        return output + 1e-3, state

    def broken(step):
        raise RuntimeError("no such kernel")

    bad = replace(right, name="bad", forward=shifted, step=broken)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", (bad,))
    failed = {finding.result: finding for finding in verify.findings(("gla",), (torch.float32,)) if finding.failed}
    assert set(failed) == {"output", "step"}
    assert failed["step"].reason == "RuntimeError: no such kernel"


def test_a_record_is_json(tmp_path):
    x = inputs("gla", SMALL)
    measured = measure("small", x, "fwd", [ours("auto", x, "fwd")], seconds=0.002)
    record = Record.of("penstock bench gla", "cpu", [measured], Machine.here())
    record.write(tmp_path / "new" / "record.json")
    content = json.loads((tmp_path / "new" / "record.json").read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert content["measurements"][0]["shape"] == SMALL._asdict()
    assert content["measurements"][0]["timings"][0]["milliseconds"] == measured.timings[0].milliseconds


def test_drawing_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[plot\]'"):
        draw([], tmp_path / "a.png")


def test_importing_the_library_imports_no_command_line():
    code = "import sys, penstock; print([name for name in ('typer', 'rich', 'matplotlib', 'penstock.bench') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
