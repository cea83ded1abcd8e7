"""Chains of Mamba-2 against their formulas in float64, on a device: cases of the interpreter's tests and of a GPU's."""

import math

import torch
from torch import nn

from penstock.layers.linear import Linear
from penstock.layers.mamba2_chains import gated_norm, time_steps
from penstock.layers.norms import GroupedRMSNorm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LIMITS = [(0.0, math.inf), (0.3, 1.5)]
HEADS = [(4, 64), (3, 33), (24, 8), (1, 100), (17, 16)]
"""Heads and their channels."""
GROUPS = [(4, 64, 1), (4, 20, 2), (6, 33, 3), (24, 8, 1), (5, 1, 1), (8, 160, 4), (3, 8, 2)]
"""Heads, their channels, and groups; the last ones begin within a head."""
WIDE = [(80, 64, 1), (101, 64, 1)]
"""Groups in several blocks of channels."""


def normal(*shape, dtype=torch.float32, seed=0, device="cpu"):
    random = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=random, dtype=torch.float64).to(device, dtype)


def within(found, exact, dtype, times=3.0):
    """The norm of the error is within a few roundings."""
    assert found.shape == exact.shape
    apart = (found.double() - exact).norm().item()
    assert apart <= times * torch.finfo(dtype).eps * exact.norm().item() + 1e-30, apart / exact.norm().item()


def compare(ours, exact, tensors, dtype, terms=0):
    """Results and gradients of two functions of the same tensors, of which the second one gets float64.

    ``terms``: of the sums of the results, which torch computes in any order. One after another, the partial sums of n terms of random
    signs grow like sqrt(i), and the error of rounding one is eps / sqrt(12) of it (root mean square): eps sqrt(n / 24) of the sum.
    """
    near = [one.clone().requires_grad_() for one in tensors]
    far = [one.double().requires_grad_() for one in tensors]
    found, wanted = ours(*near), exact(*far)
    upstream = [normal(*y.shape, seed=n, device=y.device).to(y.dtype) for n, y in enumerate(found)]
    grads = torch.autograd.grad(found, near, upstream)
    exact_grads = torch.autograd.grad(wanted, far, [one.double() for one in upstream])
    for y, one in zip(found, wanted):
        within(y, one, dtype, 3 + (terms / 24) ** 0.5 * (dtype == torch.float32))
    for y, one in zip(grads, exact_grads):
        within(y, one, dtype)
    return found


def projected(B, T, H, V, K, dtype, device):
    """What ``in_proj`` and the convolution return: z, x B C and dt beside each other; x, B and C beside each other."""
    whole, mixed = normal(B, T, 2 * H * V + 2 * K + H, dtype=dtype, device=device), normal(B, T, H * V + 2 * K, dtype=dtype, device=device)
    return whole, mixed


def check_time_steps(sizes, limits, dtype, device, K=5):
    (B, T), (H, V) = (2, 7), sizes
    whole, mixed = projected(B, T, H, V, K, dtype, device)
    given = whole, mixed, normal(H, dtype=dtype, device=device), normal(H, dtype=dtype, seed=4, device=device)

    def ours(whole, mixed, dt_bias, A_log):
        g, v, x = time_steps(whole[..., -H:], dt_bias, A_log, mixed[..., : H * V].unflatten(-1, (H, V)), limits)
        assert g.dtype == torch.float32
        assert "TimeSteps" in g.grad_fn.name()
        return g, v, x.sin()

    def exact(whole, mixed, dt_bias, A_log):
        x = mixed[..., : H * V].unflatten(-1, (H, V))
        step = torch.log(1 + torch.exp(whole[..., -H:] + dt_bias)).clamp(*limits)
        return -torch.exp(A_log) * step, x * step[..., None], x.sin()

    compare(ours, exact, given, dtype)


def with_weight(module, weight):
    """The module with this tensor in place of its parameter, so that gradients reach it."""
    del module.weight
    module.weight = weight
    return module


def norm_of(weight, groups):
    return with_weight(GroupedRMSNorm(weight.numel(), groups, 1e-3), weight)


def linear_of(weight):
    return with_weight(Linear(*weight.shape[::-1], bias=False), weight)


def exact_gated_norm(o, x, D, z, weight, groups, eps=1e-3):
    """Token by token and group by group, as it is written."""
    u = (o + D[:, None] * x).flatten(-2) * z / (1 + torch.exp(-z))
    parts = [part / torch.sqrt((part * part).sum(-1, keepdim=True) / part.shape[-1] + eps) for part in u.chunk(groups, -1)]
    return torch.cat(parts, -1) * weight


def check_gated_norm(sizes, dtype, device, mapped, tokens=(2, 7), K=5):
    (B, T), (H, V, G) = tokens, sizes
    whole, mixed = projected(B, T, H, V, K, dtype, device)
    o = normal(B, T, 2 * H, V, dtype=dtype, seed=8, device=device)
    D, weight = normal(H, dtype=dtype, device=device), normal(H * V, dtype=dtype, device=device)
    after = normal(11, H * V, dtype=dtype, device=device) / (H * V) ** 0.5

    def ours(o, whole, mixed, D, weight, after):
        x = mixed[..., : H * V].unflatten(-1, (H, V))
        y = gated_norm(o[:, :, :H], x, D, whole[..., : H * V], norm_of(weight, G), linear_of(after) if mapped else nn.Identity())
        assert "GatedNorm" in y.grad_fn.name()
        return (y,) if mapped else (y, after * 1)

    def exact(o, whole, mixed, D, weight, after):
        y = exact_gated_norm(o[:, :, :H], mixed[..., : H * V].unflatten(-1, (H, V)), D, whole[..., : H * V], weight, G)
        return (y @ after.T,) if mapped else (y, after * 1)

    compare(ours, exact, (o, whole, mixed, D, weight, after), dtype, terms=H * V * mapped)


def layer_tensors(B, T, dtype=torch.float32, device="cpu"):
    """o, x, D, z, weight, dt, dt_bias, A_log of a layer with 3 heads of 8 channels, all as the layer has them."""
    whole, mixed = projected(B, T, 3, 8, 5, dtype, device)
    o, x = normal(B, T, 3, 8, dtype=dtype, device=device), mixed[..., :24].unflatten(-1, (3, 8))
    D, weight = normal(3, dtype=dtype, device=device), normal(24, dtype=dtype, device=device)
    dt_bias, A_log = (normal(3, seed=n, device=device) for n in (1, 2))
    return o, x, D, whole[..., :24], weight, whole[..., -3:], dt_bias, A_log


def check_nan(device):
    """A NaN stays its token's own. It is not clamped."""
    o, x, D, z, weight, dt, dt_bias, A_log = (one.clone() for one in layer_tensors(1, 5, device=device))
    z[0, 1, 3], dt[0, 2, 1], x[0, 4, 0, 0] = torch.nan, torch.nan, torch.nan
    inputs = [one.requires_grad_() for one in (o, x, z, dt)]
    g, v, same = time_steps(dt, dt_bias, A_log, x, (0.0, 1.0))
    y = gated_norm(o, same, D, z, norm_of(weight, 1), nn.Identity())
    assert g.isnan().nonzero().tolist() == [[0, 2, 1]]
    assert v.isnan().flatten(-2).any(-1).nonzero().tolist() == [[0, 2], [0, 4]]
    assert y.isnan().all(-1)[0].tolist() == [False, True, False, False, True]
    d_o, dx, dz, d_dt = torch.autograd.grad([y, g, v], inputs, [torch.ones_like(one) for one in (y, g, v)])
    for one, rows in ((d_o, [1, 4]), (dz, [1, 4]), (dx, [1, 2, 4]), (d_dt, [2, 4])):
        assert one.isnan().flatten(2).any(-1)[0].nonzero().flatten().tolist() == rows


def check_small_steps(device):
    """Each step is exact in proportion to itself: exp(x) of an x rounded to 24 bits, and 8 roundings."""
    dt = torch.linspace(-80, 40, 1000, device=device).view(1, 250, 4)
    zeros, x = torch.zeros(4, device=device), torch.ones(1, 250, 4, 2, device=device)
    g, v, _ = time_steps(dt, zeros, zeros, x, (0.0, math.inf))
    exact = torch.log1p(torch.exp(dt.double()))
    for found in (-g, v[..., 0], v[..., 1]):
        assert ((found - exact).abs() <= (dt.abs() + 8) * 2.0**-24 * exact).all()
