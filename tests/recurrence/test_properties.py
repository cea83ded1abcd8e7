"""What must hold for any call, on calls drawn by Hypothesis."""

from dataclasses import replace

import pytest
import torch
from cases import NAMES, Case, call, draw
from closing import check_closing
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.recurrence.variants import VARIANTS

settings.register_profile("here", max_examples=50, deadline=None, derandomize=True)
settings.load_profile("here")

FAST = [name for name in NAMES if name != "reference"]
FINITE_GATES = ["logsigmoid", "zero", "drift", "gone", "mixture"]


@st.composite
def a_case(draw_, **fixed):
    """A small call of any variant, and an implementation for it."""
    chosen = {
        "variant": st.sampled_from(list(VARIANTS)),
        "T": st.integers(1, 90),
        "B": st.integers(1, 3),
        "H": st.integers(1, 3),
        "K": st.sampled_from([1, 4, 16, 20]),
        "V": st.sampled_from([1, 3, 16, 40]),
        "gate": st.sampled_from(FINITE_GATES),
        "state": st.booleans(),
        "reverse": st.booleans(),
        "strided": st.booleans(),
    }
    values = {name: draw_(strategy) for name, strategy in chosen.items() if name not in fixed}
    return Case(**values | fixed), draw_(st.sampled_from(FAST))


lengths_of_sequences = st.lists(st.integers(0, 40), min_size=1, max_size=5).map(tuple)


def per_token(case, name):
    """Whether a tensor of a case has a token axis."""
    return name in ("q", "k", "v") or (name == "g" and "T" in case.row.decay)


def span(case, tensors, begin, end, state=None):
    """The tensors of some tokens, begun with ``state``."""
    cut = {name: x[:, begin:end] if x is not None and per_token(case, name) else x for name, x in tensors.items()}
    return cut | {"initial_state": state}


def close(found, wanted, scale=None):
    """Within float32's budget of the contract, twice: both sides are computed."""
    size = wanted.norm() if scale is None else scale
    assert (found - wanted).norm() <= 4e-6 * size + 1e-30


def same(found, wanted):
    assert torch.equal(found, wanted)


@given(a_case(dtype=torch.float32), st.floats(0, 1))
def test_cut_anywhere(chosen, share):
    """A sequence in two calls, the state handed over, equals the sequence in one."""
    case, impl = chosen
    tensors, cut = draw(case), round(share * case.T)
    whole = call(case, tensors, impl)
    spans = [(0, cut), (cut, case.T)]
    state, outputs = tensors["initial_state"], {}
    for begin, end in reversed(spans) if case.reverse else spans:
        outputs[begin, end], state = call(case, span(case, tensors, begin, end, state), impl)
    close(torch.cat([outputs[one] for one in spans], 1), whole.output)
    close(state, whole.final_state)


@given(lengths_of_sequences, a_case(dtype=torch.float32))
def test_packed_equals_separate(lengths, chosen):
    case, impl = replace(chosen[0], lengths=lengths), chosen[1]
    tensors = draw(case)
    packed = call(case, tensors, impl)
    begin = 0
    for n, length in enumerate(lengths):
        state = None if tensors["initial_state"] is None else tensors["initial_state"][n : n + 1]
        alone = call(case, span(case, tensors, begin, begin + length, state), impl, cu_seqlens=None)
        close(packed.output[:, begin : begin + length], alone.output)
        close(packed.final_state[n : n + 1], alone.final_state)
        begin += length


@given(a_case(dtype=torch.float32), st.floats(0, 1))
def test_causality(chosen, share):
    """Other inputs from some token on change no bit of any output before it."""
    case, impl = chosen
    tensors, cut = draw(case), round(share * case.T)
    kept = slice(cut, None) if case.reverse else slice(0, cut)
    changed = slice(0, cut) if case.reverse else slice(cut, None)
    other = {name: x if x is None else x.clone() for name, x in tensors.items()}
    for name, x in other.items():
        if x is not None and per_token(case, name):
            x[:, changed] = -3.0 * x[:, changed].abs() - 1
    one, two = call(case, tensors, impl).output, call(case, other, impl).output
    same(one[:, kept], two[:, kept])
    assert not one[:, changed].numel() or not torch.equal(one[:, changed], two[:, changed])


@given(a_case(dtype=torch.float32), st.floats(-2, 2), st.floats(-2, 2))
def test_linear_in_values_and_state(chosen, a, b):
    case, impl = chosen
    one, other = draw(case), draw(replace(case, scale=case.row.scale or case.K**-0.5))
    other = one | {name: other[name] for name in ("v", "initial_state")}
    mixed = {name: None if one[name] is None else a * one[name] + b * other[name] for name in ("v", "initial_state")}
    for x, y, z in zip(call(case, one, impl), call(case, other, impl), call(case, one | mixed, impl)):
        close(z, a * x + b * y, abs(a) * x.norm() + abs(b) * y.norm())


@given(a_case(gate="zero", dtype=torch.float32))
def test_zero_decay_equals_linear_attention(chosen):
    """Reading the previous state is reading the updated one less the token's own share, plus the bonus."""
    case, impl = chosen
    tensors = draw(case)
    found = call(case, tensors, impl)
    plain = replace(case, variant="linear_attention", scale=case.row.scale)  # a scale of 1 wherever there is a bonus
    wanted = call(plain, tensors | {"g": None, "u": None}, impl)
    output, size = wanted.output, wanted.output.norm()
    if case.row.bonus:
        q, k, v, u = (tensors[name] for name in ("q", "k", "v", "u"))
        own = (q * k * (u - 1)).sum(-1, keepdim=True) * v
        output, size = output + own, size + own.norm() + (q * k).norm() * v.norm()
    close(found.output, output, size)
    close(found.final_state, wanted.final_state)


@given(a_case(dtype=torch.float32), st.floats(-1e30, -200.0))
def test_very_strong_decays(chosen, decay):
    """However strong, nothing overflows: a token sees itself (and, read "previous", the token before, through the state)."""
    case, impl = chosen
    tensors = draw(case)
    assume(tensors["g"] is not None)
    tensors["g"] = torch.full_like(tensors["g"], decay)
    result = call(case, tensors, impl)
    q, k, v = (tensors[name].double() for name in ("q", "k", "v"))
    scale = case.row.scale or case.K**-0.5
    if case.row.bonus:
        output = (q * k * tensors["u"].double()).sum(-1, keepdim=True) * v
        past, now = (slice(1, None), slice(None, -1)) if case.reverse else (slice(None, -1), slice(1, None))
        output[:, now] += (q[:, now] * k[:, past]).sum(-1, keepdim=True) * v[:, past]
        if case.state:
            first = -1 if case.reverse else 0
            output[:, first] += torch.einsum("bhk,bhkv->bhv", q[:, first], tensors["initial_state"].double())
    else:
        output = (q * k).sum(-1, keepdim=True) * v
    last = 0 if case.reverse else -1
    close(result.output, (scale * output).float(), scale * (q.norm() * k.norm() * v.norm()).float())
    close(result.final_state, torch.einsum("bhk,bhv->bhkv", k[:, last], v[:, last]).float())


@given(a_case(dtype=torch.float32, reverse=True))
def test_reverse_is_a_flip(chosen):
    case, impl = chosen
    tensors = draw(case)
    flipped = {name: x.flip(1) if x is not None and per_token(case, name) else x for name, x in tensors.items()}
    backwards, forwards = call(case, tensors, impl), call(case, flipped, impl, reverse=False)
    same(backwards.output, forwards.output.flip(1))
    same(backwards.final_state, forwards.final_state)


@given(a_case(dtype=torch.float32, lengths=(9, 0, 30), reverse=True))
def test_reverse_flips_each_packed_sequence(chosen):
    case, impl = chosen
    tensors = draw(case)
    order = torch.tensor([*reversed(range(9)), *reversed(range(9, 39))])
    turned = {name: x[:, order] if x is not None and per_token(case, name) else x for name, x in tensors.items()}
    backwards, forwards = call(case, tensors, impl), call(case, turned, impl, reverse=False)
    close(backwards.output, forwards.output[:, order])
    close(backwards.final_state, forwards.final_state)


@given(a_case(dtype=torch.float32), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_decode_steps_continue_a_call(chosen, pieces):
    """Any split of the tokens into steps of at most 16."""
    case, impl = replace(chosen[0], T=sum(pieces), reverse=False, B=2), chosen[1]
    tensors = draw(case)
    whole = call(case, tensors, impl)
    state = torch.zeros(2, case.H, case.K, case.V) if tensors["initial_state"] is None else tensors["initial_state"].clone()
    outputs, begin = [], 0
    for piece in pieces:
        now = span(case, tensors, begin, begin + piece)
        outputs.append(ps.decode_step(case.variant, *(now[name] for name in ("q", "k", "v", "g", "u")), state=state, impl=impl))
        begin += piece
    close(torch.cat(outputs, 1), whole.output)
    close(state, whole.final_state)


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", ["simple_gla", "gla", "rwkv6"])
def test_what_a_last_token_leaves_of_a_state_is_exact(variant, impl):
    check_closing(Case(variant, T=128, dtype=torch.float32, gate="weak", state=False), impl)
