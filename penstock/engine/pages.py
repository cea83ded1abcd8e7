"""Keys and values of the softmax attention layers of hybrid models, in pages of 64 tokens.

A page has the keys and values of ``PAGE`` consecutive tokens of a sequence in all of these layers, adjacent in memory, so it is copied as
one row, as states are (``state_pool``). The live and the aligned row of a slot have the same pages: the aligned state is that of a prefix.
References to pages are counted: kept prefixes, forks and the sequences that begin with them share pages. Prefixes are kept and cached at
multiples of ``PAGE`` tokens only, so shared pages are full, and no later token is written to them. A fork copies the last page of a prompt
that is full in part.

Page 0 stands for none. No sequence has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor

from ..errors import EngineError, PenstockError
from ..layers.attention_pages import PAGE, PagedAttentionState
from .request import CHUNK, aligned
from .rows import placed
from .transfer import to_device

assert PAGE == CHUNK
SHARED = ("keys", "values")
"""The parts of a layer's state that are in pages."""


def pages_of(tokens: int) -> int:
    """The number of pages for so many tokens."""
    return -(-tokens // PAGE)


class SharedPages:
    """References to pages. Without other references, they are free when this object is dropped."""

    def __init__(self, pool: PagePool, ids: Items[int]) -> None:
        self.ids, self._pool = tuple(ids), pool
        pool.refer(self.ids, 1)

    def __del__(self) -> None:
        self._pool.refer(self.ids, -1)

    def copied(self) -> Tensor:
        """The contents: int64 [n,W]."""
        return self._pool.contents(self.ids)


class PagePool:
    """The pages, and which of them each slot has.

    layers : list of (str, state)
        The softmax attention layers: the name of each state, and the state of a row without tokens.
    count : int
        The number of pages.
    most : int
        The most pages of a sequence.
    window : int, optional
        The tokens that layers attend to: pages before them are freed.
    """

    def __init__(self, layers: Items[tuple[str, Any]], slots: int, count: int, most: int, window: int | None) -> None:
        self.slots, self.count, self.most, self.window = slots, count, most, window
        empty = [(f"{name}.{field}", getattr(state.paged(1), field)) for name, state in layers for field in SHARED]
        self.layout, size = placed(empty)
        device = empty[0][1].device
        self.memory = torch.zeros(count + 1, size // 8, dtype=torch.int64, device=device)
        self._tables = torch.zeros(len(layers), 2 * slots, most, dtype=torch.int32, device=device)
        self.reclaim: Callable[[int], None] = lambda count: None
        """Called when there are fewer free pages than this: it drops references."""
        self.stuck: Callable[[], Iterable[SharedPages]] = lambda: ()
        """References that ``reclaim`` cannot drop yet."""
        self._free = list(range(count, 0, -1))
        self._references = [0] * (count + 1)
        """Of each page, also those of slots."""
        self._held = [0] * (count + 1)
        """References of slots."""
        self._idle = 0
        """Pages that only others than slots refer to."""
        self._slots: list[list[int]] = [[] for _ in range(slots)]
        self._writes: dict[int, int] = {}
        """Entries of the tables that are not written yet, by their places."""

    def state(self, layer: int, length: Tensor) -> PagedAttentionState:
        """The pool of a layer, as ``CausalLM.advance`` takes it. ``length`` are those of the rows."""
        keys, values = (place.view(self.memory) for place in self.layout[2 * layer : 2 * layer + 2])
        return PagedAttentionState(keys, values, self._tables[layer], length)

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def fits(self, count: int) -> bool:
        """Whether so many pages are free, or ``reclaim`` would free them."""
        if len(self._free) >= count:
            return True
        stuck = {page for one in self.stuck() for page in one.ids if page and not self._held[page]}
        return len(self._free) + self._idle - len(stuck) >= count

    # pages of slots

    def grow(self, slot: int, tokens: int) -> int:
        """Give a slot pages for its first ``tokens`` tokens, as far as there are any; the number of tokens for which it has pages."""
        ids = self._slots[slot]
        missing = pages_of(tokens) - len(ids)
        if missing > 0:
            self._extend(slot, self._taken(missing, partly=True))
        return len(ids) * PAGE

    def begin(self, slot: int, given: SharedPages | Tensor, tokens: int) -> None:
        """Give a slot without pages those of its first ``tokens`` tokens: by reference, except for a last one in part, or as a copy.

        Those before the given ones were freed.
        """
        total, partly = pages_of(tokens), tokens % PAGE > 0
        if isinstance(given, SharedPages):
            full = given.ids[:-1] if partly else given.ids
            self.refer(full, 1)
            self._extend(slot, [0] * (total - len(given.ids)) + [*full])
            if partly:
                (page,) = self._taken(1)
                self.memory[page] = self.memory[given.ids[-1]]
                self._extend(slot, (page,))
        else:
            self._extend(slot, [0] * (total - len(given)) + self._written(given))

    def trim(self, slot: int, tokens: int) -> None:
        """Free pages that no token after the first ``tokens`` attends to."""
        ids = self._slots[slot]
        last = min(self._before(tokens), len(ids))
        while last > 0 and ids[last - 1]:
            last -= 1
            self._hold((ids[last],), -1)
            self.refer((ids[last],), -1)
            ids[last] = 0

    def kept(self, tokens: int) -> int:
        """The number of pages of ``tokens`` tokens that later tokens attend to, or would from the last multiple of 64."""
        return pages_of(tokens) - self._before(tokens)

    def _before(self, tokens: int) -> int:
        """The number of pages that no token attends to from the last multiple of 64 on."""
        return 0 if self.window is None else max(0, (aligned(tokens) - self.window + 1) // PAGE)

    def release(self, slot: int) -> None:
        """Take all pages from a slot."""
        ids = self._slots[slot]
        self._slots[slot] = []
        self._hold(ids, -1)
        self.refer(ids, -1)

    def share(self, slot: int, tokens: int) -> SharedPages:
        """References to the pages of the first ``tokens`` tokens of a slot that later tokens attend to."""
        return SharedPages(self, self._slots[slot][self._before(tokens) : pages_of(tokens)])

    def copy_out(self, slot: int, tokens: int) -> Tensor:
        """A copy of these pages, without those that were freed: int64 [n,W]."""
        return self.contents(self._slots[slot][: pages_of(tokens)])

    def returned(self, contents: Tensor) -> SharedPages | None:
        """References to new pages with these contents. None if there are too few."""
        return SharedPages(self, self._written(contents, refer=False)) if self.enough(len(contents)) else None

    def flush(self) -> None:
        """Write new entries of the tables. Call it before each step."""
        if not self._writes:
            return
        device, M = self.memory.device, self.slots * self.most
        places, ids = list(self._writes), list(self._writes.values())
        self._writes = {}
        where = to_device([*places, *(place + M for place in places)], device)
        self._tables.flatten(1)[:, where] = to_device([*ids, *ids], device).int()

    # contents

    def contents(self, ids: Iterable[int]) -> Tensor:
        """A copy of pages, without page 0: int64 [n,W]."""
        return self.memory[to_device([page for page in ids if page], self.memory.device)]

    def tensors(self, contents: Tensor) -> dict[str, Tensor]:
        """The keys and values [n,PAGE,G,D] of copied pages by their names."""
        return {place.name: place.view(contents) for place in self.layout}

    def _written(self, contents: Tensor, *, refer: bool = True) -> list[int]:
        ids = self._taken(len(contents), refer=refer)
        if ids:
            self.memory.index_copy_(0, to_device(ids, self.memory.device), contents.to(self.memory.device, non_blocking=True))
        return ids

    # counts

    def enough(self, count: int) -> bool:
        """Whether so many pages are free, perhaps after ``reclaim``."""
        if len(self._free) < count:
            self.reclaim(count)
        return len(self._free) >= count

    def _taken(self, count: int, *, partly: bool = False, refer: bool = True) -> list[int]:
        """Free pages, which now have one reference (none without ``refer``); ``partly``: fewer, if there are too few."""
        if not self.enough(count) and not partly:
            raise EngineError(f"engine: a sequence must have {count} pages here, got {len(self._free)} free ones. Make more pages.")
        ids = [self._free.pop() for _ in range(min(count, len(self._free)))]
        if refer:
            self.refer(ids, 1)
        return ids

    def _extend(self, slot: int, ids: Items[int]) -> None:
        """Append pages to those of a slot, to which it already refers."""
        known = self._slots[slot]
        if len(known) + len(ids) > self.most:
            raise PenstockError(f"PagePool: a slot must have at most {self.most} pages, got more. This is an error of the engine.")
        for place, page in enumerate(ids, slot * self.most + len(known)):
            self._writes[place] = page
        known.extend(ids)
        self._hold(ids, 1)

    def _hold(self, ids: Iterable[int], change: int) -> None:
        for page in ids:
            if page:
                before = self._held[page]
                self._held[page] = before + change
                self._idle -= (before == 0) - (before + change == 0)

    def refer(self, ids: Iterable[int], change: int) -> None:
        """Count references. A page without any is free."""
        for page in ids:
            if page:
                before = self._references[page]
                self._references[page] = before + change
                if self._held[page] == 0:
                    self._idle += (before == 0) - (before + change == 0)
                if before + change == 0:
                    self._free.append(page)

    def check_integrity(self, slots: Iterable[int], kept: Iterable[SharedPages]) -> None:
        """Raise PenstockError unless exactly these slots and references have pages, and all other pages are free."""
        slots, wanted, held = set(slots), [0] * (self.count + 1), [0] * (self.count + 1)
        for slot, ids in enumerate(self._slots):
            for page in ids:
                held[page] += slot in slots
                wanted[page] += 1
        for one in {id(one): one for one in kept}.values():
            for page in one.ids:
                wanted[page] += 1
        wanted[0] = held[0] = 0
        free = [page for page in range(1, self.count + 1) if not wanted[page]]
        idle = sum(wanted[page] > 0 and not held[page] for page in range(self.count + 1))
        if (wanted, held, free, idle) != (self._references, self._held, sorted(self._free), self._idle):
            wrong = [page for page in range(self.count + 1) if (wanted[page], held[page]) != (self._references[page], self._held[page])]
            raise PenstockError(
                f"PagePool.check_integrity: pages in use must be those of slots and kept states, got {self.count - len(self._free)} in "
                f"use, {self.count - len(free)} expected, wrong counts of {wrong[:8]}. This is an error of the engine."
            )
