"""The door of several replicas: checks keys and limits, and passes each request to one replica.

It listens where one process would. What it passes on are bytes of bodies: a replica does all work whose time depends on the request. All
replicas together have the limits of one process, because only the door counts.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import QueueFull
from .affinity import conversation, ranked
from .app import GUARDED, Answers, error_answer, key_check
from .caller import current
from .errors import RETRY_SECONDS, Refused, refusal, shutting_down
from .keys import Keys
from .limits import Limits, read_body
from .link import Kind, Link
from .messages import PATH as MESSAGES
from .metrics import DoorMetrics, of_replicas
from .origins import ORIGINS, rules
from .replica import arguments
from .requestlog import HEADER, RequestLog
from .service import REFUSED_SECONDS
from .streaming import disconnect

LOG = logging.getLogger("penstock.server")
LOOK_SECONDS = 0.5
"""Between two looks at which replicas there are."""
CONNECT_SECONDS = 3
COUNT_SECONDS = 2
"""A replica has this long to end a request whose client is gone, and to tell what it used."""
STATES, RESPONSES = "/v1/states", "/v1/responses"


@dataclass
class Known:
    """A replica, as the door knows it."""

    name: str
    address: tuple[str, int]
    slots: int
    open: int = 0
    """Requests that it has."""


class Door:
    """The application of the door, without its log, counts of answers and rules for other origins (``create_door``).

    look : function
        ``Replica.about`` of all replicas that run.
    scrape : function
        ``Replica.metrics`` of these.
    secret : bytes
        What links begin with.
    limits : Limits
        Those of bodies.
    max_queue : int
        Completions of a client that may wait, beside as many as all slots can run.
    """

    def __init__(
        self, look: Callable[[], Awaitable[list[dict[str, Any]]]], scrape: Callable[[], Awaitable[list[tuple[str, str]]]], secret: bytes,
        limits: Limits, max_queue: int, keys: Keys | None = None,
    ) -> None:  # fmt: skip
        self._look, self._scrape, self._secret = look, scrape, secret
        self._limits, self._max_queue = limits, max_queue
        self._check = None if keys is None else key_check(keys)
        self._replicas: dict[str, Known] = {}
        self._completions = Counter[str]()
        """Of each client: those that run or wait."""
        self.metrics = DoorMetrics()
        self.running: set[Link] = set()
        self.draining = self._closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        path = scope["path"]
        if scope["method"] in ("GET", "HEAD") and path in ("/health", "/metrics"):
            scope["route"] = SimpleNamespace(path=path)
            await (self._health() if path == "/health" else await self._counts())(scope, receive, send)
            return
        request = Request(scope, receive)
        guarded, body = GUARDED.match(path), b""
        if self._check is not None and guarded:
            await self._check(request)
        if self._closing:
            raise shutting_down()
        if guarded:  # bodies of other paths, which need no key, are not read: they could fill the memory
            most = self._limits.state_bytes if path == STATES else self._limits.body_bytes
            body = await read_body(request, most, self._limits.body_seconds)
        await Passage(self, scope, body).run(receive, send)

    def abort(self) -> None:
        """End all requests with an error, and take no new ones. Called by the event loop."""
        self.draining = self._closing = True
        for link in self.running:
            link.cancel()

    async def connect(self, talk: bytes | None) -> tuple[Known, Link]:
        """A replica, and a link to it: that of the conversation, unless its slots are taken and others are free. Raises Refused.

        The request is counted before its link is made: others that come meanwhile see its slot taken. A link that is made while the
        server ends is closed: ``abort`` has not seen it.
        """
        for one in ranked(list(self._replicas.values()), talk):
            one.open += 1
            try:
                link = await asyncio.wait_for(Link.connect(one.address, self._secret), CONNECT_SECONDS)
                if self._closing:
                    link.close()
                    raise shutting_down()
            except BaseException as error:
                one.open -= 1
                if not isinstance(error, OSError | asyncio.TimeoutError):
                    raise
                if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                    raise retryable("too_many_connections", "requests must be as many as open files allow, got more") from error
                self.lose(one)
                continue
            return one, link
        raise retryable("no_replica", "a replica must be running, got none")

    def lose(self, replica: Known) -> None:
        """A link to a replica was cut, or cannot be made: pass on no more requests until it is seen again."""
        self._replicas.pop(replica.name, None)

    def enter(self, client: str, completions: int, function: str) -> None:
        """Count completions of a client that are to be queued. Raises QueueFull."""
        most = self._max_queue + sum(one.slots for one in self._replicas.values())
        if self._completions[client] + completions > most:
            rule = f"completions of a client that run or wait must be at most {most} on all replicas"
            raise QueueFull(f"{function}: {rule}, got {self._completions[client] + completions}. Try again later.")
        self._completions[client] += completions

    def leave(self, client: str, completions: int) -> None:
        """These have ended."""
        self._completions[client] -= completions
        if not self._completions[client]:
            del self._completions[client]

    def _health(self) -> Response:
        status = "closing" if self.draining else "ok" if self._replicas else "no replica"
        return JSONResponse({"status": status, "replicas": len(self._replicas)}, 200 if status == "ok" else 503)

    async def _counts(self) -> Response:
        self.metrics.replicas.set(len(self._replicas))
        text = of_replicas(dict(await self._scrape())) + self.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.refresh()
        looking = asyncio.ensure_future(self._keep_looking())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        looking.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.refresh()
            except Exception as error:  # those before are used on
                LOG.error("the replicas could not be asked: %r", error)

    async def refresh(self) -> None:
        """See which replicas there are."""
        found = {}
        for about in await self._look():
            name, address, slots = about["name"], tuple(about["address"]), about["slots"]
            before = self._replicas.get(name)
            found[name] = Known(name, address, slots) if before is None else before
        if found.keys() != self._replicas.keys():
            LOG.info("%d replicas answer", len(found))
        self._replicas = found


class Passage:
    """One request on its way through the door."""

    def __init__(self, door: Door, scope: Scope, body: bytes) -> None:
        self._door, self._scope, self._body = door, scope, body
        self._caller = current()
        self._reserved = self._completions = 0
        self._begun = self._events = self._whole = False
        self._replica: Known | None = None
        """Has this request. None as soon as it has sent the last data: a client's next request may come before the frame after it."""

    async def run(self, receive: Receive, send: Send) -> None:
        """Pass it on, and its answer back. A client that disconnects ends it."""
        caller, headers = self._caller, Headers(scope=self._scope)
        replica, link = await self._door.connect(conversation(caller.key.name, headers, self._body))
        self._replica = replica
        self._door.running.add(link)
        ending = asyncio.ensure_future(self._answer(replica, link, send))
        watching = asyncio.ensure_future(disconnect(receive))
        try:
            link.put(Kind.REQUEST, self._head(headers))
            link.put(Kind.BODY, self._body)
            await asyncio.wait([ending, watching], return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                if not self._whole:
                    caller.status = 499
                    self._door.metrics.disconnected()
                    link.cancel()
                await asyncio.wait([ending], timeout=COUNT_SECONDS)
        finally:
            for task in (ending, watching):
                task.cancel()
            await asyncio.gather(ending, watching, return_exceptions=True)
            link.close()
            self._door.running.discard(link)
            self._leave()
            caller.key.quota.give_back(self._reserved)
        if not ending.cancelled():
            ending.result()

    def _leave(self) -> None:
        """Give back the slot and the place in the queue, once."""
        if self._replica is not None:
            self._replica.open -= 1
            self._replica = None
            self._door.leave(self._caller.share[0], self._completions)

    def _head(self, headers: Headers) -> dict[str, Any]:
        scope, caller = self._scope, self._caller
        known = [(name, value) for name, value in headers.items() if name not in (HEADER, "authorization", "x-api-key")]
        return {
            "method": scope["method"], "scheme": scope["scheme"], "path": scope["path"],
            "raw_path": scope["raw_path"].decode("latin-1"), "query": scope["query_string"].decode("latin-1"),
            "headers": [*known, (HEADER, caller.id)], "client": caller.address, "key": caller.key.name, "priority": caller.key.priority,
        }  # fmt: skip

    async def _answer(self, replica: Known, link: Link, send: Send) -> None:
        try:
            while True:
                kind, content = await link.get()
                if kind in (Kind.DATA, Kind.LAST):
                    self._whole = kind is Kind.LAST
                    if self._whole:
                        self._leave()
                    await send({"type": "http.response.body", "body": content, "more_body": not self._whole})
                elif kind is Kind.START:
                    await self._start(send, json.loads(content))
                elif kind is Kind.RESERVE:
                    link.put(Kind.ANSWER, await self._reserve(*json.loads(content)))
                elif kind is Kind.GIVE_BACK:
                    self._caller.key.quota.give_back(json.loads(content))
                    self._reserved = 0
                else:
                    self._caller.counts = json.loads(content)
                    break
        except EOFError:
            self._door.lose(replica)
            if not self._whole:
                await self._fail(send, retryable("replica_lost", "the replica of this request must run to its end, got one that ended"))
            return
        if not self._whole and self._caller.status != 499:
            await self._fail(send, shutting_down())

    async def _start(self, send: Send, start: dict[str, Any]) -> None:
        self._begun = True
        self._scope["route"] = SimpleNamespace(path=start["route"])
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in start["headers"]]
        self._events = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
        await send({"type": "http.response.start", "status": start["status"], "headers": headers})

    async def _reserve(self, tokens: int, completions: int, function: str) -> dict[str, Any] | None:
        """Count what the request is to use. Why it may not, or None."""
        try:
            self._caller.key.quota.take_tokens(tokens, function)
            self._reserved = tokens
            self._door.enter(self._caller.share[0], completions, function)
            self._completions = completions
        except QueueFull as error:
            self._caller.key.quota.give_back(self._reserved)
            self._reserved = 0
            await asyncio.sleep(REFUSED_SECONDS)
            return arguments(refusal(error))
        except Refused as error:
            return arguments(error)
        return None

    async def _fail(self, send: Send, error: Refused) -> None:
        """Tell the client, in a stream by an event, that its request ended."""
        if not self._begun:
            raise error
        if not self._events:
            raise ConnectionError(error.message)  # a part of the answer was sent: the connection is closed
        content, name, path = bytes(error_answer(self._scope["path"], error).body), b"", self._scope["path"]
        if path in (MESSAGES, RESPONSES):
            name = b"event: error\n"
        if path == RESPONSES:
            content = json.dumps(
                {"type": "error", "code": error.code, "message": error.message, "param": None, "sequence_number": 0}
            ).encode()
        await send({"type": "http.response.body", "body": name + b"data: " + content + b"\n\n"})


def retryable(code: str, rule: str) -> Refused:
    """The error of a request that may be sent again."""
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return Refused(503, f"server: {rule}. Send the request again.", kind="server_error", code=code, headers=headers)


def create_door(door: Door, name: str, origins: Sequence[str] = (), hosts: frozenset[str] | None = None) -> ASGIApp:
    """The application around a door: as ``create_app`` has it around its routes.

    name : str
        Of the model, for the log.
    """
    ORIGINS.check("create_door", origins)
    app: ASGIApp = Answers(door, door, hosts)
    if origins:
        app = CORSMiddleware(app, **rules(origins))
    return RequestLog(app, name)
