"""Tuning of block sizes: candidates are compiled in parallel, then each is compared with the float64 chunkwise form and timed.

A kernel is timed as part of its pass, because its block sizes change the work of the other kernels: the chunk length, for example.
Kernels are tuned one after another, each with the block sizes that are already chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import torch

from ..gpu.target import Target
from ..recurrence.triton import SHORT
from ..recurrence.triton.calls import Call
from ..recurrence.triton.table import KernelConfig, Key
from ..verify.inputs import Shape
from . import ahead
from .passes import Pass, planned, without_memory
from .trial import Trial, prepared
from .workers import Failure, one_by_one

GROUPS: tuple[tuple[str, Pass], ...] = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("states", "backward"),
    ("recurrent", "short backward"),
    ("step", "step"),
)
"""Kernels, and the pass in which each is timed. A kernel of two passes is timed in the longer one."""
SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "forward": {"warps": (4, 8), "BV": (64, 128), "C": (16, 32, 64), "stages": (1, 2, 3)},
    "backward": {"warps": (2, 4), "C": (16, 32, 64), "BK": (64, 128)},
    "states": {"warps": (2, 4), "BV": (64, 128), "BK": (32, 64), "stages": (1, 3)},
    "recurrent": {"warps": (1, 2, 4), "BV": (8, 16, 32, 64)},
    "step": {"warps": (1, 2, 4, 8), "BV": (16, 32, 64)},
}
"""Values for each kernel, tried in all combinations; then ``PROGRAMS_PER_SM`` is tried with the best combination. Compilation dominates the
time, so values that are known to be slow are left out (8 warps in the backward pass: benchmarks/NOTES.md)."""
PROGRAMS_PER_SM = {"forward": (1, 2, 3, 4), "states": (1, 2, 4, 6)}
"""Not for steps: the timed step has enough sequences to fill the GPU."""
GAIN = 0.01
"""Smallest relative speedup that replaces the block sizes in use. Medians of the same code differ by as much."""
STEP_SEQUENCES = 64
"""Sequences of the timed decode step, unless the shape has one token."""
SECONDS = 300.0
"""Time limit for one compilation, and for one candidate."""


class Outcome(NamedTuple):
    """The result of a candidate."""

    config: KernelConfig
    milliseconds: float | None
    error: float | None
    """Largest error of its results, relative to their largest exact value."""
    reason: str | None
    """Why it cannot be chosen, or None."""


@dataclass(frozen=True)
class Tuned:
    """One kernel with all its candidates."""

    key: Key
    call: str
    before: KernelConfig
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
    table: dict[Key, KernelConfig] = field(default_factory=dict)
    """The block sizes chosen so far."""
    prepare: Callable[[Tuner, Pass, Key, list[KernelConfig]], list[str | None]] | None = None
    """Returns why each candidate cannot run, or None. Default: ``compiled``."""
    measure: Callable[[Trial, list[Any]], Iterator[Any]] | None = None
    """Yields milliseconds, error and allowed error of each candidate. Default: runs them on the GPU in another process."""

    def run(self) -> Iterator[Tuned]:
        """Tune the kernels one after another."""
        for kernel, which in GROUPS:
            shape = self._shape(which)
            key, before = self._in_use(kernel, shape)
            outcomes = self._tried(which, key, list(dict.fromkeys([before, *candidates(key, before)])))
            tuned = Tuned(key, f"{self.variant} {shape.text} {str(self.dtype).removeprefix('torch.')} {which}", before, tuple(outcomes))
            best = tuned.chosen
            if best is not None and kernel in PROGRAMS_PER_SM:
                others = [best.config._replace(programs_per_sm=n) for n in PROGRAMS_PER_SM[kernel] if n != best.config.programs_per_sm]
                tuned = replace(tuned, outcomes=(*outcomes, *self._tried(which, key, others)))
            if tuned.chosen is not None:
                self.table[key] = tuned.chosen.config
            yield tuned

    def _shape(self, which: Pass) -> Shape:
        if which == "short backward":
            return self.shape._replace(T=min(self.shape.T, SHORT["backward"]))
        if which != "step" or self.shape.T == 1:
            return self.shape
        return self.shape._replace(B=STEP_SEQUENCES, T=1)

    def _in_use(self, kernel: str, shape: Shape) -> tuple[Key, KernelConfig]:
        call = Call.of(without_memory(self.variant, shape, self.dtype).problem(), self.target_with({}))
        return call.key(kernel), call.config(kernel)

    def target_with(self, more: dict[Key, KernelConfig]) -> Target:
        """The target with the block sizes chosen so far, and ``more``."""
        return self.target._replace(table={**self.target.table, **self.table, **more})

    def _tried(self, which: Pass, key: Key, configs: list[KernelConfig]) -> list[Outcome]:
        reasons = (self.prepare or compiled)(self, which, key, configs)
        runnable = [one for one, reason in zip(configs, reasons) if reason is None]
        trial = Trial(self.variant, self._shape(which), self.dtype, self.device, self.seed, which, key, dict(self.table))
        answers = iter((self.measure or _in_another_process)(trial, runnable))
        return [judged(one, next(answers)) if reason is None else Outcome(one, None, None, reason) for one, reason in zip(configs, reasons)]


def candidates(key: Key, before: KernelConfig) -> list[KernelConfig]:
    """All combinations of ``SPACE`` that fit this head size, for the plain kernel; other block sizes as in ``before``."""
    space = SPACE[key.kernel]
    most = {"BV": key.V, "BK": key.K}
    values = {name: [x for x in sizes if x <= max(most.get(name, x), min(sizes))] for name, sizes in space.items()}
    plain = before._replace(form="")
    return [KernelConfig(**plain._asdict() | dict(zip(values, sizes))) for sizes in product(*values.values())]


def judged(config: KernelConfig, answer: Any) -> Outcome:
    """The outcome of a candidate from its answer; failures and too large errors have a reason."""
    if isinstance(answer, Failure):
        return Outcome(config, None, None, answer.reason)
    milliseconds, error, allowed = answer
    wrong = None if error <= allowed else f"wrong: error {error:.2g}, allowed {allowed:.2g}"
    return Outcome(config, milliseconds, error, wrong)


def compiled(tuner: Tuner, which: Pass, key: Key, configs: list[KernelConfig]) -> list[str | None]:
    """Compile the pass of every candidate into Triton's cache, in parallel. Returns why a candidate does not compile or fit, or None."""
    inputs = without_memory(tuner.variant, tuner._shape(which), tuner.dtype)
    needed: list[list[ahead.Job]] = []
    for one in configs:
        made = planned(which, inputs, tuner.target_with({key: one}))
        needed.append(ahead.jobs(made.plan, made.tensors, tuner.target.arch))
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


def _in_another_process(trial: Trial, configs: list[KernelConfig]) -> Iterator[Any]:
    return one_by_one(prepared, trial, configs, SECONDS)
