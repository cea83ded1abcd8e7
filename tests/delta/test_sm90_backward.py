"""The Gluon kernels of KDA's backward pass for Hopper, emulated on the CPU: gradients against the oracle."""

from dataclasses import replace

import pytest
import torch
from cases import upstream
from deltas import Delta, oracle, rounding_errors
from hopper_deltas import EMULATED, FLOOR, H200, backward, problem_of

from penstock.delta.triton.calls import Forward
from penstock.delta.triton.forms.channels_backward_sm90 import BACKWARD
from penstock.delta.triton.forms.channels_sm90 import FORWARD, kept

pytestmark = EMULATED
OF = Delta("kda", B=1, H=1, T=150, K=128, V=128, dtype=torch.bfloat16, others=torch.float32)
GATES = ("zero", "weak", "logsigmoid/16", "logsigmoid/0.1", "-exp(N(2,1))", "channels", "uneven", "spikes", "gone", "mixture")
BFLOAT16_CASES = [
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
HALF = replace(OF, dtype=torch.float16)
LARGE = replace(HALF, v_factor=1e4, state_factor=1e5, upstream_factor=1e3, scale=1e-4, H=2)
"""Values, states and gradients beyond float16, and gradients within it that need them."""
FLOAT16_CASES = [
    *(
        replace(case, dtype=torch.float16, others=torch.float32 if case.others == torch.float32 else torch.float16)
        for case in BFLOAT16_CASES
    ),
    *(replace(HALF, key=key, beta=2.0, gate="weak") for key in ("positive", "near", "equal")),
    *(replace(LARGE, gate=gate, upstream_factor=1e-3) for gate in ("weak", "mixture")),
    *(replace(LARGE, gate=gate) for gate in ("weak", "gone")),
    replace(LARGE, v_factor=1e-2, state_factor=1e-2),
    replace(LARGE, K=64, V=64, v_factor=1e-2, state_factor=1e-2, lengths=(70, 80), gate="gone"),
    replace(HALF, T=70, scale=1e4, upstream_factor=1e-3),
]


@pytest.mark.parametrize("case", [*BFLOAT16_CASES, *FLOAT16_CASES], ids=str)
def test_equal_the_oracle(case):
    """Two operands of every product, what lies between two products, and the result are rounded by eps / 4.

    Gradients beyond float16 are infinite. That of beta, a sum over all channels, may cancel: then twice the error of the rounded
    formula is allowed, too. In float16 W has as many bits as what it is the difference of, which keys that are alike amplify: then that is
    allowed for all gradients.
    """
    wanted, found = oracle(case), backward(BACKWARD, problem_of(case, repeated=True), *upstream(case))
    R = case.H // (case.G or case.H)
    for name, x in found.items():
        if f"d{name}" not in wanted:
            continue
        if name in ("q", "k") and R > 1:
            x = x.unflatten(2, (-1, R)).double().sum(3)
        value = wanted[f"d{name}"].value
        if value.abs().max() > torch.finfo(case.dtype).max and name in ("q", "k", "v"):
            assert not x.isfinite().all(), name
            continue
        off = float((x.double() - value).norm())
        allowed = torch.finfo(case.dtype).eps * wanted[f"d{name}"].size + FLOOR * x.numel()
        if off > allowed and (name == "beta" or (case.dtype == torch.float16 and case.key != "random")):
            allowed += 2 * rounding_errors(case, 8 if case.dtype == torch.bfloat16 else 11)[f"d{name}"]
        assert off <= allowed, (name, off / wanted[f"d{name}"].size)


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (OF, True),
        (replace(OF, T=64), True),
        (replace(OF, K=64, V=64), True),
        (replace(OF, lengths=(130, 126)), True),
        (replace(OF, lengths=(1,) * 64), False),
        (replace(OF, dtype=torch.float16), True),
    ],
    ids=str,
)
def test_what_is_kept(case, wanted):
    """Residuals only where the backward pass takes them, and not of many short sequences."""
    problem = problem_of(case, repeated=True)
    made = FORWARD.plan(Forward.of(problem, H200, keep=True))
    assert set(kept(problem)) <= set(made.memory) if wanted else "chunk_states" not in made.memory
