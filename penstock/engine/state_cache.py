"""States of prefixes of earlier prompts: a radix tree over tokens for each salt. Pure Python; states are opaque.

A state has the same size whatever the length of its prefix, so the tree keeps few of them. A node with an entry saves the tokens after
the entry above it. Eviction is GreedyDual-Size: an entry has the credit ``clock + saved tokens / bytes``, set when it is stored and when it
is used; the entry with the least credit is evicted first, and the clock rises to that credit. So entries that save much work per byte stay,
and unused ones are evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .request import CHUNK, aligned, shared_prefix


class State(Protocol):
    """A cached state, and the logits after it, if they are known."""

    logits: Any

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""


@dataclass(eq=False)
class Entry:
    """A state in the tree."""

    length: int
    """The number of tokens of its prefix."""
    state: State
    node: Node
    salt: str
    credit: float = 0.0
    on_host: bool = False


@dataclass(eq=False)
class Node:
    """The tokens from its parent's end to its own."""

    tokens: tuple[int, ...]
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    """Children by their first token."""
    entry: Entry | None = None


@dataclass
class CacheCounts:
    """Cumulative counts of the cache."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    evictions: int = 0


class StateCache:
    """States by prefixes of tokens.

    budget : int
        Bytes on the device.
    host_budget : int
        Bytes on the host, for states that leave the device. They come back when they are used.
    to_host, to_device : callables
        Copy a state. The second returns None if there is no memory for it: it is then dropped.
    """

    def __init__(
        self, budget: int, host_budget: int = 0, to_host: Callable[[Any], Any] | None = None, to_device: Callable[[Any], Any] | None = None
    ) -> None:
        self.budget, self.host_budget = budget, host_budget
        self._to_host, self._to_device = to_host, to_device
        self._roots: dict[str, Node] = {}
        """One tree for each salt that has entries."""
        self._entries: dict[Entry, None] = {}
        """The least recently used first: of entries with equal credit, it is evicted first."""
        self._clock = 0.0
        self.bytes = self.host_bytes = 0
        self.counts = CacheCounts()

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, tokens: Sequence[int], salt: str = "", *, count: bool = True) -> tuple[int, Any, int]:
        """The length of the longest usable prefix of ``tokens`` with a state, this state, and the length of the longest known prefix.

        Only entries with the same salt are found, or count as known. A prefix of all tokens is usable only if the logits after it are
        known. (0, None, known) if there is none.
        """
        found, known = self._walk(tuple(tokens), salt)
        entry = next((one for one in reversed(found) if one.length < len(tokens) or one.state.logits is not None), None)
        if count:
            self.counts.hits += entry is not None
            self.counts.misses += entry is None
            self.counts.hit_tokens += 0 if entry is None else entry.length
        if entry is None:
            return 0, None, known
        if entry.on_host:
            assert self._to_device is not None
            self._remove(entry, evicted=False)
            state = self._to_device(entry.state)
            if state is None:
                return 0, None, known
            self._store(tuple(tokens[: entry.length]), state, salt)
            return entry.length, state, known
        self._give_credit(entry)
        return entry.length, entry.state, known

    def insert(self, tokens: Sequence[int], state: State, salt: str = "") -> None:
        """Cache the state after ``tokens``, a multiple of 64 of them, if it fits the budget."""
        key = tuple(tokens)
        assert aligned(len(key)) == len(key)
        found, _ = self._walk(key, salt)
        if found and found[-1].length == len(key):
            known = found[-1]
            if known.state.logits is not None or state.logits is None:
                self._give_credit(known)
                return
            self._remove(known, evicted=False)
        self._store(key, state, salt)

    def contains(self, tokens: Sequence[int], salt: str = "") -> bool:
        """Whether the state after exactly ``tokens`` is cached."""
        found, _ = self._walk(tuple(tokens), salt)
        return bool(found) and found[-1].length == len(tokens)

    def states(self) -> Iterator[Any]:
        """All states."""
        return (entry.state for entry in self._entries)

    def evict(self, keep: Entry | None = None) -> bool:
        """Evict the state with the least credit from the device, but not ``keep``. Returns whether there was any."""
        entry = min((one for one in self._entries if not one.on_host and one is not keep), key=lambda one: one.credit, default=None)
        if entry is None:
            return False
        self._clock = max(self._clock, entry.credit)
        self._evict(entry)
        while self.host_bytes > self.host_budget:
            self._remove(min((one for one in self._entries if one.on_host), key=lambda one: one.credit), evicted=True)
        return True

    def clear(self) -> None:
        """Remove all states."""
        for entry in self._entries:
            entry.node.entry = None  # else a cycle holds the state and its pages until it is collected
        self._roots.clear()
        self._entries.clear()
        self.bytes = self.host_bytes = 0

    def _walk(self, key: tuple[int, ...], salt: str) -> tuple[list[Entry], int]:
        """The entries of prefixes of ``key``, shortest first, and the length of the longest prefix that the tree has."""
        node, at, found = self._roots.get(salt), 0, list[Entry]()
        while node is not None and at < len(key) and (child := node.children.get(key[at])) is not None:
            shared = shared_prefix(child.tokens, key[at : at + len(child.tokens)])
            at += shared
            if shared < len(child.tokens):
                break
            node = child
            if node.entry is not None:
                found.append(node.entry)
        return found, at

    def _store(self, key: tuple[int, ...], state: State, salt: str) -> Entry | None:
        size = state.nbytes
        if size > self.budget or not key:
            return None
        entry = Entry(len(key), state, self._node(key, salt), salt)
        entry.node.entry = entry
        self.bytes += size
        self._give_credit(entry)
        self._shrink(keep=entry)
        return entry

    def _node(self, key: tuple[int, ...], salt: str) -> Node:
        """The node that ends at ``key``, created if needed."""
        node, at = self._roots.setdefault(salt, Node((), None)), 0
        while at < len(key):
            child = node.children.get(key[at])
            if child is None:
                child = node.children[key[at]] = Node(key[at:], node)
                return child
            shared = shared_prefix(child.tokens, key[at : at + len(child.tokens)])
            if shared < len(child.tokens):
                child = self._split(child, shared)
            node, at = child, at + shared
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Insert a node after the first ``at`` tokens of ``node``, and return it."""
        assert node.parent is not None
        upper = Node(node.tokens[:at], node.parent, {node.tokens[at]: node})
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.parent = node.tokens[at:], upper
        return upper

    def _give_credit(self, entry: Entry) -> None:
        above = next((node.entry.length for node in _parents(entry.node) if node.entry is not None), 0)
        self._entries.pop(entry, None)
        self._entries[entry] = None
        entry.credit = self._clock + max(entry.length - above, CHUNK) / entry.state.nbytes

    def _shrink(self, keep: Entry) -> None:
        """Evict until the budget holds."""
        while self.bytes > self.budget:
            self.evict(keep)

    def _evict(self, entry: Entry) -> None:
        size = entry.state.nbytes
        if self._to_host is None or size > self.host_budget:
            self._remove(entry, evicted=True)
            return
        entry.state, entry.on_host = self._to_host(entry.state), True
        self.bytes -= size
        self.host_bytes += entry.state.nbytes

    def _remove(self, entry: Entry, evicted: bool) -> None:
        del self._entries[entry]
        self.counts.evictions += evicted
        if entry.on_host:
            self.host_bytes -= entry.state.nbytes
        else:
            self.bytes -= entry.state.nbytes
        node = entry.node
        node.entry = None
        while node.entry is None and node.parent is not None:  # a node without entry keeps at least two children
            parent = node.parent
            if not node.children:
                del parent.children[node.tokens[0]]
            elif len(node.children) == 1:
                (child,) = node.children.values()
                child.tokens, child.parent = node.tokens + child.tokens, parent
                parent.children[child.tokens[0]] = child
                return
            else:
                return
            node = parent
        if node.parent is None and not node.children:  # salts come from clients, so there may be many
            self._roots.pop(entry.salt, None)


def _parents(node: Node) -> Iterator[Node]:
    while node.parent is not None:
        node = node.parent
        yield node
