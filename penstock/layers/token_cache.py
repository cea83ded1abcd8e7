"""Caches of the keys and values of sequences, which grow: rows [N,S,...] with room for S tokens of each of N sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.validation import reads_values
from ..errors import Complaints, RangeError
from .attention_pages import PAGE, PagedAttentionState
from .sequences import Sequences


class SoftmaxAttentionState(NamedTuple):
    """The state of a layer: a cache of up to S tokens per sequence."""

    keys: Tensor
    """[N,S,G,D], as queries are compared with them: after the rotary embedding."""
    values: Tensor
    """[N,S,G,D], or with a last axis of another size."""
    length: Tensor
    """[N], the number of tokens so far, int64."""

    @property
    def room(self) -> int:
        """The most tokens of a row of a pool."""
        return self.keys.shape[1]

    def paged(self, pages: int = 0, most: int = 0) -> PagedAttentionState:
        """The rows before their first token, with room in ``pages`` pages that all rows share, ``most`` of them for a row."""
        keys, values = (x.new_zeros(pages, PAGE, *x.shape[2:]) for x in (self.keys, self.values))
        table = torch.zeros(len(self.length), most, dtype=torch.int32, device=self.length.device)
        return PagedAttentionState(keys, values, table, torch.zeros_like(self.length))


def caches(state: Any, name: str = "state") -> Iterator[tuple[str, SoftmaxAttentionState]]:
    """The caches in a state of a mixer, a layer or a model with their names, as ``state[3].mixer``."""
    if isinstance(state, SoftmaxAttentionState):
        yield name, state
    elif isinstance(state, list | tuple):
        fields = getattr(state, "_fields", None)
        for n, one in enumerate(state):
            yield from caches(one, f"{name}.{fields[n]}" if fields else f"{name}[{n}]")


def room_for(room: int, after: Tensor, sequences: Sequences) -> int:
    """The number of tokens of a row of the new cache, for ``after`` [N] tokens so far. Rows of a pool keep their ``room``."""
    return room if sequences.count == 0 or sequences.in_place else max(room, int(after.max()))


def check_rooms(state: Any, sequences: Sequences) -> None:
    """Check that rows of a pool have room for their new tokens, where values may be read. Call it before anything is written.

    ``state``: that of a mixer, a layer or a model.
    """
    if isinstance(state, SoftmaxAttentionState | PagedAttentionState):
        after = sequences.read(state.length) + sequences.lengths
        live = after if sequences.slots is None else after.masked_fill(sequences.slots < 0, 0)
        if reads_values(after) and sequences.count and int(live.max()) > state.room:
            complaints = Complaints("advance")
            remedy = "Make it with a larger max_length."
            complaints.add(RangeError, "state", f"a pool with room for {int(live.max())} tokens a row", f"room for {state.room}", remedy)
            complaints.raise_any()
    elif isinstance(state, list | tuple):
        for one in state:
            check_rooms(one, sequences)


def stored(cache: Tensor, tokens: Tensor, length: Tensor, room: int, sequences: Sequences) -> Tensor:
    """The rows [N,room,...] with tokens [B,T,...] after the ``length`` earlier ones. In place, tokens beyond the room are dropped."""
    N, S, *rest = cache.shape
    positions = sequences.positions(length)
    if sequences.cu_seqlens is None:
        owner = torch.arange(N, device=cache.device)[:, None].expand(positions.shape)
    else:
        owner = sequences.owner[None]
    # an extra row receives the tokens that do not fit
    rows = torch.cat([torch.cat([cache, cache.new_zeros(N, room - S, *rest)], 1).flatten(0, 1), cache.new_zeros(1, *rest)])
    places = torch.where(positions < room, owner * room + positions, N * room)
    found = rows.index_copy(0, places.flatten(), tokens.flatten(0, 1).to(rows.dtype))
    return found[:-1].view(N, room, *rest)
