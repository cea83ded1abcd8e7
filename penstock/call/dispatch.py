"""The ordered list of a family's implementations: chooses one for a problem, or explains the choice.

``impl="auto"`` walks the list from the top and takes the first implementation that neither refuses nor avoids the problem.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from ..errors import Complaints, ImplementationRefused, RangeError, shortened
from .implementation import FormVerdict, Implementation, Mode
from .problem import Problem


class Available(NamedTuple):
    """Whether an implementation can run on this machine."""

    name: str
    summary: str
    reason: str | None
    """Why it cannot run here; None if it can."""
    forms: tuple[str, ...] = ()
    """The names of its forms (kernels, or fixed groups of kernels) in the order in which they are asked. Empty if it cannot run here."""


class Verdict(NamedTuple):
    """The answer of one implementation for a call in one mode."""

    name: str
    mode: Mode
    reason: str | None
    """Why ``impl="auto"`` does not take it, or None."""


@dataclass(frozen=True)
class Explanation:
    """The answers of all implementations for one call. ``print`` shows them as a table."""

    call: str
    """Function, sizes, dtype and device."""
    chosen: dict[Mode, str | None]
    """The implementation that runs, by mode; None if all refuse."""
    verdicts: tuple[Verdict, ...]
    note: str = ""
    forms: dict[Mode, tuple[FormVerdict, ...]] = field(default_factory=dict)
    """The forms of the implementation that runs, by mode, up to those that run. Those without a reason run."""
    named: str = ""
    """The implementation that the call names, or "" for ``impl="auto"``."""

    @property
    def forward(self) -> str | None:
        """The implementation that runs the forward pass."""
        return self.chosen.get("forward")

    @property
    def backward(self) -> str | None:
        """The implementation that runs the backward pass."""
        return self.chosen.get("backward")

    def __str__(self) -> str:
        runs = (f"{mode} runs {name}" if name is not None else f"no implementation runs {mode}" for mode, name in self.chosen.items())
        lines = [self.call, "  " + ", ".join(runs)]
        seen: set[tuple[Mode, str | None]] = set()
        for name, mode, reason in self.verdicts:
            seen.add((mode, name))
            answer = reason or self._taken(name, mode, (mode, self.chosen[mode]) in seen)
            lines.append(f"  {name:<16} {mode:<9} {answer}")
            if name == self.chosen[mode]:
                for (part, why), alike in groupby(self.forms.get(mode, ()), lambda one: (one.part, one.reason)):
                    lines.append(f"    {part}: {', '.join(one.name for one in alike)}: {why or 'runs'}")
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])

    def _taken(self, name: str, mode: Mode, later: bool) -> str:
        """The answer of an implementation that takes the call. ``later``: it is not before the chosen one in the list."""
        if name == self.chosen[mode]:
            return "chosen"
        if self.named:
            return f"takes it, but {self.named} is named"
        return "takes it, but is later in the list" if later else f"takes it, but {self.chosen[mode]} runs both passes"


class Family:
    """The implementations of one or more operators, in the order in which ``impl="auto"`` tries them."""

    def __init__(self, *implementations: Implementation) -> None:
        self.implementations = implementations

    def named(self, name: str) -> Implementation:
        """The implementation of this name, which must exist."""
        return next(one for one in self.implementations if one.name == name)

    def available(self) -> tuple[Available, ...]:
        """All implementations, and whether they can run on this machine."""
        found = []
        for one in self.implementations:
            reason = one.available()
            found.append(
                Available(one.name, one.summary, reason, () if reason else tuple(dict.fromkeys(form.name for form in one.forms())))
            )
        return tuple(found)

    def check_name(self, function: str, impl: object) -> None:
        """Raise RangeError unless ``impl`` is "auto" or an implementation's name."""
        names = ["auto", *(one.name for one in self.implementations)]
        if not isinstance(impl, str) or impl not in names:
            complaints = Complaints(function)
            complaints.add(RangeError, "impl", f"one of {', '.join(names)}", shortened(impl), "See penstock.implementations().")
            complaints.raise_any()

    def pick(self, problem: Problem, mode: Mode, impl: str) -> Implementation:
        """The named implementation or, for "auto", the first that takes the problem. Raises ImplementationRefused."""
        self.check_name(problem.function, impl)
        if impl != "auto":
            one = self.named(impl)
            reason = one.refusal(problem, mode)
            if reason is None:
                return one
            rule = f"impl must be one that takes this call, got {impl!r}: {reason}. Use impl='auto'."
            raise ImplementationRefused(f"{problem.function}: {rule}")
        reasons = []
        for one in self.implementations:
            reason = passed_over(one, problem, mode)
            if reason is None:
                return one
            reasons.append(f"{one.name} {reason}")
        raise ImplementationRefused(f"{problem.function}: no implementation takes this call. {'; '.join(reasons)}.")

    def choose(self, problem: Problem, mode: Mode, impl: str, gradients: bool = False) -> Implementation:
        """The implementation that runs a call, by ``pick``. If gradients are needed and the implementation of the backward pass saves
        residuals, it also runs the forward pass.
        """
        if mode == "forward" and gradients:
            backward = self.pick(problem, "backward", impl)
            if backward.forward_with_residuals is not None:
                return backward
        return self.pick(problem, mode, impl)

    def explain(self, problem: Problem, modes: tuple[Mode, ...], impl: str, gradients: bool) -> Explanation:
        """Every implementation's verdict on a problem."""
        whole = problem.whole
        q = next(x for x in problem.tensors if x is not None)
        operator = problem.operator
        given = [f"{axis}={size}" for axis, size in problem.shown.items()]
        given.append(f"{str(q.dtype).removeprefix('torch.')} on {q.device}")
        given += [f"{one.name}=True" for one in operator.options if getattr(problem, one.name) is True]
        optional = [one.name for one in problem.signature.arguments if not one.required and getattr(problem, one.name) is not None]
        given += [f"with {name}" for name in optional]
        call = f"{problem.function}({', '.join(given)})"
        chosen: dict[Mode, str | None] = {}
        for mode in modes:
            try:
                chosen[mode] = self.choose(whole, mode, impl, gradients).name
            except ImplementationRefused:
                chosen[mode] = None
        verdicts = tuple(Verdict(one.name, mode, passed_over(one, whole, mode)) for one in self.implementations for mode in modes)
        kept = gradients and chosen.get("forward") is not None and self.pick(whole, "forward", impl).name != chosen["forward"]
        note = "Gradients are wanted: the forward pass keeps residuals for the backward pass, so that one runs both." if kept else ""
        forms = {mode: self.named(name).verdicts(whole, mode) for mode, name in chosen.items() if name is not None}
        named = "" if impl == "auto" else impl
        return Explanation(call, chosen, verdicts, note, {mode: found for mode, found in forms.items() if found}, named)


def passed_over(one: Implementation, problem: Problem, mode: Mode) -> str | None:
    """Why "auto" does not take an implementation: it refuses, or would be slow."""
    reason = one.refusal(problem, mode)
    if reason is not None:
        return "refuses: " + reason
    reason = one.avoids(problem, mode)
    return None if reason is None else "passed over: " + reason
