"""Adapts the prompt budget, the number of prompt tokens in a step with tokens of streams, to measured step times. Pure Python.

Streams wait for the prompts in their steps. The goal is that a step with prompts nearly always takes at most twice as long as one without.
After each ``WINDOW`` of steps that used the whole budget, it grows if the typical step would then take at most ``GOAL`` times as long, and
shrinks if it takes more than ``MOST`` times as long. Steps without prompts are measured as they occur; if every step has prompts, every
``PROBE``-th step runs without. Results do not depend on where prompts are cut.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from .request import CHUNK, aligned

GOAL, MOST = 1.85, 1.92
WINDOW = 8
PROBE = 64
START = 256
"""The budget in tokens until steps are measured."""
GROWTH, DECAY = 1.25, 0.75


class Pace:
    """The prompt budget.

    most : int
        The largest budget. The smallest is 64.
    """

    def __init__(self, most: int) -> None:
        self._most = max(CHUNK, aligned(most))
        self.budget = min(START, self._most)
        self._alone: deque[float] = deque(maxlen=WINDOW + 1)
        """Times of the last steps without prompts, in seconds."""
        self._beside: list[float] = []
        """Times of steps that used the whole current budget, in seconds."""
        self._since = PROBE

    def next(self) -> int:
        """The most prompt tokens of the next step, if it has streams. 0: the step runs without prompts, to measure its time."""
        return 0 if self._since >= PROBE else self.budget

    def measured(self, prompt_tokens: int, seconds: float) -> None:
        """Record the end of a step with tokens of streams."""
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
        if 1 + (ratio - 1) * larger / self.budget <= GOAL:  # an upper bound: a part of the time does not grow with the number of tokens
            self.budget = larger
        elif ratio > MOST:
            self.budget = max(CHUNK, aligned(int(self.budget * DECAY)))
