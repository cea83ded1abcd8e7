"""Linear maps with weights of 8 or 4 bits. Few tokens take kernels that read the codes; for many, the weight is dequantized first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call import private
from ..errors import Complaints, ShapeError
from .as_written import altered, remembered
from .chains import Chain, ChainForm, plain
from .cpu import freed
from .cpu import linear as native
from .examples import EVERY, HALF, Draw, Example, examples
from .modes import Mode, in_graph, mode, rows_alike
from .quantization import KINDS, Kind, Quantized, empty, quantized
from .triton import elsewhere, launching, refusal

ROWS = 64
"""The most tokens for which the kernel on codes runs outside ``rows_alike``. For more, the weight is dequantized for a product by torch."""


@remembered
class QuantizedLinear(nn.Module):
    """A linear map whose weight is stored in 8 or 4 bits. Gradients reach its input, not the weight."""

    codes: Tensor
    scales: Tensor

    def __init__(self, weight: Quantized, columns: int, dtype: torch.dtype, bias: Tensor | None = None) -> None:
        """``columns``: the number of inputs. ``dtype``: that of the weight before."""
        super().__init__()
        self.in_features, self.out_features, self.dtype = columns, len(weight.codes), dtype
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def of(cls, one: nn.Linear, kind: Kind) -> QuantizedLinear:
        """The map of an ``nn.Linear``. On the meta device, one without values."""
        (N, K), weight = one.weight.shape, one.weight
        made = empty(N, K, kind, weight.device) if weight.is_meta else quantized(weight, kind)
        found = cls(made, K, weight.dtype, one.bias)
        return found.train(one.training)

    @property
    def quantized(self) -> Quantized:
        """The codes and scales."""
        return Quantized(self.codes, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [...,inputs] to [...,outputs]."""
        if x.shape[-1:] != (self.in_features,):  # kernels would read other rows of the codes, int4 codes of the padding
            complaints = Complaints(type(self).__name__)
            complaints.add(ShapeError, "x", f"of shape [...,{self.in_features}]", list(x.shape), "Its last axis are the inputs of the map.")
            complaints.raise_any()
        return QUANTIZED_LINEAR(_call(x, Quantized(self.codes, self.scales), self.bias))

    def extra_repr(self) -> str:
        """The sizes and the format."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.quantized.kind}"

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        """Scales keep their dtype in ``to``, ``half`` and the like."""
        scales, like = self.scales, torch.empty(0, dtype=self.dtype, device=self.codes.device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scales = scales.to(self.codes.device)
        self.dtype = fn(like).dtype
        return self


class _Call(NamedTuple):
    """The arguments of a quantized linear map."""

    x: Tensor
    weight: Quantized
    bias: Tensor | None
    where: Mode
    compiling: bool

    @property
    def rows(self) -> Tensor:
        """The tokens as contiguous rows."""
        return self.x.reshape(-1, self.x.shape[-1]).contiguous()

    def whole(self, y: Tensor) -> Tensor:
        """The result from that of the rows."""
        return _with_bias(y.view(*self.x.shape[:-1], y.shape[-1]), self.bias)


def _call(x: Tensor, weight: Quantized, bias: Tensor | None) -> _Call:
    return _Call(x, weight, bias, mode(), torch.compiler.is_compiling())


def _refuses(c: _Call) -> str | None:
    """Why no kernel computes a call, or None."""
    if torch.is_grad_enabled() and (c.x.requires_grad or (c.bias is not None and c.bias.requires_grad)):
        return "gradients are on"
    if c.compiling:
        return "autocast is on" if torch.is_autocast_enabled(c.x.device.type) else None
    if private.autocasting():
        return "autocast is on"
    if not private.fast((c.x, *c.weight, c.bias)):
        return "the call is traced, transformed or in a mode, or a tensor is of a subclass"
    return None


def _refuses_native(c: _Call) -> str | None:
    if c.compiling and torch.compiler.is_exporting():
        return native.EXPORTED
    if (why := native.absent(c.x.device) or _refuses(c)) is not None:
        return why
    if native.takes_quantized(c.x, c.weight, c.where.alike):
        return None if c.compiling else freed(c.x, *c.weight)
    return f"it takes fewer than {native.ROWS} rows of float32, bfloat16 or float16"


def _by_native(c: _Call) -> Tensor:
    y = _native(c.x, *c.weight) if c.compiling else native.quantized_linear(c.x, c.weight)
    return y if c.bias is None else y + c.bias


def _refuses_products(c: _Call) -> str | None:
    return elsewhere(c.x) or _refuses(c) or _refuses_rows(c.x, [c.weight], c.where)


def _refuses_rows(x: Tensor, weights: Sequence[Quantized], where: Mode) -> str | None:
    """Why the kernel on codes does not take these tokens and weights, or None."""
    if x.element_size() != 2:
        return "it takes tokens of 16 bits"
    if x.numel() == 0 or any(one.codes.numel() == 0 for one in weights):
        return "there are no tokens or no weights"
    if not all(part.is_contiguous() for one in weights for part in one):
        return "codes and scales must be contiguous"
    if not all(one.fits(x.shape[-1]) for one in weights):
        return "codes or scales have another dtype or size than the format has"
    count = x.numel() // x.shape[-1]
    if count > ROWS and not where.alike:
        return f"it takes at most {ROWS} tokens outside of rows_alike, got {count}"
    return refusal(x)


def _products(c: _Call) -> Tensor:
    launch = launching("quantized_launch")
    (y,) = launch.products([c.rows], [c.weight], alike=c.where.alike, fixed=c.where.graph)
    return c.whole(y)


def _refuses_alike(c: _Call) -> str | None:
    if (why := elsewhere(c.x) or _refuses(c)) is not None:
        return why
    return refusal(c.x) if c.where.alike else "the call is not inside rows_alike"


def _alike(c: _Call) -> Tensor:
    weight = launching("quantized_launch").dequantize(c.weight, c.x.shape[-1], c.x.dtype)
    return c.whole(launching("product").multiply(c.rows, weight))


def _refuses_dequantized(c: _Call) -> str | None:
    return elsewhere(c.x) or _refuses(c) or refusal(c.x)


def _dequantized(c: _Call) -> Tensor:
    return F.linear(c.x, launching("quantized_launch").dequantize(c.weight, c.x.shape[-1], c.x.dtype), c.bias)


def _by_torch(c: _Call) -> Tensor:
    return F.linear(c.x, c.weight.weight(c.x.shape[-1], c.x.dtype), c.bias)


def _draw(draw: Draw, kind: Kind, rows: int = 3) -> _Call:
    N, K = draw.size(24, 2048), draw.size(136, 2048)
    return _call(draw("x", 1, rows, K), drawn(draw, "weight", N, K, kind), draw("bias", N))


def drawn(draw: Draw, name: str, rows: int, columns: int, kind: Kind) -> Quantized:
    """A weight of an example. The same codes and scales in every dtype."""
    numbers = draw(name, rows, columns, wide=True, scale=0.2, fixed=True)
    return Quantized(*(part.to(draw.device) for part in quantized(numbers.to("cpu", torch.float32), kind)))


def of_kinds(draw: Any, *dtypes: torch.dtype, **options: Any) -> tuple[Example, ...]:
    """Examples of every kind of codes."""
    return tuple(one for kind in KINDS for one in examples(partial(draw, kind=kind), *dtypes, gradients=False, **options))


_MANY = partial(_draw, rows=70)
QUANTIZED_LINEAR: Chain[_Call, Tensor] = Chain(
    "quantized_linear",
    plain("native", _by_native, _refuses_native, (*of_kinds(_draw), *of_kinds(_MANY, within=rows_alike)), native.absent),
    ChainForm(
        "products", _products, _refuses_products, lambda c: ("penstock_quantized_products",),
        (*of_kinds(_draw, *HALF, within=in_graph), *of_kinds(partial(_draw, rows=1), *HALF), *of_kinds(_MANY, *HALF, within=rows_alike)),
    ),
    ChainForm(
        "dequantized_alike", _alike, _refuses_alike, lambda c: ("penstock_dequantize", "penstock_product"),
        of_kinds(_MANY, torch.float32, within=rows_alike),
    ),
    ChainForm("dequantized", _dequantized, _refuses_dequantized, lambda c: ("penstock_dequantize",), of_kinds(_MANY, *EVERY)),
    plain("torch", _by_torch),
)  # fmt: skip


def together(maps: Sequence[Any]) -> list[int]:
    """The places of the quantized linear maps, without hooks and adapters, that are of the kind of the first one."""
    places = [n for n, one in enumerate(maps) if isinstance(one, nn.Module) and altered(one, QuantizedLinear) is None]
    return [n for n in places if maps[n].quantized.kind == maps[places[0]].quantized.kind]


def refuses_together(inputs: Sequence[Tensor], maps: Sequence[Any], gate: Tensor | None = None, relu_squared: bool = False) -> str | None:
    """Why no kernel computes the quantized ones of these linear maps together, or None."""
    where, x, places = mode(), inputs[0], together(maps)
    if (why := elsewhere(x)) is not None:
        return why
    if torch.is_grad_enabled():
        return "gradients are on"
    if not places:
        return "it takes quantized linear maps without hooks and adapters"
    if (gate is not None or relu_squared) and (places[0] != 0 or maps[0].bias is not None):
        return "with an activation, its first map must be a quantized one without bias"
    if private.autocasting():
        return "autocast is on"
    if (why := refusal(*inputs, gate)) is not None:
        return why
    if any(one.shape != x.shape for one in inputs) or any(maps[n].in_features != x.shape[-1] for n in places):
        return "all inputs must have one shape, which fits the weights"
    if any(one is not None and one.dtype != x.dtype for one in (*inputs, gate)):
        return "it takes one dtype"
    if gate is not None and gate.shape != (*x.shape[:-1], maps[0].out_features):
        return "the gate must have the shape of the result"
    return _refuses_rows(x, [maps[n].quantized for n in places], where)


def computed_together(
    inputs: Sequence[Tensor], maps: Sequence[Any], call: Callable[[Any, Tensor], Tensor], gate: Tensor | None = None,
    relu_squared: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Linear maps, the quantized ones in as few launches as possible. ``call`` computes another one."""
    where, x, places, launch = mode(), inputs[0], together(maps), launching("quantized_launch")
    found: dict[int, Tensor] = {}
    gates = None if gate is None else gate.reshape(-1, gate.shape[-1]).contiguous()
    for some in (places[n : n + launch.PARTS] for n in range(0, len(places), launch.PARTS)):
        rows = [inputs[n].reshape(-1, x.shape[-1]).contiguous() for n in some]
        first = some[0] == 0  # the one with the activation
        options = {"relu_squared": relu_squared and first, "alike": where.alike, "fixed": where.graph}
        results = launch.products(rows, [maps[n].quantized for n in some], gates if first else None, **options)
        found |= {n: _with_bias(y.view(*x.shape[:-1], -1), maps[n].bias) for n, y in zip(some, results)}
    return [found[n] if n in found else call(one, each) for n, (one, each) in enumerate(zip(maps, inputs))]


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias


@torch.library.custom_op("penstock::quantized_linear_of_few_rows", mutates_args=())
def _native(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The native kernel in compiled graphs."""
    return native.quantized_linear(x, Quantized(codes, scales))


@_native.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))
