"""Wrong arguments of models: the exception, its message, and that a refused call in place changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, flat, model_of
from sampling import every
from torch import Tensor

from penstock import DeviceError, DtypeError, InvalidArgument, RangeError, ShapeError
from penstock.errors import Complaints
from penstock.layers import GLAConfig, RWKV6State, ShiftState, SwiGLUConfig
from penstock.models import CausalLM, Config, LayerState, backbone, gla, hybrid, mamba2, rwkv6
from penstock.models.arguments import named_tensors
from penstock.models.sampling import check_sampling


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return model_of("rwkv6")


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(13, (2, 20), generator=torch.Generator().manual_seed(2))


def test_messages(model: CausalLM, ids: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"forward: ids must be of shape \[B,T\]"):
        model(ids[0])
    with pytest.raises(DtypeError, match="ids must be int32 or int64"):
        model(ids.float())
    wrong = r": state\[0\].mixer.shift must be of shape \[2, 24\], got \[3, 24\]. initial_state\(2\) makes one for these sequences"
    with pytest.raises(ShapeError, match=rf"forward{wrong}\.\n"):
        model(ids, model.initial_state(3))
    with pytest.raises(ShapeError, match=f"advance{wrong}; slots name the rows of a larger one"):
        model.advance(ids, model.initial_state(3))
    for options, message in (({"labels": ids + 300}, "labels must be from 0 to 12"), ({"reduction": "all"}, "reduction must be 'mean'")):
        with pytest.raises(RangeError, match=f"^loss: {message}"):
            model.loss(**{"ids": ids, "labels": ids} | options)
    with pytest.raises(ShapeError, match="T at least 1"):
        model.generate(ids[:, :0], 3)
    with pytest.raises(RangeError, match="temperature must be a finite number of at least 0"):
        model.generate(ids, 3, temperature=-1)
    with pytest.raises(RangeError, match="top_p must be above 0"):
        model.generate(ids, 3, top_p=0)
    with pytest.raises(ShapeError, match=r"^loss: labels must be of shape \[B,T\] = .* They are the next tokens: ids = tokens\[:, :-1\]"):
        model.loss(ids, ids[:, 1:])


def shared(x: Tensor) -> Tensor:
    """The same shape with all elements at one address."""
    return x.new_zeros(()).expand(x.shape)


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def last(part: str, field: str, change: Callable[[Tensor], object]) -> Callable[..., Any]:
    """Change one tensor of the last layer's state: a late check would find the earlier layers already written."""

    def changed(ids: Tensor, state: list[LayerState]) -> Any:
        one = getattr(state[-1], part)
        one = one._replace(**{field: change(getattr(one, field))})
        return {"ids": ids, "state": [*state[:-1], state[-1]._replace(**{part: one})]}

    return changed


REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "a list of ids": (lambda ids, state: {"ids": ids.tolist()}, DtypeError, "ids must be a torch.Tensor, got [["),
    "one axis": (lambda ids, state: {"ids": ids[0]}, ShapeError, "ids must be of shape [B,T]"),
    "float ids": (lambda ids, state: {"ids": ids.float()}, DtypeError, "ids must be int32 or int64, got torch.float32"),
    "sparse ids": (lambda ids, state: {"ids": ids.to_sparse()}, DtypeError, "ids must be a dense tensor, got torch.sparse_coo"),
    "another device": (lambda ids, state: {"ids": ids.to("meta")}, DeviceError, "ids must be on cpu, where the model is"),
    "an id too large": (lambda ids, state: {"ids": ids * 0 + 13}, RangeError, "ids must be from 0 to 12, got 13"),
    "a negative id": (lambda ids, state: {"ids": ids * 0 - 2}, RangeError, "ids must be from 0 to 12, got -2"),
    "another batch": (lambda ids, state: {"ids": ids[:1]}, ShapeError, "state[0].mixer.shift must be of shape [1, 24], got [2, 24]"),
    "no state": (lambda ids, state: {"state": None}, DtypeError, "state must be a list of LayerState, got None"),
    "one state": (lambda ids, state: {"state": state[0]}, DtypeError, "state must be a list of LayerState, got LayerState("),
    "a state too few": (lambda ids, state: {"state": state[:1]}, ShapeError, "one LayerState for each of 2 layers, got 1."),
    "a state too many": (lambda ids, state: {"state": state + state[:1]}, ShapeError, "one LayerState for each of 2 layers, got 3."),
    "not a LayerState": (
        lambda ids, state: {"state": [state[0], tuple(state[1])]},
        DtypeError,
        "state[1] must be a LayerState, got tuple",
    ),
    "another mixer": (
        lambda ids, state: {"state": [state[0], LayerState(state[1].channel, state[1].channel)]},
        DtypeError,
        "state[1].mixer must be a RWKV6State, got ShiftState",
    ),
    "packed, two rows": (lambda ids, state: {"cu_seqlens": torch.tensor([0, 1, 1])}, ShapeError, "B must be 1 with cu_seqlens, got 2"),
    "offsets beyond T": (
        lambda ids, state: {"ids": ids[:1], "cu_seqlens": torch.tensor([0, 3, 2])},
        RangeError,
        "cu_seqlens must be offsets that begin at 0, never fall and end at T = 1, got [0, 3, 2]",
    ),
    "float offsets": (lambda ids, state: {"ids": ids[:1], "cu_seqlens": torch.tensor([0.0, 1, 1])}, DtypeError, "cu_seqlens must be int32"),
    "a list of offsets": (
        lambda ids, state: {"ids": ids[:1], "cu_seqlens": [0, 1]},
        DtypeError,
        "cu_seqlens must be a torch.Tensor or None",
    ),
    "a slot too large": (lambda ids, state: {"slots": torch.tensor([0, 2])}, RangeError, "slots must be below the 2 rows of state, got 2"),
    "equal slots": (lambda ids, state: {"slots": torch.tensor([1, 1])}, RangeError, "slots must be different for every sequence"),
    "slots too few": (lambda ids, state: {"slots": torch.tensor([1])}, ShapeError, "slots must be of shape [N] = [2], got [1]"),
    "float slots": (lambda ids, state: {"slots": torch.tensor([0.0, 1])}, DtypeError, "slots must be int32 or int64"),
}
for _part, _field in (("mixer", "shift"), ("mixer", "wkv"), ("channel", "shift")):
    _name = f"advance: state[1].{_part}.{_field} must be"
    REFUSED |= {
        f"{_part}.{_field}: not a tensor": (last(_part, _field, lambda x: 3), DtypeError, f"{_name} a torch.Tensor, got 3 of type int"),
        f"{_part}.{_field}: shape": (last(_part, _field, lambda x: x[..., 1:]), ShapeError, f"{_name} of shape [2, "),
        f"{_part}.{_field}: dtype": (last(_part, _field, lambda x: x.int()), DtypeError, f"{_name} float"),
        f"{_part}.{_field}: device": (last(_part, _field, lambda x: x.to("meta")), DeviceError, f"{_name} on cpu, where the model is"),
        f"{_part}.{_field}: overlap": (last(_part, _field, shared), RangeError, f"{_name} free of overlap"),
        f"{_part}.{_field}: inference": (
            last(_part, _field, in_inference_mode),
            RangeError,
            f"{_name} made outside of torch.inference_mode",
        ),
    }


@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_call_in_place_changes_nothing(model: CausalLM, ids: Tensor, why: str) -> None:
    change, error, message = REFUSED[why]
    pool = model.initial_state(2)
    model.advance(ids[:, :5], pool)
    given = {"ids": ids[:, 5:6], "state": pool} | change(ids[:, 5:6], pool)
    before = [x.clone() for x in flat(pool)]
    with pytest.raises(error) as caught:
        model.advance(**given)
    assert type(caught.value) is error
    assert message in str(caught.value)
    assert all(torch.equal(x, y) for x, y in zip(flat(pool), before))


def test_a_pool_is_checked_again_if_it_changed(model: CausalLM, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, calls = model.initial_state(2), []
    check = backbone.check_state
    monkeypatch.setattr(backbone, "check_state", lambda *given, **options: (calls.append(1), check(*given, **options)))
    for _ in range(3):
        model.advance(ids[:, :1], pool)
    assert len(calls) == 1
    model.advance(ids[:, :1], pool, slots=torch.tensor([1, 0]))  # any number of rows would do
    assert len(calls) == 2
    wkv = pool[1].mixer.wkv
    for changed in (wkv[:, :, :4], wkv.int(), wkv.view(torch.int32), wkv.to("meta"), shared(wkv), torch._neg_view(wkv)):
        model.advance(ids[:, :1], pool)
        with pytest.raises(InvalidArgument):
            model.advance(ids[:, :1], [pool[0], pool[1]._replace(mixer=pool[1].mixer._replace(wkv=changed))])
    model.advance(ids[:, :1], pool)
    with pytest.raises(ShapeError):
        model.advance(ids[:1, :1], pool)


def test_state_kinds(ids: Tensor) -> None:
    """A state of another architecture, integers as floats, and caches of any room."""
    retnet, attention = model_of("retnet"), model_of("hybrid")
    with pytest.raises(DtypeError, match=r"state\[0\].mixer must be a RetentionState, got RWKV6State"):
        retnet(ids, model_of("rwkv6").initial_state(2))
    state = retnet.initial_state(2)
    state[1] = state[1]._replace(mixer=state[1].mixer._replace(position=torch.zeros(2)))
    with pytest.raises(DtypeError, match=r"state\[1\].mixer.position must be int64, got torch.float32"):
        retnet(ids, state)
    for room in (20, 30):
        attention.advance(ids, attention.initial_state(2, max_length=room))
    pool = attention.initial_state(2, max_length=19)
    before = [x.clone() for x in flat(pool[1])]
    with pytest.raises(RangeError, match="room for 20 tokens a row, got room for 19"):
        attention.advance(ids, pool)
    assert all(torch.equal(x, y) for x, y in zip(flat(pool[1]), before))


@pytest.mark.parametrize("why", ["a list of ids", "another device", "an id too large", "a negative id"])
@pytest.mark.parametrize("function", ["forward", "generate", "loss", "hidden"])
def test_wrong_ids_raise_everywhere(model: CausalLM, ids: Tensor, function: str, why: str) -> None:
    change, error, message = REFUSED[why]
    piece = change(ids, [])["ids"]
    with pytest.raises(error) as caught:
        {
            "forward": lambda: model(piece),
            "generate": lambda: model.generate(piece, 1),
            "loss": lambda: model.loss(piece, ids),
            "hidden": lambda: model.hidden(piece),
        }[function]()
    assert str(caught.value).startswith(f"{function}: ")
    assert message in str(caught.value)


def test_values_are_read_on_a_cpu_only(model: CausalLM, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, values are read inside ``checks()`` only."""
    reads: list[bool] = []
    read = "penstock.layers.values.reads_values"
    monkeypatch.setattr(read, lambda x: reads.append(True))
    with pytest.raises(IndexError):  # raised by torch, and not on a GPU
        model(ids + 13)
    model.generate(ids, 3)
    monkeypatch.setattr(read, lambda x: True)
    with pytest.raises(RangeError, match="ids must be from 0 to 12, got 2"):
        model(ids + 13)
    assert reads


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
def test_messages_of_generate(model: CausalLM, ids: Tensor, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        model.generate(ids, **({"count": 3} | options))
    assert str(caught.value).startswith("generate: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rwkv6(vocab_size=5, num_layers=True, hidden_size=64), DtypeError, "Config: num_layers must be a whole number, got True"),
        (lambda: rwkv6(vocab_size=0, num_layers=1, hidden_size=64), RangeError, "vocab_size must be a whole number of at least 1, got 0"),
        (lambda: CausalLM(5), DtypeError, "CausalLM: config must be a Config, got 5 of type int"),
        (lambda: CausalLM(rwkv6(vocab_size=5, num_layers=1, hidden_size=100)), InvalidArgument, "a multiple of head_size = 64"),
        (lambda: Config(5, 8, 2, (GLAConfig(),)), ShapeError, "mixer must be one for each of 2 layers, got 1"),
        (lambda: Config(5, 8, 1, GLAConfig(), norm_eps=None), DtypeError, "Config: norm_eps must be a number, got None"),
        (lambda: Config(5, 8, 1, GLAConfig(), tie_embeddings="no"), DtypeError, "tie_embeddings must be True or False, got 'no'"),
        (lambda: rwkv6(vocab_size=5, num_layers=1, hidden_size=None), DtypeError, "hidden_size must be a whole number, got None"),
        (lambda: gla(vocab_size=5, num_layers=1, hidden_size="64"), DtypeError, "hidden_size must be a whole number, got '64'"),
        (lambda: mamba2(vocab_size=5, num_layers=1, hidden_size=24), RangeError, "head_dim must be a divisor of 2 * hidden_size = 48"),
        (lambda: rwkv6(vocab_size=5, num_layers=1, hidden_size=64, intermediate_size=0), RangeError, "intermediate_size must be a whole"),
        (lambda: Config.from_dict({"mixer": {"kind": "gla", "heads": 3}}), RangeError, "gla must be made of clamp_min, conv_bias"),
        (lambda: Config.from_dict({"mixer": {"kind": "mamba2"}}), RangeError, "mamba2 must be a mapping with num_heads, got nothing"),
        (lambda: Config(5, 8, 2, "gla"), DtypeError, "mixer must be a MixerConfig"),
        (lambda: Config(5, 8, 2, None), DtypeError, "mixer must be a MixerConfig"),
        (lambda: Config(5, 8, 1, GLAConfig(), norm="batch"), RangeError, "norm must be 'layer_norm' or 'rms_norm', got 'batch'"),
        (lambda: Config.from_dict({"vocab": 5}), RangeError, "values must be made of channel, embedding_norm"),
        (lambda: Config.from_dict({"mixer": {"kind": "rnn"}}), RangeError, "kind must be one of delta_net, gated_deltanet, gla"),
        (
            lambda: hybrid(gla(vocab_size=5, num_layers=2, hidden_size=64), SwiGLUConfig(5), [2]),
            RangeError,
            "layers must be from 0 to 1, got 2",
        ),
    ],
)
def test_wrong_sizes_raise(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)


def test_wrong_counts_raise(model: CausalLM, ids: Tensor) -> None:
    with pytest.raises(RangeError, match="initial_state: count must be a whole number of at least 0, got -1"):
        model.initial_state(-1)
    with pytest.raises(RangeError, match="below 2\\^63"):
        model.generate(ids, count=10**30)


@pytest.mark.parametrize("name", every(9, ARCHITECTURES))
def test_compiled_calls_name_the_rule_that_arguments_break(name: str, ids: Tensor) -> None:
    """In the text of torch's own error, which it raises for any exception in a graph."""
    model = model_of(name)
    for call, rule in (
        (lambda: model(ids[0]), r"forward: ids must be of shape \[B,T\], got \[20\]"),
        (lambda: model(ids.float()), "forward: ids must be int32 or int64, got torch.float32"),
        (lambda: model(ids, None, torch.tensor([0, 20])), "forward: B must be 1 with cu_seqlens, got 2"),
        (lambda: model.loss(ids, ids[:, 1:]), r"loss: labels must be of shape \[B,T\] = \[2, 20\], got \[2, 19\]"),
        (lambda: model(ids, model.initial_state(3)), r"forward: state\[0\].* must be of shape "),
    ):
        with pytest.raises(Exception, match=rule):
            torch.compile(call, fullgraph=True, backend="eager")()


@pytest.mark.parametrize("name", every(3, ["rwkv6", "rwkv7", "mamba2", "retnet"]))
def test_compiled_calls_have_no_graph_breaks(name: str, ids: Tensor) -> None:
    """The checks are traced, except those of values. Graphs take other kernels than eager calls on a CPU, which round otherwise."""
    torch._dynamo.reset()
    model = model_of(name)
    cu_seqlens = torch.tensor([0, 4, 9])
    with torch.no_grad():
        wanted, _ = model(ids[:1, :9], cu_seqlens=cu_seqlens)
        found, _ = torch.compile(model, fullgraph=True, backend="eager")(ids[:1, :9], cu_seqlens=cu_seqlens)
        torch.testing.assert_close(found, wanted)
        ours, theirs = (model.initial_state(3) for _ in range(2))
        call = {"slots": torch.tensor([2, -1])}
        step = torch.compile(model.advance, fullgraph=True, backend="eager")
        stepped = step(ids[:, 9:10], ours, **call), model.advance(ids[:, 9:10], theirs, **call)
        torch.testing.assert_close(stepped[0][0], stepped[1][0])  # logits of negative slots are undefined
    for x, y in zip(flat(ours), flat(theirs)):
        torch.testing.assert_close(x, y)


def test_transforms_that_a_call_does_not_take(model: CausalLM, ids: Tensor) -> None:
    weights = dict(model.named_parameters())
    try:
        model.gradient_checkpointing = "some"  # type: ignore[assignment]
        with pytest.raises(RangeError, match=r"loss: gradient_checkpointing must be True, False or 'selective', got 'some'"):
            model.loss(ids, ids)
        model.gradient_checkpointing = True
        with pytest.raises(RangeError, match=r"forward: gradient_checkpointing must be False inside torch.func transforms, got True\. Set"):
            torch.func.grad(lambda given: torch.func.functional_call(model, given, (ids,)).logits.sum())(weights)
    finally:
        model.gradient_checkpointing = False
    with pytest.raises(RangeError, match=r"outside of torch\.func transforms"):
        torch.func.vmap(lambda ids: model.advance(ids[None], model.initial_state(1)))(ids)


def test_a_generator_of_another_device_raises() -> None:
    complaints = Complaints("generate")
    check_sampling(complaints, 1.0, 1.0, torch.Generator(), torch.device("cuda"))
    with pytest.raises(DeviceError, match="generator must be for cuda, where the model is, got cpu"):
        complaints.raise_any()


def test_shift_states_of_other_dtypes(model: CausalLM, ids: Tensor) -> None:
    """Under autocast, norms and shift states can have another dtype than the model."""
    _, state = model(ids)
    state = [
        LayerState(RWKV6State(one.mixer.shift.double(), one.mixer.wkv), ShiftState(one.channel.shift.bfloat16()))
        for one in state
    ]  # fmt: skip
    logits, after = model(ids[:, :1], state)
    assert logits.dtype == after[0].mixer.shift.dtype == torch.float32


@pytest.mark.parametrize("which", ["whole states", "wkv", "fields of one state"])
def test_states_that_share_memory_are_refused(model: CausalLM, which: str) -> None:
    one, two = model.initial_state(1)
    state = {
        "whole states": [one, one],
        "wkv": [one, two._replace(mixer=two.mixer._replace(wkv=one.mixer.wkv))],
        "fields of one state": [one._replace(channel=ShiftState(one.mixer.shift)), two],
    }[which]
    with pytest.raises(RangeError, match="in memory of its own"):
        model.advance(torch.zeros(1, 1, dtype=torch.int64), state)


@pytest.mark.parametrize("lazy", [torch._neg_view, lambda x: torch._efficientzerotensor(x.shape)], ids=["negated", "zeros"])
def test_lazy_states_are_refused_before_any_write(model: CausalLM, lazy: Callable[[Tensor], Tensor]) -> None:
    one, two = model.initial_state(1)
    with pytest.raises(RangeError, match="memory that can be written"):
        model.advance(torch.zeros(1, 1, dtype=torch.int64), [one, two._replace(mixer=two.mixer._replace(wkv=lazy(two.mixer.wkv)))])
    assert not any(x.any() for x in flat(one))


def test_names_of_state_tensors() -> None:
    names = [name for name, _ in named_tensors(CausalLM(ARCHITECTURES["hybrid"]).initial_state(1))]
    assert names == ["state[0].mixer.kv", "state[0].mixer.tails", *(f"state[1].mixer.{name}" for name in ("keys", "values", "length"))]
