"""Threads for what would keep the event loop from answering others: a few, so that they bound memory and leave time to the loop.

No client has more than half of them at a time, until its functions have ended: also those for which it waits no more.
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
        self._waiting: dict[asyncio.Future[Any], asyncio.Future[None]] = {}
        """Results, and whether the functions have ended: those whose callers are gone, too."""
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
        await turn.acquire()
        if self._error is not None:
            turn.release()
            raise self._error
        self._start()
        loop, context = asyncio.get_running_loop(), copy_context()  # who calls
        result, ended = loop.create_future(), loop.create_future()
        self._waiting[result] = ended

        def leave(_: object) -> None:
            del self._waiting[result]
            turn.release()

        ended.add_done_callback(leave)
        self._queue.put(lambda: _run(result, ended, lambda: context.run(function, *given, **named)))
        return await result  # type: ignore[no-any-return]

    def end(self, error: Exception) -> None:
        """Raise an error in all that wait, and in all that come. What runs goes on, and its result is dropped. In the loop's thread."""
        self._error = error
        for result, ended in self._waiting.items():
            if not result.done():
                result.set_exception(error)
            if not ended.done():
                ended.set_result(None)

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


def _run(result: asyncio.Future[T], ended: asyncio.Future[None], function: Callable[[], T]) -> None:
    value: T | None = None
    error: BaseException | None = None
    if not result.done():
        try:
            value = function()
        except BaseException as caught:
            error = caught

    def settle() -> None:
        if not ended.done():
            ended.set_result(None)
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    with suppress(RuntimeError):  # the loop is closed
        result.get_loop().call_soon_threadsafe(settle)
