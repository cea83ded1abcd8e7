"""The states of all running sequences in one block of memory.

A slot has two rows: the live row and the aligned row (``request.Sequence``). All tensors of a row are adjacent in memory, so a
state is copied as one row of memory, whatever the architecture. The model gets views.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import OutOfMemory, PenstockError
from ..models import CausalLM, State
from ..models.arguments import named_tensors
from .transfer import to_device

ALIGNMENT = 64
"""The alignment in bytes: every tensor of a row begins at a multiple of this."""
FEW = 3
"""The most rows that are copied one by one. More rows take two launches and a copy of their indices."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)


class Place(NamedTuple):
    """The position of a tensor in a row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """In bytes."""

    def view(self, memory: Tensor) -> Tensor:
        """The tensor of rows [N,W] of 64-bit words: [N,*shape]."""
        size = self.dtype.itemsize * math.prod(self.shape)
        part = memory[:, self.offset // 8 : self.offset // 8 + -(-size // 8)]
        return part.view(self.dtype)[:, : size // self.dtype.itemsize].view(memory.shape[0], *self.shape)


class StatePool:
    """Rows of states, and the list of free slots.

    >>> from penstock.models import gla
    >>> pool = StatePool(CausalLM(gla(vocab_size=11, num_layers=1, hidden_size=16, num_heads=2)), slots=3)
    >>> slot = pool.allocate()
    >>> kept = pool.copy_out([pool.live(slot)])  # one row of bytes
    >>> pool.release(slot)
    >>> pool.check_integrity([])
    """

    def __init__(self, model: CausalLM, slots: int) -> None:
        initial = model.initial_state(1)
        self.slots = slots
        self.layout: list[Place] = []
        end = 0
        for name, x in named_tensors(initial):
            self.layout.append(Place(name, x.dtype, tuple(x.shape[1:]), end))
            end += -(-x[0].numel() * x.element_size() // ALIGNMENT) * ALIGNMENT
        self.row_bytes = end
        try:
            self.memory = torch.zeros(2 * slots, end // 8, dtype=torch.int64, device=model.like().device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            rule = f"slots must fit into memory with two states of {end} bytes each"
            raise OutOfMemory(f"Engine: {rule}, got {slots} ({2 * slots * end / 2**30:.1f} GiB). Lower slots.") from error
        places = iter(self.layout)
        self.state: State = _mapped(initial, lambda _: next(places).view(self.memory))
        """The pool as ``CausalLM.advance`` takes it."""
        self._initial = self.memory.new_zeros(1, end // 8)
        for (_, x), place in zip(named_tensors(initial), self.layout):
            place.view(self._initial).copy_(x)
        self._free = list(range(slots - 1, -1, -1))
        self._taken: set[int] = set()

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

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

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


def _mapped(state: Any, function: Any) -> Any:
    """The results of ``function`` for all tensors of a state, in the order of ``named_tensors``."""
    if isinstance(state, Tensor):
        return function(state)
    if hasattr(state, "_fields"):
        return type(state)(*(_mapped(one, function) for one in state))
    return [_mapped(one, function) for one in state]
