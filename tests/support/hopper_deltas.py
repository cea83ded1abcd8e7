"""The Gluon kernels of the delta rule for Hopper, emulated on the CPU: what their tests share."""

import contract
import pytest
import torch
from emulated import gluon

from penstock.delta import rounded
from penstock.delta.inputs import of_every_head
from penstock.delta.operators import DELTA
from penstock.delta.triton.calls import Backward, Forward
from penstock.gpu.hopper import without_gluon
from penstock.gpu.target import Target

EMULATED = [
    pytest.mark.skipif(without_gluon() is not None, reason="the Gluon of this Triton does not fit the kernels"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning"),
]
"""The marks of a module of tests."""
H200, A100 = Target("sm_90", 132, 232448), Target("sm_80", 108, 163 << 10)
SMALL = Target("sm_90", 2, 232448)
"""So few multiprocessors that a program has all value channels."""
BUDGET = torch.finfo(torch.bfloat16).eps
"""The allowed relative error: two operands of every product, what lies between two products, and the result are rounded by eps / 4."""
BITS = {torch.bfloat16: rounded.BFLOAT16, torch.float16: rounded.FLOAT16}
"""Significant bits of operands."""
FLOOR = 2.0**-90
"""Of a gradient's elements: where beta is 0 it is 2^-100."""
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def budget(case):
    """As ``BUDGET``, of a case's dtype."""
    return torch.finfo(case.dtype).eps


def problem_of(case, drawn=None, *, repeated=False):
    """``repeated``: every head of v has a head of q and k of its own."""
    problem = contract.problem_of(case, case.tensors() if drawn is None else drawn)
    return of_every_head(problem) if repeated else problem


def given(problem):
    return {name: problem.q if x is None else x for name, x in zip(DELTA.names, problem.tensors)}


def forward(form, problem, target=H200, *, keep=False, seed=0):
    """The memory of the kernels of the forward pass: output, final_state and, kept, its residuals."""
    call = Forward.of(problem, target, keep=keep)
    assert form.refusal(call) is None
    return gluon.run(form.plan(call), given(problem), problem.sizes, seed)


def backward(form, problem, d_output, d_final, target=H200, *, kept=(), seed=0):
    """The gradients, by the names of inputs. ``kept``: residuals of the forward pass by name."""
    call = Backward.of(problem, target, d_output=d_output, d_final_state=d_final, kept=bool(kept))
    assert form.refusal(call) is None
    tensors = given(problem) | {"d_output": d_output} | ({} if d_final is None else {"d_final_state": d_final}) | dict(kept)
    found = gluon.run(form.plan(call), tensors, problem.sizes, seed)
    names = {name: "d_initial_state" if name == "initial_state" else "d" + name for name in NAMES}
    return {name: found[x] for name, x in names.items() if x in found}


def check_residuals_spare_launches(form, problem, d_output, d_final, target=H200):
    """A backward pass that has residuals has fewer launches."""
    one, other = (
        form.plan(Backward.of(problem, target, d_output=d_output, d_final_state=d_final, kept=kept)).launches for kept in (True, False)
    )
    assert len(one) < len(other)


def check_state_alone(form, problem, d_output, d_final, target=H200):
    """The gradient of the initial state alone takes fewer launches and has the bits that it has beside the others."""
    found = []
    for alone in (False, True):
        call = Backward.of(problem, target, d_output=d_output, d_final_state=d_final, state_alone=alone)
        plan = form.plan(call)
        tensors = given(problem) | {"d_output": d_output} | ({} if d_final is None else {"d_final_state": d_final})
        found.append((len(plan.launches), gluon.run(plan, tensors, problem.sizes, 0)["d_initial_state"]))
    (every, whole), (fewer, one) = found
    assert fewer < every
    assert torch.equal(one, whole)


def assert_equal(first, second):
    """The tensors of a dictionary have the bits of those of the other."""
    for name, x in first.items():
        assert torch.equal(x, second[name]), name
