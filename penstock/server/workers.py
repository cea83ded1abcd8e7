"""Threads for what would keep the event loop from answering others: a few, so that they bound memory and leave time to the loop.

No client has more than half of them at a time.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from .caller import current

P = ParamSpec("P")
T = TypeVar("T")
SWITCH_SECONDS = 1e-4
"""For so long a thread keeps Python's lock while others wait for it."""


def take_short_turns() -> None:
    """Let threads take turns with Python's lock every ``SWITCH_SECONDS``, in this process. Python's own 5 ms suit few threads.

    Each operation of a step of the model gives up the lock and needs it again. Beside a thread that writes an answer, a step of a hundred
    operations waits a hundred times.
    """
    sys.setswitchinterval(SWITCH_SECONDS)


class Workers:
    """Runs functions in ``count`` threads for one event loop, those of a client in order.

    The threads begin with the first function. They are daemons: what still runs does not keep the process from its end, as threads of
    ``asyncio.to_thread`` do.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._threads: list[threading.Thread] = []
        self._error: Exception | None = None
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By client. They stay while somebody waits or works."""

    async def run(self, function: Callable[P, T], /, *given: P.args, **named: P.kwargs) -> T:
        """The result of a function. If the caller is cancelled before it began, it does not run."""
        client = current().share[0]
        turn = self._turns.get(client)
        if turn is None:
            turn = self._turns[client] = asyncio.Semaphore(max(1, self._count // 2))
        async with turn:
            return await self._run(function, *given, **named)

    async def _run(self, function: Callable[P, T], /, *given: P.args, **named: P.kwargs) -> T:
        if self._error is not None:
            raise self._error
        self._start()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        context = copy_context()  # who calls
        self._queue.put(lambda: _run(future, lambda: context.run(function, *given, **named)))
        self._waiting.add(future)
        try:
            return await future
        finally:
            self._waiting.discard(future)

    def end(self, error: Exception) -> None:
        """Raise an error in all that wait, and in all that come. What runs goes on, and its result is dropped. In the loop's thread."""
        self._error = error
        for future in self._waiting:
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """End the threads, each after its function."""
        for _ in self._threads:
            self._queue.put(None)
        self._threads = []

    def _start(self) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=_work, args=(self._queue,), name=f"penstock-{self._name}-{n}", daemon=True)
                for n in range(self._count)
            ]
            for one in self._threads:
                one.start()


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while True:
        task = queue.get()
        if task is None:
            return
        task()
        del task  # it has the result: an answer of megabytes


def _run(future: asyncio.Future[T], function: Callable[[], T]) -> None:
    if future.done():
        return
    result: T | None = None
    error: BaseException | None = None
    try:
        result = function()
    except BaseException as caught:
        error = caught

    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    with suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(settle)
