"""Values that mixers pass to those of later layers: calls of mixers, of layers and of models; what is refused."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from differences import slope
from torch import Tensor, nn

import penstock as ps
from penstock.layers import LinearAttentionConfig, Mixer, MixerConfig, RWKV7Config, Sequences, SoftmaxAttentionConfig, Stateless, register
from penstock.models import CausalLM, Config, hybrid

IDS = torch.randint(13, (2, 7), generator=torch.Generator().manual_seed(1))


@register
@dataclass(frozen=True)
class GainConfig(MixerConfig):
    """A channel mixer: x times the gain of each token, which the layers before it computed."""

    kind = "gain_of_tokens"
    source: bool = False

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> "Gain":
        return Gain(self, hidden_size)


class Gain(Mixer):
    def __init__(self, config: GainConfig, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.config = config
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)
        if config.source:
            self.yields = {"gain": 1}
        else:
            self.takes = {"gain": 1}

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> Stateless:
        return Stateless()

    def mix(self, x: Tensor, state: Stateless, sequences: Sequences, values: Any = None) -> tuple[Any, ...]:
        if values is None:
            return self.output(x), state, {"gain": x.mean(-1, keepdim=True)}
        return self.output(x * values["gain"]), state


def test_own_mixers_pass_values_within_a_layer_and_to_later_ones() -> None:
    torch.manual_seed(0)
    source, sink, attention = GainConfig(source=True), GainConfig(), LinearAttentionConfig(2)
    model = CausalLM(Config(13, 16, 2, (source, attention), (sink, sink))).double()
    assert [(layer.takes, layer.yields) for layer in model.layers] == [({}, {"gain": 1}), ({"gain": 1}, {})]
    logits = model(IDS).logits
    x = model.embeddings(IDS)
    gain = (normed := model.layers[0].mixer_norm(x)).mean(-1, keepdim=True)
    x = x + normed @ model.layers[0].mixer.output.weight.T
    x = x + (model.layers[0].channel_norm(x) * gain) @ model.layers[0].channel.output.weight.T
    x = x + model.layers[1].mixer(model.layers[1].mixer_norm(x))[0]
    x = x + (model.layers[1].channel_norm(x) * gain) @ model.layers[1].channel.output.weight.T
    assert torch.allclose(model.head(model.norm(x)), logits)
    pool = model.initial_state(3)
    steps = [model.advance(IDS[:, t : t + 1], pool, slots=torch.tensor([2, 0])) for t in range(IDS.shape[1])]
    assert torch.allclose(torch.cat(steps, 1), logits)


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_gradients_pass_from_later_layers_to_the_first(checkpointing: Any) -> None:
    """By finite differences of a weight that only the values of layer 0 depend on."""
    model = model_of("rwkv7", torch.float64)
    model.gradient_checkpointing = checkpointing
    nn.init.zeros_(model.layers[0].mixer.output.weight)  # y of layer 0 is 0, its values are not
    weight = model.layers[0].mixer.value.weight
    (gradient,) = torch.autograd.grad(model.loss(IDS[:, :-1], IDS[:, 1:]), weight)
    direction = torch.zeros_like(weight)
    direction[3, 5] = 1
    expected = slope(lambda: model.loss(IDS[:, :-1], IDS[:, 1:]), weight, direction)
    assert torch.allclose(gradient[3, 5], expected, rtol=1e-6)
    assert gradient[3, 5].abs() > 1e-8


def test_direct_calls_take_and_return_values() -> None:
    config, x = RWKV7Config(head_size=8), torch.randn(2, 5, 16)
    first, second = (config.build(16, layer, 2) for layer in range(2))
    y, _, values = first(x)
    assert {name: one.shape for name, one in values.items()} == {"value": (2, 5, 16)}
    advanced, same = first.advance(x, first.initial_state(2, x))
    assert torch.allclose(advanced, y, atol=1e-6)
    assert torch.allclose(same["value"], values["value"], atol=1e-6)
    assert len(second(x, values=values)) == 2
    for mixer, given, message in (
        (first, values, "RWKV7TimeMix.forward: values must be None: this mixer takes none, got value"),
        (second, None, "values must be a dict of value, got None"),
        (second, {}, "values must be a dict of value, got an empty dict"),
        (second, {"value": 3}, r"values\['value'\] must be a torch.Tensor, got 3 of type int"),
        (second, {"value": x[:, :4]}, r"values\['value'\] must be of shape \[B,T,A\] = \[2, 5, 16\], got \[2, 4, 16\]"),
        (second, {"value": x[..., :8]}, r"values\['value'\] must be of shape .*, got \[2, 5, 8\]"),
    ):
        with pytest.raises(ps.InvalidArgument, match=message):
            mixer(x, values=given)


def test_models_in_which_no_layer_yields_what_others_take() -> None:
    config = ARCHITECTURES["rwkv7"]
    rule = r"Config: mixer must be such that an earlier layer yields 'value' of 24 channels to layer 1, rwkv7, got {}\. Make layer 0 rwkv7"
    with pytest.raises(ps.RangeError, match=rule.format("none")):
        CausalLM(hybrid(config, SoftmaxAttentionConfig(2), [0]))
    others = replace(config.mixer, num_heads=2), config.mixer
    with pytest.raises(ps.RangeError, match=rule.format("16 channels")):
        CausalLM(replace(config, mixer=others))
    CausalLM(hybrid(config, SoftmaxAttentionConfig(2), [1]))(IDS)


def test_hooks_and_wrappers_must_keep_values() -> None:
    class Skipped(nn.Module):
        def forward(self, x: Tensor, state: Any, sequences: Any) -> Any:
            return x, state

    for place in ("layers.0", "layers.0.mixer"):
        model = model_of("rwkv7")
        handle = model.get_submodule(place).register_forward_hook(lambda module, given, output: output[:2])
        for call in (lambda: model(IDS), lambda: model.advance(IDS, model.initial_state(2))):  # noqa: B023
            with pytest.raises(ps.RangeError, match=r"results must be such that .* has value, got none"):
                call()
        handle.remove()
    model.layers[0] = Skipped()
    with pytest.raises(ps.RangeError, match="values of earlier layers must be such that Layer has value, got none"):
        model(IDS)


def test_layers_and_mixers_that_take_values_are_explained() -> None:
    model = model_of("rwkv7")
    for module in (model.layers[0], model.layers[1], model.layers[0].mixer, model.layers[1].mixer):
        for mode in ("training", "prompt", "decode"):
            assert any("rwkv7" in str(one) for one in ps.explain(module, tokens=3, mode=mode).choices)
