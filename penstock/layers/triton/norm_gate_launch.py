"""Norms of heads times a gate: the launches of their kernels, and the autograd function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu.launch import on_device_of
from ...gpu.target import power
from . import gates
from . import norm_gate as kernels
from .launch import Formula, Tensors, blocks, by_formula, by_torch, early, limit, shares, summed

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
    dweight, dbias = (None if one is None else one.new_empty(programs, H, V, dtype=torch.float32) for one in (weight, bias))
    if x.numel():
        more = [x if one is None else one for one in (dshare, dvalues, dweight, dbias)]
        on_device_of(x, kernels.penstock_norm_gate_bwd)[programs, H](
            *c.pointers, dy.contiguous(), dx, dgate, *more, y, *c.sizes, norm.eps, each, **constants, AGAIN=again, num_warps=4,
            **limit(x, 128),
        )  # fmt: skip

    def of_heads(parts: Tensor | None, like: Tensor | None) -> Tensor | None:
        return None if parts is None or like is None else summed(parts.sum(1) if like.dim() == 1 else parts, like)

    return (dx, dgate, of_heads(dweight, weight), of_heads(dbias, bias), dshare, dvalues), y


class NormGate(torch.autograd.Function):
    """The tensors of a ``Given``: (norm(x) + share values) activation(gate) [R,H,V].

    With ``then`` [C,H*V], a linear map of all heads: [R,C]. Its input is recomputed in the backward pass, not saved.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, share: Tensor | None, values: Tensor | None,
        then: Tensor | None, norm: Norm, formula: Formula,
    ) -> Tensor:  # fmt: skip
        """The result."""
        given = Given(x, gate, weight, bias, share, values)
        ctx.save_for_backward(*given, then)
        ctx.norm, ctx.formula = norm, formula
        y = norm_gate(given, norm)
        return y if then is None else y.flatten(1) @ then.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensors:
        """Gradients of all arguments."""
        tensors = ctx.saved_tensors
        if by_torch(dy):
            return *by_formula(ctx.formula, tensors, (dy,)), None, None
        given, then, again = Given(*tensors[:-1]), tensors[-1], ctx.needs_input_grad[6]
        d = dy if then is None else (dy @ then).view(given.x.shape)
        grads, y = _backward(given, ctx.norm, d, again=again)
        return *grads, dy.T @ y.flatten(1) if again else None, None, None
