"""Descriptors for Hopper's tensor memory accelerator, and the check whether Triton has Gluon.

Gluon is new in Triton and still changes. It is imported when a launch for Hopper is planned; without it, plain Triton kernels run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from math import prod
from typing import Any, NamedTuple

import triton
from torch import Tensor


class Tile(NamedTuple):
    """The tile that the hardware copies, of a tensor of four axes viewed as a matrix."""

    rows: int
    columns: int
    axes: int = 2
    """The number of leading axes that form the rows; [B,T,H,D] is the matrix [B * T,H * D]."""


GLUON = (3, 6)
"""The first Triton version whose Gluon supports the kernels."""


@cache
def modules(package: str | None) -> tuple[Any, Any] | None:
    """A package's ``hopper_forward`` and ``hopper_backward``; None if Triton's Gluon is missing or too old."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < GLUON:
        return None
    try:
        return import_module(".hopper_forward", package), import_module(".hopper_backward", package)
    except (ImportError, AttributeError):
        return None


def tiled(x: Tensor) -> bool:
    """Whether [B,T,H,D] is a matrix [B * T,H * D] whose rows do not overlap and begin at multiples of 16 bytes."""
    B, T, H, D = x.shape
    b, t, h, d = x.stride()
    aligned = t * x.element_size() % 16 == 0 == x.data_ptr() % 16
    return aligned and d == 1 and (H == 1 or h == D) and (B == 1 or b == T * t) and t >= H * D


@cache
def _layout(bits: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


@cache
def _descriptor() -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor


def description(x: Tensor, tile: Tile) -> dict[str, Any]:
    """The fields of a descriptor that tensors of one layout share."""
    return {
        "columns": prod(x.shape[tile.axes :]),
        "strides": [x.stride(tile.axes - 1), 1],
        "block_shape": [tile.rows, tile.columns],
        "layout": _layout(8 * x.element_size()),
        "padding": "zero",
    }


def described(x: Tensor, known: Mapping[str, Any]) -> Any:
    """The descriptor of a tensor. It skips Triton's checks: they were done when the launch was planned."""
    one, columns = object.__new__(_descriptor()), known["columns"]
    fields = one.__dict__
    fields.update(known)
    fields["base"], fields["shape"] = x, [x.numel() // columns, columns]
    return one
