"""Tensors [B,H,T,K] given to functions of tensors [B,T,H,K]: every function over sequences warns once, where shapes alone can tell."""

import warnings

import pytest
import torch

import penstock as ps
from penstock.call import declared, validation
from penstock.errors import PenstockWarning, ShapeError
from penstock.models import CausalLM
from penstock.recurrence.operators import RECURRENCE
from penstock.recurrence.variants import VARIANTS
from penstock.softmax.operators import ATTENTION
from penstock.training.settings import ARCHITECTURES

FUNCTIONS = [*VARIANTS, "softmax_attention"]
CONFIRMED = ("rwkv5", "rwkv6")
"""Their bonus [H,K] has the heads alone: another layout is a wrong shape."""


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    monkeypatch.setattr(validation, "_warned", set())
    for one in (RECURRENCE, ATTENTION):
        monkeypatch.setattr(one, "memory", type(one.memory)())
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def call(function, T, H, heads_first=False, **more):
    """Call a function with inputs whose tokens and heads are exchanged or not; its warnings."""

    def x(*shape):
        return torch.rand(shape).transpose(1, 2) if heads_first and len(shape) > 2 else torch.rand(shape)

    q, k, v = (x(2, T, H, 4) for _ in range(3))
    arguments = [q, k, v]
    if function in VARIANTS:
        axes = VARIANTS[function].decay
        sizes = {"B": 2, "T": T, "H": H, "K": 4}
        decay = [-x(*(sizes[axis] for axis in axes))] if axes and function != "retention" else []
        arguments += decay + [x(H, 4)] * VARIANTS[function].bonus
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        getattr(ps, function)(*arguments, **more)
    return [one for one in found if issubclass(one.category, PenstockWarning)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_heads_before_tokens_are_warned_of_once(function):
    if function in CONFIRMED:
        with pytest.raises(ShapeError):
            call(function, 20, 3, heads_first=True)
        return
    (warning,) = call(function, 20, 3, heads_first=True)
    assert str(warning.message).startswith(
        f"{function}: the tensors have 20 heads and 3 tokens. Tokens come before heads, [B,T,H,K]: pass x.transpose(1, 2)"
    )
    assert warning.filename == __file__
    assert call(function, 20, 3, heads_first=True) == []
    assert call(function, 40, 5, heads_first=True) == []


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("T", "H"), [(1, 30), (20, 3), (7, 7)])
def test_other_shapes_are_not_warned_of(function, T, H):
    assert call(function, T, H) == []


@pytest.mark.parametrize("function", CONFIRMED)
def test_shapes_that_another_argument_confirms_are_not_warned_of(function):
    assert call(function, 3, 20) == []


@pytest.mark.parametrize("function", VARIANTS)
def test_an_initial_state_confirms_the_heads(function):
    assert call(function, 3, 20, initial_state=torch.zeros(2, 20, 4, 4)) == []


def test_given_decays_of_heads_do_not_confirm_retention():
    """Its default decays have the shape of v, so they cannot."""
    assert len(call("retention", 3, 20)) == 1


@pytest.mark.parametrize("function", FUNCTIONS)
def test_repeated_calls_are_not_looked_at(function, monkeypatch):
    seen = []
    monkeypatch.setattr(declared, "warn_of_layout", lambda *_: seen.append(1))
    for _ in range(5):
        call(function, 20, 3)
    assert seen == [1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_know_what_they_pass(name):
    heads = {"rwkv5": "head_size", "rwkv6": "head_size", "mamba2": "head_dim", "gated_deltanet": "head_dim", "kda": "head_dim"}
    sizes = {heads[name]: 4} if name in heads else {"num_heads": 8}
    model = CausalLM(ARCHITECTURES[name](vocab_size=5, hidden_size=32, num_layers=1, **sizes))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.tensor([[1, 2, 3]]))
    assert validation._warned == set()


def test_functions_of_other_projects_warn_too():
    from penstock.compat.fla import chunk_gla

    q = torch.rand(2, 3, 20, 4)
    with pytest.warns(PenstockWarning, match="gla: the tensors have 20 heads and 3 tokens") as found:
        chunk_gla(q, q, q, -q)
    assert found[0].filename == __file__
