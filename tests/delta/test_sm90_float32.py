"""The Gluon kernels of gated DeltaNet and DeltaNet in float32 for Hopper, emulated on the CPU: results and gradients against the oracle."""

from dataclasses import replace

import pytest
import torch
from cases import check_against, upstream
from deltas import Delta, allowed, oracle
from hopper_deltas import (
    EMULATED,
    backward,
    forward,
    problem_of,
)
from sampling import every, slow

from penstock.delta.triton.forms.scalar_float32_sm90 import BACKWARD, FORWARD

pytestmark = EMULATED
OF = Delta("gated_delta_rule", B=1, H=1, T=150, K=128, V=128, dtype=torch.float32, others=torch.float32)
GATES = ("zero", "weak", "logsigmoid/16", "logsigmoid/0.1", "-exp(N(2,1))", "uneven", "spikes", "gone", "mixture")
CASES = [
    *(replace(OF, gate=gate) for gate in GATES),
    *(replace(OF, key=key, beta=beta, gate="weak") for key in ("positive", "near", "equal") for beta in (1.0, 2.0)),
    replace(OF, variant="delta_rule"),
    replace(OF, variant="delta_rule", K=64, V=64, key="equal", beta=1.0, H=2),
    replace(OF, B=2, T=70, H=6, G=2, gate="mixture"),
    replace(OF, T=64, V=64, H=2, G=1),
    replace(OF, T=1, K=64),
    replace(OF, T=63, gate="logsigmoid/16"),
    replace(OF, T=400, gate="logsigmoid/16"),
    replace(OF, H=2, G=1, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
    replace(OF, lengths=(130, 0, 3), state=False, scale=-0.3),
    replace(OF, T=70, scale=0.0),
    *(replace(OF, v_factor=1e4, gate=gate) for gate in ("weak", "spikes", "gone")),
    replace(OF, state_factor=1e5, scale=1e-3, gate="mixture"),
]
GRADIENTS = [*CASES, replace(OF, beta=0.0, T=70)]
NAMES = ("output", "final_state")


@pytest.mark.parametrize("case", [*every(6, CASES), *slow(*CASES)], ids=str)
def test_equal_the_oracle(case):
    """Within the budget of kernels that compute in float32."""
    found, wanted = forward(FORWARD, problem_of(case)), oracle(case)
    check_against({n: found[n] for n in NAMES}, {n: wanted[n] for n in NAMES}, case.dtype, allowed(case, "triton_chunkwise"))


@pytest.mark.parametrize("case", [*every(6, GRADIENTS), *slow(*GRADIENTS)], ids=str)
def test_gradients_equal_the_oracle(case):
    """Within the same budget."""
    found, wanted = backward(BACKWARD, problem_of(case), *upstream(case)), oracle(case)
    found = {f"d{name}": x for name, x in found.items() if f"d{name}" in wanted}
    assert {*found} == {*wanted} - {*NAMES}
    check_against(found, {n: wanted[n] for n in found}, case.dtype, allowed(case, "triton_chunkwise"))
