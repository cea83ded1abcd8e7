"""What every form in Gluon of the delta rule for Hopper keeps, emulated on the CPU: bits depend on no other tokens and sequences."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from cases import upstream
from closing import DECAYS, MOST, closed, error
from deltas import Delta
from hopper_deltas import EMULATED, H200, assert_equal, backward, forward, problem_of

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
    """Those of both passes, a case for them, and whether heads of q and k are repeated before."""

    case: Delta
    forward: Any
    backward: Any
    repeated: bool

    def problem(self, case, drawn=None):
        return problem_of(case, drawn, repeated=self.repeated)


SIZES = {"B": 1, "H": 1, "T": 150, "K": 128, "V": 128, "dtype": torch.bfloat16, "others": torch.float32}
FORMS = {
    "kda of 64": Forms(Delta("kda", **SIZES | {"K": 64, "V": 64}), channels_sm90.FORWARD, channels_backward_sm90.BACKWARD, True),
    "kda": Forms(Delta("kda", **SIZES), channels_sm90.FORWARD, channels_backward_sm90.BACKWARD, True),
    "kda in float16": Forms(Delta("kda", **SIZES | {"dtype": torch.float16}), channels_sm90.FORWARD, channels_backward_sm90.BACKWARD, True),
    "kda in float32": Forms(
        Delta("kda", **SIZES | {"dtype": torch.float32}), channels_float32_sm90.FORWARD, channels_float32_sm90.BACKWARD, True
    ),
    "gdn": Forms(Delta("gated_delta_rule", **SIZES), scalar_sm90.FORWARD, scalar_backward_sm90.BACKWARD, False),
    "gdn of float16": Forms(
        Delta("gated_delta_rule", **SIZES | {"dtype": torch.float16}), scalar_sm90.FORWARD, scalar_backward_sm90.BACKWARD, False
    ),
    "gdn of float32": Forms(
        Delta("gated_delta_rule", **SIZES | {"dtype": torch.float32}), scalar_float32_sm90.FORWARD, scalar_float32_sm90.BACKWARD, False
    ),
    "wide": Forms(Delta("gated_delta_rule", **SIZES | {"K": 256}), wide_sm90.FORWARD, wide_sm90.BACKWARD, True),
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
