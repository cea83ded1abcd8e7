"""Runs functions in processes of their own, several side by side: one that crashes takes nothing with it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

PRELOADED = ["__main__", __name__, "penstock.bench.ahead", "penstock.bench.tune"]
"""What the process that the others are forked from imports: torch takes seconds, once. It never touches a GPU."""


class Failure(NamedTuple):
    """Why a call gave nothing."""

    reason: str


def apart(function: Callable[[Any], Any], job: Any, seconds: float) -> Any:
    """``function(job)`` in its own process; a Failure if it raises, dies, or takes longer. ``function`` is a module's, ``job`` plain."""
    process, here = _start(_send, function, job)
    try:
        return _received(process, here, seconds)
    finally:
        _end(process, here)


def one_by_one(function: Callable[[Any, list[Any]], Iterator[Any]], given: Any, items: list[Any], seconds: float) -> Iterator[Any]:
    """Yield what ``function(given, items)`` yields, an answer an item; a Failure for an item at which its process fails.

    The process is then started anew for the items behind it. It must first yield one answer more, when it is ready for items:
    a Failure there is raised as RuntimeError.
    """
    while items:
        process, here = _start(_send_all, function, given, items)
        try:
            ready = _received(process, here, seconds)
            if isinstance(ready, Failure):
                raise RuntimeError(ready.reason)
            failed = False
            while items and not failed:
                answer = _received(process, here, seconds)
                failed, items = isinstance(answer, Failure), items[1:]
                yield answer
        finally:
            _end(process, here)


def _start(function: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    return process, here


def _received(process: Any, here: Connection, seconds: float) -> Any:
    if not here.poll(seconds):
        return Failure(f"not done after {seconds:.0f} s")
    try:
        return here.recv()
    except EOFError:
        process.join()
        return Failure(f"its process ended with exit code {process.exitcode}")


def _end(process: Any, here: Connection) -> None:
    process.kill()
    process.join()
    here.close()


def _send(there: Connection, function: Callable[[Any], Any], job: Any) -> None:
    try:
        result = function(job)
    except Exception as error:  # whatever a compiler or a GPU raises is told, and may hold what cannot be sent
        result = _told(error)
    there.send(result)


def _send_all(there: Connection, function: Callable[[Any, list[Any]], Iterator[Any]], given: Any, items: list[Any]) -> None:
    try:
        for answer in function(given, items):
            there.send(answer)
    except Exception as error:
        there.send(_told(error))


def _told(error: Exception) -> Failure:
    return Failure("".join(traceback.format_exception_only(error)).strip())


def side_by_side(function: Callable[[Any], Any], jobs: Sequence[Any], seconds: float, workers: int | None = None) -> Iterator[Any]:
    """Yield each job's result, or Failure, in the order of the jobs; one process a core unless ``workers`` says otherwise."""
    with ThreadPoolExecutor(workers or cores()) as threads:
        yield from threads.map(partial(apart, function, seconds=seconds), jobs)


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
