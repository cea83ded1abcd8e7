"""Gated linear attention.

Source: Yang et al. 2023, arXiv 2312.06635, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from ..errors import Complaints, RangeError
from .decays import log_sigmoid
from .heads import HeadsConfig, HeadsMixer, projection
from .low_rank import low_rank, low_rank_parts
from .sequences import Sequences


@dataclass(frozen=True)
class GLAConfig(HeadsConfig):
    """The sizes of a gated linear attention layer."""

    kind = "gla"
    num_heads: int = 4
    expand_k: float = 0.5
    gate_low_rank_dim: int = 16
    """The rank of the decay."""
    gate_logit_normalizer: float = 16.0
    """The divisor of the log decay."""
    clamp_min: float | None = field(default=None, metadata={"signed": True})
    """The lowest log decay, at most 0."""

    def check(self, complaints: Complaints) -> None:
        """Check that log decays are at most 0."""
        super().check(complaints)
        if self.gate_logit_normalizer == 0:
            complaints.add(RangeError, "gate_logit_normalizer", "above 0", self.gate_logit_normalizer)
        if self.clamp_min is not None and self.clamp_min > 0:
            complaints.add(RangeError, "clamp_min", "at most 0 or None", self.clamp_min)

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> GatedLinearAttention:
        """A new layer."""
        return GatedLinearAttention(self, hidden_size)


class GLAState(NamedTuple):
    """The state of a layer."""

    kv: Tensor
    """[N,H,K,V], the state of the recurrence, float32 (float64 for float64 models)."""
    tails: Tensor
    """[N,W-1,...], the last inputs of the convolutions of q, k and v, concatenated; [N,0,0] without convolutions."""


class GatedLinearAttention(HeadsMixer):
    r"""Gated linear attention: a decay per token and key channel.

    .. math::
        q, k, v = W_q x, W_k x, W_v x, \qquad g = logsigmoid(W_2 W_1 x + b) / 16

        y = W_o (RMSNorm_V(gla(q, k, v, g)) \cdot silu(W_g x))

    The norm is over each head. g is a log decay (natural logarithm), computed in float32 for float16 and bfloat16 models.

    >>> import torch
    >>> mixer = GLAConfig(num_heads=2, conv_size=4).build(hidden_size=16)
    >>> y, state = mixer(torch.randn(1, 5, 16))
    >>> state.kv.shape
    torch.Size([1, 2, 4, 8])
    """

    unquantized = ("gk_proj",)

    def __init__(self, config: GLAConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.config = config
        low, width = config.gate_low_rank_dim, config.kv_heads * self.head_sizes[0]
        self.gk_proj = nn.Sequential(projection(hidden_size, low), projection(low, width, bias=True))

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> GLAState:
        """Zeros."""
        return GLAState(self._initial_kv(count, like), self._initial_tails(count, like))

    def mix(self, x: Tensor, state: GLAState, sequences: Sequences) -> tuple[Tensor, GLAState]:
        """Y and the new state."""
        maps = low_rank_parts(self.gk_proj, x)
        q, k, v, gate, low, tails = self._project(x, state.tails, sequences, *maps[:1])
        gates = low_rank(self.gk_proj, x, maps, low)
        g = log_sigmoid(gates, self.config.gate_logit_normalizer)
        if self.config.clamp_min is not None:
            g = g.clamp(min=self.config.clamp_min)
        g = g.unflatten(-1, (-1, self.head_sizes[0]))
        q, k = self._features(q), self._features(k)
        k, v, g = (self._served(x) for x in (k, v, g))
        output, kv = sequences.recur("gla", q, k, v, g, state=state.kv)
        return self._project_output(output, gate, sequences), GLAState(kv, tails)
