"""Registers operators with torch.library: kernels, fake kernels and autograd, from a declaration.

An operator ``name`` becomes two torch operators. An operator in place has only the first::

    penstock::name            (tensors, function, options, impl) -> results
    penstock::name_backward   (gradients of results, saved results, tensors, function, options, impl) -> gradients

Results are contiguous and new. A result that is not requested, or the gradient of a missing argument, is an empty tensor. ``impl`` is a
string, so that a compiled graph contains the same operator for all implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import private
from .declared import Declared
from .implementation import Upstream
from .problem import Problem
from .validation import check_types

_library = torch.library.Library("penstock", "DEF")


def register(operator: Declared[Any]) -> tuple[Any, Any]:
    """Define the torch operators of an operator; the second is None for an operator in place."""
    forward = _Forward(operator)
    inputs = forward.schema
    _library.define(f"{operator.name}({inputs}) -> {_tuple(len(operator.results))}")
    _implement(operator.name, forward)
    if operator.in_place:
        return getattr(torch.ops.penstock, operator.name), None
    backward, name = _Backward(operator), f"{operator.name}_backward"
    saved = [f"Tensor {one.name}" for one in operator.results if one.saved]
    d_results = [f"Tensor{'?' * (place > 0)} d_{one.name}" for place, one in enumerate(operator.results)]
    _library.define(f"{name}({', '.join([*d_results, *saved, inputs])}) -> {_tuple(sum(operator.gradient))}")
    _implement(name, backward)
    torch.library.register_autograd(f"penstock::{operator.name}", forward.differentiate, setup_context=forward.save, lib=_library)
    torch.library.register_autograd(f"penstock::{name}", backward.differentiate, setup_context=backward.save, lib=_library)
    return getattr(torch.ops.penstock, operator.name), getattr(torch.ops.penstock, name)


def _tuple(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _implement(name: str, one: _Forward | _Backward) -> None:
    torch.library.impl(_library, name, "CompositeExplicitAutograd")(one.run)
    torch.library.register_fake(f"penstock::{name}", one.fake, lib=_library)


class _Forward:
    """``penstock::name``."""

    def __init__(self, operator: Declared[Any]) -> None:
        self.operator = operator
        optional = [
            any(not one.arguments[place].required or one.arguments[place].absent for one in operator.signatures.values())
            for place in range(len(operator.names))
        ]
        tensors = [f"Tensor{'(a!)' * one.written}{'?' * some} {one.name}" for one, some in zip(operator.arguments, optional)]
        self.schema = ", ".join([*tensors, "str function", *(one.schema for one in operator.options), "str impl"])
        self.split = len(tensors)

    def problem(self, inputs: Sequence[Any]) -> tuple[Problem, str]:
        """The validated problem of a call, and ``impl``."""
        operator, fast = self.operator, private.fast(inputs[: self.split])
        tensors, function, options, impl = inputs[: self.split], inputs[self.split], inputs[self.split + 1 : -1], inputs[-1]
        seen = operator.recall(function, tensors, options) if fast else None
        if seen is not None:
            return operator.known(seen, tensors), impl
        signature = operator.signature(function)
        check_types(signature, tensors, operator.options, options)
        operator.family.check_name(function, impl)
        if not fast:
            return operator.checked(function, tensors, options), impl
        return operator.known(operator.learn(signature, tensors, options), tensors), impl

    def run(self, *inputs: Any) -> Any:
        """The results."""
        problem, impl = self.problem(inputs)
        results, _ = self.operator.run(problem, impl, saved=True)
        return _packed([_empty(inputs[0]) if x is None else x for x in results])

    def fake(self, *inputs: Any) -> Any:
        """The results without data."""
        return _packed(self.operator.empty(*self.problem(inputs)))

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the tensors that the backward pass needs."""
        outputs = self.operator.unpacked(output)
        ctx.save_for_backward(*inputs[: self.split], *self.operator.saved(outputs))
        ctx.rest = inputs[self.split :]
        ctx.set_materialize_grads(False)

    def differentiate(self, ctx: Any, *d_results: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the inputs by ``penstock::name_backward``."""
        operator, (function, *options, _) = self.operator, ctx.rest
        kept = ctx.saved_tensors  # once: each access unpacks them again
        tensors, saved = kept[: self.split], kept[self.split :]
        upstream = operator.upstream(function, tensors, operator.asked_for(d_results, options))
        found = operator.unpacked(operator.gradients_in_torch(*upstream, *saved, *tensors, *ctx.rest))
        return *operator.placed(found, ctx.needs_input_grad), *(None,) * len(ctx.rest)


class _Backward:
    """``penstock::name_backward``. Its derivatives are computed by the operator's differentiable form."""

    def __init__(self, operator: Declared[Any]) -> None:
        self.operator, self.forward = operator, _Forward(operator)
        self.results = len(operator.results)
        self.split = self.results + sum(one.saved for one in operator.results)

    def run(self, *inputs: Any) -> Any:
        """The gradients."""
        problem, impl = self.forward.problem(inputs[self.split :])
        upstream = Upstream(inputs[: self.results], inputs[self.results : self.split])
        if torch.is_grad_enabled():
            with torch.no_grad():
                gradients = self.operator.gradients(problem, impl, upstream)
        else:
            gradients = self.operator.gradients(problem, impl, upstream)
        return _packed([_empty(inputs[0]) if x is None else x for x in gradients])

    def fake(self, *inputs: Any) -> Any:
        """The gradients without data."""
        self.forward.problem(inputs[self.split :])
        tensors = [x for x, gradient in zip(inputs[self.split :], self.operator.gradient) if gradient]
        return _packed([_empty(inputs[0]) if x is None else x.new_empty(x.shape) for x in tensors])

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save all tensors."""
        count = self.split + self.forward.split
        ctx.save_for_backward(*inputs[:count])
        ctx.rest = inputs[count:]
        ctx.set_materialize_grads(False)

    def differentiate(self, ctx: Any, *dd: Tensor | None) -> tuple[Any, ...]:
        """Gradients of gradients."""
        (function, *options, _), needed = ctx.rest, ctx.needs_input_grad
        found = self.operator.second_derivatives(function, options, ctx.saved_tensors, dd, needed)
        return *found, *(None,) * len(ctx.rest)


def _packed(values: Sequence[Tensor]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)
