"""Arguments of the variants with the distributions of real models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ..tokens.distributions import channel_decays, normal, uniform
from .declaration import unit
from .inputs import FASTEST
from .variants import VARIANTS


def draw(variant: str, sizes: Mapping[str, int], random: torch.Generator, gates: str = "") -> dict[str, Tensor]:
    """Float64 tensors by name: canonical ones, with keys of norm 1.

    ``gates``: a distribution of decays per channel other than the variant's (``tokens/distributions.py``).
    """
    B, T, H, K, V = (sizes[axis] for axis in "BTHKV")
    row = VARIANTS[variant]
    drawn = {"q": unit(normal(random, B, T, H, K)), "k": unit(normal(random, B, T, H, K)), "v": normal(random, B, T, H, V)}
    if gates:
        drawn["g"] = channel_decays(gates, sizes, random)
    elif row.raw == "sigmoid":  # RWKV-7: from slow to fast over the channels
        spread = torch.linspace(-6, 1, K, dtype=torch.float64, device=random.device)
        drawn["g"] = FASTEST * torch.sigmoid(spread + 0.5 * normal(random, B, T, H, K))
    elif row.decay:  # A in 1..16, dt from 0.001 to 0.1 as at initialisation
        shape = (H, K) if "K" in row.decay else (H,)
        rate = 1 + 15 * uniform(random, *shape[:1], *[1] * (len(shape) - 1))
        middle = 10 ** (-3 + 2 * uniform(random, *shape))
        drawn["g"] = -rate * F.softplus(middle.expm1().log() + normal(random, B, T, *shape))
    if row.streams == 1:
        drawn["beta"] = torch.sigmoid(normal(random, B, T, H))
    elif row.name == "rwkv7":
        kk = unit(normal(random, B, T, H, K))
        drawn |= {"q": normal(random, B, T, H, K), "a": -kk, "b": kk * uniform(random, B, T, H, K)}
    else:
        kk = unit(normal(random, B, T, H, K))
        drawn |= {"a": -kk, "b": kk * uniform(random, B, T, H, 1)}
    return drawn
