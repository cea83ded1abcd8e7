"""Arguments of the variants with the distributions of real models, and a token loop on them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ..tokens.decays import FASTEST
from ..tokens.distributions import BOUND, STRENGTHS, channel_decays, decays, normal, uniform
from ..tokens.sharing import repeated
from .declaration import unit
from .variants import VARIANTS

WITHIN = ("tiny", "slow", "bounded", "bound")
"""The strengths whose log decays are between the bound and 0."""


def draw(variant: str, sizes: Mapping[str, int], random: torch.Generator, gates: str = "") -> dict[str, Tensor]:
    """Float64 tensors by name: canonical ones, with keys of norm 1.

    ``gates``: a distribution of decays other than the variant's (``tokens/distributions.py``); then beta is uniform from 0 to 1.

    Logits of beta, and of decays between 0 and a bound, are bfloat16 numbers: kernels that take logits get the same call.
    """
    B, T, H, K, V = (sizes[axis] for axis in "BTHKV")
    G, row = sizes.get("G", H), VARIANTS[variant]
    size = [sizes[axis] for axis in row.decay]
    drawn = {"q": unit(normal(random, B, T, G, K)), "k": unit(normal(random, B, T, G, K)), "v": normal(random, B, T, H, V)}
    bound = FASTEST if row.raw == "sigmoid" else BOUND
    if gates in STRENGTHS and row.decay:
        drawn["g"] = decays(gates, size, random, bound)
    elif gates:
        drawn["g"] = channel_decays(gates, sizes, random)
    elif row.raw == "sigmoid":  # RWKV-7: from slow to fast over the channels
        spread = torch.linspace(-6, 1, K, dtype=torch.float64, device=random.device)
        drawn["g"] = FASTEST * torch.sigmoid(spread + 0.5 * normal(random, B, T, H, K))
    elif row.decay:  # A in 1..16, dt from 0.001 to 0.1 as at initialisation
        shape = (H, K) if "K" in row.decay else (H,)
        rate = 1 + 15 * uniform(random, *shape[:1], *[1] * (len(shape) - 1))
        middle = 10 ** (-3 + 2 * uniform(random, *shape))
        drawn["g"] = -rate * F.softplus(middle.expm1().log() + normal(random, B, T, *shape))
    if row.decay and (gates in WITHIN or (row.raw == "sigmoid" and not gates)):
        drawn["g"] = bound * _of_short_logits(drawn["g"] / bound)
    if row.streams == 1:
        drawn["beta"] = _of_short_logits(uniform(random, B, T, H) if gates else torch.sigmoid(normal(random, B, T, H)))
    elif row.name == "rwkv7":
        kk = unit(normal(random, B, T, H, K))
        drawn |= {"q": normal(random, B, T, H, K), "a": -kk, "b": kk * uniform(random, B, T, H, K)}
    else:
        kk = unit(normal(random, B, T, H, K))
        drawn |= {"a": -kk, "b": kk * uniform(random, B, T, H, 1)}
    return drawn


def _of_short_logits(x: Tensor) -> Tensor:
    """The nearest numbers whose logits are bfloat16 numbers."""
    return torch.sigmoid(torch.logit(x).bfloat16().to(x.dtype))


def token_loop(variant: str, x: Mapping[str, Tensor], scale: float, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output [B,T,H,V] and final state [B,H,K,V] in float32, token by token with products of single rows: the baseline of benchmarks."""
    row = VARIANTS[variant]
    H = x["v"].shape[2]
    q, k, v = (repeated(x[name].float(), H).unsqueeze(-2).unbind(1) for name in ("q", "k", "v"))  # [B, H, 1, *]
    gate = None if "g" not in x else (x["g"] if "K" in row.decay else x["g"][..., None]).float().exp()[..., None].unbind(1)  # [B, H, K, 1]
    S = q[0].new_zeros(*k[0].shape[:2], k[0].shape[3], v[0].shape[3]) if state is None else state
    outputs = []
    for t in range(len(q)):
        decayed = S if gate is None else gate[t] * S
        if row.streams == 1:
            S = decayed + k[t].mT @ (x["beta"][:, t, :, None, None].float() * (v[t] - k[t] @ decayed))
        else:
            a, b = (x[name][:, t, :, None].float() for name in ("a", "b"))
            S = decayed + b.mT @ (a @ S) + k[t].mT @ v[t]
        outputs.append((q[t] @ S).squeeze(2))
    return torch.stack(outputs, 1) * scale, S
