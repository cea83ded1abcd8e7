"""HTTP on a connection: uvicorn's protocol, with a time for the head of a request, and OpenAI's error object for what is no HTTP."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .caller import Caller
from .errors import Refused
from .requestlog import HEADER, log, made_id

HEAD_SECONDS = 30
"""Time to send the head of a request, from the begin of the connection or the end of the answer before. Behind an answer, uvicorn closes a
connection without a new request earlier."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """One connection of a client."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._await_head()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close the connection."""
        self._refuse(Refused(400, f"server: the request must be HTTP, got another one ({msg.rstrip('.')}).", code="invalid_http"))

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._check_head)

    def _check_head(self) -> None:
        if not self._answering:
            self._refuse(Refused(408, f"server: the head must arrive within {HEAD_SECONDS:g} seconds, got a part of it.", code="timeout"))

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
