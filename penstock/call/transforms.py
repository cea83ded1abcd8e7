"""Calls under ``torch.func`` transforms and forward-mode differentiation.

``grad``, ``vjp``, ``jacrev`` and ``vmap`` run the same implementations as an eager call; ``vmap`` folds the mapped axis into the axis of
heads, so that one call computes all copies. Forward derivatives (``jvp``, ``jacfwd``, ``hessian``, dual numbers) run the operator's
differentiable form, which is plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import Complaints, RangeError
from . import private
from .autocast import no_autocast
from .declaration import Argument, Signature
from .declared import Declared
from .derivatives import Tensors
from .validation import check_values

Call: TypeAlias = "tuple[Declared[Any], Signature, tuple[Any, ...], str]"
"""Operator, signature, options and implementation."""


def run(operator: Declared[Any], signature: Signature, tensors: Tensors, options: Sequence[Any], impl: str) -> Tensors:
    """The results of a call, differentiable and mappable by torch's transforms."""
    if operator.differentiable is None:
        complaints = Complaints(signature.function)
        written = next(one.name for one in signature.arguments if one.written)
        rule = "outside of torch.func transforms and forward-mode differentiation"
        complaints.add(RangeError, "the call", rule, "one inside", f"They do not support {written}, which is updated in place.")
        complaints.raise_any()
    if private.forward_derivatives():
        problem = operator.checked(signature.function, tensors, options)
        if impl != "auto":
            operator.family.choose(problem.whole, operator.mode, str(impl))  # raises if that implementation refuses the call
        check_values(signature, tensors, problem.sizes, operator.by_name(options), _inside)
        with no_autocast(tensors[0]):
            results: Tensors = operator.differentiable(problem)  # type: ignore[misc]
    else:
        results = _Forward.apply((operator, signature, tuple(options), str(impl)), *tensors)  # type: ignore[no-untyped-call]
    return operator.asked_for(results, options)


def _inside(argument: Argument, x: Tensor) -> Tensor | None:
    """On a CPU, the tensor that transforms wrap, for ``check_values``."""
    return private.inside_transforms(x) if x.device.type == "cpu" else None


class _Forward(torch.autograd.Function):
    """``penstock::name``, with rules for autograd and vmap."""

    @staticmethod
    def forward(call: Call, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        operator, signature, options, impl = call
        return operator.unpacked(operator.in_torch(*tensors, signature.function, *options, impl))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, *tensors = inputs
        ctx.save_for_backward(*tensors, *call[0].saved(output))
        ctx.call, ctx.inputs = call, len(tensors)

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor) -> tuple[Any, ...]:
        operator, _, options, _ = ctx.call
        kept = ctx.saved_tensors  # once: each access unpacks them again
        tensors, saved = kept[: ctx.inputs], kept[ctx.inputs :]
        upstream = operator.asked_for(d_results, options)
        found = _Backward.apply(ctx.call, *upstream, *saved, *tensors)  # type: ignore[no-untyped-call]
        return None, *operator.placed(found, ctx.needs_input_grad[1:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, *tensors: Tensor | None) -> tuple[Any, ...]:
        operator, signature, _, _ = call
        folded = [_fold(signature, *one, info.batch_size) for one in zip(signature.arguments, tensors, in_dims[1:])]
        found = _Forward.apply(call, *folded)  # type: ignore[no-untyped-call]
        return _unfold_all(signature, [one.axes for one in operator.results], found, info.batch_size)


class _Backward(torch.autograd.Function):
    """``penstock::name_backward``, with a rule for vmap. Its derivatives are computed by the differentiable form."""

    @staticmethod
    def forward(call: Call, *given: Tensor | None) -> tuple[Tensor, ...]:
        operator, signature, options, impl = call
        return operator.unpacked(operator.gradients_in_torch(*given, signature.function, *options, impl))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *dd: Tensor) -> tuple[Any, ...]:
        operator, signature, options, _ = ctx.call
        return None, *operator.second_derivatives(signature.function, options, ctx.saved_tensors, dd, ctx.needs_input_grad[1:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, *given: Tensor | None) -> tuple[Any, ...]:
        operator, signature, _, _ = call
        results = [Argument(one.name, one.axes) for one in (*operator.results, *(one for one in operator.results if one.saved))]
        arguments = (*results, *signature.arguments)
        folded = [_fold(signature, *one, info.batch_size) for one in zip(arguments, given, in_dims[1:])]
        found = _Backward.apply(call, *folded)  # type: ignore[no-untyped-call]
        return _unfold_all(signature, [one.axes for one in signature.arguments if one.gradient], found, info.batch_size)


def _fold(signature: Signature, argument: Argument, x: Tensor | None, dim: int | None, copies: int) -> Tensor | None:
    """Fold the mapped axis of a tensor, or copies of it if it has none, into its axis of heads."""
    if x is None or not x.is_floating_point():
        if dim is not None:
            complaints = Complaints(signature.function)
            rule = "the same for all copies of a call under vmap"
            complaints.add(RangeError, argument.public, rule, "one for each", "Use in_dims=None for it.")
            complaints.raise_any()
        return x
    if dim is None and _empty(argument.axes, x):
        return x
    x = x.movedim(dim, 0) if dim is not None else x.expand(copies, *x.shape)
    place = _head(signature, argument.axes)
    return x.movedim(0, place).flatten(place, place + 1)


def _head(signature: Signature, axes: str) -> int:
    return next(place for place, axis in enumerate(axes.split()) if axis in signature.folded.split())


def _unfold_all(signature: Signature, axes: list[str], found: Sequence[Tensor], copies: int) -> tuple[Any, ...]:
    """Unfold the mapped axis of results to the front. An empty result, which was not requested, has none."""
    empty = [_empty(one, x) for one, x in zip(axes, found)]
    unfolded = tuple(
        x if none else x.unflatten(_head(signature, one), (copies, -1)).movedim(_head(signature, one), 0)
        for one, x, none in zip(axes, found, empty)
    )
    return unfolded, tuple(None if none else 0 for none in empty)


def _empty(axes: str, x: Tensor) -> bool:
    """Whether a tensor is the empty placeholder of a result or gradient that was not requested."""
    return x.dim() == 1 and not len(x) and len(axes.split()) != 1
