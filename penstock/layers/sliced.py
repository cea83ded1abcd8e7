"""The sequences of one call whose tokens are on the ranks of a context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import Complaints
from ..tokens import borders
from ..tokens.context import ContextParallel
from .arguments import check_context, check_sequences
from .sequences import Sequences


class SlicedSequences(Sequences):
    """N sequences of which this rank has a slice, x [B,T,C]. States are those of all sequences, on every rank.

    What begins at a token (``starts``, ``bounds``, ``owner``, ``ends``) is that of the sequences of the slice; ``here`` are these alone.
    ``count``, ``lengths`` and ``positions`` are of whole sequences.
    """

    def __init__(self, x: Tensor, context: ContextParallel, *, final_states: bool = True) -> None:
        """The sequences of tokens x. Without ``final_states``, new states are not exchanged and are undefined."""
        offsets = None if context.cu_seqlens is None else context.cu_seqlens.to(x.device)
        super().__init__(x, offsets)
        self.context, self.final_states = context, final_states
        self._here = Sequences(x, offsets)
        if context.offsets is not None:
            self.count = len(context.offsets) - 1

    @property
    def here(self) -> Sequences:
        """The sequences of this slice as those of a call of its own."""
        return self._here

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sequence on all ranks: int64 [N]."""

        def make() -> Tensor:
            if self.context.offsets is None:
                return torch.full((self.count,), self.context.slices[-1].end, dtype=torch.int64, device=self.device)
            return self.all_offsets.diff()

        return self._once("lengths", make)

    @property
    def all_offsets(self) -> Tensor:
        """The offsets of packed sequences on the whole token axis: int64 [N+1]."""
        return self._once("all_offsets", lambda: torch.tensor(self.context.offsets, dtype=torch.int64, device=self.device))

    def positions(self, before: Tensor) -> Tensor:
        """The position of each token [B,T], for sequences with ``before`` [N] earlier tokens."""
        tokens = self.context.slice.begin + self._range(self.tokens)
        if self.context.offsets is None:
            return before[:, None] + tokens
        return ((before - self.all_offsets[:-1])[self.owner + self.context.slice.sequences.start] + tokens)[None]

    def rows_here(self, before: Tensor) -> tuple[slice, Tensor]:
        """The sequences of the slice, and how many tokens each has up to the end of the slice, with ``before`` [N] earlier ones."""
        context, end = self.context, self.context.slice.end
        if context.offsets is None:
            return slice(None), before + end
        own = slice(context.slice.sequences.start, context.slice.sequences.stop)
        begins, ends = self.all_offsets[:-1][own], self.all_offsets[1:][own]
        return own, before[own] + ends.clamp(max=end) - begins

    def last(self, x: Tensor) -> Tensor:
        """The last token [N,C] of each sequence, on every rank."""
        return borders.ending(self.context, self.here.last(x))

    def entering(self, x: Tensor, tails: Tensor) -> Tensor:
        """See ``Sequences.entering``."""
        return borders.entering(self.context, x, tails)

    def ending(self, after: Tensor, before: Tensor) -> Tensor:
        """See ``Sequences.ending``."""
        return borders.ending(self.context, after) if self.final_states else before

    def extended(self, x: Tensor, tail: Tensor) -> Any:
        """See ``Sequences.extended``."""
        rows, of_tokens, after = self.here.extended(x, self.entering(x, tail))
        return rows, of_tokens, self.ending(after, tail)

    def shifted(self, x: Tensor, last: Tensor) -> tuple[Any, Any]:
        """See ``Sequences.shifted``."""
        before, after = self.here.shifted(x, self.entering(x, last[:, None]).squeeze(1))
        return before, self.ending(after, last)

    def _from(self, state: Tensor) -> dict[str, Any]:
        own = self.context.slice.sequences
        begun = state if self.context.offsets is None else state[own.start : own.stop]
        alone = {"context": None, "cu_seqlens": self.cu_seqlens, "initial_state": begun.detach()}
        return {"context": self.context, "initial_state": state, "output_final_state": self.final_states, "explained": alone}


def sequences_of(
    complaints: Complaints, x: Tensor, name: str, cu_seqlens: Tensor | None, slots: Tensor | None, state: Any, *, in_place: bool = False,
    context: ContextParallel | None = None, final_states: bool = True,
) -> Sequences:  # fmt: skip
    """The sequences of tokens x [B,T] or [B,T,C] with this name; raises for wrong offsets, slots and contexts."""
    if context is None:
        check_sequences(complaints, x, cu_seqlens, slots, state, name)
        complaints.raise_any()
        return Sequences(x, cu_seqlens, slots, in_place=in_place)
    check_context(complaints, context, x, cu_seqlens, name)
    complaints.raise_any()
    return SlicedSequences(x, context, final_states=final_states)
