"""Functions in worker processes: a crash or a timeout affects one job only."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

PRELOADED = ["__main__", __name__, "penstock.tune.ahead", "penstock.tune.tune"]
"""Modules that the fork server imports once, because importing torch takes seconds. It never initialises a GPU."""


class Failure(NamedTuple):
    """Why a job has no result."""

    reason: str


class Worker:
    """A worker process. It starts at the first job, and again after a crash or a timeout. Not thread-safe."""

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        self.serve, self.arguments = serve, arguments
        self.process: Any = None

    def run(self, job: Any, seconds: float) -> Any:
        """The result of a job, or a Failure."""
        if self.process is None:
            self._start()
        try:
            self.connection.send(job)
            if not self.connection.poll(seconds):
                self.close()
                return Failure(f"not done after {seconds:.0f} s")
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            reason = f"its process ended with exit code {self.process.exitcode}"
            self.close()
            return Failure(reason)

    def close(self) -> None:
        """Kill the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None

    def _start(self) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.connection, other_end = context.Pipe()
        self.process = context.Process(target=self.serve, args=(other_end, *self.arguments), daemon=True)
        self.process.start()
        other_end.close()


def side_by_side(function: Callable[[Any], Any], jobs: Sequence[Any], seconds: float, workers: int | None = None) -> Iterator[Any]:
    """Yield ``function(job)`` for each job, in order; a Failure if it raises, crashes or exceeds ``seconds``.

    Starts one process per core by default. ``function`` must be at module level; jobs and results must be picklable.
    """
    idle: SimpleQueue[Worker] = SimpleQueue()
    started = [Worker(_serve, function) for _ in range(min(workers or cores(), len(jobs)))]
    for worker in started:
        idle.put(worker)

    def run(job: Any) -> Any:
        worker = idle.get()
        try:
            return worker.run(job, seconds)
        finally:
            idle.put(worker)

    try:
        if started:
            with ThreadPoolExecutor(len(started)) as threads:
                yield from threads.map(run, jobs)
    finally:
        for worker in started:
            worker.close()


def one_by_one(prepare: Callable[[Any], Callable[[Any], Any]], given: Any, jobs: Sequence[Any], seconds: float) -> Iterator[Any]:
    """Yield ``prepare(given)(job)`` for each job, in one process. After a failure, a new process is started and prepared."""
    worker = Worker(_prepare_and_serve, prepare, given)
    try:
        for job in jobs:
            answer = worker.run(job, seconds)
            if isinstance(answer, Failure):
                worker.close()
            yield answer
    finally:
        worker.close()


def _serve(connection: Connection, function: Callable[[Any], Any]) -> None:
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            result = function(job)
        except Exception as error:  # any exception of a compiler or a GPU; sent as text, because it may not be picklable
            result = Failure("".join(traceback.format_exception_only(error)).strip())
        connection.send(result)


def _prepare_and_serve(connection: Connection, prepare: Callable[[Any], Callable[[Any], Any]], given: Any) -> None:
    ready: list[Callable[[Any], Any]] = []

    def function(job: Any) -> Any:
        if not ready:
            ready.append(prepare(given))
        return ready[0](job)

    _serve(connection, function)


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
