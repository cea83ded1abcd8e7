"""The base of DeltaNet, gated DeltaNet and Kimi delta attention: projections, convolutions, time steps, and the gated output."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call.recompute import again
from ..errors import Complaints, RangeError
from ..tokens.dtypes import state_dtype
from .convolution import ShortConvolution, convolved
from .halving import last_map
from .heads import projection
from .mixer import Mixer, MixerConfig
from .norm_gate import norm_gate
from .norms import RMSNorm
from .sequences import Sequences
from .shared_input import linears_of


class Heads(NamedTuple):
    """The heads of a layer."""

    G: int
    """Heads of q and k. Each serves H / G consecutive heads of v."""
    H: int
    K: int
    V: int


@dataclass(frozen=True)
class DeltaConfig(MixerConfig):
    """The sizes that these layers share. A subclass adds those of heads."""

    num_heads: int
    conv_size: int = field(default=4, metadata={"least": 0})
    """The width of the short convolutions of q, k and v; 0: none."""
    conv_bias: bool = False
    allow_neg_eigval: bool = False
    """Whether beta is doubled."""
    norm_eps: float = 1e-6

    def heads(self, hidden_size: int) -> Heads:
        """The sizes of heads; raises RangeError if they are not whole."""
        raise NotImplementedError


@dataclass(frozen=True)
class ValueHeadsConfig(DeltaConfig):
    """The sizes of layers in which heads of q and k serve several heads of v."""

    num_heads: int
    """G, heads of q and k."""
    head_dim: int = 128
    """K"""
    num_v_heads: int | None = None
    """H, heads of v. Each head of q and k serves H / G consecutive ones. Default: num_heads."""
    expand_v: float = 1.0
    """V / head_dim."""

    def check(self, complaints: Complaints) -> None:
        """Check that heads of v can share heads of q and k, and that V is whole."""
        if self.num_v_heads is not None and self.num_v_heads % self.num_heads:
            remedy = "Each head of q and k serves as many heads of v."
            complaints.add(RangeError, "num_v_heads", f"a multiple of num_heads = {self.num_heads}", self.num_v_heads, remedy)
        size = round(min(self.head_dim * self.expand_v, 2.0**63))
        if abs(size - self.head_dim * self.expand_v) > 1e-6 * size or size < 1:
            value = f"{self.expand_v} with head_dim = {self.head_dim}"
            complaints.add(RangeError, "expand_v", "such that head_dim * expand_v is a whole number", value)

    def heads(self, hidden_size: int) -> Heads:
        """The sizes of heads."""
        G, K = self.num_heads, self.head_dim
        return Heads(G, G if self.num_v_heads is None else self.num_v_heads, K, round(K * self.expand_v))


class DeltaState(NamedTuple):
    """The state of a layer."""

    kv: Tensor
    """[N,H,K,V], the state of the recurrence, float32 (float64 for float64 models)."""
    tails: Tensor
    """[N,W-1,2*G*K+H*V], the last inputs of the convolutions of q, k and v, concatenated; [N,0,0] without convolutions."""


class DeltaProjected(NamedTuple):
    """The projections of the input of a layer."""

    q: Tensor
    """[B,T,G,K], as k"""
    k: Tensor
    v: Tensor
    """[B,T,H,V]"""
    others: list[Tensor]
    """Results of further maps."""
    tails: Tensor
    """The new tails of the convolutions."""


class DeltaMixer(Mixer):
    """Base: x [B,T,C] to heads of q, k and v, and the output of the recurrence to y [B,T,C]."""

    halves_output = True

    def __init__(
        self, config: Any, hidden_size: int, *, gated: bool, gate: Literal["silu", "sigmoid"] = "silu",
        activation: Literal["silu"] | None = "silu",
    ) -> None:  # fmt: skip
        """``gated``: the output is multiplied by ``gate`` of a map ``g_proj``, which subclasses make. ``activation``: of q and k."""
        super().__init__(hidden_size)
        self.config, self.gated, self.gate, self.activation = config, gated, gate, activation
        G, H, K, V = self.heads = config.heads(hidden_size)
        self.q_proj = projection(hidden_size, G * K)
        self.k_proj = projection(hidden_size, G * K)
        self.v_proj = projection(hidden_size, H * V)
        self.o_proj = projection(H * V, hidden_size)
        if config.conv_size:
            self.q_conv1d = ShortConvolution(G * K, config.conv_size, config.conv_bias, activation)
            self.k_conv1d = ShortConvolution(G * K, config.conv_size, config.conv_bias, activation)
            self.v_conv1d = ShortConvolution(H * V, config.conv_size, config.conv_bias)
        self.norm = RMSNorm(V, config.norm_eps)

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> DeltaState:
        """Zeros."""
        (G, H, K, V), W = self.heads, self.config.conv_size
        tails = like.new_zeros(count, max(W - 1, 0), 2 * G * K + H * V if W else 0)
        return DeltaState(like.new_zeros(count, H, K, V, dtype=state_dtype(like.dtype)), tails)

    def _project(self, x: Tensor, tails: Tensor, sequences: Sequences, *others: nn.Module) -> DeltaProjected:
        """Linear maps of x, those of q, k and v with convolution and activation; and others."""
        found = linears_of(x, (self.q_proj, self.k_proj, self.v_proj, *others))
        parts, rest = found[:3], found[3:]
        if self.config.conv_size:
            parts, tails = convolved((self.q_conv1d, self.k_conv1d, self.v_conv1d), parts, tails, sequences)
        else:
            each = self.activation, self.activation, "silu"
            parts = [part if name is None else again(F.silu(part), F.silu, part) for part, name in zip(parts, each)]
        G, H, K, V = self.heads
        q, k, v = (part.unflatten(-1, sizes) for part, sizes in zip(parts, ((G, K), (G, K), (H, V))))
        return DeltaProjected(q, k, v, rest, tails)

    def _project_output(self, output: Tensor, gate: Tensor | None, sequences: Sequences) -> Tensor:
        """Map the output of the recurrence [B,T,H,V] and the gate [B,T,H*V] to y [B,T,C]."""
        output_map = last_map(self.o_proj, sequences)
        if gate is not None:
            return norm_gate(output, gate, self.norm, output_map, grouped=False, activation=self.gate)
        y: Tensor = output_map(self.norm(output).flatten(-2))
        return y


def initial_rates(heads: int, low: float, high: float) -> nn.Parameter:
    """A_log [H]: logarithms of numbers that are uniform between ``low`` and ``high``."""
    return nn.Parameter(torch.empty(heads).uniform_(low, high).clamp(min=1e-4).log())


def initial_steps(count: int) -> nn.Parameter:
    """dt_bias: the inverse of softplus of time steps between 0.001 and 0.1, uniform in their logarithm."""
    dt = torch.exp(torch.rand(count) * math.log(100) + math.log(1e-3)).clamp(min=1e-4)
    return nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
