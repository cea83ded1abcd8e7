"""The order of samples. It follows from the seed and the epoch, not from the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from .data import FILLER, Windows, collate
from .ranks import Ranks


class Batches(Sampler[list[int]]):
    """The samples of one rank in each batch.

    A batch of all ranks is the next ``size`` samples; each part of it has the same number, in order. The last batch has what is left. Where
    that is no multiple of the parts, samples without labels (``FILLER``) are added.

    >>> list(Batches(7, 4, Ranks(dp=2, rank=1)))
    [[2, 3], [6, -1]]
    """

    def __init__(self, samples: int, size: int, ranks: Ranks, seed: int | None = None) -> None:
        """Batches of the samples 0 to ``samples`` - 1, in this order or, with ``seed``, in another one for each epoch."""
        self.samples, self.size, self.ranks, self.seed, self.epoch = samples, size, ranks, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.samples))
        if self.seed is not None:
            order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        parts = self.ranks.dp
        for begin in range(0, self.samples, self.size):
            batch = order[begin : begin + self.size]
            batch += [FILLER] * (-len(batch) % parts)
            each = len(batch) // parts
            yield batch[self.ranks.part * each : (self.ranks.part + 1) * each]


class Loader(DataLoader[dict[str, Tensor]]):
    """The batches of a rank."""

    def __init__(self, samples: Windows, batches: Batches, pinned: bool) -> None:
        super().__init__(samples, batch_sampler=batches, collate_fn=collate, pin_memory=pinned)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        batches: Any = self.batch_sampler
        batches.set_epoch(epoch)
