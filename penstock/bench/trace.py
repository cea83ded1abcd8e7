"""A call under torch.profiler: records the trace, and counts from it what the call launched.

The figures are taken from the trace itself, the file that TensorBoard and Perfetto show: what is in the table can be looked at
there. On a GPU, work is what the GPU was given: kernels, copies and others. Each belongs to the operator of torch that launched
it, the innermost one around the launch on the host; Triton's kernels belong to none. On a CPU, work is the operators themselves, by the
time they spend outside of other operators; the native kernels show as operators, too.

Work that moves data and computes nothing is what ``MOVES`` names: copies (which ``contiguous``, ``reshape``, ``clone`` and ``to`` come
down to, a change of dtype among them), concatenations, reversals and gathers; and every copy that the GPU makes without a kernel.
Views cost a little of the host's time and move nothing.
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

from .clock import Call, on_gpu

WAIT, WARM_UP = 1, 1
"""Calls before those that are recorded: not looked at, and looked at without being kept."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU was given."""
HOST = ("cpu_op", "user_annotation")
"""Categories of operators and of ranges that somebody named; the host's other events are calls of the GPU's driver."""
MOVES = frozenset(
    f"aten::{name}" for name in ("copy_", "_foreach_copy_", "cat", "flip", "roll", "index", "index_select", "gather", "narrow_copy")
)
PROBE = b"USDT:"
"""What a line of Kineto's log begins with that is meant for probes, not for people."""
OPERATOR = re.compile(r"(?!autograd|torch)\w+::\w+$")
"""Names of operators, as torch.library has them; around them are steps, autograd's nodes and a user's own ranges."""


@dataclass(frozen=True)
class Profile:
    """What a profiler saw of one candidate: means over the calls that were recorded."""

    milliseconds: float
    """One call while the profiler watches: with its own work, so longer than without."""
    kernel_milliseconds: float
    """All work of a call."""
    slowest: str
    """The kernel, or on a CPU the operator, that takes most of this."""
    slowest_milliseconds: float
    """All its launches in a call."""
    launches: float
    """Kernels, copies and others of a call; on a CPU operators that call no others."""
    layout_milliseconds: float
    """Of the work, what only moves data."""
    calls: int
    trace: str
    """The file."""


class Work(NamedTuple):
    """Something that took time."""

    name: str
    microseconds: float
    launched: bool
    """Whether it counts as a launch."""
    moves: bool
    """Whether it only moves data."""


@dataclass
class Span:
    """A stretch of the host's time."""

    name: str
    begin: float
    end: float
    launch: int | None
    """What a launch and its kernel have in common, if this is one."""
    parent: Span | None = None
    """The operator around it."""
    inner: list[Span] = field(default_factory=list)
    """Operators and other ranges directly inside."""

    @property
    def own(self) -> float:
        """Microseconds outside of what is inside."""
        return self.end - self.begin - sum(min(one.end, self.end) - one.begin for one in self.inner)


class Profiler(profile):
    """torch's, without the lines that its library writes to the terminal each time it starts and stops."""

    def start_trace(self) -> None:
        """Begin to record."""
        with _without_probes():
            super().start_trace()

    def stop_trace(self) -> None:
        """End the record."""
        with _without_probes():
            super().stop_trace()


@contextmanager
def _without_probes() -> Iterator[None]:
    """Drop Kineto's lines that begin with USDT from the file descriptor of standard error; pass everything else on, afterwards.

    Kineto logs "profiler_start" and "profiler_stop" at a level above its errors, so no KINETO_LOG_LEVEL hides them and shows errors.
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


def record(call: Call, device: torch.device, steps: int, path: Path) -> None:
    """Run the call ``WAIT + WARM_UP + steps`` times and write a trace of the last ``steps``; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu(device)
    phases = schedule(wait=WAIT, warmup=WARM_UP, active=steps, repeat=1)

    def ready(done: profile) -> None:
        done.export_chrome_trace(str(path))

    # acc_events: else some versions of torch warn that they forget cycles before this, the only one
    with Profiler(activities=activities, schedule=phases, acc_events=True, on_trace_ready=ready) as profiler:
        for _ in range(WAIT + WARM_UP + steps):
            call()
            if on_gpu(device):
                torch.cuda.synchronize(device)  # so that a call's work lies in its own step
            profiler.step()


def read(path: Path, gpu: bool) -> Profile | None:
    """Count what a trace shows; None if it shows no work on the device."""
    events = [one for one in json.loads(path.read_text())["traceEvents"] if one.get("ph") == "X"]
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
    """What the GPU was given, each with the operator that launched it."""
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
    """Operators by their own time."""
    return [
        Work(one.name, one.own, not any(OPERATOR.match(inside.name) for inside in one.inner), one.name in MOVES)
        for one in _host(events)
        if OPERATOR.match(one.name)
    ]


def _operator(span: Span | None) -> Span | None:
    """The innermost operator around."""
    while span is not None and not OPERATOR.match(span.name):
        span = span.parent
    return span


def _host(events: Sequence[dict[str, Any]]) -> list[Span]:
    """Operators, ranges and launches on the host, nested as they were, thread by thread."""
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
