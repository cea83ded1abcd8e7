"""From logits to a token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import Complaints, RangeError


def check_sampling(function: str, temperature: float, top_p: float) -> None:
    """Raise RangeError unless temperature >= 0 and 0 < top_p <= 1."""
    complaints = Complaints(function)
    if not temperature >= 0:
        complaints.add(RangeError, "temperature", "at least 0", temperature, "0 takes the likeliest token.")
    if not 0 < top_p <= 1:
        complaints.add(RangeError, "top_p", "above 0 and at most 1", top_p, "1 leaves no token out.")
    complaints.raise_any()


def draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """One token for each row of logits [N,vocabulary]: int64 [N].

    p = softmax(logits / temperature), cut to its *nucleus*: the fewest likeliest tokens whose p sums to ``top_p`` or
    more. Temperature 0 takes the likeliest token.

    Source: Holtzman et al. 2020, arXiv 1904.09751, section 3.1.

    >>> draw(torch.tensor([[0.0, 3.0, 1.0]]), temperature=1.0, top_p=0.5)
    tensor([1])
    """
    if temperature == 0:
        return logits.argmax(-1)
    p, tokens = torch.softmax(logits.float() / temperature, -1).sort(-1, descending=True)
    before = p.cumsum(-1) - p
    p = p.masked_fill(before >= top_p, 0)
    return tokens.gather(-1, torch.multinomial(p, 1, generator=generator)).squeeze(-1)
