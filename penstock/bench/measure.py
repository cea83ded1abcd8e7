"""Measuring: every candidate is held to the oracle first, then all take turns, so that noise hits them alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import NamedTuple

import torch

from ..errors import Complaints, ImplementationRefused, ShapeError
from ..recurrence.functional import STEP_TOKENS
from ..verify.inputs import Inputs, Shape
from . import clock
from .calls import call_of, copy_of, moved_bytes
from .candidates import Candidate, Mode
from .exact import Apart, Exact, WrongResult
from .trace import Profile


@dataclass(frozen=True)
class OnGpu:
    """What a GPU tells besides the time that a caller sees."""

    milliseconds: float | None
    """Median time of the GPU alone, by replaying a CUDA graph; None where the call cannot be captured."""
    quartiles: tuple[float, float] | None
    not_captured: str | None
    """Why there is no CUDA graph."""
    host_microseconds: float
    """Until the host is through with a call, without waiting for the GPU."""
    peak_bytes: int
    """Most memory taken beyond the inputs."""
    peak_bytes_beyond_results: int
    """The same without the output and the gradients, which have to exist."""


@dataclass(frozen=True)
class Timing:
    """What one candidate took for one call."""

    candidate: str
    milliseconds: float
    """Median of the samples, as a caller sees it; on a GPU between events around calls."""
    quartiles: tuple[float, float]
    """First and third, milliseconds."""
    samples: int
    error: float | None
    """Largest over the output, or the gradients, or output and states; None for the copy, which computes nothing."""
    threads: int
    """CPU threads it was given."""
    results: dict[str, Apart] = field(default_factory=dict)
    """Error and what was allowed, by name of the result."""
    first_call_seconds: float | None = None
    """The first call of this shape and mode in this process: it compiles, and tunes, what earlier calls and caches on disk have not."""
    gpu: OnGpu | None = None
    profile: Profile | None = None
    """What torch.profiler saw of it, if it was asked."""


@dataclass(frozen=True)
class Untimed:
    """A candidate that was not timed."""

    candidate: str
    reason: str
    """Begins with "refuses", "fails" or "wrong"."""
    fault: bool
    """Whether this library is to blame."""


@dataclass(frozen=True)
class Measurement:
    """All candidates on one shape in one mode."""

    variant: str
    case: str
    shape: Shape
    mode: Mode
    dtype: str
    device: str
    checked_tokens: int
    """How many tokens of each sequence the oracle was asked about."""
    moved_bytes: int
    """The fewest bytes that can be moved: every input read once and every result written once."""
    copy: Timing
    """A plain copy that moves as many bytes, measured in turn with the candidates: the floor."""
    timings: tuple[Timing, ...]
    untimed: tuple[Untimed, ...] = ()
    first: str | None = None
    """The candidate that others are compared with, timed or not; None in old records, where it is the first timed."""

    @property
    def kind(self) -> str:
        """The variant, and whether the decays of this case are soft."""
        return self.variant + " (soft)" * self.case.startswith(f"{self.variant}-soft-")

    @property
    def baseline(self) -> Timing | None:
        """The timing of the first candidate; None if it was not timed."""
        named = [timing for timing in self.timings if self.first in (None, timing.candidate)]
        return named[0] if named else None

    @property
    def profiled(self) -> bool:
        """Whether torch.profiler looked at it."""
        return any(timing.profile is not None for timing in self.timings)

    @property
    def bandwidth(self) -> float:
        """Bytes a second that the copy moved."""
        return self.moved_bytes / (self.copy.milliseconds * 1e-3)

    def of_floor(self, timing: Timing) -> float:
        """The floor's time over the candidate's: of the GPU alone where both are known."""
        alone = [one.gpu.milliseconds for one in (self.copy, timing) if one.gpu is not None and one.gpu.milliseconds is not None]
        return alone[0] / alone[1] if len(alone) == 2 else self.copy.milliseconds / timing.milliseconds


def check_decode_shape(mode: Mode, shape: Shape) -> None:
    """Raise ShapeError if a decode step has more tokens than a step takes."""
    if mode == "decode" and shape.T > STEP_TOKENS:
        complaints = Complaints("bench")
        remedy = "Take T = 1, or a case whose name has -decode- in it."
        complaints.add(ShapeError, "T", f"at most {STEP_TOKENS} in mode decode", shape.T, remedy)
        complaints.raise_any()


def measure(case: str, inputs: Inputs, mode: Mode, candidates: list[Candidate], seconds: float = 1.0, go_on: bool = False) -> Measurement:
    """Check every candidate, then time them in turn for about ``seconds`` each.

    Raises WrongResult, or what a candidate raises. With ``go_on`` that candidate is noted as untimed, and the others are timed.
    """
    shape, device = inputs.shape, inputs.q.device
    check_decode_shape(mode, shape)
    right: list[Right] = []
    untimed: list[Untimed] = []
    with clock.current(device):
        exact = Exact.of(inputs, mode)
        for candidate in candidates:
            try:
                results, first_call = exact.hold(candidate)
                right.append(Right(candidate.name, candidate.threads, results, first_call, call_of(candidate, inputs, mode)))
            except Exception as failure:
                if not go_on:
                    raise
                untimed.append(Untimed(candidate.name, reason_of(failure, candidate.ours), candidate.ours))
        tokens = exact.tokens
        del exact  # its tensors are large
        copy, timings = timed_in_turn(copy_of(inputs, mode), right, device, seconds)
    at = inputs.variant, case, shape, mode, str(inputs.q.dtype).removeprefix("torch."), str(device)
    first = candidates[0].name if candidates else None
    return Measurement(*at, tokens, moved_bytes(inputs, mode), copy, timings, tuple(untimed), first)


class Right(NamedTuple):
    """A candidate whose results were held to the oracle."""

    name: str
    threads: int | None
    results: dict[str, Apart]
    first_call: float
    """Seconds."""
    call: clock.Call


def timed_in_turn(copy: clock.Call, right: list[Right], device: torch.device, seconds: float) -> tuple[Timing, tuple[Timing, ...]]:
    """Time the copy and all candidates, about ``seconds`` each."""
    found = _timed([copy, *(one.call for one in right)], device, seconds)
    threads = torch.get_num_threads()
    timings = tuple(
        Timing(
            one.name,
            median(samples),
            _quartiles(samples),
            len(samples),
            max(apart.error for apart in one.results.values()),
            one.threads or threads,
            one.results,
            one.first_call,
            gpu,
        )
        for one, (samples, gpu) in zip(right, found[1:])
    )
    samples, gpu = found[0]
    return Timing("copy", median(samples), _quartiles(samples), len(samples), None, threads, gpu=gpu), timings


def reason_of(failure: Exception, ours: bool) -> str:
    """Say in one sentence why a candidate is not timed."""
    if isinstance(failure, WrongResult):
        return f"wrong: {failure.told}"
    told = str(failure) if isinstance(failure, ImplementationRefused) else clock.one_line(failure)
    return f"{'fails' if ours else 'refuses'}: {told}"


@clock.settled()
def _timed(calls: list[clock.Call], device: torch.device, seconds: float) -> list[tuple[list[float], OnGpu | None]]:
    """Samples of each call in milliseconds and, on a GPU, what else there is to know."""
    if not clock.on_gpu(device):
        return [(samples, None) for samples in clock.in_turn(calls, device, seconds)]
    memory = [clock.peak_bytes(call, device) for call in calls]
    graphs = [clock.captured(call, device) for call in calls]
    hosts = [clock.host_seconds(call, device) * 1e6 for call in calls]
    replays = [one.replay for one in graphs if isinstance(one, clock.Replay)]
    samples = clock.in_turn([*calls, *replays], device, seconds)
    alone = iter(samples[len(calls) :])
    found: list[tuple[list[float], OnGpu | None]] = []
    for seen, graph, host, peaks in zip(samples, graphs, hosts, memory):
        if isinstance(graph, clock.Replay):
            own = [sample / graph.calls for sample in next(alone)]
            found.append((seen, OnGpu(median(own), _quartiles(own), None, host, *peaks)))
        else:
            found.append((seen, OnGpu(None, None, graph, host, *peaks)))
    return found


def _quartiles(samples: list[float]) -> tuple[float, float]:
    if len(samples) < 2:
        return samples[0], samples[0]
    first, _, third = quantiles(samples, n=4, method="inclusive")
    return first, third
