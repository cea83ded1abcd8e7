"""Autograd functions of the fused kernels. Each gets its formula in plain PyTorch, which computes second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...call import private
from ...call.versions import version
from ...gpu.launch import on_device_of
from ...gpu.target import Target, power
from . import gates

Tensors = tuple[Tensor | None, ...]
Formula = Callable[..., Tensor | tuple[Tensor, ...]]

PROGRAMS = 512
"""The approximate number of programs of a launch that sums over tokens. Each takes several blocks of tokens and stores one partial sum."""
BLOCK = 1024
"""Elements per program of an element-wise kernel."""
ACTIVATIONS = {
    "sigmoid": gates.SIGMOID.value, "silu": gates.SILU.value, "tanh": gates.TANH.value, "elu+1": gates.ELU_PLUS_ONE.value
}  # fmt: skip


@cache
def early(device: torch.device) -> dict[str, Any]:
    """The option of a launch that may begin before the previous kernel ends (programmatic dependent launch), on GPUs that have it.

    Triton 3.4 does not compile the functions that wait for the previous kernel.
    """
    arch = Target.of(device).arch
    return {"launch_pdl": True} if arch.startswith("sm_") and int(arch[3:]) >= 90 and version("triton") >= (3, 5) else {}


def multiplied(rows: int) -> int:
    """The rows of a tile that tensor cores multiply, for this many: a power of two of at least 8. Triton 3.4 takes no fewer than 16."""
    return power(rows, 8 if version("triton") >= (3, 5) else 16)


def blocks(count: int, size: int) -> int:
    """The number of blocks of ``size`` that cover ``count``."""
    return -(-count // size)


def shares(count: int, others: int) -> tuple[int, int]:
    """The number of programs, and of blocks of tokens per program, if ``others`` programs share a block."""
    each = max(1, blocks(count, max(1, PROGRAMS // max(others, 1))))
    return blocks(count, each), each


def limit(x: Tensor, registers: int) -> dict[str, Any]:
    """The option of a launch for this many registers per thread.

    On Hopper, 512 programs are resident at once with 128 registers and 4 warps, or 64 registers and 8 warps. With more registers, a second
    wave of a few programs would follow.
    """
    return {"maxnreg": registers} if Target.of(x.device).nvidia else {}


def summed(parts: Tensor, *like: Tensor, programs: int) -> list[Tensor]:
    """Sums over dimension ``programs`` of partial sums, one for each of ``like``: the other dimensions are [n,...], of n tensors."""
    total, kinds = parts.sum(programs), {one.dtype for one in like}
    total = total.to(kinds.pop()) if len(kinds) == 1 else total  # one launch for all
    return [part.view(one.shape).to(one.dtype) for part, one in zip(total.unbind(), like)]


def row_sizes(x: Tensor) -> tuple[int, int]:
    """The number of rows, and of channels, of a tensor [...,C]."""
    *tokens, C = x.shape
    return prod(tokens), C


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """Saved tensors as the forward pass had them: hooks of saved tensors may have changed their strides."""
    return [None if x is None else x.contiguous() for x in tensors]


def shaped(x: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """A contiguous tensor of this shape, where there is one. In an autograd function: views are no nodes of the graph."""
    return None if x is None else x.reshape(shape).contiguous()


def by_torch(*d_results: Tensor | None) -> bool:
    """Whether plain PyTorch computes gradients: they are differentiated again, or those of the results are no plain tensors.

    Kernels read memory, which of a lazily negated tensor, for example, does not hold its values. Under vmap a tensor has none.
    """
    return torch.is_grad_enabled() or not private.fast(d_results)


def by_formula(formula: Formula, tensors: Tensors, d_results: Tensors) -> Tensors:
    """Gradients by plain PyTorch, which can be differentiated again."""
    with torch.enable_grad():
        apart = tuple(None if x is None else x.view_as(x) for x in tensors)  # one tensor may be two arguments
        found = formula(*apart)
    results = found if isinstance(found, tuple) else (found,)
    # an autograd function marks all results as differentiable if one input is; here some may have no gradient
    pairs = [(y, d) for y, d in zip(results, d_results) if d is not None and y.requires_grad]
    wanted = [n for n, x in enumerate(apart) if x is not None and x.requires_grad]
    grads: list[Tensor | None] = [None] * len(tensors)
    if pairs:
        outputs, upstream = zip(*pairs)
        inputs = [x for n, x in enumerate(apart) if n in wanted]
        for n, grad in zip(wanted, torch.autograd.grad(outputs, inputs, upstream, create_graph=torch.is_grad_enabled(), allow_unused=True)):  # type: ignore[arg-type]
            grads[n] = grad
    return tuple(grads)


def first_tokens(starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first token of each of ``count`` sequences, and whether it has tokens: int64 and bool [count]. There is at least one token.

    starts [R] is the index of the sequence that begins at a token, or -1.
    """
    tokens = torch.arange(len(starts), device=starts.device)
    index = torch.where(starts < 0, count, starts).long()
    first = tokens.new_full((count + 1,), len(starts)).scatter_(0, index, tokens)[:count]
    return first.clamp(max=len(starts) - 1), first < len(starts)


def precision(x: Tensor) -> str:
    """The precision of float32 products of x."""
    return "ieee" if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def pointwise(x: Tensor, activation: str) -> Tensor:
    """``activation(x)`` element by element."""
    x, size = x.contiguous(), x.numel()
    y = torch.empty_like(x)
    if size:
        on_device_of(x, gates.penstock_pointwise_fwd)[(blocks(size, BLOCK),)](x, y, size, ACTIVATION=ACTIVATIONS[activation], BLOCK=BLOCK)
    return y


def pointwise_backward(x: Tensor, dy: Tensor, activation: str) -> Tensor:
    """The gradient of x from that of ``pointwise``."""
    x, dy, size = x.contiguous(), dy.contiguous(), x.numel()
    dx, kind = torch.empty_like(x), ACTIVATIONS[activation]
    if size:
        on_device_of(x, gates.penstock_pointwise_bwd)[(blocks(size, BLOCK),)](x, dy, dx, size, ACTIVATION=kind, BLOCK=BLOCK)
    return dx


def _activated(a: Tensor, b: Tensor | None, activation: str) -> Tensor:
    y, size = torch.empty_like(a), a.numel()
    if size and b is None:
        on_device_of(a, gates.penstock_relu_squared_fwd)[(blocks(size, BLOCK),)](a, y, size, BLOCK=BLOCK)
    elif size:
        on_device_of(a, gates.penstock_gated_fwd)[(blocks(size, BLOCK),)](a, b, y, size, ACTIVATION=ACTIVATIONS[activation], BLOCK=BLOCK)
    return y


def _activated_backward(
    a: Tensor, b: Tensor | None, activation: str, dy: Tensor, *, again: bool = False
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of a and b. ``again``: recompute the forward result and overwrite dy with it."""
    da, db, size = torch.empty_like(a), None if b is None else torch.empty_like(b), a.numel()
    if size and b is None:
        on_device_of(a, gates.penstock_relu_squared_bwd)[(blocks(size, BLOCK),)](a, dy, da, size, ROOT=False, BLOCK=BLOCK)
        if again:
            on_device_of(a, gates.penstock_relu_squared_fwd)[(blocks(size, BLOCK),)](a, dy, size, BLOCK=BLOCK)
    elif size:
        on_device_of(a, gates.penstock_gated_bwd)[(blocks(size, BLOCK),)](
            a, b, dy, da, db, size, ACTIVATION=ACTIVATIONS[activation], AGAIN=again, BLOCK=BLOCK
        )
    return da, db


class Activated(torch.autograd.Function):
    """``activation(a) * b`` element by element, or without b ``relu(a)**2``."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor | None, activation: str, formula: Formula) -> Tensor:
        """The result."""
        ctx.save_for_backward(a, b)
        ctx.activation, ctx.formula = activation, formula
        return _activated(a, b, activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensors:
        """Gradients of all arguments."""
        a, b = contiguous(*ctx.saved_tensors)
        if by_torch(dy):
            return *by_formula(ctx.formula, (a, b), (dy,)), None, None
        return *_activated_backward(a, b, ctx.activation, dy.contiguous()), None, None


class ReluSquared(torch.autograd.Function):
    """``relu(a)**2``. Saves its result, which a linear map after it saves anyway, and not a."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        """The result."""
        y = _activated(a, None, "relu_squared")
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """The gradient of a."""
        (y,) = contiguous(*ctx.saved_tensors)
        if by_torch(dy):
            return 2 * torch.where(y == 0, 0, torch.where(y == 0, 1, y).sqrt()) * dy
        da, size = torch.empty_like(y), y.numel()
        if size:
            on_device_of(y, gates.penstock_relu_squared_bwd)[(blocks(size, BLOCK),)](y, dy.contiguous(), da, size, ROOT=True, BLOCK=BLOCK)
        return da


class ActivatedLinear(torch.autograd.Function):
    """The same, then a linear map. The activation is recomputed in the backward pass, not saved."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor | None, weight: Tensor, activation: str, formula: Formula) -> Tensor:
        """The result."""
        ctx.save_for_backward(a, b, weight)
        ctx.activation, ctx.formula = activation, formula
        return _activated(a, b, activation) @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensors:
        """Gradients of all arguments."""
        *given, weight = ctx.saved_tensors
        a, b = contiguous(*given)
        if by_torch(dy):
            return *by_formula(ctx.formula, (a, b, weight), (dy,)), None, None
        da = db = y = dweight = None
        if any(ctx.needs_input_grad[:2]):
            y = dy @ weight
            da, db = _activated_backward(a, b, ctx.activation, y, again=ctx.needs_input_grad[2])
        if ctx.needs_input_grad[2]:
            y = _activated(a, b, ctx.activation) if y is None else y
            dweight = dy.flatten(0, -2).T @ y.flatten(0, -2)
        return da, db, dweight, None, None


class Decay(torch.autograd.Function):
    """-exp(min(bias + x, 60)) in float32: x [...,C], contiguous, and bias of C elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, formula: Formula) -> Tensor:
        """The result."""
        R, C = row_sizes(x)
        w = torch.empty_like(x, dtype=torch.float32)
        BR, BC = 16, 256
        if x.numel():
            on_device_of(x, gates.penstock_decay_fwd)[blocks(R, BR), blocks(C, BC)](x, bias.contiguous(), w, R, C, BR=BR, BC=BC)
        ctx.save_for_backward(x, bias)
        ctx.formula = formula
        return w

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Tensors:
        """Gradients of all arguments."""
        x, bias = contiguous(*ctx.saved_tensors)
        if by_torch(dw):
            return *by_formula(ctx.formula, (x, bias), (dw,)), None
        (R, C), BR, BC = row_sizes(x), 16, 256
        programs, each = shares(blocks(R, BR), blocks(C, BC))
        dx, dbias = torch.empty_like(x), bias.new_empty(1, programs, C, dtype=torch.float32)
        if x.numel():
            on_device_of(x, gates.penstock_decay_bwd)[programs, blocks(C, BC)](
                x, bias, dw.contiguous(), dx, dbias, R, C, each, BR=BR, BC=BC
            )
        return dx, *summed(dbias, bias, programs=1), None


class LogSigmoid(torch.autograd.Function):
    """logsigmoid(x) / normalizer in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, normalizer: float, formula: Formula) -> Tensor:
        """The result."""
        g, size = torch.empty_like(x, dtype=torch.float32), x.numel()
        if size:
            on_device_of(x, gates.penstock_log_sigmoid_fwd)[(blocks(size, BLOCK),)](x, g, size, normalizer, BLOCK=BLOCK)
        ctx.save_for_backward(x)
        ctx.normalizer, ctx.formula = normalizer, formula
        return g

    @staticmethod
    def backward(ctx: Any, dg: Tensor) -> Tensors:
        """The gradient of x."""
        (x,) = contiguous(*ctx.saved_tensors)
        if by_torch(dg):
            return *by_formula(ctx.formula, (x,), (dg,)), None, None
        dx, size = torch.empty_like(x), x.numel()
        if size:
            on_device_of(x, gates.penstock_log_sigmoid_bwd)[(blocks(size, BLOCK),)](
                x, dg.contiguous(), dx, size, ctx.normalizer, BLOCK=BLOCK
            )
        return dx, None, None


def add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centre: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + y (x if there is no y) and its norm in ``dtype``, of contiguous x and y [...,C]."""
    (R, C), normed = row_sizes(x), torch.empty_like(x, dtype=dtype)
    total, BC = x if y is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, y.dtype)), power(C, 16)
    if x.numel():
        on_device_of(x, gates.penstock_add_norm)[(R,)](
            x, x if y is None else y, total, normed, weight, weight if bias is None else bias, C, eps,
            ADD=y is not None, CENTRE=centre, BIAS=bias is not None, BC=BC, num_warps=min(max(BC // 512, 1), 16),
        )  # fmt: skip
    return total, normed


class AddNorm(torch.autograd.Function):
    """``add_norm`` with gradients. The backward pass recomputes the norm; only the sum is saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centre: bool, dtype: torch.dtype,
        formula: Formula,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The results."""
        total, normed = add_norm(x, y, weight, bias, eps, centre, dtype)
        ctx.save_for_backward(total, weight, bias)
        ctx.eps, ctx.centre, ctx.formula = eps, centre, formula
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, d_total: Tensor | None, d_normed: Tensor | None) -> Tensors:
        """Gradients of all arguments. x and y get the same tensor: autograd does not modify a gradient in place that it holds twice."""
        total, weight, bias = tensors = contiguous(*ctx.saved_tensors)
        if d_normed is None or by_torch(d_total, d_normed):
            dx, dweight, dbias = by_formula(ctx.formula, tuple(tensors), (d_total, d_normed))
        else:
            (R, C), dx, learned = row_sizes(total), torch.empty_like(total), [weight] if bias is None else [weight, bias]
            BC = power(C, 16)
            BR = max(1, 2048 // BC)
            programs, each = shares(blocks(R, BR), 1)
            parts = total.new_empty(len(learned), programs, C, dtype=torch.float32)
            if total.numel():
                on_device_of(total, gates.penstock_add_norm_bwd)[(programs,)](
                    total, weight, total if d_total is None else d_total.contiguous(), d_normed.contiguous(), dx,
                    parts, parts[-1], R, C, ctx.eps, each,
                    ADD=d_total is not None, CENTRE=ctx.centre, BIAS=bias is not None, BR=BR, BC=BC, num_warps=8 if BC <= 2048 else 16,
                    **(limit(total, 64) if BC <= 4096 else {}),
                )  # fmt: skip
            dweight, dbias = (*summed(parts, *learned, programs=1), None)[:2]
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, dbias, None, None, None, None
