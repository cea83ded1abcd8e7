"""The base of gated linear attention, retention and linear attention: projections, convolutions, feature maps, and the gated output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from ..call.recompute import again
from ..errors import Complaints, RangeError
from ..tokens.dtypes import state_dtype
from ..tokens.sharing import repeated
from .activations import ACTIVATIONS
from .convolution import ShortConvolution, convolved
from .fused import activated
from .halving import last_map
from .linear import Linear
from .mixer import Mixer, MixerConfig
from .norm_gate import norm_gate
from .norms import RMSNorm
from .sequences import Sequences
from .shared_input import linears_of


@dataclass(frozen=True)
class HeadsConfig(MixerConfig):
    """The sizes that these layers share."""

    num_heads: int
    num_kv_heads: int | None = None
    """Heads of k and v. Each is shared by num_heads / num_kv_heads consecutive heads of q. Default: num_heads."""
    expand_k: float = 1.0
    """H * K / hidden_size."""
    expand_v: float = 1.0
    """H * V / hidden_size."""
    feature_map: str | None = None
    """A name of ``ACTIVATIONS``, applied to q and k. Default: none."""
    conv_size: int = 0
    """The width of the short convolutions of q, k and v; 0: none."""
    conv_bias: bool = False
    use_output_gate: bool = True
    """Whether the output is multiplied by silu(g_proj(x))."""
    use_output_norm: bool = True
    """Whether each head of the output gets an RMS norm."""
    norm_eps: float = 1e-6
    elementwise_affine: bool = True
    """Whether the norm has a weight [V]."""

    def check(self, complaints: Complaints) -> None:
        """Check that heads of q can share heads of k and v, and that the feature map exists."""
        if self.num_heads % self.kv_heads:
            complaints.add(RangeError, "num_kv_heads", f"a divisor of num_heads = {self.num_heads}", self.num_kv_heads)
        if self.feature_map is not None and self.feature_map not in tuple(ACTIVATIONS):
            complaints.add(RangeError, "feature_map", f"None or one of {', '.join(ACTIVATIONS)}", repr(self.feature_map))

    @property
    def kv_heads(self) -> int:
        """G, the number of heads of k and v."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def check_hidden_size(self, complaints: Complaints, hidden_size: int) -> None:
        """Check that K and V are whole."""
        for name, expand in (("expand_k", self.expand_k), ("expand_v", self.expand_v)):
            size = round(min(hidden_size * expand, 2.0**63))
            if abs(size - hidden_size * expand) > 1e-6 * size or size % self.num_heads or size < 1:
                rule = f"such that hidden_size * {name} is a multiple of num_heads = {self.num_heads}"
                complaints.add(RangeError, name, rule, f"{expand} with hidden_size = {hidden_size}")

    def head_sizes(self, hidden_size: int) -> tuple[int, int]:
        """K and V; raises RangeError if they are not whole."""
        self.require_hidden_size(hidden_size)
        return round(hidden_size * self.expand_k) // self.num_heads, round(hidden_size * self.expand_v) // self.num_heads


class Projected(NamedTuple):
    """The projections of the input of a layer."""

    q: Tensor
    """[B,T,H,K], as k and v before feature maps."""
    k: Tensor
    """[B,T,G,K]"""
    v: Tensor
    """[B,T,G,V]"""
    gate: Tensor | None
    """[B,T,H*V], the output gate before silu."""
    others: list[Tensor]
    """Results of further maps."""
    tails: Tensor
    """The new tails of the convolutions."""


class HeadsMixer(Mixer):
    """Base: x [B,T,C] to heads of q, k, v, and the output of the recurrence to y [B,T,C]."""

    halves_output = True

    def __init__(self, config: HeadsConfig, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.heads = config
        C, H, G = hidden_size, config.num_heads, config.kv_heads
        K, V = self.head_sizes = config.head_sizes(hidden_size)
        self.q_proj = projection(C, H * K)
        self.k_proj = projection(C, G * K)
        self.v_proj = projection(C, G * V)
        if config.use_output_gate:
            self.g_proj = projection(C, H * V)
        self.o_proj = projection(H * V, C)
        if config.conv_size:
            self.q_conv1d = ShortConvolution(H * K, config.conv_size, config.conv_bias)
            self.k_conv1d = ShortConvolution(G * K, config.conv_size, config.conv_bias)
            self.v_conv1d = ShortConvolution(G * V, config.conv_size, config.conv_bias)
        if config.use_output_norm:
            self.norm = RMSNorm(V, config.norm_eps, config.elementwise_affine)

    def _initial_kv(self, count: int, like: Tensor, columns: int = 0) -> Tensor:
        K, V = self.head_sizes
        return like.new_zeros(count, self.heads.num_heads, K, V + columns, dtype=state_dtype(like.dtype))

    def _initial_tails(self, count: int, like: Tensor) -> Tensor:
        (K, V), H, G = self.head_sizes, self.heads.num_heads, self.heads.kv_heads
        channels = H * K + G * (K + V)
        return like.new_zeros(count, max(self.heads.conv_size - 1, 0), channels if self.heads.conv_size else 0)

    def _project(self, x: Tensor, tails: Tensor, sequences: Sequences, *others: nn.Module) -> Projected:
        """Linear maps of x: those of all layers, and others."""
        gates = (self.g_proj,) if self.heads.use_output_gate else ()
        found = linears_of(x, (self.q_proj, self.k_proj, self.v_proj, *gates, *others))
        parts, rest = found[:3], found[3:]
        gate = rest.pop(0) if gates else None
        if self.heads.conv_size:
            parts, tails = convolved((self.q_conv1d, self.k_conv1d, self.v_conv1d), parts, tails, sequences)
        K, V = self.head_sizes
        q, k, v = (part.unflatten(-1, (-1, size)) for part, size in zip(parts, (K, K, V)))
        return Projected(q, k, v, gate, rest, tails)

    def _features(self, x: Tensor) -> Tensor:
        if self.heads.feature_map is None:
            return x
        feature_map = ACTIVATIONS[self.heads.feature_map]
        return again(feature_map(x), feature_map, x)

    def _served(self, x: Tensor) -> Tensor:
        """Repeat heads of k or v [B,T,G,K] to [B,T,H,K]; a single head is not copied."""
        heads = self.heads.num_heads
        served = repeated(x, heads)
        return served if x.shape[2] in (1, heads) else again(served, lambda x: repeated(x, heads), x)

    def _project_output(self, output: Tensor, gate: Tensor | None, sequences: Sequences) -> Tensor:
        """Map the output of the recurrence [B,T,H,V] to y [B,T,C]."""
        output_map = last_map(self.o_proj, sequences)
        if self.heads.use_output_norm and gate is not None:
            return norm_gate(output, gate, self.norm, output_map, grouped=False)
        if self.heads.use_output_norm:
            output = self.norm(output)
        elif gate is not None:
            return activated(gate, output.flatten(-2), "silu", output_map)
        y: Tensor = output_map(output.flatten(-2))
        return y


def projection(inputs: int, outputs: int, bias: bool = False) -> Linear:
    """A linear map, normal with a standard deviation of 0.02; its bias is 0."""
    linear = Linear(inputs, outputs, bias)
    nn.init.normal_(linear.weight, std=0.02)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear
