"""The time mix of an RWKV-6 ("Finch", x060) block, with the parameter names of its published checkpoints.

>>> mixer = RWKV6Config(head_size=8, mix_rank=4, decay_rank=4).build(hidden_size=16)
>>> x = torch.randn(1, 6, 16)
>>> whole, _ = mixer(x)
>>> first, state = mixer(x[:, :2])
>>> second, state = mixer(x[:, 2:], state)
>>> torch.allclose(torch.cat([first, second], 1), whole, atol=1e-6)
True

Source: Peng et al. 2024, arXiv 2404.05892, section 4 and appendix (initialisation); the constants are from the authors' training
code, github.com/BlinkDL/RWKV-LM, ``RWKV-v5/src/model.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import Complaints
from ..tokens.dtypes import state_dtype
from .decays import low_rank_decay
from .decode import low_rank_maps, rwkv_step, shifted_norm
from .halving import last_map
from .linear import linear, linears
from .mixer import MixerConfig
from .norm_gate import norm_gate
from .rwkv import TunedMixer, check_head_size, head_count, matrix, ramp
from .sequences import Sequences
from .token_shift import TokensBefore, token_shift


@dataclass(frozen=True)
class RWKV6Config(MixerConfig):
    """The sizes of an RWKV-6 time mix."""

    kind = "rwkv6"
    head_size: int = 64
    """V, channels of a head of values."""
    key_size: int | None = None
    """K, channels of a head of keys. Default: head_size, as in all published models of the authors."""
    num_heads: int | None = None
    """H. Default: hidden_size / head_size."""
    mix_rank: int = 32
    """M, the rank of the five offsets; 64 in published models of hidden_size >= 4096."""
    decay_rank: int = 64
    """D, the rank of the decay; 128 in published models of hidden_size >= 4096."""
    norm_eps: float = 64e-5
    """The epsilon of ``ln_x``. The authors normalise x / 8 with 1e-5."""
    tuned_state: bool = False
    """Whether sequences begin with a trained state, ``time_state`` [H,K,V], in place of zeros."""

    def check_hidden_size(self, complaints: Complaints, hidden_size: int) -> None:
        """Check that it is a multiple of the size of heads, unless their number is given."""
        check_head_size(complaints, self, hidden_size)

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> RWKV6TimeMix:
        """A new time mix."""
        return RWKV6TimeMix(self, hidden_size, layer, num_layers)


class RWKV6State(NamedTuple):
    """The state of a time mix."""

    shift: Tensor
    """[N,C], the last input."""
    wkv: Tensor
    """[N,H,K,V], the state of the recurrence, float32 (float64 for float64 models)."""


class RWKV6TimeMix(TunedMixer):
    r"""Time mixing by the RWKV-6 recurrence.

    p is the input of the previous token, dx = p - x. With five low-rank offsets
    :math:`\delta_i = \tanh((x + dx \cdot maa_x) W_1)_i W_{2,i}`, i in w, k, v, r, g in this order:

    .. math::
        x_i = x + dx (maa_i + \delta_i), \qquad r, k, v = W_r x_r, W_k x_k, W_v x_v, \qquad g = silu(W_g x_g)

        w = -\exp(time\_decay + \tanh(x_w D_1) D_2), \qquad y = W_o (GroupNorm_H(rwkv6(r, k, v, w, u)) \cdot g)

    w is a log decay (natural logarithm), computed in float32 for float16 and bfloat16 models; u is ``time_faaaa``.
    """

    halves_output = True

    def __init__(self, config: RWKV6Config, hidden_size: int, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(hidden_size)
        config.require_hidden_size(hidden_size)
        self.config = config
        C, H, V = hidden_size, head_count(config, hidden_size), config.head_size
        K = config.key_size or V
        deep = layer / max(num_layers - 1, 1)  # 0 in the first block, 1 in the last
        shallow = 1 - layer / num_layers  # 1 in the first block, nearly 0 in the last
        self.time_maa_x = nn.Parameter(1 - ramp(C, shallow))
        self.time_maa_w = nn.Parameter(1 - ramp(C, shallow))
        self.time_maa_k = nn.Parameter(1 - ramp(C, shallow))
        self.time_maa_v = nn.Parameter(1 - ramp(C, shallow) - 0.3 * deep)
        self.time_maa_r = nn.Parameter(1 - ramp(C, shallow / 2))
        self.time_maa_g = nn.Parameter(1 - ramp(C, shallow / 2))
        self.time_maa_w1 = nn.Parameter(torch.zeros(C, 5 * config.mix_rank))
        self.time_maa_w2 = nn.Parameter(torch.empty(5, config.mix_rank, C).uniform_(-0.01, 0.01))

        self.time_decay = nn.Parameter(-6 + 5 * ramp(H * K, 0.7 + 1.3 * deep, last=1))
        self.time_decay_w1 = nn.Parameter(torch.zeros(C, config.decay_rank))
        self.time_decay_w2 = nn.Parameter(torch.empty(config.decay_rank, H * K).uniform_(-0.01, 0.01))
        zigzag = 0.1 * (torch.arange(1, H * K + 1) % 3 - 1)
        self.time_faaaa = nn.Parameter((deep * (1 - ramp(H * K, 1, last=1)) + zigzag).view(H, K))

        self.receptance = matrix(C, H * K, gain=1)
        self.key = matrix(C, H * K, gain=0.1)
        self.value = matrix(C, H * V, gain=1)
        self.gate = matrix(C, H * V, gain=0.1)
        self.output = matrix(H * V, C, gain=0)
        self.ln_x = nn.GroupNorm(H, H * V, eps=config.norm_eps)
        nn.init.constant_(self.ln_x.weight, ((1 + layer) / num_layers) ** 0.7)
        if config.tuned_state:
            self.time_state = nn.Parameter(torch.zeros(H, K, V))

    def _blank_state(self, count: int, like: Tensor) -> RWKV6State:
        (H, K), dtype = self.time_faaaa.shape, state_dtype(like.dtype)
        shift = like.new_zeros(count, self.time_maa_x.shape[-1])
        return RWKV6State(shift, like.new_zeros(count, H, K, self.config.head_size, dtype=dtype))

    def mix(self, x: Tensor, state: RWKV6State, sequences: Sequences) -> tuple[Tensor, RWKV6State]:
        """Y and the new state."""
        last, shift = sequences.shifted(x, state.shift)
        mixed, x = token_shift(x, last, sequences, self.time_maa_x, kept=True)
        y, wkv = self._mixed(x, last, mixed, state.wkv, sequences)
        return y, RWKV6State(shift, wkv)

    def step(self, x: Tensor, y: Tensor | None, norm: nn.Module, state: RWKV6State, sequences: Sequences) -> tuple[Tensor, Tensor] | None:
        """See ``Mixer.step``."""
        low_rank = self.time_maa_x, self.time_maa_w1, self._factors(), self.time_maa_w2
        begun = low_rank_maps(x, y, norm, state.shift, sequences, *low_rank, self.time_decay_w1, self._maps())
        if begun is not None:
            total, parts, lasts = begun
            return total, self._recurred(parts, state.wkv, sequences, lasts)[0]
        found = shifted_norm(x, y, norm, state.shift, sequences, self.time_maa_x, kept=True)
        if found is None:
            return None
        return found.total, self._mixed(found.normed, TokensBefore(found.before), found.mixed[0], state.wkv, sequences)[0]

    def _mixed(self, x: Tensor, last: Any, mixed: Tensor, wkv: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Y and the new state of the recurrence; ``mixed`` is x + dx maa_x."""
        return self._recurred(self._project(x, last, mixed, sequences), wkv, sequences)

    def _recurred(self, parts: list[Tensor], wkv: Tensor, sequences: Sequences, lasts: Any = None) -> tuple[Tensor, Tensor]:
        """Y and the new state, from the results of ``_project``. ``lasts``: a row of the shift state that it replaces."""
        (low, k, v, r, gate), H, up, bias = parts, self.time_faaaa.shape[0], self.time_decay_w2, self.time_decay
        output_map = last_map(self.output, sequences)
        stepped = rwkv_step(r, k, v, gate, self.time_faaaa, bias, self.ln_x, wkv, sequences, (low, up), lasts)
        if stepped is not None:
            return output_map(stepped), wkv
        if lasts is not None:
            lasts.write()
        r, k, v, w = (x.unflatten(-1, (H, -1)) for x in (r, k, v, low_rank_decay(low, up, bias)))
        output, wkv = sequences.recur("rwkv6", r, k, v, w, self.time_faaaa, state=wkv)
        return norm_gate(output, gate, self.ln_x, output_map, grouped=True), wkv

    def _project(self, x: Tensor, last: Any, mixed: Tensor, sequences: Sequences) -> list[Tensor]:
        """The decay's low-rank part x_w D_1 [B,T,D], k [B,T,H*K], v [B,T,H*V], r [B,T,H*K] and gate before silu [B,T,H*V]."""
        hidden = linear(mixed, self.time_maa_w1.T).unflatten(-1, self.time_maa_w2.shape[:2])  # [B,T,5,M]
        shifted = token_shift(x, last, sequences, *self._factors(), low_rank=(hidden, self.time_maa_w2))
        down, maps = self.time_decay_w1.T, self._maps()
        few = linears(shifted, [down, *maps])
        return few or [linear(shifted[0], down), *(one(x) for one, x in zip(maps, shifted[1:]))]

    def _factors(self) -> Sequence[Tensor]:
        """The factors of the token shifts of w, k, v, r and g."""
        return self.time_maa_w, self.time_maa_k, self.time_maa_v, self.time_maa_r, self.time_maa_g

    def _maps(self) -> Sequence[nn.Module]:
        """The linear maps of k, v, r and g."""
        return self.key, self.value, self.receptance, self.gate
