"""Matrix products with few rows by the native kernel: ``y = x W^T``, the weights read once."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import DTYPES, available, run

ROWS = 32
"""Fewer rows than this are few. A core of Zen 3 computes 1, 8, 16, 32 and 64 rows 2.1, 2.2, 1.7, 1.3 and 1.1 times as fast as torch
does with MKL. From 32 on rows come in the engine's blocks, which must take one implementation."""


MOST = 64
"""Rows of one run: they stay in the cache while it reads the weights."""


class _Product(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y")),
        *((name, ctypes.c_int64) for name in ("M", "N", "K", "x_row", "weight_row", "dtype", "threads", "next", "out_of_memory")),
    ]


def few(x: Tensor, weight: Tensor) -> bool:
    """Whether x [...,K] has few rows, on a CPU."""
    return x.device.type == "cpu" and x.numel() < ROWS * weight.shape[1]


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel computes the product of x [...,K] and weight [N,K]: one dtype on a CPU, without gradients."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.shape[-1:] == weight.shape[1:]
        and x.numel() > 0
        and weight.stride(1) == 1
        and available() is None
    )


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product [...,N], summed in float32. Its bits do not depend on the number of rows."""
    N, K = weight.shape
    rows = x.reshape(-1, K).contiguous()
    y = rows.new_empty(*x.shape[:-1], N)
    flat = y.view(-1, N)
    for begin in range(0, rows.shape[0], MOST):
        part, out = rows[begin : begin + MOST], flat[begin : begin + MOST]
        M = part.shape[0]
        call = _Product(part.data_ptr(), weight.data_ptr(), out.data_ptr(), M, N, K, K, weight.stride(0), DTYPES[x.dtype])
        run("linear", call, M * N * K)
    return y
