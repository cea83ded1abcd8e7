"""Calls without torch's dispatcher: the same answers and the same errors, whatever was called before."""

import threading
from dataclasses import replace

import pytest
import torch
from cases import Case, call, draw, named, problem_of

import penstock as ps
from penstock import dispatch, eager, problem
from penstock.bench.candidates import ours
from penstock.bench.cases import Shape, inputs
from penstock.variants import VARIANTS

CASE = Case("rwkv6", B=1, T=5, H=2, K=4, V=4)


@pytest.fixture
def fresh(monkeypatch):
    """No call remembered; returns how often problems were validated."""
    seen = []
    checked = problem.Problem.checked.__func__
    monkeypatch.setattr(eager, "_calls", {})
    monkeypatch.setattr(problem.Problem, "checked", classmethod(lambda cls, *a: seen.append(1) or checked(cls, *a)))
    return seen


@pytest.fixture
def values_unread(monkeypatch):
    """As on a GPU, where values are not looked at."""
    monkeypatch.setattr(eager, "reads_values", lambda x: False)


def unobserved(tensors):
    return eager.unobserved(tensors["q"], tensors["k"], tensors["v"], tensors["g"])


def test_a_call_seen_before_is_not_validated_again(fresh, values_unread):
    results = [call(CASE, draw(CASE), "chunkwise").output for _ in range(3)]
    assert len(fresh) == 1
    assert all(torch.equal(x, results[0]) for x in results)


def test_values_are_validated_every_time_on_a_cpu(fresh):
    tensors = draw(CASE)
    call(CASE, tensors, "chunkwise")
    tensors["g"] = -tensors["g"]
    with pytest.raises(ps.RangeError, match="nowhere above 0"):
        call(CASE, tensors, "chunkwise")


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "u", "initial_state"])
def test_another_shape_dtype_or_stride_is_another_call(name, fresh, values_unread):
    tensors = draw(CASE)
    wanted = call(CASE, tensors, "chunkwise").output
    call(CASE, tensors | {name: tensors[name].transpose(-1, -2).contiguous().transpose(-1, -2)}, "chunkwise")
    assert len(fresh) == 2
    assert torch.equal(call(CASE, tensors, "chunkwise").output, wanted)
    with pytest.raises(ps.ShapeError):
        call(CASE, tensors | {name: tensors[name][..., :-1]}, "chunkwise")


@pytest.mark.parametrize("options", [{"scale": True}, {"scale": [1]}, {"reverse": 1}, {"output_final_state": 1}, {"impl": 3}])
def test_types_that_equal_what_was_right_are_still_wrong(options):
    tensors = draw(CASE)
    right = {"scale": 1, "reverse": True, "output_final_state": True, "impl": "chunkwise"}
    arguments = [tensors[name] for name in ("q", "k", "v", "g", "u")]
    ps.rwkv6(*arguments, **right)
    with pytest.raises(ps.InvalidArgument):
        ps.rwkv6(*arguments, **(right | options))


def test_scale_may_be_a_whole_number():
    tensors = draw(CASE)
    assert torch.equal(call(CASE, tensors, "cpu", scale=2).output, call(CASE, tensors, "cpu", scale=2.0).output)


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_ways_of_a_call_agree(variant):
    """With and without the dispatcher: output, state and gradients."""
    found = []
    for observed in (False, True):
        case = Case(variant, B=1, T=9)
        tensors = {name: None if x is None else x.requires_grad_() for name, x in draw(case).items()}
        inputs = [x for x in tensors.values() if x is not None]
        if observed:
            with Watching():
                assert not unobserved(tensors)
                result = call(case, tensors, "chunkwise")
        else:
            assert unobserved(tensors)
            result = call(case, tensors, "chunkwise")
        found.append([*result, *torch.autograd.grad([result.output.sum(), result.final_state.square().sum()], inputs)])
    assert all(torch.equal(one, other) for one, other in zip(*found))


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes what it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_who_watches_sees_one_operator():
    tensors = draw(CASE)
    with Watching() as watching:
        call(CASE, tensors, "chunkwise")
    assert "penstock.forward.default" in watching.seen


def test_forward_derivatives_are_refused_rather_than_dropped():
    tensors = draw(CASE)
    with torch.autograd.forward_ad.dual_level():
        tensors["q"] = torch.autograd.forward_ad.make_dual(tensors["q"], torch.ones_like(tensors["q"]))
        with pytest.raises((RuntimeError, NotImplementedError)):
            call(CASE, tensors, "chunkwise")


@pytest.fixture
def keeping(monkeypatch):
    """An implementation that "auto" takes for the backward pass only, and that can keep states for it forward. Lists its forward runs."""
    reference, ran = dispatch.IMPLEMENTATIONS[-1], []

    def forward_keeping(p):
        ran.append("keeps")
        return *reference.forward(p), p.q

    def backward(p, d_output, d_final_state, states, dg):
        return reference.backward(p, d_output, d_final_state)

    keeps = replace(reference, name="keeps", forward_keeping=forward_keeping, backward=backward)
    backward_only = replace(keeps, avoids=lambda problem, mode: "slow" if mode == "forward" else None)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", (backward_only, *dispatch.IMPLEMENTATIONS))
    return ran


def test_explain_names_what_runs_forward_where_gradients_are_wanted(fresh, keeping):
    """Gradients are wanted where an input requires them and they are enabled; torch's operator chooses both passes apart."""
    tensors = draw(CASE)
    alone = dispatch.explain(problem_of(CASE, tensors)).forward
    assert alone != "keeps"
    for name in ("q", "k", "v", "g", "u", "initial_state", None):
        given = tensors | ({name: tensors[name].clone().requires_grad_()} if name else {})
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                keeping.clear()
                call(CASE, given, "auto")
                walk = ps.explain(CASE.variant, **named(CASE, given))
            wanted = bool(name) and enabled
            assert (walk.forward, walk.backward) == ("keeps" if wanted else alone, "keeps")
            assert keeping == ["keeps"] * wanted, "explain says what ran"
            assert f"forward runs {walk.forward}, backward runs keeps\n" in str(walk)
            assert (", with gradients)" in str(walk)) is wanted
            chosen = [line.split()[:2] for line in str(walk).splitlines() if "chosen" in line]
            assert chosen == ([["keeps", "forward"], ["keeps", "backward"]] if wanted else [["keeps", "backward"], [alone, "forward"]])
    given = tensors | {"q": tensors["q"].clone().requires_grad_()}
    with Watching():
        keeping.clear()
        call(CASE, given, "auto")
        assert ps.explain(CASE.variant, **named(CASE, given)).forward == alone
    assert keeping == []


def test_benchmarks_name_what_runs_forward(fresh, keeping):
    x = inputs("rwkv6", Shape(1, 5, 2, 4, 4))
    assert ours("auto", x, "fwdbwd").name == "auto (keeps)"
    assert ours("auto", x, "fwd").name == f"auto ({dispatch.explain(x.problem()).forward})"
    assert ours("chunkwise", x, "fwdbwd").name == "chunkwise"


def test_what_runs_the_backward_pass_keeps_states_forward(fresh, values_unread, keeping):
    """Under "auto" two implementations may be the fastest in either pass: with gradients one that can keep states runs both."""
    tensors = draw(CASE)
    given = (*(tensors[name] for name in ("q", "k", "v", "g", "u", "initial_state")), None)
    made = eager.Call(given, CASE.variant, None, False, "auto")
    assert made.implementation.name != "keeps"
    assert made.forward(given, True, False)[2] is None
    assert made.forward(given, True, True)[2] is tensors["q"]
    by_name = eager.Call(given, CASE.variant, None, False, "chunkwise")
    assert by_name.forward(given, True, True)[2] is None


def test_saved_tensors_that_come_back_with_other_strides_are_another_call(fresh, values_unread):
    tensors = draw(CASE)
    tensors["q"] = tensors["q"].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    call(CASE, tensors, "cpu").output.sum().backward()
    assert len(fresh) == 1
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda x: x):
        output = call(CASE, tensors, "cpu").output
    output.sum().backward()
    assert len(fresh) == 2


def test_remembered_calls_are_bounded(monkeypatch):
    monkeypatch.setattr(eager, "_calls", {})
    monkeypatch.setattr(eager, "KEPT", 3)
    for T in range(1, 10):
        case = Case("gla", B=1, T=T)
        call(case, draw(case), "chunkwise")
        assert len(eager._calls) <= 3


def test_a_call_that_fails_is_not_remembered(fresh, values_unread):
    tensors = draw(CASE)
    for _ in range(2):
        with pytest.raises(ps.ShapeError):
            call(CASE, tensors | {"k": tensors["k"][:, :1]}, "auto")
    assert not eager._calls


def test_threads_share_what_is_known():
    tensors, found = draw(CASE), []
    threads = [threading.Thread(target=lambda: found.append(call(CASE, tensors, "chunkwise").output)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(x, found[0]) for x in found)


def test_a_step_seen_before_is_not_validated_again(monkeypatch, values_unread):
    seen = []
    checked = problem.Step.checked.__func__
    monkeypatch.setattr(eager, "_calls", {})
    monkeypatch.setattr(problem.Step, "checked", classmethod(lambda cls, *a: seen.append(1) or checked(cls, *a)))
    tensors = draw(Case("gla", B=2, T=1))
    arguments = [tensors[name][:, 0] for name in ("q", "k", "v", "g")]
    state = torch.zeros(2, 3, 16, 16)
    outputs = [ps.decode_step("gla", *arguments, state=state.zero_(), impl="chunkwise") for _ in range(3)]
    assert len(seen) == 1
    assert all(torch.equal(x, outputs[0]) for x in outputs)
    with pytest.raises(ps.RangeError, match="free of gradients"):
        ps.decode_step("gla", arguments[0].clone().requires_grad_(), *arguments[1:], state=state, impl="chunkwise")


def test_the_default_decay_of_retention_can_be_trained_through_after_inference():
    q = torch.randn(1, 3, 7, 4)
    with torch.inference_mode():
        ps.retention(q, q, q)
    ps.retention(q.requires_grad_(), q, q).output.sum().backward()
    assert q.grad is not None


def test_autocast_chooses_the_call(fresh):
    tensors = draw(CASE)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert call(CASE, tensors, "auto").output.dtype == torch.bfloat16
        assert call(CASE, tensors, "auto").output.dtype == torch.float32


def test_a_call_remembers_its_own_choice():
    """A named implementation and auto do not share an answer."""
    tensors = draw(CASE)
    for impl in ("auto", "reference", "cpu"):
        call(CASE, tensors, impl)
    kinds = {one.impl: one.implementation.name for one in eager._calls.values() if isinstance(one, eager.Call)}
    assert kinds["reference"] == "reference"
    assert kinds["cpu"] == "cpu"
    assert kinds["auto"] in [one.name for one in dispatch.IMPLEMENTATIONS]
