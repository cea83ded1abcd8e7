"""Chains of element-wise operations of Mamba-2 before and after its recurrence: one Triton kernel per chain on a GPU, as in ``fused``."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call.recompute import again
from ..recurrence.declaration import state_dtype
from .as_written import altered
from .linear import as_products, linear, plain_weights
from .norms import GroupedRMSNorm, grouped_rms_norm
from .triton import kernels


def time_steps(
    dt: Tensor, dt_bias: Tensor, A_log: Tensor, x: Tensor, limits: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    r"""The log decay and the values of the recurrence.

    .. math:: step = clamp(softplus(dt + dt\_bias)), \qquad g = -\exp(A\_log) \, step, \qquad v = x \, step

    dt : Tensor [B,T,H]
    dt_bias, A_log : Tensor [H]
    x : Tensor [B,T,H,V]
    limits : (float, float)
        The range of the steps.

    Returns g [B,T,H], float32 (float64 for float64 dt), v [B,T,H,V], and x for its other uses: the backward kernel adds their gradient to
    that of x.
    """
    low, high = map(float, limits)
    formula = partial(time_steps_formula, limits=(low, high))
    fits = dt_bias.shape == A_log.shape == dt.shape[-1:] and x.shape[-1] <= 2048
    launch = kernels("mamba2_launch", dt, dt_bias, A_log, x) if fits else None
    if launch is None or dt.dtype != x.dtype:
        return again(formula(dt, dt_bias, A_log, x), formula, dt, dt_bias, A_log, x)
    given = _rows(dt), dt_bias.contiguous(), A_log.contiguous(), _rows(x)

    def function(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = launch.TimeSteps.apply(*given, low, high, formula)
        return found

    g, v, same = again(function(*given), function, *given)
    return g.view(dt.shape), v.view(x.shape), same.view(x.shape)


def time_steps_formula(
    dt: Tensor, dt_bias: Tensor, A_log: Tensor, x: Tensor, *, limits: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``time_steps``. The two axes of tokens may be merged."""
    dtype = state_dtype(dt.dtype)
    steps = F.softplus(dt.to(dtype) + dt_bias.to(dtype)).clamp(*limits)
    return -torch.exp(A_log.to(dtype)) * steps, x * steps[..., None].to(x.dtype), x


def gated_norm(o: Tensor, x: Tensor, D: Tensor, z: Tensor, norm: nn.Module, then: nn.Module) -> Tensor:
    r"""The output of the recurrence with its skip connection, gated and normed by groups of channels; then a linear map.

    .. math:: y = W_{then} \, norm((o + D x) \cdot silu(z)) \cdot weight

    On a GPU, the input of a plain linear map is recomputed in the backward pass, not saved. Norms of other classes than
    ``GroupedRMSNorm`` or with hooks run as modules.

    o, x : Tensor [B,T,H,V]
    D : Tensor [H]
    z : Tensor [B,T,H*V]
    norm : nn.Module
        Maps o + D x [B,T,H*V] and z to the same shape.
    then : nn.Module
    """
    y: Tensor
    if isinstance(norm, GroupedRMSNorm) and not altered(norm, GroupedRMSNorm):
        groups, eps, weight = norm.groups, norm.eps, norm.weight
        weights = plain_weights([then]) if torch.is_grad_enabled() else None
        fits = z.shape[-1:] == weight.shape and D.shape == x.shape[2:3] and z.shape[-1] % groups == 0 and z.shape[-1] <= 8192 * groups
        launch = kernels("mamba2_launch", o, x, D, z, weight, *weights or ()) if fits else None
        if launch is not None and o.dtype == x.dtype == z.dtype:
            after = next((one for one in as_products(*weights or ()) if one.dtype == x.dtype), None)
            rows = _rows(o), _rows(x), D.contiguous(), _rows(z), weight.contiguous()
            y = launch.GatedNorm.apply(*rows, after, groups, eps, partial(gated_norm_formula, groups=groups, eps=eps))
            y = y.view(*z.shape[:-1], y.shape[-1])
            return y if after is not None else then(y)
    y = then(norm(_skipped(o, x, D).flatten(-2), z))
    return y


def gated_norm_formula(
    o: Tensor, x: Tensor, D: Tensor, z: Tensor, weight: Tensor, then: Tensor | None = None, *, groups: int, eps: float
) -> Tensor:
    """``gated_norm`` of o and x [R,H,V] and z [R,H*V]; ``then`` is the weight of the linear map."""
    y = grouped_rms_norm(_skipped(o, x, D).flatten(-2), z, weight, groups, eps)
    return y if then is None else linear(y, then)


def _skipped(o: Tensor, x: Tensor, D: Tensor) -> Tensor:
    return torch.addcmul(o, x, D.to(x.dtype)[:, None])


def _rows(x: Tensor) -> Tensor:
    """Tokens [B,T,...] as [B*T,...]. They are copied unless they are evenly spaced and the channels of a token are contiguous."""
    rows = x.squeeze(0) if x.shape[0] == 1 else x.flatten(0, 1)  # squeeze keeps the stride of tokens if there is one
    return rows if rows.stride(-1) == 1 and (rows.dim() == 2 or rows.stride(1) == rows.shape[2]) else rows.contiguous()
