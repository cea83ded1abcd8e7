"""Short causal convolutions: the launches of their kernels, and the autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...call.derivatives import count_write
from ...gpu.launch import on_device_of
from . import convolution
from .launch import Formula, Tensors, blocks, by_formula, by_torch, contiguous, early, first_tokens, shares

CHANNELS = 128
"""Channels per program of one warp: each thread loads 8 or 16 bytes."""
GROUP = 4
"""Tokens whose loads are in flight at the same time."""


def rows_of(x: Tensor) -> Tensor:
    """Tokens [...,C] as rows [R,C]. They are copied unless they are evenly spaced and the channels of a token are contiguous."""
    return with_contiguous_channels(x.flatten(0, -2))


def with_contiguous_channels(x: Tensor) -> Tensor:
    """The tensor, or a copy whose channels are contiguous, as the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _programs(x: Tensor, as_one: int) -> tuple[int, int]:
    """The number of programs, and tokens per program. Several programs of one warp count as one of ``shares``, limited by registers."""
    programs, each = shares(blocks(x.shape[0], GROUP), blocks(blocks(x.shape[1], CHANNELS), as_one))
    return programs, each * GROUP


def convolved(
    x: Tensor, tail: Tensor, starts: Tensor, slots: Tensor | None, weight: Tensor, bias: Tensor | None, *, silu: bool
) -> Tensor:  # fmt: skip
    """``ShortConvolution``: y [R,C] of x [R,C] and the earlier inputs ``tail`` [n,W-1,C], or with slots the rows of a pool.

    starts [R] is the index of the sequence that begins at a token, or -1; slots [n]; weight [C,W], contiguous; bias [C].
    """
    (R, C), W = x.shape, weight.shape[1]
    y = x.new_empty(R, C)
    if y.numel():
        (programs, tokens), pdl = _programs(x, 8), early(x.device)
        on_device_of(x, convolution.penstock_convolution_fwd)[programs, blocks(C, CHANNELS)](
            x, tail, starts, starts if slots is None else slots, weight, weight if bias is None else bias, y,
            R, C, x.stride(0), tail.stride(0), tail.stride(1), tokens,
            W=W, BIAS=bias is not None, SILU=silu, SLOTS=slots is not None, GROUP=GROUP, BC=CHANNELS, PDL=bool(pdl), num_warps=1, **pdl,
        )  # fmt: skip
    return y


def tails(x: Tensor, tail: Tensor, bounds: Tensor, slots: Tensor | None = None, *, in_place: bool = False) -> Tensor:
    """The last W - 1 inputs [n,W-1,C] of each sequence: its row of ``tail``, then its tokens of x [R,C].

    ``in_place``: they replace the rows of ``tail``, which is a pool. bounds [n+1] are the first token of each sequence, and the end.
    Without slots [n], sequence n has row n.
    """
    N, C, W = bounds.shape[0] - 1, x.shape[1], tail.shape[1] + 1
    after = tail if in_place else x.new_empty(N, W - 1, C)
    if N * (W - 1) * C:
        pdl = early(x.device)
        on_device_of(x, convolution.penstock_convolution_tails)[N, blocks(C, CHANNELS)](
            x, bounds, bounds if slots is None else slots, tail, after, C, x.stride(0), *tail.stride()[:2], *after.stride()[:2],
            W=W, SLOTS=slots is not None, BC=CHANNELS, PDL=bool(pdl), num_warps=1, **pdl,
        )  # fmt: skip
    if in_place:
        count_write(tail)
    return after


def step(x: Tensor, pool: Tensor, slots: Tensor | None, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """y [R,C] of x [R,C], one token per sequence. Their rows of the pool [P,W-1,C] are updated in place."""
    (R, C), pdl = x.shape, early(x.device)
    y = x.new_empty(R, C)
    if y.numel():
        on_device_of(x, convolution.penstock_convolution_step)[R, blocks(C, CHANNELS)](
            x, pool, x if slots is None else slots, weight, weight if bias is None else bias, y,
            C, x.stride(0), pool.stride(0), pool.stride(1),
            W=weight.shape[1], BIAS=bias is not None, SILU=silu, SLOTS=slots is not None, BC=CHANNELS, PDL=bool(pdl), num_warps=1, **pdl,
        )  # fmt: skip
        count_write(pool)
    return y


class Convolution(torch.autograd.Function):
    """x [...,C], tail [n,W-1,C], starts [R], bounds [n+1], weight [C,W], bias [C] or None: y [...,C] and the new tail [n,W-1,C].

    The channels of tail are contiguous. The values before silu are not saved for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tail: Tensor, starts: Tensor, bounds: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, formula: Formula
    ) -> tuple[Tensor, Tensor]:
        """The results."""
        ctx.save_for_backward(x, tail, starts, weight, bias)
        ctx.silu, ctx.formula = silu, formula
        ctx.set_materialize_grads(False)
        rows = rows_of(x)
        y, after = convolved(rows, tail, starts, None, weight, bias, silu=silu), tails(rows, tail, bounds)
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(after)
        return y.view(x.shape), after

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, d_tail: Tensor | None) -> Tensors:
        """Gradients of all arguments."""
        x, tail, starts, weight, bias = ctx.saved_tensors
        if dy is None or d_tail is not None or by_torch(dy):
            dx, d_before, dweight, dbias = by_formula(ctx.formula, (x, tail, weight, bias), (dy, d_tail))
            return dx, d_before, None, None, dweight, dbias, None, None
        shape, x, dy, tail = x.shape, rows_of(x), rows_of(dy), with_contiguous_channels(tail)
        starts, weight, bias = contiguous(starts, weight, bias)
        (R, C), W = x.shape, weight.shape[1]
        programs, tokens = _programs(x, 4)
        dx, sums = x.new_empty(R, C), x.new_empty(programs, W + 1, C, dtype=torch.float32)
        if x.numel():
            on_device_of(x, convolution.penstock_convolution_bwd)[programs, blocks(C, CHANNELS)](
                x, tail, starts, weight, weight if bias is None else bias, dy, dx, sums,
                R, C, x.stride(0), tail.stride(0), tail.stride(1), dy.stride(0), tokens,
                W=W, BIAS=bias is not None, SILU=ctx.silu, GROUP=GROUP, BC=CHANNELS, num_warps=1,
            )  # fmt: skip
        total = sums.sum(0)
        dweight, dbias = total[:W].T.to(weight.dtype).contiguous(), None if bias is None else total[W].to(bias.dtype)
        d_before = _of_tail(x, tail, starts, weight, bias, dy, ctx.silu) if ctx.needs_input_grad[1] else None
        return dx.view(shape), d_before, None, None, dweight, dbias, None, None


def _of_tail(x: Tensor, tail: Tensor, starts: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, silu: bool) -> Tensor:
    """The gradient of ``tail`` [n,W-1,C], which the first W - 1 tokens of each sequence read, in float32, rounded once."""
    W, d_tail = weight.shape[1], tail.new_zeros(tail.shape, dtype=torch.float32)
    if not tail.numel() or not len(x):
        return d_tail.to(tail.dtype)
    first, given = first_tokens(starts, len(tail))
    tokens = first[:, None] + torch.arange(W - 1, device=x.device)
    outside, tokens = tokens >= len(x), tokens.clamp(max=len(x) - 1)
    outside[:, 1:] |= starts[tokens[:, 1:]] >= 0  # another sequence begins
    here = (given[:, None] & (outside.cumsum(1) == 0))[..., None]
    taps = weight.float().T  # [W,C]
    d = torch.where(here, dy[tokens], 0).float()
    if silu:
        inputs = torch.cat([tail, torch.where(here, x[tokens], 0)], 1).float()
        z = torch.stack([inputs[:, j : j + W - 1] * taps[j] for j in range(W)]).sum(0)
        z = z if bias is None else z + bias.float()
        gate = torch.sigmoid(z)
        d = d * gate * (1 + z * (1 - gate))
    for j in range(W - 1):
        d_tail[:, j:] += d[:, j, None] * taps[: W - 1 - j]
    return d_tail.to(tail.dtype)
