"""A replica: the application of one engine, after the door. Ray Serve starts, checks and replaces it (``cluster.py``).

Requests come by links (``link.py``). The door has checked their keys, and it has the limits of tokens and queues of all replicas.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from .app import create_app
from .caller import current
from .errors import Refused, shutting_down
from .keys import Key
from .link import Kind, Link
from .quotas import Quota
from .requestlog import KEY, counts
from .run import LAST_SECONDS
from .service import Service
from .tracing import Tracing

LOG = logging.getLogger("penstock.server")
SECRET_SECONDS = 10
"""A connection has this long to show its secret and its request."""
MOST_BODIES = 16


class Claims(Quota):
    """The limits of a key, which the door has."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def reserve(self, tokens: int, completions: int, function: str) -> None:
        """Ask the door. Raises Refused."""
        self._link.put(Kind.RESERVE, [tokens, completions, function])
        refused = await self._answers.get()
        if refused is not None:
            raise Refused(**refused)

    def give_back(self, count: int) -> None:
        """Tell the door."""
        self._link.put(Kind.GIVE_BACK, count)

    def answered(self, refused: dict[str, Any] | None) -> None:
        """What the door says to ``reserve``."""
        self._answers.put_nowait(refused)


class Answering:
    """One request of a link, as ASGI."""

    def __init__(self, link: Link, request: dict[str, Any]) -> None:
        self._link = link
        self._received: asyncio.Queue[Message] = asyncio.Queue(MOST_BODIES)
        self._claims = Claims(link)
        key = Key(request.pop("key"), quota=self._claims, priority=request.pop("priority"))
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.pop("headers")]
        raw, query = request.pop("raw_path").encode("latin-1"), request.pop("query").encode("latin-1")
        self.scope: Scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "root_path": "", "server": None,
            "headers": headers, "raw_path": raw, "query_string": query, "client": (request.pop("client"), 0), KEY: key, **request,
        }  # fmt: skip

    async def run(self, app: ASGIApp) -> None:
        """Answer, and tell the counts of the log's line."""
        reader = asyncio.ensure_future(self._read())
        try:
            await app(self.scope, self._received.get, self._send)
            self._link.put(Kind.END, counts(current()))
        finally:
            reader.cancel()

    async def _read(self) -> None:
        with suppress(EOFError):
            while True:
                kind, content = await self._link.get()
                if kind is Kind.BODY:
                    await self._received.put({"type": "http.request", "body": content, "more_body": False})
                elif kind is Kind.ANSWER:
                    self._claims.answered(json.loads(content))
                else:
                    break
        self._claims.answered(arguments(shutting_down()))  # a reserve() that waits must return
        while True:
            await self._received.put({"type": "http.disconnect"})

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
            route = getattr(self.scope.get("route"), "path", "other")
            self._link.put(Kind.START, {"status": message["status"], "headers": headers, "route": route})
        elif message["type"] == "http.response.body":
            self._link.put(Kind.DATA if message.get("more_body") else Kind.LAST, message.get("body", b""))
        await self._link.drained()


def arguments(refused: Refused) -> dict[str, Any]:
    """The arguments of an error."""
    return {name: getattr(refused, name) for name in ("status", "message", "kind", "param", "code", "headers")}


class Replica:
    """One engine with its application, which links reach, in a thread of its own.

    make : function
        Makes the service.
    address : str
        Links come to this address of the machine, at any free port.
    drain_seconds : float
        Requests that run have this long when the replica is closed.
    """

    _thread: threading.Thread | None = None

    def __init__(
        self, make: Callable[[], Service], name: str, address: str, secret: bytes, drain_seconds: float, otlp_endpoint: str | None = None
    ) -> None:  # fmt: skip
        self._name, self._secret, self._drain_seconds = name, secret, drain_seconds
        self._service = make()
        self._app = create_app(self._service, tracing=Tracing.configured(otlp_endpoint))
        self._open = set[asyncio.Task[None]]()
        self._address: tuple[str, int] | None = None
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(address, started), name="penstock-links", daemon=True)
        self._thread.start()
        started.wait()
        if self._address is None:
            raise RuntimeError("the application of this replica did not start; its log has the error")

    def about(self) -> dict[str, Any]:
        """Where links reach it, and what it can run. Raises if it cannot take requests."""
        self.check_health()
        if self._stopping.is_set():
            raise RuntimeError("this replica takes no more requests")
        return {"name": self._name, "address": self._address, "slots": self._service.engine.stats.slots}

    def metrics(self) -> tuple[str, str]:
        """Its name and Prometheus' text format."""
        return self._name, self._service.metrics.text().decode()

    @property
    def open(self) -> int:
        """Requests that it has."""
        return len(self._open)

    def check_health(self) -> None:
        """Raise if requests cannot be answered."""
        if not self._service.engine.alive or self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the engine of this replica has stopped")

    def close(self) -> None:
        """Finish requests that run, within the time for it, and take no new ones."""
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(self._drain_seconds + 2 * LAST_SECONDS)

    def _run(self, address: str, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(address, started))
        finally:
            started.set()
            self._loop.close()

    async def _serve(self, address: str, started: threading.Event) -> None:
        async with self._app.router.lifespan_context(self._app):
            server = await self._loop.create_server(self._linked, address, 0)
            self._address = server.sockets[0].getsockname()[:2]
            started.set()
            await self._stopping.wait()
            server.close()
            self._service.draining = True
            if self._open:
                await asyncio.wait(self._open, timeout=self._drain_seconds)
            self._service.abort()
            if self._open:
                await asyncio.wait(self._open, timeout=LAST_SECONDS)
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    def _linked(self) -> Link:
        link = Link(self._secret)
        task = self._loop.create_task(self._answer(link))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return link

    async def _answer(self, link: Link) -> None:
        try:
            kind, content = await asyncio.wait_for(link.get(), SECRET_SECONDS)
            if kind is Kind.REQUEST:
                await Answering(link, json.loads(content)).run(self._app)
        except (EOFError, asyncio.TimeoutError):
            pass
        except Exception:
            LOG.exception("a request ended without an answer")
        finally:
            link.close()
