"""Launches and autograd functions of the kernels before and after Mamba-2's recurrence."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor

from ...gpu.launch import on_device_of
from ...gpu.target import power
from . import mamba2
from .launch import PROGRAMS, Formula, Tensors, blocks, by_formula, by_torch, contiguous, early, limit, shares, summed


def _rows(x: Tensor, tokens: int) -> Tensor:
    """Tokens as rows: the first ``tokens`` dimensions are merged.

    They are copied unless they are evenly spaced and the channels of a token are contiguous.
    """
    if tokens == 2:
        x = x.squeeze(0) if x.shape[0] == 1 else x.flatten(0, 1)  # squeeze keeps the stride of tokens if there is one
    return x if x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2]) else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[dict[str, int], list[int]]:
    """The unit of row strides, and the strides in units: loads of 16 bytes need strides with a constant factor of 8."""
    unit = gcd(8, *(x.stride(0) for x in tensors))
    return {"UNIT": unit}, [x.stride(0) // unit for x in tensors]


def _tile(H: int, V: int, elements: int) -> dict[str, int]:
    """A tile of tokens, heads and channels of heads."""
    BV = power(V)
    BH = min(power(H, 1), 16, max(1, elements // BV))
    return {"V": V, "BR": max(1, elements // (BH * BV)), "BH": BH, "BV": BV}


class TimeSteps(torch.autograd.Function):
    """dt [R,H], dt_bias and A_log [H], x [R,H,V]: g [R,H] in float32, v [R,H,V], and x. Tokens may be [B,T], with any strides.

    The backward kernel adds the gradient of the returned x to that of x.
    """

    @staticmethod
    def forward(
        ctx: Any, dt: Tensor, dt_bias: Tensor, A_log: Tensor, x: Tensor, low: float, high: float, formula: Formula
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The results."""
        given, shapes, (dt, x) = (dt, dt_bias, A_log, x), (dt.shape, x.shape), (_rows(one, dt.dim() - 1) for one in (dt, x))
        R, H, V = x.shape
        g, v = x.new_empty(R, H, dtype=torch.float32), x.new_empty(x.shape)
        if x.numel():
            (unit, steps), tile, pdl = _strides(dt, x), _tile(H, V, 2048), early(x.device)
            on_device_of(x, mamba2.penstock_time_steps_fwd)[blocks(R, tile["BR"]), blocks(H, tile["BH"])](
                dt, dt_bias, A_log, x, g, v, R, H, *steps, low, high, **unit, **tile, PDL=bool(pdl), num_warps=4, **pdl
            )
        ctx.save_for_backward(*given)
        ctx.limits, ctx.formula = (low, high), formula
        ctx.set_materialize_grads(False)
        return g.view(shapes[0]), v.view(shapes[1]), given[3]

    @staticmethod
    def backward(ctx: Any, dg: Tensor | None, dv: Tensor | None, further: Tensor | None) -> Tensors:
        """Gradients of all arguments."""
        dt, *learned, x = tensors = ctx.saved_tensors
        if by_torch(dg, dv, further):
            return *by_formula(ctx.formula, tensors, (dg, dv, further)), None, None, None
        shapes, (dt, x), (dt_bias, A_log) = (dt.shape, x.shape), (_rows(one, dt.dim() - 1) for one in (dt, x)), contiguous(*learned)
        (R, H, V), (unit, steps) = x.shape, _strides(dt, x)
        tile = _tile(H, V, 2048)
        programs, each = shares(blocks(R, tile["BR"]), blocks(H, tile["BH"]))
        d_dt, dx = dt.new_empty(dt.shape), x.new_empty(x.shape)
        parts = x.new_empty(2, programs, H, dtype=torch.float32)
        if x.numel():
            dg = x.new_zeros(R, H, dtype=torch.float32) if dg is None else dg.contiguous()
            dv = x.new_zeros(x.shape) if dv is None else dv.contiguous()
            on_device_of(x, mamba2.penstock_time_steps_bwd)[programs, blocks(H, tile["BH"])](
                dt, dt_bias, A_log, x, dg, dv, dv if further is None else further.contiguous(), d_dt, dx, *parts.unbind(),
                R, H, *steps, *ctx.limits, each, ADD=further is not None, **unit, **tile, num_warps=4, **limit(x, 128),
            )  # fmt: skip
        return d_dt.view(shapes[0]), *summed(parts, dt_bias, A_log, programs=1), dx.view(shapes[1]), None, None, None


def _groups(x: Tensor, z: Tensor, groups: int) -> dict[str, int]:
    """The number of channels of a group, of a head, and of a piece, which lies in one head and one group."""
    S, V = z.shape[1] // groups, x.shape[2]
    return {"S": S, "V": V, "PIECE": gcd(S, V, 16 // x.element_size())}


def _blocks(S: int, x: Tensor) -> tuple[int, int]:
    """Channels per block of the backward pass, and warps per program: sizes for which 128 registers per thread suffice."""
    few, most = (6144, 4096) if x.element_size() == 2 else (2048, 2048)
    warps = min(max(power(S) // 256, 1), 8) if few >= S else 16
    return min(power(S), 256 * warps, most), warps


def gated_norm(o: Tensor, x: Tensor, D: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """norm((o + D x) silu(z)) weight [R,H*V], of o and x [R,H,V], D [H], z [R,H*V] and weight [H*V]."""
    y = z.new_empty(z.shape)
    if y.numel():
        (unit, steps), sizes, pdl = _strides(o, x, z), _groups(x, z, groups), early(x.device)
        width = power(sizes["S"])
        warps = min(max(width // 256, 1), 4 if sizes["S"] <= 6144 else 8)
        BC = min(width, 256 * warps)
        on_device_of(x, mamba2.penstock_gated_norm_fwd)[z.shape[0], groups](
            o, x, z, D, weight, y, groups, *steps, eps, **unit, **sizes, BC=BC, COUNT=blocks(sizes["S"], BC), PDL=bool(pdl),
            num_warps=warps, **pdl,
        )  # fmt: skip
    return y


class GatedNorm(torch.autograd.Function):
    """``gated_norm``; with ``then`` [C,H*V], a linear map of it [R,C], whose input is recomputed in the backward pass, not saved.

    Tokens may be [B,T], with any strides.
    """

    @staticmethod
    def forward(
        ctx: Any, o: Tensor, x: Tensor, D: Tensor, z: Tensor, weight: Tensor, then: Tensor | None, groups: int, eps: float, formula: Formula
    ) -> Tensor:
        """The result."""
        ctx.save_for_backward(o, x, D, z, weight, then)
        ctx.groups, ctx.eps, ctx.formula = groups, eps, formula
        lead = z.shape[:-1]
        o, x, z = (_rows(one, len(lead)) for one in (o, x, z))
        y = gated_norm(o, x, D, z, weight, groups, eps)
        y = y if then is None else y @ then.T
        return y.view(*lead, y.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensors:
        """Gradients of all arguments."""
        o, x, D, z, weight, then = tensors = ctx.saved_tensors
        if by_torch(dy):
            return *by_formula(ctx.formula, tensors, (dy,)), None, None, None
        shapes, (o, x, z) = (o.shape, x.shape, z.shape), (_rows(one, z.dim() - 1) for one in (o, x, z))
        D, weight = contiguous(D, weight)
        (R, H, V), again, sizes, dy = x.shape, ctx.needs_input_grad[5], _groups(x, z, ctx.groups), dy.flatten(0, -2)
        BC, warps = _blocks(sizes["S"], x)
        each = max(1, blocks(R * ctx.groups * warps, 4 * PROGRAMS))
        programs = blocks(R, each)
        d, (d_o, dx) = dy.contiguous() if then is None else dy @ then, (x.new_empty(x.shape) for _ in range(2))
        dz, y, pieces = z.new_empty(z.shape), torch.empty_like(d) if again else d, V // sizes["PIECE"]
        dD, dweight = (x.new_empty(programs, H * one, dtype=torch.float32) for one in (pieces, V))
        if x.numel():
            unit, steps = _strides(o, x, z)
            on_device_of(x, mamba2.penstock_gated_norm_bwd)[programs, ctx.groups](
                o, x, z, D, weight, d, d_o, dx, dz, y, dD, dweight, R, ctx.groups, *steps, ctx.eps, each,
                AGAIN=again, **unit, **sizes, BC=BC, COUNT=blocks(sizes["S"], BC), num_warps=warps, **limit(x, 128),
            )  # fmt: skip
        dD = dD.view(programs, H, pieces).sum((0, 2)).to(D.dtype)
        d_o, dx, dz = (d.view(shape) for d, shape in zip((d_o, dx, dz), shapes))
        return d_o, dx, dD, dz, *summed(dweight[None], weight, programs=1), dy.T @ y if again else None, None, None, None
