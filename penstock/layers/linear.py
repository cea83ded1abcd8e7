"""Linear maps. For few tokens without gradients, kernels read the weights once: a native kernel on a CPU, Triton kernels in CUDA graphs.

In training, linear maps of one input accumulate its gradient in one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call import private, recompute
from ..call.autocast import autocasting, cast, no_autocast
from ..recurrence.cpu import linear as native
from .as_written import altered, remembered
from .triton import kernels


class Mode(NamedTuple):
    """The context in which linear maps run."""

    alike: bool = False
    """Inside ``rows_alike``."""
    graph: bool = False
    """Inside ``in_graph``."""


PLAIN = Mode()
_mode: ContextVar[Mode] = ContextVar("penstock_linear", default=PLAIN)
GRAPH_ROWS = 4
"""The most tokens of other dtypes for which a kernel without tensor cores runs, in a graph on a GPU."""
_counts: ContextVar[dict[tuple[object, ...], Tensor] | None] = ContextVar("penstock_counts", default=None)
"""Zeros that the launches of one context share. They run on one stream, one after another."""


@contextmanager
def _entered(**changed: bool) -> Iterator[None]:
    counts = None if changed.get("graph") else _counts.get()
    tokens = _mode.set(_mode.get()._replace(**changed)), _counts.set({} if counts is None else counts)
    try:
        yield
    finally:
        _mode.reset(tokens[0])
        _counts.reset(tokens[1])


def rows_alike() -> AbstractContextManager[None]:
    """Linear maps in this block compute each token independently of the number of tokens, to the bit, where our kernels run.

    They run without gradients: on a CPU the native kernel for any number of tokens, on a GPU a Triton kernel.
    """
    return _entered(alike=True)


def in_graph() -> AbstractContextManager[None]:
    """Launches in this block are captured in a CUDA graph, so launch overhead does not matter: few tokens take a Triton kernel.

    Enter it once per graph: memory that its launches share is allocated inside and belongs to the graph.
    """
    return _entered(graph=True)


def mode() -> Mode:
    """The current context; ``PLAIN`` in compiled graphs."""
    return PLAIN if torch.compiler.is_compiling() else _mode.get()


def ready(parameters: Sequence[Tensor | None], read: Sequence[Tensor | None]) -> bool:
    """Whether a kernel may read these tensors, made of ``parameters``, before the previous kernel ends.

    No kernel of a graph writes parameters. Outside graphs the previous kernel may update them. A copy or a cast may be its result.
    """
    if not mode().graph:
        return False
    pairs = [(one, other) for one, other in zip(parameters, read) if one is not None and other is not None]
    return all(isinstance(one, nn.Parameter) and one.data_ptr() == other.data_ptr() for one, other in pairs)


@remembered
class Linear(nn.Linear):
    """``nn.Linear`` that calls ``linear``."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [...,inputs] to [...,outputs]."""
        return linear(x, self.weight, self.bias)


def as_products(*tensors: Tensor) -> list[Tensor]:
    """These tensors as linear maps cast them under autocast. Selective recomputation saves no rounded parameters."""
    if not private.autocasting() or not tensors:
        return list(tensors)
    rounded: Any = cast(tensors, [True] * len(tensors))
    for one, x in zip(rounded, tensors):
        if one is not x and _is_parameter(x):
            recompute.again(one, methodcaller("to", one.dtype), x)
    return list(rounded)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of ``as_products`` of a floating-point tensor."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if autocasting(kind) and x.dtype != torch.float64 else x.dtype


def _is_parameter(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def linear_again(x: Tensor, module: nn.Module) -> Tensor:
    """A linear map of x [...,K] with a small K: selective recomputation saves x, not the result."""
    y: Tensor = module(x)
    return recompute.again(y, F.linear, x, module.weight, module.bias) if not altered(module, Linear) else y  # type: ignore[arg-type]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``."""
    where = mode()
    given = (x, weight) if bias is None else (x, weight, bias)
    others = x.device.type != "cpu" and where == PLAIN
    odd = x.shape[-1:] != weight.shape[1:] or (bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1]))
    if others or odd or (torch.is_grad_enabled() and any(one.requires_grad for one in given)):
        return F.linear(*(as_products(*given) if recompute.active() and private.fast(given) else given))
    compiling = torch.compiler.is_compiling()
    plain = not torch.is_autocast_enabled("cpu") if compiling else private.fast(given) and not private.autocasting()
    if plain and native.takes(x, weight, many=where.alike):
        y = _native(x, weight) if compiling else native.linear(x, weight)
    elif few := linears([x], [weight]):
        (y,) = few
    elif plain and where.alike and x.dtype == weight.dtype and (product := kernels("product", x, weight)):
        y = product.multiply(x.reshape(-1, x.shape[-1]).contiguous(), weight).view(*x.shape[:-1], weight.shape[0])
    elif plain and where == Mode(graph=True) and _fewest(x, weight) and (product := kernels("product", x, weight)):
        y = product.multiply_few(x.reshape(-1, x.shape[-1]).contiguous(), weight).view(*x.shape[:-1], weight.shape[0])
    else:
        return F.linear(x, weight, bias)
    return y if bias is None else y + bias


def _fewest(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and 0 < x.numel() <= GRAPH_ROWS * weight.shape[1] and weight.stride(1) == 1


def called(one: Any) -> str | None:
    """Why a linear map must be called, or None: it has a bias, hooks, an adapter or a quantized weight, or is no module."""
    if not isinstance(one, nn.Module):
        return f"is a {type(one).__name__}"
    why = altered(one, Linear)
    return "has a bias" if why is None and one.bias is not None else why


def plain_weights(maps: Sequence[Tensor | nn.Module]) -> list[Tensor] | None:
    """The weights of linear maps, or None if one must be ``called``."""
    if not all(isinstance(one, Tensor) or called(one) is None for one in maps):
        return None
    return [one if isinstance(one, Tensor) else one.weight for one in maps]  # type: ignore[misc]


def map_after(then: Any) -> tuple[Tensor | None, str | None]:
    """The weight of a linear map whose input a kernel may recompute in the backward pass; or None and why not."""
    if not torch.is_grad_enabled():
        return None, "gradients are off"
    why = called(then)
    return (then.weight, None) if why is None else (None, f"the linear map after it {why}")


def linears(
    inputs: Sequence[Tensor], maps: Sequence[Tensor | nn.Module], gate: Tensor | None = None, *, relu_squared: bool = False
) -> list[Tensor] | None:
    """Linear maps, or weights, in one kernel on a GPU: for few tokens in a graph; inside ``rows_alike`` on Hopper, for any number.

    None if no kernel takes the call. With ``relu_squared``, the first result y becomes relu(y)^2; with ``gate``, y sigmoid(gate).
    """
    where = mode()
    if where == PLAIN or torch.is_grad_enabled() or (weights := plain_weights(maps)) is None:
        return None
    x = inputs[0]
    K, launch = x.shape[-1], kernels("few_rows_launch", *inputs, *weights, gate)
    if (
        launch is None
        or x.numel() == 0
        or x.element_size() != 2
        or len(weights) > launch.PARTS
        or any(one.dtype != x.dtype or one.shape != x.shape for one in inputs)
        or any(one.dtype != x.dtype or one.shape[1:] != x.shape[-1:] or one.numel() == 0 for one in weights)
        or not all(one.is_contiguous() or (n == 0 and one.T.is_contiguous()) for n, one in enumerate(weights))
        or (gate is not None and gate.dtype != x.dtype)
        or private.autocasting()
    ):
        return None
    flat = [one.reshape(-1, K).contiguous() for one in inputs]
    if not launch.takes(flat[0], weights, where.alike):
        return None
    gates = None if gate is None else gate.reshape(-1, gate.shape[-1]).contiguous()
    fixed = where.graph and all(_is_parameter(one) for one in weights)
    compute = launch.products_alike if where.alike else launch.products
    found = compute(flat, weights, gates, relu_squared=relu_squared, fixed=fixed, counts=partial(_zeros, x.device, launch.COUNTS))
    return [y.view(*x.shape[:-1], -1) for y in found]


def _zeros(device: torch.device, size: int) -> Tensor:
    kept, cuda = _counts.get(), device.type == "cuda"
    key = (device, private.raw_stream(device.index), torch.cuda.is_current_stream_capturing()) if cuda else (device,)
    found = None if kept is None else kept.get(key)
    if found is None:
        found = torch.zeros(size, dtype=torch.int32, device=device)
        if kept is not None:
            kept[key] = found
    return found


def linears_of(x: Tensor, maps: Sequence[nn.Module]) -> list[Tensor]:
    """Linear maps of one input."""
    if few := linears([x] * len(maps), maps):
        return few
    weights = plain_weights(maps) if len(maps) > 1 and torch.is_grad_enabled() and x.requires_grad else None
    if weights is None or not private.fast((x, *weights)):
        return [one(x) for one in maps]
    given = as_products(x, *weights)
    if any(one.dtype != given[0].dtype for one in given):
        return [one(x) for one in maps]
    return list(SharedInput.apply(*given))  # type: ignore[no-untyped-call]


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
        with no_autocast(x):  # autocast would round only the products that are not added in place
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
