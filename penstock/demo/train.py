"""Training of a small byte-level model for a given time, on a text of the standard library."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import Complaints, RangeError, shortened
from ..models import CausalLM, rwkv6, rwkv7, save
from . import text
from .threads import fastest_threads

if TYPE_CHECKING:
    from rich.console import Console

MODELS = {
    "rwkv6": rwkv6(vocab_size=256, num_layers=4, hidden_size=128, intermediate_size=448, head_size=32, mix_rank=16, decay_rank=16),
    "rwkv7": rwkv7(
        vocab_size=256, num_layers=4, hidden_size=128, intermediate_size=512, head_size=32, decay_rank=16, rate_rank=16, value_rank=16,
        gate_rank=32,
    ),
}  # fmt: skip
"""By architecture: models of about a million parameters, which the format of RWKV's authors holds. The first is the default."""
DEFAULT = next(iter(MODELS))
# Held-out loss after 575,000 bytes on one core of a Zen 3 server: 1.31 nats with BATCH = 8, 1.33 with 16, and 1.33 with a
# learning rate of 6e-3 instead of 4e-3. On slow machines, small batches also make more steps.
BATCH, LENGTH = 8, 128
LEARNING_RATE = 4e-3
WARMUP = 0.05
"""Fraction of the time in which the learning rate rises."""
WEIGHT_DECAY = 0.1
PROMPT = b"The with statement "
POINTS = 60
"""Points of the curve of losses."""

Report = Callable[[float, float, float], None]
"""Called after each step with the loss in nats per byte, the number of bytes and the elapsed fraction of the time."""


def weights_name(architecture: str) -> str:
    """The name of the file of weights."""
    return f"{architecture}-bytes.pth"


def check_architecture(function: str, architecture: str) -> None:
    """Raise RangeError unless there is a model of this architecture."""
    if architecture not in MODELS:
        complaints = Complaints(function)
        complaints.add(RangeError, "model", f"one of {', '.join(MODELS)}", shortened(architecture))
        complaints.raise_any()


class Point(NamedTuple):
    """A point of the curve of losses."""

    seconds: float
    tokens: int
    """Bytes of training up to here."""
    loss: float
    """Mean training loss since the last point, in nats per byte."""


@dataclass(frozen=True)
class Trained:
    """The result of a training run. Losses are those of the held-out text, in nats per byte."""

    parameters: int
    tokens: int
    """Bytes of training, with repetitions."""
    seconds: float
    """Time of the training loop without evaluation."""
    loss_before: float
    loss_after: float
    sample: str
    weights: Path
    curve: tuple[Point, ...]

    @property
    def bits_per_byte(self) -> float:
        """``loss_after`` in bits."""
        return self.loss_after / math.log(2)


def train(
    folder: Path, seconds: float = 60.0, console: Console | None = None, seed: int = 0, architecture: str = DEFAULT
) -> Trained:  # fmt: skip
    """Train a byte-level model of about a million parameters on ``text.python_topics()``.

    Uses AdamW. The learning rate rises for a twentieth of the time, then follows a cosine to the end of the time. The initial
    model and the order of the text depend on ``seed`` only; the number of steps depends on the machine. Uses the fastest
    number of threads, see ``threads``.

    folder : Path
        Folder for the weights, for example ``rwkv6-bytes.pth``, in the format of RWKV's authors; ``penstock.models.load`` reads it. Made
        if missing.
    seconds : float
        Time of the training loop, finite and above 0. Evaluation and the sample take a few more seconds.
    console : rich.console.Console, optional
        Shows a progress bar. Default: no progress bar.
    seed : int
        Seed of all random numbers. The global generator is not changed.
    architecture : str
        A name in ``MODELS``.

    Raises RangeError, or PenstockError if the text is missing.
    """
    check_architecture("train", architecture)
    if not (seconds > 0 and math.isfinite(seconds)):
        complaints = Complaints("train")
        complaints.add(RangeError, "seconds", "a finite number above 0", seconds)
        complaints.raise_any()
    folder.mkdir(parents=True, exist_ok=True)
    corpus = text.split(text.python_topics())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CausalLM(MODELS[architecture])
    weights = folder / weights_name(architecture)
    parameters = sum(p.numel() for p in model.parameters())
    probe = windows(corpus.train, torch.Generator().manual_seed(seed))
    with fastest_threads(lambda: cross_entropy(model, probe).backward()):
        model.zero_grad()
        loss_before = evaluate(model, corpus.held_out)
        with _progress(console) as report:
            curve = fit(model, corpus.train, seconds, torch.Generator().manual_seed(seed), report)
        save(model, weights, "blinkdl", overwrite=True)
        loss_after = evaluate(model, corpus.held_out)
        written = sample(model, PROMPT, 300, seed)
    return Trained(parameters, curve[-1].tokens, curve[-1].seconds, loss_before, loss_after, written, weights, tuple(curve))


def fit(model: CausalLM, corpus: Tensor, seconds: float, generator: torch.Generator, report: Report) -> list[Point]:
    """Train on random windows of a uint8 Tensor [bytes] for ``seconds``, at least one step. Returns the curve of losses."""
    optimizer = optimizer_of(model)
    curve: list[Point] = []
    losses: list[float] = []
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
        losses.append(loss.item())
        report(losses[-1], tokens, min(elapsed / seconds, 1.0))
        if elapsed >= min((len(curve) + 1) / POINTS, 1.0) * seconds:
            curve.append(Point(elapsed, tokens, sum(losses) / len(losses)))
            losses.clear()
    return curve


def optimizer_of(model: CausalLM) -> torch.optim.Optimizer:
    """AdamW. Only matrices have weight decay; vectors, norms and the low-rank parts of the mixers do not."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.endswith(".weight")]
    others = [p for name, p in model.named_parameters() if not (p.dim() == 2 and name.endswith(".weight"))]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)


def schedule(share: float) -> float:
    """Factor of the learning rate at a fraction of the time, from 0 to 1: a linear rise, then a cosine.

    >>> [round(schedule(share), 3) for share in (0.0, 0.05, 0.525, 1.0)]
    [0.02, 1.0, 0.51, 0.02]
    """
    if share < WARMUP:
        return 0.02 + 0.98 * share / WARMUP
    return 0.02 + 0.49 * (1 + math.cos(math.pi * min((share - WARMUP) / (1 - WARMUP), 1.0)))


def windows(corpus: Tensor, generator: torch.Generator) -> Tensor:
    """Random windows of a text: int64 [BATCH,LENGTH+1]."""
    begin = torch.randint(len(corpus) - LENGTH, (BATCH, 1), generator=generator)
    return corpus[begin + torch.arange(LENGTH + 1)].long()


def cross_entropy(model: CausalLM, tokens: Tensor) -> Tensor:
    """Mean loss in nats of the predictions of all tokens [B,T+1] but the first."""
    logits, _ = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: CausalLM, held_out: Tensor, length: int = 512) -> float:
    """Mean loss in nats per byte over a uint8 Tensor [bytes], in windows of ``length``; the remainder is left out."""
    count = (len(held_out) - 1) // length
    tokens = held_out[torch.arange(count)[:, None] * length + torch.arange(length + 1)].long()
    losses = [cross_entropy(model, part) * len(part) for part in torch.split(tokens, 16)]  # 16: limits the memory
    return float(sum(losses)) / count


def sample(model: CausalLM, prompt: bytes, count: int, seed: int) -> str:
    """``prompt`` followed by ``count`` generated bytes; bytes that are not UTF-8 become U+FFFD."""
    tokens = torch.tensor([list(prompt)])
    generated = model.generate(tokens, count, temperature=0.7, top_p=0.95, generator=torch.Generator().manual_seed(seed))
    return (prompt + bytes(generated[0].tolist())).decode(errors="replace")


@contextmanager
def _progress(console: Console | None) -> Iterator[Report]:
    """Show a progress bar with the loss, the speed and the remaining time; without a console, nothing."""
    if console is None:
        yield lambda loss, tokens, share: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("training"), BarColumn(), TextColumn("{task.fields[reached]}"), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=1.0, reached="")  # no loss before the first step

        def report(loss: float, tokens: float, share: float) -> None:
            speed = tokens / max(progress.tasks[task].elapsed or 0.0, 1e-9)
            progress.update(task, completed=share, reached=f"loss {loss:.2f}  {speed:,.0f} tokens/s")

        yield report
