"""An implementation: a few functions of a ``Problem``, with a name.

The contract tests compare every implementation of an operator with its oracle. They find it in its family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .derivatives import Tensors, gradients_of
from .problem import Problem

Mode = Literal["forward", "backward", "advance"]


class Upstream(NamedTuple):
    """The arguments of a backward pass besides its problem."""

    gradients: tuple[Tensor | None, ...]
    """Gradients of the results, in their order. The first is never None."""
    results: tuple[Tensor, ...] = ()
    """The results that the declaration marks as saved."""
    residuals: tuple[Tensor | None, ...] = ()
    """The residuals of ``forward_with_residuals``; empty if another function ran the forward pass."""
    wanted: tuple[bool, ...] = ()
    """For each differentiable argument, whether its gradient is needed; empty if all are."""


class Example(NamedTuple):
    """A small call in the domain of a form."""

    variant: str
    """The name of the signature's row, or of the function where signatures have no rows."""
    dtype: torch.dtype
    sizes: Mapping[str, int]
    """Sizes by axis."""
    omitted: tuple[str, ...] | None = None
    """Optional arguments that are not given, in place of those of the operator's trial."""


class Listed(NamedTuple):
    """A form of an implementation: one of its kernels, or a fixed group of kernels (``gpu/forms.py``)."""

    mode: Mode
    name: str
    examples: tuple[Any, ...]
    """Small calls in its domain, with a field ``dtype``. Of the forms of families each is an ``Example``."""
    absent: Callable[[torch.device], str | None]
    """Why a device has no code of it, or None."""


class FormVerdict(NamedTuple):
    """The answer of one form for a call."""

    part: str
    """The pass, or the part of it, that the form computes."""
    name: str
    reason: str | None
    """Why it does not run, or None."""


def always() -> str | None:
    """The default of ``available``: runs on every machine."""
    return None


def never(problem: Any, mode: Mode) -> str | None:
    """The default of ``refuses`` and ``avoids``: takes every problem."""
    return None


def no_forms() -> tuple[Listed, ...]:
    """The default of ``forms``: an implementation that is not made of forms."""
    return ()


def no_verdicts(problem: Any, mode: Mode) -> tuple[FormVerdict, ...]:
    """The default of ``verdicts``."""
    return ()


def exact_operands(dtype: torch.dtype, mode: Mode) -> int | None:
    """The default of ``operands``: products do not round their operands."""
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator."""

    name: str
    summary: str
    forward: Callable[[Any], Tensors]
    """The results, in their order; None where a result is not wanted."""
    backward: Callable[[Any, Upstream], Tensors] | None = None
    """Gradients of the differentiable arguments, in their order, None for arguments that are missing or need no gradient. If this is None,
    ``forward`` consists of differentiable PyTorch operations, and autograd computes its gradients."""
    advance: Callable[[Any], Tensor] | None = None
    """The output of an operator in place; it updates the written argument. A refused call changes nothing."""
    forward_with_residuals: Callable[[Any], tuple[Tensors, Tensors]] | None = None
    """``forward`` for calls that need gradients: the results, and residuals for ``backward``."""
    available: Callable[[], str | None] = always
    """Why it cannot run on this machine, or None."""
    refuses: Callable[[Any, Mode], str | None] = never
    """Why it cannot take this problem in this mode, or None. Must not depend on values, and on the number of tokens only through
    ``counts``."""
    avoids: Callable[[Any, Mode], str | None] = never
    """Why ``impl="auto"`` skips it for a problem that it can take, or None."""
    attached: bool = False
    """Whether autograd may track ``forward`` directly in eager calls: its results depend on all differentiable arguments."""
    operands: Callable[[torch.dtype, Mode], int | None] = exact_operands
    """The significant bits that its products round their operands to for inputs of this dtype in a mode, or None if they do not."""
    forms: Callable[[], tuple[Listed, ...]] = no_forms
    """Its forms, in the order in which they are asked. Only where it is available."""
    verdicts: Callable[[Any, Mode], tuple[FormVerdict, ...]] = no_verdicts
    """For a problem that it takes: which forms run, and why not those before them."""

    def refusal(self, problem: Problem, mode: Mode) -> str | None:
        """Why it cannot take a problem on this machine, or None."""
        reason = self.available() or self.refuses(problem, mode)
        if reason is None and mode == "advance" and self.advance is None:
            return "it has no form that works in place"
        return reason

    def gradients(self, problem: Problem, upstream: Upstream) -> Tensors:
        """Gradients by ``backward``, or by autograd through ``forward``."""
        return gradients_of(self.forward, problem, upstream.gradients) if self.backward is None else self.backward(problem, upstream)
