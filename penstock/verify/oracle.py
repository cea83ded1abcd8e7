"""The oracle: exact results in float64, the error of a result against them, and the allowed error.

The oracle runs on one thread. It consists of many small operations, which more threads slow down on a busy machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from ..call.derivatives import gradients_of
from ..call.problem import Problem
from .inputs import Inputs
from .machine import using_threads

ACCURACY = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
"""Largest error of a result before it is rounded. Sums are float32, or float64 for float64 inputs."""

BUDGET_TOKENS = 1024
"""Number of checked tokens up to which the budget does not grow."""


def growth(tokens: int) -> float:
    """Factor of the budget for many tokens: rounding errors grow with the square root of their number."""
    return sqrt(max(1.0, tokens / BUDGET_TOKENS))


def rounding_once(result: torch.dtype) -> float:
    """Largest error from rounding a result to bfloat16 or float16; 0 for other dtypes."""
    return torch.finfo(result).eps / 2 if result in (torch.bfloat16, torch.float16) else 0.0


def budget(inputs: torch.dtype, result: torch.dtype) -> float:
    """Allowed error: that of the arithmetic and, for bfloat16 and float16 results, of one rounding."""
    return ACCURACY[inputs] + rounding_once(result)


def error(result: Tensor, exact: Tensor) -> float:
    """Largest absolute difference, relative to the largest absolute exact value; infinite if a value is not finite."""
    if result.shape != exact.shape or not bool(result.isfinite().all()):
        return float("inf")
    largest, difference = float(exact.abs().max()), float((result.double() - exact).abs().max())
    return difference / largest if largest else difference


def doubled(problem: Problem) -> Problem:
    """The problem with its floating-point arguments in float64."""
    given = {name: x for name, x in zip(problem.operator.names, problem.tensors) if x is not None and x.is_floating_point()}
    return problem.with_tensors({name: x.detach().double() for name, x in given.items()})


def exact_forward(inputs: Inputs, initial_state: Tensor | None = None) -> tuple[Tensor, ...]:
    """The results, such as output and final state, in float64."""
    with torch.no_grad(), using_threads(1):
        return tuple(inputs.family.family.named("reference").forward(doubled(inputs.problem(initial_state))))  # type: ignore[arg-type]


def exact_gradients(
    inputs: Inputs, d_output: Tensor, initial_state: Tensor | None = None, d_final_state: Tensor | None = None
) -> dict[str, Tensor]:
    """Gradients of the inputs in float64, by name; also of "initial_state" if it is given."""
    problem = doubled(inputs.problem(initial_state))
    names = [one.name for one in problem.signature.arguments if one.gradient]
    with torch.no_grad(), using_threads(1):
        d_final = None if d_final_state is None else d_final_state.double()
        found = gradients_of(inputs.family.family.named("reference").forward, problem, (d_output.double(), d_final))
    return {name: x for name, x in zip(names, found) if x is not None}


def by_result(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Gradients by names of results such as "gradient of q". Missing inputs are left out."""
    return {f"gradient of {name.replace('_', ' ')}": x for name, x in gradients.items() if x is not None}
