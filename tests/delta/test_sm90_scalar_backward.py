"""The Gluon kernels of the backward pass of gated DeltaNet and DeltaNet for Hopper, emulated on the CPU: gradients against the oracle."""

from dataclasses import replace

import pytest
import torch
from cases import upstream
from deltas import Delta, oracle, rounding_errors
from hopper_deltas import (
    BITS,
    EMULATED,
    FLOOR,
    H200,
    SMALL,
    assert_equal,
    backward,
    budget,
    problem_of,
)

from penstock.delta.inputs import of_every_head
from penstock.delta.triton.calls import Forward
from penstock.delta.triton.forms.lists import residuals_of
from penstock.delta.triton.forms.scalar_backward_sm90 import BACKWARD
from penstock.delta.triton.forms.scalar_sm90 import FORWARD

pytestmark = EMULATED
OF = Delta("gated_delta_rule", B=1, H=1, T=150, K=128, V=128, dtype=torch.bfloat16, others=torch.float32)
HALF = replace(OF, dtype=torch.float16)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
NAMED = frozenset([FORWARD.name, BACKWARD.name])
"""A target with these runs them also where they are avoided."""
GATES = ("zero", "weak", "logsigmoid/16", "logsigmoid/0.1", "-exp(N(2,1))", "uneven", "spikes", "gone", "mixture")
CASES = [
    *(replace(OF, gate=gate) for gate in GATES),
    *(replace(OF, key=key, beta=1.0, gate="weak") for key in ("positive", "near", "equal")),
    replace(OF, key="equal", beta=2.0, gate="weak"),
    replace(OF, beta=0.0, T=70),
    replace(OF, variant="delta_rule"),
    replace(OF, variant="delta_rule", K=64, V=64, key="equal", beta=1.0, H=2),
    replace(OF, B=2, T=70, H=6, G=2, gate="mixture"),
    replace(OF, T=64, V=64, H=2, G=1),
    replace(OF, T=1, K=64),
    replace(OF, T=63, others=torch.bfloat16, gate="logsigmoid/16"),
    replace(OF, H=2, G=1, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
    replace(OF, lengths=(130, 0, 3), state=False, scale=-0.3),
]
HALVES = [
    *(replace(case, dtype=torch.float16, others=torch.float16 if case.others == torch.bfloat16 else case.others) for case in CASES),
    *(replace(HALF, upstream_factor=1e3, v_factor=0.01, state_factor=0.01, gate=gate) for gate in ("weak", "spikes")),
    *(replace(HALF, state_factor=1e5, upstream_factor=1e-3, gate=gate) for gate in ("weak", "mixture")),
    replace(HALF, beta=1e-6, upstream_factor=1e3, state_factor=0.1, gate="weak"),
    replace(HALF, still=True, gate="logsigmoid/16"),
]
"""Of float16: gradients, states and factors that it cannot hold, and states that only decay."""


@pytest.mark.parametrize("case", [*CASES, *HALVES], ids=str)
def test_equal_the_oracle(case):
    """Sums over all channels, such as dg, may cancel: then twice the error of the formula with rounded operands is allowed, too."""
    wanted = oracle(case)
    for name, x in backward(BACKWARD, problem_of(case), *upstream(case)).items():
        if f"d{name}" not in wanted:
            continue
        off = float((x.double() - wanted[f"d{name}"].value).norm())
        allowed = budget(case) * wanted[f"d{name}"].size + FLOOR * x.numel()
        if off > allowed:
            allowed += 2 * rounding_errors(case, BITS[case.dtype])[f"d{name}"]
        assert off <= allowed, (name, off / wanted[f"d{name}"].size)


@pytest.mark.parametrize("case", [replace(OF, H=6, G=2, gate="mixture"), replace(OF, variant="delta_rule", H=3, G=1, T=70)], ids=str)
def test_groups_of_warps_in_any_order_give_equal_bits(case):
    """Each seed of the emulator is another order in which they go on."""
    problem, given = problem_of(case), upstream(case)
    first = backward(BACKWARD, problem, *given)
    for seed in range(1, 6):
        assert_equal(first, backward(BACKWARD, problem, *given, seed=seed))


@DTYPES
@pytest.mark.parametrize(
    ("case", "repeated", "kept"),
    [
        (OF, False, True),
        (replace(OF, T=64, V=64, H=2, G=1), False, True),
        (replace(OF, H=2, G=1), True, False),
        (replace(OF, lengths=(130, 126)), False, True),
        (replace(OF, lengths=(1,) * 64), False, False),
    ],
    ids=str,
)
def test_what_is_kept(case, repeated, kept, dtype):
    """Residuals only where the backward pass takes them, and not of many short sequences."""
    problem = problem_of(replace(case, dtype=dtype))
    for target in (H200, H200._replace(forms=NAMED)):
        call = Forward.of(of_every_head(problem) if repeated else problem, target, keep=True)
        memory = FORWARD.plan(call).memory
        taken = kept and (BACKWARD.avoids(call) is None or target.forms == NAMED)
        assert set(residuals_of(problem)) <= set(memory) if taken else "chunk_states" not in memory


@DTYPES
@pytest.mark.parametrize("case", [replace(OF, H=2, G=1, gate="mixture"), replace(OF, H=2, lengths=(70, 3), gate="spikes")], ids=str)
def test_blocks_of_value_channels_change_no_bit(case, dtype):
    """A program that walks has 64 value channels or, with enough heads, all 128."""
    case = replace(case, dtype=dtype)
    problem, given = problem_of(case), upstream(case)
    assert_equal(backward(BACKWARD, problem, *given), backward(BACKWARD, problem, *given, SMALL, seed=1))
