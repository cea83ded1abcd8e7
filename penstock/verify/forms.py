"""Comparison of every form of every implementation with the oracle, on the examples that each declares.

The trials of ``verify`` run only the first form for their sizes, so none that need heads of certain sizes. Here each form runs wherever it
can, even if others are faster. A form for which this device has code and that did not run is a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..call.families import Trial
from ..call.implementation import Example, Implementation, Listed
from .comparison import Comparison, row_of
from .finding import Finding


def findings(trial: Trial, dtypes: tuple[torch.dtype, ...], device: str, only: str | None = None) -> Iterator[Finding]:
    """Yield the findings of all forms of an operator, on the examples in these dtypes, and of those that did not run.

    ``only``: the name of one form.
    """
    there = torch.device(device)
    modes = ("advance",) if trial.operator.in_place else ("forward", "backward")
    for one in trial.operator.family.implementations:
        if one.available() is not None:
            continue
        ran: set[str] = set()
        examples: dict[str, list[Example]] = {}
        for form in one.forms():
            if form.mode not in modes or only not in (None, form.name) or form.absent(there) is not None:
                continue
            examples.setdefault(form.name, []).extend(form.examples)
            for example in form.examples:
                if example.dtype in dtypes:
                    yield from _compared(trial, one, form, example, device, ran)
        for name in sorted(examples.keys() - ran):
            drawn = [example.dtype for example in examples[name]]
            if not drawn or any(dtype in dtypes for dtype in drawn):
                reason = "it did not run on any of its examples" if drawn else "it has no examples on which it could run"
                yield Finding(one.name, device, row_of(trial.signatures()[0]), "all", "form", None, None, reason, failed=True, form=name)


def _compared(trial: Trial, one: Implementation, form: Listed, example: Example, device: str, ran: set[str]) -> Iterator[Finding]:
    """The findings of a form on an example, if it runs there. Adds the forms that ran to ``ran``."""
    from ..gpu.launch import trying  # needs Triton

    signature = next(found for found in trial.operator.signatures.values() if row_of(found) == example.variant)
    trial = replace(trial, sizes={**trial.sizes, **example.sizes}, indices={})
    with trying({}, form.name) as here:
        found = list(Comparison(trial, signature, example.dtype, device).compare(one, form.mode))
    if any(finding.error is not None for finding in found):
        ran |= here
    for finding in found:
        if finding.failed or (finding.error is not None and form.name in here):
            yield replace(finding, form=form.name)
