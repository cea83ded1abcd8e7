"""Work that takes milliseconds or more, in threads. No client gets all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from .caller import current

P = ParamSpec("P")
R = TypeVar("R")
THREADS = 32
OF_A_CLIENT = 2
"""One client has so many of them at a time; its other work waits."""

_turns: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, str], asyncio.Semaphore] = WeakValueDictionary()
"""By client. They stay while somebody waits or works."""


def use_threads() -> None:
    """Give the running loop its threads."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "penstock-server"))


async def in_thread(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What ``asyncio.to_thread`` gives, when it is the turn of the caller's client."""
    name = asyncio.get_running_loop(), current().share[0]
    turn = _turns.get(name)
    if turn is None:
        turn = _turns[name] = asyncio.Semaphore(OF_A_CLIENT)
    async with turn:
        return await asyncio.to_thread(work, *args, **kwargs)
