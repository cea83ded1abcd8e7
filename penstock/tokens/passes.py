"""The passes of an operator over sequences, as context parallelism runs them on the tokens of one rank: forward, backward, summaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..call.implementation import Upstream
from ..call.operator import Operator
from .summaries import Transition

Tensors = Sequence[Tensor | None]


@dataclass(frozen=True)
class Passes:
    """A call of an operator over sequences with a linear recurrent state, but for its tensors.

    These are q, k, v, others, ``cu_seqlens`` and an initial state, in this order. Its results are the output and the final states.
    """

    operator: Operator[Any]
    function: str
    """The public function, in messages too."""
    options: tuple[Any, ...]
    """Those of the operator. Final states are wanted."""
    impl: str
    transition: Transition
    summary: Callable[[Tensors, Tensor | None, bool], tuple[Tensor, Tensor | None]]
    """Of tokens whose sequences are batch rows, without offsets, and of the state before them: that after them and, if wanted, the columns
    of their transition."""
    adjoint: Callable[[Tensors, Tensor, Tensor | None], Tensor]
    """Of the same tokens, dO and the gradient of the state after them: that of the state before them."""
    shares: bool
    """Whether on a GPU a pass over these tokens alone takes results of their summary (``gpu/sharing.py``) that it computes in any case."""

    @property
    def timed(self) -> list[bool]:
        """For each tensor, whether it has tokens."""
        return ["T" in axes for axes in self.operator.signatures[self.function].axes.values()]

    def call(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Output and final state, without autograd."""
        return tuple(self.operator(self.function, tuple(tensors), self.options, self.impl))  # type: ignore[return-value]

    def forward(self, tensors: Tensors) -> tuple[tuple[Tensor, Tensor], Tensors]:
        """The same and residuals of ``backward``."""
        return self.operator.forward(self.function, tensors, self.options, self.impl)  # type: ignore[return-value]

    def backward(self, tensors: Tensors, d_results: Tensors, residuals: Tensors, wanted: Sequence[bool]) -> Tensors:
        """The gradients of the tensors, from those of the results."""
        upstream = Upstream(tuple(d_results), (), tuple(residuals), tuple(wanted))
        return self.operator.backward(self.function, tensors, self.options, self.impl, upstream)
