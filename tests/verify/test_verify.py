"""``penstock check``: comparison of every implementation with its oracle, and the allowed errors."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

import penstock as ps
from penstock.call.declaration import FLOATS
from penstock.call.derivatives import gradients_of
from penstock.call.families import Trial, trial_of, trials, variants
from penstock.recurrence import reference, rounded
from penstock.recurrence.gradients import Gradients
from penstock.recurrence.operators import FAMILY
from penstock.recurrence.variants import VARIANTS
from penstock.softmax.operators import ATTENTION
from penstock.softmax.operators import FAMILY as SOFTMAX
from penstock.tokens.shape import Shape
from penstock.verify import oracle, rounding, verify
from penstock.verify.inputs import inputs


@pytest.fixture
def only_rwkv6(monkeypatch):
    """The trial of the recurrence with one variant. Other variants have different tensors only."""
    trial = trials()[0]
    monkeypatch.setattr(Trial, "signatures", lambda trial: [trial.operator.signatures["rwkv6"]])
    return (trial,)


def test_every_implementation_passes(at_full_speed):
    """All results of all implementations that run here are compared."""
    found = list(verify.findings())
    assert not [finding for finding in found if finding.failed]
    results = {finding.result for finding in found if finding.implementation == "reference"}
    gradients = {f"gradient of {name}" for name in ("q", "r", "k", "v", "g", "w", "u", "beta", "a", "b", "initial state")}
    assert results == {"output", "final state", "output in place", "states in place", "state", "decay", "lse", *gradients}
    ran = {(finding.implementation, finding.variant, finding.dtype) for finding in found if finding.error is not None}
    for variant, dtype in product(variants(drawn=True), FLOATS):
        for one in ps.implementations(variant):
            name = str(dtype).removeprefix("torch.")
            if one.reason is None and (one.name, name) != ("cpu", "float64"):
                assert (one.name, variant, name) in ran


def test_wrong_and_broken_implementations_are_found(monkeypatch, only_rwkv6):
    right = FAMILY.named("reference")

    def shifted(problem):
        output, state = right.forward(problem)
        return output + 1e-3, state

    def broken(problem, upstream):
        raise RuntimeError("no such kernel")

    bad = replace(right, name="bad", forward=shifted, backward=broken)
    monkeypatch.setattr(FAMILY, "implementations", (bad, right))
    failed = {finding.result: finding for finding in verify.findings(only_rwkv6, (torch.float32,)) if finding.failed}
    assert set(failed) == {"output", "backward"}
    assert failed["backward"].reason == "RuntimeError: no such kernel"


def test_a_wrong_lse_is_found(monkeypatch):
    right = SOFTMAX.named("sdpa")

    def shifted(a):
        output, lse = right.forward(a)
        return output, lse + 1e-3

    monkeypatch.setattr(SOFTMAX, "implementations", (replace(right, forward=shifted), SOFTMAX.named("reference")))
    wrong = [finding for finding in verify.findings((trial_of(ATTENTION),), (torch.float32,)) if finding.failed]
    assert [(finding.implementation, finding.result) for finding in wrong] == [("sdpa", "lse")]


def test_wrong_updates_in_place_are_found(monkeypatch):
    right = FAMILY.named("reference")
    monkeypatch.setattr(FAMILY, "implementations", (replace(right, name="bad", advance=lambda problem: right.advance(problem) + 1), right))
    failed = [finding for finding in verify.findings(trials()[1:2], (torch.float32,)) if finding.failed]
    assert {(finding.implementation, finding.result) for finding in failed} == {("bad", "output in place")}


def test_nan_is_an_infinite_error():
    assert oracle.error(torch.tensor([1.0, float("nan")]), torch.ones(2, dtype=torch.float64)) == float("inf")


@pytest.mark.parametrize("variant", ["rwkv5", "gla"])
def test_formula_with_rounded_operands_takes_each_packed_sequence_alone(variant):
    x, state = inputs(variant, Shape(1, 76, 2, 4, 5), torch.float64), torch.randn(4, 2, 4, 5, dtype=torch.float64)
    ends = torch.tensor([0, 0, 70, 71, 76])
    output, final_state = rounded.forward(x.problem(state, ends), 8)
    for n, (begin, end) in enumerate(pairwise(ends.tolist())):
        g = x.g if "T" not in VARIANTS[variant].decay else x.g[:, begin:end]
        one = replace(x, q=x.q[:, begin:end], k=x.k[:, begin:end], v=x.v[:, begin:end], g=g)
        alone = rounded.forward(one.problem(state[n : n + 1]), 8)
        assert torch.equal(output[:, begin:end], alone[0])
        assert torch.equal(final_state[n : n + 1], alone[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_formula_with_rounded_operands_equals_the_oracle_for_any_decay(variant):
    """With 53 bits nothing is rounded; with 8 the error is a few units of 2^-8."""
    x, random = inputs(variant, Shape(2, 70, 2, 4, 5), torch.float32), torch.Generator().manual_seed(0)
    for decay in (0.0, -1.0, -1000.0, -torch.inf) if x.g is not None else (0.0,):
        problem = (x if x.g is None else replace(x, g=torch.where(x.g < x.g.median(), x.g + decay, x.g))).problem()
        d_results = (torch.randn(x.v.shape, generator=random), torch.randn(2, 2, 4, 5, generator=random))
        doubles = problem.with_tensors({name: t.double() for name in Gradients._fields if (t := getattr(problem, name)) is not None})
        output, state = reference.exact(doubles)
        grads = gradients_of(reference.exact, doubles, [d.double() for d in d_results])
        exact = {"output": output, "final state": state} | oracle.by_result(dict(zip(Gradients._fields, grads)))
        for bits, least, most in ((53, 0.0, 1e-13), (8, 1e-4, 3e-2)):
            found = rounding.errors(problem, bits, exact, d_results)
            assert found.keys() == exact.keys()
            assert max(found.values()) >= least
            assert max(found.values()) <= most, found


def test_errors_are_the_largest_of_all_draws(monkeypatch):
    x = inputs("gla", Shape(1, 70, 1, 4, 5), torch.float32)
    exact = {"output": oracle.exact_forward(x)[0]}
    largest, each = rounding.errors(x.problem(), 8, exact)["output"], []
    for draw in rounded.DRAWS:
        monkeypatch.setattr(rounded, "DRAWS", (draw,))
        each.append(rounding.errors(x.problem(), 8, exact)["output"])
    assert len(set(each)) == len(each)
    assert largest == max(each)
