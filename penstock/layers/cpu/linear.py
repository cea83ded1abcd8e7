"""Matrix products with few rows by the native kernel: ``y = x W^T``. The weights, or their codes, are read once."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...cpu import DTYPES, run, unavailable
from ..quantization import Quantized

AVAILABLE = unavailable("product") is None
"""Determined at import, because compiled graphs cannot trace it."""
ROWS = 32
"""Products with fewer rows than this use the kernel. On a core of Zen 3, it is 2.1, 2.2, 1.7, 1.3 and 1.1 times as fast as torch with MKL
for 1, 8, 16, 32 and 64 rows. From 32 on, rows come in the engine's blocks, which must all use one implementation."""


MOST = 64
"""Rows per call of the kernel: they stay in the cache while it reads the weights."""


CODES = {"int8": 4, "int4": 5}
"""The enum of linear.c."""


class _Product(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y", "scales")),
        *((name, ctypes.c_int64) for name in ("M", "N", "K", "x_row", "weight_row", "dtype", "weight_dtype")),
        *((name, ctypes.c_int64) for name in ("threads", "next", "out_of_memory")),
    ]


def takes(x: Tensor, weight: Tensor, many: bool = False) -> bool:
    """Whether the kernel computes the product of x [...,K] and weight [N,K]: few rows, or ``many``, of one dtype on a CPU."""
    return (
        x.dtype == weight.dtype != torch.float64
        and x.dtype in DTYPES
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and x.numel() > 0
        and (many or x.numel() < ROWS * weight.shape[1])
        and (many or weight.stride(1) == 1)
        and x.device == weight.device
        and x.device.type == "cpu"
        and AVAILABLE
    )


def takes_quantized(x: Tensor, weight: Quantized, many: bool = False) -> bool:
    """Whether the kernel computes the product of x [...,K] and a quantized weight [N,K]: few rows, or ``many``, on a CPU."""
    return (
        x.dtype != torch.float64
        and x.dtype in DTYPES
        and x.dim() > 0
        and x.numel() > 0
        and (many or x.numel() < ROWS * x.shape[-1])
        and all(part.is_contiguous() and part.numel() > 0 and part.device == x.device for part in weight)
        and x.device.type == "cpu"
        and AVAILABLE
    )


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product [...,N], summed in float32. Its bits do not depend on the number of rows. A weight stored by columns is copied."""
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    return _product(x, weight, None, DTYPES[x.dtype])


def quantized_linear(x: Tensor, weight: Quantized) -> Tensor:
    """``linear`` with the codes of a weight."""
    return _product(x, weight.codes, weight.scales, CODES[weight.kind])


def _product(x: Tensor, weight: Tensor, scales: Tensor | None, dtype: int) -> Tensor:
    x, N, K = x.contiguous(), len(weight), x.shape[-1]
    y = x.new_empty((*x.shape[:-1], N))
    M, size = x.numel() // K, x.element_size()
    for begin in range(0, M, MOST):
        count = min(M - begin, MOST)
        call = _Product(
            x.data_ptr() + begin * K * size, weight.data_ptr(), y.data_ptr() + begin * N * size,
            None if scales is None else scales.data_ptr(), count, N, K, K, weight.stride(0), DTYPES[x.dtype], dtype,
        )  # fmt: skip
        run("product", call, count * N * K)
    return y
