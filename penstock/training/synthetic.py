"""Synthetic tasks, drawn at random without end, and small models that learn them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models import CausalLM, Config
from .data import IGNORED
from .settings import ARCHITECTURES


class Task(Protocol):
    """The sizes of a task, and its sequences."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    def draw(self, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Random sequences and the label of each token: int64 [count,T] each, on the generator's device."""


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
    """The fraction of labels of new sequences that are the most likely token."""


def model_config(architecture: str, task: Task, hidden_size: int, num_layers: int) -> Config:
    """A small model of an architecture: heads of at most 64, and short convolutions where the mixer has no other token shift.

    For large vocabularies embeddings and head share a matrix, see ``LARGE``.
    """
    size = min(HEAD_SIZE, hidden_size)
    sizes: dict[str, Any] = {"vocab_size": task.vocab_size, "hidden_size": hidden_size, "num_layers": num_layers}
    if architecture.startswith("rwkv"):
        sizes |= {"head_size": size}
    elif architecture == "mamba2":
        sizes |= {"head_dim": size, "state_size": size}
    elif architecture in ("gated_deltanet", "kda"):
        sizes |= {"num_heads": hidden_size // size, "head_dim": size}
    else:
        sizes |= {"num_heads": hidden_size // size} | ({"conv_size": 4} if architecture in ("gla", "retnet") else {})
    return replace(ARCHITECTURES[architecture](**sizes), tie_embeddings=task.vocab_size > LARGE)


def learn(
    model: CausalLM, task: Task, seconds: float, seed: int = 0, enough: float = 1.0, report: Callable[[Point], None] = lambda _: None
) -> list[Point]:
    """Train a model on new sequences for a given time, or until a fraction ``enough`` of the labels is right. Returns all evaluations.

    Uses AdamW; the learning rate rises for a twentieth of the time and follows a cosine to its end. Only the logits of tokens with
    a label are computed.
    """
    device = model.like().device
    drawn = torch.Generator(device).manual_seed(2 * seed + TRAINING_SEED)
    held = task.draw(CHECKED, torch.Generator(device).manual_seed(2 * seed + CHECK_SEED))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    points: list[Point] = []
    begin, elapsed, steps = time.perf_counter(), 0.0, 0
    while not points or (points[-1].accuracy < enough and elapsed < seconds):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * _rate(elapsed / seconds)
        tokens, labels = task.draw(BATCH[device.type], drawn)
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
    """The fraction of labels that are the most likely token; tokens and labels [N,T]."""
    right, labelled = 0, 0
    for some, wanted in zip(tokens.split(CHECKED_TOGETHER), labels.split(CHECKED_TOGETHER)):
        asked = wanted != IGNORED
        right += int((model.head(model.hidden(some)[0][asked]).argmax(-1) == wanted[asked]).sum())
        labelled += int(asked.sum())
    return right / labelled
