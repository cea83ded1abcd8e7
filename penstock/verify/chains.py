"""Comparison of every form of every chain of layers with the chain's formula, on the examples that each form declares.

The exact results are those of the formula in float64. A form may err by the budget of one rounding and by twice the error of the formula
in its own dtype, which rounds between its operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import layers, models  # their chains are known when they are imported
from ..call.implementation import Listed
from ..gpu.target import interpreting
from ..layers.chains import CHAINS, Chain
from ..layers.examples import Draw, Example
from . import forms, oracle
from .finding import LAYERS, Finding
from .machine import using_threads

assert layers and models  # noqa: PT018


def chains() -> tuple[Chain[Any, Any], ...]:
    """All chains."""
    return tuple(CHAINS.values())


def findings(chain: Chain[Any, Any], dtypes: tuple[torch.dtype, ...], device: str, only: str | None = None) -> Iterator[Finding]:
    """Yield the findings of all forms of a chain, on the examples in these dtypes, and of those that did not run.

    ``only``: the name of one form.
    """
    yield from forms.walked(forms.Walk(chain.name, LAYERS, chain.listed(), partial(_compared, chain, device)), dtypes, device, only)


def _compared(chain: Chain[Any, Any], device: str, form: Listed, example: Example, ran: set[str]) -> Iterator[Finding]:
    """The findings of a form on an example, if it runs there. Adds the forms that ran to ``ran``."""
    at = chain.name, device, LAYERS, str(example.dtype).removeprefix("torch.")
    own = chain.form(form.name)
    if interpreting() and example.dtype == torch.bfloat16 and not own.compiles:
        return  # the interpreter truncates to bfloat16 where it should round
    draw = Draw(example.dtype, torch.device(device), gradients=example.gradients)
    try:
        with _gradients(example), example.within():
            call = example.draw(draw)
            if own.refuses(call) is not None:
                return
            computed = chain.computed(call, form.name)
            if computed is None:
                return
            ran.add(form.name)
            found = _results(draw, computed)
    except Exception as failure:  # any failure of a kernel on this machine is a finding
        ran.add(form.name)
        yield Finding(*at, "all", None, None, f"{type(failure).__name__}: {failure}", failed=True, form=form.name)
        return
    exact, rounded = (_by_formula(chain, example, device, exact=exact) for exact in (True, False))
    if found.keys() != exact.keys():
        reason = f"its results are {', '.join(found)}, those of the formula {', '.join(exact)}"
        yield Finding(*at, "all", None, None, reason, failed=True, form=form.name)
        return
    for name, value in found.items():
        error = oracle.error(value.cpu(), exact[name])
        allowed = oracle.budget(example.dtype, value.dtype) + 2 * oracle.error(rounded[name].cpu(), exact[name])
        yield Finding(*at, name, error, allowed, failed=not error <= allowed, form=form.name)


def _gradients(example: Example) -> AbstractContextManager[object]:
    return torch.set_grad_enabled(example.gradients)


def _by_formula(chain: Chain[Any, Any], example: Example, device: str, *, exact: bool) -> dict[str, Tensor]:
    draw = Draw(example.dtype, torch.device("cpu" if exact else device), exact=exact, gradients=example.gradients)
    with _gradients(example), using_threads(1):
        return _results(draw, chain.computed(example.draw(draw)))


def _results(draw: Draw, returned: Any) -> dict[str, Tensor]:
    """The results by name, and the gradients of all drawn tensors."""
    results = list(tensors(returned))
    found = {f"result {n}": y.detach() for n, y in enumerate(results)}
    if not draw.gradients:
        return found
    random = torch.Generator().manual_seed(1)
    results = [y for y in results if y.requires_grad]
    upstream = [torch.randn(y.shape, dtype=torch.float64, generator=random).to(draw.dtype).to(y) for y in results]
    gradients = torch.autograd.grad(results, list(draw.leaves.values()), upstream, allow_unused=True)
    return found | {f"gradient of {name}": dx for name, dx in zip(draw.leaves, gradients) if dx is not None}


def tensors(returned: Any) -> Iterator[Tensor]:
    """The tensors of a result."""
    if isinstance(returned, Tensor):
        yield returned
    elif isinstance(returned, tuple | list):
        for one in returned:
            yield from tensors(one)
