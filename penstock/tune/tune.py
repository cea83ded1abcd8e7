"""Tuning of block sizes: candidates are compiled in parallel, then each is compared with the float64 chunkwise form and timed.

A kernel is timed as part of its pass, because its block sizes change the work of the other kernels: the chunk length, for example.
Kernels are tuned one after another, each with the block sizes that are already chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..gpu.target import Target
from ..tokens.shape import Shape
from ..tokens.tuning import Tuning
from ..verify.inputs import Inputs
from . import ahead
from .passes import planned, problem_of, tuning_of, without_memory
from .trial import Trial, prepared
from .workers import Failure, one_by_one

GAIN = 0.01
"""Smallest relative speedup that replaces the block sizes in use. Medians of the same code differ by as much."""
SECONDS = 300.0
"""Time limit for one compilation, and for one candidate."""


class Outcome(NamedTuple):
    """The result of a candidate."""

    config: Any
    milliseconds: float | None
    error: float | None
    """Largest error of its results, relative to their largest exact value."""
    reason: str | None
    """Why it cannot be chosen, or None."""


@dataclass(frozen=True)
class Tuned:
    """One kernel with all its candidates."""

    key: Any
    call: str
    before: Any
    """The block sizes in use."""
    outcomes: tuple[Outcome, ...]

    @property
    def chosen(self) -> Outcome | None:
        """The fastest right candidate; the block sizes in use if they are within ``GAIN`` of it; None if no candidate is right."""
        right = [one for one in self.outcomes if one.reason is None and one.milliseconds is not None]
        best = min(right, key=lambda one: one.milliseconds or 0.0, default=None)
        current = next((one for one in right if one.config == self.before), None)
        if best is None or current is None:
            return best
        return current if (current.milliseconds or 0.0) <= (best.milliseconds or 0.0) * (1 + GAIN) else best


@dataclass(frozen=True)
class Tuner:
    """Tunes a variant at one shape, on one device."""

    variant: str
    shape: Shape
    dtype: torch.dtype
    device: str
    target: Target
    seed: int = 0
    table: dict[Any, Any] = field(default_factory=dict)
    """The block sizes chosen so far."""
    prepare: Callable[[Tuner, str, Any, list[Any]], list[str | None]] | None = None
    """Returns why each candidate cannot run, or None. Default: ``compiled``."""
    measure: Callable[[Trial, list[Any]], Iterator[Any]] | None = None
    """Yields milliseconds, error and allowed error of each candidate. Default: runs them on the GPU in another process."""

    def run(self) -> Iterator[Tuned]:
        """Tune the kernels one after another."""
        for kernel, which in self.tuning.kernels:
            key, before = self.in_use(kernel, which)
            outcomes = self._tried(which, key, list(dict.fromkeys([before, *self.tuning.candidates(key, before)])))
            tuned = Tuned(
                key, f"{self.variant} {self.shape_of(which).text} {str(self.dtype).removeprefix('torch.')} {which}", before, tuple(outcomes)
            )
            best = tuned.chosen
            if best is not None:
                more = self.tuning.programs_per_sm.get(kernel, ())
                others = [best.config._replace(programs_per_sm=n) for n in more if n != best.config.programs_per_sm]
                tuned = replace(tuned, outcomes=(*outcomes, *self._tried(which, key, others)))
            if tuned.chosen is not None:
                self.table[key] = tuned.chosen.config
            yield tuned

    @property
    def tuning(self) -> Tuning:
        """How the variant's family is tuned."""
        return tuning_of(self.variant)

    def shape_of(self, which: str) -> Shape:
        """The shape that is timed in a pass."""
        return self.tuning.shape(which, self.shape)

    def inputs(self, which: str) -> Inputs:
        """The inputs of a pass, without memory."""
        return without_memory(self.variant, self.shape_of(which), self.dtype)

    def in_use(self, kernel: str, which: str) -> tuple[Any, Any]:
        """The key of a kernel, and the block sizes in use."""
        return self.tuning.in_use(kernel, problem_of(which, self.inputs(which)), self.target_with({}))

    def target_with(self, more: dict[Any, Any]) -> Target:
        """The target with the block sizes chosen so far, and ``more``."""
        return self.target._replace(table={**self.target.table, **self.table, **more})

    def _tried(self, which: str, key: Any, configs: list[Any]) -> list[Outcome]:
        if not configs:
            return []
        reasons = (self.prepare or compiled)(self, which, key, configs)
        runnable = [one for one, reason in zip(configs, reasons) if reason is None]
        trial = Trial(self.variant, self.shape_of(which), self.dtype, self.device, self.seed, which, key, dict(self.table))
        answers = iter((self.measure or _in_another_process)(trial, runnable))
        return [judged(one, next(answers)) if reason is None else Outcome(one, None, None, reason) for one, reason in zip(configs, reasons)]


def judged(config: Any, answer: Any) -> Outcome:
    """The outcome of a candidate from its answer; failures and too large errors have a reason."""
    if isinstance(answer, Failure):
        return Outcome(config, None, None, answer.reason)
    milliseconds, error, allowed = answer
    wrong = None if error <= allowed else f"wrong: error {error:.2g}, allowed {allowed:.2g}"
    return Outcome(config, milliseconds, error, wrong)


def compiled(tuner: Tuner, which: str, key: Any, configs: list[Any]) -> list[str | None]:
    """Compile the pass of every candidate into Triton's cache, in parallel. Returns why a candidate does not compile or fit, or None."""
    inputs = tuner.inputs(which)
    needed: list[list[ahead.Job]] = []
    for one in configs:
        made = planned(which, inputs, tuner.target_with({key: one}))
        needed.append(ahead.jobs(made, tuner.target.arch))
    found = ahead.compile_all((job for jobs in needed for job in jobs), SECONDS)
    return [_unfit([found[job] for job in jobs], tuner.target) for jobs in needed]


def _unfit(found: list[ahead.Resources | Failure], target: Target) -> str | None:
    """Why a candidate does not compile or fit the GPU, or None."""
    for one in found:
        if isinstance(one, Failure):
            return f"does not compile: {one.reason}"
        if one.shared > target.shared_memory:
            return f"takes {one.shared} bytes of shared memory, of {target.shared_memory}"
    return None


def _in_another_process(trial: Trial, configs: list[Any]) -> Iterator[Any]:
    return one_by_one(prepared, trial, configs, SECONDS)
