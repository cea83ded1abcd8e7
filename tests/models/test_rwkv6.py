"""RWKV-6 layers and model against their formulas, written out token by token in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.layers.rwkv6 import ChannelMix, State, TimeMix
from penstock.models.rwkv6 import RWKV6, Configuration
from penstock.models.sampling import draw

SIZES = Configuration(vocabulary=13, layers=3, channels=24, ffn_channels=40, head_size=8, mix_rank=5, decay_rank=6)
BATCH, LENGTH = 2, 70

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def model() -> RWKV6:
    """A model whose every parameter is away from its initial value: zeros and ones would hide mistakes."""
    torch.manual_seed(1)
    model = RWKV6(SIZES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 1 / math.sqrt(parameter.shape[-1]) if parameter.dim() == 2 else 0.3
            parameter.add_(torch.randn_like(parameter) * (size if name != "emb.weight" else 1.0))
    return model


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(SIZES.vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))


def layer_norm(x: Tensor, w: Weights, name: str) -> Tensor:
    x = (x - x.mean()) / (((x - x.mean()) ** 2).mean() + 1e-5).sqrt()
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def time_mix(x: Tensor, p: Tensor, S: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """One token x [C] after p [C]; S [H,n,n]. The formulas of the paper, one line each."""
    dx = p - x
    hidden = torch.tanh((x + dx * w["time_maa_x"].view(-1)) @ w["time_maa_w1"])
    M = len(hidden) // 5
    mixed = {}
    for i, name in enumerate("wkvrg"):
        offset = hidden[i * M : (i + 1) * M] @ w["time_maa_w2"][i]
        mixed[name] = x + dx * (w[f"time_maa_{name}"].view(-1) + offset)
    r, k, v = w["receptance.weight"] @ mixed["r"], w["key.weight"] @ mixed["k"], w["value.weight"] @ mixed["v"]
    gate = w["gate.weight"] @ mixed["g"]
    gate = gate / (1 + torch.exp(-gate))
    decay = torch.exp(-torch.exp(w["time_decay"].view(-1) + torch.tanh(mixed["w"] @ w["time_decay_w1"]) @ w["time_decay_w2"]))
    H, n = w["time_faaaa"].shape
    outputs, states = [], []
    for h in range(H):
        c = slice(h * n, (h + 1) * n)
        kv = torch.outer(k[c], v[c])
        o = r[c] @ (S[h] + torch.diag(w["time_faaaa"][h]) @ kv)
        states.append(torch.diag(decay[c]) @ S[h] + kv)
        o = o / 8  # the norm of o / 8 with eps 1e-5
        outputs.append((o - o.mean()) / (((o - o.mean()) ** 2).mean() + 1e-5).sqrt())
    normed = torch.cat(outputs) * w["ln_x.weight"] + w["ln_x.bias"]
    return w["output.weight"] @ (normed * gate), torch.stack(states)


def channel_mix(x: Tensor, p: Tensor, w: Weights) -> Tensor:
    dx = p - x
    k = torch.clamp(w["key.weight"] @ (x + dx * w["time_maa_k"].view(-1)), min=0) ** 2
    r = 1 / (1 + torch.exp(-(w["receptance.weight"] @ (x + dx * w["time_maa_r"].view(-1)))))
    return r * (w["value.weight"] @ k)


def below(w: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): x for name, x in w.items() if name.startswith(prefix)}


def literal_logits(w: Weights, tokens: Tensor) -> Tensor:
    """One sequence [T], token by token, from published weights [T,vocabulary]."""
    H, n = w["blocks.0.att.time_faaaa"].shape
    C, layers = H * n, 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    zero = torch.zeros(C, dtype=torch.float64)
    memory = [(zero, torch.zeros(H, n, n, dtype=torch.float64), zero) for _ in range(layers)]
    logits = []
    for token in tokens.tolist():
        x = layer_norm(w["emb.weight"][token], w, "blocks.0.ln0")
        for i, (p_time, S, p_channel) in enumerate(memory):
            normed = layer_norm(x, w, f"blocks.{i}.ln1")
            y, S = time_mix(normed, p_time, S, below(w, f"blocks.{i}.att."))
            x = x + y
            last = layer_norm(x, w, f"blocks.{i}.ln2")
            x = x + channel_mix(last, p_channel, below(w, f"blocks.{i}.ffn."))
            memory[i] = normed, S, last
        logits.append(w["head.weight"] @ layer_norm(x, w, "ln_out"))
    return torch.stack(logits)


def error(x: Tensor, true: Tensor) -> float:
    return ((x.double() - true.double()).norm() / true.double().norm()).item()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_the_model_is_its_formulas(model: RWKV6, tokens: Tensor, dtype: torch.dtype, bound: float) -> None:
    weights = {name: x.double() for name, x in model.state_dict().items()}
    copy = RWKV6(SIZES).to(dtype)
    copy.load_state_dict(model.state_dict())
    true = torch.stack([literal_logits(weights, sequence) for sequence in tokens])
    assert true.std() > 0.3
    assert error(copy(tokens)[0], true) < bound


def test_the_mixers_are_their_formulas(model: RWKV6) -> None:
    x = torch.randn(LENGTH, SIZES.channels, generator=torch.Generator().manual_seed(3))
    block = model.blocks[1]
    time, channel = ({name: p.double() for name, p in part.state_dict().items()} for part in (block.att, block.ffn))
    p, S = torch.zeros(SIZES.channels).double(), torch.zeros(SIZES.heads, SIZES.head_size, SIZES.head_size).double()
    mixed, channels = [], []
    for one in x.double():
        y, S = time_mix(one, p, S, time)
        mixed.append(y)
        channels.append(channel_mix(one, p, channel))
        p = one
    before = State.zeros(1, SIZES.channels, SIZES.head_size, like=x)
    y, after = block.att(x[None], before)
    assert error(y[0], torch.stack(mixed)) < 1e-5
    assert error(after.wkv[0], S) < 1e-5
    assert torch.equal(after.time_shift[0], x[-1])
    y, after = block.ffn(x[None], before)
    assert error(y[0], torch.stack(channels)) < 1e-5
    assert torch.equal(after.channel_shift[0], x[-1])


@pytest.mark.parametrize("cuts", [[0], [1], [LENGTH - 1], [LENGTH], [7, 8, 40], [33, 33]])
def test_a_sequence_can_be_cut_anywhere(model: RWKV6, tokens: Tensor, cuts: list[int]) -> None:
    whole, end = model(tokens)
    parts, state = [], None
    for piece in torch.tensor_split(tokens, cuts, dim=1):
        before = state and [[x.clone() for x in one] for one in state]
        logits, after = model(piece, state)
        if state is not None:  # what goes in is not changed
            assert all(torch.equal(x, y) for one, other in zip(state, before) for x, y in zip(one, other))
        parts.append(logits)
        state = after
    assert error(torch.cat(parts, 1), whole) < 1e-5
    assert all(error(x, y) < 1e-5 for one, other in zip(state, end) for x, y in zip(one, other))


@pytest.mark.parametrize("width", [1, 7, 16])
def test_steps_equal_the_whole(model: RWKV6, tokens: Tensor, width: int) -> None:
    with torch.no_grad():
        whole, end = model(tokens)
        logits, state = model(tokens[:, :5])
    places = [x.data_ptr() for one in state for x in one]
    parts = [logits, *(model.step(piece, state) for piece in tokens[:, 5:].split(width, 1))]
    assert error(torch.cat(parts, 1), whole) < 1e-5
    assert places == [x.data_ptr() for one in state for x in one], "the state is updated in place"
    assert all(error(x, y) < 1e-5 for one, other in zip(state, end) for x, y in zip(one, other))


def test_sequences_do_not_see_each_other(model: RWKV6, tokens: Tensor) -> None:
    alone = torch.cat([model(one[None])[0] for one in tokens])
    assert error(alone, model(tokens)[0]) < 1e-6


def test_the_future_changes_nothing(model: RWKV6, tokens: Tensor) -> None:
    other = tokens.clone()
    other[:, 50:] = (other[:, 50:] + 1) % SIZES.vocabulary
    assert torch.equal(model(tokens)[0][:, :50], model(other)[0][:, :50])


def test_gradients_reach_every_parameter(model: RWKV6, tokens: Tensor) -> None:
    _, state = model(tokens[:, :40])
    logits, _ = model(tokens[:, 40:], state)  # through the state as well
    model.zero_grad()
    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    model.zero_grad()


def test_gradients_are_derivatives() -> None:
    torch.manual_seed(4)
    mixer = TimeMix(8, 4, 2, 3, layer=1, layers=2).double()
    channel = ChannelMix(8, 12, layer=1, layers=2).double()
    for parameter in [*mixer.parameters(), *channel.parameters()]:
        torch.nn.init.normal_(parameter, std=0.5)
    x, p, S = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in [(1, 5, 8), (1, 8), (1, 2, 4, 4)])

    def block(x: Tensor, p: Tensor, S: Tensor) -> tuple[Tensor, ...]:
        y, state = mixer(x, State(p, p, S))
        y, state = channel(y, state)
        return y, *state

    assert torch.autograd.gradcheck(block, (x, p, S))


def test_names_and_shapes_are_the_published_ones() -> None:
    C, F, H, n, M, D, V = 24, 40, 3, 8, 5, 6, 13
    block = {f"{norm}.{part}": [C] for norm in ("ln1", "ln2") for part in ("weight", "bias")}
    block |= {f"att.time_maa_{i}": [1, 1, C] for i in "xwkvrg"}
    block |= {"att.time_maa_w1": [C, 5 * M], "att.time_maa_w2": [5, M, C], "att.time_faaaa": [H, n]}
    block |= {"att.time_decay": [1, 1, C], "att.time_decay_w1": [C, D], "att.time_decay_w2": [D, C]}
    block |= {f"att.{name}.weight": [C, C] for name in ("receptance", "key", "value", "gate", "output")}
    block |= {"att.ln_x.weight": [C], "att.ln_x.bias": [C], "ffn.time_maa_k": [1, 1, C], "ffn.time_maa_r": [1, 1, C]}
    block |= {"ffn.key.weight": [F, C], "ffn.receptance.weight": [C, C], "ffn.value.weight": [C, F]}
    wanted = {f"blocks.{i}.{name}": shape for i in range(3) for name, shape in block.items()}
    wanted |= {"emb.weight": [V, C], "head.weight": [V, C], "ln_out.weight": [C], "ln_out.bias": [C]}
    wanted |= {"blocks.0.ln0.weight": [C], "blocks.0.ln0.bias": [C]}
    assert {name: list(x.shape) for name, x in RWKV6(SIZES).state_dict().items()} == wanted


def test_a_new_block_adds_nothing(tokens: Tensor) -> None:
    model = RWKV6(SIZES)
    x = torch.randn(1, 9, SIZES.channels)
    y, _ = model.blocks[1](x, State.zeros(1, SIZES.channels, SIZES.head_size, like=x))
    assert torch.equal(x, y)
    decay = model.blocks[2].att.time_decay.flatten()
    assert decay[0] == -6
    assert decay[-1] == -1
    assert (decay.diff() > 0).all()


def test_generation_repeats_with_its_seed(model: RWKV6, tokens: Tensor) -> None:
    def generate(seed: int) -> Tensor:
        return model.generate(tokens, 20, temperature=0.9, top_p=0.95, generator=torch.Generator().manual_seed(seed))

    assert generate(0).shape == (BATCH, 20)
    assert torch.equal(generate(0), generate(0))
    assert not torch.equal(generate(0), generate(1))


def test_temperature_zero_takes_the_likeliest(model: RWKV6, tokens: Tensor) -> None:
    drawn = model.generate(tokens, 4, temperature=0)
    for _ in range(4):
        tokens = torch.cat([tokens, model(tokens)[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(drawn, tokens[:, -4:])


def test_the_nucleus_leaves_the_rest_out() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log().expand(2000, 4)
    counts = draw(logits, 1.0, 0.7, torch.Generator().manual_seed(0)).bincount(minlength=4) / 2000
    assert counts[0] == counts[2] == 0
    assert counts[1].item() == pytest.approx(2 / 3, abs=0.05)
    counts = draw(logits, 1.0, 1.0, torch.Generator().manual_seed(0)).bincount(minlength=4) / 2000
    assert torch.allclose(counts, logits[0].exp(), atol=0.05)


def test_bfloat16_keeps_its_state_in_float32(model: RWKV6, tokens: Tensor) -> None:
    half = RWKV6(SIZES).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    logits, state = half(tokens)
    assert state[0].wkv.dtype == torch.float32
    assert error(logits, model(tokens)[0]) < 0.05
    assert half.step(tokens[:, :1], state).dtype == torch.bfloat16
