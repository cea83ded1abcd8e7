"""Worker processes for what large requests need: parsing, tokens, templates, long answers.

In threads of the server such work would keep Python's lock, which each operation of a step of the model needs. A call of the C code of
JSON or of a tokenizer keeps it to its end, for tenths of a second. ``keeper`` is the other side.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from typing import Any, ParamSpec, TypeVar

from .errors import Refused, shutting_down
from .texts import Texts
from .transport import receive, send
from .workers import Workers

P = ParamSpec("P")
T = TypeVar("T")
LOG = logging.getLogger("penstock.server")
COUNT = 2
"""Two clients have one each: the large requests of one do not keep those of another waiting."""
TRIES = 2
"""A job whose worker ends is done by another one, once: it may be what ended it."""


class Processes:
    """Runs functions of modules in worker processes, those of a client in order. They start with the first function, or by ``start``.

    texts : Texts
        What functions take as an argument that is not sent. If it cannot be pickled, such as a tokenizer whose class is in no module,
        functions run in threads.
    """

    def __init__(self, texts: Texts) -> None:
        self._threads = Workers(COUNT, "processes")
        """Each waits for the process that has its job."""
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._keeper: Keeper | None = None
        try:
            self._keeper = Keeper(pickle.dumps((texts.tokenizer, texts.template)))
        except Exception as error:
            LOG.warning("what large requests need is done in threads, beside which others are slower: %s", error)
        else:
            for _ in range(COUNT):
                self._idle.put(Worker(self._keeper))

    async def run(self, function: Callable[P, T], /, *given: P.args, **named: P.kwargs) -> T:
        """The result of a function of a module. Raises what it raises, Refused if its workers end, or what pickle raises."""
        if self._keeper is None:
            return await self._threads.run(function, *given, **named)
        return await self._threads.run(self._run, function, given, named)

    def start(self) -> None:
        """Start the keeper now: it takes seconds."""
        if self._keeper is not None:
            self._keeper.start()

    def end(self, error: Exception) -> None:
        """As ``Workers.end``."""
        self._threads.end(error)

    def close(self) -> None:
        """Kill the processes, whatever they do."""
        if self._keeper is not None:
            self._keeper.close()
        self._threads.close()
        with suppress(Empty):
            for _ in range(COUNT):  # those that are busy are forgotten by their threads
                worker = self._idle.get_nowait()
                worker.forget()
                self._idle.put(worker)

    def _run(self, function: Callable[..., T], given: Any, named: Any) -> T:
        job, worker = pickle.dumps((function, given, named), pickle.HIGHEST_PROTOCOL), self._idle.get()
        try:
            for _ in range(TRIES):
                try:
                    found, *more = worker.ask(job)
                except (EOFError, OSError):
                    worker.forget()
                    worker.keeper.check()
                    LOG.warning("a worker process ended during %s", getattr(function, "__name__", "a template"))
                    continue
                value, error, told = pickle.loads(found)
                if error is not None:
                    raise error from WorkerError(told)
                return memoryview(more[0]) if more else value  # type: ignore[return-value]
        finally:
            self._idle.put(worker)
        message = f"server: a worker process must not end, got {TRIES} that did during this request. The server's log has more."
        raise Refused(500, message, kind="server_error", code="worker_ended")


class WorkerError(Exception):
    """The traceback of a worker, as the cause of its exception."""


class Worker:
    """A worker process. It starts with the first job, and again after ``forget``. Not thread-safe."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self._channel: socket.socket | None = None

    def ask(self, job: bytes) -> list[bytearray]:
        """The answer to a job. Raises EOFError or OSError if the process ends."""
        if self._channel is None:
            self._channel = self.keeper.fork()
        send(self._channel, job)
        return receive(self._channel)

    def forget(self) -> None:
        """Take another process for the next job."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class Keeper:
    """The process that forks workers. It starts with the first one, and again if it ended."""

    def __init__(self, texts: bytes) -> None:
        self._texts = texts
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start it, unless it runs. Raises Refused after ``close``."""
        with self._lock:
            self._start()

    def fork(self) -> socket.socket:
        """A connection to a new worker."""
        with self._lock:
            self._start()
            ours, its = socket.socketpair()
            with its:
                socket.send_fds(self._channel, [b"\0"], [its.fileno()])
        return ours

    def close(self) -> None:
        """Kill it and its workers."""
        with self._lock:
            self._closed = True
            self._kill()

    def check(self) -> None:
        """Raise Refused after ``close``."""
        if self._closed:
            raise shutting_down()

    def _start(self) -> None:
        self.check()
        if self._process is not None and self._process.poll() is None:
            return
        self._kill()
        self._channel, its = socket.socketpair()
        with its, TemporaryFile() as texts:  # no pipe: the keeper imports torch before it reads
            texts.write(self._texts)
            texts.seek(0)
            code = f"import sys; sys.path[:] = {sys.path!r}; from penstock.server.keeper import keep; keep({its.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[its.fileno()], stdin=texts, start_new_session=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._channel.close()
            self._process = None
