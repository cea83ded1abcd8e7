"""``min_tokens``: masks the tokens that would end a completion too early."""

from __future__ import annotations

from collections.abc import Collection

from .parameters import Constraint
from .request import Sequence


class Minimum:
    """A ``Constraint``: the one of a sequence, but without end tokens while it has too few tokens. If no other token may follow, they may.

    The mask is that of the token that the next step samples. It depends on counts only, so a step need not wait for the previous token.

    ends : collection of int
        The tokens that end a completion.
    """

    def __init__(self, sequence: Sequence, ends: Collection[int], vocab_size: int) -> None:
        self._sequence, self._inner = sequence, sequence.constraint
        size = -(-vocab_size // 8)
        self._all = ((1 << vocab_size) - 1).to_bytes(size, "little")
        self._others = int.from_bytes(self._all, "little") & ~sum(1 << token for token in set(ends))
        self._without = self._cut(self._all)

    @property
    def mask(self) -> bytes:
        """The mask of the next token. With a step in flight, the scheduler has already counted its token."""
        given = self._all if self._inner is None else self._inner.mask
        one = self._sequence
        if one.length - one.prompt > one.request.params.min_tokens:
            return given
        return self._without if self._inner is None else self._cut(given)

    def accept(self, token: int) -> bool:
        """Take a token. Returns whether nothing can follow."""
        return self._inner is not None and self._inner.accept(token)

    def _cut(self, mask: bytes) -> bytes:
        allowed = int.from_bytes(mask, "little") & self._others
        return allowed.to_bytes(len(mask), "little") if allowed else mask


def constraint_of(sequence: Sequence, ends_of_text: Collection[int], vocab_size: int) -> Constraint | None:
    """The constraint of a sequence: its own, and ``min_tokens`` if tokens can end it."""
    params = sequence.request.params
    ends = {*params.stop_ids, *sequence.stops, *(() if params.ignore_end else ends_of_text)}
    return Minimum(sequence, ends, vocab_size) if params.min_tokens and ends else sequence.constraint
