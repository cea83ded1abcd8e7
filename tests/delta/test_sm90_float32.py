"""The Gluon kernels of gated DeltaNet and DeltaNet in float32 for Hopper, emulated on the CPU: results and gradients against the oracle."""

from dataclasses import replace

import pytest
import torch
from cases import check_against, upstream
from deltas import Delta, allowed, oracle
from hopper_deltas import (
    A100,
    EMULATED,
    H200,
    assert_equal,
    backward,
    check_residuals_spare_launches,
    check_state_alone,
    forward,
    problem_of,
)
from sampling import every, slow

from penstock.delta.inputs import of_every_head
from penstock.delta.triton.calls import Backward, Forward
from penstock.delta.triton.forms.lists import residuals_of
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


@pytest.mark.parametrize(
    "case",
    [replace(OF, H=2, G=1, gate="mixture"), replace(OF, variant="delta_rule", K=64, T=70), replace(OF, lengths=(130, 0, 3), state=False)],
    ids=str,
)
def test_residuals(case):
    """Outputs with and without them, and gradients from them and from inputs alone, have equal bits."""
    problem, given = problem_of(case), upstream(case)
    plain, found = forward(FORWARD, problem), forward(FORWARD, problem, keep=True, seed=1)
    assert_equal({name: plain[name] for name in NAMES}, found)
    kept = {name: found[name] for name in residuals_of(problem)}
    assert_equal(backward(BACKWARD, problem, *given), backward(BACKWARD, problem, *given, kept=kept, seed=1))
    check_residuals_spare_launches(BACKWARD, problem, *given)


@pytest.mark.parametrize("final", [True, *slow(False)])
def test_the_gradient_of_the_state_alone(final):
    case = replace(OF, H=2, lengths=(70, 0, 130), gate="mixture")
    d_output, d_final = upstream(case)
    check_state_alone(BACKWARD, problem_of(case), d_output, d_final if final else None)


@pytest.mark.parametrize("lengths", [None, (70, 60)], ids=["batch", "packed"])
def test_other_sequences_change_no_bit(lengths):
    """Gradients of a sequence alone and beside others."""
    case = replace(OF, B=2 if lengths is None else 1, T=70 if lengths is None else 130, lengths=lengths, gate="mixture")
    drawn, (d_output, d_final) = case.tensors(), upstream(case)
    whole = backward(BACKWARD, problem_of(case, drawn), d_output, d_final)

    def of_first(x, name=""):
        return x[:1] if lengths is None or name == "initial_state" else x[:, :70]

    alone = replace(case, B=1, T=70, lengths=None)
    given = {name: None if x is None else of_first(x, name) for name, x in drawn.items() if name != "cu_seqlens"}
    found = backward(BACKWARD, problem_of(alone, given), of_first(d_output), d_final[:1], seed=1)
    assert_equal(found, {name: of_first(x, name) for name, x in whole.items()})


def test_refuses_repeated_heads():
    """Their gradients would be rounded before they are summed."""
    case = replace(OF, H=2, G=1)
    d_output, d_final = upstream(case)
    call = Backward.of(of_every_head(problem_of(case)), H200, d_output=d_output, d_final_state=d_final)
    assert "as they are" in str(BACKWARD.refusal(call))


def test_heads_of_a_group_are_those_of_repeated_keys():
    problem = problem_of(replace(OF, B=2, T=70, H=4, G=2))
    found, repeated = forward(FORWARD, problem), forward(FORWARD, of_every_head(problem))
    for name in NAMES:
        assert torch.equal(found[name], repeated[name]), name


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (OF, A100, "sm_90"),
        (replace(OF, K=96), H200, "K must be 64 or 128"),
        (replace(OF, V=192), H200, "V must be 64 or 128"),
        (replace(OF, dtype=torch.bfloat16), H200, "it takes float32"),
        (replace(OF, variant="kda"), H200, "without decays per channel"),
        (replace(OF, H=2, strided=True), H200, "rows at multiples of 16 bytes"),
    ],
    ids=str,
)
def test_reasons(case, target, reason):
    d_output, d_final = upstream(case)
    assert reason in str(FORWARD.refusal(Forward.of(problem_of(case), target)))
    assert reason in str(BACKWARD.refusal(Backward.of(problem_of(case), target, d_output=d_output, d_final_state=d_final)))
