"""What an implementation is: a few functions of a ``Problem``, under a name.

The contract tests hold every implementation of an operator to its oracle without being told of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .derivatives import Tensors, gradients_of
from .problem import Problem

Mode = Literal["forward", "backward", "advance"]


class Upstream(NamedTuple):
    """What a backward pass takes besides its problem."""

    gradients: tuple[Tensor | None, ...]
    """Of the results, in their order. The first is never None."""
    results: tuple[Tensor, ...] = ()
    """Those results that the declaration marks as saved."""
    residuals: tuple[Tensor | None, ...] = ()
    """What ``forward_with_residuals`` returned besides; empty if something else ran forward."""
    wanted: tuple[bool, ...] = ()
    """Which gradients are wanted, by differentiable argument; empty for all."""


def always() -> str | None:
    """For implementations that run on every machine."""
    return None


def never(problem: Any, mode: Mode) -> str | None:
    """For implementations that take every problem."""
    return None


def exact_operands(dtype: torch.dtype) -> int | None:
    """For implementations whose products take their operands as they are."""
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator."""

    name: str
    summary: str
    forward: Callable[[Any], Tensors]
    """The results, in their order; None where a result is not wanted."""
    backward: Callable[[Any, Upstream], Tensors] | None = None
    """Gradients of the differentiable arguments, in their order, None for those that are absent or not wanted. If this is None,
    ``forward`` consists of differentiable PyTorch operations, and its gradients are autograd's."""
    advance: Callable[[Any], Tensor] | None = None
    """The output of an operator that works in place; the argument is updated. A refused call changes nothing."""
    forward_with_residuals: Callable[[Any], tuple[Tensors, Tensors]] | None = None
    """``forward`` where gradients will be wanted: its results, and residuals for ``backward``."""
    available: Callable[[], str | None] = always
    """Why it cannot run on this machine at all, or None."""
    refuses: Callable[[Any, Mode], str | None] = never
    """Why it cannot take this problem in this mode, or None. Must not depend on values; on how many tokens there are only by ``counts``."""
    avoids: Callable[[Any, Mode], str | None] = never
    """Why ``impl="auto"`` passes it over for a problem that it can take, or None."""
    attached: bool = False
    """Whether eager calls need no node of autograd around ``forward``: its results always depend on all differentiable arguments."""
    operands: Callable[[torch.dtype], int | None] = exact_operands
    """The significant bits that its products round their operands to for inputs of this dtype, or None if they do not."""

    def refusal(self, problem: Problem, mode: Mode) -> str | None:
        """Why it cannot take a problem, here or at all; None if it can."""
        reason = self.available() or self.refuses(problem, mode)
        if reason is None and mode == "advance" and self.advance is None:
            return "it has no form that works in place"
        return reason

    def gradients(self, problem: Problem, upstream: Upstream) -> Tensors:
        """Those of ``backward``, or of autograd through ``forward``."""
        return gradients_of(self.forward, problem, upstream.gradients) if self.backward is None else self.backward(problem, upstream)
