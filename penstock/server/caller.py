"""Who sent the HTTP request that is being answered, and what it asks of the engine's queue and cache. Endpoints and logs read it here."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from .keys import Key


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
    model: str = ""
    """The name that the request has for it."""
    tuning: str | None = None
    """Of the engine, that belongs to this name."""

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
