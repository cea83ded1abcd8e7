"""The RWKV-6 model against its formulas, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from formulas import error, literal_logits
from torch import Tensor

from penstock.layers import Sequences
from penstock.models import CausalLM, rwkv6
from penstock.models.arguments import named_tensors
from penstock.models.sampling import sample

SIZES = rwkv6(vocab_size=13, num_layers=3, hidden_size=24, intermediate_size=40, head_size=8, mix_rank=5, decay_rank=6)
BATCH, LENGTH = 2, 70


def flat(state: object, clone: bool = False) -> list[Tensor]:
    return [x.clone() if clone else x for _, x in named_tensors(state)]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """All parameters differ from their initial values: zeros and ones would hide errors."""
    torch.manual_seed(1)
    model = CausalLM(SIZES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 1 / math.sqrt(parameter.shape[-1]) if parameter.dim() == 2 else 0.3
            parameter.add_(torch.randn_like(parameter) * (size if name != "embeddings.weight" else 1.0))
    return model


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(SIZES.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_model_equals_its_formulas(model: CausalLM, tokens: Tensor, dtype: torch.dtype, bound: float) -> None:
    weights = {name: x.double() for name, x in model.state_dict().items()}
    copy = CausalLM(SIZES).to(dtype)
    copy.load_state_dict(model.state_dict())
    true = torch.stack([literal_logits(weights, sequence) for sequence in tokens])
    assert true.std() > 0.3
    assert error(copy(tokens)[0], true) < bound


@pytest.mark.parametrize("cuts", [[0], [1], [LENGTH - 1], [LENGTH], [7, 8, 40], [33, 33]])
def test_cut_sequences_equal_one_call(model: CausalLM, tokens: Tensor, cuts: list[int]) -> None:
    whole, end = model(tokens)
    parts, state = [], None
    for piece in torch.tensor_split(tokens, cuts, dim=1):
        before = state and flat(state, clone=True)
        logits, after = model(piece, state)
        if state is not None:  # the input state is not changed
            assert all(torch.equal(x, y) for x, y in zip(flat(state), before))
        parts.append(logits)
        state = after
    assert error(torch.cat(parts, 1), whole) < 1e-5
    assert all(error(x, y) < 1e-5 for x, y in zip(flat(state), flat(end)))


@pytest.mark.parametrize("width", [1, 7, 16])
def test_steps_equal_one_call(model: CausalLM, tokens: Tensor, width: int) -> None:
    with torch.no_grad():
        whole, end = model(tokens)
        logits, state = model(tokens[:, :5])
    places = [x.data_ptr() for x in flat(state)]
    parts = [logits, *(model.advance(piece, state) for piece in tokens[:, 5:].split(width, 1))]
    assert error(torch.cat(parts, 1), whole) < 1e-5
    assert places == [x.data_ptr() for x in flat(state)], "the state is updated in place"
    assert all(error(x, y) < 1e-5 for x, y in zip(flat(state), flat(end)))


def test_sequences_are_independent(model: CausalLM, tokens: Tensor) -> None:
    alone = torch.cat([model(one[None])[0] for one in tokens])
    assert error(alone, model(tokens)[0]) < 1e-6


def test_causality(model: CausalLM, tokens: Tensor) -> None:
    other = tokens.clone()
    other[:, 50:] = (other[:, 50:] + 1) % SIZES.vocab_size
    assert torch.equal(model(tokens)[0][:, :50], model(other)[0][:, :50])


def test_gradients_reach_every_parameter(model: CausalLM, tokens: Tensor) -> None:
    _, state = model(tokens[:, :40])
    logits, _ = model(tokens[:, 40:], state)  # also through the state
    model.zero_grad()
    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    model.zero_grad()


def test_names_and_shapes() -> None:
    C, F, H, n, M, D, V = 24, 40, 3, 8, 5, 6, 13
    layer = {f"{norm}.{part}": [C] for norm in ("mixer_norm", "channel_norm") for part in ("weight", "bias")}
    layer |= {f"mixer.time_maa_{i}": [1, 1, C] for i in "xwkvrg"}
    layer |= {"mixer.time_maa_w1": [C, 5 * M], "mixer.time_maa_w2": [5, M, C], "mixer.time_faaaa": [H, n]}
    layer |= {"mixer.time_decay": [1, 1, C], "mixer.time_decay_w1": [C, D], "mixer.time_decay_w2": [D, C]}
    layer |= {f"mixer.{name}.weight": [C, C] for name in ("receptance", "key", "value", "gate", "output")}
    layer |= {"mixer.ln_x.weight": [C], "mixer.ln_x.bias": [C], "channel.time_maa_k": [1, 1, C], "channel.time_maa_r": [1, 1, C]}
    layer |= {"channel.key.weight": [F, C], "channel.receptance.weight": [C, C], "channel.value.weight": [C, F]}
    wanted = {f"layers.{i}.{name}": shape for i in range(3) for name, shape in layer.items()}
    wanted |= {"embeddings.weight": [V, C], "head.weight": [V, C], "norm.weight": [C], "norm.bias": [C]}
    wanted |= {"embedding_norm.weight": [C], "embedding_norm.bias": [C]}
    assert {name: list(x.shape) for name, x in CausalLM(SIZES).state_dict().items()} == wanted


def test_a_new_layer_is_the_identity(tokens: Tensor) -> None:
    model = CausalLM(SIZES)
    x = torch.randn(1, 9, SIZES.hidden_size)
    layer = model.layers[1]
    y, _ = layer(x, layer.initial_state(1, x), Sequences(x))
    assert torch.equal(x, y)
    decay = model.layers[2].mixer.time_decay.flatten()
    assert decay[0] == -6
    assert decay[-1] == -1
    assert (decay.diff() > 0).all()


def test_generation_follows_from_the_seed(model: CausalLM, tokens: Tensor) -> None:
    def generate(seed: int) -> Tensor:
        return model.generate(tokens, 20, temperature=0.9, top_p=0.95, generator=torch.Generator().manual_seed(seed))

    assert generate(0).shape == (BATCH, 20)
    assert torch.equal(generate(0), generate(0))
    assert not torch.equal(generate(0), generate(1))


def test_temperature_zero_takes_the_most_likely_token(model: CausalLM, tokens: Tensor) -> None:
    drawn = model.generate(tokens, 4, temperature=0)
    for _ in range(4):
        tokens = torch.cat([tokens, model(tokens)[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(drawn, tokens[:, -4:])


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-46, 5e-324])
def test_very_low_temperatures_take_the_most_likely_token(model: CausalLM, tokens: Tensor, temperature: float) -> None:
    assert torch.equal(model.generate(tokens, 4, temperature=temperature), model.generate(tokens, 4, temperature=0))
    assert torch.equal(sample(torch.tensor([[-3e38, 3e38, -math.inf]]), temperature, 1.0), torch.tensor([1]))


@pytest.mark.parametrize("temperature", [1e30, 1e300, 1.7e308])
def test_very_high_temperatures_draw_uniformly(temperature: float) -> None:
    logits = torch.tensor([[-9.0, 0.0, 5.0, -math.inf]]).expand(3000, 4)
    counts = sample(logits, temperature, 1.0, torch.Generator().manual_seed(0)).bincount(minlength=4) / 3000
    assert torch.allclose(counts, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]), atol=0.05)


def test_a_tiny_top_p_takes_the_most_likely_token() -> None:
    assert sample(torch.tensor([[0.0, 3.0, 1.0]]), 1.0, 5e-324).item() == 1


def test_top_p_drops_unlikely_tokens() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log().expand(2000, 4)
    counts = sample(logits, 1.0, 0.7, torch.Generator().manual_seed(0)).bincount(minlength=4) / 2000
    assert counts[0] == counts[2] == 0
    assert counts[1].item() == pytest.approx(2 / 3, abs=0.05)
    counts = sample(logits, 1.0, 1.0, torch.Generator().manual_seed(0)).bincount(minlength=4) / 2000
    assert torch.allclose(counts, logits[0].exp(), atol=0.05)


def test_states_of_bfloat16_models_are_float32(model: CausalLM, tokens: Tensor) -> None:
    half = CausalLM(SIZES).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    logits, state = half(tokens)
    assert state[0].mixer.wkv.dtype == torch.float32
    assert error(logits, model(tokens)[0]) < 0.05
    assert half.advance(tokens[:, :1], state).dtype == torch.bfloat16
