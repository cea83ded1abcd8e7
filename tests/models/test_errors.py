"""Wrong arguments of RWKV-6 models: the exception, its message, and that a refused step changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import DeviceError, DtypeError, InvalidArgument, RangeError, ShapeError
from penstock.errors import Complaints
from penstock.layers.rwkv6 import State
from penstock.models.rwkv6 import RWKV6, Configuration
from penstock.models.sampling import check_sampling

SIZES = Configuration(vocab_size=13, num_layers=3, hidden_size=24, intermediate_size=40, head_size=8, mix_rank=5, decay_rank=6)


@pytest.fixture(scope="module")
def model() -> RWKV6:
    torch.manual_seed(1)
    return RWKV6(SIZES)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(SIZES.vocab_size, (2, 20), generator=torch.Generator().manual_seed(2))


def test_messages(model: RWKV6, tokens: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"tokens must be of shape \[B,T\]"):
        model(tokens[0])
    with pytest.raises(DtypeError, match="tokens must be int32 or int64"):
        model(tokens.float())
    wrong = r"RWKV6: state\[0\].time_shift must be of shape \[B,C\] = \[2, 24\], got \[3, 24\]. initial_state\(2\) makes one"
    with pytest.raises(ShapeError, match=wrong):
        model(tokens, model.initial_state(3))
    with pytest.raises(ShapeError, match="T at least 1"):
        model.generate(tokens[:, :0], 3)
    with pytest.raises(RangeError, match="temperature must be a finite number of at least 0"):
        model.generate(tokens, 3, temperature=-1)
    with pytest.raises(RangeError, match="top_p must be above 0"):
        model.generate(tokens, 3, top_p=0)
    with pytest.raises(InvalidArgument, match="hidden_size must be a multiple of head_size = 64"):
        Configuration(vocab_size=5, num_layers=1, hidden_size=100, intermediate_size=10)
    with pytest.raises(RangeError, match="num_layers must be a whole number of at least 1, got 0"):
        Configuration(vocab_size=5, num_layers=0, hidden_size=64, intermediate_size=10)


def shared(x: Tensor) -> Tensor:
    """The same shape with all elements at one address."""
    return x.new_zeros(()).expand(x.shape)


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def last(field: str, change: Callable[[Tensor], object]) -> Callable[..., Any]:
    """Change one tensor of the last block's state: a late check would find the earlier blocks already written."""
    return lambda tokens, state: (tokens, [*state[:-1], state[-1]._replace(**{field: change(getattr(state[-1], field))})])


REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "17 tokens": (lambda tokens, state: (tokens.repeat(1, 17), state), ShapeError, "T must be at most 16 tokens a sequence, got 17"),
    "a list of tokens": (lambda tokens, state: (tokens.tolist(), state), DtypeError, "tokens must be a torch.Tensor, got [["),
    "one axis": (lambda tokens, state: (tokens[0], state), ShapeError, "tokens must be of shape [B,T]"),
    "float tokens": (lambda tokens, state: (tokens.float(), state), DtypeError, "tokens must be int32 or int64, got torch.float32"),
    "another device": (lambda tokens, state: (tokens.to("meta"), state), DeviceError, "tokens must be on cpu, where the model is"),
    "a token too large": (lambda tokens, state: (tokens * 0 + 13, state), RangeError, "tokens must be from 0 to 12, got 13"),
    "a negative token": (lambda tokens, state: (tokens * 0 - 2, state), RangeError, "tokens must be from 0 to 12, got -2"),
    "another batch": (lambda tokens, state: (tokens[:1], state), ShapeError, "state[0].wkv must be of shape [B,H,K,V] = [1, 3, 8, 8]"),
    "no state": (lambda tokens, state: (tokens, None), DtypeError, "state must be a list of State, got NoneType"),
    "one State": (lambda tokens, state: (tokens, state[0]), DtypeError, "state must be a list of State, got State of Tensor"),
    "a State too few": (lambda tokens, state: (tokens, state[:2]), ShapeError, "one State for each of 3 blocks, got 2."),
    "a State too many": (lambda tokens, state: (tokens, state + state[:1]), ShapeError, "one State for each of 3 blocks, got 4."),
}
for _field in State._fields:
    _name = f"RWKV6.step: state[2].{_field} must be"
    _dtype: Any = {"wkv": lambda x: x.int()}.get(_field, lambda x: x.double())
    REFUSED |= {
        f"{_field}: not a tensor": (last(_field, lambda x: 3), DtypeError, f"{_name} a torch.Tensor, got 3 of type int"),
        f"{_field}: shape": (last(_field, lambda x: x[..., 1:]), ShapeError, f"{_name} of shape [B,"),
        f"{_field}: dtype": (last(_field, _dtype), DtypeError, f"{_name} float"),
        f"{_field}: device": (last(_field, lambda x: x.to("meta")), DeviceError, f"{_name} on cpu, where the model is, got meta"),
        f"{_field}: overlap": (last(_field, shared), RangeError, f"{_name} free of overlap"),
        f"{_field}: inference": (last(_field, in_inference_mode), RangeError, f"{_name} made outside of torch.inference_mode()"),
    }


@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_step_changes_nothing(model: RWKV6, tokens: Tensor, why: str) -> None:
    change, error, message = REFUSED[why]
    _, state = model(tokens[:, :5])
    state = [State(*(x.detach() for x in one)) for one in state]
    piece, given = change(tokens[:, 5:6], state)
    before = [[x.clone() for x in one] for one in state]
    with pytest.raises(error) as caught:
        model.step(piece, given)
    assert type(caught.value) is error
    assert message in str(caught.value)
    assert all(torch.equal(x, y) for one, other in zip(state, before) for x, y in zip(one, other))


def test_a_refused_step_of_a_mixer_changes_nothing(model: RWKV6) -> None:
    state = State.zeros(1, SIZES.hidden_size, SIZES.head_size, like=torch.empty(0))
    with pytest.raises(ShapeError, match="T must be at most 16"), torch.no_grad():
        model.blocks[0].att.step(torch.randn(1, 17, SIZES.hidden_size), state)
    assert not any(x.any() for x in state)


@pytest.mark.parametrize("why", ["a list of tokens", "another device", "a token too large", "a negative token"])
@pytest.mark.parametrize("function", ["RWKV6", "generate"])
def test_wrong_tokens_raise_everywhere(model: RWKV6, tokens: Tensor, function: str, why: str) -> None:
    change, error, message = REFUSED[why]
    piece, _ = change(tokens, [])
    with pytest.raises(error) as caught:
        model(piece) if function == "RWKV6" else model.generate(piece, 1)
    assert str(caught.value).startswith(f"{function}: ")
    assert message in str(caught.value)


def test_token_values_are_read_on_a_cpu_only(model: RWKV6, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, values are read inside ``checks()`` only. Sampled tokens are not read again."""
    reads: list[bool] = []
    read = "penstock.models.arguments.reads_values"
    monkeypatch.setattr(read, lambda x: reads.append(True))
    with pytest.raises(IndexError):  # raised by torch, and not on a GPU
        model(tokens + 13)
    model.generate(tokens, 3)
    assert len(reads) == 3, "the failing call, the prompt of generate, and its first call of the model"
    monkeypatch.setattr(read, lambda x: True)
    with pytest.raises(RangeError, match="tokens must be from 0 to 12, got 2"):
        model(tokens + 13)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"count": -1}, RangeError, "count must be a whole number of at least 0, got -1"),
        ({"count": 2.0}, DtypeError, "count must be a whole number, got 2.0 of type float"),
        ({"count": True}, DtypeError, "count must be a whole number, got True of type bool"),
        ({"count": None}, DtypeError, "count must be a whole number, got None"),
        ({"temperature": "1"}, DtypeError, "temperature must be a number, got '1' of type str"),
        ({"temperature": None}, DtypeError, "temperature must be a number, got None"),
        ({"temperature": math.nan}, RangeError, "temperature must be a finite number of at least 0, got nan"),
        ({"temperature": math.inf}, RangeError, "temperature must be a finite number of at least 0, got inf"),
        ({"temperature": 10**400}, RangeError, "temperature must be a finite number of at least 0, got 1"),
        ({"top_p": True}, DtypeError, "top_p must be a number, got True of type bool"),
        ({"top_p": [0.5]}, DtypeError, "top_p must be a number, got [0.5] of type list"),
        ({"top_p": math.nan}, RangeError, "top_p must be above 0 and at most 1, got nan"),
        ({"top_p": 1.5}, RangeError, "top_p must be above 0 and at most 1, got 1.5"),
        ({"generator": 7}, DtypeError, "generator must be a torch.Generator or None, got 7 of type int"),
        ({"count": -1, "top_p": 0}, RangeError, "generate: top_p must be above 0"),
    ],
)
def test_messages_of_generate(model: RWKV6, tokens: Tensor, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        model.generate(tokens, **({"count": 3} | options))
    assert str(caught.value).startswith("generate: ")
    assert message in str(caught.value)


def test_sizes_of_the_wrong_type_raise(model: RWKV6) -> None:
    with pytest.raises(DtypeError, match="Configuration: num_layers must be a whole number, got True of type bool"):
        Configuration(vocab_size=5, num_layers=True, hidden_size=64, intermediate_size=10)
    with pytest.raises(DtypeError, match="RWKV6: configuration must be a Configuration, got 5 of type int"):
        RWKV6(5)
    with pytest.raises(RangeError, match="initial_state: batch must be a whole number of at least 0, got -1"):
        model.initial_state(-1)


def test_compiled_calls_have_no_graph_breaks(tokens: Tensor) -> None:
    """The checks are traced, except those of values. Two layers cover both kinds of block."""
    torch._dynamo.reset()
    model = RWKV6(replace(SIZES, num_layers=2))
    with torch.no_grad():
        wanted, state = model(tokens[:, :9])
        found, _ = torch.compile(model, fullgraph=True, backend="eager")(tokens[:, :9])
        assert torch.equal(found, wanted)
        ours, theirs = ([State(*(x.clone() for x in one)) for one in state] for _ in range(2))
        step = torch.compile(model.step, fullgraph=True, backend="eager")
        assert torch.equal(step(tokens[:, 9:10], ours), model.step(tokens[:, 9:10], theirs))
    assert all(torch.equal(x, y) for one, other in zip(ours, theirs) for x, y in zip(one, other))


def test_a_generator_of_another_device_raises() -> None:
    complaints = Complaints("generate")
    check_sampling(complaints, 1.0, 1.0, torch.Generator(), torch.device("cuda"))
    with pytest.raises(DeviceError, match="generator must be for cuda, where the model is, got cpu"):
        complaints.raise_any()


def test_states_from_autocast_are_valid_under_autocast(model: RWKV6, tokens: Tensor) -> None:
    """Under autocast, norms and shift states can have another dtype than the model."""
    _, state = model(tokens)
    state = [State(*(x.detach() for x in one)) for one in state]
    state[2] = state[2]._replace(time_shift=state[2].time_shift.bfloat16())
    with pytest.raises(DtypeError, match=r"state\[2\].time_shift must be float32, got torch.bfloat16"):
        model.step(tokens[:, :1], state)
    with torch.autocast("cpu", torch.bfloat16):
        model.step(tokens[:, :1], state)


@pytest.mark.parametrize("shared", ["whole states", "wkv", "fields of one state"])
def test_states_that_share_memory_are_refused(shared):
    model = RWKV6(SIZES)
    one, two, three = model.initial_state(1)
    state = {
        "whole states": [one, one, three],
        "wkv": [one, two._replace(wkv=one.wkv), three],
        "fields of one state": [one._replace(channel_shift=one.time_shift), two, three],
    }[shared]
    with torch.no_grad(), pytest.raises(RangeError, match="in memory of its own"):
        model.step(torch.zeros(1, 1, dtype=torch.int64), state)


@pytest.mark.parametrize("lazy", [torch._neg_view, lambda x: torch._efficientzerotensor(x.shape)], ids=["negated", "zeros"])
def test_lazy_states_are_refused_before_any_write(lazy):
    model = RWKV6(SIZES)
    one, two, three = model.initial_state(1)
    with torch.no_grad(), pytest.raises(RangeError, match="memory that can be written"):
        model.step(torch.zeros(1, 1, dtype=torch.int64), [one, two._replace(wkv=lazy(two.wkv)), three])
    assert not any(x.any() for x in one)


def test_counts_beyond_int64_are_refused():
    with pytest.raises(RangeError, match="below 2\\^63"):
        RWKV6(SIZES).generate(torch.zeros(1, 1, dtype=torch.int64), count=10**30)
