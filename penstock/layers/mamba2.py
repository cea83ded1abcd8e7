"""Mamba-2, with the parameter names of its public checkpoints.

Source: Dao and Gu 2024, arXiv 2405.21060, section 7; the initialisation is that of github.com/state-spaces/mamba,
``mamba_ssm/modules/mamba2.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import Complaints, RangeError
from ..tokens.dtypes import state_dtype
from .convolution import ShortConvolution
from .halving import last_map
from .linear import Linear
from .mamba2_chains import gated_norm, time_steps
from .mixer import Mixer, MixerConfig
from .norms import GroupedRMSNorm
from .sequences import Sequences

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Mamba2Config(MixerConfig):
    """The sizes of a Mamba-2 layer."""

    kind = "mamba2"
    num_heads: int
    """H; H * head_dim is usually 2 * hidden_size."""
    head_dim: int = 64
    """V, channels of a head of values."""
    state_size: int = 128
    """K, the size of the state of each channel."""
    n_groups: int = 1
    """G; each group of B and C is shared by H / G consecutive heads. The norm is over each group."""
    conv_kernel: int = 4
    """W, the width of the convolution."""
    use_conv_bias: bool = True
    use_bias: bool = False
    """Whether ``in_proj`` and ``out_proj`` have a bias."""
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    """Limits of dt."""
    norm_eps: float = 1e-5

    def check(self, complaints: Complaints) -> None:
        """Check that groups share heads evenly, and the limits of dt."""
        if self.num_heads % self.n_groups:
            rule, remedy = f"a divisor of num_heads = {self.num_heads}", "Each group serves as many heads."
            complaints.add(RangeError, "n_groups", rule, self.n_groups, remedy)
        limits = self.time_step_limit
        two = isinstance(limits, tuple | list) and len(limits) == 2 and all(isinstance(one, int | float) for one in limits)
        if not two or not 0 <= limits[0] <= limits[1]:
            complaints.add(RangeError, "time_step_limit", "two numbers, 0 <= low <= high", limits)
        elif limits[0] > LARGEST or LARGEST < limits[1] < math.inf:
            complaints.add(RangeError, "time_step_limit", "two numbers of float32, of which the second may be infinite", limits)

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> Mamba2:
        """A new layer."""
        return Mamba2(self, hidden_size, num_layers)


class Mamba2State(NamedTuple):
    """The state of a layer."""

    tail: Tensor
    """[N,W-1,H*V+2*G*K], the last inputs of the convolution."""
    ssm: Tensor
    """[N,H,K,V], the state of the recurrence, float32 (float64 for float64 models)."""


class Mamba2(Mixer):
    r"""Mamba-2: state space duality as gated linear attention with one decay per token and head.

    .. math::
        z, xBC, dt = W_{in} x, \qquad x, B, C = silu(conv(xBC)), \qquad dt = clamp(softplus(dt + dt\_bias))

        o = simple\_gla(q = C, k = B, v = x \, dt, g = -\exp(A\_log) dt), \qquad
        y = W_{out} RMSNorm((o + D x) \cdot silu(z))

    The scale is 1. The norm is over each of the G groups. dt and g are computed in float32 for float16 and bfloat16 models.
    A_log above 60 counts as 60.

    >>> y, state = Mamba2Config(num_heads=4, head_dim=8, state_size=16).build(hidden_size=16)(torch.randn(1, 5, 16))
    >>> state.tail.shape, state.ssm.shape
    (torch.Size([1, 3, 64]), torch.Size([1, 4, 16, 8]))
    """

    halves_output = True

    def __init__(self, config: Mamba2Config, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__(hidden_size)
        self.config = config
        H, inner = config.num_heads, config.num_heads * config.head_dim
        mixed = inner + 2 * config.n_groups * config.state_size
        self.in_proj = Linear(hidden_size, inner + mixed + H, bias=config.use_bias)
        self.conv1d = ShortConvolution(mixed, config.conv_kernel, config.use_conv_bias)
        # dt is between 0.001 and 0.1 at first, uniform in its logarithm; dt_bias is the inverse of softplus
        dt = torch.exp(torch.rand(H) * math.log(100) + math.log(1e-3)).clamp(min=1e-4)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.empty(H).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(H))
        self.norm = GroupedRMSNorm(inner, config.n_groups, config.norm_eps)
        self.out_proj = Linear(inner, hidden_size, bias=config.use_bias)
        with torch.no_grad():
            self.out_proj.weight /= math.sqrt(num_layers)  # as many terms are summed

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> Mamba2State:
        """Zeros."""
        sizes = self.config.num_heads, self.config.state_size, self.config.head_dim
        tail = like.new_zeros(count, self.config.conv_kernel - 1, self._convolved)
        return Mamba2State(tail, like.new_zeros(count, *sizes, dtype=state_dtype(like.dtype)))

    @property
    def _convolved(self) -> int:
        """The channels of the convolution: those of x, B and C."""
        return self.config.num_heads * self.config.head_dim + 2 * self.config.n_groups * self.config.state_size

    def mix(self, x: Tensor, state: Mamba2State, sequences: Sequences) -> tuple[Tensor, Mamba2State]:
        """Y and the new state."""
        H, K, V, G = self.config.num_heads, self.config.state_size, self.config.head_dim, self.config.n_groups
        z, mixed, dt = self.in_proj(x).split([H * V, self._convolved, H], -1)
        mixed, tail = self.conv1d(mixed, state.tail, sequences)
        x, B, C = mixed.split([H * V, G * K, G * K], -1)
        x, B, C = x.unflatten(-1, (H, V)), B.unflatten(-1, (G, K)), C.unflatten(-1, (G, K))
        g, v, x = time_steps(dt, self.dt_bias, self.A_log, x, self.config.time_step_limit)
        output, ssm = sequences.recur("simple_gla", C, B, v, g, state=state.ssm, scale=1.0)
        return gated_norm(output, x, self.D, z, self.norm, last_map(self.out_proj, sequences)), Mamba2State(tail, ssm)
