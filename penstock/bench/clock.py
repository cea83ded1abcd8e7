"""Clocks: end-to-end time, GPU time and host time of calls, and their peak memory.

Short calls on a GPU are bound by the host, which launches them: events around them measure the host time. Replaying a CUDA graph
of the same calls does not need the host, so it measures the GPU time.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

TimedCall = Callable[[], object]
Result = TypeVar("Result")

SAMPLE = 5e-4
"""Shortest duration of a sample in seconds; short calls are repeated. It is far above the resolution of the clock."""
SAMPLES = 3
"""Smallest number of samples, unless they take more than three times the time limit."""
GRAPH = 2e-3
"""Approximate duration of a CUDA graph in seconds; it repeats short calls. It is far above the launch overhead of a graph."""
GRAPH_CALLS = 20
CAPTURED = 0.05
"""Longest call in seconds that is captured. For longer calls the host time is negligible, and the graph of a loop would be huge."""
HOST_CALLS = 20
"""Calls that the host makes before it waits; few, because a full launch queue blocks the host."""
HOST_SECONDS = 0.05
HOST_ROUNDS = 5


def on_gpu(device: torch.device) -> bool:
    """Whether calls on this device are asynchronous."""
    return device.type == "cuda"


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device."""
    return torch.cuda.device(device) if on_gpu(device) else nullcontext()


@contextmanager
def settled() -> Iterator[None]:
    """Exclude existing objects from garbage collection, so that modules imported for one candidate do not slow down the others."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def seconds_of(call: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Time one call until its result is complete; also return the result."""
    if on_gpu(device):
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = call()
    if on_gpu(device):
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, result


def in_turn(calls: list[TimedCall], device: torch.device, seconds: float) -> list[list[float]]:
    """Samples of each call in milliseconds. The calls are sampled in turn, each for about ``seconds``."""
    clock = _gpu_clock if on_gpu(device) else _cpu_clock
    first = [clock(call, 1, device) for call in calls]
    counts = [1 if once > SAMPLE else max(1, round(SAMPLE / max(clock(call, 1, device), 1e-7))) for call, once in zip(calls, first)]
    samples = [[once * 1e3] if once > seconds else [] for once in first]  # the check was the warm-up of such a call
    spent = [sum(taken) * 1e-3 for taken in samples]
    while running := [n for n in range(len(calls)) if spent[n] < (seconds if len(samples[n]) >= SAMPLES else 3 * seconds)]:
        for n in running:
            taken = clock(calls[n], counts[n], device)
            spent[n] += taken
            samples[n].append(taken / counts[n] * 1e3)
    return samples


def _cpu_clock(call: TimedCall, count: int, device: torch.device) -> float:
    """Seconds for ``count`` calls."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - begin


def _gpu_clock(call: TimedCall, count: int, device: torch.device) -> float:
    """Seconds between two GPU events around ``count`` calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def host_seconds(call: TimedCall, device: torch.device) -> float:
    """Time until a call returns, without waiting for the device: the median of a few rounds."""
    once, _ = seconds_of(call, device)
    count, taken = _repetitions(HOST_SECONDS, once, HOST_CALLS), []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize(device)
        taken.append(_cpu_clock(call, count, device) / count)
    torch.cuda.synchronize(device)
    return median(taken)


def _repetitions(seconds: float, once: float, most: int) -> int:
    """How many calls of ``once`` seconds fit in ``seconds``, from 1 to ``most``."""
    return max(1, min(most, int(seconds / max(once, 1e-9))))


@dataclass(frozen=True)
class Replay:
    """A CUDA graph of calls."""

    replay: TimedCall
    calls: int
    """Number of calls in the graph."""


def captured(call: TimedCall, device: torch.device) -> Replay | str:
    """A CUDA graph of the call, or the reason why it cannot be captured. A failed capture leaves the device usable."""
    once, _ = seconds_of(call, device)
    if once > CAPTURED:
        return f"a call takes more than {CAPTURED * 1e3:.0f} ms"
    graph, count = torch.cuda.CUDAGraph(), _repetitions(GRAPH, once, GRAPH_CALLS)
    side, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.stream(side):  # a failed capture does not restore the stream; this does
            with _synchronization_raises():
                call()  # a synchronizing call fails here, before the capture begins
            with torch.cuda.graph(graph, pool=pool, stream=side):
                for _ in range(count):
                    call()
        graph.replay()
        torch.cuda.synchronize(device)
    except Exception as failure:  # a peer can raise anything
        _clear(device, pool)
        return one_line(failure)
    return Replay(graph.replay, count)


@contextmanager
def _synchronization_raises() -> Iterator[None]:
    """Make torch raise an error if the host synchronizes with the device."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that this is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _clear(device: torch.device, pool: tuple[int, int]) -> None:
    """Reset the allocator after a failed capture: torch before 2.12 still treats the capture as under way.

    Emptying its cache, and every later capture, would then raise an error. See pytorch/pytorch#180395.
    """
    with suppress(Exception):  # raises if no capture is under way
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    for _ in range(2):  # a pending asynchronous CUDA error is raised once, by the next call
        with suppress(RuntimeError):
            torch.zeros(1, device=device)
            torch.cuda.synchronize(device)


def one_line(failure: Exception) -> str:
    """The type and the first line of an exception, for a table."""
    return f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"


def peak_bytes(call: TimedCall, device: torch.device) -> tuple[int, int]:
    """Peak memory of a call beyond what was allocated before it, and the same without the tensors that it returns."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    returned = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)]
    return peak, max(0, peak - sum(x.numel() * x.element_size() for x in returned))
