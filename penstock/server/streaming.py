"""Answers as server-sent events, and clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Protocol

from fastapi import Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine import Event
from .caller import current
from .errors import Refused, refusal
from .generation import Generation
from .metrics import Metrics
from .protocol import ChatChunk, CompletionAnswer, SamplingBody

LAST_SECONDS = 10
"""After the time of a request, its client has this long to read the rest of the answer."""


LARGE = 2**16
"""Pieces of more bytes are sent before the next ones are written."""
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""Many clients take these for ends of lines, as ``str.splitlines`` and httpx do. JSON leaves them in texts; only there they can be."""


class NamedEvent(BaseModel):
    """A piece of an answer in an API whose events have names: their types."""

    type: str


def encoded(piece: BaseModel) -> bytes:
    """One event of a stream."""
    name = f"event: {piece.type}\n".encode() if isinstance(piece, NamedEvent) else b""
    return name + b"data: " + piece.model_dump_json().translate(LINE_ENDS).encode() + b"\n\n"


class Writer(Protocol):
    """Turns events into pieces of an answer."""

    def write(self, event: Event) -> Iterable[BaseModel | Awaitable[bytes]]:
        """Pieces for an event. What takes long gives its text later."""

    def finish(self) -> Iterable[BaseModel]:
        """Pieces after the last event. Called in a thread: it may write files."""


class EventStream(Response):
    """The answer to a request with ``stream``. It owns the generation, and closes it."""

    end = b"data: [DONE]\n\n"
    """After the last piece, unless an error ended the stream."""

    def __init__(
        self, generation: Generation, writer: Writer, metrics: Metrics, seconds: float, body: SamplingBody | None = None
    ) -> None:  # fmt: skip
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation, self._writer, self._metrics = generation, writer, metrics
        self._seconds = seconds + LAST_SECONDS
        options = None if body is None else body.stream_options
        self._counts = options is not None and options.continuous_usage_stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; cancel the rest if the client disconnects."""
        try:
            if not await completes(disconnect(receive), self._send(send), self._seconds):
                current().status = 499
                self._metrics.disconnected()
        finally:
            self._generation.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _pieces(self) -> AsyncIterator[bytes]:
        """The text of the stream. An error ends it: the status was sent before."""
        tokens = 0
        try:
            async for events in self._generation.events():
                piece = b""
                for event in events:
                    tokens += len(event.tokens)
                    for one in self._writer.write(event):
                        if self._counts and isinstance(one, ChatChunk | CompletionAnswer):
                            one.usage = self._generation.usage(tokens)
                        piece += encoded(one) if isinstance(one, BaseModel) else await one
                        if len(piece) > LARGE:
                            yield piece
                            piece = b""
                            await asyncio.sleep(0)  # sending returns at once while the client reads
                    if event.logprobs:
                        await asyncio.sleep(0)
                if piece:
                    yield piece
            yield await self._generation.in_thread(self._rest) + self.end
        except Exception as error:
            yield self.failed(current().failed(refusal(error)))

    def _rest(self) -> bytes:
        return b"".join(map(encoded, self._writer.finish()))

    def failed(self, error: Refused) -> bytes:
        """The event of an error."""
        return b"data: " + bytes(error.response().body) + b"\n\n"


async def completes(watch: Awaitable[None], work: Awaitable[None], seconds: float | None = None) -> bool:
    """Run ``work``; cancel it when ``watch`` ends, or after a time. Returns whether it ended by itself."""
    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(watch)
    try:
        await asyncio.wait([worker, watcher], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
            return True
        return False
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Attended:
    """Cancels what answers a request whose client disconnects after the body and before the answer. Raises ClientDisconnect then.

    An answer that has begun finds that out by itself.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        whole, gone, begun = asyncio.Event(), asyncio.Event(), False

        async def received() -> Message:
            if whole.is_set():
                await gone.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            if not message.get("more_body", False):
                whole.set()
            return message

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        async def watch() -> None:
            await whole.wait()
            await disconnect(receive)
            gone.set()
            if begun:
                await asyncio.Event().wait()

        if not await completes(watch(), self._app(scope, received, sent)):
            raise ClientDisconnect
