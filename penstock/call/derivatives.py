"""Derivatives through differentiable PyTorch operations: gradients by autograd, and gradients of gradients by ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .problem import Problem

Tensors = Sequence[Tensor | None]


def count_write(x: Tensor) -> None:
    """Tell autograd about a write in place, which kernels do not. A backward pass through an earlier use of x then raises."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def gradients_of(forward: Callable[[Any], Tensors], problem: Problem, d_results: Tensors) -> list[Tensor | None]:
    """Gradients of the differentiable arguments by autograd through a ``forward`` of differentiable operations.

    They cannot be differentiated again.
    """
    given = {one.name: getattr(problem, one.name) for one in problem.signature.arguments if one.gradient}
    inputs = {name: x for name, x in given.items() if x is not None}
    with torch.inference_mode(False), torch.enable_grad():  # inference mode also in a compiled graph, which runs this below autograd
        inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        results = forward(problem.with_tensors(inputs))
        pairs = [(x, d) for x, d in zip(results, d_results) if x is not None and d is not None and x.requires_grad]
        if not pairs:  # without tokens the results depend on no argument
            return [None if x is None else torch.zeros_like(x) for x in given.values()]
        outputs, d_outputs = zip(*pairs)
        grads = torch.autograd.grad(outputs, tuple(inputs.values()), d_outputs, allow_unused=True, materialize_grads=True)
    found = dict(zip(inputs, grads))
    return [found.get(name) for name in given]


def second_derivatives(
    forward: Callable[[Any], Tensors], problem: Problem, d_results: Tensors, dd: Tensors
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of ``d_results`` and of the differentiable arguments; ``dd`` are the gradients of the results of ``gradients_of``.

    They can be differentiated again, in forward and in reverse mode.
    """
    names = [one.name for one in problem.signature.arguments if one.gradient]
    present = [name for name in names if getattr(problem, name) is not None]
    given = [place for place, d in enumerate(d_results) if d is not None]

    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = forward(problem.with_tensors(dict(zip(present, tensors))))
        return tuple(found[place] for place in given)  # type: ignore[misc]

    def gradients(*both: Tensor) -> tuple[Tensor, ...]:
        pull = torch.func.vjp(results, *both[len(given) :])[1]
        return pull(both[: len(given)])  # type: ignore[no-any-return]

    tensors = [getattr(problem, name) for name in present]
    firsts, pull = torch.func.vjp(gradients, *(d_results[place] for place in given), *tensors)[:2]
    of_present = dict(zip(names, dd))
    found = pull(tuple(torch.zeros_like(x) if of_present[name] is None else of_present[name] for name, x in zip(present, firsts)))
    of_results, of_tensors = dict(zip(given, found)), dict(zip(present, found[len(given) :]))
    return [of_results.get(place) for place in range(len(d_results))], [of_tensors.get(name) for name in names]
