"""HTTP of all endpoints: where a body ends, and answers in pieces, each after the client has read those before."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Scope, Send

from .errors import Refused

PIECE = 2**17
"""Bytes that are sent at once: so much of an answer that nobody reads is copied to its connection."""
CLOSE = (b"connection", b"close")


async def send_pieces(send: Send, message: Message) -> None:
    """Send a message of an answer, its body in pieces."""
    body = message.get("body", b"")
    if len(body) <= PIECE:
        await send({**message, "body": bytes(body)} if isinstance(body, memoryview) else message)
        return
    more, last = message.get("more_body", False), len(body) - PIECE
    for begin in range(0, len(body), PIECE):
        await send({**message, "body": bytes(body[begin : begin + PIECE]), "more_body": more or begin < last})
        await asyncio.sleep(0)  # sending returns at once while the client reads


def with_close(message: Message) -> Message:
    """The begin of an answer with ``Connection: close``."""
    headers = [pair for pair in message.get("headers", []) if pair[0].lower() != CLOSE[0]]
    return {**message, "headers": [*headers, CLOSE]}


def check_framing(scope: Scope) -> None:
    """Raise Refused for a body with two ends: a proxy before this server may have taken the other one, and what follows for a request."""
    names = [name for name, _ in scope["headers"]]
    if b"transfer-encoding" in names and b"content-length" in names:
        message = "server: a request must have Transfer-Encoding or Content-Length, got both."
        raise Refused(400, message, code="invalid_http", headers={"Connection": "close"})
