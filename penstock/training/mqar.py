"""Multi-query associative recall: pairs of a key and a value, then the keys again, in any order, among other tokens.

The model must return the value of each repeated key. This is the task on which recurrent models differ most from
softmax attention.

Source: Arora et al. 2023, "Zoology", arXiv 2312.04927, section 4.2 and appendix E.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import Complaints, RangeError
from ..models import CausalLM, Config
from .data import IGNORED
from .settings import ARCHITECTURES

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


def draw(recall: Recall, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Random sequences and their labels: int64 [count,length] each, on the generator's device.

    The first 2 * pairs tokens are the pairs. Keys are distinct, and so are values. Each key is a query once, at an even distance
    from the pairs that follows a power law, without replacement. The label of a query is its value; other labels are
    ``IGNORED``. Tokens between queries are random.

    >>> tokens, labels = draw(Recall(pairs=2, length=8, vocab_size=16), 3, torch.Generator().manual_seed(0))
    >>> tokens.shape, (labels != IGNORED).sum(1)
    (torch.Size([3, 8]), tensor([2, 2, 2]))
    """
    recall.check()
    pairs, length, vocab_size = recall
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


HEAD_SIZE = 64
LARGE = 512
"""For larger vocabularies, embeddings and head share a matrix. GLA, 8 pairs, vocabulary 8192, one NVIDIA H200: 96 % after 35 s; with two
matrices 0 % after 400 s. With a vocabulary of 64 two matrices are better: 98 % after 225 steps, 6 % after 1100 with one."""
BATCH = {"cpu": 64, "cuda": 256}
"""Sequences per step. Steps of 256 take no longer on a GPU."""
LEARNING_RATE = 5e-3
WARMUP = 0.05
"""Fraction of the time in which the learning rate rises."""
CHECKS = 30
"""Evaluations of a run."""
CHECKED = 512
"""Sequences of an evaluation."""
CHECKED_TOGETHER = 64
TRAINING_SEED, CHECK_SEED = 0, 1
"""Added to twice the seed: the sequences of training and of evaluation."""


class Point(NamedTuple):
    """An evaluation while a model learns."""

    seconds: float
    steps: int
    accuracy: float
    """The fraction of queries of new sequences whose most likely token is the value."""


def model_config(architecture: str, recall: Recall, hidden_size: int, num_layers: int) -> Config:
    """A small model of an architecture: heads of at most 64, and short convolutions where the mixer has no other token shift.

    For large vocabularies embeddings and head share a matrix, as in the source: see ``LARGE``.
    """
    size = min(HEAD_SIZE, hidden_size)
    sizes: dict[str, Any] = {"vocab_size": recall.vocab_size, "hidden_size": hidden_size, "num_layers": num_layers}
    if architecture.startswith("rwkv"):
        sizes |= {"head_size": size}
    elif architecture == "mamba2":
        sizes |= {"head_dim": size, "state_size": size}
    elif architecture in ("gated_deltanet", "kda"):
        sizes |= {"num_heads": hidden_size // size, "head_dim": size}
    else:
        sizes |= {"num_heads": hidden_size // size} | ({"conv_size": 4} if architecture in ("gla", "retnet") else {})
    return replace(ARCHITECTURES[architecture](**sizes), tie_embeddings=recall.vocab_size > LARGE)


def learn(
    model: CausalLM, recall: Recall, seconds: float, seed: int = 0, enough: float = 1.0, report: Callable[[Point], None] = lambda _: None
) -> list[Point]:
    """Train a model on new sequences for a given time, or until ``enough`` queries are right. Returns all evaluations.

    Uses AdamW; the learning rate rises for a twentieth of the time and follows a cosine to its end. Only the logits of queries
    are computed.
    """
    device = model.like().device
    drawn = torch.Generator(device).manual_seed(2 * seed + TRAINING_SEED)
    held = draw(recall, CHECKED, torch.Generator(device).manual_seed(2 * seed + CHECK_SEED))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    points: list[Point] = []
    begin, elapsed, steps = time.perf_counter(), 0.0, 0
    while not points or (points[-1].accuracy < enough and elapsed < seconds):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * _rate(elapsed / seconds)
        tokens, labels = draw(recall, BATCH[device.type], drawn)
        asked = labels != IGNORED
        F.cross_entropy(model.head(model.hidden(tokens)[0][asked]), labels[asked]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        elapsed = time.perf_counter() - begin
        if elapsed >= seconds * len(points) / CHECKS:
            points.append(Point(elapsed, steps, evaluate(model, *held)))
            report(points[-1])
    return points


def _rate(share: float) -> float:
    """Factor of the learning rate at a fraction of the time."""
    return min(0.01 + share / WARMUP, 1) * (0.505 + 0.495 * math.cos(math.pi * min(share, 1.0)))


@torch.no_grad()
def evaluate(model: CausalLM, tokens: Tensor, labels: Tensor) -> float:
    """The fraction of queries whose most likely token is the label; tokens and labels [N,T]."""
    right, queries = 0, 0
    for some, wanted in zip(tokens.split(CHECKED_TOGETHER), labels.split(CHECKED_TOGETHER)):
        asked = wanted != IGNORED
        right += int((model.head(model.hidden(some)[0][asked]).argmax(-1) == wanted[asked]).sum())
        queries += int(asked.sum())
    return right / queries
