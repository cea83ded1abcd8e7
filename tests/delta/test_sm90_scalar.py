"""The Gluon kernels of gated DeltaNet and DeltaNet for Hopper, emulated on the CPU: results against the oracle."""

from dataclasses import replace

import pytest
import torch
from deltas import Delta, oracle, rounding_errors
from hopper_deltas import A100, BITS, EMULATED, H200, SMALL, budget, forward, problem_of

from penstock.delta.triton import answers, plan
from penstock.delta.triton.forms import scalar_sm90
from penstock.gpu.target import standing_in

pytestmark = EMULATED
OF = Delta("gated_delta_rule", B=1, H=1, T=150, K=128, V=128, dtype=torch.bfloat16, others=torch.float32)
HALF = replace(OF, dtype=torch.float16)
GATES = ("zero", "weak", "logsigmoid/16", "logsigmoid/0.1", "-exp(N(2,1))", "uneven", "spikes", "gone", "mixture")
CASES = [
    *(replace(OF, gate=gate) for gate in GATES),
    *(replace(OF, key=key, beta=beta, gate="weak") for key in ("positive", "near", "equal") for beta in (1.0, 2.0)),
    replace(OF, variant="delta_rule"),
    replace(OF, variant="delta_rule", K=64, V=64, key="equal", beta=1.0, H=2),
    replace(OF, B=2, T=70, H=6, G=2, gate="mixture"),
    replace(OF, T=64, V=64, H=2, G=1),
    replace(OF, T=1, K=64),
    replace(OF, T=63, others=torch.bfloat16, gate="logsigmoid/16"),
    replace(OF, T=400, gate="logsigmoid/16"),
    replace(OF, H=2, G=1, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
    replace(OF, lengths=(130, 0, 3), state=False, scale=-0.3),
    replace(OF, T=70, scale=0.0),
]
HALVES = [
    *(replace(case, dtype=torch.float16, others=torch.float16 if case.others == torch.bfloat16 else case.others) for case in CASES),
    *(replace(HALF, v_factor=1e4, gate=gate) for gate in ("weak", "spikes", "gone")),
    *(replace(HALF, state_factor=1e5, scale=1e-3, gate=gate) for gate in ("weak", "spikes", "mixture")),
    replace(HALF, v_factor=1e4, key="equal", beta=1.0, gate="weak"),
    replace(HALF, v_factor=1e-3, state_factor=1e5, scale=1e-3, gate="logsigmoid/16", lengths=(70, 80)),
    replace(HALF, still=True, gate="logsigmoid/16"),
]
"""Of float16: values and states that it cannot hold, and those that only decay."""


@pytest.mark.parametrize("case", [*CASES, *HALVES], ids=str)
def test_equal_the_oracle(case):
    """With correlated keys and beta = 2 the inverse amplifies errors: a tenth of those of the formula with rounded operands is allowed."""
    wanted, amplified = oracle(case), rounding_errors(case, BITS[case.dtype]) if case.beta == 2.0 else {}
    found = forward(scalar_sm90.FORWARD, problem_of(case))
    for name in ("output", "final_state"):
        off = float((found[name].double() - wanted[name].value).norm())
        assert off <= budget(case) * wanted[name].size + amplified.get(name, 0.0) / 10, (name, off / wanted[name].size)


@pytest.mark.parametrize("of", [OF, HALF], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("more", [{"G": 1, "gate": "mixture"}, {"lengths": (70, 3), "gate": "spikes"}], ids=["groups", "packed"])
def test_blocks_of_value_channels_change_no_bit(of, more):
    """A program has 64 value channels or, with enough heads, all 128."""
    problem = problem_of(replace(of, H=2, **more))
    first, second = forward(scalar_sm90.FORWARD, problem), forward(scalar_sm90.FORWARD, problem, SMALL, seed=1)
    for name in ("output", "final_state"):
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize(("variant", "taken"), [("gated_delta_rule", True), ("delta_rule", True), ("kda", False)])
def test_heads_of_a_group_are_not_repeated(variant, taken):
    problem = problem_of(replace(OF, variant=variant, H=4, G=2))
    d_output = torch.zeros_like(problem.v)
    with standing_in(H200):
        for mode in ("forward", "backward"):
            assert answers.take_groups(answers.CHUNKWISE, problem, mode, d_output if mode == "backward" else None) is taken
        assert not answers.take_groups(answers.CHUNKWISE, problem, "backward", d_output.transpose(1, 2).contiguous().transpose(1, 2))
    assert not answers.take_groups(answers.CHUNKWISE, problem, "advance", None)
    with standing_in(A100):
        assert not answers.take_groups(answers.CHUNKWISE, problem_of(replace(OF, H=4, G=2, T=3)), "forward", None)


def test_heads_of_a_group_are_repeated_for_forms_that_are_avoided():
    """A form that is named computes them as they are."""
    avoided = replace(scalar_sm90.FORWARD, avoids=lambda call: "it is slower")
    lists = {
        mode: tuple([(name, tuple([avoided if one is scalar_sm90.FORWARD else one for one in forms])) for name, forms in parts])
        for mode, parts in answers.CHUNKWISE.items()
    }
    for target in (H200, H200._replace(forms=frozenset([avoided.name]))):
        with standing_in(target):
            found = [answers.take_groups(one, problem_of(replace(OF, H=4, G=2)), "forward", None) for one in (answers.CHUNKWISE, lists)]
        assert found == [True, bool(target.forms)]


@pytest.mark.parametrize("case", [OF, HALF], ids=str)
def test_is_the_form_of_calls_on_hopper(case):
    assert plan.chunk_forward_plan(problem_of(replace(case, H=4, G=2)), H200).forms == ["gdn_prepare_sm90"]
    assert plan.chunk_forward_plan(problem_of(case), A100).forms == ["delta_chunks"]
