"""Cases, the token loop, the floor, and the rule that a wrong result is never timed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import ModuleType

import pytest
import torch
from penstock.bench.machine import Machine, using_threads

from penstock import RangeError, ShapeError
from penstock.bench import clock, fla, oracle, plot, rounding, softmax, verify
from penstock.bench.calls import moved_bytes
from penstock.bench.candidates import MODES, Candidate, loop, ours
from penstock.bench.cases import CASES, MODELS, Case, Inputs, Shape, case_named, default_cases, inputs
from penstock.bench.clock import in_turn
from penstock.bench.exact import Reach, WrongResult, checked_tokens
from penstock.bench.loop import token_loop
from penstock.bench.measure import Measurement, Timing, Untimed, measure
from penstock.bench.peers import peer
from penstock.bench.plot import MissingExtra, draw
from penstock.bench.record import Record
from penstock.bench.suites import SUITES, suite_named
from penstock.errors import ImplementationRefused
from penstock.recurrence.variants import VARIANTS

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


def test_suites_ask_for_cases_that_have_names():
    assert len({suite.name for suite in SUITES}) == len(SUITES)
    for suite in SUITES:
        assert all(case_named(case.name).shape == case.shape for case in suite.cases)
        assert set(suite.modes) <= set(MODES)
    rows = {(case.variant, case.shape.text) for case in suite_named("gpu-training").cases}
    sizes = ["8,2048,32,64", "1,65536,32,64", "4,2048,16,128", "1,8192,96,128", "2,16384,16,128", "1,2048,32,64", "1,54,32,64"]
    assert {(variant, text) for variant in ("gla", "rwkv6") for text in sizes} < rows
    assert {case.shape[:2] for case in suite_named("gpu-decode").cases} == {(1, 1), (256, 1), (1024, 1)}
    assert [case.shape.T for case in suite_named("lengths").cases] == [*(2048 * 2**n for n in range(7)), 163840]
    assert case_named("gla-8x2048x4x256x512").shape == Shape(8, 2048, 4, 256, 512)


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
    gradients = torch.autograd.grad(token_loop(leaves)[0], list(leaves.trained.values()), d_output)
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


def test_a_gpu_walks_as_many_tokens_as_it_launches_in_a_second(monkeypatch):
    device, one, many = torch.device("cpu"), Shape(1, 1 << 20, 1, 4, 4), Shape(64, 1 << 20, 1, 4, 4)
    assert checked_tokens(one, "fwd", device) == 1 << 20
    monkeypatch.setattr(clock, "on_gpu", lambda device: True)
    monkeypatch.setattr("penstock.bench.exact.on_gpu", lambda device: True)
    for mode in ("fwd", "fwdbwd"):
        walked = checked_tokens(one, mode, device)
        assert 1000 < walked <= 10_000
        assert checked_tokens(many, mode, device) == walked // 64


def test_the_oracle_is_asked_once_for_all_candidates(monkeypatch):
    asked, exact_forward = [], oracle.exact_forward
    monkeypatch.setattr(oracle, "exact_forward", lambda *given: asked.append(1) or exact_forward(*given))
    x = inputs("gla", SMALL)
    measure("small", x, "fwd", [ours("auto", x, "fwd"), ours("chunkwise", x, "fwd"), ours("reference", x, "fwd")], seconds=0.001)
    assert len(asked) == 1


def rounding_candidate(bits: int, allowed_bits: int | None) -> Candidate:
    """The chunkwise formula with operands of so many bits, under the budget of kernels that round to ``allowed_bits``."""

    def forward(x: Inputs) -> torch.Tensor:
        problem = x.problem()
        return rounding.forward(problem.with_tensors({name: t.double() for name, t in x.tensors.items()}), bits)[0].float()

    return Candidate("rounding", forward, token_loop, oracle.budget, operand_bits=allowed_bits, ours=True)


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
def test_rounded_operands_are_allowed_what_they_cost_and_no_more(mode):
    x = inputs("rwkv6", Shape(1, 70, 2, 16, 16), torch.bfloat16)
    found = measure("small", x, mode, [rounding_candidate(8, 8)], seconds=0.001).timings[0]
    assert found.error > 1e-3
    assert all(apart.error <= apart.allowed < 0.1 for apart in found.results.values())
    if mode == "fwd":
        cost = rounding.errors(x.problem(), 8, {"output": oracle.exact_forward(x)[0]})["output"]
        assert found.results["output"].allowed == pytest.approx(oracle.budget(torch.bfloat16, torch.float32) + 2 * cost)
    for candidate in (rounding_candidate(5, 8), rounding_candidate(8, None)):
        with pytest.raises(WrongResult):
            measure("small", x, mode, [candidate], seconds=0.001)


def test_a_formula_that_overflows_allows_nothing():
    x = inputs("gla", Shape(1, 70, 1, 4, 4), torch.bfloat16)
    x = replace(x, g=x.g - 1000)
    exact = {"output": oracle.exact_forward(x)[0]}
    assert rounding.errors(x.problem(), 8, exact) == {"output": 0.0}


def refusing(x: Inputs) -> torch.Tensor:
    raise RuntimeError("no kernel for this\nand much more")


def test_one_that_refuses_or_is_wrong_does_not_stop_the_others():
    x = inputs("rwkv6", SMALL)
    peer_ = Candidate("peer", refusing, token_loop, oracle.budget)
    own = replace(peer_, name="own", ours=True)
    lost = replace(wrong("fwd"), ours=True)
    found = measure("small", x, "fwd", [peer_, lost, own, ours("auto", x, "fwd"), wrong("fwd")], seconds=0.001, go_on=True)
    assert [timing.candidate for timing in found.timings] == [ours("auto", x, "fwd").name]
    assert [(one.candidate, one.fault) for one in found.untimed] == [("peer", False), ("wrong", True), ("own", True), ("wrong", False)]
    assert found.untimed[0].reason == "refuses: RuntimeError: no kernel for this"
    assert found.untimed[1].reason.startswith("wrong: its output is ")
    assert found.untimed[2].reason == "fails: RuntimeError: no kernel for this"
    assert found.baseline is None
    with pytest.raises(RuntimeError, match="no kernel"):
        measure("small", x, "fwd", [peer_], seconds=0.001)


def test_fla_refuses_calls_and_is_not_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    refused = measure("small", inputs("rwkv5", SMALL), "fwd", [fla.candidate()], seconds=0.001, go_on=True).untimed[0]
    assert refused.reason == "refuses: it has no operator for rwkv5"
    assert not refused.fault


def test_fla_computes_sequences_by_chunks_or_token_by_token(monkeypatch):
    called = []

    def operator(name):
        def call(q, k, v, g, *, scale, initial_state=None, output_final_state=False):
            called.append(name)
            return token_loop(Inputs("gla", q, k, v, g, None), initial_state)

        return call

    ops = ModuleType("fla.ops")
    ops.chunk_gla, ops.fused_recurrent_gla = operator("chunk"), operator("recurrent")
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", ops)
    monkeypatch.setattr(fla, "unavailable", lambda device: None)
    x = inputs("gla", Shape(2, 1, 2, 5, 7))
    for name, mode, wanted in (("fla", "fwd", "chunk"), ("fla_recurrent", "fwd", "recurrent"), ("fla", "decode", "recurrent")):
        called.clear()
        assert measure("small", x, mode, [peer(name, x, mode)], seconds=0.001).timings[0].candidate == name
        assert set(called) == {wanted}


def test_the_first_call_is_timed_apart():
    slept = []

    def forward(x: Inputs) -> torch.Tensor:
        if not slept:
            slept.append(sleep(0.1))
        return token_loop(x)[0]

    x = inputs("gla", SMALL)
    timing = measure("small", x, "fwd", [Candidate("slow at first", forward, token_loop, loop(x).budget)], seconds=0.002).timings[0]
    assert timing.first_call_seconds >= 0.1
    assert timing.milliseconds < 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_token_loops_gradients_may_be_rounded_once(dtype):
    x = inputs("rwkv6", Shape(1, 20, 2, 16, 16), dtype)
    found = measure("small", x, "fwdbwd", [loop(x)], seconds=0.001).timings[0].results
    assert found["gradient of q"].error > 1e-4  # so what float32 results are allowed would not do
    assert found["gradient of q"].allowed == pytest.approx(1e-4 + torch.finfo(dtype).eps / 2)
    assert found["gradient of g"].allowed == pytest.approx(1e-4)


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


def test_a_record_is_json_and_is_read_back(tmp_path):
    x = inputs("gla", SMALL)
    peer_ = Candidate("peer", refusing, token_loop, oracle.budget)
    measured = measure("small", x, "fwd", [ours("auto", x, "fwd"), peer_], seconds=0.002, go_on=True)
    record = Record.of("penstock bench gla", "cpu", [measured], Machine.here())
    record.write(tmp_path / "new" / "record.json")
    content = json.loads((tmp_path / "new" / "record.json").read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert content["measurements"][0]["shape"] == SMALL._asdict()
    timing = content["measurements"][0]["timings"][0]
    assert timing["milliseconds"] == measured.timings[0].milliseconds
    assert timing["results"]["output"] == {"error": timing["error"], "allowed": 2e-6}
    assert Record.read(tmp_path / "new" / "record.json") == record


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_committed_records_are_read(path):
    record = Record.read(path)
    assert record.measurements
    assert record.place.startswith(record.device)
    for measurement in record.measurements:
        assert (measurement.baseline is None) is (measurement.first in [one.candidate for one in measurement.untimed])


def test_what_is_no_record_is_refused(tmp_path):
    for content in ("{", "[]", "{}", '{"measurements": [3]}'):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(RangeError, match="file must be a record that penstock bench --json wrote"):
            Record.read(tmp_path / "a.json")


def test_the_token_loop_leaves_threads_that_wait_for_busy_cores(monkeypatch):
    """Where two threads are quick once and slow else, the baseline has one."""
    slept = []

    def token_loop(x):
        slept.append(torch.get_num_threads())
        sleep(0.01 if torch.get_num_threads() == 1 else 0.001 if slept.count(2) == 2 else 0.05)

    monkeypatch.setattr("penstock.bench.candidates.token_loop", token_loop)
    with using_threads(2):
        assert loop(inputs("gla", SMALL)).threads == 1
    assert set(slept) == {1, 2}


def test_drawing_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[plot\]'"):
        draw([], tmp_path / "a.png")


def measured(variant, shape, mode="fwd", *names, untimed=(), gpu=None):
    timings = tuple(Timing(name, 3.0 - n, (2.0, 4.0), 9, 1e-6, 1, gpu=gpu) for n, name in enumerate(names))
    return Measurement(
        variant, "a", shape, mode, "float32", "cpu", 9, 100, Timing("copy", 1.0, (1.0, 1.0), 9, None, 1, gpu=gpu), timings, untimed, "loop"
    )


ONE, LONG, WIDE = Shape(1, 8, 2, 4, 4), Shape(1, 16, 2, 4, 4), Shape(2, 8, 4, 4, 4)
TWO = ("loop", "auto (cpu)")


def spy(called, name, function):
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
        ("_dots", [measured("gla", ONE, "fwd", *TWO)]),
        ("_dots", [measured("gla", shape, "fwd", "auto (cpu)") for shape in (ONE, WIDE)]),
    ],
)
def test_lines_for_sizes_bars_for_cases_dots_for_one(kind, rows, tmp_path, monkeypatch):
    drawn = set()
    for name in ("_lines", "_bars", "_dots"):
        monkeypatch.setattr(plot, name, spy(drawn, name, getattr(plot, name)))
    draw(rows, tmp_path / "a.png", "somewhere")
    assert drawn == {kind}
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_pictures_name_auto_by_what_it_ran_only_if_it_is_always_the_same():
    assert plot._names([measured("gla", ONE, "fwd", *TWO)]) == {"loop": "loop", "auto": "penstock (cpu)"}
    both = [measured("gla", ONE, "fwd", "auto (cpu)"), measured("gla", LONG, "fwd", "auto (reference)")]
    assert plot._names(both) == {"auto": "penstock"}


def test_importing_the_library_imports_no_command_line():
    code = "import sys, penstock; print([name for name in ('typer', 'rich', 'matplotlib', 'penstock.bench') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
def test_softmax_attention_is_measured_beside_torchs_operator(mode):
    case = Case("small", "softmax_attention", Shape(2, 20, 3, 8, 8), "")
    found = softmax.measure(case, mode, torch.float32, "cpu", 0.002)
    assert [one.candidate for one in found.timings] == ["sdpa", "penstock (auto)"]
    assert found.baseline is found.timings[0]
    assert set(found.timings[1].results) == {"output"} | {f"gradient of {name}" for name in "qkv" if mode == "fwdbwd"}
    assert all(0 < one.error < 1e-5 for one in found.timings)


def test_wrong_softmax_attention_is_not_timed(monkeypatch):
    monkeypatch.setattr(softmax, "softmax_attention", lambda q, k, v, impl: 1.001 * v)
    found = softmax.measure(Case("small", "softmax_attention", Shape(1, 20, 1, 8, 8), ""), "fwd", torch.float32, "cpu", 0.002)
    assert [one.candidate for one in found.timings] == ["sdpa"]
    assert found.untimed[0].reason.startswith("wrong: its output is")
    assert found.untimed[0].fault


def test_softmax_attention_has_no_decode_mode():
    with pytest.raises(RangeError, match="mode must be fwd or fwdbwd for softmax_attention, got 'decode'"):
        softmax.measure(Case("small", "softmax_attention", Shape(1, 2, 1, 8, 8), ""), "decode", torch.float32, "cpu", 0.002)


def test_check_holds_softmax_attention_to_its_oracle_too(monkeypatch):
    from penstock.softmax import sdpa

    right = list(verify.findings(("softmax_attention",), (torch.float32,)))
    ran = {finding.result for finding in right if finding.implementation == "sdpa"}
    assert ran == {"output", "log-sum-exp", *(f"gradient of {name}" for name in "qkv")}
    assert not any(finding.failed for finding in right)
    attend = sdpa.attend
    monkeypatch.setattr(sdpa, "attend", lambda call, return_lse: (attend(call, False)[0], attend(call, True)[1] + 1e-3))
    wrong = [finding for finding in verify.findings(("softmax_attention",), (torch.float32,)) if finding.failed]
    assert [(finding.implementation, finding.result) for finding in wrong] == [("sdpa", "log-sum-exp")]
