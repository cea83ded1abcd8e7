"""A call on which implementations are compared with the oracle, its tensors, and its exact results.

The oracle of a family is its implementation named "reference", in float64. The tensors of a call are drawn from its declaration.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..call.declaration import Argument, Signature
from ..call.derivatives import Tensors
from ..call.families import Trial
from ..call.implementation import Implementation, Mode, Upstream
from ..call.problem import Problem
from ..tokens.dtypes import state_dtype
from . import oracle, rounding
from .finding import Finding
from .machine import using_threads


def row_of(signature: Signature) -> str:
    """The name of a signature's row of the family's table, or of its function."""
    return signature.about.name if signature.about is not None else signature.function


class Comparison:
    """A trial with its tensors and the exact results."""

    def __init__(self, trial: Trial, signature: Signature, dtype: torch.dtype, device: str) -> None:
        self.trial, self.signature, self.dtype, self.device = trial, signature, dtype, device
        self.operator = trial.operator
        random = torch.Generator().manual_seed(0)
        self.tensors = [self._draw(one, random) for one in signature.arguments]
        self.problem = self.checked(self.tensors)
        empty = self.operator.results
        shapes = [[self.problem.sizes[axis] for axis in one.axes.split()] for one in empty]
        self.d_results = tuple(torch.randn(shape, generator=random).to(device, one.dtype(dtype)) for one, shape in zip(empty, shapes))
        with using_threads(1):  # the oracle's many small operations do not gain from more threads
            self.exact = self._exact()
        self._errors: dict[int, dict[str, float]] = {}

    def _draw(self, one: Argument, random: torch.Generator) -> Tensor | None:
        if one.name in self.trial.indices:
            return torch.tensor(self.trial.indices[one.name], device=self.device)
        if one.absent or one.name in self.trial.omitted or not torch.is_floating_point(torch.empty(0, dtype=one.dtypes[0])):
            return None
        shape = [self.trial.sizes[axis] for axis, _ in one.letters]
        x = torch.randn(shape, dtype=torch.float64, generator=random)
        dtype = self.dtype if one.like or one is self.signature.arguments[0] else state_dtype(self.dtype)
        return (x if one.draw is None else one.draw(x)).to(self.device, dtype)

    def checked(self, tensors: Tensors) -> Problem:
        """The problem with these tensors."""
        problem: Problem = self.operator.checked(self.signature.function, tensors, self.trial.options)
        return problem

    def _exact(self) -> dict[str, Tensor]:
        reference = self.operator.family.named("reference")
        double = [x.double() if x is not None and x.is_floating_point() else x for x in self.tensors]
        return self.results(reference, self.checked(double), self.operator.mode) | (
            {} if self.operator.in_place else self.results(reference, self.checked(double), "backward")
        )

    def results(self, one: Implementation, problem: Problem, mode: Mode) -> dict[str, Tensor]:
        """The results of an implementation in a mode, by name."""
        with torch.no_grad():
            whole = problem.whole
            found: Tensors
            if mode == "backward":
                return self._gradients(one, problem)
            if mode == "advance":
                pool = next(argument.name for argument in self.signature.arguments if argument.written)
                written = getattr(problem, pool).clone()
                assert one.advance is not None
                found, names = (one.advance(whole.with_tensors({pool: written})), written), ["output in place", "states in place"]
            else:
                found, names = one.forward(whole), [result.name for result in self.operator.results]
        return {name.replace("_", " "): x for name, x in zip(names, found) if x is not None}

    def _gradients(self, one: Implementation, problem: Problem, residuals: Tensors = ()) -> dict[str, Tensor]:
        d_results = tuple(d.to(x.dtype) for d, x in zip(self.d_results, self._like(problem)))
        found = problem.shared(one.gradients(problem.whole, Upstream(d_results, self._saved(problem), tuple(residuals))))
        names = [f"gradient of {argument.public}" for argument in self.signature.arguments if argument.gradient]
        return {name.replace("_", " "): x for name, x in zip(names, found) if x is not None}

    def _from_residuals(self, one: Implementation, problem: Problem) -> dict[str, Tensor]:
        """Gradients from what the forward pass keeps for them, if it keeps anything and the implementation runs the backward pass."""
        if one.forward_with_residuals is None or one.refusal(problem.whole, "backward") is not None:
            return {}
        with torch.no_grad():
            _, residuals = one.forward_with_residuals(problem.whole)
            return self._gradients(one, problem, residuals) if any(x is not None for x in residuals) else {}

    def _like(self, problem: Problem) -> list[Tensor]:
        first = problem.tensors[0]
        assert first is not None
        return [first.new_empty(0, dtype=one.dtype(first.dtype)) for one in self.operator.results]

    def _saved(self, problem: Problem) -> tuple[Tensor, ...]:
        """The saved results that the backward pass takes, computed by the oracle."""
        if not any(one.saved for one in self.operator.results):
            return ()
        found = self.operator.family.named("reference").forward(problem)
        return tuple(x for x, one in zip(found, self.operator.results) if one.saved and x is not None)

    def compare(self, one: Implementation, only: Mode | None = None) -> Iterator[Finding]:
        """Compare one implementation with the exact results. What "auto" chooses runs on all threads, the others on one.

        only : str, optional
            One mode. Of "forward" also the gradients from what the forward pass keeps for them.
        """
        at = one.name, self.device, row_of(self.signature), str(self.dtype).removeprefix("torch.")
        unavailable = one.available()
        if unavailable is not None:
            yield Finding(*at, "all", None, None, unavailable, absent=True)
            return
        modes: tuple[Mode, ...] = (self.operator.mode,) if self.operator.in_place else ("forward", "backward")
        threads = None if self.operator.family.pick(self.problem.whole, self.operator.mode, "auto") is one else 1
        for mode in modes if only is None else (only,):
            reason = one.refusal(self.problem.whole, mode)
            if reason is not None:
                yield Finding(*at, mode, None, None, reason)
                continue
            try:
                with using_threads(threads):
                    found = self.results(one, self.problem, mode)
                    if only == "forward":
                        found |= self._from_residuals(one, self.problem)
            except Exception as failure:  # any failure of a kernel on this machine is a finding
                yield Finding(*at, mode, None, None, f"{type(failure).__name__}: {failure}", failed=True)
                continue
            for result, value in found.items():
                error = oracle.error(value, self.exact[result])
                rounded = self._rounded(one, "backward" if result.startswith("gradient") else mode)
                allowed = self._budget(value.dtype) + 2 * rounded.get(result, 0.0)
                yield Finding(*at, result, error, allowed, failed=not error <= allowed)

    def _rounded(self, one: Implementation, mode: Mode) -> dict[str, float]:
        """Errors from rounded operands of the products, by result; empty if the implementation does not round them in this mode."""
        bits = one.operands(self.dtype, mode)
        if bits is None:
            return {}
        if bits not in self._errors:
            self._errors[bits] = self._errors_of(bits)
        return self._errors[bits]

    def _errors_of(self, bits: int) -> dict[str, float]:
        """Errors from operands of so many bits, by result."""
        given = [one for one, x in zip(self.signature.arguments, self.tensors) if x is not None]
        named = {f"gradient of {one.name}": f"gradient of {one.public}" for one in given}
        public = {inner.replace("_", " "): outer.replace("_", " ") for inner, outer in named.items()}
        inner = {outer: name for name, outer in public.items()}
        exact = {inner.get(name, name): x for name, x in self.exact.items()}
        errors = rounding.errors(self.problem, bits, exact, () if self.operator.in_place else self.d_results)
        return {public.get(name, name): error for name, error in errors.items()}

    def _budget(self, result: torch.dtype) -> float:
        given = self.trial.budget
        return oracle.budget(self.dtype, result) if given is None else given[self.dtype]
