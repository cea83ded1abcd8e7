"""Messages between the server and its workers. Large ones are read in place: Python's lock is free meanwhile."""

from __future__ import annotations

import socket
import struct

COUNT, SIZE = struct.Struct("<B"), struct.Struct("<Q")


def send(channel: socket.socket, *parts: bytes) -> None:
    """Send the parts of a message. Raises OSError if the other side has ended."""
    channel.sendall(COUNT.pack(len(parts)) + b"".join(SIZE.pack(len(part)) for part in parts))
    for part in parts:
        channel.sendall(part)


def receive(channel: socket.socket) -> list[bytearray]:
    """The parts of the next message. Raises EOFError or OSError if the other side has ended."""
    (count,) = COUNT.unpack(_read(channel, COUNT.size))
    sizes = _read(channel, count * SIZE.size)
    return [_read(channel, size) for (size,) in SIZE.iter_unpack(sizes)]


def _read(channel: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    view, done = memoryview(found), 0
    while done < size:
        count = channel.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count
    return found
