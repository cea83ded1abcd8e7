"""Updates in place of mixers, as a chain: fused across the norm before them, unless a module must be called itself."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..layers import Mixer, RWKV6ChannelConfig, RWKV6Config, RWKV7Config, Sequences, cpu
from ..layers.arguments import named_tensors
from ..layers.chains import Chain, plain
from ..layers.examples import Draw, examples
from ..layers.fused import add_norm
from ..layers.sequences import adopt, drawn
from ..layers.triton import absent
from ..layers.values import RESIDUAL, Values, passed, taken


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
    values: Values
    """Of earlier mixers; those that this one yields are added."""


def _refuses_mixer(c: MixerUpdate) -> str | None:
    if c.in_float32:
        return "the residual stream is float32"
    if not isinstance(c.module, Mixer):
        why: str | None = f"is a {type(c.module).__name__}"
    else:
        why = "reads the residual stream" if RESIDUAL in c.module.takes else c.module.unstepped
    return None if why is None else f"the mixer {why}"


def _mixer(c: MixerUpdate) -> tuple[Tensor, Tensor] | None:
    assert isinstance(c.module, Mixer) and c.before is not None  # noqa: PT018
    mixer, step = c.module, cast("Any", c.module.step)
    values = {"values": taken(mixer, mixer, c.values)} if mixer.takes else {}
    found = step(c.x, c.y, c.before, c.state, c.sequences, **values)
    if found is None:
        return None
    x, y, *yielded = found
    for one in yielded:
        c.values.update(one)
    return x, y


def _mixer_as_module(c: MixerUpdate) -> tuple[Tensor, Tensor]:
    assert c.before is not None
    x, normed = add_norm(c.x, c.y, c.before, in_float32=c.in_float32, halvings=c.sequences.halvings)
    c.values[RESIDUAL] = x
    y, after = passed(c.module, Mixer, c.values, normed, c.state, c.sequences)
    adopt(c.state, after)
    return x, y


SIZE = 48
"""C of the examples."""


RWKV7 = RWKV7Config(head_size=16, decay_rank=4, rate_rank=4, value_rank=4, gate_rank=4)
MIXERS: tuple[Any, ...] = (RWKV6Config(head_size=16, mix_rank=4, decay_rank=4), RWKV6ChannelConfig(intermediate_size=72), RWKV7)


def _draw_mixer(draw: Draw, config: Any) -> MixerUpdate:
    mixer, norm = draw.module("mixer", config.build(SIZE), 0.2), draw.module("norm", nn.LayerNorm(SIZE))
    x, y = draw("x", 3, 1, SIZE), draw("y", 3, 1, SIZE)
    state = drawn_state(draw, mixer.initial_state(5, x))
    return MixerUpdate(mixer, norm, x, y, state, drawn(draw, x, slots=[4, 0, 2], in_place=True), False, {})


def drawn_state(draw: Draw, state: Any) -> Any:
    """A state like this one with drawn values, in examples."""
    wide = [len(part.shape) > 2 for part in state]
    return type(state)(*(draw(f"state {n}", *part.shape, wide=wide[n]) for n, part in enumerate(state)))


def updated(c: Any, found: tuple[Tensor, Tensor | None]) -> Any:
    """The residual stream, and the pool."""
    x, y = found
    return x if y is None else x + y, [part for _, part in named_tensors(c.state)]


def _absent(device: torch.device) -> str | None:
    """Why a device has no kernel that a mixer's ``step`` begins with, or None."""
    return cpu.absent("shifted_norm", device) if device.type == "cpu" else absent(device)


UPDATE_MIXER: Chain[MixerUpdate, tuple[Tensor, Tensor]] = Chain(
    "update_mixer",
    plain(
        "step", _mixer, _refuses_mixer,
        tuple(example for config in MIXERS for example in examples(partial(_draw_mixer, config=config), torch.float32, gradients=False)),
        _absent,
    ),
    plain("modules", _mixer_as_module),
    results=updated,
)  # fmt: skip
"""``step``: the chains of a mixer across its norm, which are Triton kernels or, on a CPU, native ones."""
