"""Requests of a run: lengths of prompts and completions, and shared prefixes."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import Complaints, RangeError

TOKENS = range(1, 251)
"""Tokens of prompts. They are low: every vocabulary has them, and in the usual vocabularies none of them ends a text."""
LONGEST = 2**20


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths: uniform from ``least`` to ``most``, or exponential with ``mean`` and at least 1.

    >>> Lengths.parse("bench-serve", "prompt", "10-20")
    Lengths(least=10, most=20, mean=None)
    """

    least: int
    most: int
    mean: float | None = None

    @classmethod
    def parse(cls, function: str, option: str, text: str) -> Lengths:
        """From 100 (always), 50-150 (uniform) or exp:100 (exponential). Raises RangeError."""
        found = re.fullmatch(r"(exp:)?([1-9][0-9]{0,6})(?:-([1-9][0-9]{0,6}))?", text)
        wrong = found is None or bool(found[1] and found[3]) or max(int(found[2]), int(found[3] or 0)) > LONGEST
        if wrong or (found is not None and found[3] and int(found[3]) < int(found[2])):
            complaints = Complaints(function)
            rule = f"a number from 1 to {LONGEST}, two with - between, or exp: and a mean"
            complaints.add(RangeError, option, rule, repr(text), "For example 100, 50-150 or exp:100.")
            complaints.raise_any()
        assert found is not None
        least = int(found[2])
        return cls(1, LONGEST, least) if found[1] else cls(least, int(found[3] or least))

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.mean is None:
            return rng.randint(self.least, self.most)
        return min(max(round(rng.expovariate(1 / self.mean)), self.least), self.most)


class Job(NamedTuple):
    """One request."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """The distribution of the requests of a run."""

    prompt: Lengths
    """Tokens of a prompt after its prefix."""
    output: Lengths
    prefix: int = 0
    """Tokens of a shared prefix."""
    prefixes: int = 1
    """The number of different prefixes."""

    def draw(self, count: int, rng: random.Random) -> list[Job]:
        """The requests of a run."""
        prefixes = [rng.choices(TOKENS, k=self.prefix) for _ in range(self.prefixes)]
        return [
            Job(rng.choice(prefixes) + rng.choices(TOKENS, k=self.prompt.draw(rng)), self.output.draw(rng)) for _ in range(count)
        ]  # fmt: skip
