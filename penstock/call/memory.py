"""What was found out about calls, by what they have in common.

Two calls are *equal* if they differ in values only: same sizes, strides, dtypes, devices, alignment and options. They share one ``Seen``:
validation, the implementations chosen, and the bound launches. Two calls are *alike* if they differ, besides, in how many tokens and
sequences they have, within powers of two. They share one ``Kind``: choices and plans. So an engine whose batches have another number of
tokens at every step plans nothing anew.

Both memories are bounded; what was not used for the longest time is forgotten first.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from .declaration import Signature
from .implementation import Implementation, Mode
from .problem import rounded

KEPT = 4096
"""Entries of each memory at most."""


class _Stamped(Protocol):
    used: int


V = TypeVar("V", bound=_Stamped)


class Recent(Generic[V]):
    """A dictionary that forgets the least recently used quarter when it is full."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: dict[Hashable, V] = {}
        self.clock = 0
        """Counts new entries; an entry notes when it was used last."""

    def get(self, key: Hashable) -> V | None:
        """The entry, which counts as used now, or None."""
        found = self.entries.get(key)
        if found is not None:
            found.used = self.clock
        return found

    def put(self, key: Hashable, value: V) -> V:
        """Add an entry; if another thread was faster, its entry stays."""
        if len(self.entries) >= self.limit:
            oldest = sorted(list(self.entries.items()), key=lambda entry: entry[1].used)
            for old, _ in oldest[: max(self.limit // 4, 1)]:
                self.entries.pop(old, None)
        self.clock += 1
        value.used = self.clock
        return self.entries.setdefault(key, value)


class Kind:
    """What alike calls share."""

    __slots__ = ("choices", "fixed", "given", "options", "plans", "returned", "signature", "used")

    def __init__(
        self, signature: Signature, given: Sequence[Any], options: Mapping[str, Any], returned: list[bool], fixed: Mapping[str, int]
    ) -> None:
        """``given``: options as callers give them; ``options``: as implementations see them; ``returned``: which results are wanted;
        ``fixed``: sizes of all axes, of which those that count are an example.
        """
        self.signature, self.given, self.options, self.returned, self.fixed = signature, given, options, returned, fixed
        self.choices: dict[tuple[Mode, str, bool], Implementation] = {}
        self.plans: dict[Hashable, Any] = {}
        self.used = 0


class Seen:
    """What equal calls share."""

    __slots__ = ("bound", "kind", "sizes", "used")

    def __init__(self, kind: Kind, sizes: Mapping[str, int]) -> None:
        self.kind, self.sizes = kind, sizes
        self.bound: dict[Hashable, Any] = {}
        """What is kept for these calls by whoever runs them."""
        self.used = 0


class Memory:
    """Of one operator."""

    def __init__(self) -> None:
        self.calls: Recent[Seen] = Recent(KEPT)
        self.kinds: Recent[Kind] = Recent(KEPT)
        self.once: set[int] = set()
        """Hashes of calls that were alike others and came once: they are not kept before they come again."""

    def find(self, signature: Signature, tensors: Sequence[Tensor | None], options: Sequence[Any]) -> Seen | None:
        """What equal calls share, also if there were only alike ones; None if there were neither."""
        parts = exact(tensors)
        types = tuple(map(type, options))
        key = signature.function, options, types, parts
        seen = self.calls.get(key)
        if seen is not None:
            return seen
        found = likeness(signature, parts, options)
        kind = None if found is None else self.kinds.get(found[0])
        if kind is None or found is None:
            return None
        seen, code = Seen(kind, {**kind.fixed, **found[1]}), hash(key)
        if code in self.once:
            return self.calls.put(key, seen)
        if len(self.once) >= KEPT:
            self.once.clear()
        self.once.add(code)
        return seen

    def keep(self, kind: Kind, tensors: Sequence[Tensor | None], sizes: Mapping[str, int]) -> Seen:
        """Remember a valid call, for all that are equal to it or alike."""
        options, parts = kind.given, exact(tensors)
        found = likeness(kind.signature, parts, options)
        if found is not None:
            kind = self.kinds.get(found[0]) or self.kinds.put(found[0], kind)
        return self.calls.put((kind.signature.function, options, tuple(map(type, options)), parts), Seen(kind, sizes))


def exact(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """All that a call can depend on but the values in its tensors."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors])


def layout(part: Any, counted: int = 1) -> Hashable:
    """Of a part of ``exact`` what the launches of a kernel depend on besides counts; the stride of a first axis of one row is left out."""
    if part is None:
        return None
    shape, strides, *others = part
    return shape[counted:], strides if not shape or shape[0] != 1 else strides[1:], *others


def likeness(signature: Signature, parts: Sequence[Any], options: Sequence[Any]) -> tuple[Hashable, dict[str, int]] | None:
    """What is the same for valid calls that are alike, and the sizes of the axes that count; None where tensors do not agree on them."""
    counts: dict[str, int] = {}
    layouts = []
    for argument, axes, part in zip(signature.arguments, signature.counted, parts):
        if part is None:
            if argument.otherwise is not None:
                counts.setdefault(argument.otherwise[0], counts.get(argument.otherwise[1], 0))
        elif len(part[0]) < len(axes):
            return None
        else:
            for (axis, more), size in zip(axes, part[0]):
                if counts.setdefault(axis, size - more) != size - more:
                    return None
        layouts.append(layout(part, len(axes)))
    rough = tuple([rounded(size) for size in counts.values()])
    return (signature.function, tuple(options), tuple(map(type, options)), rough, *layouts), counts
