"""Multi-query associative recall: pairs of a key and a value, then the keys again, in any order, among other tokens.

The model must return the value of each repeated key. This is the task on which recurrent models differ most from
softmax attention.

Source: Arora et al. 2023, "Zoology", arXiv 2312.04927, section 4.2 and appendix E.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Complaints, RangeError
from .data import IGNORED

NEARNESS = 0.01
"""The exponent a of the distances from the pairs to their queries: p(d) is proportional to d^(a - 1)."""


class Recall(NamedTuple):
    """The sizes of the task.

    >>> Recall(pairs=4, length=32, vocab_size=64).check()
    """

    pairs: int = 8
    """Pairs of a key and a value, and as many queries."""
    length: int = 64
    """Tokens of a sequence, an even number of at least 4 * pairs."""
    vocab_size: int = 8192
    """0 is unused, keys are below vocab_size / 2, values from there on."""

    def check(self) -> None:
        """Raise RangeError for sizes that do not fit each other."""
        complaints = Complaints("mqar")
        if self.pairs < 1:
            complaints.add(RangeError, "pairs", "at least 1", self.pairs)
        elif self.length < 4 * self.pairs or self.length % 2:
            complaints.add(RangeError, "length", f"an even number of at least 4 * pairs = {4 * self.pairs}", self.length)
        if self.vocab_size < 2 * self.pairs + 2:
            complaints.add(RangeError, "vocab_size", f"at least 2 * pairs + 2 = {2 * self.pairs + 2}", self.vocab_size)
        complaints.raise_any()

    def draw(self, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Random sequences and their labels: int64 [count,length] each, on the generator's device.

        The first 2 * pairs tokens are the pairs. Keys are distinct, and so are values. Each key is a query once, at an even distance
        from the pairs that follows a power law, without replacement. The label of a query is its value; other labels are
        ``IGNORED``. Tokens between queries are random.

        >>> tokens, labels = Recall(pairs=2, length=8, vocab_size=16).draw(3, torch.Generator().manual_seed(0))
        >>> tokens.shape, (labels != IGNORED).sum(1)
        (torch.Size([3, 8]), tensor([2, 2, 2]))
        """
        self.check()
        pairs, length, vocab_size = self
        device = None if generator is None else generator.device
        half = vocab_size // 2
        keys = torch.rand(count, half - 1, generator=generator, device=device).topk(pairs).indices + 1
        values = torch.rand(count, vocab_size - half, generator=generator, device=device).topk(pairs).indices + half
        places = (length - 2 * pairs) // 2
        nearness = torch.arange(1, places + 1, device=device).double().pow(NEARNESS - 1).expand(count, -1)
        queries = 2 * pairs + 2 * torch.multinomial(nearness, pairs, generator=generator)
        tokens = torch.randint(vocab_size, (count, length), generator=generator, device=device)
        tokens[:, : 2 * pairs] = torch.stack([keys, values], -1).flatten(1)
        tokens.scatter_(1, queries, keys)
        return tokens, torch.full_like(tokens, IGNORED).scatter_(1, queries, values)
