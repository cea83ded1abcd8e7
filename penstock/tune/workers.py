"""Runs functions in processes of their own, several side by side: one that crashes takes nothing with it."""

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
"""What the process that the others are forked from imports: torch takes seconds, once. It never touches a GPU."""


class Failure(NamedTuple):
    """Why a call gave nothing."""

    reason: str


class Worker:
    """A process that answers; started when it is first asked, and again after it crashed or was too slow. For one thread."""

    def __init__(self, answering: Callable[..., None], *given: Any) -> None:
        self.answering, self.given = answering, given
        self.process: Any = None

    def ask(self, question: Any, seconds: float) -> Any:
        """Its answer, or a Failure."""
        if self.process is None:
            self._start()
        try:
            self.connection.send(question)
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
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None

    def _start(self) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.connection, there = context.Pipe()
        self.process = context.Process(target=self.answering, args=(there, *self.given), daemon=True)
        self.process.start()
        there.close()


def side_by_side(function: Callable[[Any], Any], jobs: Sequence[Any], seconds: float, workers: int | None = None) -> Iterator[Any]:
    """Yield ``function(job)`` for each job, in order; a Failure if it raises, crashes or takes longer.

    One process a core, unless ``workers`` says otherwise. ``function`` is a module's, jobs and results are plain data.
    """
    idle: SimpleQueue[Worker] = SimpleQueue()
    every = [Worker(_answer, function) for _ in range(min(workers or cores(), len(jobs)))]
    for worker in every:
        idle.put(worker)

    def ask(job: Any) -> Any:
        worker = idle.get()
        try:
            return worker.ask(job, seconds)
        finally:
            idle.put(worker)

    try:
        if every:
            with ThreadPoolExecutor(len(every)) as threads:
                yield from threads.map(ask, jobs)
    finally:
        for worker in every:
            worker.close()


def one_by_one(prepare: Callable[[Any], Callable[[Any], Any]], given: Any, jobs: Sequence[Any], seconds: float) -> Iterator[Any]:
    """Yield ``prepare(given)(job)`` for each job, all in one process, which is started and prepared anew after every failure."""
    worker = Worker(_prepare_and_answer, prepare, given)
    try:
        for job in jobs:
            answer = worker.ask(job, seconds)
            if isinstance(answer, Failure):
                worker.close()
            yield answer
    finally:
        worker.close()


def _answer(there: Connection, function: Callable[[Any], Any]) -> None:
    while True:
        try:
            job = there.recv()
        except EOFError:
            return
        try:
            result = function(job)
        except Exception as error:  # whatever a compiler or a GPU raises is told, and may hold what cannot be sent
            result = Failure("".join(traceback.format_exception_only(error)).strip())
        there.send(result)


def _prepare_and_answer(there: Connection, prepare: Callable[[Any], Callable[[Any], Any]], given: Any) -> None:
    ready: list[Callable[[Any], Any]] = []

    def function(job: Any) -> Any:
        if not ready:
            ready.append(prepare(given))
        return ready[0](job)

    _answer(there, function)


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
