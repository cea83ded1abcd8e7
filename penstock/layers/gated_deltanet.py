"""Gated DeltaNet.

Source: Yang et al. 2024, arXiv 2412.06464; the options are those of flash-linear-attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..errors import Complaints, RangeError
from .delta_heads import DeltaMixer, DeltaState, ValueHeadsConfig, initial_rates, initial_steps
from .heads import projection
from .sequences import Sequences


@dataclass(frozen=True)
class GatedDeltaNetConfig(ValueHeadsConfig):
    """The sizes of a gated DeltaNet layer."""

    kind = "gated_deltanet"
    num_heads: int = 6
    head_dim: int = 256
    expand_v: float = 2.0
    use_gate: bool = True
    """Whether the output is multiplied by an activation of g_proj(x)."""
    gate_activation: Literal["silu", "sigmoid"] = "silu"

    def check(self, complaints: Complaints) -> None:
        """Check the sizes of heads and the name of the activation."""
        super().check(complaints)
        if self.gate_activation not in ("silu", "sigmoid"):
            complaints.add(RangeError, "gate_activation", "'silu' or 'sigmoid'", repr(self.gate_activation))

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> GatedDeltaNet:
        """A new layer."""
        return GatedDeltaNet(self, hidden_size)


class GatedDeltaNet(DeltaMixer):
    r"""Gated DeltaNet: the delta rule with one decay per token and head.

    .. math::
        q, k, v = silu(conv(W_{q,k,v} x)), \qquad \beta = sigmoid(W_b x), \qquad g = -\exp(A\_log) softplus(W_a x + dt\_bias)

        y = W_o (RMSNorm_V(gated\_delta\_rule(q / |q|, k / |k|, v, g, \beta)) \cdot silu(W_g x))

    The norm is over each head. beta and g are computed in float32 for float16 and bfloat16 models.

    >>> import torch
    >>> mixer = GatedDeltaNetConfig(num_heads=2, head_dim=8, num_v_heads=4, expand_v=1.0).build(hidden_size=16)
    >>> y, state = mixer(torch.randn(1, 5, 16))
    >>> state.kv.shape, state.tails.shape
    (torch.Size([1, 4, 8, 8]), torch.Size([1, 3, 64]))
    """

    unquantized = ("a_proj", "b_proj")

    def __init__(self, config: GatedDeltaNetConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size, gated=config.use_gate, gate=config.gate_activation)
        _, H, _, V = self.heads
        self.a_proj = projection(hidden_size, H)
        self.b_proj = projection(hidden_size, H)
        if config.use_gate:
            self.g_proj = projection(hidden_size, H * V)
        self.A_log = initial_rates(H, 0, 16)
        self.dt_bias = initial_steps(H)

    def mix(self, x: Tensor, state: DeltaState, sequences: Sequences) -> tuple[Tensor, DeltaState]:
        """Y and the new state."""
        gates = (self.g_proj,) if self.config.use_gate else ()
        q, k, v, (a, b, *gate), tails = self._project(x, state.tails, sequences, self.a_proj, self.b_proj, *gates)
        output, kv = sequences.delta_rule(
            "gated_delta_rule", q, k, v, g=a, beta=b, A_log=self.A_log, dt_bias=self.dt_bias, use_qk_l2norm=True, beta_logits=True,
            allow_neg_eigval=self.config.allow_neg_eigval, state=state.kv,
        )  # fmt: skip
        return self._project_output(output, gate[0] if gate else None, sequences), DeltaState(kv, tails)
