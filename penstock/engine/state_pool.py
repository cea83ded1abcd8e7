"""The states of all running sequences in one block of memory.

A slot has two rows: the live row and the aligned row (``request.Sequence``). All tensors of a row are adjacent in memory, so a
state is copied as one row of memory, whatever the architecture. The model gets views. Softmax attention layers have only the number of
tokens in a row. Their keys and values are in pages (``pages``), of which a slot has as many as its tokens need.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..errors import OutOfMemory, PenstockError
from ..layers import SoftmaxAttentionState
from ..layers.arguments import mapped
from ..layers.token_cache import caches
from ..models import CausalLM, State
from ..models.arguments import named_tensors
from .kept import KeptState
from .pages import PagePool, pages_of
from .rows import placed
from .transfer import to_device

FEW = 3
"""The most rows that are copied one by one. More rows take two launches and a copy of their indices."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)


class StatePool:
    """Rows of states, and the list of free slots.

    >>> from penstock.models import gla
    >>> pool = StatePool(CausalLM(gla(vocab_size=11, num_layers=1, hidden_size=16, num_heads=2)), slots=3)
    >>> slot = pool.allocate()
    >>> kept = pool.copy_out([pool.live(slot)])  # one row of bytes
    >>> pool.release(slot)
    >>> pool.check_integrity([])
    """

    def __init__(self, model: CausalLM, slots: int, pages: int | None = None, max_length: int | None = None) -> None:
        initial = model.initial_state(1, max_length=0)
        self.slots = slots
        self.layout, self.row_bytes = placed(named_tensors(initial))
        self.max_length = most_tokens(model, max_length)
        """The most tokens of a sequence; None: any number."""
        self.pages: PagePool | None = None
        """The keys and values of softmax attention layers, if there are any."""
        most = 0 if self.max_length is None else pages_of(self.max_length)
        count = slots * most if pages is None else pages
        try:
            self.memory = torch.zeros(2 * slots, self.row_bytes // 8, dtype=torch.int64, device=model.like().device)
            if layers := list(caches(initial)):
                self.pages = PagePool(layers, slots, count, most, _window(model))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(self._too_large(slots, count if most else 0)) from error
        places = iter(self.layout)
        self.state: State = self._in_pages(mapped(initial, lambda _: next(places).view(self.memory)))
        """The pool as ``CausalLM.advance`` takes it."""
        self._initial = self.memory.new_zeros(1, self.row_bytes // 8)
        for (_, x), place in zip(named_tensors(initial), self.layout):
            place.view(self._initial).copy_(x)
        self._free = list(range(slots - 1, -1, -1))
        self._taken: set[int] = set()

    def _too_large(self, slots: int, pages: int) -> str:
        size = 2 * slots * self.row_bytes
        if not pages:
            rule = f"slots must fit into memory with two states of {self.row_bytes} bytes each"
            return f"Engine: {rule}, got {slots} ({size / 2**30:.1f} GiB). Lower slots."
        rule = f"slots and pages must fit into memory, slots with two states of {self.row_bytes} bytes each"
        return f"Engine: {rule}, got {slots} ({size / 2**30:.1f} GiB) and {pages} pages. Lower slots, pages or max_length."

    def _in_pages(self, state: State) -> State:
        """The state, with the pages of softmax attention layers."""
        if (pool := self.pages) is None:
            return state
        layers = itertools.count()
        found: State = mapped(state, lambda cache: pool.state(next(layers), cache.length), SoftmaxAttentionState)
        return found

    def live(self, slot: int) -> int:
        """The live row of a slot."""
        return slot

    def aligned(self, slot: int) -> int:
        """The aligned row of a slot."""
        return self.slots + slot

    def allocate(self) -> int | None:
        """A slot whose rows are set to the state before the first token, or None if all slots are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._taken.add(slot)
        self.memory[self.live(slot)] = self._initial[0]
        self.memory[self.aligned(slot)] = self._initial[0]
        return slot

    def release(self, slot: int) -> None:
        """Free a slot."""
        if slot not in self._taken:
            raise PenstockError(f"StatePool.release: slot must be taken, got {slot}, which is free. This is an error of the engine.")
        self._taken.remove(slot)
        self._free.append(slot)
        if self.pages is not None:
            self.pages.release(slot)

    def fits(self, tokens: int) -> bool:
        """Whether there are pages for so many tokens."""
        return self.pages is None or self.pages.fits(pages_of(tokens))

    def grow(self, slot: int, tokens: int) -> int:
        """Give a slot pages for its first ``tokens`` tokens, as far as there are any; the number of tokens for which it has pages."""
        return tokens if self.pages is None else self.pages.grow(slot, tokens)

    def reserve(self, slot: int, tokens: int) -> None:
        """The same for a new sequence, so that ``fits`` counts its pages, unless windows make most of them needless."""
        if self.pages is not None and self.pages.window is None:
            self.pages.grow(slot, tokens)

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def begin(self, slot: int, state: KeptState, tokens: int) -> None:
        """Set both rows of a slot, and its pages, to a state after ``tokens`` tokens."""
        self.copy_in([self.live(slot), self.aligned(slot)], state.row)
        if self.pages is not None and state.pages is not None:
            self.pages.begin(slot, state.pages, tokens)

    def keep(self, slot: int, tokens: int, logits: Tensor | None = None, *, live: bool = False) -> KeptState:
        """A copy of the aligned row of a slot after ``tokens`` tokens, with ``live`` of both rows; its pages by reference."""
        rows = [self.live(slot), self.aligned(slot)] if live else [self.aligned(slot)]
        return KeptState(self.copy_out(rows), logits, None if self.pages is None else self.pages.share(slot, tokens))

    def copy_out(self, rows: list[int]) -> Tensor:
        """A copy of rows: int64 [len(rows),W]."""
        if len(rows) == 1:
            return self.memory[rows[0]][None].clone()
        return self.memory[to_device(rows, self.memory.device)]

    def copy_in(self, rows: list[int], values: Tensor) -> None:
        """Write rows. ``values`` [1 or len(rows),W] may be on the host."""
        values = values.to(self.memory.device, non_blocking=True)
        for n, row in enumerate(rows):
            self.memory[row] = values[n if values.shape[0] > 1 else 0]

    def promote(self, slots: list[int]) -> None:
        """Set the live rows of slots to their aligned rows."""
        self._copy([self.aligned(slot) for slot in slots], [self.live(slot) for slot in slots])

    def align(self, slots: list[int]) -> None:
        """Set the aligned rows of slots to their live rows."""
        self._copy([self.live(slot) for slot in slots], [self.aligned(slot) for slot in slots])

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        if len(sources) <= FEW:
            for source, target in zip(sources, targets):
                self.memory[target] = self.memory[source]
        else:
            rows = to_device([*sources, *targets], self.memory.device)
            self.memory.index_copy_(0, rows[len(sources) :], self.memory.index_select(0, rows[: len(sources)]))

    def tensors(self, row: Tensor) -> dict[str, Tensor]:
        """The tensors of a copied row [W] by their names."""
        return {place.name: place.view(row[None])[0] for place in self.layout}

    def check_integrity(self, used: list[int]) -> None:
        """Raise PenstockError unless exactly the slots ``used`` are taken, each once, and all others are free."""
        if len(set(used)) != len(used) or set(used) != self._taken or sorted([*used, *self._free]) != list(range(self.slots)):
            raise PenstockError(
                f"StatePool.check_integrity: taken slots must be those in use, got {sorted(self._taken)} taken, {sorted(used)} in use, "
                f"{sorted(self._free)} free. This is an error of the engine."
            )


def most_tokens(model: CausalLM, wanted: int | None) -> int | None:
    """The most tokens of a sequence: as wanted, else as the softmax attention layers are configured. None without such layers."""
    found = [one.max_length for one in model.config.mixers if one.grows]  # type: ignore[attr-defined]
    return None if not found else min(found) if wanted is None else wanted


def _window(model: CausalLM) -> int | None:
    """The most tokens that a softmax attention layer attends to, or None."""
    found = [one.window_size for one in model.config.mixers if one.grows]  # type: ignore[attr-defined]
    return None if None in found else max(found, default=None)
