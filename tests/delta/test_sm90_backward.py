"""The Gluon kernels of KDA's backward pass for Hopper, emulated on the CPU: gradients against the oracle."""

from dataclasses import replace

import contract
import pytest
import torch
from cases import upstream
from deltas import Delta, oracle
from emulated import gluon

from penstock.delta.inputs import of_every_head
from penstock.delta.operators import DELTA
from penstock.delta.triton import plan
from penstock.gpu.hopper import without_gluon
from penstock.gpu.target import Target

pytestmark = [
    pytest.mark.skipif(without_gluon() is not None, reason="the Gluon of this Triton does not fit the kernels"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning"),
]
H200, A100 = Target("sm_90", 132, 232448), Target("sm_80", 108, 163 << 10)
BUDGET = 4 * torch.finfo(torch.bfloat16).eps / 4
"""The allowed relative error: two operands of every product, what lies between two products, and the result are rounded."""
FLOOR = 2.0**-90
"""Where beta is 0 it is 2^-100."""
NAMES = ("q", "k", "v", "g", "beta", "initial_state")

OF = Delta("kda", B=1, H=1, T=150, K=128, V=128, dtype=torch.bfloat16, others=torch.float32)
GATES = ("zero", "weak", "logsigmoid/16", "logsigmoid/0.1", "-exp(N(2,1))", "channels", "uneven", "spikes", "gone", "mixture")
CASES = [
    *(replace(OF, gate=gate) for gate in GATES),
    *(replace(OF, key=key, beta=1.0, gate="weak") for key in ("positive", "near", "equal")),
    replace(OF, beta=0.0, T=70),
    replace(OF, B=2, T=70, H=2, G=1, gate="mixture"),
    replace(OF, T=1),
    replace(OF, T=64, H=2),
    replace(OF, T=63, others=torch.bfloat16, gate="logsigmoid/16"),
    replace(OF, H=2, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
    replace(OF, lengths=(130, 0, 3), state=False, scale=-0.3),
]


def problem_of(case, drawn=None):
    return of_every_head(contract.problem_of(case, case.tensors() if drawn is None else drawn))


def run(problem, d_output, d_final, target=H200, seed=0):
    """All gradients by the emulated kernels."""
    made = plan.chunk_backward_plan(problem, d_output, d_final, target)
    assert made.forms[0] == "kda_bwd_sm90"
    tensors = {name: problem.q if x is None else x for name, x in zip(DELTA.names, problem.tensors)}
    tensors |= {"q": problem.q, "k": problem.k, "d_output": d_output, "d_final_state": d_final}  # q and k of every head
    found = gluon.run(made, tensors, problem.sizes, seed)
    return {name: found["d_initial_state" if name == "initial_state" else "d" + name] for name in NAMES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_the_oracle(case):
    problem, wanted = problem_of(case), oracle(case)
    d_output, d_final = upstream(case)
    found = run(problem, d_output, d_final)
    R = case.H // (case.G or case.H)
    for name, x in found.items():
        if f"d{name}" not in wanted:
            continue
        if name in ("q", "k") and R > 1:
            x = x.unflatten(2, (-1, R)).double().sum(3)
        off = float((x.double() - wanted[f"d{name}"].value).norm())
        assert off <= BUDGET * wanted[f"d{name}"].size + FLOOR * x.numel(), (name, off / wanted[f"d{name}"].size)
