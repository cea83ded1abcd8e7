"""Chains of element-wise operations of Mamba-2 before and after its recurrence: one Triton kernel per chain on a GPU, as in ``fused``."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call.functions import applied
from ..call.recompute import again
from ..tokens.decays import LARGEST
from ..tokens.dtypes import state_dtype
from .as_written import altered
from .chains import Chain, ChainForm, launches, plain
from .examples import Draw, examples
from .linear import Linear, as_products, linear, map_after, product_dtype
from .norms import GroupedRMSNorm, grouped_rms_norm
from .triton import launching, refusal


def time_steps(
    dt: Tensor, dt_bias: Tensor, A_log: Tensor, x: Tensor, limits: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    r"""The log decay and the values of the recurrence.

    .. math:: step = clamp(softplus(dt + dt\_bias)), \qquad g = -\exp(A\_log) \, step, \qquad v = x \, step

    dt : Tensor [B,T,H]
    dt_bias, A_log : Tensor [H]
        A_log above 60 counts as 60.
    x : Tensor [B,T,H,V]
    limits : (float, float)
        The range of the steps.

    Returns g [B,T,H], float32 (float64 for float64 dt), v [B,T,H,V], and x for its other uses: the backward kernel adds their gradient to
    that of x.
    """
    low, high = map(float, limits)
    return TIME_STEPS(_TimeSteps(dt, dt_bias, A_log, x, (low, high)))


class _TimeSteps(NamedTuple):
    """The arguments of ``time_steps``."""

    dt: Tensor
    dt_bias: Tensor
    A_log: Tensor
    x: Tensor
    limits: tuple[float, float]


def _refuses_time_steps(c: _TimeSteps) -> str | None:
    if not c.dt_bias.shape == c.A_log.shape == c.dt.shape[-1:]:
        return "dt_bias and A_log must have one element per head"
    if c.x.shape[-1] > 2048:
        return f"it takes heads of at most 2048 channels, got {c.x.shape[-1]}"
    return refusal(*c[:4]) or (None if c.dt.dtype == c.x.dtype else f"dt is {c.dt.dtype}, x is {c.x.dtype}")


def _time_steps_by_kernel(c: _TimeSteps) -> tuple[Tensor, Tensor, Tensor]:
    kernel, options = launching("mamba2_launch").TimeSteps, (*c.limits, partial(time_steps_formula, limits=c.limits))
    given = c.dt, c.dt_bias.contiguous(), c.A_log.contiguous(), c.x

    def function(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = applied(kernel, *given, *options)
        return found

    return again(function(*given), function, *given)


def _time_steps_by_formula(c: _TimeSteps) -> tuple[Tensor, Tensor, Tensor]:
    formula = partial(time_steps_formula, limits=c.limits)
    return again(formula(*c[:4]), formula, *c[:4])


def _draw_time_steps(draw: Draw) -> _TimeSteps:
    H, V = draw.size(3, 64), draw.size(20, 64)
    return _TimeSteps(draw("dt", 1, 19, H), draw("dt_bias", H), draw("A_log", H), draw("x", 1, 19, H, V), (0.01, 2.0))


TIME_STEPS: Chain[_TimeSteps, tuple[Tensor, Tensor, Tensor]] = Chain(
    "time_steps",
    ChainForm(
        "time_steps", _time_steps_by_kernel, _refuses_time_steps,
        launches("penstock_time_steps_fwd", backward=("penstock_time_steps_bwd",)), examples(_draw_time_steps),
    ),
    plain("formula", _time_steps_by_formula),
)  # fmt: skip


def time_steps_formula(
    dt: Tensor, dt_bias: Tensor, A_log: Tensor, x: Tensor, *, limits: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``time_steps``. The two axes of tokens may be merged."""
    dtype = state_dtype(dt.dtype)
    steps = F.softplus(dt.to(dtype) + dt_bias.to(dtype)).clamp(*limits)
    return -torch.exp(A_log.to(dtype).clamp(max=LARGEST)) * steps, x * steps[..., None].to(x.dtype), x


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
    return GATED_NORM(_GatedNorm(o, x, D, z, norm, then, *map_after(then)))


class _GatedNorm(NamedTuple):
    """The arguments of ``gated_norm``."""

    o: Tensor
    x: Tensor
    D: Tensor
    z: Tensor
    norm: Any
    then: Any
    after: Tensor | None
    """The weight of ``then``, if a kernel may recompute its input."""
    apart: str | None
    """Why not."""


def _refuses_gated_norm(c: _GatedNorm) -> str | None:
    o, x, D, z, norm = c[:5]
    if (why := altered(norm, GroupedRMSNorm)) is not None:
        return f"the norm {why}"
    if z.shape[-1:] != norm.weight.shape or D.shape != x.shape[2:3] or z.shape[-1] % norm.groups:
        return "the sizes of D, the norm and its groups must be those of the heads"
    if z.shape[-1] > 8192 * norm.groups:
        return f"it takes groups of at most 8192 channels, got {z.shape[-1] // norm.groups}"
    if (why := refusal(o, x, D, z, norm.weight, c.after)) is not None:
        return why
    return None if o.dtype == x.dtype == z.dtype else f"o is {o.dtype}, x {x.dtype}, z {z.dtype}"


def _refuses_gated_norm_linear(c: _GatedNorm) -> str | None:
    if c.after is None:
        return c.apart
    if product_dtype(c.after) != c.x.dtype:
        return f"the linear map after it has weights of {c.after.dtype}, heads are {c.x.dtype}"
    return _refuses_gated_norm(c)


def _gated_norm_by_kernel(c: _GatedNorm, after: Tensor | None = None) -> Tensor:
    norm, groups, eps = c.norm, c.norm.groups, c.norm.eps
    given, formula = (c.o, c.x, c.D.contiguous(), c.z, norm.weight.contiguous()), partial(gated_norm_formula, groups=groups, eps=eps)
    y: Tensor = applied(launching("mamba2_launch").GatedNorm, *given, after, groups, eps, formula)
    return y


def _gated_norm_linear(c: _GatedNorm) -> Tensor:
    assert c.after is not None
    return _gated_norm_by_kernel(c, *as_products(c.after))


def _gated_norm_by_modules(c: _GatedNorm) -> Tensor:
    y: Tensor = c.then(c.norm(_skipped(c.o, c.x, c.D).flatten(-2), c.z))
    return y


_GATED_NORM_KERNELS = launches("penstock_gated_norm_fwd", backward=("penstock_gated_norm_bwd",))


def _draw_gated_norm(draw: Draw) -> _GatedNorm:
    H, V, groups = draw.size(4, 64), draw.size(24, 64), draw.size(2, 1)
    o, x, z = draw("o", 1, 19, H, V), draw("x", 1, 19, H, V), draw("z", 1, 19, H * V)
    norm = draw.module("norm", GroupedRMSNorm(H * V, groups, 1e-5))
    then = draw.module("then", Linear(H * V, 40, bias=False), 0.1)
    return _GatedNorm(o, x, draw("D", H), z, norm, then, *map_after(then))


GATED_NORM: Chain[_GatedNorm, Tensor] = Chain(
    "gated_norm",
    ChainForm(
        "gated_norm_linear", _gated_norm_linear, _refuses_gated_norm_linear, _GATED_NORM_KERNELS, examples(_draw_gated_norm)
    ),
    ChainForm(
        "gated_norm", lambda c: c.then(_gated_norm_by_kernel(c)), _refuses_gated_norm, _GATED_NORM_KERNELS,
        (*examples(_draw_gated_norm), *examples(_draw_gated_norm, gradients=False)),
    ),
    plain("modules", _gated_norm_by_modules),
)  # fmt: skip


def gated_norm_formula(
    o: Tensor, x: Tensor, D: Tensor, z: Tensor, weight: Tensor, then: Tensor | None = None, *, groups: int, eps: float
) -> Tensor:
    """``gated_norm`` of o and x [R,H,V] and z [R,H*V]; ``then`` is the weight of the linear map."""
    y = grouped_rms_norm(_skipped(o, x, D).flatten(-2), z, weight, groups, eps)
    return y if then is None else linear(y, then)


def _skipped(o: Tensor, x: Tensor, D: Tensor) -> Tensor:
    return torch.addcmul(o, x, D.to(x.dtype)[:, None])
