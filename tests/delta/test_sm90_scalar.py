"""The Gluon kernels of gated DeltaNet and DeltaNet for Hopper, emulated on the CPU: results against the oracle."""

from dataclasses import replace

import contract
import pytest
import torch
from deltas import Delta, oracle, rounding_errors
from emulated import gluon

from penstock.delta.inputs import of_every_head
from penstock.delta.operators import DELTA
from penstock.delta.triton import answers, plan
from penstock.delta.triton.calls import Forward
from penstock.delta.triton.forms import scalar_sm90
from penstock.gpu.hopper import without_gluon
from penstock.gpu.target import Target, standing_in

pytestmark = [
    pytest.mark.skipif(without_gluon() is not None, reason="the Gluon of this Triton does not fit the kernels"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning"),
]
H200, A100 = Target("sm_90", 132, 232448), Target("sm_80", 108, 163 << 10)
SMALL = Target("sm_90", 2, 232448)
"""So few multiprocessors that a program has all value channels."""
BUDGET = 4 * torch.finfo(torch.bfloat16).eps / 4
"""The allowed relative error: two operands of every product, what lies between two products, and the result are rounded."""

OF = Delta("gated_delta_rule", B=1, H=1, T=150, K=128, V=128, dtype=torch.bfloat16, others=torch.float32)
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


def problem_of(case, drawn=None):
    return contract.problem_of(case, case.tensors() if drawn is None else drawn)


def run(problem, target=H200, seed=0):
    """The results of the emulated kernels."""
    call = Forward.of(problem, target)
    assert scalar_sm90.FORWARD.refusal(call) is None
    tensors = {name: problem.q if x is None else x for name, x in zip(DELTA.names, problem.tensors)}
    found = gluon.run(scalar_sm90.FORWARD.plan(call), tensors, problem.sizes, seed)
    return {name: found[name] for name in ("output", "final_state")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_the_oracle(case):
    """With correlated keys and beta = 2 the inverse amplifies errors: a tenth of those of the formula with rounded operands is allowed."""
    wanted, amplified = oracle(case), rounding_errors(case, 8) if case.beta == 2.0 else {}
    for name, x in run(problem_of(case)).items():
        off = float((x.double() - wanted[name].value).norm())
        assert off <= BUDGET * wanted[name].size + amplified.get(name, 0.0) / 10, (name, off / wanted[name].size)


@pytest.mark.parametrize("case", [replace(OF, H=2, G=1, gate="mixture"), replace(OF, H=2, lengths=(70, 3), gate="spikes")], ids=str)
def test_blocks_of_value_channels_change_no_bit(case):
    """A program has 64 value channels or, with enough heads, all 128."""
    problem = problem_of(case)
    first, second = run(problem), run(problem, SMALL, seed=1)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def test_heads_of_a_group_are_those_of_repeated_keys():
    problem = problem_of(replace(OF, B=2, T=70, H=4, G=2))
    repeated = run(of_every_head(problem))
    for name, x in run(problem).items():
        assert torch.equal(x, repeated[name]), name


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


def test_is_the_form_of_calls_on_hopper():
    assert plan.chunk_forward_plan(problem_of(replace(OF, H=4, G=2)), H200).forms == ["gdn_prepare_sm90"]
    assert plan.chunk_forward_plan(problem_of(OF), A100).forms == ["delta_chunks"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("g", torch.inf), *((name, value) for name in ("q", "k", "v", "beta") for value in (torch.nan, torch.inf))],
)
def test_packed_neighbours_change_no_bit(name, value):
    """A tile reaches past the end of its sequence."""
    case = replace(OF, lengths=(70, 90))
    drawn = case.tensors()
    changed = drawn | {name: drawn[name].clone()}
    changed[name][:, 70:] = -value if name == "g" else value
    before, after = run(problem_of(case, drawn)), run(problem_of(case, changed))
    assert torch.equal(before["output"][:, :70], after["output"][:, :70])
    assert torch.equal(before["final_state"][0], after["final_state"][0])


@pytest.mark.parametrize("cut", [1, 17, 37, 64, 90])
def test_later_tokens_change_no_bit(cut):
    """Outputs before a cut."""
    case = replace(OF, T=130, gate="logsigmoid/16")
    drawn, other = case.tensors(), replace(case, gate="spikes", v_factor=1e9).tensors()
    changed = {name: x for name, x in drawn.items()}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name] = torch.cat([drawn[name][:, :cut], other[name][:, cut:]], 1)
    assert torch.equal(run(problem_of(case, drawn))["output"][:, :cut], run(problem_of(case, changed))["output"][:, :cut])


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (OF, A100, "sm_90"),
        (replace(OF, K=96), H200, "K must be 64 or 128"),
        (replace(OF, V=192), H200, "V must be 64 or 128"),
        (replace(OF, dtype=torch.float16), H200, "it takes bfloat16"),
        (replace(OF, variant="kda"), H200, "without decays per channel"),
        (replace(OF, H=2, strided=True), H200, "rows at multiples of 16 bytes"),
    ],
    ids=str,
)
def test_reasons(case, target, reason):
    assert reason in str(scalar_sm90.FORWARD.refusal(Forward.of(problem_of(case), target)))
