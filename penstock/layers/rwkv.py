"""Shared by RWKV-5, RWKV-6 and RWKV-7: channel mixes, tuned states, and the initialisation of weights.

Source: Peng et al. 2024, arXiv 2404.05892, sections 3 and 4 and appendix; the constants are from the authors' training code,
github.com/BlinkDL/RWKV-LM, ``RWKV-v5/src/model.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..errors import Complaints, RangeError
from .decode import channel_mix, shifted_norm
from .fused import activated
from .halving import halved, last_map
from .linear import Linear, linears
from .mixer import Mixer, MixerConfig
from .sequences import Sequences
from .token_shift import token_shift


class ShiftState(NamedTuple):
    """The state of a channel mix."""

    shift: Tensor
    """[N,C], the last input."""


@dataclass(frozen=True)
class RWKV6ChannelConfig(MixerConfig):
    """The sizes of an RWKV-6 channel mix."""

    kind = "rwkv6_channel"
    intermediate_size: int
    """F. In published models 3.5 * hidden_size, rounded down to a multiple of 32."""

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> RWKV6ChannelMix:
        """A new channel mix."""
        return RWKV6ChannelMix(self, hidden_size, layer, num_layers)


@dataclass(frozen=True)
class RWKV5ChannelConfig(MixerConfig):
    """The sizes of an RWKV-5 channel mix."""

    kind = "rwkv5_channel"
    intermediate_size: int
    """F. In published models 3.5 * hidden_size, rounded down to a multiple of 32, and 4 * hidden_size in small ones."""

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> RWKV5ChannelMix:
        """A new channel mix."""
        return RWKV5ChannelMix(self, hidden_size, layer, num_layers)


class ChannelMix(Mixer):
    """The base of both channel mixes."""

    halves_output = True
    complement = False
    """Whether the factors of the token shift are 1 - ``_factors()``."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(hidden_size)
        self.key = matrix(hidden_size, intermediate_size, gain=1)
        self.receptance = matrix(hidden_size, hidden_size, gain=0)
        self.value = matrix(intermediate_size, hidden_size, gain=0)

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> ShiftState:
        """Zeros."""
        return ShiftState(like.new_zeros(count, self.hidden_size))

    def mix(self, x: Tensor, state: ShiftState, sequences: Sequences) -> tuple[Tensor, ShiftState]:
        """Y and the new state."""
        last, shift = sequences.shifted(x, state.shift)
        mixed = token_shift(x, last, sequences, *self._factors(), complement=self.complement)
        return self._mixed(sequences, *mixed), ShiftState(shift)

    def step(self, x: Tensor, y: Tensor | None, norm: nn.Module, state: ShiftState, sequences: Sequences) -> tuple[Tensor, Tensor] | None:
        """See ``Mixer.step``."""
        found = shifted_norm(x, y, norm, state.shift, sequences, *self._factors(), complement=self.complement)
        return None if found is None else (found.total, self._mixed(sequences, *found.mixed))

    def _mixed(self, sequences: Sequences, x_k: Tensor, x_r: Tensor) -> Tensor:
        few, value = linears([x_k, x_r], [self.key, self.receptance], relu_squared=True), last_map(self.value, sequences)
        if few:
            found = linears([halved(few[0], sequences)], [self.value], gate=few[1])
            return found[0] if found else activated(few[1], value(few[0]), "sigmoid")
        hidden = activated(self.key(x_k), None, "relu_squared", value)
        return activated(self.receptance(x_r), hidden, "sigmoid")

    def _factors(self) -> tuple[Tensor, Tensor]:
        """The token shift factors of k and r: the weight of the previous token or, with ``complement``, of this token."""
        raise NotImplementedError


class RWKV6ChannelMix(ChannelMix):
    r"""Channel mixing of RWKV-6; its only state is the previous input p, dx = p - x.

    .. math:: y = \sigma(W_r (x + dx \cdot maa_r)) \cdot W_v \, relu(W_k (x + dx \cdot maa_k))^2
    """

    def __init__(self, config: RWKV6ChannelConfig, hidden_size: int, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(hidden_size, config.intermediate_size)
        self.config = config
        self.time_maa_k = nn.Parameter(1 - ramp(hidden_size, 1 - layer / num_layers))
        self.time_maa_r = nn.Parameter(1 - ramp(hidden_size, 1 - layer / num_layers))

    def step(self, x: Tensor, y: Tensor | None, norm: nn.Module, state: ShiftState, sequences: Sequences) -> tuple[Tensor, Tensor] | None:
        """See ``Mixer.step``."""
        found = channel_mix(x, y, norm, state.shift, sequences, self._factors(), [self.key, self.receptance, self.value])
        return found or super().step(x, y, norm, state, sequences)

    def _factors(self) -> tuple[Tensor, Tensor]:
        return self.time_maa_k, self.time_maa_r


class RWKV5ChannelMix(ChannelMix):
    r"""Channel mixing of RWKV-5; its only state is the previous input p.

    .. math:: y = \sigma(W_r (x m_r + p (1 - m_r))) \cdot W_v \, relu(W_k (x m_k + p (1 - m_k)))^2

    m is ``time_mix``.
    """

    complement = True

    def __init__(self, config: RWKV5ChannelConfig, hidden_size: int, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(hidden_size, config.intermediate_size)
        self.config = config
        self.time_mix_k = nn.Parameter(ramp(hidden_size, 1 - layer / num_layers))
        self.time_mix_r = nn.Parameter(ramp(hidden_size, 1 - layer / num_layers))

    def _factors(self) -> tuple[Tensor, Tensor]:
        return self.time_mix_k, self.time_mix_r


class TunedMixer(Mixer):
    """Base of time mixes whose sequences may begin with a trained state ``time_state`` [H,K,V], as ``config.tuned_state`` says."""

    config: Any
    time_state: Tensor

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> Any:
        """Zeros, or ``time_state``."""
        if not (self.config.tuned_state and count):
            return self._blank_state(count, like)
        tuned: Any = self.time_state.detach()
        tuned = tuned.full_tensor() if hasattr(tuned, "full_tensor") else tuned  # sharded
        state = self._blank_state(count, like)
        return state._replace(wkv=tuned.to(state.wkv).repeat(count, 1, 1, 1))

    def empty_state(self, count: int, like: Tensor) -> Any:
        """The same, with gradients of ``time_state``."""
        state = self._blank_state(count, like)
        return state._replace(wkv=self.time_state.to(state.wkv).repeat(count, 1, 1, 1)) if self.config.tuned_state else state

    def _blank_state(self, count: int, like: Tensor) -> Any:
        """Zeros."""
        raise NotImplementedError


class Heads(Protocol):
    """The sizes of heads."""

    @property
    def head_size(self) -> int: ...  # noqa: D102
    @property
    def num_heads(self) -> int | None: ...  # noqa: D102


def head_count(config: Heads, hidden_size: int) -> int:
    """The number of heads of a hidden size that ``check_head_size`` takes."""
    return hidden_size // config.head_size if config.num_heads is None else config.num_heads


def check_head_size(complaints: Complaints, config: Heads, hidden_size: int) -> None:
    """Check that the number of heads is whole, if it follows from the hidden size."""
    if config.num_heads is None and hidden_size % config.head_size:
        rule = f"a multiple of head_size = {config.head_size}"
        complaints.add(RangeError, "hidden_size", rule, hidden_size, "Or pass num_heads.")


def ramp(size: int, power: float, last: int = 0) -> Tensor:
    """(c / C) ** power for c from 0 to C - 1: [1,1,C]; with ``last`` = 1, (c / (C - 1)) ** power, which ends at 1."""
    return (torch.arange(size) / max(size - last, 1)).pow(power).view(1, 1, size)


def matrix(inputs: int, outputs: int, gain: float) -> Linear:
    """A linear map without bias: orthogonal times gain, or 0 for gain = 0, so that a new block is the identity."""
    made = Linear(inputs, outputs, bias=False)
    if gain == 0:
        nn.init.zeros_(made.weight)
    else:
        orthogonal(made.weight, gain)
    return made


@torch.no_grad()
def orthogonal(weight: Tensor, gain: float) -> None:
    """``nn.init.orthogonal_``, which torch has in float32 and float64 only, for every dtype."""
    if weight.dtype in (torch.float32, torch.float64):
        nn.init.orthogonal_(weight, gain)
    else:
        weight.copy_(nn.init.orthogonal_(torch.empty_like(weight, dtype=torch.float32), gain))
