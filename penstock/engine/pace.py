"""How many tokens of prompts a step takes beside the tokens of streams, by the time that steps take. Pure Python.

Streams wait for the prompts in their steps. The goal is that a step with prompts takes at most twice as long as one without, nearly always.
After each ``WINDOW`` of steps that had all of the budget, it grows if the typical step would then take at most ``GOAL`` times as long, and
shrinks if it takes more than ``MOST`` times as long. Steps without prompts are measured as they come, and where prompts leave none, every
``PROBE``-th step is one. Results do not depend on where prompts are cut.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from .request import CHUNK, aligned

GOAL, MOST = 1.85, 1.92
WINDOW = 8
PROBE = 64
START = 256
"""Tokens, until steps were measured."""
GROWTH, DECAY = 1.25, 0.75


class Pace:
    """The budget of prompts.

    most : int
        It is at most this, and at least 64.
    """

    def __init__(self, most: int) -> None:
        self._most = max(CHUNK, aligned(most))
        self.budget = min(START, self._most)
        self._alone: deque[float] = deque(maxlen=WINDOW + 1)
        """Seconds of the last steps without prompts."""
        self._beside: list[float] = []
        """Seconds of steps with as many tokens as the budget has now."""
        self._since = PROBE

    def next(self) -> int:
        """Tokens of prompts that the next step may have beside those of streams. 0: its time shall be measured without them."""
        return 0 if self._since >= PROBE else self.budget

    def measured(self, prompt_tokens: int, seconds: float) -> None:
        """A step with tokens of streams has ended."""
        if not prompt_tokens:
            self._alone.append(seconds)
            self._since = 0
            return
        self._since += 1
        if self._alone and prompt_tokens > self.budget - CHUNK:
            self._beside.append(seconds)
            if len(self._beside) == WINDOW:
                self._adapt(median(self._beside) / median(self._alone))
                self._beside.clear()

    def _adapt(self, ratio: float) -> None:
        larger = min(self._most, max(self.budget + CHUNK, aligned(int(self.budget * GROWTH))))
        if 1 + (ratio - 1) * larger / self.budget <= GOAL:  # or less: a part of the time does not grow with the number of tokens
            self.budget = larger
        elif ratio > MOST:
            self.budget = max(CHUNK, aligned(int(self.budget * DECAY)))
