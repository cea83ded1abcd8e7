"""A process that forks workers for the server.

It imports what workers need and has the tokenizer and the template; its workers share this memory, and a new one starts in a
millisecond. It has one thread and never initialises a GPU, so it may fork. It and its workers are a process group of their own. Signals of
a terminal or of a service manager are for the server alone: when that has ended, so do these.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

from .errors import Refused
from .memory import keep_flat
from .texts import Texts, own
from .transport import receive, send

NICE = 10
"""Added to the niceness: steps of the model and small requests come first."""
MEMORY = 2**30
"""Bytes that the jobs of a worker may take."""


def keep(file: int) -> None:
    """Fork a worker for each socket that a socket of this number brings, until it is closed. Standard input has the pickled texts."""
    channel = socket.socket(fileno=file)
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of an ended worker nothing is left
    os.nice(NICE)
    keep_flat()
    own(Texts(*pickle.load(sys.stdin.buffer)))
    from . import app  # noqa: F401  # with all modules that have jobs

    gc.collect()
    gc.freeze()
    while True:
        _, files, _, _ = socket.recv_fds(channel, 1, 1)
        if not files:
            os.killpg(0, signal.SIGKILL)  # however busy the workers are
        if os.fork() == 0:
            channel.close()
            _work(socket.socket(fileno=files[0]))
        os.close(files[0])


def _work(channel: socket.socket) -> None:
    _bound_memory()
    while True:
        try:
            send(channel, *_done(receive(channel)[0]))
        except (EOFError, OSError):
            os._exit(0)


def _done(job: bytearray) -> tuple[bytes, ...]:
    """A result, or an exception and its traceback. Bytes are a part by themselves, so the server need not copy them."""
    try:
        function, given, named = pickle.loads(job)
        value = function(*given, **named)
        return (_pickled(None), value) if isinstance(value, bytes) else (_pickled(value),)
    except MemoryError:
        message = f"server: a request must fit into {MEMORY >> 20} MiB of a worker's memory, got a larger one. Send less at once."
        return (_pickled(None, Refused(400, message, code="request_too_large")),)
    except Exception as error:
        told = traceback.format_exc()
        try:
            return (_pickled(None, error, told),)
        except Exception:  # some exceptions are not pickled
            return (_pickled(None, RuntimeError(repr(error)), told),)


def _pickled(value: Any, error: Exception | None = None, told: str = "") -> bytes:
    return pickle.dumps((value, error, told), pickle.HIGHEST_PROTOCOL)


def _bound_memory() -> None:
    with suppress(OSError, ValueError), open("/proc/self/statm", "rb") as file:  # other systems have no such file
        used = int(file.read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))
