"""Matrix products with few rows by the native kernel: ``y = x W^T``, several in one call. The weights, or their codes, are read once."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ...cpu import DTYPES, TEAM, run, unavailable
from ..modes import mode
from ..quantization import Quantized
from . import elsewhere

UNAVAILABLE = unavailable("products")
"""Determined at import, because compiled graphs cannot trace it."""
ROWS = 32
"""Products with fewer rows than this use the kernel. On a core of Zen 3, it is 2.1, 2.2, 1.7, 1.3 and 1.1 times as fast as torch with MKL
for 1, 8, 16, 32 and 64 rows. From 32 on, rows come in the engine's blocks, which must all use one implementation."""

EXPORTED = "the graph is exported: it takes any number of rows"
"""Compiled graphs are compiled again for more rows than the kernel takes."""
MOST = 64
"""Rows per call of the kernel: they stay in the cache while it reads the weights."""


CODES = {"int8": 4, "int4": 5}
"""The enum of product.h."""
BEFORE = {None: 0, "tanh": 1, "sigmoid": 2}
"""The enum of product.h."""
RELU_SQUARED, GATED, SHIFTED = 1, 2, 3


FIELDS = 18
"""Numbers of 64 bits in the struct ``product`` of product.h."""


class _Products(ctypes.Structure):
    """The struct ``products`` of linear.c."""

    _fields_ = [("each", ctypes.c_char_p), ("count", ctypes.c_int64), *TEAM]


class Product(NamedTuple):
    """One product: what is done to its input and to its results."""

    x: Tensor
    """[...,K]"""
    weight: Tensor | Quantized
    """[N,K]. It is copied unless it is stored by rows or by columns."""
    activation: str | None = None
    """Of x: "tanh", "sigmoid" or None."""
    relu_squared: bool = False
    """The result y is relu(y)^2."""
    gate: Tensor | None = None
    """[...,N]. The result is y sigmoid(gate)."""
    shift: tuple[Tensor, Tensor, Tensor] | None = None
    """x and p [...,N], mu [N]. The result is x + (p - x) (mu + y)."""
    transposed: bool = False
    """Whether the weight is given as [K,N], contiguous."""


def absent(device: torch.device) -> str | None:
    """Why a device has no kernel, or None. Compiled graphs may ask."""
    return elsewhere(device) or UNAVAILABLE


def takes(x: Tensor, weight: Tensor, many: bool = False) -> bool:
    """Whether the kernel computes the product of x [...,K] and weight [N,K]: few rows, or ``many``, of one dtype on a CPU."""
    return (
        x.dtype == weight.dtype != torch.float64
        and x.dtype in DTYPES
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and x.numel() > 0
        and (many or x.numel() < ROWS * weight.shape[1])
        and (many or 1 in weight.stride())
        and x.device == weight.device
        and x.device.type == "cpu"
        and UNAVAILABLE is None
    )


def takes_quantized(x: Tensor, weight: Quantized, many: bool = False) -> bool:
    """Whether the kernel computes the product of x [...,K] and a quantized weight [N,K]: few rows, or ``many``, on a CPU."""
    return (
        x.dtype != torch.float64
        and x.dtype in DTYPES
        and x.dim() > 0
        and x.numel() > 0
        and (many or x.numel() < ROWS * x.shape[-1])
        and weight.fits(x.shape[-1])
        and all(part.is_contiguous() and part.numel() > 0 and part.device == x.device for part in weight)
        and x.device.type == "cpu"
        and UNAVAILABLE is None
    )


def refuses_rows(x: Tensor, weights: Sequence[Tensor]) -> str | None:
    """Why a native kernel does not take this number of rows x [...,K], or these weights, or None."""
    if x.numel() == 0 or any(one.numel() == 0 for one in weights):
        return "there are no tokens or no weights"
    if x.numel() >= ROWS * x.shape[-1] and not mode().alike:
        return f"it takes fewer than {ROWS} tokens outside of rows_alike"
    return None if all(1 in one.stride() for one in weights) else "weights must be stored by rows or by columns"


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product [...,N], summed in float32. Its bits do not depend on the number of rows."""
    return products([Product(x, weight)])[0]


def quantized_linear(x: Tensor, weight: Quantized) -> Tensor:
    """``linear`` with the codes of a weight."""
    return products([Product(x, weight)])[0]


def products(given: Sequence[Product]) -> list[Tensor]:
    """The results [...,N] of products whose inputs have equal numbers of rows, at least one each."""
    M, work = given[0].x.numel() // given[0].x.shape[-1], 0
    results, calls, kept = [], [], []  # ``kept``: what the kernel reads
    for one in given:
        y, fields, read = _prepared(one, M)
        work += fields[8] * fields[9]
        results.append(y)
        calls.append(fields)
        kept.append(read)
    for begin in range(0, M, MOST):
        count = min(M - begin, MOST)
        some = calls if M <= MOST else [_part(fields, one.x.element_size(), begin, count) for fields, one in zip(calls, given)]
        packed = struct.pack(f"{FIELDS * len(some)}q", *chain.from_iterable(some))
        run("products", _Products(packed, len(some)), count * work)
    return results


def _prepared(one: Product, M: int) -> tuple[Tensor, tuple[int, ...], list[Tensor]]:
    """The result, the fields of the struct ``product``, and the tensors that these refer to."""
    x, weight, activation, relu_squared, gate, shift, columns = one
    kind, mu_kind, scales, first, second, mu, after = DTYPES[x.dtype], 0, 0, 0, 0, 0, int(relu_squared)
    weight_kind, K, row = kind, x.shape[-1], x.shape[-1]
    if isinstance(weight, Quantized):
        weight_kind, scales, weight = CODES[weight.kind], weight.scales.data_ptr(), weight.codes
    elif not columns and weight.stride(1) != 1:
        columns = weight.stride(0) == 1
        weight = weight.T if columns else weight.contiguous()
    if not x.is_contiguous():
        x, row = (x, x.stride(0)) if x.dim() == 2 and x.stride(1) == 1 else (x.contiguous(), K)
    N, kept = weight.shape[columns], [x, weight]
    if gate is not None:
        gate, after = gate.contiguous(), GATED
        first = gate.data_ptr()
        kept.append(gate)
    elif shift is not None:
        shifted, after, mu_kind = [each.contiguous() for each in shift], SHIFTED, DTYPES[shift[2].dtype]
        first, second, mu = (each.data_ptr() for each in shifted)
        kept += shifted
    y = x.new_empty((*x.shape[:-1], N))
    fields = (
        x.data_ptr(), weight.data_ptr(), y.data_ptr(), scales, first, second, mu, M, N, K, row, weight.stride(0), kind, weight_kind,
        mu_kind, columns, BEFORE[activation], after,
    )  # fmt: skip
    return y, fields, kept


def _part(fields: tuple[int, ...], size: int, begin: int, count: int) -> tuple[int, ...]:
    """The fields for ``count`` rows from ``begin`` on, of elements of ``size`` bytes."""
    x, weight, y, scales, first, second, mu, _, N, K, row, *others = fields
    first, second = (each and each + begin * N * size for each in (first, second))
    return x + begin * row * size, weight, y + begin * N * size, scales, first, second, mu, count, N, K, row, *others
