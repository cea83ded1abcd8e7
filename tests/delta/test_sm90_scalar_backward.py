"""The Gluon kernels of the backward pass of gated DeltaNet and DeltaNet for Hopper, emulated on the CPU: gradients against the oracle."""

from dataclasses import replace

import contract
import pytest
import torch
from cases import upstream
from deltas import Delta, oracle, rounding_errors
from emulated import gluon

from penstock.delta.inputs import of_every_head
from penstock.delta.operators import DELTA
from penstock.delta.triton.calls import Backward, Forward
from penstock.delta.triton.forms import scalar_backward_sm90, scalar_sm90
from penstock.gpu.hopper import without_gluon
from penstock.gpu.target import Target

pytestmark = [
    pytest.mark.skipif(without_gluon() is not None, reason="the Gluon of this Triton does not fit the kernels"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning"),
]
H200, A100 = Target("sm_90", 132, 232448), Target("sm_80", 108, 163 << 10)
SMALL = Target("sm_90", 2, 232448)
"""So few multiprocessors that a program has all value channels."""
BUDGET = 4 * torch.finfo(torch.bfloat16).eps / 4
"""The allowed relative error: two operands of every product, what lies between two products, and the result are rounded."""
FLOOR = 2.0**-90
"""Where beta is 0 it is 2^-100."""
NAMES = ("q", "k", "v", "g", "beta", "initial_state")

OF = Delta("gated_delta_rule", B=1, H=1, T=150, K=128, V=128, dtype=torch.bfloat16, others=torch.float32)
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


def problem_of(case, drawn=None):
    return contract.problem_of(case, case.tensors() if drawn is None else drawn)


def forward(problem, keep, target=H200, seed=0):
    """The memory of the emulated kernels of the forward pass."""
    made = scalar_sm90.FORWARD.plan(Forward.of(problem, target, keep=keep))
    return gluon.run(made, {name: problem.q if x is None else x for name, x in zip(DELTA.names, problem.tensors)}, problem.sizes, seed)


def run(problem, d_output, d_final, target=H200, seed=0, kept=()):
    """All gradients by the emulated kernels. ``kept``: residuals of the forward pass by name."""
    call = Backward.of(problem, target, d_output=d_output, d_final_state=d_final, kept=bool(kept))
    assert scalar_backward_sm90.BACKWARD.refusal(call) is None
    made = scalar_backward_sm90.BACKWARD.plan(call)
    tensors = {name: problem.q if x is None else x for name, x in zip(DELTA.names, problem.tensors)}
    tensors |= {"d_output": d_output} | ({} if d_final is None else {"d_final_state": d_final}) | dict(kept)
    found = gluon.run(made, tensors, problem.sizes, seed)
    names = {name: "d_initial_state" if name == "initial_state" else "d" + name for name in NAMES}
    return {name: found[x] for name, x in names.items() if x in found}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_the_oracle(case):
    """Sums over all channels, such as dg, may cancel: then twice the error of the formula with rounded operands is allowed, too."""
    wanted = oracle(case)
    for name, x in run(problem_of(case), *upstream(case)).items():
        if f"d{name}" not in wanted:
            continue
        off = float((x.double() - wanted[f"d{name}"].value).norm())
        allowed = BUDGET * wanted[f"d{name}"].size + FLOOR * x.numel()
        if off > allowed:
            allowed += 2 * rounding_errors(case, 8)[f"d{name}"]
        assert off <= allowed, (name, off / wanted[f"d{name}"].size)


@pytest.mark.parametrize("target", [H200, SMALL], ids=["blocks", "heads"])
@pytest.mark.parametrize(
    "case",
    [replace(OF, H=2, G=1, gate="mixture"), replace(OF, variant="delta_rule", K=64, T=70), replace(OF, lengths=(130, 0, 3), state=False)],
    ids=str,
)
def test_residuals(case, target):
    """Outputs with and without them, and gradients from them and from inputs alone, have equal bits."""
    problem, given = problem_of(case), upstream(case)
    plain, found = forward(problem, False, target), forward(problem, True, target, seed=1)
    for name in ("output", "final_state"):
        assert torch.equal(plain[name], found[name]), name
    first = run(problem, *given, target)
    second = run(problem, *given, target, 1, {name: found[name] for name in scalar_sm90.KEPT})
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


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
def test_what_is_kept(case, repeated, kept):
    """Residuals only where the backward pass takes them, and not of many short sequences."""
    problem = problem_of(case)
    made = scalar_sm90.FORWARD.plan(Forward.of(of_every_head(problem) if repeated else problem, H200, keep=True))
    assert set(scalar_sm90.KEPT) <= set(made.memory) if kept else "chunk_states" not in made.memory


@pytest.mark.parametrize("case", [replace(OF, H=2, G=1, gate="mixture"), replace(OF, H=2, lengths=(70, 3), gate="spikes")], ids=str)
def test_blocks_of_value_channels_change_no_bit(case):
    """A program that walks has 64 value channels or, with enough heads, all 128."""
    problem, given = problem_of(case), upstream(case)
    first, second = run(problem, *given), run(problem, *given, SMALL, seed=1)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def test_without_a_gradient_of_the_final_state():
    """The same bits as with zeros."""
    problem = problem_of(replace(OF, T=70, gate="mixture"))
    d_output, d_final = upstream(replace(OF, T=70))
    first, second = run(problem, d_output, None), run(problem, d_output, torch.zeros_like(d_final), seed=1)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "d_output", "g"])
@pytest.mark.parametrize("value", [torch.inf, 6e4])
def test_packed_neighbours_change_no_bit(name, value):
    """Tiles reach past the end of a sequence. Neither a sequence before nor one after changes a bit."""
    case = replace(OF, lengths=(70, 90, 70))
    drawn, (d_output, d_final) = case.tensors(), upstream(case)
    changed = drawn | {"d_output": d_output}
    changed[name] = changed[name].clone()
    for part in (slice(0, 70), slice(160, None)):
        changed[name][:, part] = -value if name == "g" else value
    before = run(problem_of(case, drawn), d_output, d_final)
    after = run(problem_of(case, {n: x for n, x in changed.items() if n != "d_output"}), changed["d_output"], d_final)
    for n, x in before.items():
        of = (1,) if n == "initial_state" else (slice(None), slice(70, 160))
        assert torch.equal(x[of], after[n][of]), n


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
    d_output, d_final = upstream(case)
    call = Backward.of(problem_of(case), target, d_output=d_output, d_final_state=d_final)
    assert reason in str(scalar_backward_sm90.BACKWARD.refusal(call))


def test_refuses_repeated_heads():
    """Their gradients would be rounded before they are summed."""
    case = replace(OF, H=2, G=1)
    d_output, d_final = upstream(case)
    call = Backward.of(of_every_head(problem_of(case)), H200, d_output=d_output, d_final_state=d_final)
    assert "as they are" in str(scalar_backward_sm90.BACKWARD.refusal(call))


def test_refuses_gradients_that_are_not_tiles():
    d_output, d_final = upstream(replace(OF, H=2))
    spread = torch.stack([d_output, d_output], 3)[:, :, :, 0]
    call = Backward.of(problem_of(replace(OF, H=2)), H200, d_output=spread, d_final_state=d_final)
    assert "d_output must be" in str(scalar_backward_sm90.BACKWARD.refusal(call))
