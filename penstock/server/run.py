"""Running the application: uvicorn, and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from .app import Running, create_app
from .connection import ACCEPTED, Connection
from .hosts import HOSTS, known_hosts
from .keys import Keys
from .requestlog import LogFormat, log_config
from .service import Service
from .tracing import Tracing

LOG = logging.getLogger("penstock.server")
DRAIN_SECONDS = 25
"""With the time for errors, less than the 30 seconds after which Kubernetes kills a container."""
WAITING = 2048
"""Connections that wait to be accepted."""
LAST_SECONDS = 1
"""After the time to drain, requests get this much to send their errors. Then connections are dropped."""


class Server(uvicorn.Server):
    """Ends with SIGTERM or SIGINT: no new connections; requests that run are finished, within a time.

    drain_seconds : float
        After it, the requests that still run end with an error.
    """

    def __init__(self, config: uvicorn.Config, service: Running, drain_seconds: float, keys: Keys | None = None) -> None:
        super().__init__(config)
        self._reread = None if keys is None else keys.reread
        self._service, self._drain_seconds = service, drain_seconds
        self._ending: asyncio.AbstractEventLoop | None = None
        """The loop, once the end has begun."""
        self._timers: list[asyncio.TimerHandle] = []

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End with a signal. SIGINT after another one leaves no time to finish requests; uvicorn's way would leave the folder of states."""
        if not (self.should_exit and sig == signal.SIGINT):
            super().handle_exit(sig, frame)
            return
        self._drain_seconds = 0
        if self._ending is not None:
            self._ending.call_soon_threadsafe(self._end_after, 0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; SIGHUP reads a file of keys again."""
        await super().startup(sockets)
        for one in (each for server in getattr(self, "servers", ()) for each in server.sockets):
            with socket.socket(fileno=os.dup(one.fileno())) as listening:
                listening.listen(WAITING)  # asyncio accepts as many at once as wait at most; here fewer
        if self._reread is not None and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reread)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then stop."""
        LOG.info("finishing %d requests, within %g seconds", len(self._service.running), self._drain_seconds)
        self._service.draining = True
        self._ending = asyncio.get_running_loop()
        self._end_after(self._drain_seconds)
        try:
            await super().shutdown(sockets)
        finally:
            self._stop_timers()

    def _end_after(self, seconds: float) -> None:
        self._stop_timers()
        loop = asyncio.get_running_loop()
        self._timers = [
            loop.call_later(seconds, self._end),
            loop.call_later(seconds + LAST_SECONDS, self._drop_connections),
            loop.call_later(seconds + 1.5 * LAST_SECONDS, self._cancel_tasks),
        ]

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _end(self) -> None:
        self._service.abort()
        for one in self._connections():
            one.end()

    def _drop_connections(self) -> None:
        for one in self._connections():
            one.abort()

    def _cancel_tasks(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()

    def _connections(self) -> list[Connection]:
        return [one for one in self.server_state.connections if isinstance(one, Connection)]


def make_server(
    service: Service, host: str = "127.0.0.1", port: int = 8000, *, api_key: str | None = None, keys: Keys | None = None,
    origins: Sequence[str] = (), drain_seconds: float = DRAIN_SECONDS, log_level: str = "info", log_format: LogFormat | None = None,
    tracing: Tracing | None = None, hosts: Sequence[str] = (),
) -> Server:  # fmt: skip
    """A server; its ``run`` ends with SIGTERM or SIGINT.

    hosts : list of str
        Without a key and at a loopback address, requests may name these in their Host header, beside this machine's; "*": all.
    log_format : "text" or "json", optional
        Write the lines of Penstock and uvicorn in this form. Default: leave Python's logging as it is, with uvicorn's own lines.
    """
    HOSTS.check("make_server", hosts)
    known = known_hosts(host, hosts, keyed=api_key is not None or keys is not None)
    app = create_app(service, api_key, keys, origins, tracing, known)
    return serving(app, service, host, port, keys=keys, drain_seconds=drain_seconds, log_level=log_level, log_format=log_format)


def serving(
    app: ASGIApp, service: Running, host: str, port: int, *, keys: Keys | None, drain_seconds: float, log_level: str = "info",
    log_format: LogFormat | None = None,
) -> Server:  # fmt: skip
    """A server of an application whose requests run in ``service``."""
    more: dict[str, Any] = {} if log_format is None else {"log_config": log_config(log_format)}
    config = uvicorn.Config(
        app, host=host, port=port, log_level=log_level, access_log=False, server_header=False, backlog=ACCEPTED, ws="none",
        lifespan="on", http=Connection, **more,
    )  # fmt: skip
    return Server(config, service, drain_seconds, keys)
