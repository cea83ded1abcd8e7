"""Passes events from the thread that runs the steps to event loops: one wake-up per loop and step, however many streams it has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import EngineError
from .request import Event, Request

Pending = list[tuple["Mailbox", Event]]


class Mailbox:
    """The events of one stream."""

    def __init__(self, owner: Mailboxes) -> None:
        self.loop = asyncio.get_running_loop()
        self._owner = owner
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self.open = True

    def put(self, request: Request, event: Event) -> None:
        """Add an event, delivered by the next ``deliver``. Thread-safe. Raises EngineError if the loop is closed: the request fails."""
        if self.open:
            if self.loop.is_closed():
                raise EngineError("stream: the event loop must be open, got a closed one. Leave the stream before its loop ends.")
            self._owner.pending.setdefault(self.loop, []).append((self, event))

    def receive(self, event: Event) -> None:
        """Add an event, in the loop's thread."""
        self._queue.put_nowait(event)

    async def get(self) -> Event:
        """The next event."""
        return await self._queue.get()

    async def get_all(self) -> list[Event]:
        """The next event, and all that have arrived since."""
        events = [await self._queue.get()]
        while not self._queue.empty():
            events.append(self._queue.get_nowait())
        return events


class Mailboxes:
    """All streams of an engine."""

    def __init__(self) -> None:
        self.pending: dict[asyncio.AbstractEventLoop, Pending] = {}

    @contextmanager
    def open(self) -> Iterator[Mailbox]:
        """A mailbox of the running loop."""
        mailbox = Mailbox(self)
        try:
            yield mailbox
        finally:
            mailbox.open = False

    def deliver(self) -> None:
        """Pass all pending events to their loops."""
        pending, self.pending = self.pending, {}
        for loop, events in pending.items():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_receive, events)


def _receive(events: Pending) -> None:
    for mailbox, event in events:
        mailbox.receive(event)
