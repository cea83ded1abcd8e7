"""One HTTP request between the door and a replica: frames over a TCP connection of its own.

A frame is its kind, its length and its content, which is JSON or bytes of a body. TCP tells at once when the other side has ended, and
holds back a side that writes faster than the other one reads. Data that is waiting is read together, without waiting for more.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import struct
from collections import deque
from enum import IntEnum
from typing import Any, cast

HEAD = struct.Struct("!BI")
WAITING = 2**20
"""Bytes that wait to be read, above which the other side is held back."""
SECRET_BYTES = 64
KEEPALIVE = ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)
"""A machine that is gone ends its connections after 11 seconds."""


class Kind(IntEnum):
    """What a frame has."""

    SECRET = 1
    """The first frame: bytes that both sides know."""
    REQUEST = 2
    BODY = 3
    CANCEL = 4
    """The client is gone, or the server ends."""
    RESERVE = 5
    """Tokens that a request may use, and its completions. The next frame of the door is the answer."""
    ANSWER = 6
    GIVE_BACK = 7
    START = 8
    DATA = 9
    LAST = 10
    """The last data of an answer."""
    END = 11
    """The request has ended, whether or not with a whole answer."""


class Link(asyncio.Protocol):
    """One side of it. ``get`` raises EOFError when the other side has ended.

    secret : bytes, optional
        What the first frame must be. A connection with another one is closed.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret
        self._buffer, self._frames = bytearray(), deque[tuple[Kind, bytes]]()
        self._size = 0
        self._reading, self._writing = asyncio.Event(), asyncio.Event()
        self._writing.set()
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self.ended = False
        self.cancelled = False
        """Whether this side has asked for the end of the request."""

    @classmethod
    async def connect(cls, address: tuple[str, int], secret: bytes) -> Link:
        """The door's side. Raises OSError."""
        _, link = await asyncio.get_running_loop().create_connection(cls, *address)
        link.put(Kind.SECRET, secret)
        return link

    def put(self, kind: Kind, content: Any = b"") -> None:
        """Send a frame; what is not bytes as JSON."""
        if self._transport is not None and not self.ended:
            data = content if isinstance(content, bytes | bytearray | memoryview) else json.dumps(content).encode()
            self._transport.writelines((HEAD.pack(kind, len(data)), data))

    async def get(self) -> tuple[Kind, bytes]:
        """The next frame; data that has come meanwhile in one. Raises EOFError."""
        while not self._frames:
            if self.ended:
                raise EOFError
            self._reading.clear()
            await self._reading.wait()
        kind, content = self._frames.popleft()
        if kind is Kind.DATA and self._frames and self._frames[0][0] is Kind.DATA:
            pieces = [content]
            while self._frames and self._frames[0][0] is Kind.DATA:
                pieces.append(self._frames.popleft()[1])
            content = b"".join(pieces)
        self._size -= len(content)
        if self._paused and self._size < WAITING and self._transport is not None and not self.ended:
            self._paused = False
            self._transport.resume_reading()
        return kind, content

    async def drained(self) -> None:
        """Wait until the other side has read most of what was sent."""
        await self._writing.wait()

    def cancel(self) -> None:
        """Ask the other side to end the request."""
        if not self.cancelled:
            self.cancelled = True
            self.put(Kind.CANCEL)

    def close(self) -> None:
        """Close the connection after what was sent."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the times after which a silent machine is gone."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        """Find frames."""
        assert self._transport is not None
        self._buffer += data
        begin = 0
        while len(self._buffer) - begin >= HEAD.size:
            number, size = HEAD.unpack_from(self._buffer, begin)
            if self._secret is not None and (number != Kind.SECRET or size > SECRET_BYTES):
                self._transport.abort()
                return
            end = begin + HEAD.size + size
            if len(self._buffer) < end:
                break
            self._take(Kind(number), bytes(memoryview(self._buffer)[begin + HEAD.size : end]))
            begin = end
        del self._buffer[:begin]
        if self._size >= WAITING and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _take(self, kind: Kind, content: bytes) -> None:
        assert self._transport is not None
        if self._secret is None:
            self._frames.append((kind, content))
            self._size += len(content)
            self._reading.set()
        elif hmac.compare_digest(content, self._secret):
            self._secret = None
        else:
            self._transport.abort()

    def pause_writing(self) -> None:
        """The other side reads slowly."""
        self._writing.clear()

    def resume_writing(self) -> None:
        """It has read most."""
        self._writing.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake all tasks that wait."""
        self.ended = True
        self._reading.set()
        self._writing.set()
