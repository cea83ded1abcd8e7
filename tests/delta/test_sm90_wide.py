"""The Gluon kernels of gated DeltaNet and DeltaNet with wide heads for Hopper, emulated on a CPU, against the oracle."""

from dataclasses import replace

import pytest
import torch
from cases import upstream
from deltas import Delta, oracle, rounding_errors
from hopper_deltas import A100, BUDGET, EMULATED, FLOOR, H200, assert_equal, backward, forward, problem_of

from penstock.delta.triton import plan
from penstock.delta.triton.forms.wide_sm90 import BACKWARD, FORWARD

pytestmark = EMULATED
OF = Delta("gated_delta_rule", B=1, H=1, T=150, K=256, V=128, dtype=torch.bfloat16, others=torch.float32)
GATES = ("zero", "logsigmoid/0.1", "-exp(N(2,1))", "spikes", "gone", "mixture")
CASES = [
    *(replace(OF, gate=gate) for gate in GATES),
    *(replace(OF, key=key, beta=1.0, gate="weak") for key in ("positive", "near", "equal")),
    replace(OF, key="equal", beta=2.0, gate="weak"),
    replace(OF, beta=0.0, T=70),
    replace(OF, variant="delta_rule", K=128, V=192, T=300),
    replace(OF, B=2, T=70, H=3, K=64, V=192, gate="mixture"),
    replace(OF, T=64, V=64, H=2),
    replace(OF, T=1, V=64),
    replace(OF, T=63, others=torch.bfloat16, gate="logsigmoid/16"),
    replace(OF, H=2, V=64, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
    replace(OF, lengths=(130, 0, 3), state=False, scale=-0.3),
]


def allowed(case, name, wanted, numbers):
    """The budget, and with correlated keys and beta = 2 a tenth of the errors of the formula with rounded operands."""
    found = BUDGET * wanted.size + FLOOR * numbers
    return found + (rounding_errors(case, 8).get(name, 0.0) / 10 if case.beta == 2.0 else 0.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_the_oracle(case):
    wanted, found = oracle(case), forward(FORWARD, problem_of(case, repeated=True))
    for name in ("output", "final_state"):
        off = float((found[name].double() - wanted[name].value).norm())
        assert off <= allowed(case, name, wanted[name], 0), (name, off / wanted[name].size)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_the_oracle(case):
    """Sums over all channels, such as dg, may cancel: then twice the error of the formula with rounded operands is allowed, too."""
    wanted = oracle(case)
    for name, x in backward(BACKWARD, problem_of(case, repeated=True), *upstream(case)).items():
        if f"d{name}" not in wanted:
            continue
        off = float((x.double() - wanted[f"d{name}"].value).norm())
        most = allowed(case, f"d{name}", wanted[f"d{name}"], x.numel())
        if off > most:
            most += 2 * rounding_errors(case, 8)[f"d{name}"]
        assert off <= most, (name, off / wanted[f"d{name}"].size)


def test_one_head_of_queries_and_keys_for_all():
    """A head of q and k that all heads share is read as it is."""
    problem = problem_of(replace(OF, H=2, G=1, T=70), repeated=True)
    assert problem.q.stride(2) == 0
    wide = problem.with_tensors({"q": problem.q.contiguous(), "k": problem.k.contiguous()})
    first, second = forward(FORWARD, problem), forward(FORWARD, wide)
    for name in ("output", "final_state"):
        assert torch.equal(first[name], second[name]), name
    given = upstream(replace(OF, H=2, T=70))
    assert_equal(backward(BACKWARD, problem, *given), backward(BACKWARD, wide, *given, seed=1))


@pytest.mark.parametrize("target", [A100, H200], ids=["A100", "H200"])
def test_is_taken_on_hopper(target):
    problem = problem_of(replace(OF, H=200), repeated=True)
    assert plan.chunk_forward_plan(problem, target).forms == ["gdn_wide_sm90" if target is H200 else "delta_chunks"]
