"""Comparison of every implementation of every operator with its oracle: results, gradients and in-place updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..call.declaration import FLOATS, Signature
from ..recurrence.operators import ADVANCE, RECURRENCE
from ..softmax.operators import ATTENTION
from . import forms
from .comparison import Comparison, Trial
from .finding import Finding

SIZES = {"B": 2, "N": 2, "T": 70, "G": 2, "H": 2, "K": 24, "V": 40}
TRIALS = (
    Trial(RECURRENCE, SIZES, (None, False, True), {}),
    Trial(ADVANCE, SIZES | {"B": 3, "N": 3, "T": 67, "P": 4}, (None,), {"slots": (3, -1, 0)}),
    Trial(ATTENTION, {"B": 2, "Tq": 70, "Tk": 130, "H": 4, "G": 2, "D": 40}, (True, None, 90, True), {}),
)
SQUARE = {"K": 64, "V": 64}
"""Head sizes for implementations that take only those of real models."""


def devices() -> list[str]:
    """The CPU and every GPU that torch can use."""
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def findings(trials: tuple[Trial, ...] = TRIALS, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Iterator[Finding]:
    """Yield the findings of all implementations, and of all their forms, on every device."""
    for device in devices():
        for trial in trials:
            for signature in trial.signatures():
                for dtype in dtypes:
                    yield from _findings(trial, signature, dtype, device)
            yield from forms.findings(trial, dtypes, device)


def _findings(trial: Trial, signature: Signature, dtype: torch.dtype, device: str) -> Iterator[Finding]:
    comparison = Comparison(trial, signature, dtype, device)
    for one in trial.operator.family.implementations:
        found = list(comparison.compare(one))
        if _refused(found) and one.available() is None and "K" in trial.sizes:
            square = replace(trial, sizes={**trial.sizes, **SQUARE})
            again = list(Comparison(square, signature, dtype, device).compare(one))
            found = found if _refused(again) else again
        yield from found


def _refused(found: list[Finding]) -> bool:
    """Whether an implementation refused every mode."""
    return all(one.error is None and not one.failed for one in found)
