"""The Gluon kernels of gated DeltaNet and DeltaNet in float32 for Hopper, emulated on the CPU: results against the oracle."""

from dataclasses import replace

import pytest
import torch
from cases import check_against
from deltas import Delta, allowed, oracle
from hopper_deltas import A100, EMULATED, H200, forward, problem_of
from sampling import every, slow

from penstock.delta.inputs import of_every_head
from penstock.delta.triton.calls import Forward
from penstock.delta.triton.forms import scalar_float32_sm90

pytestmark = EMULATED
FORWARD = scalar_float32_sm90.FORWARD
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
NAMES = ("output", "final_state")


@pytest.mark.parametrize("case", [*every(6, CASES), *slow(*CASES)], ids=str)
def test_equal_the_oracle(case):
    """Within the budget of kernels that compute in float32."""
    found, wanted = forward(FORWARD, problem_of(case)), oracle(case)
    check_against({n: found[n] for n in NAMES}, {n: wanted[n] for n in NAMES}, case.dtype, allowed(case, "triton_chunkwise"))


def test_heads_of_a_group_are_those_of_repeated_keys():
    problem = problem_of(replace(OF, B=2, T=70, H=4, G=2))
    found, repeated = forward(FORWARD, problem), forward(FORWARD, of_every_head(problem))
    for name in NAMES:
        assert torch.equal(found[name], repeated[name]), name


def test_what_is_kept_changes_no_bit():
    problem = problem_of(replace(OF, H=2, T=130, gate="mixture"))
    found, kept = forward(FORWARD, problem), forward(FORWARD, problem, keep=True)
    for name in NAMES:
        assert torch.equal(found[name], kept[name]), name


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
    assert reason in str(FORWARD.refusal(Forward.of(problem_of(case), target)))
