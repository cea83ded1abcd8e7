"""What every form in Gluon of the delta rule for Hopper keeps, emulated on the CPU: bits depend on no other tokens and sequences.

Also residuals, the gradient of the state alone, heads of q and k that heads of v share, and reasons for which calls are refused.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from cases import upstream
from closing import DECAYS, MOST, closed, error
from deltas import Delta
from hopper_deltas import (
    A100,
    EMULATED,
    H200,
    SMALL,
    assert_equal,
    backward,
    check_residuals_spare_launches,
    check_state_alone,
    forward,
    problem_of,
)
from sampling import slow

from penstock.delta import inputs
from penstock.delta.triton.calls import Backward, Forward
from penstock.delta.triton.forms import (
    channels_backward_sm90,
    channels_float32_sm90,
    channels_sm90,
    lists,
    scalar_backward_sm90,
    scalar_float32_sm90,
    scalar_sm90,
    wide_sm90,
)

pytestmark = EMULATED


class Forms(NamedTuple):
    """Those of both passes, and a case for them."""

    case: Delta
    forward: Any
    backward: Any
    repeated: bool
    """Whether heads of q and k are repeated before."""
    refused: dict[str, Any]
    """Calls that both passes refuse, by the reason: changes of the case."""

    def problem(self, case, drawn=None):
        return problem_of(case, drawn, repeated=self.repeated)

    @property
    def named(self):
        """The forms of a target that runs these where they are avoided, too."""
        return frozenset([self.forward.name, self.backward.name])

    def results(self, problem, d_output, d_final, seed=0):
        """Those of both passes."""
        found = forward(self.forward, problem, seed=seed)
        return {name: found[name] for name in RESULTS} | backward(self.backward, problem, d_output, d_final, seed=seed)


RESULTS = ("output", "final_state")
SIZES = {"B": 1, "H": 1, "T": 150, "K": 128, "V": 128, "dtype": torch.bfloat16, "others": torch.float32}
HALF, SINGLE = {"dtype": torch.float16}, {"dtype": torch.float32}
OF_16_BITS, OF_32_BITS = {"it takes bfloat16 or float16": SINGLE}, {"it takes float32": HALF}
ROWS = {"rows at multiples of 16 bytes": {"H": 2, "strided": True}}
NARROW = ROWS | {"K must be 64 or 128": {"K": 192}, "V must be 64 or 128": {"V": 192}}
CHANNELS = NARROW | {"decays per channel": {"variant": "gated_delta_rule"}}
SCALARS = NARROW | {"without decays per channel": {"variant": "kda"}}
WIDE = ROWS | {
    "K must be 64, 128 or 256": {"K": 192}, "V a multiple of 64": {"V": 96}, "wider heads": {"K": 128}, "it takes bfloat16": HALF,
    "without decays per channel": {"variant": "kda"},
}  # fmt: skip


def of_channels(forward_module, backward_module, refused, **changes):
    case = Delta("kda", **SIZES | changes)
    return Forms(case, forward_module.FORWARD, backward_module.BACKWARD, True, CHANNELS | refused)


def of_scalars(forward_module, backward_module, refused, **changes):
    case = Delta(**{"variant": "gated_delta_rule"} | SIZES | changes)
    return Forms(case, forward_module.FORWARD, backward_module.BACKWARD, False, SCALARS | refused)


FORMS = {
    "kda of 64": of_channels(channels_sm90, channels_backward_sm90, OF_16_BITS, K=64, V=64),
    "kda": of_channels(channels_sm90, channels_backward_sm90, OF_16_BITS),
    "kda in float16": of_channels(channels_sm90, channels_backward_sm90, OF_16_BITS, **HALF),
    "kda in float32": of_channels(
        channels_float32_sm90, channels_float32_sm90, OF_32_BITS | {"g must be float32": {"others": torch.bfloat16}}, **SINGLE
    ),
    "gdn": of_scalars(scalar_sm90, scalar_backward_sm90, OF_16_BITS),
    "gdn of float16": of_scalars(scalar_sm90, scalar_backward_sm90, OF_16_BITS, **HALF),
    "gdn of float32": of_scalars(scalar_float32_sm90, scalar_float32_sm90, OF_32_BITS, **SINGLE),
    "wide": Forms(Delta("gated_delta_rule", **SIZES | {"K": 256}), wide_sm90.FORWARD, wide_sm90.BACKWARD, True, WIDE),
}
WITHOUT_DECAYS = {
    f"{name} without decays": one._replace(case=replace(one.case, variant="delta_rule", K=64, T=70))
    for name, one in FORMS.items()
    if name.startswith("gdn")
}


@pytest.fixture(params=FORMS.values(), ids=list(FORMS))
def forms(request):
    return request.param


@pytest.mark.parametrize(
    ("name", "value"),
    [("g", torch.inf), *((name, value) for name in ("q", "k", "v", "beta") for value in (torch.nan, torch.inf))],
)
def test_packed_neighbours_change_no_bit(forms, name, value):
    """A tile reaches past the end of its sequence."""
    case = replace(forms.case, lengths=(70, 90))
    drawn = case.tensors()
    changed = drawn | {name: drawn[name].clone()}
    changed[name][:, 70:] = -value if name == "g" else value
    before, after = (forward(forms.forward, forms.problem(case, x)) for x in (drawn, changed))
    assert torch.equal(before["output"][:, :70], after["output"][:, :70])
    assert torch.equal(before["final_state"][0], after["final_state"][0])


@pytest.mark.parametrize("cut", [1, 17, 37, 64, 90])
def test_later_tokens_change_no_bit(forms, cut):
    """Outputs before a cut, whatever finite values come after it."""
    case = replace(forms.case, T=130, gate="logsigmoid/16")
    large = 1e4 if case.dtype == torch.float16 else 1e9
    drawn, other = case.tensors(), replace(case, gate="spikes", v_factor=large).tensors()
    changed = dict(drawn)
    for name in ("q", "k", "v", "g", "beta"):
        changed[name] = torch.cat([drawn[name][:, :cut], other[name][:, cut:]], 1)
    before, after = (forward(forms.forward, forms.problem(case, x))["output"] for x in (drawn, changed))
    assert torch.equal(before[:, :cut], after[:, :cut])


def test_without_a_gradient_of_the_final_state(forms):
    """The same bits as with zeros."""
    problem = forms.problem(replace(forms.case, T=70, gate="mixture"))
    d_output, d_final = upstream(replace(forms.case, T=70))
    first, second = (
        backward(forms.backward, problem, d_output, None),
        backward(forms.backward, problem, d_output, torch.zeros_like(d_final), seed=1),
    )
    assert_equal(first, second)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "d_output", "g"])
@pytest.mark.parametrize("value", [torch.inf, 6e4])
def test_packed_neighbours_change_no_bit_of_gradients(forms, name, value):
    """Tiles reach past the end of a sequence. Neither a sequence before nor one after changes a bit."""
    case = replace(forms.case, lengths=(70, 90, 70))
    drawn, (d_output, d_final) = case.tensors(), upstream(case)
    changed = drawn | {"d_output": d_output}
    changed[name] = changed[name].clone()
    for part in (slice(0, 70), slice(160, None)):
        changed[name][:, part] = -value if name == "g" else value
    before = backward(forms.backward, forms.problem(case, drawn), d_output, d_final)
    d_changed = changed.pop("d_output")
    after = backward(forms.backward, forms.problem(case, changed), d_changed, d_final)
    for n, x in before.items():
        of = (1,) if n == "initial_state" else (slice(None), slice(70, 160))
        assert torch.equal(x[of], after[n][of]), n


@pytest.mark.parametrize("target", [H200, SMALL], ids=["blocks", "heads"])
@pytest.mark.parametrize(
    "change", [{"H": 2, "G": 1, "gate": "mixture"}, {"lengths": (130, 0, 3), "state": False}, *slow({"B": 2, "T": 64, "V": 64})], ids=str
)
@pytest.mark.parametrize("name", [*(name for name in FORMS if name != "wide"), *WITHOUT_DECAYS])
def test_residuals(name, change, target):
    """Outputs with and without them, and gradients from them and from inputs alone, have equal bits. They spare launches."""
    forms = (FORMS | WITHOUT_DECAYS)[name]
    case, target = replace(forms.case, **change), target._replace(forms=forms.named)
    problem, given = forms.problem(case), upstream(case)
    plain, found = forward(forms.forward, problem, target), forward(forms.forward, problem, target, keep=True, seed=1)
    assert_equal({name: plain[name] for name in RESULTS}, found)
    kept = {name: found[name] for name in lists.residuals_of(problem)}
    assert_equal(backward(forms.backward, problem, *given, target), backward(forms.backward, problem, *given, target, kept=kept, seed=1))
    check_residuals_spare_launches(forms.backward, problem, *given, target)


@pytest.mark.parametrize("final", [True, *slow(False)])
def test_the_gradient_of_the_state_alone(forms, final):
    case = replace(forms.case, H=2, lengths=(70, 0, 130), gate="mixture")
    d_output, d_final = upstream(case)
    check_state_alone(forms.backward, forms.problem(case), d_output, d_final if final else None)


@pytest.mark.parametrize("lengths", [None, (70, 60)], ids=["batch", "packed"])
def test_other_sequences_change_no_bit(forms, lengths):
    """Results of a sequence alone and beside others."""
    case = replace(forms.case, B=2 if lengths is None else 1, T=70 if lengths is None else 130, lengths=lengths, gate="mixture")
    drawn, (d_output, d_final) = case.tensors(), upstream(case)
    whole = forms.results(forms.problem(case, drawn), d_output, d_final)

    def of_first(x, name=""):
        return x[:1] if lengths is None or name.endswith("state") else x[:, :70]

    given = {name: None if x is None else of_first(x, name) for name, x in drawn.items() if name != "cu_seqlens"}
    alone = forms.problem(replace(case, B=1, T=70, lengths=None), given)
    found = forms.results(alone, of_first(d_output), d_final[:1], seed=1)
    assert_equal(found, {name: of_first(x, name) for name, x in whole.items()})


@pytest.mark.parametrize("forms", [one for one in FORMS.values() if not one.repeated], ids=lambda one: one.forward.name)
def test_heads_of_a_group_are_those_of_repeated_keys(forms):
    """In the forward pass. The backward pass refuses repeated heads, whose gradients would be rounded before they are summed."""
    case = replace(forms.case, B=2, T=70, H=4, G=2)
    problem, (d_output, d_final) = forms.problem(case), upstream(case)
    repeated = inputs.of_every_head(problem)
    first, second = (forward(forms.forward, one) for one in (problem, repeated))
    assert_equal({name: first[name] for name in RESULTS}, second)
    assert "as they are" in str(forms.backward.refusal(Backward.of(repeated, H200, d_output=d_output, d_final_state=d_final)))


def test_reasons(forms):
    for reason, target, change in [("sm_90", A100, {}), *((reason, H200, change) for reason, change in forms.refused.items())]:
        case = replace(forms.case, **change)
        problem, (d_output, d_final) = forms.problem(case), upstream(case)
        backward_call = Backward.of(problem, target, d_output=d_output, d_final_state=d_final)
        for form, call in ((forms.forward, Forward.of(problem, target)), (forms.backward, backward_call)):
            assert reason in str(form.refusal(call)), (form.name, change)


def test_refuses_gradients_that_are_not_tiles(forms):
    case = replace(forms.case, H=2)
    d_output, d_final = upstream(case)
    spread = torch.stack([d_output, d_output], 3)[:, :, :, 0]
    call = Backward.of(forms.problem(case), H200, d_output=spread, d_final_state=d_final)
    assert "the output's gradient must be" in str(forms.backward.refusal(call))


@pytest.mark.parametrize("decay", DECAYS)
def test_what_a_last_token_leaves_of_a_state_is_exact(forms, decay):
    """Factors of a decay are in the operands of products: float16 would lose them."""
    case = replace(forms.case, T=128, gate="weak", state=False)
    tensors = closed(case, decay)
    found = forward(forms.forward, forms.problem(case, tensors))["final_state"]
    assert error(case, tensors, found) <= MOST[case.dtype]


TAKES_GROUPS = {"gdn_prepare_sm90", "gdn_bwd_sm90", "gdn_float32_sm90", "gdn_bwd_float32_sm90"}
"""Forms that read heads of q and k which heads of v share as they are. Their own tests have such cases."""
EXAMPLES = [
    (form, call, example)
    for forms, call in ((lists.CHUNK_FORWARD, Forward), (lists.CHUNK_BACKWARD, Backward), (lists.TOKEN_FORWARD, Forward))
    for form in forms
    for example in form.examples
]


@pytest.mark.parametrize(("form", "call", "example"), EXAMPLES, ids=lambda one: getattr(one, "name", None) or getattr(one, "variant", None))
def test_shared_heads_are_refused_where_a_form_does_not_read_them(form, call, example):
    """Then they are repeated before. A form that took them would read other heads."""
    sizes = {name: example.sizes[name] for name in ("K", "V")}
    case = Delta(example.variant, B=1, T=70, H=4, G=2, **sizes, dtype=example.dtype, others=torch.float32, raw=example.variant == "rwkv7")
    problem, (d_output, d_final) = problem_of(case), upstream(case)
    made, _ = inputs.differentiable(problem, False)
    problem = inputs.canonical(problem, {name: x.detach() for name, x in made.items()})
    more = {"d_output": d_output, "d_final_state": d_final} if call is Backward else {}
    taken = form.refusal(call.of(problem, H200, **more)) is None
    assert taken == (form.name in TAKES_GROUPS)
    if not taken:
        assert form.refusal(call.of(inputs.of_every_head(problem), H200, **more)) is None
