"""Element-wise functions of layers, with derivatives that are relatively exact everywhere.

torch takes the derivatives of sigmoid and tanh from their rounded results, as y (1 - y) and 1 - y^2. Where y is near 1 this is a
difference of two nearly equal numbers: in bfloat16 the derivative of sigmoid is 17 % off at 5 and 0 from 7 on. Here derivatives are
functions of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..call import private
from ..call.autocast import without_autocast
from ..call.functions import applied
from ..tokens.dtypes import state_dtype
from ..tokens.feature_maps import FEATURE_MAPS
from .chains import Chain, ChainForm, launches, plain
from .examples import examples
from .triton import launching, refusal


@dataclass(frozen=True)
class Pointwise:
    """An element-wise function."""

    name: str
    """The name of the kernels' constant in ``triton/gates.py``."""
    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    """Its derivative, in operations that autograd differentiates exactly."""
    formula: Callable[[Tensor], Tensor]
    """The function in such operations, for compiled graphs and transforms."""

    def __call__(self, x: Tensor) -> Tensor:
        """The function of each element."""
        return without_autocast(x, self._apply, x)

    def _apply(self, x: Tensor) -> Tensor:
        return POINTWISE(_Point(x, self))


class _Point(NamedTuple):
    """The arguments of a ``Pointwise``."""

    x: Tensor
    kind: Pointwise


def _by_formula(c: _Point) -> Tensor:
    x, kind = c
    if private.fast((x,)):
        return applied(_Pointwise, x, kind) if torch.is_grad_enabled() else kind.function(x)
    compiled_inference = torch.compiler.is_compiling() and not torch.is_grad_enabled()
    return kind.function(x) if compiled_inference else kind.formula(x)


POINTWISE: Chain[_Point, Tensor] = Chain(
    "pointwise",
    ChainForm(
        "pointwise", lambda c: applied(_Pointwise, *c), lambda c: refusal(c.x),
        launches("penstock_pointwise_fwd", backward=("penstock_pointwise_bwd",)),
        (
            *examples(lambda draw: _Point(draw("x", 3, draw.size(700, 1024), scale=4), sigmoid)),
            *examples(lambda draw: _Point(draw("x", 3, draw.size(700, 160), scale=2), tanh)),
            *examples(lambda draw: _Point(draw("x", 3, draw.size(700, 2048), scale=4), elu_plus_one)),
        ),
    ),
    plain("formula", _by_formula),
)  # fmt: skip


class _Pointwise(torch.autograd.Function):
    """A function whose derivative is computed from its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Pointwise) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return kind.function(x) if refusal(x) is not None else launching("launch").pointwise(x, kind.name)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled() or refusal(x, dy) is not None:
            return dy * ctx.kind.slope(x), None
        return launching("launch").pointwise_backward(x, dy, ctx.kind.name), None


def _wide(x: Tensor) -> Tensor:
    return x.to(state_dtype(x.dtype))


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), exact in float64: torch's softplus returns x from 20 on. Second derivatives of torch's logsigmoid are less exact."""
    return F.softplus(x, threshold=40)


def _bell(x: Tensor) -> Tensor:
    """sigmoid(x) sigmoid(-x)."""
    return torch.exp(-_softplus(x) - _softplus(-x))


def _sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-_softplus(-_wide(x))).to(x.dtype)


def _tanh(x: Tensor) -> Tensor:
    """Tanh: far from 0 by sigmoid(-2 abs(x)), whose derivative is exact; near 0 by tanh, where the difference from 1 loses digits."""
    wide = _wide(x)
    far = wide.sign() * (1 - 2 * torch.exp(-_softplus(2 * wide.abs())))
    return torch.where(wide.abs() < 0.5, torch.tanh(wide), far).to(x.dtype)


sigmoid: Pointwise = Pointwise("sigmoid", torch.sigmoid, lambda x: _bell(_wide(x)).to(x.dtype), _sigmoid)
tanh: Pointwise = Pointwise("tanh", torch.tanh, lambda x: (4 * _bell(2 * _wide(x))).to(x.dtype), _tanh)
elu_plus_one: Pointwise = Pointwise("elu+1", FEATURE_MAPS["elu+1"], lambda x: torch.exp(x.clamp(max=0)), FEATURE_MAPS["elu+1"])

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **FEATURE_MAPS,
    "elu+1": elu_plus_one,
    "silu": F.silu,
    "sigmoid": sigmoid,
    "squared_relu": lambda x: F.relu(x).square(),
}
"""The feature maps of layers."""
