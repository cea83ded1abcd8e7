"""Comparison of every form of every implementation with the oracle, on the examples that each declares.

The trials of ``verify`` run only the first form for their sizes, so none that need heads of certain sizes. Here each form runs wherever it
can, even if others are faster. A form for which this device has code and that did not run is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..call.families import Trial
from ..call.implementation import Example, Implementation, Listed
from .comparison import Comparison, row_of
from .finding import Finding


class Walk(NamedTuple):
    """An ordered list of forms, and how one is compared on an example."""

    name: str
    """The implementation or the chain."""
    row: str
    """What findings name as their variant if a form did not run."""
    forms: Iterable[Listed]
    compared: Callable[[Listed, Any, set[str]], Iterator[Finding]]
    """The findings of a form on an example, if it runs there. Adds the forms that ran to the set."""


def walked(walk: Walk, dtypes: tuple[torch.dtype, ...], device: str, only: str | None = None) -> Iterator[Finding]:
    """Yield the findings of the forms of a list for which this device has code, and of those that did not run."""
    ran: set[str] = set()
    examples: dict[str, list[Any]] = {}
    for form in walk.forms:
        if only not in (None, form.name) or form.absent(torch.device(device)) is not None:
            continue
        examples.setdefault(form.name, []).extend(form.examples)
        for example in form.examples:
            if example.dtype in dtypes:
                yield from walk.compared(form, example, ran)
    for name in sorted(examples.keys() - ran):
        drawn = [example.dtype for example in examples[name]]
        if not drawn or any(dtype in dtypes for dtype in drawn):
            reason = "it did not run on any of its examples" if drawn else "it has no examples on which it could run"
            yield Finding(walk.name, device, walk.row, "all", "form", None, None, reason, failed=True, form=name)


def findings(trial: Trial, dtypes: tuple[torch.dtype, ...], device: str, only: str | None = None) -> Iterator[Finding]:
    """Yield the findings of all forms of an operator, on the examples in these dtypes, and of those that did not run.

    ``only``: the name of one form.
    """
    modes = ("advance",) if trial.operator.in_place else ("forward", "backward")
    for one in trial.operator.family.implementations:
        if one.available() is not None:
            continue
        listed = [form for form in one.forms() if form.mode in modes]
        compared = partial(_compared, trial, one, device)
        yield from walked(Walk(one.name, row_of(trial.signatures()[0]), listed, compared), dtypes, device, only)


def _compared(trial: Trial, one: Implementation, device: str, form: Listed, example: Example, ran: set[str]) -> Iterator[Finding]:
    """The findings of a form on an example, if it runs there. Adds the forms that ran to ``ran``."""
    from ..gpu.launch import trying  # needs Triton

    signature = next(found for found in trial.operator.signatures.values() if row_of(found) == example.variant)
    omitted = trial.omitted if example.omitted is None else example.omitted
    trial = replace(trial, sizes={**trial.sizes, **example.sizes}, indices={}, omitted=omitted)
    with trying({}, form.name) as here:
        found = list(Comparison(trial, signature, example.dtype, device).compare(one, form.mode))
    if any(finding.error is not None for finding in found):
        ran |= here
    for finding in found:
        if finding.failed or (finding.error is not None and form.name in here):
            yield replace(finding, form=form.name)
