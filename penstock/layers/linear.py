"""Linear maps. Those of few tokens without gradients run kernels that read the weights once: a native one on a CPU, Triton's in graphs.

Maps of one input share the sum of its gradients in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call import private
from ..recurrence.cpu import linear as native
from .triton import kernels

Mode = Literal["plain", "alike", "graph"]
_mode: ContextVar[Mode] = ContextVar("penstock_linear", default="plain")
GRAPH_ROWS = 4
"""At most so many tokens of other types run a kernel without tensor cores in a graph on a GPU."""
ROWS = 32
"""Tokens of a linear map of 16 bits in a graph on a GPU, at most, that are few."""
SHARED_ROWS = 128
"""Of several maps in one launch, which has enough programs for larger tiles. One NVIDIA H200, a step of RWKV-6 1.6B: 128 rows 3.54 ms
(4.02 by cuBLAS), 256 rows 4.74 ms (4.41)."""


@contextmanager
def _entered(mode: Mode) -> Iterator[None]:
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def rows_alike() -> AbstractContextManager[None]:
    """The bits of a token do not depend on the number of tokens in linear maps inside, without gradients, where a kernel of ours runs.

    On a CPU this is the native kernel for any number of tokens, on a GPU a Triton kernel.
    """
    return _entered("alike")


def in_graph() -> AbstractContextManager[None]:
    """Launches inside become a CUDA graph, so their cost on the host does not matter: few tokens take a Triton kernel."""
    return _entered("graph")


def mode() -> Mode:
    """Where this code runs; "plain" in compiled graphs."""
    return "plain" if torch.compiler.is_compiling() else _mode.get()


class Linear(nn.Linear):
    """``nn.Linear`` by way of ``linear``."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [...,inputs] to [...,outputs]."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``."""
    where = mode()
    given = (x, weight) if bias is None else (x, weight, bias)
    others = x.device.type != "cpu" and where == "plain"
    odd = weight.dim() != 2 or (bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1]))
    if others or odd or (torch.is_grad_enabled() and any(one.requires_grad for one in given)):
        return F.linear(x, weight, bias)
    compiling = torch.compiler.is_compiling()
    plain = not torch.is_autocast_enabled("cpu") if compiling else private.fast(given) and not private.autocasting()
    if plain and native.takes(x, weight, many=where == "alike"):
        y = _native(x, weight) if compiling else native.linear(x, weight)
    elif plain and where == "alike" and x.dtype == weight.dtype and (product := kernels("product", x, weight)):
        y = product.multiply(x.reshape(-1, x.shape[-1]).contiguous(), weight).view(*x.shape[:-1], weight.shape[0])
    elif few := linears([x], [weight]):
        (y,) = few
    elif plain and where == "graph" and _fewest(x, weight) and (product := kernels("product", x, weight)):
        y = product.multiply_few(x.reshape(-1, x.shape[-1]).contiguous(), weight).view(*x.shape[:-1], weight.shape[0])
    else:
        return F.linear(x, weight, bias)
    return y if bias is None else y + bias


def _fewest(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and 0 < x.numel() <= GRAPH_ROWS * weight.shape[1] and weight.stride(1) == 1


def runs_as_written(one: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a call runs the ``forward`` of one of these classes and nothing else: no subclass, no hooks."""
    hooks = one._forward_pre_hooks or one._forward_hooks or one._backward_pre_hooks or one._backward_hooks or "forward" in vars(one)
    return type(one) in kinds and not hooks


def _plain(one: nn.Module) -> bool:
    return runs_as_written(one, Linear) and one.bias is None


def plain_weights(maps: Sequence[Tensor | nn.Module]) -> list[Tensor] | None:
    """The weights of linear maps, or None if the forward of one must run: it has a bias, hooks, an adapter or a quantized weight."""
    if any(isinstance(one, nn.Module) and not _plain(one) for one in maps):
        return None
    return [one if isinstance(one, Tensor) else one.weight for one in maps]  # type: ignore[misc]


def linears(
    inputs: Sequence[Tensor], maps: Sequence[Tensor | nn.Module], gate: Tensor | None = None, *, relu_squared: bool = False
) -> list[Tensor] | None:
    """Linear maps, or weights, of few tokens by one kernel in a graph on a GPU, or None where it does not compute them.

    With ``relu_squared``, the first result y is relu(y)^2; with ``gate``, it is y sigmoid(gate).
    """
    if mode() != "graph" or torch.is_grad_enabled() or (weights := plain_weights(maps)) is None:
        return None
    x = inputs[0]
    K, launch = x.shape[-1], kernels("few_rows_launch", *inputs, *weights, gate)
    if (
        launch is None
        or not 0 < x.numel() <= (ROWS if len(weights) == 1 else SHARED_ROWS) * K
        or x.element_size() != 2
        or any(one.dtype != x.dtype or one.shape != x.shape for one in inputs)
        or any(one.dtype != x.dtype or not (one.is_contiguous() or (one is weights[0] and one.T.is_contiguous())) for one in weights)
        or (gate is not None and gate.dtype != x.dtype)
        or private.autocasting()
    ):
        return None
    gates = None if gate is None else gate.reshape(-1, gate.shape[-1]).contiguous()
    found = launch.products([one.reshape(-1, K).contiguous() for one in inputs], weights, gates, relu_squared=relu_squared)
    return [y.view(*x.shape[:-1], -1) for y in found]


def linears_of(x: Tensor, maps: Sequence[nn.Module]) -> list[Tensor]:
    """Linear maps of one input."""
    if few := linears([x] * len(maps), maps):
        return few
    weights = plain_weights(maps) if len(maps) > 1 and torch.is_grad_enabled() and x.requires_grad else None
    if weights is None or not private.fast((x, *weights)) or private.autocasting() or any(one.dtype != x.dtype for one in weights):
        return [one(x) for one in maps]
    return list(SharedInput.apply(x, *weights))  # type: ignore[no-untyped-call]


class SharedInput(torch.autograd.Function):
    """Linear maps of x [...,K] by weights [N,K]. Each product of the backward pass is added to the gradient of x as it is written.

    Autograd alone stores each product and then reads and writes it again for the sum.
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
        for dy, weight, wanted in zip(d_results, weights, ctx.needs_input_grad[1:]):
            flat = None if dy is None else dy.reshape(-1, dy.shape[-1])
            if flat is not None and ctx.needs_input_grad[0]:
                dx = flat @ weight if dx is None else dx.addmm_(flat, weight)
            d_weights.append(flat.T @ x.reshape(-1, x.shape[-1]) if flat is not None and wanted else None)
        return None if dx is None else dx.view(x.shape), *d_weights


@torch.library.custom_op("penstock::linear_of_few_rows", mutates_args=())
def _native(x: Tensor, weight: Tensor) -> Tensor:
    """The native kernel in compiled graphs."""
    return native.linear(x, weight)


@_native.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
