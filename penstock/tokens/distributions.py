"""Distributions of log decays, for tools that draw inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

GATES = ("soft", "mu-5", "mu-3", "mu-1", "mu0", "mu1", "mu2", "initial", "forgetting")
"""Names of distributions, from the mildest log-normal one to those of trained models. With normal x:

- "soft": logsigmoid(x)
- "mu-5" to "mu2": -exp(x + mu)
- "initial": -exp(-6 + 5 c^0.85 + 0.3 x), c from 0 to 1 over the channels, as a new RWKV-6 has them
- "forgetting": the same with 6 added to the exponent for 2 % of the channels, which forget everything at each token
"""

STRENGTHS = ("zero", "tiny", "slow", "fast", "bounded", "bound", "mu2", "channels", "spikes", "resets")
"""Names of distributions, from none at all to the strongest. With normal x and a lower bound b of the decays:

- "zero", "tiny": 0; -1e-8
- "slow", "fast": logsigmoid(x) / 16; 10 logsigmoid(x)
- "bounded", "bound": b sigmoid(2 x); b sigmoid(x + 6)
- "mu2": as above
- "channels": slow, but -100 in 5 % of the channels, or of the heads where a head has one decay
- "spikes": slow, but -2661 at 1 % of the places, the strongest that was seen in Kimi Linear
- "resets": slow, but -inf at 1 % of the tokens of each head
"""
BOUND = -5.0
"""The lower bound b of kernels that need one; that of RWKV-7 is -exp(-1/2)."""


def normal(random: torch.Generator, *size: int) -> Tensor:
    """Normal float64 numbers on the generator's device: drawing on the host would take longer than a measurement."""
    return torch.randn(*size, generator=random, dtype=torch.float64, device=random.device)


def uniform(random: torch.Generator, *size: int) -> Tensor:
    """Uniform float64 numbers from 0 to 1 on the generator's device."""
    return torch.rand(*size, generator=random, dtype=torch.float64, device=random.device)


def channel_decays(gates: str, sizes: Mapping[str, int], random: torch.Generator) -> Tensor:
    """Log decays [B,T,H,K] of one of ``GATES``."""
    B, T, H, K = (sizes[axis] for axis in "BTHK")
    x = normal(random, B, T, H, K)
    if gates == "soft":
        return F.logsigmoid(x)
    if gates.startswith("mu"):
        return -torch.exp(x + int(gates[2:]))
    spread = -6 + 5 * torch.linspace(0, 1, K, dtype=torch.float64, device=random.device) ** 0.85
    forgetting = 6.0 * (uniform(random, H, K) < 0.02) if gates == "forgetting" else 0.0
    return -torch.exp(spread + 0.3 * x + forgetting)


def decays(strength: str, size: Sequence[int], random: torch.Generator, bound: float = BOUND) -> Tensor:
    """Log decays [B,T,H] or [B,T,H,K] of one of ``STRENGTHS``."""
    x = normal(random, *size)
    if strength in ("zero", "tiny"):
        return torch.full_like(x, 0.0 if strength == "zero" else -1e-8)
    if strength in ("bounded", "bound"):
        return bound * torch.sigmoid(2 * x if strength == "bounded" else x + 6)
    if strength == "mu2":
        return -torch.exp(x + 2)
    slow = F.logsigmoid(x) / 16
    if strength == "channels":
        channels = torch.zeros(math.prod(size[2:]), dtype=torch.bool, device=random.device)
        channels[torch.randperm(len(channels), generator=random, device=random.device)[: -(-len(channels) // 20)]] = True
        return slow.masked_fill(channels.view(*size[2:]), -100.0)
    if strength == "spikes":
        return slow.masked_fill(uniform(random, *size) < 0.01, -2661.0)
    if strength == "resets":
        return slow.masked_fill(uniform(random, *size[:3], *[1] * (len(size) - 3)) < 0.01, -math.inf)
    return slow if strength == "slow" else 160 * slow
