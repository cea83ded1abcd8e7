"""Linear attention without decay.

Source: Katharopoulos et al. 2020, arXiv 2006.16236.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ..tokens.feature_maps import needs_float32, normalized
from .heads import HeadsConfig, HeadsMixer
from .sequences import Sequences


@dataclass(frozen=True)
class LinearAttentionConfig(HeadsConfig):
    """The sizes of a linear attention layer."""

    kind = "linear_attention"
    num_heads: int = 8
    feature_map: str | None = "elu+1"
    use_output_gate: bool = False
    normalize: bool = False
    """Whether the output is divided by the sum of the weights."""

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> LinearAttention:
        """A new layer."""
        return LinearAttention(self, hidden_size)


class LinearAttentionState(NamedTuple):
    """The state of a layer."""

    kv: Tensor
    """[N,H,K,V], with ``normalize`` [N,H,K,V+1]: the state of the recurrence, float32 (float64 for float64 models)."""
    tails: Tensor
    """[N,W-1,...], the last inputs of the convolutions of q, k and v, concatenated; [N,0,0] without convolutions."""


class LinearAttention(HeadsMixer):
    r"""Linear attention with a feature map.

    .. math::
        q, k, v = \phi(W_q x), \phi(W_k x), W_v x, \qquad y = W_o RMSNorm_V(linear\_attention(q, k, v))

    The norm is over each head.

    >>> import torch
    >>> y, state = LinearAttentionConfig(num_heads=2, normalize=True).build(hidden_size=16)(torch.randn(1, 5, 16))
    >>> state.kv.shape
    torch.Size([1, 2, 8, 9])
    """

    def __init__(self, config: LinearAttentionConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.config = config

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> LinearAttentionState:
        """Zeros."""
        return LinearAttentionState(self._initial_kv(count, like, int(self.config.normalize)), self._initial_tails(count, like))

    def mix(self, x: Tensor, state: LinearAttentionState, sequences: Sequences) -> tuple[Tensor, LinearAttentionState]:
        """Y and the new state."""
        q, k, v, gate, _, tails = self._project(x, state.tails, sequences)
        wide = self.config.normalize and needs_float32(q, k, v)
        if wide:
            q, k = q.float(), k.float()
        q, k, v = self._features(q), self._served(self._features(k)), self._served(v)
        attend = partial(sequences.recur, "linear_attention", state=state.kv)
        output, kv = normalized(attend, q, k, v, wide) if self.config.normalize else attend(q, k, v)
        return self._project_output(output, gate, sequences), LinearAttentionState(kv, tails)
