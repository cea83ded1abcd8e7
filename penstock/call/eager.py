"""Gradients of calls on the fast path: autograd without torch's dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import private
from .declared import Declared
from .derivatives import Tensors
from .functions import applied
from .implementation import Upstream
from .memory import Seen


def differentiable(operator: Declared[Any], seen: Seen, tensors: Tensors, impl: str) -> Tensors:
    """The results of a known call, attached to autograd."""
    problem = operator.known(seen, tensors).whole
    if operator.choice(problem, "forward", impl, True).attached:
        found = operator.run(problem, impl)[0]
        return _Attached.apply(operator, seen, impl, len(found), *found, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    results = applied(_Call, operator, seen, problem, impl, *tensors)
    return [x if wanted else None for x, wanted in zip(results, seen.kind.returned)]


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, operator: Declared[Any], seen: Seen, problem: Any, impl: str, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """``problem`` is whole; ``seen`` and ``tensors`` are those of the call."""
        results, residuals = operator.run(problem, impl, saved=True, residuals=True)
        saved = operator.saved(results)
        ctx.save_for_backward(*tensors, *saved, *residuals)
        ctx.call = operator, seen, impl, len(tensors), len(tensors) + len(saved)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> tuple[Any, ...]:
        operator, seen, impl, inputs, outputs = ctx.call
        kept, needed = ctx.saved_tensors, ctx.needs_input_grad[4:]
        tensors, results, residuals = kept[:inputs], kept[inputs:outputs], kept[outputs:]
        function, given = seen.kind.signature.function, seen.kind.given
        found = gradients(operator, function, tensors, given, impl, Upstream(d_results, results, residuals, needed))
        return None, None, None, None, *found


def gradients(
    operator: Declared[Any], function: str, tensors: Tensors, options: Sequence[Any], impl: str, upstream: Upstream
) -> list[Tensor | None]:
    """The gradient of each argument of an earlier call, None if it is not in ``upstream.wanted``, here one flag an argument."""
    d_results, results, residuals, needed = upstream
    d_results = tuple(operator.upstream(function, tensors, d_results))
    if torch.is_grad_enabled() or not private.fast(d_results):  # differentiated again, or not plain tensors
        found = _in_torch(operator, function, options, impl, tensors, results, d_results)
    else:
        same = operator.recall(function, tensors, options)  # hooks of saved tensors may have changed strides
        seen = same or operator.learn(operator.signature(function), tensors, options)
        problem = operator.problem.known(operator, seen, tensors)  # values are checked
        wanted = tuple([need for need, gradient in zip(needed, operator.gradient) if gradient])
        found = operator.gradients(problem, impl, Upstream(d_results, results, residuals, wanted))
    return operator.placed(found, needed)


class _Attached(torch.autograd.Function):
    """Returns results that autograd already tracks, and adds derivatives of their gradients."""

    @staticmethod
    def forward(ctx: Any, operator: Declared[Any], seen: Seen, impl: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        results = [None if x is None else x.detach() for x in tensors[:count]]
        saved = operator.saved(results)
        ctx.save_for_backward(*tensors[count:], *saved)
        ctx.call, ctx.count = (operator, seen, impl), count
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> tuple[Any, ...]:
        (operator, seen, impl), kept, count = ctx.call, ctx.saved_tensors, ctx.count
        inputs = len(operator.names)
        if not torch.is_grad_enabled():
            return None, None, None, None, *d_results, *[None] * inputs
        tensors, results = kept[:inputs], kept[inputs:]
        upstream = operator.upstream(seen.kind.signature.function, tensors, d_results)
        found = _in_torch(operator, seen.kind.signature.function, seen.kind.given, impl, tensors, results, upstream)
        return None, None, None, None, *[None] * count, *operator.placed(found, ctx.needs_input_grad[4 + count :])


def _in_torch(
    operator: Declared[Any], function: str, options: Sequence[Any], impl: str, tensors: Tensors, results: Tensors, upstream: Tensors
) -> Tensors:
    """Gradients by torch's operator. They can be differentiated again."""
    return operator.unpacked(operator.gradients_in_torch(*upstream, *results, *tensors, function, *operator.plain(options), impl))
