"""References to pages outside of slots: of kept prefixes, of waiting forks, and of the step in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .kept import KeptState
from .pages import PagePool, SharedPages
from .request import Request
from .runner import Flight
from .state_cache import StateCache


class References:
    """The references of an engine.

    flight : callable
        The step in flight, or None.
    """

    def __init__(self, pages: PagePool, cache: StateCache, requests: set[Request], flight: Callable[[], Flight | None]) -> None:
        self._pages, self._cache, self._requests, self._flight = pages, cache, requests, flight
        pages.reclaim, pages.stuck = self.reclaim, self.in_flight

    def reclaim(self, count: int) -> None:
        """Free ``count`` pages, as far as possible: evict kept prefixes, then copy the pages of forks to the host.

        Forks wait, or have a slot with pages of its own and still keep what they began with, for its logits and for other forks.
        """
        while self._pages.free < count and self._cache.evict():
            pass
        if self._pages.free >= count:
            return
        sequences = (one for request in self._requests for one in request.sequences)
        forks = [one for one in sequences if one.saved is not None and shared([one.saved])]
        while forks and self._pages.free < count:
            before = forks[0].saved
            after = before.with_pages_on_host()
            for one in forks:
                if one.saved is before:
                    one.saved = after
            del before
            forks = [one for one in forks if shared([one.saved])]

    def in_flight(self) -> list[SharedPages]:
        """Those that the step in flight keeps."""
        flight = self._flight()
        return [] if flight is None else shared(state for _, _, state in (*flight.kept, *flight.forks))

    def every(self) -> list[SharedPages]:
        """All of them."""
        saved = (one.saved for request in self._requests for one in request.sequences if one.saved is not None)
        return [*self.in_flight(), *shared(saved), *shared(self._cache.states())]


def shared(states: Iterable[KeptState]) -> list[SharedPages]:
    """The references of states."""
    return [one.pages for one in states if isinstance(one.pages, SharedPages)]
