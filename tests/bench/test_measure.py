"""Measurements: every candidate is compared with the oracle first, and a wrong one is not timed."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from clocks import Simulated
from measurements import SMALL, refusing, wrong

from penstock import RangeError, ShapeError
from penstock.bench import clock, fla
from penstock.bench.candidates import MODES, Candidate, loop, ours
from penstock.bench.clock import in_turn
from penstock.bench.exact import OracleLimit, WrongResult, checked_tokens
from penstock.bench.loop import token_loop
from penstock.bench.measure import measure
from penstock.bench.peers import peer
from penstock.delta import variants as delta
from penstock.errors import ImplementationRefused
from penstock.recurrence import rounded
from penstock.recurrence.variants import VARIANTS
from penstock.tokens.distributions import STRENGTHS
from penstock.tokens.shape import Shape
from penstock.verify import oracle, rounding
from penstock.verify.inputs import Inputs, inputs
from penstock.verify.machine import using_threads

BOTH = (*VARIANTS, *delta.VARIANTS)


@pytest.mark.parametrize("variant", BOTH)
def test_token_loop_equals_the_oracle(variant):
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", BOTH)
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


@pytest.mark.parametrize("mode", MODES)
def test_wrong_candidates_are_not_timed(mode, monkeypatch):
    monkeypatch.setattr("penstock.bench.clock.in_turn", lambda *_: pytest.fail("a wrong result was timed"))
    x = inputs("rwkv6", SMALL)
    with pytest.raises(WrongResult, match=r"wrong is wrong and was not timed.*is allowed"):
        measure("small", x, mode, [ours("auto", x, mode), wrong(mode)], seconds=0.002)


def test_long_calls_are_checked_on_their_first_tokens(monkeypatch):
    monkeypatch.setattr("penstock.bench.exact.CHECKED", {mode: OracleLimit(4 * 2 * 2 * 5 * 7, 1000) for mode in MODES})
    for variant in ("rwkv5", "rwkv6"):
        x = inputs(variant, SMALL)
        for mode in ("fwd", "fwdbwd"):
            assert measure("small", x, mode, [ours("auto", x, mode)], seconds=0.002).checked_tokens == 4
            with pytest.raises(WrongResult):
                measure("small", x, mode, [wrong(mode)], seconds=0.002)


def test_checked_tokens_on_a_gpu_are_bounded_by_launches(monkeypatch):
    device, one, many = torch.device("cpu"), Shape(1, 1 << 20, 1, 4, 4), Shape(64, 1 << 20, 1, 4, 4)
    assert checked_tokens(one, "fwd", device) == 1 << 20
    monkeypatch.setattr(clock, "on_gpu", lambda device: True)
    monkeypatch.setattr("penstock.bench.exact.on_gpu", lambda device: True)
    for mode in ("fwd", "fwdbwd"):
        walked = checked_tokens(one, mode, device)
        assert 1000 < walked <= 10_000
        assert checked_tokens(many, mode, device) == walked // 64


def test_oracle_runs_once_for_all_candidates(monkeypatch):
    calls, exact_forward = [], oracle.exact_forward
    monkeypatch.setattr(oracle, "exact_forward", lambda *given: calls.append(1) or exact_forward(*given))
    x = inputs("gla", SMALL)
    measure("small", x, "fwd", [ours("auto", x, "fwd"), ours("chunkwise", x, "fwd"), ours("reference", x, "fwd")], seconds=0.001)
    assert len(calls) == 1


def rounding_candidate(bits: int, allowed_bits: int | None) -> Candidate:
    """The chunkwise formula with operands of ``bits`` bits, and the budget of kernels that round to ``allowed_bits``."""

    def forward(x: Inputs) -> torch.Tensor:
        problem = x.problem()
        return rounded.forward(problem.with_tensors({name: t.double() for name, t in x.tensors.items()}), bits)[0].float()

    return Candidate("rounding", forward, token_loop, oracle.budget, operand_bits=allowed_bits, ours=True)


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
def test_budget_of_rounded_operands_is_their_cost(mode):
    x = inputs("rwkv6", Shape(1, 70, 2, 16, 16), torch.bfloat16)
    found = measure("small", x, mode, [rounding_candidate(8, 8)], seconds=0.001).timings[0]
    assert found.error > 1e-3
    assert all(one.error <= one.allowed < 0.1 for one in found.results.values())
    if mode == "fwd":
        cost = rounding.errors(x.problem(), 8, {"output": oracle.exact_forward(x)[0]})["output"]
        assert found.results["output"].allowed == pytest.approx(oracle.budget(torch.bfloat16, torch.float32) + 2 * cost)
    for candidate in (rounding_candidate(5, 8), rounding_candidate(8, None)):
        with pytest.raises(WrongResult):
            measure("small", x, mode, [candidate], seconds=0.001)


def test_refusing_and_wrong_candidates_do_not_stop_the_others():
    x = inputs("rwkv6", SMALL)
    peer_ = Candidate("peer", refusing, token_loop, oracle.budget)
    own = replace(peer_, name="own", ours=True)
    own_wrong = replace(wrong("fwd"), ours=True)
    found = measure("small", x, "fwd", [peer_, own_wrong, own, ours("auto", x, "fwd"), wrong("fwd")], seconds=0.001, keep_going=True)
    assert [timing.candidate for timing in found.timings] == [ours("auto", x, "fwd").name]
    assert [(one.candidate, one.fault) for one in found.untimed] == [("peer", False), ("wrong", True), ("own", True), ("wrong", False)]
    assert found.untimed[0].reason == "refuses: RuntimeError: no kernel for this"
    assert found.untimed[1].reason.startswith("wrong: its output is ")
    assert found.untimed[2].reason == "fails: RuntimeError: no kernel for this"
    assert found.baseline is None
    with pytest.raises(RuntimeError, match="no kernel"):
        measure("small", x, "fwd", [peer_], seconds=0.001)


def test_fla_without_an_operator_is_refused_without_fault(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    refused = measure("small", inputs("rwkv5", SMALL), "fwd", [fla.candidate()], seconds=0.001, keep_going=True).untimed[0]
    assert refused.reason == "refuses: it has no operator for rwkv5"
    assert not refused.fault


def test_fla_operator_follows_name_and_mode(monkeypatch):
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


@pytest.mark.parametrize("variant", ["gated_delta_rule", "kda"])
@pytest.mark.parametrize("strength", STRENGTHS)
def test_delta_rule_is_right_at_every_strength(variant, strength):
    x = inputs(variant, Shape(1, 130, 2, 8, 8), gates=strength)
    for mode in ("fwd", "fwdbwd"):
        found = measure("a", x, mode, [loop(x), ours("auto", x, mode)], seconds=0.001)
        assert len(found.timings) == 2


def test_token_loop_of_shared_heads_equals_the_oracle():
    x = inputs("gated_delta_rule", Shape(2, 9, 4, 5, 7), groups=2)
    found = measure("shared", x, "fwdbwd", [loop(x)], seconds=0.001)
    assert found.timings[0].error < 1e-6
    assert (found.groups, found.sizes) == (2, "2,9,2/4,5,7")


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_shared_heads_are_summed_before_they_are_rounded(seed):
    x = inputs("gated_delta_rule", Shape(1, 40, 4, 16, 16), torch.bfloat16, seed=seed, gates="slow", groups=2)
    assert measure("shared", x, "fwdbwd", [loop(x)], seconds=0.001).timings[0].error < 0.004


def test_decode_steps_of_slots_update_these_rows():
    """Rows in random order: a candidate that takes them in order is wrong."""
    x = inputs("kda", Shape(5, 1, 2, 5, 7), slots=True)
    found = measure("slots", x, "decode", [loop(x), ours("auto", x, "decode")], seconds=0.001)
    assert len(found.timings) == 2
    in_order = replace(loop(x), step=token_loop)
    assert measure("slots", x, "decode", [in_order], seconds=0.001, keep_going=True).untimed[0].reason.startswith("wrong: its output is ")


def test_states_with_values_first_are_compared_as_others():
    def step(x, state):
        assert state.shape == (2, 2, 7, 5)
        assert state.is_contiguous()
        output, after = token_loop(x, state.mT)
        return output, after.mT

    x = inputs("kda", Shape(2, 1, 2, 5, 7))
    assert measure("a", x, "decode", [replace(loop(x), step=step, values_first=True)], seconds=0.001).timings[0].error < 1e-6


def test_first_call_is_timed_separately(monkeypatch):
    time, calls = Simulated(step=1e-4), []  # what else is timed takes no time of its own

    def forward(x: Inputs) -> torch.Tensor:
        time.sleep(1e-3 if calls else 0.1)
        calls.append(x)
        return token_loop(x)[0]

    monkeypatch.setattr(clock, "time", time)
    x = inputs("gla", SMALL)
    timing = measure("small", x, "fwd", [Candidate("slow at first", forward, token_loop, loop(x).budget)], seconds=0.002).timings[0]
    assert timing.first_call_seconds == pytest.approx(0.1 + 1e-4)
    assert timing.milliseconds == pytest.approx(1 + 0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_the_token_loop_may_be_rounded_once(dtype):
    x = inputs("rwkv6", Shape(1, 20, 2, 16, 16), dtype)
    found = measure("small", x, "fwdbwd", [loop(x)], seconds=0.001).timings[0].results
    assert found["gradient of q"].error > 1e-4  # beyond the budget of float32 results
    assert found["gradient of q"].allowed == pytest.approx(1e-4 + torch.finfo(dtype).eps / 2)
    assert found["gradient of g"].allowed == pytest.approx(1e-4)


def test_decode_mode_takes_few_tokens():
    x = inputs("gla", Shape(1, 17, 1, 4, 4))
    with pytest.raises(ShapeError, match="at most 16"):
        measure("small", x, "decode", [loop(x)], seconds=0.002)


def test_candidates_take_turns():
    order = []
    samples = in_turn([lambda: order.append("a"), lambda: order.append("b")], torch.device("cpu"), 0.002)
    assert all(len(taken) >= 3 for taken in samples)
    turns = [name for name, before in zip(order, [None, *order]) if name != before]
    assert turns[:6] == ["a", "b"] * 3


def test_unavailable_peers_raise_with_a_reason():
    x = inputs("rwkv5", SMALL)
    with pytest.raises(ImplementationRefused, match="fla cannot be timed here"):
        peer("fla", x, "fwd")
    with pytest.raises(RangeError, match="peer must be"):
        peer("flash", x, "fwd")


def test_token_loop_uses_one_thread_if_its_median_time_is_lower(monkeypatch):
    """The median decides: two threads are fast once and slow otherwise."""
    time, slept = Simulated(), []

    def token_loop(x):
        slept.append(torch.get_num_threads())
        time.sleep(0.01 if torch.get_num_threads() == 1 else 0.001 if slept.count(2) == 2 else 0.05)

    monkeypatch.setattr("penstock.bench.candidates.token_loop", token_loop)
    monkeypatch.setattr("penstock.bench.candidates.perf_counter", time.perf_counter)
    with using_threads(2):
        assert loop(inputs("gla", SMALL)).threads == 1
    assert set(slept) == {1, 2}
