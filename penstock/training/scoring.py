"""Log-likelihoods of texts: packed short ones, long ones in windows with a carried state."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Complaints, RangeError
from ..models import CausalLM
from ..models.sampling import check_logits
from ..models.tokenizers import Bytes, Tokenizer
from ..tokens.dtypes import state_dtype

BUDGET = 8192
"""Tokens of one call of the model."""
LOGITS = 512
"""Tokens whose logits are in memory at once."""


class Scores(NamedTuple):
    """The scores of all tokens of a sequence but the first."""

    log_p: Tensor
    """float64 [n-1]: log probabilities given all tokens before, natural logarithm, on the CPU."""
    greedy: Tensor
    """bool [n-1]: whether the token is the most likely one, on the CPU."""


@torch.no_grad()
def score(model: CausalLM, sequences: Sequence[Sequence[int]], budget: int = BUDGET) -> list[Scores]:
    """Score sequences of tokens, each of at least one. Short ones are packed into one call; long ones take several, with a carried state.

    >>> from penstock.models import gla
    >>> model = CausalLM(gla(vocab_size=11, num_layers=1, hidden_size=16, num_heads=2))
    >>> [one.log_p.shape for one in score(model, [[3, 1, 4], [1, 5]])]
    [torch.Size([2]), torch.Size([1])]
    """
    found: dict[int, Scores] = {}
    for group in _groups(sequences, budget):
        device = model.like().device
        ids = torch.tensor([[token for n in group for token in sequences[n][:-1]]], dtype=torch.int64, device=device)
        labels = torch.tensor([token for n in group for token in sequences[n][1:]], dtype=torch.int64, device=device)
        lengths = [len(sequences[n]) - 1 for n in group]
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int() if len(group) > 1 else None
        state, parts = None, [Scores(torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.bool))]
        for begin in range(0, ids.shape[1], budget):  # several windows only for one long sequence
            x, state = model.hidden(ids[:, begin : begin + budget], state, cu_seqlens)
            parts += [_score(model, *pair) for pair in zip(x[0].split(LOGITS), labels[begin : begin + budget].split(LOGITS))]
        log_p, greedy = map(torch.cat, zip(*parts))
        for n, one, other in zip(group, log_p.split(lengths), greedy.split(lengths)):
            found[n] = Scores(one, other)
    return [found[n] for n in range(len(sequences))]


def _score(model: CausalLM, x: Tensor, labels: Tensor) -> Scores:
    logits = model.head(x)
    log_p = logits.to(state_dtype(logits.dtype)).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return Scores(log_p.double().cpu(), (logits.argmax(-1) == labels).cpu())


def _groups(sequences: Sequence[Sequence[int]], budget: int) -> Iterator[list[int]]:
    """Indices of sequences that are packed into one call, in order of length."""
    group: list[int] = []
    filled = 0
    for n in sorted(range(len(sequences)), key=lambda n: len(sequences[n])):
        if group and filled + len(sequences[n]) > budget:
            yield group
            group, filled = [], 0
        group.append(n)
        filled += len(sequences[n])
    if group:
        yield group


class Perplexity(NamedTuple):
    """The loss of a text."""

    tokens: int
    """Tokens that were predicted."""
    bytes: int
    """The size of the text in UTF-8."""
    nats: float
    """The sum of the losses, natural logarithm."""

    @property
    def nats_per_token(self) -> float:
        """The mean loss."""
        return self.nats / self.tokens

    @property
    def nats_per_byte(self) -> float:
        """The loss by length of text, which compares models with different tokenizers."""
        return self.nats / self.bytes

    @property
    def perplexity(self) -> float:
        """``exp(nats_per_token)``; inf if that is above the range of floats."""
        return math.exp(self.nats_per_token) if self.nats_per_token < math.log(sys.float_info.max) else math.inf


def perplexity(model: CausalLM, tokenizer: Tokenizer, text: str, window: int = 2048) -> Perplexity:
    """The loss of a text that is read in windows of ``window`` tokens, with the state carried from one to the next.

    The first token follows the tokenizer's ``end_of_text``; without one it is not predicted. Raises RangeError for a text without a token
    to predict, and for losses that are NaN.
    """
    tokens = tokenizer.encode(text)
    size = len(text.encode())
    if tokenizer.end_of_text is not None:
        tokens = [tokenizer.end_of_text, *tokens]
    elif tokens:
        size -= 1 if isinstance(tokenizer, Bytes) else len(tokenizer.decode(tokens[:1]).encode())
    if len(tokens) < 2:
        complaints = Complaints("perplexity")
        complaints.add(RangeError, "text", "at least two tokens", f"{len(tokens)}")
        complaints.raise_any()
    log_p = score(model, [tokens], window)[0].log_p
    check_logits("perplexity", log_p, last=True, name="losses")
    return Perplexity(len(log_p), size, -log_p.sum().item())
