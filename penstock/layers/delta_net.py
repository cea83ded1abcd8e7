"""DeltaNet.

Source: Yang et al. 2024, arXiv 2406.06484; the options are those of flash-linear-attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..call.recompute import again
from ..errors import Complaints, RangeError
from ..tokens.dtypes import state_dtype
from ..tokens.sums import by_halves
from .activations import ACTIVATIONS
from .delta_heads import DeltaConfig, DeltaMixer, DeltaState, Heads
from .heads import projection
from .sequences import Sequences

FEATURES = ("silu", "relu", "elu+1", "identity")
"""The activations of q and k."""
NORMS = ("l2", "sum")


@dataclass(frozen=True)
class DeltaNetConfig(DeltaConfig):
    """The sizes of a DeltaNet layer."""

    kind = "delta_net"
    num_heads: int = 4
    expand_k: float = 1.0
    """H * K / hidden_size."""
    expand_v: float = 1.0
    """H * V / hidden_size."""
    use_beta: bool = True
    """Whether beta is sigmoid(b_proj(x)), or 1."""
    use_gate: bool = False
    """Whether the output is multiplied by silu(g_proj(x))."""
    qk_activation: Literal["silu", "relu", "elu+1", "identity"] = "silu"
    """Of q and k, after the convolution."""
    qk_norm: Literal["l2", "sum"] = "l2"
    """Whether each head of q and k is divided by its norm, or by its sum, which may be near 0 where the activation has both signs."""

    def check(self, complaints: Complaints) -> None:
        """Check the names of the activation and of the norm."""
        for name, value, known in (("qk_activation", self.qk_activation, FEATURES), ("qk_norm", self.qk_norm, NORMS)):
            if value not in known:
                complaints.add(RangeError, name, f"one of {', '.join(known)}", repr(value))

    def check_hidden_size(self, complaints: Complaints, hidden_size: int) -> None:
        """Check that K and V are whole."""
        for name, expand in (("expand_k", self.expand_k), ("expand_v", self.expand_v)):
            size = round(min(hidden_size * expand, 2.0**63))
            if abs(size - hidden_size * expand) > 1e-6 * size or size % self.num_heads or size < 1:
                rule = f"such that hidden_size * {name} is a multiple of num_heads = {self.num_heads}"
                complaints.add(RangeError, name, rule, f"{expand} with hidden_size = {hidden_size}")

    def heads(self, hidden_size: int) -> Heads:
        """The sizes of heads; raises RangeError if they are not whole."""
        self.require_hidden_size(hidden_size)
        H = self.num_heads
        return Heads(H, H, round(hidden_size * self.expand_k) // H, round(hidden_size * self.expand_v) // H)

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> DeltaNet:
        """A new layer."""
        return DeltaNet(self, hidden_size)


class DeltaNet(DeltaMixer):
    r"""DeltaNet: the delta rule without decay.

    .. math::
        q, k, v = silu(conv(W_{q,k,v} x)), \qquad \beta = sigmoid(W_b x)

        y = W_o (RMSNorm_V(delta\_rule(q / |q|, k / |k|, v, \beta)) \cdot silu(W_g x))

    The norm is over each head. The gate is optional, and by default there is none.

    >>> import torch
    >>> y, state = DeltaNetConfig(num_heads=2).build(hidden_size=16)(torch.randn(1, 5, 16))
    >>> state.kv.shape, state.tails.shape
    (torch.Size([1, 2, 8, 8]), torch.Size([1, 3, 48]))
    """

    unquantized = ("b_proj",)

    def __init__(self, config: DeltaNetConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size, gated=config.use_gate, activation="silu" if config.qk_activation == "silu" else None)
        self.b_proj = projection(hidden_size, self.heads.H) if config.use_beta else None
        if config.use_gate:
            self.g_proj = projection(hidden_size, self.heads.H * self.heads.V)

    def mix(self, x: Tensor, state: DeltaState, sequences: Sequences) -> tuple[Tensor, DeltaState]:
        """Y and the new state."""
        config = self.config
        maps = (() if self.b_proj is None else (self.b_proj,)) + ((self.g_proj,) if config.use_gate else ())
        q, k, v, others, tails = self._project(x, state.tails, sequences, *maps)
        if config.use_beta:
            beta, neg = others.pop(0), config.allow_neg_eigval
        else:
            beta, neg = x.new_full((), 2.0 if config.allow_neg_eigval else 1.0).expand(*x.shape[:2], self.heads.H), False
        q, k = self._features(q), self._features(k)
        inputs = {"beta": beta, "beta_logits": config.use_beta, "allow_neg_eigval": neg, "use_qk_l2norm": config.qk_norm == "l2"}
        output, kv = sequences.delta_rule("delta_rule", q, k, v, state=state.kv, **inputs)
        return self._project_output(output, others[0] if others else None, sequences), DeltaState(kv, tails)

    def _features(self, x: Tensor) -> Tensor:
        """Q or k after its activation, if the convolution has none, and its norm, if the operator does not compute it."""
        if self.activation is None and self.config.qk_activation != "identity":
            feature_map = ACTIVATIONS[self.config.qk_activation]
            x = again(feature_map(x), feature_map, x)
        return again(_sum_normed(x), _sum_normed, x) if self.config.qk_norm == "sum" else x


def _sum_normed(x: Tensor) -> Tensor:
    """X divided by its sum over the last axis, or by 1e-6 of the same sign if the sum is nearer to 0; computed in float32."""
    wide = x.to(state_dtype(x.dtype))
    total = by_halves(wide)
    total = torch.where(total < 0, total.clamp(max=-1e-6), total.clamp(min=1e-6))
    return torch.div(wide, total).to(x.dtype)
