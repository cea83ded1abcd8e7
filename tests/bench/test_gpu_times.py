"""Times and memory of a GPU, measured on a fake GPU.

The fake is a queue. A call enqueues work and returns; ``synchronize`` takes the time of all queued work. Capturing a graph records the
work, replaying it enqueues it again.
"""

import time as real
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from clocks import Simulated
from measurements import SMALL, measured
from rich.console import Console

from penstock.bench import clock
from penstock.bench.calls import call_of
from penstock.bench.candidates import Candidate, ours
from penstock.bench.loop import token_loop
from penstock.bench.measure import GpuTiming, Untimed, _timed, measure
from penstock.bench.record import Record
from penstock.bench.report import print_measurements
from penstock.tokens.shape import Shape
from penstock.verify import oracle
from penstock.verify.inputs import Inputs, inputs
from penstock.verify.machine import Machine, using_threads

CPU = torch.device("cpu")


class Queue:
    """The fake GPU."""

    def __init__(self):
        self.queued, self.capturing, self.invalid = 0.0, None, False
        self.stream, self.sync_mode = "main", 0
        self.under_way, self.captures = [], 0
        self.allocated, self.peak = 1000, 0
        self.time = real

    def launch(self, seconds):
        if self.capturing is not None:
            self.capturing.work += seconds
        else:
            self.queued += seconds

    def wait(self, *_):
        if self.capturing is not None:
            self.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        self.time.sleep(self.queued)
        self.queued = 0.0

    @contextmanager
    def on_stream(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def capture(self, graph, pool, stream):
        self.captures += 1
        if self.under_way:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.capturing, self.stream = graph, stream
        self.under_way.append(pool)
        try:
            yield
        finally:  # as in torch: a failed end does not restore the stream and the pool
            self.capturing = None
            if self.invalid:
                self.invalid = False
                raise RuntimeError("operation failed due to a previous error during capture")
        self.under_way.remove(pool)

    def set_sync_debug_mode(self, mode):
        self.sync_mode = mode


@pytest.fixture
def gpu(monkeypatch):
    queue = Queue()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = queue.time.perf_counter() + queue.queued

        def synchronize(self):
            queue.wait()

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    class Graph:
        work = 0.0

        def replay(self):
            queue.launch(self.work)

    fake = {
        "Event": Event,
        "CUDAGraph": Graph,
        "Stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
        "current_stream": lambda device=None: queue.stream,
        "current_device": lambda: 0,
        "stream": queue.on_stream,
        "graph": queue.capture,
        "graph_pool_handle": lambda: (0, queue.captures),
        "synchronize": queue.wait,
        "get_sync_debug_mode": lambda: queue.sync_mode,
        "set_sync_debug_mode": queue.set_sync_debug_mode,
        "device": lambda device: nullcontext(),
        "reset_peak_memory_stats": lambda device: setattr(queue, "peak", queue.allocated),
        "memory_allocated": lambda device: queue.allocated,
        "max_memory_allocated": lambda device: queue.peak,
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda index, pool: queue.under_way.remove(pool), raising=False)
    monkeypatch.setattr(clock, "on_gpu", lambda device: True)
    monkeypatch.setattr("penstock.bench.exact.on_gpu", lambda device: True)
    with using_threads(1):
        yield queue


@pytest.fixture
def simulated(gpu, monkeypatch):
    """The fake GPU in simulated time, which passes on the GPU and where a call sleeps."""
    gpu.time = Simulated()
    monkeypatch.setattr(clock, "time", gpu.time)
    return gpu


def test_graph_replays_take_gpu_time_and_events_end_to_end_time(simulated):
    def call():
        simulated.time.sleep(2e-3)  # the host
        simulated.launch(2e-4)

    graph = clock.captured(call, CPU)
    assert isinstance(graph, clock.Replay)
    end_to_end, replayed = clock.in_turn([call, graph.replay], CPU, 0.05)
    assert end_to_end == pytest.approx([2.2] * len(end_to_end))
    assert [one / graph.calls for one in replayed] == pytest.approx([0.2] * len(replayed))
    assert clock.host_seconds(call, CPU) == pytest.approx(2e-3)


def test_gpu_time_is_of_one_call(simulated):
    seen, on_gpu = _timed([lambda: simulated.launch(2e-4)], CPU, 0.05)[0]
    assert on_gpu.milliseconds == pytest.approx(0.2)  # the graph has several calls
    assert on_gpu.quartiles == pytest.approx((0.2, 0.2))
    assert seen == pytest.approx([0.2] * len(seen))


def test_graphs_repeat_short_calls_and_exclude_long_ones(simulated):
    assert clock.captured(lambda: simulated.launch(1e-6), CPU).calls == clock.GRAPH_CALLS
    assert clock.captured(lambda: simulated.launch(3e-4), CPU).calls == 6
    assert clock.captured(lambda: simulated.launch(0.01), CPU).calls == 1
    assert clock.captured(lambda: simulated.launch(0.06), CPU) == "a call takes more than 50 ms"
    assert simulated.captures == 3


def test_host_time_excludes_gpu_time(simulated):
    def call():
        simulated.time.sleep(3e-4)
        simulated.launch(0.02)

    assert clock.host_seconds(call, CPU) == pytest.approx(3e-4)


def test_synchronizing_calls_are_not_captured(gpu):
    assert clock.captured(gpu.wait, CPU) == "RuntimeError: called a synchronizing CUDA operation"
    assert (gpu.captures, gpu.sync_mode) == (0, 0)


def test_a_failed_capture_restores_the_state(gpu):
    def autotunes():  # synchronizes in a way that torch does not detect
        if gpu.capturing is not None:
            gpu.wait()
        gpu.launch(1e-5)

    assert "during capture" in clock.captured(autotunes, CPU)
    assert (gpu.stream, gpu.sync_mode, gpu.capturing, gpu.under_way) == ("main", 0, None, [])
    assert isinstance(clock.captured(lambda: gpu.launch(1e-5), CPU), clock.Replay)


def test_peak_memory_with_and_without_results(gpu):
    result = torch.zeros(25), torch.zeros(3, dtype=torch.float64)

    def call():
        gpu.peak = gpu.allocated + 500
        return result

    assert clock.peak_bytes(call, CPU) == (500, 500 - 25 * 4 - 3 * 8)


def test_decode_steps_read_the_same_memory_every_time():
    """A CUDA graph of a step that reads the result of another call would read freed memory."""
    read = []

    def step(inputs, state):
        read.append(state.data_ptr())
        return inputs.v, state.clone()

    call = call_of(Candidate("peer", None, step, None), inputs("gla", Shape(2, 1, 2, 5, 7)), "decode")
    for _ in range(3):
        call()
    assert len(set(read)) == 1


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd", "decode"])
def test_measurements_on_a_gpu_are_recorded(mode, gpu, tmp_path):
    def waiting(x: Inputs, *state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if gpu.capturing is not None:
            gpu.wait()
        return token_loop(x, *state)

    x = inputs("rwkv6", SMALL)
    candidates = [ours("reference", x, mode), Candidate("peer", lambda x: waiting(x)[0], waiting, oracle.budget)]
    found = measure("small", x, mode, candidates, seconds=0.005)
    own, peer = found.timings
    assert own.gpu.milliseconds < own.milliseconds  # the reference queues nothing here
    assert own.gpu.not_captured is None
    assert own.gpu.host_microseconds > 0
    assert own.first_call_seconds > 0
    assert peer.gpu.milliseconds is None
    assert "during capture" in peer.gpu.not_captured
    assert gpu.under_way == []
    record = Record.of("penstock bench rwkv6", "cpu", [found], Machine.here())
    record.write(tmp_path / "record.json")
    assert Record.read(tmp_path / "record.json") == record


def test_floor_is_compared_by_gpu_time_where_known():
    known, unknown = (GpuTiming(alone, None, None, 50.0, 2**20, 0) for alone in (0.5, None))
    one = measured("gla", SMALL, "fwd", "loop", gpu=known)
    assert one.of_floor(one.timings[0]) == 1
    other = measured("gla", SMALL, "fwd", "loop", gpu=unknown)
    assert other.of_floor(other.timings[0]) == pytest.approx(1 / 3)
    slow_in_graphs = replace(one, copy=replace(one.copy, milliseconds=0.25))
    assert slow_in_graphs.of_floor(one.timings[0]) == 0.5


def test_table_shows_gpu_columns():
    untimed = (Untimed("fla", "refuses: RuntimeError: known wrong", False),)
    console = Console(width=140, file=StringIO())
    gpu = GpuTiming(0.5, (0.4, 0.6), None, 77.0, 3 << 20, 0)
    rows = [measured("gla", SMALL, "fwd", "loop", "auto (cpu)", untimed=untimed, gpu=gpu)]
    rows += [measured("gla", SMALL, "fwd", "loop", gpu=GpuTiming(None, None, "it waits", 77.0, 3 << 20, 0))]
    print_measurements(console, rows)
    text = console.file.getvalue()
    for word in (
        "fla refuses: RuntimeError: known wrong",
        "500 us",
        "77.0 us",
        "3 MiB",
        "host",
        "No GPU time of loop, gla, fwd: it waits",
    ):
        assert word in text
