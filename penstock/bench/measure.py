"""Measurement: every candidate is compared with the oracle, then all are timed in turn, so that noise affects all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median, quantiles
from typing import NamedTuple

import torch

from ..errors import Complaints, ImplementationRefused, ShapeError
from ..tokens.distributions import GATES, STRENGTHS
from ..tokens.pools import STEP_TOKENS
from ..tokens.shape import Shape
from ..verify.inputs import Inputs
from . import clock
from .calls import call_of, copy_of, moved_bytes
from .candidates import Candidate, Mode
from .exact import Deviation, Exact, WrongResult
from .trace import Profile


@dataclass(frozen=True)
class GpuTiming:
    """GPU time, host time and memory of a call on a GPU."""

    milliseconds: float | None
    """Median GPU time, from a replayed CUDA graph; None if the call cannot be captured."""
    quartiles: tuple[float, float] | None
    not_captured: str | None
    """Why there is no CUDA graph."""
    host_microseconds: float
    """Time until a call returns, without waiting for the GPU."""
    peak_bytes: int
    """Peak memory beyond the inputs."""
    peak_bytes_beyond_results: int
    """The same without the output and the gradients."""


@dataclass(frozen=True)
class Timing:
    """The time of one candidate for one call."""

    candidate: str
    milliseconds: float
    """Median of the samples, end to end; on a GPU between events around the calls."""
    quartiles: tuple[float, float]
    """First and third, milliseconds."""
    samples: int
    error: float | None
    """Largest error over the results of the mode; None for the copy."""
    threads: int
    """CPU threads."""
    results: dict[str, Deviation] = field(default_factory=dict)
    """Error and allowed error by name of the result."""
    first_call_seconds: float | None = None
    """First call of this shape and mode in this process, including compilation and autotuning that is not in a cache."""
    gpu: GpuTiming | None = None
    profile: Profile | None = None
    """Counts of torch.profiler, if the candidate was profiled."""

    @property
    def own_milliseconds(self) -> float:
        """GPU time; on a CPU, or if it is not known, the end-to-end time."""
        known = None if self.gpu is None else self.gpu.milliseconds
        return self.milliseconds if known is None else known


@dataclass(frozen=True)
class Untimed:
    """A candidate that was not timed."""

    candidate: str
    reason: str
    """Begins with "refuses", "fails" or "wrong"."""
    fault: bool
    """Whether the candidate belongs to this library."""


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
    """Tokens of each sequence that were compared with the oracle."""
    moved_bytes: int
    """The fewest bytes that a call can move: every input is read once and every result written once."""
    copy: Timing
    """The floor: a copy of as many bytes, timed in turn with the candidates."""
    timings: tuple[Timing, ...]
    untimed: tuple[Untimed, ...] = ()
    first: str | None = None
    """The baseline, timed or not; None in old records, whose baseline is the first timed candidate."""
    groups: int | None = None
    """Heads of q and k, if heads of v share them."""

    @property
    def gates(self) -> str:
        """The distribution of the decays: one of ``GATES`` or ``STRENGTHS``, or "" for that of the variant."""
        named = self.case.removeprefix(f"{self.variant}-").rpartition("-")[0]
        return named if named in (*GATES, *STRENGTHS) else ""

    @property
    def sizes(self) -> str:
        """The shape as text, with the heads of q and k before those of v if these share them: 4,8192,16/64,128."""
        B, T, *rest = self.shape.text.split(",")
        return ",".join((B, T, *(f"{self.groups}/{part}" if self.groups and n == 0 else part for n, part in enumerate(rest))))

    @property
    def kind(self) -> str:
        """The variant, with the distribution of its decays if it is not the variant's own, as in "rwkv6 (soft)"."""
        return f"{self.variant} ({self.gates})" if self.gates else self.variant

    @property
    def baseline(self) -> Timing | None:
        """The timing of the baseline; None if it was not timed."""
        named = [timing for timing in self.timings if self.first in (None, timing.candidate)]
        return named[0] if named else None

    @property
    def profiled(self) -> bool:
        """Whether a candidate was profiled."""
        return any(timing.profile is not None for timing in self.timings)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the copy."""
        return self.moved_bytes / (self.copy.milliseconds * 1e-3)

    @property
    def floor(self) -> float:
        """Milliseconds of the copy: the least of its times, because a copy in a CUDA graph can be slower than the same copy outside."""
        return min(self.copy.milliseconds, self.copy.own_milliseconds)

    def of_floor(self, timing: Timing) -> float:
        """The floor over the candidate's time, its GPU time if that is known."""
        return self.floor / timing.own_milliseconds


def check_decode_shape(mode: Mode, shape: Shape) -> None:
    """Raise ShapeError if a decode step has more tokens than a step takes."""
    if mode == "decode" and shape.T > STEP_TOKENS:
        complaints = Complaints("bench")
        remedy = "Take T = 1, or a case whose name has -decode- in it."
        complaints.add(ShapeError, "T", f"at most {STEP_TOKENS} in mode decode", shape.T, remedy)
        complaints.raise_any()


def measure(
    case: str, inputs: Inputs, mode: Mode, candidates: list[Candidate], seconds: float = 1.0, keep_going: bool = False
) -> Measurement:
    """Check every candidate, then time them in turn for about ``seconds`` each.

    Raises WrongResult, or the exception of a candidate. With ``keep_going`` it lists that candidate as untimed and times the others.
    """
    shape, device = inputs.shape, inputs.q.device
    check_decode_shape(mode, shape)
    right: list[Checked] = []
    untimed: list[Untimed] = []
    with clock.current(device):
        exact = Exact.of(inputs, mode)
        for candidate in candidates:
            try:
                results, first_call = exact.compare(candidate)
                call = call_of(candidate, inputs, mode)
                right.append(Checked(candidate.name, candidate.threads, results, first_call, call, candidate.not_captured))
            except Exception as failure:
                if not keep_going:
                    raise
                untimed.append(Untimed(candidate.name, reason_of(failure, candidate.ours), candidate.ours))
        tokens = exact.tokens
        del exact  # its tensors are large
        copy, timings = timed_in_turn(copy_of(inputs, mode), right, device, seconds)
    at = inputs.variant, case, shape, mode, str(inputs.q.dtype).removeprefix("torch."), str(device)
    first = candidates[0].name if candidates else None
    groups = inputs.q.shape[2] if inputs.q.shape[2] != shape.H else None
    return Measurement(*at, tokens, moved_bytes(inputs, mode), copy, timings, tuple(untimed), first, groups)


class Checked(NamedTuple):
    """A candidate whose results are right."""

    name: str
    threads: int | None
    results: dict[str, Deviation]
    first_call: float
    """Seconds."""
    call: clock.TimedCall
    not_captured: str | None = None


def timed_in_turn(copy: clock.TimedCall, right: list[Checked], device: torch.device, seconds: float) -> tuple[Timing, tuple[Timing, ...]]:
    """Time the copy and all candidates, about ``seconds`` each."""
    found = _timed([copy, *(one.call for one in right)], device, seconds, [None, *(one.not_captured for one in right)])
    threads = torch.get_num_threads()
    timings = tuple(
        Timing(
            one.name,
            median(samples),
            _quartiles(samples),
            len(samples),
            max(deviation.error for deviation in one.results.values()),
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
    """Why a candidate is not timed, in one sentence."""
    if isinstance(failure, WrongResult):
        return f"wrong: {failure.detail}"
    text = str(failure) if isinstance(failure, ImplementationRefused) else clock.one_line(failure)
    return f"{'fails' if ours else 'refuses'}: {text}"


@clock.settled()
def _timed(
    calls: list[clock.TimedCall], device: torch.device, seconds: float, not_captured: Sequence[str | None] = ()
) -> list[tuple[list[float], GpuTiming | None]]:
    """Samples of each call in milliseconds and, on a GPU, its GPU time, host time and memory."""
    if not clock.on_gpu(device):
        return [(samples, None) for samples in clock.in_turn(calls, device, seconds)]
    memory = [clock.peak_bytes(call, device) for call in calls]
    graphs = [reason or clock.captured(call, device) for call, reason in zip_longest(calls, not_captured)]
    hosts = [clock.host_seconds(call, device) * 1e6 for call in calls]
    replays = [one.replay for one in graphs if isinstance(one, clock.Replay)]
    samples = clock.in_turn([*calls, *replays], device, seconds)
    replayed = iter(samples[len(calls) :])
    found: list[tuple[list[float], GpuTiming | None]] = []
    for end_to_end, graph, host, peaks in zip(samples, graphs, hosts, memory):
        if isinstance(graph, clock.Replay):
            own = [sample / graph.calls for sample in next(replayed)]
            found.append((end_to_end, GpuTiming(median(own), _quartiles(own), None, host, *peaks)))
        else:
            found.append((end_to_end, GpuTiming(None, None, graph, host, *peaks)))
    return found


def _quartiles(samples: list[float]) -> tuple[float, float]:
    if len(samples) < 2:
        return samples[0], samples[0]
    first, _, third = quantiles(samples, n=4, method="inclusive")
    return first, third
