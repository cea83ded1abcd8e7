"""Kimi delta attention.

Source: Kimi Team 2025, arXiv 2510.26692; the options are those of flash-linear-attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import Complaints, RangeError
from .delta_heads import DeltaMixer, DeltaState, ValueHeadsConfig, initial_rates, initial_steps
from .heads import projection
from .low_rank import low_rank, low_rank_parts
from .sequences import Sequences


@dataclass(frozen=True)
class KDAConfig(ValueHeadsConfig):
    """The sizes of a layer of Kimi delta attention."""

    kind = "kda"
    num_heads: int = 16
    gate_low_rank_dim: int | None = None
    """The rank of the decay and of the output gate. Default: V."""
    lower_bound: float | None = field(default=None, metadata={"signed": True})
    """The lowest log decay, below 0: the log decay is ``lower_bound * sigmoid(exp(A_log) (x + dt_bias))``. Default: no bound."""

    def check(self, complaints: Complaints) -> None:
        """Check the sizes of heads and the sign of the bound."""
        super().check(complaints)
        if self.lower_bound is not None and not -math.inf < self.lower_bound < 0:
            complaints.add(RangeError, "lower_bound", "below 0 or None", self.lower_bound)

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> KimiDeltaAttention:
        """A new layer."""
        return KimiDeltaAttention(self, hidden_size)


class KimiDeltaAttention(DeltaMixer):
    r"""Kimi delta attention: the delta rule with one decay per token and key channel.

    .. math::
        q, k, v = silu(conv(W_{q,k,v} x)), \qquad \beta = sigmoid(W_b x), \qquad
        g = -\exp(A\_log) softplus(W_{f2} W_{f1} x + dt\_bias)

        y = W_o (RMSNorm_V(kda(q / |q|, k / |k|, v, g, \beta)) \cdot sigmoid(W_{g2} W_{g1} x + b_g))

    The norm is over each head. beta and g are computed in float32 for float16 and bfloat16 models.

    >>> import torch
    >>> y, state = KDAConfig(num_heads=2, head_dim=8).build(hidden_size=16)(torch.randn(1, 5, 16))
    >>> state.kv.shape, state.tails.shape
    (torch.Size([1, 2, 8, 8]), torch.Size([1, 3, 48]))
    """

    unquantized = ("f_proj", "b_proj", "g_proj")

    def __init__(self, config: KDAConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size, gated=True, gate="sigmoid")
        _, H, K, V = self.heads
        rank = V if config.gate_low_rank_dim is None else config.gate_low_rank_dim
        self.f_proj = nn.Sequential(projection(hidden_size, rank), projection(rank, H * K))
        self.b_proj = projection(hidden_size, H)
        self.g_proj = nn.Sequential(projection(hidden_size, rank), projection(rank, H * V, bias=True))
        self.A_log = initial_rates(H, 1, 16) if config.lower_bound is None else nn.Parameter(torch.zeros(H))
        self.dt_bias = initial_steps(H * K)

    def mix(self, x: Tensor, state: DeltaState, sequences: Sequences) -> tuple[Tensor, DeltaState]:
        """Y and the new state."""
        _, H, K, _ = self.heads
        decays, gates = low_rank_parts(self.f_proj, x), low_rank_parts(self.g_proj, x)
        q, k, v, (b, *first), tails = self._project(x, state.tails, sequences, self.b_proj, *decays[:1], *gates[:1])
        f = low_rank(self.f_proj, x, decays, first[: len(decays[:1])])
        gate = low_rank(self.g_proj, x, gates, first[len(decays[:1]) :])
        output, kv = sequences.delta_rule(
            "kda", q, k, v, g=f.unflatten(-1, (H, K)), beta=b, A_log=self.A_log, dt_bias=self.dt_bias.view(H, K),
            lower_bound=self.config.lower_bound, use_qk_l2norm=True, beta_logits=True,
            allow_neg_eigval=self.config.allow_neg_eigval, state=state.kv,
        )  # fmt: skip
        return self._project_output(output, gate, sequences), DeltaState(kv, tails)
