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
        """Goes forward with each new entry; an entry notes when it was used last."""

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

    __slots__ = ("choices", "plans", "used")

    def __init__(self) -> None:
        self.choices: dict[tuple[Mode, str, bool], Implementation] = {}
        self.plans: dict[Hashable, Any] = {}
        self.used = 0


class Seen:
    """What equal calls share."""

    __slots__ = ("bound", "given", "kind", "options", "returned", "signature", "sizes", "used")

    def __init__(
        self,
        signature: Signature,
        given: Sequence[Any],
        options: Mapping[str, Any],
        sizes: Mapping[str, int],
        returned: list[bool],
        kind: Kind,
    ) -> None:
        """``given``: options as the caller gave them; ``options``: as implementations see them; ``returned``: which results are wanted."""
        self.signature, self.given, self.options, self.sizes, self.returned, self.kind = signature, given, options, sizes, returned, kind
        self.bound: dict[Hashable, Any] = {}
        """What is kept for these calls by whoever runs them."""
        self.used = 0


class Memory:
    """Of one operator."""

    def __init__(self) -> None:
        self.calls: Recent[Seen] = Recent(KEPT)
        self.kinds: Recent[Kind] = Recent(KEPT)

    def kind(self, key: Hashable) -> Kind:
        """The kind with this key, a new one if there is none."""
        return self.kinds.get(key) or self.kinds.put(key, Kind())


def exact(tensors: Sequence[Tensor | None]) -> tuple[Hashable, ...]:
    """All that a call can depend on but the values in its tensors."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors])


def layout(x: Tensor | None) -> Hashable:
    """What the launches of a kernel depend on besides sizes; the stride of a first axis of one row does not count."""
    if x is None:
        return None
    strides = x.stride()
    return strides if not strides or x.shape[0] != 1 else strides[1:], x.dtype, x.device, x.data_ptr() % 16


def equality(function: str, tensors: Sequence[Tensor | None], options: Sequence[Any]) -> Hashable:
    """The same for equal calls. Options go with their types, because True equals 1."""
    return function, *options, *map(type, options), *exact(tensors)


def likeness(signature: Signature, tensors: Sequence[Tensor | None], options: Sequence[Any], sizes: Mapping[str, int]) -> Hashable:
    """The same for valid calls that are alike."""
    counts = signature.counts.split()
    fixed = [size for axis, size in sizes.items() if axis not in counts]
    rough = [rounded(sizes[axis]) for axis in counts]
    return signature.function, *options, *map(type, options), *fixed, *rough, *[layout(x) for x in tensors]
