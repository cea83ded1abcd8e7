"""New models of every architecture: names and shapes of parameters, their initialisation, and configurations."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from torch import Tensor

from penstock.layers import Sequences
from penstock.models import CausalLM, Config, gla, rwkv6
from penstock.models.config import feed_forward_size

pytestmark = pytest.mark.sampled(file=True)


def test_names_and_shapes() -> None:
    config = rwkv6(vocab_size=13, hidden_size=24, num_layers=3, intermediate_size=40, head_size=8, mix_rank=5, decay_rank=6)
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
    assert {name: list(x.shape) for name, x in CausalLM(config).state_dict().items()} == wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_new_models_of_every_dtype(name: str, dtype: torch.dtype, ids: Tensor) -> None:
    """As transformers' ``from_config(config, dtype=...)`` makes them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = CausalLM(ARCHITECTURES[name])
    finally:
        torch.set_default_dtype(before)
    assert {x.dtype for x in model.parameters()} == {dtype}
    plain = dict(CausalLM(ARCHITECTURES[name]).named_parameters())
    for parameter_name, x in model.named_parameters():
        if x.numel() >= 100:  # of fewer random numbers the deviation varies
            wanted = plain[parameter_name].double().std(unbiased=False)
            assert abs(x.double().std(unbiased=False) - wanted) <= 0.3 * wanted, parameter_name
    assert model(ids).logits.isfinite().all()


def test_a_new_rwkv_layer_is_the_identity() -> None:
    model = CausalLM(rwkv6(vocab_size=13, hidden_size=24, num_layers=3, head_size=8))
    x = torch.randn(1, 9, 24)
    layer = model.layers[1]
    y, _ = layer(x, layer.initial_state(1, x), Sequences(x))
    assert torch.equal(x, y)
    decay = model.layers[2].mixer.time_decay.flatten()
    assert decay[0] == -6
    assert decay[-1] == -1
    assert (decay.diff() > 0).all()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_new_models_predict_nothing(name: str, ids: Tensor) -> None:
    """The loss of a new model is near that of a uniform distribution, and all parameters are finite."""
    torch.manual_seed(0)
    model = CausalLM(ARCHITECTURES[name])
    assert all(x.isfinite().all() for x in model.parameters())
    assert model.loss(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(torch.tensor(13.0).log().item(), abs=0.4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_without_memory_take_weights(name: str, ids: Tensor) -> None:
    """Built on the meta device, as loaders do: there are no buffers."""
    model = model_of(name)
    with torch.device("meta"):
        empty = CausalLM(ARCHITECTURES[name])
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.tie()
    assert not list(empty.buffers())
    assert torch.equal(empty(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_configs_are_plain_values(name: str) -> None:
    import json

    config = ARCHITECTURES[name]
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_feed_forward_sizes_of_published_models() -> None:
    assert feed_forward_size(2048) == 5632
    assert gla(vocab_size=5, hidden_size=2048, num_layers=1).channel.intermediate_size == 5632
    assert rwkv6(vocab_size=5, hidden_size=4096, num_layers=1).mixer.decay_rank == 128
