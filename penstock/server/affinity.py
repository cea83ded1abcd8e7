"""Which replica a request goes to: the one that has computed the begin of its conversation, as long as it has room.

Conversations are spread by rendezvous hashing: without one of the replicas, only its own conversations move.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from .caller import LARGE

SESSION = "x-session-id"
BEGIN = 4096
"""Characters of a prompt that tell a conversation."""


class Placed(Protocol):
    """A replica."""

    name: str
    slots: int
    open: int


R = TypeVar("R", bound=Placed)


def conversation(key: str, headers: Mapping[str, str], body: bytes) -> bytes | None:
    """What all requests of a conversation share: its session, or its first messages. None if there is nothing to compute again.

    Requests that continue from a saved state have its file, which all replicas read.

    >>> turn = b'{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]}'
    >>> conversation("", {}, turn) == conversation("", {}, turn.replace(b"Yes?", b"No"))
    True
    >>> conversation("", {}, b'{"previous_response_id": "resp_1", "input": "Hello"}')
    """
    shared: Any = headers.get(SESSION)
    if shared is None and len(body) >= LARGE:
        shared = body[:LARGE].decode("latin-1")
    elif shared is None and body:
        try:
            shared = _shared(json.loads(body))
        except (ValueError, RecursionError):  # the replica says so
            return None
    return None if shared is None else blake2b(json.dumps([key, shared]).encode(), digest_size=16).digest()


def _shared(data: Any) -> Any:
    if not isinstance(data, dict) or data.get("previous_response_id") is not None or data.get("state") is not None:
        return None
    if isinstance(data.get("prompt_cache_key"), str):
        return data["prompt_cache_key"]
    told = data.get("messages", data.get("input", data.get("prompt")))
    if isinstance(told, list):
        first = next((place for place, one in enumerate(told) if isinstance(one, dict) and one.get("role") == "user"), 0)
        told = told[: first + 1]
    return None if told is None else [data.get("system"), json.dumps(told)[:BEGIN]]


def ranked(replicas: Sequence[R], talk: bytes | None) -> list[R]:
    """The replicas, the best one first. A conversation has an order of its own of those with free slots; else, few requests come first."""
    fewest = sorted(replicas, key=lambda one: one.open / one.slots)
    if talk is None:
        return fewest
    own = sorted(replicas, key=lambda one: blake2b(one.name.encode(), key=talk, digest_size=8).digest())
    free = [one for one in own if one.open < one.slots]
    return [*free, *(one for one in fewest if one not in free)]
