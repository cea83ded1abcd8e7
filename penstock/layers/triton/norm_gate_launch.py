"""Norms of heads times a gate: the launches of their kernels, and the autograd function."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu.launch import on_device_of
from ...gpu.target import power
from . import gates
from . import norm_gate as kernels
from .launch import Formula, Tensors, blocks, by_formula, by_torch, early, limit, shaped, shares, summed

ACTIVATIONS = {"silu": gates.SILU.value, "sigmoid": gates.SIGMOID.value, "identity": gates.IDENTITY.value}


class Norm(NamedTuple):
    """The kind of a norm of heads, and of the gate."""

    eps: float
    centre: bool
    """True: layer norm. False: RMS norm."""
    activation: str
    """Of the gate."""


class Given(NamedTuple):
    """The tensors of a call."""

    x: Tensor
    """[R,H,V], as the gate and the values"""
    gate: Tensor
    weight: Tensor | None
    """[H,V] or [V], as the bias"""
    bias: Tensor | None
    share: Tensor | None
    """[R,H] float32"""
    values: Tensor | None

    @property
    def pointers(self) -> list[Tensor]:
        """The tensors, with x in place of missing ones."""
        return [self.x if one is None else one for one in self]

    @property
    def sizes(self) -> list[int]:
        """R, H, V, and the stride of the weights between heads. 0: all heads share them."""
        weight = self.weight
        return [*self.x.shape, 0 if weight is None or weight.dim() == 1 else weight.shape[1]]

    def constants(self, norm: Norm, elements: int) -> dict[str, Any]:
        """Constants of a kernel for this number of elements per block."""
        BV = power(self.x.shape[2], 16)
        found = {"CENTRE": norm.centre, "AFFINE": self.weight is not None, "BIAS": self.bias is not None, "ADD": self.share is not None}
        return {**found, "ACTIVATION": ACTIVATIONS[norm.activation], "BR": max(1, elements // BV), "BV": BV}


def norm_gate(c: Given, norm: Norm) -> Tensor:
    """(norm(x) + share values) activation(gate)."""
    x, y, constants = c.x, torch.empty_like(c.x), c.constants(norm, 4096)
    if x.numel():
        pdl = early(x.device)
        on_device_of(x, kernels.penstock_norm_gate_fwd)[blocks(x.shape[0], constants["BR"]), x.shape[1]](
            *c.pointers, y, *c.sizes, norm.eps, **constants, PDL=bool(pdl), num_warps=4, **pdl
        )
    return y


def _backward(c: Given, norm: Norm, dy: Tensor, *, again: bool) -> tuple[Tensors, Tensor]:
    """Gradients of the tensors and, with ``again``, the result of ``norm_gate``."""
    x, gate, weight, bias, share, values = c
    (R, H, V), constants = x.shape, c.constants(norm, 4096 // x.element_size())
    programs, each = shares(blocks(R, constants["BR"]), H)
    dx, dgate, y = torch.empty_like(x), torch.empty_like(gate), torch.empty_like(x) if again else x
    dshare, dvalues = (None if one is None else torch.empty_like(one) for one in (share, values))
    learned = [one for one in (weight, bias) if one is not None]
    parts = x.new_empty(len(learned), programs, H, V, dtype=torch.float32)
    if x.numel():
        more = [x if one is None else one for one in (dshare, dvalues)] + ([parts, parts[-1]] if learned else [x, x])
        on_device_of(x, kernels.penstock_norm_gate_bwd)[programs, H](
            *c.pointers, dy.contiguous(), dx, dgate, *more, y, *c.sizes, norm.eps, each, **constants, AGAIN=again, num_warps=4,
            **limit(x, 128),
        )  # fmt: skip
    parts = parts.sum(2) if weight is not None and weight.dim() == 1 else parts
    dweight, dbias = (*(summed(parts, *learned, programs=1) if learned else ()), None, None)[:2]
    return (dx, dgate, dweight, dbias, dshare, dvalues), y


def _given(
    x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, share: Tensor | None, values: Tensor | None
) -> Given:  # fmt: skip
    """The arguments of ``NormGate`` as rows."""
    H, V = x.shape[-2:]
    rows, head = (-1, H, V), (V,) if weight is not None and weight.numel() == V else (H, V)
    tokens = (None if one is None else shaped(one, rows) for one in (x, gate, values))
    x, gate, values = tokens  # type: ignore[assignment]
    return Given(x, gate, shaped(weight, head), shaped(bias, head), shaped(share, (-1, H)), values)


class NormGate(torch.autograd.Function):
    """x and values [...,H,V], gate [...,H*V], weight and bias [H*V] or [V], share [...,H]: ``norm_gate`` [...,H*V].

    With ``then`` [C,H*V], a linear map of all heads: [...,C]. Its input is recomputed in the backward pass, not saved.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, share: Tensor | None, values: Tensor | None,
        then: Tensor | None, norm: Norm, formula: Formula,
    ) -> Tensor:  # fmt: skip
        """The result."""
        ctx.save_for_backward(x, gate, weight, bias, share, values, then)
        ctx.norm, ctx.formula = norm, formula
        y = norm_gate(_given(x, gate, weight, bias, share, values), norm).flatten(1)
        y = y if then is None else y @ then.T
        return y.view(*x.shape[:-2], y.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensors:
        """Gradients of all arguments."""
        tensors = ctx.saved_tensors
        if by_torch(dy):
            return *by_formula(partial(_by_rows, ctx.formula), tensors, (dy,)), None, None
        given, then, again, dy = _given(*tensors[:-1]), tensors[-1], ctx.needs_input_grad[6], dy.flatten(0, -2)
        d = dy if then is None else dy @ then
        grads, y = _backward(given, ctx.norm, d, again=again)
        as_given = [None if d is None else d.view(x.shape) for d, x in zip(grads, tensors)]
        return *as_given, dy.T @ y.flatten(1) if again else None, None, None


def _by_rows(formula: Formula, *tensors: Tensor | None) -> Tensor:
    """``NormGate`` by the formula of rows."""
    *given, then = tensors
    y: Any = formula(*_given(*given), then)  # type: ignore[arg-type]
    y = y.flatten(1)
    return y.view(*tensors[0].shape[:-2], y.shape[1])  # type: ignore[union-attr,no-any-return]
