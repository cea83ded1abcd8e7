"""Runs: many concurrent requests, and their statistics."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from .client import Answer, Target
from .workload import Job


@dataclass(frozen=True)
class Load:
    """The arrival of requests: a number of clients that each wait for an answer (closed loop), or a rate (open loop)."""

    clients: int | None = None
    rate: float | None = None
    """Requests a second on average; their times are a Poisson process."""

    def __str__(self) -> str:
        return f"{self.clients} client{'s' * (self.clients != 1)}" if self.clients is not None else f"{self.rate:g} a second"


@dataclass(frozen=True)
class Times:
    """Quantiles, in seconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Times | None:
        """None without values."""
        ranked = sorted(values)
        return cls(quantile(ranked, 0.5), quantile(ranked, 0.99)) if ranked else None


@dataclass(frozen=True)
class Run:
    """The statistics of one run. Failed requests count only in ``failed``."""

    load: Load
    requests: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first: Times | None
    """From sending a request to its first token."""
    between: Times | None
    """Between two pieces of a completion. A piece is one token, or several if the server or this client lags."""
    whole: Times | None
    """From sending a request to its end."""
    failed: dict[str, int] = field(default_factory=dict)
    """The number of requests by reason."""

    @property
    def output_rate(self) -> float:
        """Generated tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Tokens of prompts and generated ones a second."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def cached_share(self) -> float:
        """The fraction of prompt tokens that came from the server's cache."""
        return self.cached_tokens / max(self.prompt_tokens, 1)


def quantile(ranked: Sequence[float], share: float) -> float:
    """A quantile of sorted values, with linear interpolation.

    >>> quantile([1, 2, 3, 4, 5], 0.5), quantile([0, 10], 0.99)
    (3.0, 9.9)
    """
    place = (len(ranked) - 1) * share
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


async def run(target: Target, jobs: Sequence[Job], load: Load, rng: random.Random, done: Callable[[], None] = lambda: None) -> Run:
    """Send all requests; ``done`` is called after each."""
    answers: list[Answer] = []

    async def send(job: Job) -> None:
        answers.append(await target.complete(job))
        done()

    async def client(left: list[Job]) -> None:
        while left:
            await send(left.pop())

    begin = perf_counter()
    if load.clients is not None:
        left = list(reversed(jobs))
        await asyncio.gather(*(client(left) for _ in range(load.clients)))
    else:
        assert load.rate is not None
        sent, at = [], begin
        for job in jobs:
            await asyncio.sleep(max(at - perf_counter(), 0))
            sent.append(asyncio.ensure_future(send(job)))
            at += rng.expovariate(load.rate)
        await asyncio.gather(*sent)
    return summary(load, answers, perf_counter() - begin)


def summary(load: Load, answers: Sequence[Answer], seconds: float) -> Run:
    """The statistics of the answers of a run."""
    good = [one for one in answers if one.error is None]
    return Run(
        load, len(answers), seconds,
        prompt_tokens=sum(one.prompt_tokens for one in good),
        cached_tokens=sum(one.cached_tokens for one in good),
        output_tokens=sum(one.output_tokens for one in good),
        first=Times.of([one.tokens[0] - one.sent for one in good if one.tokens]),
        between=Times.of([later - earlier for one in good for earlier, later in zip(one.tokens, one.tokens[1:])]),
        whole=Times.of([one.done - one.sent for one in good]),
        failed=dict(Counter(one.error for one in answers if one.error is not None)),
    )  # fmt: skip
