"""Sequences that enter and leave the pool: the states that they begin with, and those that are kept of them."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any
from weakref import WeakSet

from .kept import KeptState
from .request import Sequence, aligned
from .scheduler import Plan
from .state_cache import StateCache
from .state_pool import StatePool
from .states import SequenceState
from .tunings import Tuning


class Entry:
    """Copies states, and passes pages, between the slots of a pool, the cache and the states of requests.

    keep_every : int
        As for ``Engine``.
    model_hash : callable
        The fingerprint of the model with a tuning.
    """

    def __init__(self, pool: StatePool, cache: StateCache, keep_every: int, model_hash: Callable[[Tuning | None], str]) -> None:
        self._pool, self._cache, self._keep_every, self._model_hash = pool, cache, keep_every, model_hash
        self._computed: WeakSet[SequenceState] = WeakSet()
        """States that this engine computed from their tokens. The rows of other states, for example from files, cannot be trusted."""

    def begin(self, one: Sequence) -> int:
        """Write the state that a sequence begins with to its slot, which has the state before the first token.

        Returns the number of prompt tokens that are left to compute for a new sequence.
        """
        assert one.slot is not None
        pool, request = self._pool, one.request
        request.began = request.began or perf_counter()
        if one.saved is not None:
            if pool.pages is not None and not pool.pages.enough(1):
                one.saved = one.saved.with_pages_on_host()  # a fork whose own reference holds the page that its last one is copied to
            pool.begin(one.slot, one.saved, one.computed)
            if not one.sample_only:
                one.saved = None
            return 0
        known = 0
        if request.tuning is not None and request.tuning.row is not None:
            pool.begin(one.slot, KeptState(request.tuning.row[None]), 0)
        if request.state is not None:
            one.computed = one.aligned = request.state.aligned
            pool.begin(one.slot, KeptState(request.state.row[None], pages=request.state.pages), one.computed)
        elif self._cache.budget and request.params.prompt_logprobs is None:
            most = len(request.prompt) - (request.params.max_tokens == 0)
            found, state, known = self._cache.lookup(request.prompt[:most], request.space)
            if found:
                one.computed = one.aligned = request.result.cached_tokens = found
                pool.begin(one.slot, state, found)
                if found == len(request.prompt):
                    one.sample_only, one.saved = True, state
        if self.caches(one):
            several = range(self._keep_every, len(request.prompt) + self._keep_every, self._keep_every)
            marks = {len(request.prompt), known, *request.boundaries, *several}
            one.cuts = {aligned(mark) for mark in marks}
        return len(request.prompt) - one.computed

    def caches(self, one: Sequence) -> bool:
        """Whether the cache may keep states of a sequence. Lookups use only the tokens, so states must be computed from these."""
        return self._cache.budget > 0 and (one.request.state is None or self.computed(one.request.state))

    def computed(self, state: SequenceState) -> bool:
        """Whether this engine computed a state from its tokens."""
        return state in self._computed

    def preempt(self, one: Sequence) -> None:
        """Copy both rows to the host, and the pages."""
        assert one.slot is not None
        pool = self._pool
        rows = pool.copy_out([pool.live(one.slot), pool.aligned(one.slot)]).cpu()
        pages = None if pool.pages is None else pool.pages.copy_out(one.slot, one.computed).cpu()
        one.saved = KeptState(rows, pages=pages)

    def trim(self, plan: Plan) -> None:
        """Free the pages before the windows of sequences whose aligned state has advanced."""
        if self._pool.pages is not None:
            for work in plan.works:
                one = work.sequence
                if one.slot is not None and work.end == one.aligned:
                    self._pool.pages.trim(one.slot, one.aligned)

    def state_of(self, one: Sequence) -> SequenceState:
        """The state of a sequence after all of its tokens, in the pool or preempted, between steps."""
        pages: Any
        if one.slot is None:
            row, pages = one.saved.row[-1].to(self._pool.memory.device), one.saved.first_pages(one.computed, one.aligned)
        else:
            kept = self._pool.keep(one.slot, one.aligned)
            row, pages = kept.row[0], kept.first_pages(one.aligned, one.aligned)
        if self._pool.pages is not None:
            pages = pages[len(pages) - self._pool.pages.kept(one.aligned) :].clone()
        state = SequenceState(tuple(one.tokens), one.aligned, row, self._model_hash(one.request.tuning), pages)
        if self.caches(one):
            self._computed.add(state)
        return state

    def keep_last(self, one: Sequence) -> None:
        """Cache the aligned state of a finished sequence: the next turn of a conversation continues from it."""
        if self.caches(one) and one.slot is not None and one.aligned > len(one.request.prompt):
            tokens, space = one.tokens[: one.aligned], one.request.space
            if not self._cache.contains(tokens, space):
                self._cache.insert(tokens, self._pool.keep(one.slot, one.aligned), space)
