"""Chains of element-wise operations between matrix products: one Triton kernel per chain on a GPU, plain PyTorch elsewhere.

As single operations, such a chain reads and writes each activation up to ten times; a layer's matrix products do so once. The fused kernels
compute in float32 and round once. Both forms have the same gradients, of any order.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call.autocast import autocasting
from ..call.functions import applied
from ..call.recompute import again
from .activations import sigmoid
from .as_written import altered
from .chains import Chain, ChainForm, launches, plain
from .examples import Draw, examples
from .linear import Linear, as_products, linear, map_after, product_dtype
from .norms import RMSNorm, rms_norm
from .triton import launching, refusal


def add_norm(
    x: Tensor, y: Tensor | None, norm: nn.Module, *, in_float32: bool = False, rounded: bool = True, halvings: int = 0
) -> tuple[Tensor, Tensor]:
    """The sum of x and y [B,T,C], or x without y, and its norm. Norms of other classes or with hooks run as modules.

    in_float32 : bool
        The sum is float32, whatever the dtype of the norm.
    rounded : bool
        Under autocast, a kernel returns the norm in autocast's dtype, to which linear maps would round it. False: in the weight's dtype.
    halvings : int
        How many times x and y were divided by 2. The norm is that of the undivided sum, except for eps of norms that run as modules.
    """
    return ADD_NORM(_AddNorm(x, y, norm, norm_of(norm, halvings), in_float32, rounded, halvings))


class _AddNorm(NamedTuple):
    """The arguments of ``add_norm``."""

    x: Tensor
    y: Tensor | None
    norm: nn.Module
    parts: NormParts | str
    """Of the norm, or why it must run as a module."""
    in_float32: bool
    rounded: bool
    halvings: int


def _refuses_add_norm(c: _AddNorm) -> str | None:
    x, y, parts = c.x, c.y, c.parts
    if isinstance(parts, str):
        return f"the norm {parts}"
    most = 2**13 if torch.is_grad_enabled() else 2**14
    if x.shape[-1] > most:
        return f"it takes at most {most} channels, got {x.shape[-1]}"
    why = refusal(x, y, parts.weight, parts.bias)
    if why is None and not (c.in_float32 or autocasting(x.device.type)):
        others = [one.dtype for one in (y, parts.weight, parts.bias) if one is not None and one.dtype != x.dtype]
        return f"tokens are {x.dtype}, another tensor is {others[0]}" if others else None
    return why


def _add_norm_by_kernel(c: _AddNorm) -> tuple[Tensor, Tensor]:
    assert not isinstance(c.parts, str)
    (weight, bias, eps, centre), x, kind = c.parts, c.x, c.x.device.type
    launch, dtype = launching("launch"), torch.get_autocast_dtype(kind) if c.rounded and autocasting(kind) else weight.dtype
    given = x.contiguous(), None if c.y is None else c.y.contiguous()
    options = eps, centre, dtype
    if torch.is_grad_enabled():
        formula = partial(norm_formula, eps=eps, centre=centre, dtype=dtype)
        total, normed = applied(launch.AddNorm, *given, weight, bias, *options, formula)
        again(normed, lambda total, *given: launch.add_norm(total, None, *given, *options)[1], total, weight, bias)
    else:
        total, normed = launch.add_norm(*given, weight, bias, *options)
    return total, normed


def _add_norm_by_modules(c: _AddNorm) -> tuple[Tensor, Tensor]:
    total = c.x if c.y is None else c.x + c.y
    given = total.to(next(chain(c.norm.parameters(), c.norm.buffers()), total).dtype) if c.in_float32 else total
    if isinstance(c.parts, str):
        return total, c.norm(given)
    weight, bias, eps, centre = c.parts
    normed = _norm_as_written(given, weight, bias, eps=eps, centre=centre) if c.halvings else c.norm(given)
    # in the backward pass the module may have other parameters, for example after torch.func.functional_call
    return total, again(normed, partial(_norm_as_written, eps=eps, centre=centre), given, weight, bias)


def _draw_add_norm(draw: Draw, centre: bool = True, added: bool = True) -> _AddNorm:
    C = draw.size(72, 2048)
    norm = draw.module("norm", nn.LayerNorm(C) if centre else RMSNorm(C, 1e-5))
    x, y = draw("x", 1, 19, C), draw("y", 1, 19, C) if added else None
    return _AddNorm(x, y, norm, norm_of(norm), False, True, 0)


ADD_NORM: Chain[_AddNorm, tuple[Tensor, Tensor]] = Chain(
    "add_norm",
    ChainForm(
        "add_norm", _add_norm_by_kernel, _refuses_add_norm, launches("penstock_add_norm", backward=("penstock_add_norm_bwd",)),
        (
            *examples(_draw_add_norm), *examples(partial(_draw_add_norm, centre=False)),
            *examples(partial(_draw_add_norm, added=False), gradients=False),
        ),
    ),
    plain("modules", _add_norm_by_modules),
)  # fmt: skip


def _norm_as_written(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, centre: bool) -> Tensor:
    """The norm, bitwise equal to ``nn.LayerNorm`` and ``RMSNorm``."""
    if centre:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return rms_norm(x, weight, weight.shape, eps)


def norm_formula(
    total: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, centre: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """``add_norm`` of the sum, with the norm rounded to ``dtype``."""
    wide = torch.promote_types(total.dtype, weight.dtype)
    x, (scale, offset) = total.to(wide), (None if one is None else one.to(wide) for one in (weight, bias))
    normed = F.layer_norm(x, weight.shape, scale, offset, eps) if centre else F.rms_norm(x, weight.shape, scale, eps)
    return total, normed if dtype is None else normed.to(dtype)


class NormParts(NamedTuple):
    """What kernels read of a norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centre: bool
    """True: layer norm. False: RMS norm."""


def norm_of(norm: nn.Module, halvings: int = 0) -> NormParts | str:
    """The contiguous weight and bias of a norm, and its epsilon; or why only the module can compute it.

    The epsilon is the one for an input that was divided by 2 ``halvings`` times.
    """
    why = altered(norm, nn.LayerNorm, RMSNorm)
    if why is not None:
        return why
    weight, bias, eps = norm.weight, getattr(norm, "bias", None), norm.eps
    if weight is None or eps is None:
        return "has no weight or no eps"
    shift = None if bias is None else bias.contiguous()
    return NormParts(weight.contiguous(), shift, eps * 0.25**halvings, isinstance(norm, nn.LayerNorm))  # type: ignore[operator, arg-type]


Activation = Literal["sigmoid", "silu", "relu_squared"]


def activated(a: Tensor, b: Tensor | None, activation: Activation, then: nn.Module | None = None) -> Tensor:
    """``activation(a) * b`` element by element, for "relu_squared" ``relu(a)**2`` without b; then, if given, a linear map.

    On a GPU with a plain linear map, the activation is recomputed in the backward pass, not saved. Exception: ``relu(a)**2`` is saved
    instead of a, because its square root is all that the backward pass needs of a. In float16, small squares are 0.
    """
    return ACTIVATED(_Activated(a, b, activation, then, *((None, "no linear map follows") if then is None else map_after(then))))


class _Activated(NamedTuple):
    """The arguments of ``activated``."""

    a: Tensor
    b: Tensor | None
    activation: Activation
    then: Any
    weight: Tensor | None
    """The weight of ``then``, if a kernel may recompute its input."""
    apart: str | None
    """Why not."""


def _refuses_activated(c: _Activated) -> str | None:
    a, b, weight = c.a, c.b, c.weight
    if (why := refusal(a, b, weight)) is not None:
        return why
    if b is not None and (a.shape != b.shape or a.dtype != b.dtype):
        return "both factors must have one shape and dtype"
    if weight is not None and product_dtype(weight) != a.dtype:
        return f"the linear map after it has weights of {weight.dtype}, its input is {a.dtype}"
    return None


def _saved(c: _Activated) -> bool:
    """Whether the result is saved, not the input."""
    return c.b is None and c.a.dtype != torch.float16


def _refuses_activated_linear(c: _Activated) -> str | None:
    if c.weight is None:
        return c.apart
    return "relu(a)^2 is stored in place of a" if _saved(c) else _refuses_activated(c)


def _activated_linear(c: _Activated) -> Tensor:
    assert c.weight is not None
    a, b = c.a.contiguous(), None if c.b is None else c.b.contiguous()
    (weight,) = as_products(c.weight)
    formula = partial(activated_formula, activation=c.activation)
    found: Tensor = applied(launching("launch").ActivatedLinear, a, b, weight, c.activation, formula)
    return found


def _activated(c: _Activated) -> Tensor:
    launch, a, b = launching("launch"), c.a.contiguous(), None if c.b is None else c.b.contiguous()
    formula = partial(activated_formula, activation=c.activation)
    y: Tensor = applied(launch.ReluSquared, a) if _saved(c) else applied(launch.Activated, a, b, c.activation, formula)
    if c.weight is not None:
        return linear(y, *as_products(c.weight))
    y = y if c.then is None else c.then(y)
    return y


def _activated_by_formula(c: _Activated) -> Tensor:
    y = activated_formula(c.a, c.b, c.weight, activation=c.activation)
    return y if c.then is None or c.weight is not None else c.then(y)


def _activated_kernels(c: _Activated) -> tuple[str, ...]:
    name = "penstock_relu_squared" if c.b is None else "penstock_gated"
    return launches(f"{name}_fwd", backward=(f"{name}_bwd",))(c)


def _draw_activated(draw: Draw, activation: Activation = "silu") -> _Activated:
    C = draw.size(72, 5632)
    a, b = draw("a", 1, 19, C), None if activation == "relu_squared" else draw("b", 1, 19, C)
    then = draw.module("then", Linear(C, 40, bias=False), 0.1)
    return _Activated(a, b, activation, then, *map_after(then))


_GATED_EXAMPLES = *examples(_draw_activated), *examples(partial(_draw_activated, activation="sigmoid"))
_SQUARED = partial(_draw_activated, activation="relu_squared")
ACTIVATED: Chain[_Activated, Tensor] = Chain(
    "activated",
    ChainForm(
        "activated_linear", _activated_linear, _refuses_activated_linear, _activated_kernels,
        (*_GATED_EXAMPLES, *examples(_SQUARED, torch.float16)),
    ),
    ChainForm(
        "activated", _activated, _refuses_activated, _activated_kernels,
        (*_GATED_EXAMPLES, *examples(_SQUARED), *examples(_draw_activated, gradients=False)),
    ),
    plain("formula", _activated_by_formula),
)  # fmt: skip


def activated_formula(a: Tensor, b: Tensor | None, weight: Tensor | None = None, *, activation: Activation) -> Tensor:
    """``activated``."""
    if b is None:
        y = torch.relu(a).square()
    else:
        y = (sigmoid(a) if activation == "sigmoid" else F.silu(a)) * b
    return y if weight is None else linear(y, weight)
