"""Reversal of digits: a number, a separator, then its digits from the last to the first.

A recurrent model has read all digits before the first one that it must return, and returns them in an order in which it has not read them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Complaints, RangeError
from .data import IGNORED

SEPARATOR = 10
"""The token between a number and its reversal, and after the reversal."""


class Reversal(NamedTuple):
    """The sizes of the task.

    >>> Reversal(digits=12).check()
    """

    digits: int = 16
    """The most digits of a number."""
    fewest: int = 1
    """The fewest digits. All counts from it to ``digits`` are equally likely."""

    @property
    def vocab_size(self) -> int:
        """Ten digits and the separator."""
        return SEPARATOR + 1

    def check(self) -> None:
        """Raise RangeError for sizes that do not fit each other."""
        complaints = Complaints("reversal")
        if self.fewest < 1:
            complaints.add(RangeError, "fewest", "at least 1", self.fewest)
        elif self.digits < self.fewest:
            complaints.add(RangeError, "digits", f"at least fewest = {self.fewest}", self.digits)
        complaints.raise_any()

    def draw(self, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Random sequences and their labels: int64 [count,2*digits] each, on the generator's device.

        The labels of the separator and of the digits after it are the next digit of the reversal; other labels are ``IGNORED``.

        >>> tokens, labels = Reversal(digits=3, fewest=3).draw(1, torch.Generator().manual_seed(0))
        >>> tokens, labels
        (tensor([[ 9,  3,  0, 10,  0,  3]]), tensor([[-100, -100, -100,    0,    3,    9]]))
        """
        self.check()
        device = None if generator is None else generator.device
        size = torch.randint(self.fewest, self.digits + 1, (count, 1), generator=generator, device=device)
        number = torch.randint(SEPARATOR, (count, self.digits), generator=generator, device=device)
        place = torch.arange(2 * self.digits, device=device)
        reversal = (2 * size - 1 - place).clamp(0, self.digits - 1)  # the index of the digit after a place
        labels = torch.where((place >= size) & (place < 2 * size), number.gather(1, reversal), IGNORED)
        tokens = torch.full_like(labels, SEPARATOR)
        tokens[:, 1:] = torch.where(labels[:, :-1] == IGNORED, SEPARATOR, labels[:, :-1])
        tokens[:, : self.digits] = torch.where(place[: self.digits] < size, number, tokens[:, : self.digits])
        return tokens, labels
