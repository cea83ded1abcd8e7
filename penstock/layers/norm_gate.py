"""The output of a recurrence: the norm of each head times a gate, then a linear map. One Triton kernel on a GPU, plain PyTorch elsewhere.

As in ``fused``: the kernels compute in float32 and round once, and both forms have the same gradients, of any order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call.functions import applied
from .activations import sigmoid
from .as_written import altered
from .chains import Chain, ChainForm, launches, plain
from .examples import Draw, examples
from .fused import activated
from .linear import Linear, as_products, linear, map_after, product_dtype
from .norms import RMSNorm, refuses_group_norm
from .triton import launching, refusal

Gate = Literal["silu", "sigmoid", "identity"]
GATES: dict[Gate, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": sigmoid, "identity": lambda x: x}


class Added(NamedTuple):
    """What is added to the norm."""

    share: Tensor
    """[B,T,H], float32 (float64 for float64 x)"""
    values: Tensor
    """[B,T,H,V]"""


def norm_gate(
    x: Tensor, gate: Tensor, norm: nn.Module, then: nn.Module, *, grouped: bool, activation: Gate = "silu", added: Added | None = None
) -> Tensor:  # fmt: skip
    r"""The norm of each head, times a gate; then a linear map.

    .. math:: y = W_{then} ((norm(x) [+ share \cdot values]) \cdot activation(gate))

    On a GPU, the input of a plain linear map is recomputed in the backward pass, not saved. Norms of other classes or with hooks run as
    modules.

    x : Tensor [B,T,H,V]
    gate : Tensor [B,T,H*V]
    norm : nn.GroupNorm or RMSNorm
    grouped : bool
        True: the norm is a group norm, which takes [B*T,H*V]. False: it takes [B,T,H,V].
    activation : "silu", "sigmoid" or "identity"
    added : Added, optional

    Returns the result of the linear map for a Tensor [B,T,H*V] in the dtype of the gate. The norm may have parameters of another dtype, for
    example float32 in layers of bfloat16.
    """
    weight, bias, eps = (getattr(norm, name, None) for name in ("weight", "bias", "eps"))
    why = refuses_group_norm(norm, x.shape[2]) if grouped else altered(norm, RMSNorm)  # type: ignore[arg-type]
    if why is None and eps is None:
        why = "has no eps"
    return NORM_GATE(_NormGate(x, gate, norm, then, grouped, activation, added, weight, bias, eps, why, *map_after(then)))


class _NormGate(NamedTuple):
    """The arguments of ``norm_gate``."""

    x: Tensor
    gate: Tensor
    norm: nn.Module
    then: Any
    grouped: bool
    activation: Gate
    added: Added | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float | None
    altered: str | None
    """Why the norm must run as a module, or None."""
    after: Tensor | None
    """The weight of ``then``, if a kernel may recompute its input."""
    apart: str | None
    """Why not."""


def _refuses(c: _NormGate) -> str | None:
    if c.altered is not None:
        return f"the norm {c.altered}"
    if c.x.shape[3] > 2048:
        return f"it takes heads of at most 2048 channels, got {c.x.shape[3]}"
    return refusal(c.x, c.gate, c.weight, c.bias, *(c.added or ()), c.after)


def _refuses_linear(c: _NormGate) -> str | None:
    if c.after is None:
        return c.apart
    if product_dtype(c.after) != c.x.dtype:
        return f"the linear map after it has weights of {c.after.dtype}, heads are {c.x.dtype}"
    return _refuses(c)


def _tensors(c: _NormGate) -> list[Tensor | None]:
    """X and gate [B*T,H,V], weight and bias [H,V] or [V], share [B*T,H] and values [B*T,H,V]."""
    B, T, H, V = c.x.shape
    flat, gates = c.x.flatten(0, 1), c.gate.reshape(B * T, H, V)
    per_head = [None if one is None else one.reshape((V,) if one.numel() == V else (H, V)).contiguous() for one in (c.weight, c.bias)]
    more = (None, None) if c.added is None else (c.added.share.flatten(0, 1), c.added.values.flatten(0, 1))
    return [flat, gates, *per_head, *more]


def _by_kernel(c: _NormGate, then: Tensor | None = None) -> Tensor:
    assert c.eps is not None
    launch, formula = launching("norm_gate_launch"), partial(norm_gate_formula, eps=c.eps, centre=c.grouped, activation=c.activation)
    norm, more = launch.Norm(c.eps, c.grouped, c.activation), c.added or (None, None)
    found: Tensor = applied(launch.NormGate, c.x, c.gate, c.weight, c.bias, *more, then, norm, formula)
    return found


def _linear(c: _NormGate) -> Tensor:
    assert c.after is not None
    return _by_kernel(c, *as_products(c.after))


def _apart(c: _NormGate) -> Tensor:
    y: Tensor = c.then(_by_kernel(c))
    return y


def _by_formula(c: _NormGate) -> Tensor:
    assert c.eps is not None
    B, T, H, V = c.x.shape
    options = {"eps": c.eps, "centre": c.grouped, "activation": c.activation}
    y: Tensor = c.then(norm_gate_formula(*_tensors(c), **options).view(B, T, H * V))  # type: ignore[arg-type]
    return y


def _by_modules(c: _NormGate) -> Tensor:
    normed = norm_of_heads(c.x, c.norm, grouped=c.grouped)
    if c.added is None and c.activation != "identity":
        return activated(c.gate, normed, c.activation, c.then)
    y: Tensor = c.then(_gated(normed.view(c.x.shape), c.gate.view(c.x.shape), c.added, c.activation).flatten(-2))
    return y


_KERNELS = launches("penstock_norm_gate_fwd", backward=("penstock_norm_gate_bwd",))


def _draw(draw: Draw, grouped: bool = True, activation: Gate = "silu", added: bool = False) -> _NormGate:
    H, V = draw.size(3, 32), draw.size(24, 64)
    norm = draw.module("norm", nn.GroupNorm(H, H * V, 1e-5) if grouped else RMSNorm(V, 1e-5))
    then = draw.module("then", Linear(H * V, 40, bias=False), 0.1)
    parts = norm.weight, getattr(norm, "bias", None), norm.eps, None
    x, gate = draw("x", 1, 19, H, V), draw("gate", 1, 19, H * V)
    more = Added(draw("share", 1, 19, H, wide=True), draw("values", 1, 19, H, V)) if added else None
    return _NormGate(x, gate, norm, then, grouped, activation, more, *parts, *map_after(then))


_EXAMPLES = (
    *examples(_draw),
    *examples(partial(_draw, grouped=False)),
    *examples(partial(_draw, grouped=False, activation="sigmoid")),
    *examples(partial(_draw, activation="identity", added=True)),
)
NORM_GATE: Chain[_NormGate, Tensor] = Chain(
    "norm_gate",
    ChainForm("norm_gate_linear", _linear, _refuses_linear, _KERNELS, _EXAMPLES),
    ChainForm("norm_gate", _apart, _refuses, _KERNELS, (*_EXAMPLES, *examples(_draw, gradients=False))),
    plain("formula", _by_formula, lambda c: None if c.altered is None else f"the norm {c.altered}", _EXAMPLES),
    plain("modules", _by_modules),
    formula=_by_formula,
)


def norm_of_heads(x: Tensor, norm: nn.Module, *, grouped: bool) -> Tensor:
    """The norm of heads x [B,T,H,V] by its module, [B,T,H*V], in the dtype of x. It is computed in that of its weight."""
    B, T, H, V = x.shape
    weight = getattr(norm, "weight", None)
    given = x if weight is None else x.to(weight.dtype)
    if grouped and not altered(norm, nn.GroupNorm):  # its forward refuses heads of one value
        normed = torch.group_norm(given.reshape(B * T, H * V), norm.num_groups, weight, norm.bias, norm.eps)  # type: ignore[arg-type]
    else:
        normed = norm(given.reshape(B * T, H * V) if grouped else given)
    return normed.view(B, T, H * V).to(x.dtype)


def norm_gate_formula(
    x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, share: Tensor | None = None, values: Tensor | None = None,
    then: Tensor | None = None, *, eps: float, centre: bool, activation: Gate = "silu",
) -> Tensor:  # fmt: skip
    """``norm_gate`` of x, gate and values [R,H,V] and share [R,H].

    ``then`` is the weight of a linear map of all heads.
    """
    R, H, V = x.shape
    if centre and weight is not None and bias is not None:
        # F.group_norm refuses heads of one value
        normed = torch.group_norm(x.reshape(R, H * V).to(weight.dtype), H, weight.reshape(-1), bias.reshape(-1), eps).view(x.shape)
    else:
        normed = F.rms_norm(x if weight is None else x.to(weight.dtype), (V,), weight, eps)
    y = _gated(normed, gate, None if share is None or values is None else Added(share, values), activation)
    return y if then is None else linear(y.flatten(1), then)


def _gated(normed: Tensor, gate: Tensor, added: Added | None, activation: Gate) -> Tensor:
    """The gated norm, in the dtype of the gate."""
    total = normed if added is None else normed + added.share[..., None] * added.values
    return (total * GATES[activation](gate)).to(gate.dtype)
