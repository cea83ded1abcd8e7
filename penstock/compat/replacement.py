"""Replacing functions of other packages' modules, reversibly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import ModuleType, TracebackType
from typing import NamedTuple

from typing_extensions import Self


class Place(NamedTuple):
    """A name in a module, and the function to put there."""

    module: ModuleType
    name: str
    ours: object


_LOCK = threading.Lock()
_ACTIVE: dict[tuple[int, str], tuple[object, int]] = {}
"""By the id of a module and a name: the original function, and the number of active replacements."""


class Replacement:
    """Functions of another package that are replaced. ``restore()``, or the end of a ``with`` block, puts the originals back.

    Replacements are counted: if two are active, the second ``restore()`` restores the originals. Thread-safe; a running call continues in
    the function in which it began.
    """

    def __init__(self, find: Callable[[], Iterable[Place]], at_end: Callable[[], None] = lambda: None):
        """``find`` runs while no other thread replaces or restores anything. ``at_end`` is called once, by ``restore()``."""
        self._in_force, self._at_end = True, at_end
        with _LOCK:
            self._places = tuple(find())
            for module, name, ours in self._places:
                key = id(module), name
                original, count = _ACTIVE.get(key, (getattr(module, name), 0))
                _ACTIVE[key] = original, count + 1
                setattr(module, name, ours)

    @property
    def replaced(self) -> tuple[str, ...]:
        """The replaced functions, as ``module.name``."""
        return tuple(f"{module.__name__}.{name}" for module, name, _ in self._places)

    def restore(self) -> None:
        """Put the originals back. A second call does nothing; a name that has been set to something else since stays as it is."""
        with _LOCK:
            if not self._in_force:
                return
            self._in_force = False
            self._at_end()
            for module, name, ours in self._places:
                key = id(module), name
                original, count = _ACTIVE.pop(key)
                if count > 1:
                    _ACTIVE[key] = original, count - 1
                elif getattr(module, name, None) is ours:
                    setattr(module, name, original)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "" if self._in_force else ", restored"
        return f"<Replacement of {len(self._places)} names{state}: {', '.join(self.replaced)}>"
