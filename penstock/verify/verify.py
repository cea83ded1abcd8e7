"""Comparison of every implementation of every operator with its oracle: results, gradients and in-place updates.

Then that of every form: of the implementations, and of the chains of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..call.declaration import FLOATS, Signature
from ..call.families import Trial
from ..call.families import trials as of_all_families
from . import chains, forms
from .comparison import Comparison
from .finding import Finding


def devices() -> list[str]:
    """The CPU and every GPU that torch can use."""
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def findings(trials: tuple[Trial, ...] | None = None, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Iterator[Finding]:
    """Yield the findings of all implementations, of all their forms, and of all forms of chains, on every device.

    ``trials``: only these operators, without chains.
    """
    for device in devices():
        for trial in of_all_families() if trials is None else trials:
            for signature in trial.signatures():
                for dtype in dtypes:
                    yield from _findings(trial, signature, dtype, device)
            yield from forms.findings(trial, dtypes, device)
        for chain in () if trials is not None else chains.chains():
            yield from chains.findings(chain, dtypes, device)


def _findings(trial: Trial, signature: Signature, dtype: torch.dtype, device: str) -> Iterator[Finding]:
    comparison = Comparison(trial, signature, dtype, device)
    for one in trial.operator.family.implementations:
        found = list(comparison.compare(one))
        if _refused(found) and one.available() is None and trial.common:
            common = replace(trial, sizes={**trial.sizes, **trial.common})
            again = list(Comparison(common, signature, dtype, device).compare(one))
            found = found if _refused(again) else again
        yield from found


def _refused(found: list[Finding]) -> bool:
    """Whether an implementation refused every mode."""
    return all(one.error is None and not one.failed for one in found)
