"""Halving of the residual stream x, which exceeds the range of float16 (65,504) in deep models: x is divided by 2 at regular layers.

After k halvings a layer gets x / 2^k. Its norms divide eps by 4^k, so their results are those of x. The output of its mixers is divided
by 2^k before it can overflow: the inputs of their last linear maps are divided. So a module that replaces such a map, for example an
adapter or a quantised map, needs no change. Powers of two are exact; only numbers below 2^-14, the smallest normal one, lose bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .as_written import altered
from .linear import Linear, linear

if TYPE_CHECKING:
    from .sequences import Sequences


def halved(x: Tensor, sequences: Sequences) -> Tensor:
    """The output of a mixer, or the input of the linear map that computes it, divided by 2 to the power of the number of halvings."""
    return x * 0.5**sequences.halvings if sequences.halvings else x


class Halved:
    """A linear map whose input and bias are divided, and so its result. For other modules with a bias, the result itself is divided."""

    def __init__(self, then: nn.Module, sequences: Sequences) -> None:
        self.then, self.sequences = then, sequences

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [...,inputs] to [...,outputs]."""
        y: Tensor
        then, y = self.then, halved(x, self.sequences)
        if not altered(then, Linear):
            return linear(y, then.weight, None if then.bias is None else halved(then.bias, self.sequences))  # type: ignore[arg-type]
        if any(name.rpartition(".")[2] == "bias" for name, _ in then.named_parameters()):
            return halved(then(x), self.sequences)
        y = then(y)
        return y


def last_map(then: nn.Module, sequences: Sequences) -> Any:
    """The last linear map of a mixer."""
    return Halved(then, sequences) if sequences.halvings else then
