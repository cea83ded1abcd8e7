"""Arguments of the variants with the distributions of real models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ..tokens.distributions import channel_decays, normal, uniform


def draw(variant: str, sizes: Mapping[str, int], random: torch.Generator, gates: str = "") -> dict[str, Tensor]:
    """Float64 tensors by name. The decays of rwkv6 reach e^-5 per token in every head.

    ``gates``: a distribution of decays per channel other than the variant's (``tokens/distributions.py``).
    """
    B, T, H, K, V = (sizes[axis] for axis in "BTHKV")
    q, k, v = normal(random, B, T, H, K), normal(random, B, T, H, K), normal(random, B, T, H, V)
    drawn = {}
    if gates:
        drawn["g"] = channel_decays(gates, sizes, random)
    elif variant == "retention":
        drawn["g"] = torch.log1p(-torch.exp2(-5 - torch.arange(H, dtype=torch.float64, device=random.device)))
    elif variant == "simple_gla":  # Mamba-2 at initialisation: A in 1..16, dt from 0.001 to 0.1; v carries dt, g = -dt A
        A = 1 + 15 * uniform(random, H)
        middle = 10 ** (-3 + 2 * uniform(random, H))
        dt = F.softplus(middle.expm1().log() + normal(random, B, T, H))
        drawn["g"], v = -dt * A, v * dt[..., None]
    elif variant == "gla":
        drawn["g"] = F.logsigmoid(normal(random, B, T, H, K)) / 16
    elif variant in ("rwkv5", "rwkv6"):  # decays from slow to fast over the channels, as in trained models
        spread = torch.linspace(-6, 1, K, dtype=torch.float64, device=random.device).expand(H, K)
        drawn["g"] = -torch.exp(spread + 0.5 * normal(random, B, T, H, K)) if variant == "rwkv6" else -torch.exp(spread)
    if variant in ("rwkv5", "rwkv6"):
        drawn["u"] = normal(random, H, K)
    return {"q": q, "k": k, "v": v, **drawn}
