"""Caches of the tokens of sequences, which grow: rows [N,S,...] with room for S tokens of each of N sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.validation import reads_values
from ..errors import Complaints, RangeError
from .sequences import Sequences


def room_for(room: int, after: Tensor, sequences: Sequences) -> int:
    """The number of tokens of a row of the new cache, for ``after`` [N] tokens so far. Rows of a pool keep their ``room``."""
    if sequences.count == 0:
        return room
    if not sequences.in_place:
        return max(room, int(after.max()))
    check_room(room, after, sequences)
    return room


def check_room(room: int, after: Tensor, sequences: Sequences) -> None:
    """Check that rows of a pool have room for their new tokens, where values may be read."""
    live = after if sequences.slots is None else after.masked_fill(sequences.slots < 0, 0)
    if reads_values(after) and sequences.count and int(live.max()) > room:
        complaints = Complaints("advance")
        remedy = "Make it with a larger max_length."
        complaints.add(RangeError, "state", f"a pool with room for {int(live.max())} tokens a row", f"room for {room}", remedy)
        complaints.raise_any()


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
