"""Linear maps. For few tokens without gradients, kernels read the weights once: a native kernel on a CPU, Triton kernels in CUDA graphs.

In training, linear maps of one input accumulate its gradient in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call import private, recompute
from ..call.autocast import autocasting, cast
from .as_written import altered, remembered
from .chains import Chain, ChainForm, plain
from .chains import native as native_form
from .cpu import freed
from .cpu import linear as native
from .cpu import refusal as refusal_of_native
from .examples import HALF, Draw, examples
from .modes import MODE, PLAIN, Mode, in_graph, mode, refuses_graph, rows_alike, zeros
from .quantization import Kind
from .quantized import QuantizedLinear, computed_together, drawn, of_kinds, refuses_together
from .triton import elsewhere, launching, refusal

OUTSIDE = "the call is neither in a CUDA graph nor inside rows_alike: torch is as fast"
"""Why kernels for few tokens do not run on a GPU."""
GRAPH_ROWS = 4
"""The most tokens of other dtypes for which a kernel without tensor cores runs, in a graph on a GPU."""


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


class _Linear(NamedTuple):
    """The arguments of ``linear``."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    where: Mode
    why: str | None
    """Why torch computes it, whatever the sizes, or None."""
    compiling: bool

    def added(self, y: Tensor) -> Tensor:
        """The product with the bias."""
        return y if self.bias is None else y + self.bias

    @property
    def rows(self) -> Tensor:
        """The tokens as contiguous rows."""
        return self.x.reshape(-1, self.x.shape[-1]).contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``."""
    return LINEAR(_call(x, weight, bias))


def _call(x: Tensor, weight: Tensor, bias: Tensor | None) -> _Linear:
    compiling = torch.compiler.is_compiling()
    where = PLAIN if compiling else MODE.get()
    return _Linear(x, weight, bias, where, _by_torch_alone(x, weight, bias, where), compiling)


def _by_torch_alone(x: Tensor, weight: Tensor, bias: Tensor | None, where: Mode) -> str | None:
    if x.device.type != "cpu" and where == PLAIN:
        return OUTSIDE
    if x.shape[-1:] != weight.shape[1:] or (bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1])):
        return "the sizes or the dtype of the bias do not fit"
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
        return "gradients are on"
    return None


def _by_torch(c: _Linear) -> Tensor:
    given = (c.x, c.weight) if c.bias is None else (c.x, c.weight, c.bias)
    if c.why is not None and recompute.active() and private.fast(given):
        return F.linear(*as_products(*given))
    return F.linear(*given)


def _refuses_plain(c: _Linear) -> str | None:
    """Why the call is not a plain one, without autocast, or None."""
    if c.why is not None:
        return c.why
    if c.compiling:
        return "autocast is on" if torch.is_autocast_enabled("cpu") else None
    if private.autocasting():
        return "autocast is on"
    return None if private.fast(c[:3]) else "the call is traced, transformed or in a mode, or a tensor is of a subclass"


def _refuses_native(c: _Linear) -> str | None:
    if c.why is not None:
        return c.why if c.why is not OUTSIDE else "its tensors are on a GPU, it works on a CPU"
    if c.compiling and torch.compiler.is_exporting():
        return native.EXPORTED
    if (why := _refuses_plain(c)) is None and not native.takes(c.x, c.weight, c.where.alike):
        return native.absent(c.x.device) or f"it takes fewer than {native.ROWS} rows of one dtype, contiguous, not float64"
    return why if why is not None or c.compiling else freed(c.x, c.weight)


def _by_native(c: _Linear) -> Tensor:
    y = _native(c.x, c.weight) if c.compiling else native.linear(c.x, c.weight)
    return y if c.bias is None else y + c.bias


def _refuses_products_of(c: _Linear) -> str | None:
    return c.why or refuses_products(_as_linears(c))


def _as_linears(c: _Linear) -> Linears:
    return Linears((c.x,), (c.weight,))


def _refuses_product(c: _Linear) -> str | None:
    if (why := c.why or elsewhere(c.x)) is not None:
        return why
    if not c.where.alike:
        return "the call is not inside rows_alike"
    if c.x.dtype != c.weight.dtype:
        return f"tokens are {c.x.dtype}, the weight is {c.weight.dtype}"
    return _refuses_plain(c) or refusal(c.x, c.weight)


def _refuses_product_few(c: _Linear) -> str | None:
    x, weight = c.x, c.weight
    if (why := c.why or elsewhere(x) or refuses_graph(c.where)) is not None:
        return why
    if x.dtype != weight.dtype or weight.stride(1) != 1 or not 0 < x.numel() <= GRAPH_ROWS * weight.shape[1]:
        return f"it takes at most {GRAPH_ROWS} tokens, and rows of weights of the same dtype"
    return _refuses_plain(c) or refusal(x, weight)


def _product(c: _Linear) -> Tensor:
    return c.added(launching("product").multiply(c.rows, c.weight).view(*c.x.shape[:-1], c.weight.shape[0]))


def _product_few(c: _Linear) -> Tensor:
    return c.added(launching("product").multiply_few(c.rows, c.weight).view(*c.x.shape[:-1], c.weight.shape[0]))


def _draw(draw: Draw, rows: int = 3) -> _Linear:
    N, K = draw.size(24, 2048), draw.size(40, 2048)
    return _call(draw("x", 1, rows, K), draw("weight", N, K, scale=0.2), draw("bias", N))


LINEAR: Chain[_Linear, Tensor] = Chain(
    "linear",
    plain(
        "native", _by_native, _refuses_native,
        (*examples(_draw, gradients=False), *examples(partial(_draw, rows=70), gradients=False, within=rows_alike)),
        native.absent,
    ),
    ChainForm(
        "products", lambda c: c.added(products(_as_linears(c))[0]), _refuses_products_of, lambda c: products_kernels(_as_linears(c)),
        examples(_draw, *HALF, gradients=False, within=in_graph),
    ),
    ChainForm(
        "product", _product, _refuses_product, lambda c: ("penstock_product",),
        examples(partial(_draw, rows=70), gradients=False, within=rows_alike),
    ),
    ChainForm(
        "product_few", _product_few, _refuses_product_few, lambda c: ("penstock_product_of_few_rows",),
        examples(_draw, gradients=False, within=in_graph),
    ),
    plain("torch", _by_torch),
)  # fmt: skip


def called(one: Any) -> str | None:
    """Why a linear map, or a weight, must be called, or None: it has a bias, hooks, an adapter or a quantized weight, or is no module."""
    if isinstance(one, Tensor):
        return None
    if not isinstance(one, nn.Module):
        return f"is a {type(one).__name__}"
    why = altered(one, Linear)
    return "has a bias" if why is None and one.bias is not None else why


def plain_weights(maps: Sequence[Tensor | nn.Module]) -> list[Tensor] | None:
    """The weights of linear maps, or None if one must be ``called``."""
    for one in maps:
        if not isinstance(one, Tensor) and called(one) is not None:
            return None
    return [one if isinstance(one, Tensor) else one.weight for one in maps]  # type: ignore[misc]


def which_is_called(maps: Sequence[Tensor | nn.Module]) -> str:
    """Why ``plain_weights`` has none of these linear maps."""
    return f"a linear map {next(filter(None, map(called, maps)))}"


def map_after(then: Any) -> tuple[Tensor | None, str | None]:
    """The weight of a linear map whose input a kernel may recompute in the backward pass; or None and why not."""
    if not torch.is_grad_enabled():
        return None, "gradients are off"
    why = called(then)
    return (then.weight, None) if why is None else (None, f"the linear map after it {why}")


def linears(
    inputs: Sequence[Tensor], maps: Sequence[Tensor | nn.Module], gate: Tensor | None = None, *, relu_squared: bool = False
) -> list[Tensor] | None:
    """Linear maps, or weights, in one kernel: for few tokens on a CPU, or on a GPU in a graph.

    Inside ``rows_alike``, for any number of tokens on a CPU and on Hopper.

    None if no kernel takes the call. With ``relu_squared``, the first result y becomes relu(y)^2; with ``gate``, y sigmoid(gate).
    """
    return LINEARS(Linears(tuple(inputs), tuple(maps), gate, relu_squared))


class Linears(NamedTuple):
    """The arguments of ``linears``."""

    inputs: tuple[Tensor, ...]
    maps: tuple[Tensor | nn.Module, ...]
    gate: Tensor | None = None
    relu_squared: bool = False


def refuses_natively(c: Linears) -> str | None:
    """Why one native kernel does not compute these linear maps, or None."""
    if not c.inputs[0].is_cpu:
        return "its tensors are not on a CPU"
    if (weights := plain_weights(c.maps)) is None:
        return which_is_called(c.maps)
    if (why := refusal_of_native("products", (*c.inputs, *weights, c.gate), alike=True)) is not None:
        return why
    x = c.inputs[0]
    shape, inner = x.shape, x.shape[-1:]
    if any(one.shape != shape for one in c.inputs) or any(one.shape[1:] != inner for one in weights):
        return "all inputs must have one shape, which fits the weights"
    if c.gate is not None and c.gate.shape != (*shape[:-1], weights[0].shape[0]):
        return "the gate must have the shape of the result"
    return native.refuses_rows(x, weights)


def products_natively(c: Linears) -> list[Tensor]:
    """Linear maps in one call of the native kernel."""
    given = [native.Product(x, one if isinstance(one, Tensor) else one.weight) for x, one in zip(c.inputs, c.maps)]  # type: ignore[arg-type]
    given[0] = given[0]._replace(gate=c.gate, relu_squared=c.relu_squared)
    return native.products(given)


def refuses_products(c: Linears) -> str | None:
    """Why one kernel does not compute these linear maps, or None."""
    where, inputs, gate = mode(), c.inputs, c.gate
    if (why := elsewhere(inputs[0])) is not None:
        return why
    if where == PLAIN:
        return OUTSIDE
    if torch.is_grad_enabled():
        return "gradients are on"
    if (weights := plain_weights(c.maps)) is None:
        return which_is_called(c.maps)
    if (why := refusal(*inputs, *weights, gate)) is not None:
        return why
    x, launch = inputs[0], launching("few_rows_launch")
    if x.numel() == 0 or any(one.numel() == 0 for one in weights):
        return "there are no tokens or no weights"
    if len(weights) > launch.MOST:
        return f"it takes at most {launch.MOST} maps, got {len(weights)}"
    if x.element_size() != 2 or any(one is not None and one.dtype != x.dtype for one in (*inputs, *weights, gate)):
        return "it takes one dtype of 16 bits"
    if any(one.shape != x.shape for one in inputs) or any(one.shape[1:] != x.shape[-1:] for one in weights):
        return "all inputs must have one shape, which fits the weights"
    if gate is not None and gate.shape != (*x.shape[:-1], weights[0].shape[0]):
        return "the gate must have the shape of the result"
    if not all(one.is_contiguous() or one.T.is_contiguous() for one in weights):
        return "weights must be contiguous"
    if private.autocasting():
        return "autocast is on"
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return None if launch.takes(flat, weights, where.alike) else f"no kernel is faster than torch for {flat.shape[0]} tokens of these maps"


def products(c: Linears) -> list[Tensor]:
    """Linear maps in one kernel."""
    where, x, weights, launch = mode(), c.inputs[0], plain_weights(c.maps), launching("few_rows_launch")
    assert weights is not None
    flat = [one.reshape(-1, x.shape[-1]).contiguous() for one in c.inputs]
    gates = None if c.gate is None else c.gate.reshape(-1, c.gate.shape[-1]).contiguous()
    fixed = where.graph and all(_is_parameter(one) for one in weights)
    compute = launch.products_alike if where.alike else launch.products
    found = compute(flat, weights, gates, relu_squared=c.relu_squared, fixed=fixed, counts=partial(zeros, x.device, launch.COUNTS))
    return [y.view(*x.shape[:-1], -1) for y in found]


def products_kernels(c: Linears) -> tuple[str, ...]:
    """The kernels of ``products``."""
    x, weights = c.inputs[0], plain_weights(c.maps)
    found: tuple[str, ...] = launching("few_rows_launch").kernels_of(x.reshape(-1, x.shape[-1]), weights, mode().alike)
    return found


def _linears_formula(c: Linears) -> list[Tensor]:
    """The linear maps one by one."""
    first, *others = [one(x) if isinstance(one, QuantizedLinear) else F.linear(x, *_weights(one)) for x, one in zip(c.inputs, c.maps)]
    first = torch.relu(first).square() if c.relu_squared else first
    return [first if c.gate is None else first * torch.sigmoid(c.gate), *others]


def called_alone(one: Tensor | nn.Module, x: Tensor) -> Tensor:
    """The result of one linear map, or of a weight."""
    y: Tensor = linear(x, one) if isinstance(one, Tensor) else one(x)
    return y


def _weights(one: Tensor | nn.Module) -> list[Any]:
    return [one] if isinstance(one, Tensor) else [one.weight, one.bias]


def _draw_linears(draw: Draw, gated: bool = False, kind: Kind | None = None) -> Linears:
    N, K = draw.size(24, 2048), draw.size(40, 2048)
    counts = (N,) if gated else (N, draw.size(8, 512), draw.size(33, 512))
    inputs = tuple(draw(f"x {n}", 1, 3, K) for n in range(len(counts)))
    maps = tuple(drawn_map(draw, f"map {n}", count, K, kind) for n, count in enumerate(counts))
    return Linears(inputs, maps, draw("gate", 1, 3, N) if gated else None, not gated)


def drawn_map(draw: Draw, name: str, outputs: int, inputs: int, kind: Kind | None) -> nn.Module:
    """A linear map of an example, quantized or not."""
    if kind is None:
        return draw.module(name, Linear(inputs, outputs, bias=False), 0.2)
    return QuantizedLinear(drawn(draw, name, outputs, inputs, kind), inputs, draw.dtype)


def _draw_transposed(draw: Draw, rows: int = 3) -> Linears:
    """Maps of RWKV-7: three, and the first halves of four low-rank maps, whose weights are transposed."""
    K, ranks = draw.size(40, 2048), (draw.size(8, 96), draw.size(24, 96), draw.size(16, 256), draw.size(8, 64))
    maps = [draw.module(f"map {n}", Linear(K, K, bias=False), 0.2) for n in range(3)]
    downs = [draw.learned(f"down {n}", K, M, scale=0.2).T for n, M in enumerate(ranks)]
    return Linears(tuple(draw(f"x {n}", 1, rows, K) for n in range(7)), (*maps, *downs))


LINEARS: Chain[Linears, list[Tensor] | None] = Chain(
    "linears",
    native_form(
        "native", "products", products_natively, refuses_natively,
        (
            *examples(_draw_linears, gradients=False), *examples(partial(_draw_linears, gated=True), gradients=False),
            *examples(_draw_transposed, gradients=False), *examples(partial(_draw_transposed, rows=70), gradients=False, within=rows_alike),
        ),
    ),
    ChainForm(
        "products", products, refuses_products, products_kernels,
        (
            *examples(_draw_linears, *HALF, gradients=False, within=in_graph),
            *examples(partial(_draw_linears, gated=True), *HALF, gradients=False, within=in_graph),
            *examples(_draw_transposed, *HALF, gradients=False, within=in_graph),  # on Hopper
        ),
    ),
    ChainForm(
        "quantized", lambda c: computed_together(c.inputs, c.maps, called_alone, c.gate, c.relu_squared),
        lambda c: refuses_together(c.inputs, c.maps, c.gate, c.relu_squared), lambda c: ("penstock_quantized_products",),
        (*of_kinds(_draw_linears, *HALF, within=in_graph), *of_kinds(partial(_draw_linears, gated=True), *HALF, within=rows_alike)),
    ),
    plain("parts", lambda c: None),
    formula=_linears_formula,
)  # fmt: skip


@torch.library.custom_op("penstock::linear_of_few_rows", mutates_args=())
def _native(x: Tensor, weight: Tensor) -> Tensor:
    """The native kernel in compiled graphs."""
    return native.linear(x, weight)


@_native.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
