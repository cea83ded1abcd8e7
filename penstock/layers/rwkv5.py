"""The time mix of an RWKV-5 ("Eagle") block, versions 5.0, 5.1 and 5.2, with the parameter names of its published checkpoints.

Source: Peng et al. 2024, arXiv 2404.05892, section 3 and appendix (initialisation); the constants are from the authors' training
code, github.com/BlinkDL/RWKV-LM, ``RWKV-v5/src/model.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import Complaints, RangeError
from ..tokens.decays import LARGEST
from ..tokens.dtypes import state_dtype
from .decode import rwkv_step, shifted_norm
from .halving import last_map
from .linear import linears
from .mixer import Mixer, MixerConfig
from .norm_gate import norm_gate, norm_of_heads
from .rwkv import check_head_size, head_count, matrix, ramp
from .sequences import Sequences
from .token_shift import token_shift


@dataclass(frozen=True)
class RWKV5Config(MixerConfig):
    """The sizes of an RWKV-5 time mix."""

    kind = "rwkv5"
    head_size: int = 64
    """K = V, channels of a head."""
    num_heads: int | None = None
    """H. Default: hidden_size / head_size."""
    version: Literal["5.0", "5.1", "5.2"] = "5.2"
    """5.0 has no gate, and one decay and bonus a head; 5.1 has a gate; 5.2 also has a decay and bonus for each channel."""
    norm_eps: float = 64e-5
    """The epsilon of ``ln_x``. The authors normalise x / 8 with 1e-5."""

    def check(self, complaints: Complaints) -> None:
        """Check the version."""
        if self.version not in ("5.0", "5.1", "5.2"):
            complaints.add(RangeError, "version", "'5.0', '5.1' or '5.2'", repr(self.version))

    def check_hidden_size(self, complaints: Complaints, hidden_size: int) -> None:
        """Check that it is a multiple of the size of heads, unless their number is given."""
        check_head_size(complaints, self, hidden_size)

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> RWKV5TimeMix:
        """A new time mix."""
        return RWKV5TimeMix(self, hidden_size, layer, num_layers)


class RWKV5State(NamedTuple):
    """The state of a time mix."""

    shift: Tensor
    """[N,C], the last input."""
    wkv: Tensor
    """[N,H,K,V], the state of the recurrence, float32 (float64 for float64 models)."""


class RWKV5TimeMix(Mixer):
    r"""Time mixing by the RWKV-5 recurrence; p is the input of the previous token.

    .. math::
        x_i = x m_i + p (1 - m_i), \qquad r, k, v = W_r x_r, W_k x_k, W_v x_v, \qquad g = silu(W_g x_g)

        w = -\exp(time\_decay), \qquad y = W_o (GroupNorm_H(rwkv5(r, k, v, w, u)) \cdot g)

    m is ``time_mix``, u is ``time_faaaa``. Old checkpoints of 5.0 and 5.1 store ``time_first`` = log(u). ``time_decay`` and ``time_faaaa``
    are [H,K] in 5.2 and [H,1] before. 5.0 has no g.

    >>> y, state = RWKV5Config(head_size=8).build(hidden_size=16)(torch.randn(1, 5, 16))
    >>> y.shape, state.wkv.shape
    (torch.Size([1, 5, 16]), torch.Size([1, 2, 8, 8]))
    """

    halves_output = True

    def __init__(self, config: RWKV5Config, hidden_size: int, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(hidden_size)
        config.require_hidden_size(hidden_size)
        self.config = config
        C, n = hidden_size, config.head_size
        H = head_count(config, hidden_size)
        deep = layer / max(num_layers - 1, 1)  # 0 in the first block, 1 in the last
        shallow = 1 - layer / num_layers  # 1 in the first block, nearly 0 in the last
        self.time_mix_k = nn.Parameter(ramp(C, shallow))
        self.time_mix_v = nn.Parameter(ramp(C, shallow) + 0.3 * deep)
        self.time_mix_r = nn.Parameter(ramp(C, shallow / 2))
        per_head = 1 if config.version != "5.2" else n  # decays of a head
        self.time_decay = nn.Parameter((-6 + 5 * ramp(H * per_head, 0.7 + 1.3 * deep, last=1)).view(H, per_head))
        if config.version == "5.2":
            zigzag = 0.1 * (torch.arange(1, H * n + 1) % 3 - 1)
            self.time_faaaa = nn.Parameter((deep * (1 - ramp(H * n, 1, last=1)) + zigzag).view(H, n))
        else:
            self.time_faaaa = nn.Parameter(torch.full((H, 1), 0.05))
        self.receptance = matrix(C, H * n, gain=1)
        self.key = matrix(C, H * n, gain=0.1)
        self.value = matrix(C, H * n, gain=1)
        if config.version != "5.0":
            self.time_mix_g = nn.Parameter(ramp(C, shallow / 2))
            self.gate = matrix(C, H * n, gain=0.1)
        self.output = matrix(H * n, C, gain=0)
        self.ln_x = nn.GroupNorm(H, H * n, eps=config.norm_eps)
        nn.init.constant_(self.ln_x.weight, ((1 + layer) / num_layers) ** 0.7)

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> RWKV5State:
        """Zeros."""
        H, n = self.time_decay.shape[0], self.config.head_size
        shift = like.new_zeros(count, self.time_mix_k.shape[-1])
        return RWKV5State(shift, like.new_zeros(count, H, n, n, dtype=state_dtype(like.dtype)))

    def mix(self, x: Tensor, state: RWKV5State, sequences: Sequences) -> tuple[Tensor, RWKV5State]:
        """Y and the new state."""
        last, shift = sequences.shifted(x, state.shift)
        mixed = token_shift(x, last, sequences, *self._mixes(), complement=True)
        y, wkv = self._mixed(mixed, state.wkv, sequences)
        return y, RWKV5State(shift, wkv)

    def step(self, x: Tensor, y: Tensor | None, norm: nn.Module, state: RWKV5State, sequences: Sequences) -> tuple[Tensor, Tensor] | None:
        """See ``Mixer.step``."""
        found = shifted_norm(x, y, norm, state.shift, sequences, *self._mixes(), complement=True)
        return None if found is None else (found.total, self._mixed(found.mixed, state.wkv, sequences)[0])

    def _mixes(self) -> list[Tensor]:
        gate = [] if self.config.version == "5.0" else [self.time_mix_g]
        return [self.time_mix_r, self.time_mix_k, self.time_mix_v, *gate]

    def _mixed(self, inputs: tuple[Tensor, ...], wkv: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Y and the new state of the recurrence, from the inputs of r, k, v and g."""
        heads = self.time_decay.shape[0], self.config.head_size
        gated, output_map = self.config.version != "5.0", last_map(self.output, sequences)
        maps = (self.receptance, self.key, self.value, *([self.gate] if gated else []))
        few = linears(inputs, maps)
        *rkv, gate = few or [one(x) for one, x in zip(maps, inputs)]
        rkv = rkv if gated else [*rkv, gate]
        if gated:
            r, k, v = rkv
            stepped = rwkv_step(r, k, v, gate, self.time_faaaa, self.time_decay, self.ln_x, wkv, sequences)
            if stepped is not None:
                return output_map(stepped), wkv
        r, k, v = (one.unflatten(-1, heads) for one in rkv)
        w = -torch.exp(self.time_decay.to(state_dtype(r.dtype)).clamp(max=LARGEST)).expand(heads)
        output, wkv = sequences.recur("rwkv5", r, k, v, w, self.time_faaaa.expand(heads), state=wkv)
        if gated:
            return norm_gate(output, gate, self.ln_x, output_map, grouped=True), wkv
        return output_map(norm_of_heads(output, self.ln_x, grouped=True)), wkv
