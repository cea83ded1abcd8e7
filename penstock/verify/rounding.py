"""Errors from rounded operands of products: what implementations that round them may differ from the oracle by.

A family has its operators in float64 with rounded operands (``Trial.rounded``). Their error against the oracle comes from the rounding
only. The allowed error of a kernel is twice that error plus one rounding of the result.
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from ..call.derivatives import Tensors, gradients_of
from ..call.families import trial_of
from ..call.problem import Problem
from .oracle import by_result, doubled, error


def errors(problem: Problem, bits: int, exact: dict[str, Tensor], d_results: Tensors = ()) -> dict[str, float]:
    """Errors of the results in ``exact`` from rounding the operands, by name; the largest of all draws.

    Gradients are computed if ``d_results`` are given. An error is 0 if the formula's result is not finite, or if the family has no formula.
    """
    rounded = trial_of(problem.operator).rounded
    problem = doubled(problem)
    gradients = [one.name for one in problem.signature.arguments if one.gradient]
    doubles = [None if d is None else d.double() for d in d_results]
    largest: dict[str, float] = {}
    for formula in () if rounded is None else rounded(bits):
        with torch.no_grad():
            if problem.operator.in_place:
                written = problem.signature.arguments[problem.signature.written].name
                whole = problem.with_tensors({written: getattr(problem, written).clone()}).whole
                found = {"output in place": formula(whole)[0], "states in place": getattr(whole, written)}
            else:
                whole = problem.whole
                found = {one.name.replace("_", " "): x for one, x in zip(problem.operator.results, formula(whole))}
            if d_results:
                found |= by_result(dict(zip(gradients, problem.shared(gradients_of(formula, whole, doubles)))))
        for name in found.keys() & exact.keys():
            apart = error(found[name], exact[name])
            largest[name] = max(largest.get(name, 0.0), apart if isfinite(apart) else 0.0)
    return largest
