"""Traces of torch.profiler: recording a call, and counting its kernels, launches and layout conversions.

All numbers come from the trace file that TensorBoard and Perfetto show. On a GPU, work is kernels, copies and fills. Each belongs to
the torch operator that launched it, the innermost one around the launch on the host; Triton's kernels belong to none. On a CPU, work is
the operators themselves, by self time; native kernels appear as operators.

The operators in ``MOVES`` only move data: copies (also those of ``contiguous``, ``reshape``, ``clone`` and ``to``, with a change of dtype
or without), concatenations, reversals and gathers. Copies of the GPU without a kernel only move data, too. Views move nothing.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from .clock import TimedCall, on_gpu

WAIT, WARM_UP = 1, 1
"""Calls before the recorded ones: without the profiler, and with the profiler but not recorded."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of work on a GPU."""
HOST = ("cpu_op", "user_annotation")
"""Categories of operators and user ranges on the host. Other events of the host are calls of the GPU driver."""
MOVES = frozenset(
    f"aten::{name}" for name in ("copy_", "_foreach_copy_", "cat", "flip", "roll", "index", "index_select", "gather", "narrow_copy")
)
PROBE = b"USDT:"
"""Prefix of the lines in Kineto's log that are for tracing probes."""
OPERATOR = re.compile(r"(?!autograd|torch)\w+::\w+$")
"""Operator names of torch.library. Profiler steps, autograd nodes and user ranges do not match."""


@dataclass(frozen=True)
class Profile:
    """Counts of one candidate: means over the recorded calls."""

    milliseconds: float
    """End-to-end time of a call with the overhead of the profiler."""
    kernel_milliseconds: float
    """Time of all work of a call."""
    slowest: str
    """The kernel, or on a CPU the operator, that takes the most time."""
    slowest_milliseconds: float
    """Time of all its launches in a call."""
    launches: float
    """Kernels, copies and fills of a call; on a CPU the operators that call no other operator."""
    layout_milliseconds: float
    """Time of the work that only moves data."""
    calls: int
    trace: str
    """Path of the trace."""


class Work(NamedTuple):
    """A kernel, copy or fill on a GPU, or an operator on a CPU."""

    name: str
    microseconds: float
    launched: bool
    """Whether it counts as a launch."""
    moves: bool
    """Whether it only moves data."""


@dataclass
class Span:
    """An operator, range or launch on the host."""

    name: str
    begin: float
    end: float
    launch: int | None
    """Correlation id of a launch and its kernel; None if this is not a launch."""
    parent: Span | None = None
    """The operator or range directly around it."""
    inner: list[Span] = field(default_factory=list)
    """Operators and ranges directly inside it."""

    @property
    def self_time(self) -> float:
        """Microseconds outside of the inner operators and ranges."""
        return self.end - self.begin - sum(min(one.end, self.end) - one.begin for one in self.inner)


class Profiler(profile):
    """torch's profiler without the lines that Kineto writes to the terminal when it starts and stops."""

    def start_trace(self) -> None:
        """Start recording."""
        with _probe_lines_hidden():
            super().start_trace()

    def stop_trace(self) -> None:
        """Stop recording."""
        with _probe_lines_hidden():
            super().stop_trace()


@contextmanager
def _probe_lines_hidden() -> Iterator[None]:
    """Drop the lines of Kineto that begin with USDT from the file descriptor of standard error; write the other lines at the end.

    Kineto logs "profiler_start" and "profiler_stop" at a level above its errors: no KINETO_LOG_LEVEL hides them and keeps errors.
    """
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            written.seek(0)
            for line in written:
                if not line.startswith(PROBE):
                    os.write(2, line)


def record(call: TimedCall, device: torch.device, steps: int, path: Path) -> None:
    """Run the call ``WAIT + WARM_UP + steps`` times and write a trace of the last ``steps``. Makes missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu(device)
    phases = schedule(wait=WAIT, warmup=WARM_UP, active=steps, repeat=1)

    def ready(done: profile) -> None:
        done.export_chrome_trace(str(path))

    # acc_events: without it, some versions of torch warn that events of earlier cycles are cleared
    with Profiler(activities=activities, schedule=phases, acc_events=True, on_trace_ready=ready) as profiler:
        for _ in range(WAIT + WARM_UP + steps):
            call()
            if on_gpu(device):
                torch.cuda.synchronize(device)  # the work of a call ends in its own step
            profiler.step()


def read(path: Path, gpu: bool) -> Profile | None:
    """Count the work in a trace; None if it has no work on the device."""
    events = [one for one in json.loads(path.read_text("utf-8"))["traceEvents"] if one.get("ph") == "X"]
    steps = [one for one in events if one.get("cat") == "user_annotation" and one["name"].startswith("ProfilerStep#")]
    done = _on_gpu(events) if gpu else _on_cpu(events)
    if not done or not steps:
        return None
    calls, totals = len(steps), dict.fromkeys((one.name for one in done), 0.0)
    for one in done:
        totals[one.name] += one.microseconds
    slowest = max(totals, key=lambda name: totals[name])

    def milliseconds(values: Iterable[float]) -> float:
        return sum(values) * 1e-3 / calls

    return Profile(
        milliseconds(one["dur"] for one in steps),
        milliseconds(totals.values()),
        slowest,
        milliseconds([totals[slowest]]),
        sum(one.launched for one in done) / calls,
        milliseconds(one.microseconds for one in done if one.moves),
        calls,
        str(path),
    )


def _on_gpu(events: Sequence[dict[str, Any]]) -> list[Work]:
    """Work on the GPU, with the operator that launched it."""
    launches = {one.launch: one for one in _host(events) if one.launch is not None}
    done = []
    for one in events:
        if one.get("cat") in ON_GPU:
            launch = launches.get(one["args"].get("correlation"))
            operator = None if launch is None else _operator(launch.parent)
            name = short(one["name"]) + ("" if operator is None else f" ({operator.name})")
            moves = one["cat"] == "gpu_memcpy" or (operator is not None and operator.name in MOVES)
            done.append(Work(name, one["dur"], True, moves))
    return done


def _on_cpu(events: Sequence[dict[str, Any]]) -> list[Work]:
    """Operators by self time."""
    return [
        Work(one.name, one.self_time, not any(OPERATOR.match(inside.name) for inside in one.inner), one.name in MOVES)
        for one in _host(events)
        if OPERATOR.match(one.name)
    ]


def _operator(span: Span | None) -> Span | None:
    """The innermost operator around a span, or the span itself."""
    while span is not None and not OPERATOR.match(span.name):
        span = span.parent
    return span


def _host(events: Sequence[dict[str, Any]]) -> list[Span]:
    """Operators, ranges and launches on the host, nested by thread."""
    threads: dict[Any, list[Span]] = defaultdict(list)
    for one in events:
        launch = one.get("args", {}).get("correlation")
        if one.get("cat") in HOST or (launch is not None and one.get("cat") not in ON_GPU):
            threads[one["tid"]].append(Span(one["name"], one["ts"], one["ts"] + one["dur"], launch))
    for spans in threads.values():
        around: list[Span] = []
        for span in sorted(spans, key=lambda one: (one.begin, -one.end)):
            while around and around[-1].end <= span.begin:
                around.pop()
            if around:
                span.parent = around[-1]
                around[-1].inner.append(span)
            around.append(span)
    return [one for spans in threads.values() for one in spans]


def short(kernel: str) -> str:
    """A kernel's name without its namespace, template arguments and signature.

    >>> short("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<Functor>(int)>(int, Functor)")
    'elementwise_kernel'
    >>> short("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float>(Params)")
    'kernel'
    >>> short("void at::native::(anonymous namespace)::CatArrayBatchedCopy<Opaque<4u>, int>(Opaque<4u>*)")
    'CatArrayBatchedCopy'
    >>> short("Memcpy DtoD (Device -> Device)")
    'Memcpy DtoD'
    """
    without_result = re.sub(r"^(void|std::enable_if<.*?>::type) ", "", kernel)
    name = re.split(r"<|\((?!anonymous)", without_result, maxsplit=1)[0]
    return re.sub(r"\w+::|\(anonymous namespace\)::", "", name).strip()
