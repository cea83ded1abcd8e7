"""Clocks: how long calls take, as their caller sees it, on the GPU alone and on the host alone; and the memory they take.

On a GPU these are three numbers. Calls that are short on the GPU are bound by the host, which has to launch them: events
around them then show the host's time. A CUDA graph of the same calls needs no host, so replaying it shows the GPU's.
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

Call = Callable[[], object]
Result = TypeVar("Result")

SAMPLE = 5e-4
"""Seconds that one sample lasts at least, by calling more than once: far above the resolution of any clock."""
SAMPLES = 3
"""Samples of a slow candidate, as long as they stay within three times its budget."""
GRAPH = 2e-3
"""Seconds that one CUDA graph lasts about, by holding a call more than once: far above what starting it costs."""
GRAPH_CALLS = 20
CAPTURED = 0.05
"""Seconds beyond which a call is not captured: the host's part is small by then, and a loop's graph would be huge."""
HOST_CALLS = 20
"""Calls that the host makes before it waits; few, so that the queue of launches never others up and holds it back."""
HOST_SECONDS = 0.05
HOST_ROUNDS = 5


def on_gpu(device: torch.device) -> bool:
    """Whether calls on this device return before they are done."""
    return device.type == "cuda"


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the one that events and streams belong to."""
    return torch.cuda.device(device) if on_gpu(device) else nullcontext()


@contextmanager
def settled() -> Iterator[None]:
    """Python's garbage collector leaves alone what there is already: what was imported for one candidate costs the others nothing."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def seconds_of(call: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Time one call until its result is there, and return the result."""
    if on_gpu(device):
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = call()
    if on_gpu(device):
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, result


def in_turn(calls: list[Call], device: torch.device, seconds: float) -> list[list[float]]:
    """Milliseconds of one call, sample by sample for each of ``calls``, which take turns; about ``seconds`` for each."""
    clock = _gpu_clock if on_gpu(device) else _cpu_clock
    first = [clock(call, 1, device) for call in calls]
    counts = [1 if once > SAMPLE else max(1, round(SAMPLE / max(clock(call, 1, device), 1e-7))) for call, once in zip(calls, first)]
    samples = [[once * 1e3] if once > seconds else [] for once in first]  # one that takes so long is warm after its check
    spent = [sum(taken) * 1e-3 for taken in samples]
    while running := [n for n in range(len(calls)) if spent[n] < (seconds if len(samples[n]) >= SAMPLES else 3 * seconds)]:
        for n in running:
            taken = clock(calls[n], counts[n], device)
            spent[n] += taken
            samples[n].append(taken / counts[n] * 1e3)
    return samples


def _cpu_clock(call: Call, count: int, device: torch.device) -> float:
    """Seconds for so many calls."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - begin


def _gpu_clock(call: Call, count: int, device: torch.device) -> float:
    """Seconds between two events on the GPU around so many calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def host_seconds(call: Call, device: torch.device) -> float:
    """Time until the host is through with a call, without waiting for the device: the median of a few rounds."""
    once, _ = seconds_of(call, device)
    count, taken = _as_many(HOST_SECONDS, once, HOST_CALLS), []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize(device)
        taken.append(_cpu_clock(call, count, device) / count)
    torch.cuda.synchronize(device)
    return median(taken)


def _as_many(seconds: float, once: float, most: int) -> int:
    """How many calls of ``once`` seconds fit."""
    return max(1, min(most, int(seconds / max(once, 1e-9))))


@dataclass(frozen=True)
class Replay:
    """A CUDA graph of calls."""

    replay: Call
    calls: int
    """How many it holds."""


def captured(call: Call, device: torch.device) -> Replay | str:
    """A CUDA graph of the call, or why there is none. A capture that fails leaves the device as usable as before."""
    once, _ = seconds_of(call, device)
    if once > CAPTURED:
        return f"a call takes more than {CAPTURED * 1e3:.0f} ms"
    graph, count = torch.cuda.CUDAGraph(), _as_many(GRAPH, once, GRAPH_CALLS)
    side, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.stream(side):  # also leads back to the stream before, where a capture that failed stays on its own
            with _waiting_refused():
                call()  # what would wait for the device fails here, harmlessly, before anything is captured
            with torch.cuda.graph(graph, pool=pool, stream=side):
                for _ in range(count):
                    call()
        graph.replay()
        torch.cuda.synchronize(device)
    except Exception as failure:  # whatever a peer does in a call that cannot be captured
        _clear(device, pool)
        return one_line(failure)
    return Replay(graph.replay, count)


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Let torch raise where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls it a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _clear(device: torch.device, pool: tuple[int, int]) -> None:
    """Undo what a failed capture leaves behind in torch before 2.12: an allocator that takes it for still under way.

    Emptying its cache would then raise, and with it every later capture. See pytorch/pytorch#180395.
    """
    with suppress(Exception):  # not under way, which is as it should be
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    for _ in range(2):  # an error that nobody was told of yet is told, once, to whoever calls next
        with suppress(RuntimeError):
            torch.zeros(1, device=device)
            torch.cuda.synchronize(device)


def one_line(failure: Exception) -> str:
    """A failure in one line of a table."""
    return f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"


def peak_bytes(call: Call, device: torch.device) -> tuple[int, int]:
    """Most memory that a call takes beyond what is there before it, and the same without the tensors that it returns."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    returned = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)]
    return peak, max(0, peak - sum(x.numel() * x.element_size() for x in returned))
