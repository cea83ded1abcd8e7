"""Tables on the device, indexed by slot, that sampling reads at every step: parameters, random keys, biases and counts of tokens.

They are written when a row enters its slot, so a step copies little.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.probabilities import COLDEST, HOTTEST, ONE
from .parameters import Constraint, SamplingParams
from .request import Sequence
from .transfer import from_buffer, to_device
from .uniforms import key_of, seed_of

DRAWN, LIMITED, BIASED, PENALISED, CONSTRAINED = (1 << n for n in range(5))
"""Operations that a row may need beyond the largest logit: a draw, top_k or top_p, logit_bias, any penalty, a constraint."""
TEMPERATURE, LAST_RANK, SHARE, LEAST, REPETITION, PRESENCE, FREQUENCY, NEEDS, BIASES, KEY, COLUMNS = range(11)
"""Columns of the table of parameters. All values are exact in float64; KEY has the bits of an integer."""


@dataclass(eq=False)
class Row:
    """One row of logits, and all that its token depends on except its position."""

    params: SamplingParams
    seed: int
    tokens: Items[int] = ()
    """The tokens before the first sampled one. Read only for penalties, when the row enters its slot."""
    prompt: int = 0
    """How many of them belong to the prompt."""
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        params = self.params
        self.owner = object()
        found = {BIASED: params.logit_bias, PENALISED: params.penalised, CONSTRAINED: self.constraint is not None}
        if not params.greedy:
            found |= {DRAWN: True, LIMITED: params.top_k or params.top_p < 1}
        self.needs = sum(need for need, true in found.items() if true)
        self.logprobs = -1 if params.logprobs is None else params.logprobs

    @classmethod
    def of(cls, one: Sequence) -> Row:
        """The row of a sequence."""
        return cls(one.request.params, seed_of(one.request.seed, one.index), one.tokens, len(one.request.prompt), one.constraint)


class SlotTables:
    """The tables of all slots."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._owners: list[object] = [None] * slots
        """The owner of the values of each slot."""
        self.numbers = torch.ones(slots, COLUMNS, dtype=torch.float64, device=device)
        self.biases = [torch.zeros(slots, 1, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32)]
        """Tokens [slots,W] and values [slots,W]. Shorter rows are padded with their first token."""
        self.seen: Tensor | None = None
        """int32 [slots,V]: 2 * (times a token was generated) + (1 if it is in the prompt). None until a row has a penalty."""

    def enter(self, rows: Items[Row], slots: Items[int]) -> None:
        """Write the tables for rows that were not in their slots at their last step."""
        owners = self._owners
        fresh = [n for n, row in enumerate(rows) if owners[slots[n]] is not row.owner]
        if not fresh:
            return
        values = array("d")
        for n in fresh:
            owners[slots[n]] = rows[n].owner = object()  # a new one: the row may come back to an earlier slot, whose counts are old
            values.append(slots[n])
            values.extend(self._numbers(rows[n]))
        copied = from_buffer(values, self.device).view(len(fresh), 1 + COLUMNS)
        self.numbers.index_copy_(0, copied[:, 0].long(), copied[:, 1:])
        for n in fresh:
            if rows[n].needs & BIASED:
                self._enter_biases(slots[n], rows[n])
            if rows[n].needs & PENALISED:
                self._enter_seen(slots[n], rows[n])

    def _numbers(self, row: Row) -> array[float]:
        """A row of the table."""
        params, found = row.params, [1.0] * KEY
        found[TEMPERATURE] = min(max(float(params.temperature), COLDEST), HOTTEST)
        found[LAST_RANK] = min(params.top_k or self.vocab_size, self.vocab_size) - 1
        found[SHARE] = params.top_p if params.top_p < 1 else 2.0  # above any sum, even if sums are rounded
        found[LEAST] = max(_rounded_up(params.min_p), 1 / ONE)
        found[REPETITION], found[PRESENCE], found[FREQUENCY] = (
            float(one) for one in (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        )
        found[NEEDS], found[BIASES] = row.needs, len(params.logit_bias)
        values = array("d", found)
        values.frombytes(array("Q", [key_of(row.seed)]).tobytes())
        return values

    def _enter_biases(self, slot: int, row: Row) -> None:
        tokens, values = list(row.params.logit_bias), [float(one) for one in row.params.logit_bias.values()]
        missing = self.biases[0].shape[1] - len(tokens)
        if missing < 0:
            more = (1 << (len(tokens) - 1).bit_length()) - self.biases[0].shape[1]
            self.biases = [torch.cat([x, x[:, :1].expand(-1, more)], 1) for x in self.biases]
            missing += more
        self.biases[0][slot] = to_device(tokens + tokens[:1] * missing, self.device)
        self.biases[1][slot] = to_device(values + values[:1] * missing, self.device, torch.float64)

    def _enter_seen(self, slot: int, row: Row) -> None:
        V = self.vocab_size
        if self.seen is None:
            self.seen = torch.zeros(len(self._owners), V, dtype=torch.int32, device=self.device)
        seen = self.seen[slot]
        seen.zero_()
        tokens = array("q", row.tokens)
        prompt = [token for token in tokens[: row.prompt] if token < V]
        if prompt:
            seen.index_fill_(0, to_device(prompt, self.device), 1)
        if len(tokens) > row.prompt:
            places = from_buffer(tokens[row.prompt :], self.device)
            seen.index_add_(0, places, torch.full_like(places, 2, dtype=torch.int32))


def masks(rows: Items[Row], vocab_size: int) -> bytearray:
    """The masks of the rows with a constraint, each padded to whole 64-bit words."""
    size, used = -(-vocab_size // 64) * 8, -(-vocab_size // 8)
    return bytearray().join(row.constraint.mask[:used].ljust(size, b"\0") for row in rows if row.constraint is not None)


def _rounded_up(x: float) -> float:
    """The least float32 that is not below x: a float32 weight is at least x if it is at least this."""
    found = torch.tensor(x, dtype=torch.float64).float()
    return float(found if float(found) >= x else torch.nextafter(found, torch.tensor(math.inf)))
