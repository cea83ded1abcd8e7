"""RWKV-7 between its linear maps and its recurrence: the launches of the kernels, and the autograd function."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu.launch import on_device_of
from ...gpu.target import power
from . import rwkv7
from .launch import Formula, Tensors, blocks, by_formula, by_torch, early, limit, shaped, shares, summed


class Given(NamedTuple):
    """The tensors of a call. Those of values are None if they are not mixed."""

    r: Tensor
    """[R,H,N], as all up to ``first``"""
    k: Tensor
    w: Tensor
    rate: Tensor
    k_k: Tensor
    """[H,N], as the others"""
    k_a: Tensor
    r_k: Tensor
    w0: Tensor
    a0: Tensor
    v: Tensor | None
    mix: Tensor | None
    first: Tensor | None
    v0: Tensor | None

    @property
    def mixed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """v, mix, first and v0, or r in place of missing ones."""
        return tuple(self.r if one is None else one for one in self[9:])  # type: ignore[return-value]

    def constants(self, elements: int) -> dict[str, Any]:
        """Constants of a kernel for this number of elements per block."""
        BN = power(self.r.shape[2], 16)
        return {"MIX": self.v is not None, "BR": max(1, elements // BN), "BN": BN}


def inputs(c: Given) -> tuple[Tensor, ...]:
    """raw, key, a, b and share; and values, if they are mixed. See ``penstock_rwkv7_inputs_fwd``."""
    (R, H, N), (v, mix, first, v0) = c.r.shape, c.mixed
    raw, key, a, b = (torch.empty_like(c.r, dtype=one) for one in (torch.float32, *[c.r.dtype] * 3))
    share, values = c.r.new_empty(R, H, dtype=torch.float32), None if c.v is None else torch.empty_like(c.r)
    if c.r.numel():
        constants, pdl = c.constants(2048), early(c.r.device)
        on_device_of(c.r, rwkv7.penstock_rwkv7_inputs_fwd)[blocks(R, constants["BR"]), H](
            c.r, c.k, v, c.w, c.rate, mix, first, c.k_k, c.k_a, c.r_k, c.w0, c.a0, v0, raw, key, a, b,
            a if values is None else values, share, R, H, N, **constants, PDL=bool(pdl), num_warps=4, **pdl,
        )  # fmt: skip
    return (raw, key, a, b, share) if values is None else (raw, key, a, b, share, values)


def _given(tensors: Tensors) -> Given:
    """The arguments of ``Inputs`` as rows and heads."""
    H, N = tensors[6].shape  # type: ignore[union-attr]
    shapes = [(-1, H, N)] * 4 + [(H, N)] * 5 + [(-1, H, N)] * 3 + [(H, N)]
    return Given(*map(shaped, tensors, shapes))  # type: ignore[arg-type]


class Inputs(torch.autograd.Function):
    """The tensors of a ``Given``, as tokens [...,H*N], r_k [H,N] and parameters of as many elements: r, and the results of ``inputs``.

    Results have heads: [...,H,N]; values are there twice, for their two uses. The backward kernel adds the gradient of the returned r to
    that of r, and those of both values.
    """

    @staticmethod
    def forward(ctx: Any, formula: Formula, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """The results."""
        given, lead = _given(tensors), tensors[0].shape[:-1]  # type: ignore[union-attr]
        ctx.save_for_backward(*tensors)
        ctx.formula = formula
        ctx.set_materialize_grads(False)
        found = [one.view(*lead, *one.shape[1:]) for one in (given.r, *inputs(given))]
        return tuple(found if given.v is None else [*found, found[6].detach()])

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> Tensors:
        """Gradients of all arguments."""
        tensors = ctx.saved_tensors
        if by_torch(*d_results):
            return None, *by_formula(partial(_by_rows, ctx.formula), tensors, d_results)
        c, kinds = _given(tensors), (None, torch.float32, None, None, None, torch.float32, None, None)
        shapes = (c.r.shape,) * 5 + (c.r.shape[:2], c.r.shape, c.r.shape)
        zeros = [c.r.new_zeros(shape, dtype=kind) if d is None else d.contiguous() for d, shape, kind in zip(d_results, shapes, kinds)]
        return None, *(None if d is None else d.view(x.shape) for d, x in zip(_backward(c, zeros), tensors))


def _by_rows(formula: Formula, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """``Inputs`` by the formula of rows."""
    lead = tensors[0].shape[:-1]  # type: ignore[union-attr]
    return tuple([one.view(*lead, *one.shape[1:]) for one in formula(*_given(tensors))])


def _backward(c: Given, given: list[Tensor]) -> Tensors:
    """Gradients of the tensors, from those of r, raw, key, a, b and share; and of values, twice, if they are mixed."""
    (R, H, N), (v, mix, first, v0), constants, mixed = c.r.shape, c.mixed, c.constants(512), c.v is not None
    programs, each = shares(blocks(R, constants["BR"]), H)
    dr, dk, dw, d_rate = (torch.empty_like(one) for one in c[:4])
    dv, d_mix, d_first = (torch.empty_like(one) if mixed else c.r for one in (v, mix, first))
    parts = c.r.new_empty(programs, 5 + mixed, H, N, dtype=torch.float32)
    if c.r.numel():
        on_device_of(c.r, rwkv7.penstock_rwkv7_inputs_bwd)[programs, H](
            c.r, c.k, v, c.rate, mix, first, c.k_k, c.k_a, c.r_k, c.a0, v0, *given, *[c.r] * (8 - len(given)), dr, dk, dv, dw,
            d_rate, d_mix, d_first, parts, R, H, N, each, **constants, num_warps=4, **limit(c.r, 128),
        )  # fmt: skip
    learned = [*c[4:9], *([v0] if mixed else [])]
    sums = summed(parts, *learned, programs=0)
    return (dr, dk, dw, d_rate, *sums[:5], *((dv, d_mix, d_first, sums[5]) if mixed else (None,) * 4))
