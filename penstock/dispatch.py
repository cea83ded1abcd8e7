"""The ordered list of implementations; picks one for a problem, or explains the pick.

``impl="auto"`` walks the list from the top and takes the first that neither refuses nor knows a faster one. The order is by
measured speed (benchmarks/NOTES.md, "CPU: which implementation"): on 2 threads of a Zen 3 server at float32, ``cpu`` was the
fastest at every shape tried, so it stands first; float64 it refuses, and there ``chunkwise`` is faster than the others from 2
tokens up. On a GPU, ``cuda`` takes short calls that do not fill it, the token-serial Triton kernels the shortest and decode steps, the
chunked ones the rest. ``parallel`` and ``reference`` are there to be named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .errors import Complaints, ImplementationRefused, RangeError
from .kernels import chunkwise, cpu, cuda, parallel, reference, triton
from .kernels.contract import Implementation, Mode
from .problem import Problem

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    cpu.IMPLEMENTATION,
    cuda.IMPLEMENTATION,
    triton.RECURRENT,
    triton.CHUNKWISE,
    chunkwise.IMPLEMENTATION,
    parallel.IMPLEMENTATION,
    reference.IMPLEMENTATION,
)
_BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}


class Available(NamedTuple):
    """One implementation on this machine."""

    name: str
    summary: str
    reason: str | None
    """Why it cannot run here; None if it can."""


class Verdict(NamedTuple):
    """What one implementation says to a call."""

    name: str
    forward: str | None
    """Why it does not run the forward pass under "auto"; None if it would."""
    backward: str | None
    """Why it does not run the backward pass under "auto"; None if it would."""


LATER = "would do, stands later in the list"


@dataclass(frozen=True)
class Explanation:
    """The walk through the list for one call. Printing it shows the walk."""

    variant: str
    call: str
    verdicts: tuple[Verdict, ...]
    keeps: str | None = None
    """With gradients wanted: the implementation of the backward pass, if it runs forward, too, and keeps states on the way."""

    @property
    def forward(self) -> str | None:
        """The implementation that ``impl="auto"`` runs forward."""
        return self.keeps or next((verdict.name for verdict in self.verdicts if verdict.forward is None), None)

    @property
    def backward(self) -> str | None:
        """The implementation that ``impl="auto"`` runs backward."""
        return next((verdict.name for verdict in self.verdicts if verdict.backward is None), None)

    def __str__(self) -> str:
        lines = [f"{self.variant}({self.call})", f"  forward runs {self.forward}, backward runs {self.backward}"]
        for verdict in self.verdicts:
            lines.append(f"  {verdict.name:<16} forward   {self._told_forward(verdict)}")
            chosen = "chosen" if verdict.name == self.backward else LATER
            lines.append(f"  {verdict.name:<16} backward  {verdict.backward or chosen}")
        return "\n".join(lines)

    def _told_forward(self, verdict: Verdict) -> str:
        if verdict.name == self.keeps:
            return "chosen: it runs the backward pass and keeps states for it"
        if verdict.name == self.forward:
            return "chosen"
        return verdict.forward or (LATER if self.keeps is None else "would do, does not run the backward pass")


def implementations() -> tuple[Available, ...]:
    """Every implementation, in the order in which ``impl="auto"`` asks them, and whether it can run on this machine.

    >>> [one.name for one in implementations() if one.reason is None][-1]
    'reference'
    """
    return tuple(Available(one.name, one.summary, one.available()) for one in IMPLEMENTATIONS)


def refusal(implementation: Implementation, problem: Problem, mode: Mode) -> str | None:
    """Why it cannot take a problem, here or at all; None if it can."""
    return implementation.available() or implementation.refuses(problem, mode)


def _passed_over(implementation: Implementation, problem: Problem, mode: Mode) -> str | None:
    """Why "auto" does not take it: it refuses, or would be slow."""
    reason = refusal(implementation, problem, mode)
    if reason is not None:
        return "refuses: " + reason
    reason = implementation.avoids(problem, mode)
    return None if reason is None else "passed over: " + reason


def check_name(function: str, impl: str) -> None:
    """Raise RangeError unless ``impl`` is "auto" or an implementation's name."""
    if not isinstance(impl, str) or impl not in ("auto", *_BY_NAME):
        complaints = Complaints(function)
        complaints.add(RangeError, "impl", f"one of {', '.join(['auto', *_BY_NAME])}", repr(impl), "See penstock.implementations().")
        complaints.raise_any()


def pick(problem: Problem, mode: Mode, impl: str = "auto") -> Implementation:
    """The implementation to run: the named one or, for "auto", the first in the list that takes the problem."""
    name = problem.variant.name if mode != "step" else f"decode_step({problem.variant.name!r})"
    check_name(name, impl)
    if impl != "auto":
        reason = refusal(_BY_NAME[impl], problem, mode)
        if reason is None:
            return _BY_NAME[impl]
        raise ImplementationRefused(f"{name}: impl must be one that takes this call, got {impl!r}: {reason}. Use impl='auto'.")
    reasons = []
    for implementation in IMPLEMENTATIONS:
        reason = _passed_over(implementation, problem, mode)
        if reason is None:
            return implementation
        reasons.append(f"{implementation.name} {reason}")
    raise ImplementationRefused(f"{name}: no implementation takes this call. " + "; ".join(reasons))


def pick_with_gradients(problem: Problem, impl: str = "auto") -> tuple[Implementation, Implementation]:
    """What runs forward and backward in an eager call that wants gradients: one that can keep states for its backward pass runs both."""
    forward, backward = pick(problem, "forward", impl), pick(problem, "backward", impl)
    return forward if backward.forward_keeping is None else backward, backward


def explain(problem: Problem, gradients: bool = False) -> Explanation:
    """Every implementation's verdict on a problem; with ``gradients``, on an eager call that wants them."""
    sizes = ", ".join(f"{name}={size}" for name, size in problem.sizes.items())
    call = f"{sizes}, {str(problem.q.dtype).removeprefix('torch.')} on {problem.q.device}"
    call += ", packed" * (problem.cu_seqlens is not None) + ", reverse" * problem.reverse + ", with gradients" * gradients
    verdicts = [Verdict(one.name, _passed_over(one, problem, "forward"), _passed_over(one, problem, "backward")) for one in IMPLEMENTATIONS]
    backward = next((one for one, verdict in zip(IMPLEMENTATIONS, verdicts) if verdict.backward is None), None)
    keeps = gradients and backward is not None and backward.forward_keeping is not None
    return Explanation(problem.variant.name, call, tuple(verdicts), backward.name if backward is not None and keeps else None)
