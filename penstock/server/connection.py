"""HTTP on a connection: uvicorn's protocol, with times for the head of a request and for reading an answer, and OpenAI's error object."""

from __future__ import annotations

import asyncio
import resource
import sys
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .caller import Caller
from .errors import Refused, shutting_down
from .requestlog import HEADER, log, made_id

HEAD_SECONDS = 30
"""Time to send the head of a request, from the begin of the connection or the end of the answer before. After an answer, uvicorn closes a
connection without a new request earlier."""
UNREAD_SECONDS = 30
"""In this time a client must have read all that was sent, or ``UNREAD_BYTES`` of it."""
UNREAD_BYTES = 2**18
ACCEPTED = 16
"""Connections that are accepted in one turn of the event loop."""
RESERVED_FILES = 64 + 6 * ACCEPTED
"""Of those that the process may have open, for what is no connection, and for connections that begin or end: that takes four turns."""
IDLE_SECONDS = 1
"""When the server ends, connections without a request stay open for so long: a request that is on its way gets its answer."""


def most_connections() -> int:
    """Open connections. A process that is out of files takes none, and asyncio writes thousands of errors a second then."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else max(1, files - RESERVED_FILES)


class Connection(H11Protocol):
    """One connection of a client. By h11 also where httptools is, which Ray brings: that bounds no heads, and needs no host."""

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _begun = False
    """Whether a part of a head has arrived."""

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._await_head()
        self._unread, self._unread_since = 0, self.loop.time()
        self._await_reading()
        if len(self.connections) > most_connections():
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        self._begun = True
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._begun = False
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(exc)
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()

    def resume_writing(self) -> None:
        """The client has read most of what was sent."""
        super().resume_writing()
        self._unread_since = self.loop.time()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close the connection."""
        self._refuse(Refused(400, f"server: the request must be HTTP, got another one ({msg.rstrip('.')}).", code="invalid_http"))

    def _make_room(self) -> None:
        """Drop the connection that has been without a request for the longest time, or refuse this one if all have requests."""
        idle = [
            (one._head_timer.when(), one) for one in self.connections
            if isinstance(one, Connection) and one is not self and one._head_timer is not None
            and not one._answering and not one.transport.is_closing()
        ]  # fmt: skip
        if idle:
            min(idle, key=lambda pair: pair[0])[1].abort()
        else:
            message = f"server: open connections must be at most {most_connections()}, got more. Raise the limit of open files (ulimit -n)."
            self._refuse(Refused(503, message, kind="server_error", code="too_many_connections"))

    # the end of the server

    def shutdown(self) -> None:
        """The server ends. A request that runs is answered; one that comes soon, too."""
        if self._answering:
            super().shutdown()
        else:
            self.loop.call_later(IDLE_SECONDS, self._close_idle)

    def end(self) -> None:
        """Time is up: refuse what has not arrived. Requests that have arrived send their own errors."""
        if not self._answering:
            self._close_idle()
        elif self.cycle.more_body:
            self._refuse(shutting_down())

    def abort(self) -> None:
        """Drop the connection, whatever is left to send."""
        self.transport.abort()

    def _close_idle(self) -> None:
        if self._answering or self.transport.is_closing():
            return
        if self._begun:
            self._refuse(shutting_down())
        else:
            self.transport.close()

    # times

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._check_head)

    def _check_head(self) -> None:
        if not self._answering:
            self._refuse(Refused(408, f"server: the head must arrive within {HEAD_SECONDS:g} seconds, got a part of it.", code="timeout"))

    def _await_reading(self) -> None:
        self._read_timer = self.loop.call_later(UNREAD_SECONDS / 10, self._check_reading)

    def _check_reading(self) -> None:
        """Drop a client that does not read. The transport tells what is left to send, not how much was sent."""
        left, now = self.transport.get_write_buffer_size(), self.loop.time()
        if left == 0 or left <= self._unread - UNREAD_BYTES:
            self._unread, self._unread_since = left, now
        self._unread = max(left, self._unread)
        if now - self._unread_since > UNREAD_SECONDS:
            self.logger.warning("a client did not read its answer")
            self.abort()
        else:
            self._await_reading()

    def _refuse(self, refused: Refused) -> None:
        """Send an error, unless an answer has begun, and close the connection."""
        if not (self._answering and self.cycle.response_started):
            content = bytes(refused.response().body)
            caller = Caller(made_id(), self.client[0] if self.client else "", status=refused.status)
            caller.failed(refused)
            lines = [
                f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}",
                "content-type: application/json", f"content-length: {len(content)}", "connection: close",
                f"{HEADER}: {caller.id}", "\r\n",
            ]  # fmt: skip
            self.transport.write("\r\n".join(lines).encode() + content)
            log("", "other", caller)
        self.transport.close()
