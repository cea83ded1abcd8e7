"""Forms of a pass: the kernels that can compute it, in an ordered list.

``first`` takes the first form of a list that neither refuses a call (it cannot compute it) nor avoids it (another form is faster).
``verdicts`` gives the reason of every form, which ``penstock.explain`` prints. The contract tests and ``penstock check`` run every form
of every list on its ``examples``.

The functions of a form take one argument, a call: the problem, the GPU and values derived from both. Each family has a class for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..call.implementation import Example, FormVerdict, Listed, Mode
from ..errors import ImplementationRefused
from .plan import Plan
from .target import Target, refuses


class Call(Protocol):
    """A problem on a GPU."""

    @property
    def target(self) -> Target:
        """The GPU."""


C = TypeVar("C", bound=Call)
P = TypeVar("P")
Part = tuple[str, "tuple[Form[Any, Any], ...]"]
"""A part of a pass: its name and its ordered list of forms."""


def everywhere(target: Target) -> str | None:
    """The default of ``absent``: has code for every GPU."""
    return None


def never(call: Any) -> str | None:
    """The default of ``refuses`` and ``avoids``: takes every call."""
    return None


@dataclass(frozen=True)
class Form(Generic[C, P]):
    """A kernel, or a fixed group of kernels, that computes a pass or a part of it."""

    name: str
    """The name of the kernel in profiles, without "penstock_"."""
    plan: P
    """Plans the launches."""
    absent: Callable[[Target], str | None] = everywhere
    """Why there is no code for a GPU, or None."""
    refuses: Callable[[C], str | None] = never
    """Why it cannot compute a call on a GPU for which there is code, or None. Kernels assert the same at compile time."""
    avoids: Callable[[C], str | None] = never
    """Why another form is faster for a call that this one can compute, or None."""
    parts: tuple[Part, ...] = ()
    """Launches of its plan that have ordered lists of their own."""
    examples: tuple[Example, ...] = ()
    """Small calls in its domain."""

    def refusal(self, call: C) -> str | None:
        """Why it cannot compute a call, or None."""
        return self.absent(call.target) or self.refuses(call)


F = TypeVar("F", bound=Form[Any, Any])


def found(forms: Sequence[F], call: Any) -> F | None:
    """The form that computes a call, or None. A form named in ``Target.forms`` runs even if it avoids the call."""
    wanted = call.target.forms
    if wanted:
        for one in forms:
            if one.name in wanted and one.refusal(call) is None:
                return one
    for one in forms:
        if one.refusal(call) is None and one.avoids(call) is None:
            return one
    return None


def first(forms: Sequence[F], call: Any) -> F:
    """The form that computes a call."""
    one = found(forms, call)
    if one is not None:
        return one
    raise ImplementationRefused("; ".join(f"{one.name} {reason(one, call)}" for one in forms))


def planned(forms: Sequence[Form[C, Callable[[C], Plan]]], call: C) -> Plan:
    """The plan of the form that computes a call."""
    form = first(forms, call)
    plan = form.plan(call)
    plan.forms.insert(0, form.name)
    return plan


def listed(parts: Mapping[Mode, tuple[Part, ...]], target: Callable[[torch.device], Target]) -> tuple[Listed, ...]:
    """All forms of an implementation, by mode. ``target``: the GPU of a device."""
    return tuple(
        Listed(mode, one.name, one.examples, partial(_absent, one, target))
        for mode, lists in parts.items()
        for _, among in lists
        for one in every(among)
    )


def _absent(one: Form[Any, Any], target: Callable[[torch.device], Target], device: torch.device) -> str | None:
    return refuses(torch.empty(0, device=device)) or one.absent(target(device))


def refusal(forms: Sequence[F], call: Any) -> str | None:
    """Why no form of a list can compute a call, or None."""
    found = []
    for one in reversed(forms):  # the last ones take most calls
        why = one.refusal(call)
        if why is None:
            return None
        if one.absent(call.target) is None:
            found.append(f"{one.name}: {why}")
    return "; ".join(found[::-1]) or f"none of its kernels has code for {call.target.arch}"


def reason(one: Form[Any, Any], call: Any) -> str | None:
    """Why ``first`` passes over a form, or None."""
    why = one.refusal(call)
    if why is not None:
        return "refuses: " + why
    why = one.avoids(call)
    return None if why is None else "passed over: " + why


def verdicts(part: str, forms: Sequence[F], call: Any, planned: Sequence[str]) -> Iterator[FormVerdict]:
    """The answers of the forms of a list up to the one that computes the call, then those of the lists of its parts.

    ``planned``: the forms of the call's plan. Parts that it does not need are left out.
    """
    chosen = first(forms, call)
    for one in forms:
        if one is chosen:
            break
        yield FormVerdict(part, one.name, reason(one, call) or f"passed over: {chosen.name} is wanted")
    yield FormVerdict(part, chosen.name, None)
    for name, others in chosen.parts:
        if first(others, call).name in planned:
            yield from verdicts(name, others, call, planned)


def every(forms: Sequence[F]) -> Iterator[Form[Any, Any]]:
    """The forms of a list and of the lists of their parts, each once."""
    seen: dict[str, Form[Any, Any]] = {}
    for one in forms:
        seen.setdefault(one.name, one)
        for _, others in one.parts:
            for other in every(others):
                seen.setdefault(other.name, other)
    yield from seen.values()
