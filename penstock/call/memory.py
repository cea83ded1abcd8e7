"""Caches of validated calls.

Two calls are *equal* if they differ only in values: same sizes, strides, dtypes, devices, alignment and options. They share one ``Seen``:
validation and bound launches. Two calls are *similar* if they also differ in the numbers of tokens and sequences, but these round up to the
same powers of two. They share one ``Kind``: the chosen implementations and plans. So an engine whose batches have a different number of
tokens at every step reuses its plans.

Both caches are bounded and evict the least recently used entries.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from .declaration import Signature

KEPT = 4096
"""The limit of each cache."""


class _Stamped(Protocol):
    used: int


V = TypeVar("V", bound=_Stamped)


class Recent(Generic[V]):
    """A dictionary that evicts the least recently used quarter when it is full."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: dict[Hashable, V] = {}
        self.clock = 0
        """The number of entries added so far; each entry has the time of its last use."""

    def get(self, key: Hashable) -> V | None:
        """The entry, marked as used now, or None."""
        found = self.entries.get(key)
        if found is not None:
            found.used = self.clock
        return found

    def put(self, key: Hashable, value: V) -> V:
        """Add an entry and return it; an entry that another thread has added stays."""
        if len(self.entries) >= self.limit:
            oldest = sorted(list(self.entries.items()), key=lambda entry: entry[1].used)
            for old, _ in oldest[: max(self.limit // 4, 1)]:
                self.entries.pop(old, None)
        self.clock += 1
        value.used = self.clock
        return self.entries.setdefault(key, value)


class Kind:
    """The data that similar calls share."""

    __slots__ = ("choices", "fixed", "given", "options", "plans", "returned", "signature", "used")

    def __init__(
        self, signature: Signature, given: Sequence[Any], options: Mapping[str, Any], returned: list[bool], fixed: Mapping[str, int]
    ) -> None:
        """``given``: options as given by callers; ``options``: as implementations see them; ``returned``: whether each result is requested;
        ``fixed``: sizes of all axes (for the axes in ``counts``, the sizes of the first call).
        """
        self.signature, self.given, self.options, self.returned, self.fixed = signature, given, options, returned, fixed
        self.choices: dict[Hashable, Any] = {}
        """The chosen implementations."""
        self.plans: dict[Hashable, Any] = {}
        self.used = 0


class Seen:
    """The data that equal calls share."""

    __slots__ = ("bound", "kind", "shared", "sizes", "used", "whole")

    def __init__(self, kind: Kind, sizes: Mapping[str, int]) -> None:
        self.kind, self.sizes = kind, sizes
        self.bound: dict[Hashable, Any] = {}
        """Data that implementations cache for these calls."""
        self.shared: dict[str, Any] | None = None
        """The data that ``Problem.known`` copies to every problem of these calls."""
        self.whole: Seen | None = None
        """The data of ``Problem.whole`` of these calls, if that is another problem."""
        self.used = 0


class Memory:
    """The caches of one operator."""

    def __init__(self) -> None:
        self.calls: Recent[Seen] = Recent(KEPT)
        self.kinds: Recent[Kind] = Recent(KEPT)
        self.last: tuple[Hashable, Seen] | None = None
        """The latest cached call that was found. Layers of a model make equal calls, and comparing keys is faster than hashing one."""
        self.once: set[int] = set()
        """Hashes of calls that were similar to an earlier call and occurred once. They are cached at the second occurrence."""

    def find(self, signature: Signature, tensors: Sequence[Tensor | None], options: Sequence[Any]) -> Seen | None:
        """The data of equal calls; new data if there were only similar calls; None if there were neither."""
        parts = exact(tensors)
        key = signature.function, tuple(map(type, options)), options, parts  # types come first: options of one type can be compared
        last = self.last
        if last is not None and last[0] == key:
            last[1].used = self.calls.clock
            return last[1]
        known = self.calls.get(key)
        if known is not None:
            self.last = key, known
            return known
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
        """Cache a valid call for equal and similar calls."""
        options, parts = kind.given, exact(tensors)
        found = likeness(kind.signature, parts, options)
        if found is not None:
            kind = self.kinds.get(found[0]) or self.kinds.put(found[0], kind)
        return self.calls.put((kind.signature.function, tuple(map(type, options)), options, parts), Seen(kind, sizes))


def exact(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Everything that a call depends on except the values of its tensors."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors])


def layout(part: Any, counted: int = 1) -> Hashable:
    """The part of an entry of ``exact`` that kernels depend on: no counted sizes, and no stride of a first axis of size 1.

    It includes whether two counted axes form one axis of a matrix. Slices ``x[:, :T]`` have the strides of x and do not.
    """
    if part is None:
        return None
    shape, strides, dtype, device, address = part
    if not shape or shape[0] == 1:
        return shape[counted:], strides[1:], dtype, device, address
    joined = counted > 1 and len(shape) > 1 and strides[0] == shape[1] * strides[1]
    return shape[counted:], strides, joined, dtype, device, address


def likeness(signature: Signature, parts: Sequence[Any], options: Sequence[Any]) -> tuple[Hashable, dict[str, int]] | None:
    """A key for similar calls, and the sizes of the counted axes; None if tensors do not agree on them."""
    shapes: dict[Any, tuple[int, ...]] = {}
    layouts: list[Hashable] = []
    for axes, part in zip(signature.counted, parts):
        layouts.append(layout(part, len(axes)))
        if part is not None and axes and shapes.setdefault(axes, part[0][: len(axes)]) != part[0][: len(axes)]:
            return None
    counts: dict[str, int] = {}
    for axes, shape in shapes.items():
        if len(shape) < len(axes):
            return None
        for (axis, more), size in zip(axes, shape):
            if counts.setdefault(axis, size - more) != size - more:
                return None
    for argument, part in zip(signature.arguments, parts):
        if part is None and argument.otherwise is not None:
            axis, other = argument.otherwise
            if counts.setdefault(axis, counts.get(other, 0)) != counts.get(other, 0):
                return None
    rough = tuple([rounded(size) for size in counts.values()])
    return (signature.function, tuple(options), tuple(map(type, options)), rough, *layouts), counts


def rounded(count: int) -> int:
    """The smallest power of two that is at least ``count``; 0 stays 0."""
    return 1 << (count - 1).bit_length() if count > 0 else 0
