"""Distributions of log decays per channel, for tools that draw inputs."""

from __future__ import annotations

from collections.abc import Mapping

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
