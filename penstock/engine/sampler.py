"""From logits to tokens, for all rows of a step together.

A row's token depends on its own logits, parameters, seed and position only, to the bit, and is the same on every device: weights are
computed by operations that all devices round alike (``models/probabilities.py``), their sums have no order, and the random numbers of a row
are hashes of its seed and position. On a GPU one kernel takes every row, whatever it needs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from ..gpu.target import unavailable
from .choosing import choose
from .slot_tables import CONSTRAINED, DRAWN, Row, SlotTables, masks
from .transfer import from_buffer

NOT_DRAWN = -1
"""In the place of the position of a row that takes the most likely token."""


class Sampler:
    """Samples for the rows of slots.

    vocab_size : int
        Tokens are below it: that of the tokenizer, where the model has more.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.tables = SlotTables(slots, vocab_size, device)
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        """The last sampled token of each slot, or ``NO_TOKEN``."""
        self._kernels = device.type == "cuda" and unavailable() is None

    def sample(self, logits: Tensor, rows: Items[Row], slots: Items[int], positions: Items[int]) -> Tensor:
        """One token for each row of logits [R,V]: int64 [R]; ``NO_TOKEN`` where the largest logit, of those that may follow, is not finite.

        slots : list of int
            Of each row, all different.
        positions : list of int
            The number of tokens before each sampled one. Those of a row in its slot grow by 1.
        """
        self.tables.enter(rows, slots)
        if self.vocab_size < logits.shape[1]:
            logits = logits[:, : self.vocab_size]
        if not self._kernels:
            tokens, places = choose(self.tables, logits, rows, slots, positions)
            self.last.index_copy_(0, places, tokens)
            return tokens
        from .choosing_kernel import choose_by_kernel

        count, any_needs = len(slots), 0
        for row in rows:
            any_needs |= row.needs
        values = array("q", slots)
        values.extend([at if row.needs & DRAWN else NOT_DRAWN for at, row in zip(positions, rows)])
        if any_needs & CONSTRAINED:
            place = -1
            values.extend([(place := place + 1) if row.needs & CONSTRAINED else -1 for row in rows])
            values.frombytes(masks(rows, self.vocab_size))
        copied = from_buffer(values, self.device)
        return choose_by_kernel(self.tables, logits, copied, count, any_needs, self.last)
