"""Who sent the HTTP request that is being answered, and what it asks of the engine's queue and cache. Endpoints and logs read it here."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engine.request import Request
from .errors import Refused
from .keys import Key
from .protocol import Usage

LARGE = 2**16
"""Bytes of a body, or of an answer, from which worker processes do what it needs: smaller ones take a millisecond or two."""


class Work(Protocol):
    """What runs in the engine for a request, as logs and traces read it (``generation.Generation``)."""

    requests: list[Request]
    began: float
    first: float | None
    last: float | None

    def usage(self) -> Usage:
        """Counts of tokens so far."""


@dataclass
class Caller:
    """One HTTP request, from its head on."""

    id: str = ""
    """The request's, which answers and logs have."""
    address: str = ""
    key: Key = field(default_factory=Key)
    cache_salt: str = ""
    priority: int = 0
    """Lower ones run first."""
    size: int = 0
    """Of its body, if that is JSON."""
    model: str = ""
    """The name that the request has for it."""
    tuning: str | None = None
    """Of the engine, that belongs to this name."""
    began: float = field(default_factory=time.perf_counter)
    time_ns: int = field(default_factory=time.time_ns)
    """The same moment, since 1970."""
    refused: Refused | None = None
    """What is wrong with its head."""
    generation: Work | None = None
    """What runs in the engine for it."""
    counts: dict[str, Any] = field(default_factory=dict)
    """Fields of its line in the log, if it runs in the engine of a replica."""
    status: int | None = None
    """Of the answer; 499 if the client disconnected."""
    error: str | None = None
    """The code of the error that it got."""
    seconds: float = 0.0
    """To the end of the answer."""

    def failed(self, refused: Refused) -> Refused:
        """Note the error that the client gets."""
        self.error = refused.code or refused.kind
        return refused

    @property
    def share(self) -> tuple[str, str]:
        """Whose share of the engine a request takes: that of its key, or of its address where keys have no names; and its own in that."""
        return self.key.name or self.address, self.id

    @property
    def salt(self) -> str:
        """Kept prefixes serve one key, and in that those with the same ``cache_salt``."""
        return f"{self.key.name} {self.cache_salt}"


_CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039  # nothing writes to it outside of requests


def current() -> Caller:
    """The caller of the request of this task or thread; an empty one outside of requests."""
    return _CALLER.get()


def enter(caller: Caller) -> None:
    """Begin a request. Its task ends with it, so there is no exit."""
    _CALLER.set(caller)
