"""The Gluon kernels of KDA's backward pass for Hopper, emulated on the CPU: gradients against the oracle."""

from dataclasses import replace

import pytest
import torch
from cases import upstream
from deltas import Delta, oracle, rounding_errors
from hopper_deltas import A100, BUDGET, EMULATED, FLOOR, H200, assert_equal, backward, check_state_alone, forward, problem_of
from sampling import slow

from penstock.delta.triton.calls import Backward, Forward
from penstock.delta.triton.forms.channels_backward_sm90 import BACKWARD
from penstock.delta.triton.forms.channels_sm90 import FORWARD, KEPT

pytestmark = EMULATED
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
    *(replace(OF, K=64, V=64, gate=gate) for gate in GATES),
    *(replace(OF, **heads, H=2, lengths=(0, 5, 64, 1, 81, 0), gate="mixture") for heads in ({"K": 64}, {"V": 64})),
    replace(OF, K=64, V=64, B=2, T=70, H=2, G=1, gate="uneven"),
    replace(OF, K=64, V=64, beta=0.0, T=70),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_the_oracle(case):
    """The gradient of beta, a sum over all channels, may cancel: then twice the error of the rounded formula is allowed, too."""
    wanted, found = oracle(case), backward(BACKWARD, problem_of(case, repeated=True), *upstream(case))
    R = case.H // (case.G or case.H)
    for name, x in found.items():
        if f"d{name}" not in wanted:
            continue
        if name in ("q", "k") and R > 1:
            x = x.unflatten(2, (-1, R)).double().sum(3)
        off = float((x.double() - wanted[f"d{name}"].value).norm())
        allowed = BUDGET * wanted[f"d{name}"].size + FLOOR * x.numel()
        if off > allowed and name == "beta":
            allowed += 2 * rounding_errors(case, 8)["dbeta"]
        assert off <= allowed, (name, off / wanted[f"d{name}"].size)


@pytest.mark.parametrize("case", [replace(OF, gate="mixture"), replace(OF, B=2, T=70, H=2, G=1), replace(OF, lengths=(130, 0, 3))], ids=str)
def test_residuals(case):
    """Outputs with and without them, and gradients from them and from inputs alone, have equal bits."""
    problem, given = problem_of(case, repeated=True), upstream(case)
    plain, found = forward(FORWARD, problem), forward(FORWARD, problem, keep=True, seed=1)
    for name in ("output", "final_state"):
        assert torch.equal(plain[name], found[name]), name
    kept = {name: found[name] for name in KEPT}
    assert_equal(backward(BACKWARD, problem, *given), backward(BACKWARD, problem, *given, kept=kept, seed=1))


@pytest.mark.parametrize("final", [True, *slow(False)])
def test_the_gradient_of_the_state_alone(final):
    case = replace(OF, H=2, lengths=(70, 0, 130), gate="mixture")
    d_output, d_final = upstream(case)
    check_state_alone(BACKWARD, problem_of(case), d_output, d_final if final else None)


@pytest.mark.parametrize(
    ("case", "kept"),
    [
        (OF, True),
        (replace(OF, T=64), True),
        (replace(OF, V=64), False),
        (replace(OF, lengths=(130, 126)), True),
        (replace(OF, lengths=(1,) * 64), False),
    ],
    ids=str,
)
def test_what_is_kept(case, kept):
    """Residuals only where the backward pass takes them, and not of many short sequences."""
    made = FORWARD.plan(Forward.of(problem_of(case, repeated=True), H200, keep=True))
    assert set(KEPT) <= set(made.memory) if kept else "chunk_states" not in made.memory


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (OF, A100, "sm_90"),
        (replace(OF, K=192), H200, "K must be 64 or 128"),
        (replace(OF, V=192), H200, "V must be 64 or 128"),
        (replace(OF, dtype=torch.float16), H200, "it takes bfloat16"),
        (replace(OF, variant="gated_delta_rule"), H200, "decays per channel"),
        (replace(OF, H=2, strided=True), H200, "rows at multiples of 16 bytes"),
    ],
    ids=str,
)
def test_reasons(case, target, reason):
    d_output, d_final = upstream(case)
    call = Backward.of(problem_of(case, repeated=True), target, d_output=d_output, d_final_state=d_final)
    assert reason in str(BACKWARD.refusal(call))
