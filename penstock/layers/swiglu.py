"""A gated feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .fused import activated
from .halving import last_map
from .heads import projection
from .mixer import Mixer, MixerConfig, Stateless
from .sequences import Sequences
from .shared_input import linears_of


@dataclass(frozen=True)
class SwiGLUConfig(MixerConfig):
    """The sizes of a gated feed-forward layer."""

    kind = "swiglu"
    intermediate_size: int
    """F, the width of the inner layer."""

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> SwiGLU:
        """A new layer."""
        return SwiGLU(self, hidden_size)


class SwiGLU(Mixer):
    r"""A gated feed-forward layer without state.

    .. math:: y = W_{down} (silu(W_{gate} x) \cdot W_{up} x)

    Source: Shazeer 2020, arXiv 2002.05202, equation 6.

    >>> import torch
    >>> y, state = SwiGLUConfig(intermediate_size=24).build(hidden_size=16)(torch.randn(1, 5, 16))
    >>> y.shape, state
    (torch.Size([1, 5, 16]), Stateless())
    """

    halves_output = True

    def __init__(self, config: SwiGLUConfig, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.config = config
        self.gate_proj = projection(hidden_size, config.intermediate_size)
        self.up_proj = projection(hidden_size, config.intermediate_size)
        self.down_proj = projection(config.intermediate_size, hidden_size)

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> Stateless:
        """Nothing."""
        return Stateless()

    def mix(self, x: Tensor, state: Stateless, sequences: Sequences) -> tuple[Tensor, Stateless]:
        """Y and no state."""
        gate, up = linears_of(x, (self.gate_proj, self.up_proj))
        return activated(gate, up, "silu", last_map(self.down_proj, sequences)), state
