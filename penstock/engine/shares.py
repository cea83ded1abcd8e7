"""Counts of waiting sequences and slots for fair sharing, by client and by request. Pure Python.

Slots are divided evenly between the clients that want some, and within a client evenly between its requests, whatever their numbers of
prompts and completions. ``Scheduler`` chooses by the counts here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .request import Sequence


@dataclass(eq=False)
class Client:
    """One client."""

    name: str
    held: int = 0
    """The number of its slots."""
    waiting: int = 0
    """The number of completions that wait for a slot, including those that are forked after a prompt."""
    served: int = 0
    """Prompt tokens that it got, counted from the least of the others when it joins."""


@dataclass(eq=False)
class Share:
    """One request of a client: everything submitted under one name."""

    client: Client
    name: str
    held: int = 0
    waiting: int = 0
    served: int = 0
    _heap: list[tuple[int, int, Sequence]] = field(default_factory=list)
    _left: int = 0
    """The number of sequences in the heap that have ended."""

    def push(self, one: Sequence) -> None:
        """Add a waiting sequence."""
        one.queued = True
        heapq.heappush(self._heap, (one.deadline, one.order * 2**16 + one.index, one))

    def first(self) -> Sequence | None:
        """The sequence with the earliest deadline."""
        while self._heap and self._heap[0][2].finished:
            heapq.heappop(self._heap)
            self._left -= 1
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        """Remove the first one."""
        one = heapq.heappop(self._heap)[2]
        one.queued = False
        return one

    def forget(self) -> None:
        """Record that a sequence in the heap has ended."""
        self._left += 1
        if self._left > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)
            self._left = 0


class Shares:
    """All clients and shares that wait or run."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._shares: dict[tuple[str, str], Share] = {}

    def __iter__(self) -> Iterator[Share]:
        return iter(self._shares.values())

    def __len__(self) -> int:
        return len(self._shares)

    def waiting(self, client: str | None = None) -> int:
        """The number of waiting completions of one client, or of all. Thread-safe."""
        if client is None:
            return sum(one.waiting for one in list(self._clients.values()))
        found = self._clients.get(client)
        return 0 if found is None else found.waiting

    def of(self, name: tuple[str, str]) -> Share:
        """The share of a name."""
        if name not in self._shares:
            client = self._clients.setdefault(name[0], Client(name[0]))
            self._shares[name] = Share(client, name[1])
        return self._shares[name]

    def waits(self, one: Sequence, share: Share, waits: bool) -> None:
        """Count a sequence that begins or ceases to wait."""
        if one.waits != waits:
            one.waits, one.share = waits, share
            change = 1 if waits else -1
            share.waiting += change
            share.client.waiting += change

    def holds(self, share: Share, change: int) -> None:
        """Count a slot that a share gets or loses."""
        share.held += change
        share.client.held += change

    def drop(self, share: Share) -> None:
        """Remove a share that neither waits nor runs, and its client if it has no other share."""
        client, name = share.client, (share.client.name, share.name)
        if share.held == share.waiting == 0 and self._shares.get(name) is share:
            del self._shares[name]
        if client.held == client.waiting == 0 and self._clients.get(client.name) is client:
            del self._clients[client.name]


class Turns:
    """The order in which clients, or the requests of one client, get the prompt budget: the one that got the least comes first.

    credit : int
        A new one begins with this many tokens less than the least of the others, so it comes before them.
    """

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._before: dict[Client | Share, None] = {}

    def join(self, now: Iterable[Client] | Iterable[Share]) -> None:
        """The ones with prompts to process in this step."""
        found: dict[Client | Share, None] = dict.fromkeys(now)
        others = [one.served for one in found if one in self._before]
        for one in found:
            if one not in self._before:
                one.served = max(one.served, min(others, default=0) - self._credit)
        self._before = found
