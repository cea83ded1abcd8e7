"""From logits to tokens, for all rows of a step at once.

A row's token depends only on its own logits, parameters, seed and position, and is the same on every device. Weights are computed by
operations that round equally on all devices (``models/probabilities.py``), their sums do not depend on the order, and the random numbers of
a row are hashes of its seed and position. On a GPU one kernel takes all rows, whatever their parameters.
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
"""The position that stands for taking the most likely token."""


class Sampler:
    """Samples tokens for the rows of slots.

    vocab_size : int
        Sampled tokens are below it: the tokenizer's size, if the model's is larger.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.tables = SlotTables(slots, vocab_size, device)
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        """The last sampled token of each slot, or ``NO_TOKEN``."""
        self._kernels = device.type == "cuda" and unavailable() is None

    def sample(self, logits: Tensor, rows: Items[Row], slots: Items[int], positions: Items[int]) -> Tensor:
        """One token for each row of logits [R,V]: int64 [R]; ``NO_TOKEN`` where the largest logit of the allowed tokens is not finite.

        slots : list of int
            The slot of each row, all different.
        positions : list of int
            The number of tokens before each sampled one. While a row stays in its slot, it grows by 1 per step.
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
