"""Updates in place of layers and of their mixers, as chains: fused across modules, unless a module must be called itself."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers import Mixer, RWKV6ChannelConfig, RWKV6Config, Sequences
from ..layers.as_written import overridden
from ..layers.chains import Chain, plain
from ..layers.examples import Draw, examples
from ..layers.fused import add_norm
from ..layers.sequences import adopt

Pair = tuple[Tensor, Tensor | None]
"""The residual stream, and the output of the previous mixer, which is not added yet."""


class LayerUpdate(NamedTuple):
    """The arguments of an update of a layer."""

    module: Any
    x: Tensor
    y: Tensor | None
    state: Any
    sequences: Sequences


def _refuses_layer(c: LayerUpdate) -> str | None:
    from .backbone import Layer  # it runs these chains

    why = overridden(c.module, Layer) if type(c.module) is Layer else f"is a {type(c.module).__name__}"
    return None if why is None else f"the layer {why}"


def _layer(c: LayerUpdate) -> Pair:
    found: Pair = c.module.advance(c.x, c.y, c.state, c.sequences)
    return found


def _layer_as_module(c: LayerUpdate) -> Pair:
    x, after = c.module(c.x if c.y is None else c.x + c.y, c.state, c.sequences)
    adopt(c.state, after)
    return x, None


class MixerUpdate(NamedTuple):
    """The arguments of an update of a mixer, with the sum and the norm before it."""

    module: nn.Module
    before: nn.Module | None
    """The norm."""
    x: Tensor
    y: Tensor | None
    state: Any
    sequences: Sequences
    in_float32: bool
    """Whether the residual stream is float32."""


def _refuses_mixer(c: MixerUpdate) -> str | None:
    if c.in_float32:
        return "the residual stream is float32"
    why = c.module.unstepped if isinstance(c.module, Mixer) else f"is a {type(c.module).__name__}"
    return None if why is None else f"the mixer {why}"


def _mixer(c: MixerUpdate) -> tuple[Tensor, Tensor]:
    assert isinstance(c.module, Mixer) and c.before is not None  # noqa: PT018
    return c.module.step(c.x, c.y, c.before, c.state, c.sequences) or _mixer_as_module(c)


def _mixer_as_module(c: MixerUpdate) -> tuple[Tensor, Tensor]:
    assert c.before is not None
    x, normed = add_norm(c.x, c.y, c.before, in_float32=c.in_float32, halvings=c.sequences.halvings)
    y, after = c.module(normed, c.state, c.sequences)
    adopt(c.state, after)
    return x, y


SIZE = 48
"""C of the examples."""


def _draw_mixer(draw: Draw, channel: bool = False) -> MixerUpdate:
    config: Any = RWKV6ChannelConfig(intermediate_size=72) if channel else RWKV6Config(head_size=16, mix_rank=4, decay_rank=4)
    mixer, norm = draw.module("mixer", config.build(SIZE), 0.2), draw.module("norm", nn.LayerNorm(SIZE))
    x, y = draw("x", 3, 1, SIZE), draw("y", 3, 1, SIZE)
    state = _drawn(draw, mixer.initial_state(5, x))
    return MixerUpdate(mixer, norm, x, y, state, draw.sequences(x, slots=[4, 0, 2], in_place=True), False)


def _draw_layer(draw: Draw) -> LayerUpdate:
    from .backbone import Layer
    from .config import rwkv6

    config = rwkv6(vocab_size=8, hidden_size=SIZE, num_layers=1, intermediate_size=72, head_size=16, mix_rank=4, decay_rank=4)
    layer, x, y = draw.module("layer", Layer(config, 0), 0.2), draw("x", 3, 1, SIZE), draw("y", 3, 1, SIZE)
    state = layer.initial_state(5, x)
    drawn = type(state)(*(_drawn(draw, part) for part in state))
    return LayerUpdate(layer, x, y, drawn, draw.sequences(x, slots=[4, 0, 2], in_place=True))


def _drawn(draw: Draw, state: Any) -> Any:
    wide = [len(part.shape) > 2 for part in state]
    return type(state)(*(draw(f"state {n}", *part.shape, wide=wide[n]) for n, part in enumerate(state)))


def _updated(c: Any, found: Pair) -> Any:
    """The residual stream, and the pool."""
    x, y = found
    return x if y is None else x + y, _parts(c.state)


def _parts(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else [x for part in state for x in _parts(part)]


UPDATE_MIXER: Chain[MixerUpdate, tuple[Tensor, Tensor]] = Chain(
    "update_mixer",
    plain(
        "step", _mixer, _refuses_mixer,
        (
            *examples(_draw_mixer, torch.float32, gradients=False),
            *examples(partial(_draw_mixer, channel=True), torch.float32, gradients=False),
        ),
    ),
    plain("modules", _mixer_as_module),
    results=_updated,
)  # fmt: skip
"""``step``: the chains of a mixer across its norm; where these run no kernel, the modules."""

UPDATE_LAYER: Chain[LayerUpdate, Pair] = Chain(
    "update_layer",
    plain("parts", _layer, _refuses_layer, examples(_draw_layer, torch.float32, gradients=False)),
    plain("module", _layer_as_module),
    results=_updated,
)
"""``parts``: the chains of its mixers."""
