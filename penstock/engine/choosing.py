"""Choosing tokens in plain PyTorch, on any device. ``choosing_kernel.py`` computes the same.

Tokens are ranked by weight, then by number: of two equal weights, the lower token comes first. The filters keep the tokens whose weight is
at least min_p, of these the first top_k, and of these the smallest prefix whose weights sum to top_p of their total.

Sampling is by rejection, so a kernel need not find the kept tokens. The candidates are all tokens or, with top_k, those whose weight is at
least that of the last of the top k. A draw takes the token at a random position in the cumulative sum of the candidates' weights, in the
order of (token modulo ``LANES``, token). If the token is not kept, tokens of lower weight are not kept either: the tokens ranked before it
are the candidates of the next draw. So a kept token is drawn with its share of the weights of all kept tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Items
from itertools import count

import torch
from torch import Tensor

from ..models.probabilities import at_random, limits, ranks_of, weights, whole
from .slot_tables import (
    BIASED,
    CONSTRAINED,
    DRAWN,
    FREQUENCY,
    KEY,
    LAST_RANK,
    LEAST,
    LIMITED,
    PENALISED,
    PRESENCE,
    REPETITION,
    SHARE,
    TEMPERATURE,
    Row,
    SlotTables,
    masks,
)
from .transfer import from_buffer
from .uniforms import uniforms

NO_TOKEN = -1
"""Stands for a token where the largest logit is not finite."""
ROUND = 2**40
"""The distance between the positions of the random numbers of two draws of a row."""


class Places:
    """Which rows of a step need which operations: their indices, on the device."""

    def __init__(self, rows: Items[Row], slots: Items[int], positions: Items[int], device: torch.device) -> None:
        needs = [row.needs for row in rows]
        self.any = 0
        for one in set(needs):
            self.any |= one
        values = array("q", slots)
        values.extend(positions)
        spans: dict[int, tuple[int, int]] = {}
        for need in (DRAWN, BIASED, PENALISED, CONSTRAINED, LIMITED):
            if self.any & need:
                among = [one for one in needs if one & DRAWN] if need == LIMITED else needs
                chosen = [n for n, one in enumerate(among) if one & need]
                if len(chosen) < len(among):
                    spans[need] = len(values), len(chosen)
                    values.extend(chosen)
        copied, count = from_buffer(values, device), len(slots)
        self.slots, self.positions = copied[:count], copied[count : 2 * count]
        """The slots of all rows: int64 [R]."""
        self._places = {need: copied[begin : begin + size] for need, (begin, size) in spans.items()}

    def of(self, need: int, x: Tensor) -> Tensor:
        """The rows of ``x`` with a need. The rows of LIMITED are among those of DRAWN."""
        places = self._places.get(need)
        return x if places is None else x.index_select(0, places)

    def put(self, need: int, x: Tensor, values: Tensor) -> Tensor:
        """``x`` with these rows set to ``values``, in place unless they are all rows."""
        places = self._places.get(need)
        return values if places is None else x.index_copy_(0, places, values)


def choose(
    tables: SlotTables, logits: Tensor, rows: Items[Row], slots: Items[int], positions: Items[int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A token for each row of logits [R,V], and the slots: both int64 [R]."""
    step = Places(rows, slots, positions, logits.device)
    params = tables.numbers.index_select(0, step.slots)
    if step.any & (BIASED | PENALISED | CONSTRAINED):
        logits = _changed(tables, logits, rows, params, step)
    largest, tokens = logits.float().max(-1)  # the lowest token among equal logits
    if step.any & DRAWN:
        some = step.of(DRAWN, logits), step.of(DRAWN, largest), step.of(DRAWN, params)
        tokens = step.put(DRAWN, tokens, _draw(*some, step))
    tokens = tokens.masked_fill_(~(largest.abs() < math.inf), NO_TOKEN)
    if step.any & PENALISED:
        assert tables.seen is not None
        penalised = step.of(PENALISED, tokens)
        places = step.of(PENALISED, step.slots) * tables.vocab_size + penalised.clamp(min=0)
        tables.seen.view(-1).index_add_(0, places, (penalised >= 0).int() * 2)
    return tokens, step.slots


def _changed(tables: SlotTables, logits: Tensor, rows: Items[Row], params: Tensor, step: Places) -> Tensor:
    """Logits with bias, penalties and masks, in float32."""
    logits = logits.to(torch.float32, copy=True)
    if step.any & BIASED:
        some, slots = step.of(BIASED, logits), step.of(BIASED, step.slots)
        tokens, values = (x.index_select(0, slots) for x in tables.biases)
        logits = step.put(BIASED, logits, some.scatter_(1, tokens, some.gather(1, tokens).add_(values)))
    if step.any & PENALISED:
        assert tables.seen is not None
        seen = tables.seen.index_select(0, step.of(PENALISED, step.slots))
        logits = step.put(PENALISED, logits, _penalised(step.of(PENALISED, logits), seen, step.of(PENALISED, params).float()))
    if step.any & CONSTRAINED:
        size = -(-tables.vocab_size // 64) * 8
        bytes_of = from_buffer(masks(rows, tables.vocab_size), logits.device).view(-1, size, 1)
        bits = bytes_of.bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=logits.device)).bitwise_and_(1)
        excluded = bits.view(len(bits), -1)[:, : tables.vocab_size] == 0
        logits = step.put(CONSTRAINED, logits, step.of(CONSTRAINED, logits).masked_fill_(excluded, -math.inf))
    return logits


def _penalised(logits: Tensor, seen: Tensor, params: Tensor) -> Tensor:
    repetition, presence, frequency = (params[:, n : n + 1] for n in (REPETITION, PRESENCE, FREQUENCY))
    logits = torch.where(seen > 0, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    counts = seen >> 1
    return torch.where(counts > 0, logits - (presence + counts * frequency), logits)


def _draw(logits: Tensor, largest: Tensor, params: Tensor, step: Places) -> Tensor:
    """Sample rows of temperature above 0: logits [D,V]. Rows whose largest logit is not finite get an arbitrary token."""
    found = weights(logits.float(), largest[:, None], params[:, TEMPERATURE : TEMPERATURE + 1], params[:, LEAST : LEAST + 1].float())
    found.nan_to_num_(1.0)
    sums, keys, positions = whole(found), params[:, KEY].view(torch.int64), step.of(DRAWN, step.positions)
    if not step.any & LIMITED:
        return at_random(sums, uniforms(keys, positions))
    places, some = step.of(LIMITED, torch.arange(len(sums), device=sums.device)), step.of(LIMITED, found)
    ranks, chosen = ranks_of(some), step.of(LIMITED, params)
    least, top = limits(ranks, chosen[:, LAST_RANK : LAST_RANK + 1], chosen[:, SHARE : SHARE + 1])
    sums = step.put(LIMITED, sums, step.of(LIMITED, sums).masked_fill_(some < top, 0))
    tokens = at_random(sums, uniforms(keys, positions))
    for n in count(1):
        found_ranks = ranks.gather(1, tokens.index_select(0, places)[:, None])
        left = torch.nonzero((found_ranks < least).squeeze(1)).squeeze(1)
        if not len(left):
            break
        places, ranks, least = places[left], ranks[left], least[left]
        candidates = sums[places].masked_fill_(ranks <= found_ranks[left], 0)
        tokens[places] = at_random(candidates, uniforms(keys[places], positions[places] + n * ROUND))
    return tokens
