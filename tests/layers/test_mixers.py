"""Every mixer against its formulas, token by token in float64; cut, packed and pooled sequences."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import MIXERS as CONFIGS
from architectures import flat, randomised, unflat
from formulas import error, literal_outputs
from passing import alone
from torch import Tensor

from penstock import InvalidArgument, RangeError
from penstock.layers import (
    GLAConfig,
    Mamba2Config,
    Mixer,
    RetentionConfig,
    RWKV5Config,
    RWKV6Config,
    Sequences,
    ShiftState,
    SoftmaxAttentionConfig,
    SwiGLUConfig,
)

pytestmark = pytest.mark.sampled(file=True)

C, LENGTH = 24, 11
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-10}


def mixer_of(name: str, dtype: torch.dtype = torch.float64) -> Mixer:
    torch.manual_seed(0)
    mixer = CONFIGS[name].build(C, 1, 3)
    randomised(mixer)
    return alone(mixer.to(dtype))


def inputs(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, C, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_equal_the_formulas(name: str, dtype: torch.dtype) -> None:
    mixer, x = mixer_of(name, dtype), inputs(2, LENGTH, dtype=dtype)
    y, _ = mixer(x)
    true = torch.stack([literal_outputs(CONFIGS[name], mixer.state_dict(), one) for one in x])
    assert true.std() > 0.02
    assert error(y, true) < BOUNDS[dtype]
    assert y.dtype == dtype


@pytest.mark.parametrize("name", CONFIGS)
def test_cut_sequences_equal_whole_ones(name: str) -> None:
    mixer, x = mixer_of(name), inputs(2, LENGTH)
    whole, end = mixer(x)
    for cuts in ([0], [1], [LENGTH - 1], [LENGTH], [1, 2, 3, 3], list(range(LENGTH))):
        parts, state = [], None
        for piece in torch.tensor_split(x, cuts, dim=1):
            before = [one.clone() for one in flat(state)]
            y, after = mixer(piece, state)
            assert all(torch.equal(one, other) for one, other in zip(flat(state), before)), "the given state is not changed"
            parts.append(y)
            state = after
        assert error(torch.cat(parts, 1), whole) < 1e-10
        assert all(torch.allclose(one, other) for one, other in zip(flat(state), flat(end)))


LENGTHS = [[3, 0, 7, 1], [2, 5, 0, 4], [0, 0, 1, 1]]
"""The tokens of four sequences in three calls: empty ones, shorter ones than the convolutions."""


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def packed_parts(x: Tensor) -> list[Tensor]:
    """The calls' packed rows [1,T,C], from the whole sequences x [4,T,C]."""
    begins = torch.tensor([[0] * 4, *LENGTHS]).cumsum(0).tolist()
    return [
        torch.cat([x[n, begin : begin + length] for n, (begin, length) in enumerate(zip(begins[call], lengths))])[None]
        for call, lengths in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_sequences_equal_separate_ones(name: str) -> None:
    """Also with states that earlier calls left."""
    mixer, x = mixer_of(name), inputs(4, LENGTH + 1)
    wanted = packed_parts(mixer(x)[0])
    state = None
    for lengths, piece, true in zip(LENGTHS, packed_parts(x), wanted):
        y, state = mixer(piece, state, offsets(lengths))
        assert error(y, true) < 1e-10
    totals = torch.tensor(LENGTHS).sum(0).tolist()
    for n, total in enumerate(totals):
        _, alone = mixer(x[n : n + 1, :total])
        for one, other in zip(flat(state), flat(alone)):
            assert torch.allclose(one[n : n + 1, : other.shape[1]] if other.dim() > 1 else one[n : n + 1], other)


@pytest.mark.parametrize("slots", [torch.tensor([4, 0, 5, 2]), torch.tensor([4, -1, 5, -3], dtype=torch.int32), torch.tensor([-1] * 4)])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_a_pool_are_updated_in_place(name: str, slots: Tensor) -> None:
    mixer, x = mixer_of(name), inputs(4, LENGTH + 1)
    wanted = packed_parts(mixer(x)[0])
    pool = mixer.initial_state(6, x)
    for one in flat(pool):
        one.fill_(7) if one.is_floating_point() else one.fill_(1)
        one[slots[slots >= 0].long()] = 0
    untouched = [row for row in range(6) if row not in slots.tolist()]
    before = [one.clone() for one in flat(pool)]
    for lengths, piece, true in zip(LENGTHS, packed_parts(x), wanted):
        y = mixer.advance(piece, pool, cu_seqlens=offsets(lengths), slots=slots)
        for part, known, slot in zip(y[0].split(lengths), true[0].split(lengths), slots.tolist()):
            assert slot < 0 or torch.allclose(part, known, atol=1e-10)
    assert all(torch.equal(one[untouched], other[untouched]) for one, other in zip(flat(pool), before))
    totals = torch.tensor(LENGTHS).sum(0).tolist()
    for n, (total, slot) in enumerate(zip(totals, slots.tolist())):
        _, alone = mixer(x[n : n + 1, :total])
        for one, other in zip(flat(pool), flat(alone)):
            found = one[slot : slot + 1, : other.shape[1]] if other.dim() > 1 else one[slot : slot + 1]
            assert slot < 0 or torch.allclose(found, other)


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_without_slots(name: str) -> None:
    mixer, x = mixer_of(name), inputs(3, LENGTH)
    whole, _ = mixer(x)
    pool = mixer.initial_state(3, x)
    parts = [mixer.advance(piece, pool) for piece in x.split([1, 1, 5, 1, 3], 1)]
    assert error(torch.cat(parts, 1), whole) < 1e-10


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_pass_gradcheck(name: str, packed: bool) -> None:
    mixer = mixer_of(name)
    x = inputs(1, 6)
    _, state = mixer(inputs(2, 4), None) if packed else mixer(inputs(1, 4), None)
    given = [one.detach().requires_grad_(one.is_floating_point()) for one in flat(state)]

    def call(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        y, after = mixer(x, unflat(state, given), torch.tensor([0, 2, 6]) if packed else None)
        return y, *[one for one in flat(after) if one.is_floating_point()]

    assert torch.autograd.gradcheck(call, (x.requires_grad_(), *given), fast_mode=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_empty_calls(name: str) -> None:
    mixer, x = mixer_of(name), inputs(2, 5)
    _, state = mixer(x)
    y, after = mixer(x[:, :0], state)
    assert y.shape == (2, 0, C)
    assert all(torch.equal(one, other) for one, other in zip(flat(state), flat(after)))
    y, after = mixer(x[:1, :0], None, torch.tensor([0]))
    assert y.shape == (1, 0, C)
    assert all(one.shape[0] == 0 for one in flat(after))
    y = mixer.advance(x[:0], mixer.initial_state(3, x), slots=torch.tensor([], dtype=torch.int64))
    assert y.shape == (0, 5, C)
    before = [one.clone() for one in flat(state)]
    for rows, call in (
        (2, {}),
        (2, {"slots": torch.tensor([1, -1])}),
        (1, {"cu_seqlens": torch.zeros(3, dtype=torch.int32)}),
        (1, {"cu_seqlens": torch.zeros(3, dtype=torch.int32), "slots": torch.tensor([-1, 0])}),
    ):
        assert mixer.advance(x[:rows, :0], state, **call).shape == (rows, 0, C)
    assert all(torch.equal(one, other) for one, other in zip(flat(state), before))
    assert mixer.advance(x, mixer.initial_state(0, x), slots=torch.tensor([-1, -1])).shape == x.shape, "a pool without rows"


@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision(name: str) -> None:
    """Recurrent states stay float32."""
    mixer = mixer_of(name, torch.bfloat16)
    x = inputs(2, LENGTH, dtype=torch.bfloat16)
    y, state = mixer(x)
    true, _ = mixer_of(name)(x.double())
    assert error(y, true) < 0.05
    assert y.dtype == torch.bfloat16
    for field in ("wkv", "kv", "ssm"):
        assert getattr(state, field, torch.zeros(1)).dtype == torch.float32


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(
    "name", [name for name in CONFIGS if any("norm" in one or "ln_x" in one for one, _ in mixer_of(name).named_modules())]
)
def test_norms_kept_in_float32(name: str, kernels: bool, request: pytest.FixtureRequest) -> None:
    """Parameters of norms in layers of 16 bits: outputs, steps and gradients, by the formula and by kernels."""
    mixer, x = mixer_of(name, torch.float16), inputs(2, LENGTH, dtype=torch.float16)
    wanted = mixer(x)[0]
    for place, module in mixer.named_modules():
        if place.endswith(("norm", "ln_x")):
            module.float()
    if kernels:
        request.getfixturevalue("kernels_on_a_cpu")
    y, _ = mixer(x)
    y.float().sum().backward()
    with torch.no_grad():
        steps = mixer.advance(x, mixer.initial_state(2, x))
    for found in (y, steps):
        assert found.dtype == torch.float16
        assert error(found, wanted) < 0.01
    assert all(one.grad is None or one.grad.dtype == one.dtype for one in mixer.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_autocast(name: str) -> None:
    mixer, x = mixer_of(name, torch.float32), inputs(2, LENGTH, dtype=torch.float32)
    true, _ = mixer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x[:, :5])
        more, _ = mixer(x[:, 5:], state)
        pool = mixer.initial_state(2, x)
        advanced = mixer.advance(x, pool)
    assert error(torch.cat([y, more], 1), true) < 0.05
    assert error(advanced, true) < 0.05


def test_windows_of_packed_rows() -> None:
    """The token before each token, and the layout with tails."""
    x = torch.arange(1.0, 7).view(1, 6, 1)
    sequences = Sequences(x, torch.tensor([0, 2, 2, 6]))
    first, last = sequences.shifted(x, torch.tensor([[-1.0], [-2], [-3]]))
    assert sequences.starts.tolist() == [0, -1, 2, -1, -1, -1]
    assert first.flatten().tolist() == [-1, -2, -3]
    assert last.flatten().tolist() == [2, -2, 6]
    rows, windows, tail = sequences.extended(x, -torch.arange(1.0, 7).view(3, 2, 1))
    assert rows.flatten().tolist() == [-1, -2, 1, 2, -3, -4, -5, -6, 3, 4, 5, 6]
    assert windows(rows[:, :-2]).flatten().tolist() == [-1, -2, -5, -6, 3, 4]
    assert tail.flatten().tolist() == [1, 2, -3, -4, 5, 6]
    assert sequences.positions(torch.tensor([5, 0, 7])).tolist() == [[5, 6, 7, 8, 9, 10]]
    assert sequences.lengths.tolist() == [2, 0, 4]


def test_convolutions_do_not_depend_on_cuts_or_packing() -> None:
    """Equal bits."""
    torch.manual_seed(0)
    convolution = GLAConfig(num_heads=2, conv_size=4, expand_k=1.0).build(C).q_conv1d
    x = inputs(3, LENGTH, dtype=torch.float32)
    zero = convolution.initial_state(3, x)
    whole, end = convolution(x, zero, Sequences(x))
    first, tail = convolution(x[:, :2], zero, Sequences(x[:, :2]))
    second, tail = convolution(x[:, 2:], tail, Sequences(x[:, 2:]))
    assert torch.equal(torch.cat([first, second], 1), whole)
    assert torch.equal(tail, end)
    packed, tail = convolution(x.view(1, -1, C), zero, Sequences(x.view(1, -1, C), torch.arange(4) * LENGTH))
    assert torch.equal(packed.view(whole.shape), whole)
    assert torch.equal(tail, end)


def test_a_pool_without_room_raises() -> None:
    mixer = SoftmaxAttentionConfig(num_heads=2, max_length=4).build(C)
    x = inputs(2, 3, dtype=torch.float32)
    pool = mixer.initial_state(3, x)
    with torch.no_grad():
        mixer.advance(x, pool, slots=torch.tensor([0, 2]))
        before = [one.clone() for one in flat(pool)]
        with pytest.raises(RangeError, match="state must be a pool with room for 6 tokens a row, got room for 4"):
            mixer.advance(x, pool, slots=torch.tensor([0, 1]))
        assert all(torch.equal(one, other) for one, other in zip(flat(pool), before))
        mixer.advance(x, pool, slots=torch.tensor([1, -1]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GLAConfig(num_heads=4, num_kv_heads=3), "num_kv_heads must be a divisor of num_heads = 4, got 3"),
        (lambda: GLAConfig(num_heads=0), "GLAConfig: num_heads must be a whole number of at least 1, got 0"),
        (lambda: GLAConfig(num_heads="4"), "num_heads must be a whole number, got '4' of type str"),
        (lambda: GLAConfig(num_heads=2.0), "num_heads must be a whole number, got 2.0"),
        (lambda: GLAConfig(num_kv_heads=0), "num_kv_heads must be a whole number of at least 1, got 0"),
        (lambda: GLAConfig(conv_size=-1), "conv_size must be a whole number of at least 0, got -1"),
        (lambda: GLAConfig(norm_eps=None), "norm_eps must be a number, got None"),
        (lambda: GLAConfig(norm_eps="1e-5"), "norm_eps must be a number, got '1e-5' of type str"),
        (lambda: GLAConfig(expand_k=math.nan), "expand_k must be a finite number of at least 0, got nan"),
        (lambda: GLAConfig(use_output_gate="no"), "use_output_gate must be True or False, got 'no'"),
        (lambda: GLAConfig(gate_logit_normalizer=0), "gate_logit_normalizer must be above 0, got 0"),
        (lambda: GLAConfig(clamp_min=0.5), "clamp_min must be at most 0 or None, got 0.5"),
        (lambda: GLAConfig(clamp_min=-math.inf), "clamp_min must be a finite number, got -inf"),
        (lambda: RetentionConfig(rope_theta=0), "rope_theta must be above 0"),
        (lambda: SoftmaxAttentionConfig(4, window_size=0), "window_size must be a whole number of at least 1, got 0"),
        (lambda: Mamba2Config(4, conv_kernel=0), "conv_kernel must be a whole number of at least 1, got 0"),
        (lambda: Mamba2Config(4, time_step_limit=None), "time_step_limit must be two numbers, 0 <= low <= high, got None"),
        (lambda: RWKV6Config(head_size=None), "head_size must be a whole number, got None"),
        (lambda: RWKV6Config(key_size=0), "key_size must be a whole number of at least 1, got 0"),
        (lambda: RWKV5Config(version=5.2), "version must be '5.0', '5.1' or '5.2', got 5.2"),
        (lambda: SwiGLUConfig(0), "intermediate_size must be a whole number of at least 1, got 0"),
        (lambda: GLAConfig(feature_map="tan"), "feature_map must be None or one of"),
        (lambda: GLAConfig(num_heads=5).build(24), "expand_k must be such that hidden_size"),
        (lambda: RetentionConfig(num_heads=8).build(24), "K is even, got K = 3"),
        (lambda: SoftmaxAttentionConfig(5).build(24), "hidden_size must be a multiple of num_heads = 5"),
        (lambda: CONFIGS["rwkv6 mixer"].build(25), "hidden_size must be a multiple of head_size = 8"),
        *((lambda one=one: one.build(24.0), "build: hidden_size must be a whole number, got 24.0") for one in CONFIGS.values()),
        *((lambda one=one: one.build(0), "build: hidden_size must be a whole number of at least 1, got 0") for one in CONFIGS.values()),
        *((lambda one=one: one.build(24, "0", 2), "build: layer must be a whole number, got '0'") for one in CONFIGS.values()),
        *((lambda one=one: one.build(24, layer=-1), "layer must be a whole number of at least 0, got -1") for one in CONFIGS.values()),
        *((lambda one=one: one.build(24, 2, num_layers=2), "layer must be below num_layers = 2, got 2") for one in CONFIGS.values()),
    ],
)
def test_wrong_sizes_raise(make, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


WRONG_CALLS = {
    "no batch": (lambda x: {"x": x[0]}, r"x must be of shape \[B,T,C\]"),
    "another width": (
        lambda x: {"x": x[..., :-1]},
        rf"x must be of shape .* {C}\], got \[2, 5, {C - 1}\].*C is the hidden_size of the mixer",
    ),
    "numpy": (lambda x: {"x": x.numpy()}, "x must be a torch.Tensor, got"),
    "whole numbers": (lambda x: {"x": x.long()}, "x must be float16 or bfloat16 or float32 or float64, got torch.int64"),
    "a list of offsets": (lambda x: {"x": x[:1], "cu_seqlens": [0, 5]}, "cu_seqlens must be a torch.Tensor or None"),
    "a batch with offsets": (lambda x: {"cu_seqlens": torch.tensor([0, 5])}, "B must be 1 with cu_seqlens, got 2"),
    "offsets that end early": (lambda x: {"x": x[:1], "cu_seqlens": torch.tensor([0, 4])}, "end at T = 5"),
    "a slot twice": (lambda x: {"slots": torch.tensor([1, 1])}, "slots must be different for every sequence"),
    "a slot too large": (lambda x: {"slots": torch.tensor([-1, 3])}, "slots must be"),
}


@pytest.mark.parametrize("why", WRONG_CALLS)
@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_calls_raise_and_change_nothing(name: str, why: str) -> None:
    if why.startswith("a slot") and CONFIGS[name].kind == "swiglu":
        pytest.skip("without state there is no pool")
    mixer, x = mixer_of(name), inputs(2, 5)
    change, message = WRONG_CALLS[why]
    pool = mixer.initial_state(3, x)
    before = [one.clone() for one in flat(pool)]
    with pytest.raises(InvalidArgument, match=message):
        mixer.advance(**{"x": x, "state": pool} | change(x))
    assert all(torch.equal(one, other) for one, other in zip(flat(pool), before))


WRONG_STATES = {
    "another number of sequences": (lambda mixer, x: mixer.initial_state(3, x), r"must be of shape \[2, .*initial_state\(2\) makes one"),
    "no sequences": (lambda mixer, x: mixer.initial_state(0, x), r"must be of shape \[2, "),
    "another mixer's": (lambda mixer, x: ShiftState(x[0]), "state must be a .*State, got ShiftState"),
    "its tensors": (lambda mixer, x: list(mixer.initial_state(2, x)), "state must be a .*State, got list"),
    "another size": (lambda mixer, x: _changed(mixer.initial_state(2, x), lambda one: one[..., :-1]), r"must be of shape \[2, "),
    "fewer axes": (lambda mixer, x: _changed(mixer.initial_state(2, x), lambda one: one[..., 0]), r"must be of shape \[2, "),
    "bool": (lambda mixer, x: _changed(mixer.initial_state(2, x), lambda one: one.bool()), "Convert it with"),
}


def _changed(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """With its first floating-point tensor changed."""
    name = next(name for name, one in zip(state._fields, state) if one.dtype.is_floating_point and one.numel())
    return state._replace(**{name: change(getattr(state, name))})


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("why", WRONG_STATES)
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.kind != "swiglu"])
def test_wrong_states_raise(name: str, why: str, in_place: bool) -> None:
    if why == "another mixer's" and CONFIGS[name].kind.endswith("channel"):
        pytest.skip("this one has that state")
    make, message = WRONG_STATES[why]
    mixer, x = mixer_of(name), inputs(2, 5)
    call = mixer.advance if in_place else mixer
    with pytest.raises(InvalidArgument, match=message):
        call(x, make(mixer, x))


def test_a_pool_that_overlaps_itself_raises() -> None:
    mixer, x = RWKV6Config(head_size=8).build(C), inputs(2, 5, dtype=torch.float32)
    pool = mixer.initial_state(1, x)
    with pytest.raises(InvalidArgument, match=r"state\.wkv must be free of overlap"):
        mixer.advance(x, pool._replace(shift=pool.shift.repeat(2, 1), wkv=pool.wkv.expand(2, -1, -1, -1)))


@pytest.mark.parametrize("config", [RWKV6Config(head_size=1), RWKV5Config(head_size=1), RWKV5Config(head_size=1, version="5.0")])
def test_heads_of_one_channel(config) -> None:
    """Also for one token, whose norm has one value a head."""
    mixer, x = config.build(C), inputs(1, 1, dtype=torch.float32)
    randomised(mixer)
    assert error(mixer(x)[0], literal_outputs(config, mixer.state_dict(), x[0])[None]) < 1e-4
