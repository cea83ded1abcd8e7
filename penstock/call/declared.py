"""Operators without the paths of their calls: a declaration, its implementations and caches; validation, the choice, and running."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..errors import Complaints, RangeError, shortened
from . import recompute
from .autocast import no_autocast, without_autocast
from .declaration import Option, Options, Result, Signature
from .derivatives import Tensors, count_write, second_derivatives
from .dispatch import Explanation, Family
from .implementation import Implementation, Mode, Upstream
from .memory import Kind, Memory, Seen
from .problem import Problem
from .validation import bind, check, check_in_place, check_values, reads_values, warn_of_layout

P = TypeVar("P", bound=Problem)
T = TypeVar("T", Tensor, Tensor | None)


class Declared(Generic[P]):
    """An operator as it is declared: one signature per function, the same arguments, options and results for all."""

    in_torch: Callable[..., Any]
    """``penstock::name``."""
    gradients_in_torch: Callable[..., Any]
    """``penstock::name_backward``; an operator in place has none."""

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
        gradients use it. An operator in place has none, and no gradients.
        """
        self.name, self.problem, self.family, self.differentiable = name, problem, family, differentiable
        self.signatures = {one.function: one for one in signatures}
        self.options, self.results = tuple(options), tuple(results)
        self.arguments = signatures[0].arguments
        self.names = tuple(one.name for one in self.arguments)
        self.option_names = tuple(one.name for one in options)
        self.gradient = tuple(one.gradient for one in self.arguments)
        self.places = tuple([sum(self.gradient[:place]) if one else None for place, one in enumerate(self.gradient)])
        """For each argument, the index of its gradient among the gradients, or None."""
        self.cast = tuple(place == 0 or one.like == self.names[0] for place, one in enumerate(self.arguments))
        self.in_place = any(one.written for one in self.arguments)
        self.mode: Mode = "advance" if self.in_place else "forward"
        self.saves = any(one.saved for one in results)
        """Whether the backward pass needs results."""
        package, dot, _ = problem.__module__.rpartition(".")
        self.modules = package + dot or problem.__module__
        """How the names of the family's modules begin."""
        self.memory = Memory()
        self.declared()

    def declared(self) -> None:
        """Called once, when all of the declaration is set."""

    # Validation and caches

    def signature(self, function: object) -> Signature:
        """The signature of a function."""
        if not isinstance(function, str) or function not in self.signatures:
            complaints = Complaints(f"penstock::{self.name}")
            complaints.add(RangeError, "function", f"one of {', '.join(self.signatures)}", shortened(function))
            complaints.raise_any()
        return self.signatures[function]  # type: ignore[index]

    def recall(self, function: str, tensors: Tensors, options: Sequence[Any]) -> Seen | None:
        """The data of equal calls or, if there were none, of similar calls; None if there were neither."""
        try:
            return self.memory.find(self.signatures[function], tensors, options)
        except (TypeError, KeyError):  # an unhashable option or an unknown function: not a valid call
            return None

    def learn(self, signature: Signature, tensors: Tensors, options: Sequence[Any]) -> Seen:
        """Validate and cache a call."""
        sizes = check(signature, tensors, self.by_name(options))
        warn_of_layout(signature, tensors, sizes, self.modules)
        return self.memory.keep(self.kind(signature, options, sizes), tensors, sizes)

    def kind(self, signature: Signature, options: Sequence[Any], sizes: Mapping[str, int]) -> Kind:
        """The data that similar calls share."""
        resolved = dict(zip(self.option_names, self.resolved(signature, options, sizes)))
        return Kind(signature, tuple(options), resolved, self.returned(options), sizes)

    def seen_of(self, problem: Problem) -> Seen:
        """The data of calls equal to a valid problem, cached if new."""
        options = tuple([getattr(problem, name) for name in self.option_names])
        found = self.memory.find(problem.signature, problem.tensors, options)
        return found or self.memory.keep(self.kind(problem.signature, options, problem.sizes), problem.tensors, problem.sizes)

    def known(self, seen: Seen, tensors: Tensors) -> P:
        """The problem of a cached call. Values are checked, see ``reads_values``."""
        if self.in_place:
            check_in_place(seen.kind.signature, tensors, seen.bound)
        if reads_values(tensors[0]):  # type: ignore[arg-type]
            check_values(seen.kind.signature, tensors, seen.sizes, seen.kind.options)
        return self.problem.known(self, seen, tensors)

    def checked(self, function: str, tensors: Tensors, options: Sequence[Any]) -> P:
        """The problem of a call, validated without the cache."""
        signature = self.signature(function)
        sizes = check(signature, tensors, self.by_name(options))
        if self.in_place:
            check_in_place(signature, tensors, {})
        return self.problem.of(self, signature, tensors, dict(zip(self.option_names, self.resolved(signature, options, sizes))), sizes)

    def resolved(self, signature: Signature, options: Sequence[Any], sizes: Mapping[str, int]) -> tuple[Any, ...]:
        """Options as implementations see them."""
        about = signature.about
        return tuple([x if one.resolve is None else one.resolve(x, sizes, about) for one, x in zip(self.options, self.plain(options))])

    def plain(self, options: Sequence[Any]) -> list[Any]:
        """Options as torch's schemas take them: numbers of other libraries become Python numbers."""
        return [one.plain(x) for one, x in zip(self.options, options)]

    def by_name(self, options: Sequence[Any]) -> Options:
        """Options by name, as torch's schemas take them."""
        return dict(zip(self.option_names, self.plain(options)))

    def returned(self, options: Sequence[Any]) -> list[bool]:
        """For each result, whether the options request it."""
        given = dict(zip(self.option_names, options))
        return [not one.wanted or bool(given[one.wanted]) for one in self.results]

    def asked_for(self, results: Tensors, options: Sequence[Any]) -> Tensors:
        """Results or their gradients, None if not requested."""
        return [x if wanted else None for x, wanted in zip(results, self.returned(options))]

    def saved(self, results: Sequence[T]) -> list[T]:
        """The results that the backward pass needs."""
        return [x for one, x in zip(self.results, results) if one.saved] if self.saves else []

    def empty(self, problem: Problem, impl: str) -> list[Tensor]:
        """Uninitialised results of ``run`` with ``saved``."""
        first = problem.tensors[0]
        assert first is not None
        shapes = [[problem.sizes[axis] for axis in one.axes.split()] for one in self.results]
        saved = self.saves and self.family.choose(problem.whole, self.mode, impl).backward is not None
        wanted = self.returned([getattr(problem, name) for name in self.option_names])
        return [
            first.new_empty(shape, dtype=one.dtype(first.dtype)) if some or (saved and one.saved) else first.new_empty(0)
            for one, shape, some in zip(self.results, shapes, wanted)
        ]

    def upstream(self, function: str, tensors: Tensors, d_results: Sequence[Tensor | None]) -> Tensors:
        """Gradients of the results as a backward pass takes them: a missing gradient of the first result becomes zeros."""
        if d_results[0] is not None:
            return d_results
        sizes, one, x = bind(self.signatures[function], tensors), self.results[0], tensors[0]
        assert sizes is not None and x is not None  # noqa: PT018
        return [x.new_zeros([sizes[axis] for axis in one.axes.split()], dtype=one.dtype(x.dtype)), *d_results[1:]]

    def second_derivatives(
        self, function: str, options: Sequence[Any], given: Tensors, dd: Tensors, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of the arguments of ``penstock::name_backward``, given the gradients ``dd`` of its results."""
        assert self.differentiable is not None
        count, saved = len(self.results), sum(one.saved for one in self.results)
        tensors = given[count + saved :]
        problem = self.checked(function, tensors, options)
        with no_autocast(tensors[0]):
            of_results, of_tensors = second_derivatives(self.differentiable, problem, given[:count], dd)
        every = [*of_results, *[None] * saved, *self.placed(of_tensors, needed[count + saved :])]
        return [x if need else None for x, need in zip(every, needed)]

    def placed(self, gradients: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
        """For each argument its gradient, None if it is not needed or the argument is not differentiable."""
        return [gradients[place] if need and place is not None else None for place, need in zip(self.places, needed)]

    @staticmethod
    def unpacked(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The results of a torch operator as a tuple, also a single one."""
        return results if isinstance(results, tuple) else (results,)

    def explain(self, problem: Problem, impl: str) -> Explanation:
        """Which implementations would run, and why."""
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in problem.tensors)
        modes: tuple[Mode, ...] = (self.mode,) if self.in_place else ("forward", "backward")
        return self.family.explain(problem, modes, str(impl), wanted)

    # Running

    def choice(self, problem: Problem, mode: Mode, impl: str, gradients: bool = False) -> Implementation:
        """The implementation for this call, a whole problem, and similar calls. ``gradients``: whether a backward pass may follow."""
        choices, key = problem.seen.kind.choices, (mode, impl, gradients)
        found = choices.get(key)
        if found is None:
            found = choices[key] = self.family.choose(problem, mode, impl, gradients)
        return found

    def run(self, problem: Problem, impl: str, saved: bool = False, residuals: bool = False) -> tuple[Tensors, Tensors]:
        """The requested results, with ``saved`` also the results that the backward pass needs, and with ``residuals`` its residuals."""
        problem = problem.whole
        one = self.choice(problem, self.mode, impl, residuals)
        kept: Tensors = ()
        if self.in_place:
            results: Tensors = (without_autocast(problem.first, one.advance, problem),)  # type: ignore[arg-type]
            written = problem.__dict__[self.names[problem.signature.written]]
            if written is not None:
                count_write(written)
        elif residuals and one.forward_with_residuals is not None and not recompute.active():
            results, kept = without_autocast(problem.first, one.forward_with_residuals, problem)
        else:
            results = without_autocast(problem.first, one.forward, problem)
        wanted = problem.seen.kind.returned
        if saved and self.saves and one.backward is not None:
            wanted = [some or told.saved for some, told in zip(wanted, self.results)]
        return [_own(x) if some and x is not None else None for x, some in zip(results, wanted)], kept

    def gradients(self, problem: Problem, impl: str, upstream: Upstream) -> Tensors:
        """Gradients of the differentiable arguments, contiguous; None for arguments that are missing or need none. Not differentiable."""
        whole = problem.whole
        found = without_autocast(problem.first, self.choice(whole, "backward", impl).gradients, whole, upstream)
        return [None if x is None else _own(x) for x in problem.shared(found)]


def _own(x: Tensor) -> Tensor:
    """x, contiguous and, for autograd, no view: it refuses changes in place of views that a function of several results returns."""
    x = x.contiguous()
    return x if x._base is None or x.requires_grad else x.detach()
