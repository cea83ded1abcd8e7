"""The learning rate of each step."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "linear", "constant")


def rate(step: int, schedule: str, warmup: int, steps: int) -> float:
    """The learning rate of a step as a fraction of the largest one, above 0 for every step.

    It rises linearly from 1 / warmup to 1 in the first ``warmup`` steps, then stays, or falls towards 0 after the last step.

    step : int
        Counted from 0.
    schedule : str
        One of ``SCHEDULES``.
    warmup, steps : int
        Steps of the warm-up, and all steps.

    >>> [rate(step, "linear", 2, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    if schedule == "constant":
        return 1.0
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
