"""The Gluon kernels of KDA for Hopper, emulated on the CPU: results against the oracle."""

from dataclasses import replace

import pytest
import torch
from deltas import Delta, oracle, rounding_errors
from hopper_deltas import EMULATED, H200, forward, problem_of

from penstock.delta.triton import plan
from penstock.delta.triton.forms import channels_sm90

pytestmark = EMULATED
OF = Delta("kda", B=1, H=1, T=150, K=128, V=128, dtype=torch.bfloat16, others=torch.float32)
GATES = ("zero", "weak", "logsigmoid/16", "logsigmoid/0.1", "-exp(N(2,1))", "channels", "uneven", "spikes", "gone", "mixture")
BFLOAT16_CASES = [
    *(replace(OF, gate=gate) for gate in GATES),
    *(replace(OF, key=key, beta=1.0, gate="weak") for key in ("positive", "near", "equal")),
    replace(OF, B=2, T=70, H=2, G=1, gate="mixture"),
    replace(OF, T=64, V=64, H=2),
    replace(OF, T=1, V=64),
    replace(OF, T=63, others=torch.bfloat16, gate="logsigmoid/16"),
    replace(OF, T=400, gate="logsigmoid/16"),
    replace(OF, H=2, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
    replace(OF, lengths=(130, 0, 3), state=False, scale=-0.3),
    replace(OF, T=70, scale=0.0),
    *(replace(OF, K=64, V=64, gate=gate) for gate in GATES),
    replace(OF, K=64, H=2, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
    replace(OF, K=64, V=64, B=2, T=70, H=2, G=1, gate="uneven"),
]
HALF = replace(OF, dtype=torch.float16)
LARGE = replace(HALF, v_factor=1e4, state_factor=1e5, scale=0.005)
"""Values and states beyond float16, whose outputs are within it."""
FLOAT16_CASES = [
    *(
        replace(case, dtype=torch.float16, others=torch.float32 if case.others == torch.float32 else torch.float16)
        for case in BFLOAT16_CASES
    ),
    *(replace(HALF, key=key, beta=2.0, gate="weak") for key in ("positive", "near", "equal")),
    *(replace(LARGE, gate=gate) for gate in ("weak", "mixture")),
    replace(LARGE, K=64, V=64, lengths=(70, 80)),
    replace(HALF, T=1, gate=-18.0, still=True, scale=1e6),
    replace(HALF, T=70, scale=1e-6, v_factor=1e4),
]


def test_is_the_form_of_calls_on_hopper():
    for case in (OF, HALF):
        assert plan.chunk_forward_plan(problem_of(case), H200).forms[0] == "kda_prepare_sm90"


@pytest.mark.parametrize("case", [*BFLOAT16_CASES, *FLOAT16_CASES], ids=str)
def test_equal_the_oracle(case):
    """Two operands of every product, what lies between two products, and the result are rounded by eps / 4.

    Keys that are alike amplify errors if beta is 2. Then twice the error of the rounded formula is allowed, too.
    """
    wanted, found = oracle(case), forward(channels_sm90.FORWARD, problem_of(case, repeated=True))
    for name in ("output", "final_state"):
        off = float((found[name].double() - wanted[name].value).norm())
        allowed = torch.finfo(case.dtype).eps * wanted[name].size
        if case.beta == 2.0:
            allowed += 2 * rounding_errors(case, 11)[name]
        assert off <= allowed, (name, off / wanted[name].size)
