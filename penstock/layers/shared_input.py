"""Linear maps of one input, which accumulate its gradient in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call import private
from ..call.autocast import no_autocast
from ..call.functions import applied
from .chains import Chain, ChainForm, native, plain
from .examples import HALF, Draw, examples
from .linear import (
    Linears,
    as_products,
    called_alone,
    drawn_map,
    plain_weights,
    product_dtype,
    products,
    products_kernels,
    products_natively,
    refuses_natively,
    refuses_products,
    which_is_called,
)
from .modes import in_graph
from .quantization import Kind
from .quantized import computed_together, of_kinds, refuses_together


def linears_of(x: Tensor, maps: Sequence[Tensor | nn.Module]) -> list[Tensor]:
    """Linear maps, or weights, of one input."""
    return LINEARS_OF(_LinearsOf(x, tuple(maps)))


class _LinearsOf(NamedTuple):
    """The arguments of ``linears_of``."""

    x: Tensor
    maps: tuple[Tensor | nn.Module, ...]
    """Modules, or weights."""

    @property
    def each(self) -> Linears:
        """The same with an input for each map."""
        return Linears((self.x,) * len(self.maps), self.maps)


def _refuses_shared_input(c: _LinearsOf) -> str | None:
    if len(c.maps) < 2 or not torch.is_grad_enabled() or not c.x.requires_grad:
        return "there is one map, or no gradient of its input"
    if (weights := plain_weights(c.maps)) is None:
        return which_is_called(c.maps)
    if not private.fast((c.x, *weights)):
        return "the call is traced, transformed or in a mode, or a tensor is of a subclass"
    return "weights and tokens must have one dtype" if len({product_dtype(one) for one in (c.x, *weights)}) > 1 else None


def _shared_input(c: _LinearsOf) -> list[Tensor]:
    given = as_products(c.x, *(plain_weights(c.maps) or ()))
    return list(applied(SharedInput, *given))


def _draw(draw: Draw, kind: Kind | None = None) -> _LinearsOf:
    K, outputs = draw.size(40, 2048), (draw.size(24, 2048), draw.size(8, 512), draw.size(33, 512))
    maps = tuple(drawn_map(draw, f"map {n}", count, K, kind) for n, count in enumerate(outputs))
    return _LinearsOf(draw("x", 1, 3, K), (*maps, draw.learned("weight", 3, K, scale=0.2)))


LINEARS_OF: Chain[_LinearsOf, list[Tensor]] = Chain(
    "linears_of",
    native(
        "native", "products", lambda c: products_natively(c.each), lambda c: refuses_natively(c.each), examples(_draw, gradients=False)
    ),
    ChainForm(
        "products", lambda c: products(c.each), lambda c: refuses_products(c.each), lambda c: products_kernels(c.each),
        examples(_draw, *HALF, gradients=False, within=in_graph),
    ),
    ChainForm(
        "quantized", lambda c: computed_together(c.each.inputs, c.maps, called_alone), lambda c: refuses_together(c.each.inputs, c.maps),
        lambda c: ("penstock_quantized_products",), of_kinds(_draw, *HALF, within=in_graph),
    ),
    plain("shared_input", _shared_input, _refuses_shared_input, examples(_draw)),
    plain("modules", lambda c: [called_alone(one, c.x) for one in c.maps]),
)  # fmt: skip


class SharedInput(torch.autograd.Function):
    """Linear maps of x [...,K] by weights [N,K]. Each backward product accumulates into the gradient of x as it is written.

    Plain autograd stores each product, then reads and writes it again for the sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """The results."""
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the weights, by operations that can be differentiated again."""
        x, *weights = ctx.saved_tensors
        dx, d_weights = None, []
        given = [dy for dy in d_results if dy is not None]
        add = Tensor.addmm if any(map(private.batched, given)) else Tensor.addmm_  # under vmap only some may be batches
        with no_autocast(x):  # autocast would round only the products that are not added in place
            for dy, weight, wanted in zip(d_results, weights, ctx.needs_input_grad[1:]):
                flat = None if dy is None else dy.reshape(-1, dy.shape[-1])
                if flat is not None and ctx.needs_input_grad[0]:
                    dx = flat @ weight if dx is None else add(dx, flat, weight)
                d_weights.append(flat.T @ x.reshape(-1, x.shape[-1]) if flat is not None and wanted else None)
        return None if dx is None else dx.view(x.shape), *d_weights
