"""Operators: a declaration, the implementations behind it, and the way a call takes.

A call of a public function is a call of its ``Operator``. It takes one of three ways, which all end in ``run``:

- the fast path (``eager``): plain tensors, no modes. What is known of equal calls is looked up, and an implementation runs.
- ``torch.func`` transforms and forward derivatives (``transforms``).
- everything else, compiled graphs among it: torch's operators (``registration``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..errors import Complaints, RangeError, shortened
from . import eager, private, registration, transforms
from .autocast import cast, no_autocast
from .declaration import Option, Result, Signature
from .derivatives import Tensors, second_derivatives
from .dispatch import Explanation, Family
from .implementation import Implementation, Mode, Upstream
from .memory import Kind, Memory, Seen
from .problem import Problem
from .validation import bind, check, check_in_place, check_types, check_values, reads_values

P = TypeVar("P", bound=Problem)


class Explain(str):
    """An ``impl`` for calls that are to be explained, not run."""


class Explained(Exception):
    """Carries an explanation out of a call."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__()
        self.explanation = explanation


def explain(function: Callable[..., object], *args: Any, impl: str = "auto", **kwargs: Any) -> Explanation:
    """What a public function would run for these arguments, which it validates as always."""
    try:
        function(*args, impl=Explain(impl), **kwargs)
    except Explained as found:
        return found.explanation
    raise TypeError(f"{function} calls no operator")


class Operator(Generic[P]):
    """What public functions call: one signature for each function, the same arguments, options and results for all."""

    def __init__(
        self,
        name: str,
        problem: type[P],
        signatures: Sequence[Signature],
        results: Sequence[Result],
        family: Family,
        options: Sequence[Option] = (),
        differentiable: Callable[[Any], Tensors] | None = None,
    ) -> None:
        """``differentiable`` computes the results by differentiable PyTorch operations: forward derivatives and derivatives of
        gradients go through it. An operator with an argument that is written has none, and no gradients.
        """
        self.name, self.problem, self.family, self.differentiable = name, problem, family, differentiable
        self.signatures = {one.function: one for one in signatures}
        self.options, self.results = tuple(options), tuple(results)
        self.arguments = signatures[0].arguments
        self.names = tuple(one.name for one in self.arguments)
        self.option_names = tuple(one.name for one in options)
        self.gradient = tuple(one.gradient for one in self.arguments)
        self.cast = tuple(place == 0 or one.like == self.names[0] for place, one in enumerate(self.arguments))
        self.in_place = any(one.written for one in self.arguments)
        self.mode: Mode = "advance" if self.in_place else "forward"
        self.memory = Memory()
        self.in_torch, self.gradients_in_torch = registration.register(self)

    def __call__(self, function: str, tensors: Tensors, options: Sequence[Any], impl: str = "auto") -> Tensors:
        """The results; None for those that are not wanted."""
        fast = private.fast(tensors)
        if fast:
            if private.autocasting():
                tensors = cast(tensors, self.cast)
            seen = self.recall(function, tensors, options)
            if seen is not None and type(impl) is str:
                return self.eager(seen, tensors, impl)
        signature = self.signature(function)
        check_types(signature, tensors, self.options, options)
        self.family.check_name(function, impl)
        if fast:
            return self.eager(self.learn(signature, tensors, options), tensors, impl)
        tensors, options = cast(tensors, self.cast), self.plain(options)
        if isinstance(impl, Explain):
            raise Explained(self.explain(self.checked(function, tensors, options), impl))
        if not torch.compiler.is_compiling() and private.transforming():
            return transforms.run(self, signature, tensors, options, impl)
        return self.asked_for(self.unpacked(self.in_torch(*tensors, function, *options, impl)), options)

    # What is known of a call

    def signature(self, function: object) -> Signature:
        """That of a function of this operator."""
        if not isinstance(function, str) or function not in self.signatures:
            complaints = Complaints(f"penstock::{self.name}")
            complaints.add(RangeError, "function", f"one of {', '.join(self.signatures)}", shortened(function))
            complaints.raise_any()
        return self.signatures[function]  # type: ignore[index]

    def recall(self, function: str, tensors: Tensors, options: Sequence[Any]) -> Seen | None:
        """What is known of equal calls or, if there were none, of alike ones; None if there were neither."""
        try:
            return self.memory.find(self.signatures[function], tensors, options)
        except (TypeError, KeyError):  # what cannot be hashed, or names no function, was never found valid
            return None

    def learn(self, signature: Signature, tensors: Tensors, options: Sequence[Any]) -> Seen:
        """Validate a call, for all that are equal to it or alike."""
        sizes = check(signature, tensors)
        return self.memory.keep(self.kind(signature, options, sizes), tensors, sizes)

    def kind(self, signature: Signature, options: Sequence[Any], sizes: Mapping[str, int]) -> Kind:
        """What calls that are alike will share."""
        resolved = dict(zip(self.option_names, self.resolved(signature, options, sizes)))
        return Kind(signature, tuple(options), resolved, self.returned(options), sizes)

    def seen_of(self, problem: Problem) -> Seen:
        """What calls equal to a valid one share, whatever way it came."""
        options = tuple([getattr(problem, name) for name in self.option_names])
        found = self.memory.find(problem.signature, problem.tensors, options)
        return found or self.memory.keep(self.kind(problem.signature, options, problem.sizes), problem.tensors, problem.sizes)

    def known(self, seen: Seen, tensors: Tensors) -> P:
        """The problem of a known call; values are checked where they are read."""
        if self.in_place:
            check_in_place(seen.kind.signature, tensors, seen.bound)
        if reads_values(tensors[0]):  # type: ignore[arg-type]
            check_values(seen.kind.signature, tensors, seen.sizes)
        return self.problem.known(self, seen, tensors)

    def checked(self, function: str, tensors: Tensors, options: Sequence[Any]) -> P:
        """The problem of any call, validated."""
        signature = self.signature(function)
        sizes = check(signature, tensors)
        if self.in_place:
            check_in_place(signature, tensors, {})
        return self.problem.of(self, signature, tensors, dict(zip(self.option_names, self.resolved(signature, options, sizes))), sizes)

    def resolved(self, signature: Signature, options: Sequence[Any], sizes: Mapping[str, int]) -> tuple[Any, ...]:
        """Options as implementations see them."""
        about = signature.about
        return tuple([x if one.resolve is None else one.resolve(x, sizes, about) for one, x in zip(self.options, self.plain(options))])

    def plain(self, options: Sequence[Any]) -> list[Any]:
        """Options as torch's schemas take them: numbers of other libraries as Python's."""
        return [one.plain(x) for one, x in zip(self.options, options)]

    def returned(self, options: Sequence[Any]) -> list[bool]:
        """Which results the options ask for."""
        given = dict(zip(self.option_names, options))
        return [not one.wanted or bool(given[one.wanted]) for one in self.results]

    def asked_for(self, results: Tensors, options: Sequence[Any]) -> Tensors:
        """Results, or their gradients, with None for those that no option asks for."""
        return [x if wanted else None for x, wanted in zip(results, self.returned(options))]

    def saved(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Those that the backward pass takes."""
        return [x for one, x in zip(self.results, results) if one.saved]

    def empty(self, problem: Problem, impl: str) -> list[Tensor]:
        """Memory like that of the results of ``run`` with ``saved``."""
        first = problem.tensors[0]
        assert first is not None
        shapes = [[problem.sizes[axis] for axis in one.axes.split()] for one in self.results]
        saved = any(one.saved for one in self.results) and self.family.choose(problem, self.mode, impl).backward is not None
        wanted = self.returned([getattr(problem, name) for name in self.option_names])
        return [
            first.new_empty(shape, dtype=one.dtype(first.dtype)) if some or (saved and one.saved) else first.new_empty(0)
            for one, shape, some in zip(self.results, shapes, wanted)
        ]

    def upstream(self, function: str, tensors: Tensors, d_results: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the results as a backward pass takes them: that of the first result is zeros where there is none."""
        first, *others = d_results
        if first is None:
            sizes, one, x = bind(self.signatures[function], tensors), self.results[0], tensors[0]
            assert sizes is not None and x is not None  # noqa: PT018
            first = x.new_zeros([sizes[axis] for axis in one.axes.split()], dtype=one.dtype(x.dtype))
        return [first, *others]

    def second_derivatives(
        self, function: str, options: Sequence[Any], given: Tensors, dd: Tensors, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of what ``penstock::name_backward`` takes, from those of what it returns."""
        assert self.differentiable is not None
        count, saved = len(self.results), sum(one.saved for one in self.results)
        tensors = given[count + saved :]
        problem = self.checked(function, tensors, options)
        with no_autocast(tensors[0]):
            of_results, of_tensors = second_derivatives(self.differentiable, problem, given[:count], dd)
        every = [*of_results, *[None] * saved, *self.placed(of_tensors, needed[count + saved :])]
        return [x if need else None for x, need in zip(every, needed)]

    def placed(self, gradients: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of the differentiable arguments in the places of all arguments, where they are needed."""
        found = iter(gradients)
        every = [next(found) if gradient else None for gradient in self.gradient]
        return [x if need else None for x, need in zip(every, needed)]

    @staticmethod
    def unpacked(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What an operator of torch returned, a tuple also of one."""
        return results if isinstance(results, tuple) else (results,)

    def explain(self, problem: Problem, impl: str) -> Explanation:
        """What would run, and why."""
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in problem.tensors)
        modes: tuple[Mode, ...] = (self.mode,) if self.in_place else ("forward", "backward")
        return self.family.explain(problem, modes, str(impl), wanted)

    # Running it

    def eager(self, seen: Seen, tensors: Tensors, impl: str) -> Tensors:
        """The results of a known call, differentiable where an argument requires gradients."""
        if isinstance(impl, Explain):
            raise Explained(self.explain(self.known(seen, tensors), impl))
        if torch.is_grad_enabled() and not self.in_place:
            for x, gradient in zip(tensors, self.gradient):
                if gradient and x is not None and x.requires_grad:
                    return eager.differentiable(self, seen, tensors, impl)
        return self.run(self.known(seen, tensors), impl)[0]

    def choice(self, problem: Problem, mode: Mode, impl: str, gradients: bool = False) -> Implementation:
        """What runs this call, and all that are alike. ``gradients``: whether a backward pass will follow."""
        choices, key = problem.seen.kind.choices, (mode, impl, gradients)
        found = choices.get(key)
        if found is None:
            found = choices[key] = self.family.choose(problem, mode, impl, gradients)
        return found

    def run(self, problem: Problem, impl: str, saved: bool = False, residuals: bool = False) -> tuple[Tensors, Tensors]:
        """The results that are asked for, also those ``saved`` for the backward pass, and if wanted ``residuals`` for it."""
        one = self.choice(problem, self.mode, impl, residuals)
        kept: Tensors = ()
        with no_autocast(problem.tensors[0]):
            if self.in_place:
                results: Tensors = (one.advance(problem),)  # type: ignore[misc]
            elif residuals and one.forward_with_residuals is not None:
                results, kept = one.forward_with_residuals(problem)
            else:
                results = one.forward(problem)
        wanted = problem.seen.kind.returned
        if saved and one.backward is not None:
            wanted = [some or told.saved for some, told in zip(wanted, self.results)]
        return [x.contiguous() if some and x is not None else None for x, some in zip(results, wanted)], kept

    def gradients(self, problem: Problem, impl: str, upstream: Upstream) -> Tensors:
        """Gradients of the differentiable arguments, contiguous; None for those that are absent or not wanted."""
        with no_autocast(problem.tensors[0]), torch.no_grad():
            found = self.choice(problem, "backward", impl).gradients(problem, upstream)
        return [None if x is None else x.contiguous() for x in found]
