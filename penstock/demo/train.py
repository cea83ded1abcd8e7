"""Train a small byte-level RWKV-6, in a given time, on a text that is always there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import Complaints, RangeError
from ..models.rwkv6 import RWKV6, Configuration
from . import text
from .threads import quickest_threads

if TYPE_CHECKING:
    from rich.console import Console

CONFIGURATION = Configuration(
    vocab_size=256, num_layers=4, hidden_size=128, intermediate_size=448, head_size=32, mix_rank=16, decay_rank=16
)
# On one core of a Zen 3 server, 575,000 bytes of training: held-out 1.33 nats with BATCH = 16, 1.31 with 8; 1.33 also
# with a learning rate of 6e-3 instead of 4e-3. Small batches also learn more where the machine is slow.
BATCH, LENGTH = 8, 128
LEARNING_RATE = 4e-3
WARMUP = 0.05
"""share of the time in which the learning rate rises"""
WEIGHT_DECAY = 0.1
PROMPT = b"The with statement "
WEIGHTS = "rwkv6-bytes.pth"

Report = Callable[[float, float, float], None]
"""called after each step with the loss in nats per byte, the bytes seen and the share of the time that has passed"""


@dataclass(frozen=True)
class Trained:
    """What a training did. Losses are of the held-out text, in nats per byte."""

    parameters: int
    tokens: int
    """bytes trained on, repeats counted"""
    seconds: float
    """time in the training loop, evaluation left out"""
    loss_before: float
    loss_after: float
    sample: str
    weights: Path

    @property
    def bits_per_byte(self) -> float:
        """``loss_after`` in bits."""
        return self.loss_after / math.log(2)


def train(folder: Path, seconds: float = 60.0, console: Console | None = None, seed: int = 0) -> Trained:
    """Train a byte-level RWKV-6 of about a million parameters on ``text.python_topics()``.

    AdamW; the learning rate rises for a twentieth of the time, then falls along a cosine, so that the run is complete
    whenever its time is up. The new model and the order of the text depend on ``seed`` alone; how many steps fit into
    the time depends on the machine. Runs with as many threads as are quickest, see ``threads``.

    folder : Path
        Where ``rwkv6-bytes.pth`` is written, a ``state_dict`` with the published names; made if missing.
    seconds : float
        Time for the training loop, above 0. Evaluation and the sample take a few seconds more.
    console : rich.console.Console, optional
        Where to draw a progress bar. Default: nowhere.
    seed : int
        Of all random numbers. The global generator is left as it was.

    Raises RangeError, or PenstockError where the text is missing.
    """
    if not (seconds > 0 and math.isfinite(seconds)):
        complaints = Complaints("train")
        complaints.add(RangeError, "seconds", "a finite number above 0", seconds)
        complaints.raise_any()
    folder.mkdir(parents=True, exist_ok=True)
    corpus = text.split(text.python_topics())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = RWKV6(CONFIGURATION)
    weights = folder / WEIGHTS
    parameters = sum(p.numel() for p in model.parameters())
    probe = windows(corpus.train, torch.Generator().manual_seed(seed))
    with quickest_threads(lambda: cross_entropy(model, probe).backward()):
        model.zero_grad()
        loss_before = evaluate(model, corpus.held_out)
        with _progress(console) as report:
            tokens, elapsed = fit(model, corpus.train, seconds, torch.Generator().manual_seed(seed), report)
        torch.save(model.state_dict(), weights)
        loss_after = evaluate(model, corpus.held_out)
        written = sample(model, PROMPT, 300, seed)
    return Trained(parameters, tokens, elapsed, loss_before, loss_after, written, weights)


def fit(model: RWKV6, corpus: Tensor, seconds: float, generator: torch.Generator, report: Report) -> tuple[int, float]:
    """Train on random windows of a uint8 Tensor [bytes] for some seconds, at least one step.

    Returns the bytes seen and the seconds taken.
    """
    optimizer = optimizer_of(model)
    begin, tokens, elapsed = time.perf_counter(), 0, 0.0
    while tokens == 0 or elapsed < seconds:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * schedule(elapsed / seconds)
        loss = cross_entropy(model, windows(corpus, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += BATCH * LENGTH
        elapsed = time.perf_counter() - begin
        report(loss.item(), tokens, min(elapsed / seconds, 1.0))
    return tokens, elapsed


def optimizer_of(model: RWKV6) -> torch.optim.Optimizer:
    """AdamW; only matrices decay towards 0: vectors, norms and the low-rank parts of the mixers do not."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.endswith(".weight")]
    others = [p for name, p in model.named_parameters() if not (p.dim() == 2 and name.endswith(".weight"))]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)


def schedule(share: float) -> float:
    """Factor of the learning rate after a share of the time, 0 to 1: up in a straight line, then down along a cosine.

    >>> [round(schedule(share), 3) for share in (0.0, 0.05, 0.525, 1.0)]
    [0.02, 1.0, 0.51, 0.02]
    """
    if share < WARMUP:
        return 0.02 + 0.98 * share / WARMUP
    return 0.02 + 0.49 * (1 + math.cos(math.pi * min((share - WARMUP) / (1 - WARMUP), 1.0)))


def windows(corpus: Tensor, generator: torch.Generator) -> Tensor:
    """Random stretches of a text: int64 [BATCH,LENGTH+1]."""
    begin = torch.randint(len(corpus) - LENGTH, (BATCH, 1), generator=generator)
    return corpus[begin + torch.arange(LENGTH + 1)].long()


def cross_entropy(model: RWKV6, tokens: Tensor) -> Tensor:
    """Mean loss in nats of predicting every token [B,T+1] but the first."""
    logits, _ = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: RWKV6, held_out: Tensor, length: int = 512) -> float:
    """Mean loss in nats per byte over a uint8 Tensor [bytes], cut into windows of ``length``; the rest is left out."""
    count = (len(held_out) - 1) // length
    tokens = held_out[torch.arange(count)[:, None] * length + torch.arange(length + 1)].long()
    losses = [cross_entropy(model, part) * len(part) for part in torch.split(tokens, 16)]  # 16: bounds the memory
    return float(sum(losses)) / count


def sample(model: RWKV6, prompt: bytes, count: int, seed: int) -> str:
    """``prompt`` and ``count`` bytes that the model writes after it; what is not UTF-8 becomes U+FFFD."""
    tokens = torch.tensor([list(prompt)])
    drawn = model.generate(tokens, count, temperature=0.7, top_p=0.95, generator=torch.Generator().manual_seed(seed))
    return (prompt + bytes(drawn[0].tolist())).decode(errors="replace")


@contextmanager
def _progress(console: Console | None) -> Iterator[Report]:
    """Draw a bar with the loss, the speed and the time left, or nothing."""
    if console is None:
        yield lambda loss, tokens, share: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("training"), BarColumn(), TextColumn("{task.fields[reached]}"), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=1.0, reached="")  # there is no loss before the first step

        def report(loss: float, tokens: float, share: float) -> None:
            speed = tokens / max(progress.tasks[task].elapsed or 0.0, 1e-9)
            progress.update(task, completed=share, reached=f"loss {loss:.2f}  {speed:,.0f} tokens/s")

        yield report
