"""Descriptors for Hopper's tensor memory accelerator, and the check whether Triton has Gluon.

Gluon is new in Triton and still changes. It is imported when a launch for Hopper is planned. Only Triton's version decides whether it is
used; otherwise plain Triton kernels run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from ..call.versions import checked, version
from .target import Target


class Tile(NamedTuple):
    """The tile that the hardware copies, of a tensor of four axes viewed as a matrix."""

    rows: int
    columns: int
    axes: int = 2
    """The number of leading axes that form the rows; [B,T,H,D] is the matrix [B * T,H * D]."""


GLUON = (3, 6)
"""The first Triton version whose Gluon supports the kernels."""


@cache
def without_gluon() -> str | None:
    """Why this Triton's Gluon does not compile the kernels for Hopper, or None.

    Its version alone decides: a module of kernels that fails to import raises.
    """
    found = version("triton")
    if found < GLUON:
        return f"Triton {'.'.join(map(str, found))} has no Gluon for Hopper. Triton {'.'.join(map(str, GLUON))} has"
    return None if checked("triton") else f"Triton {'.'.join(map(str, found))} is newer than those whose Gluon was checked"


def absent(target: Target) -> str | None:
    """Why there are no kernels in Gluon for a GPU, or None."""
    return without_gluon() if target.arch == "sm_90" else f"its code is for sm_90 (Hopper), this is {target.arch}"


@cache
def modules(package: str | None, *names: str) -> tuple[Any, ...] | None:
    """Modules of a package; None ``without_gluon``."""
    if without_gluon() is not None:
        return None
    return tuple([import_module("." + name, package) for name in names])


def tiled(x: Tensor) -> bool:
    """Whether [B,T,H,D] is a matrix [B * T,H * D] whose rows do not overlap and begin at multiples of 16 bytes."""
    B, T, H, D = x.shape
    b, t, h, d = x.stride()
    aligned = t * x.element_size() % 16 == 0 == x.data_ptr() % 16
    return aligned and d == 1 and (H == 1 or h == D) and (B == 1 or b == T * t) and t >= H * D


def no_matrix(name: str, x: Tensor | None, shared: bool = False) -> str | None:
    """Why kernels cannot copy a tensor in tiles, or None. ``shared``: all heads may be one with stride 0, the matrix [B * T,D]."""
    if x is None or tiled(x[:, :, :1] if shared and x.stride(2) == 0 else x):
        return None
    return f"{name} must be one matrix [B * T,H * D] with rows at multiples of 16 bytes, this is {list(x.shape)} with strides {x.stride()}"


ROWS = 1 << 31
"""Rows of a matrix that is copied in tiles are numbered by 32-bit integers."""


def other_rows(*rows: int) -> str | None:
    """Why kernels cannot copy matrices with these numbers of rows in tiles, or None."""
    if min(rows) < 1:
        return f"it copies matrices of one row at least in tiles, this call has one of {min(rows)}"
    if max(rows) >= ROWS:
        return f"it copies matrices of fewer than 2**31 rows in tiles, this call has one of {max(rows)}"
    return None


@cache
def _layout(bits: int, columns: int) -> Any:
    """The columns of a block: 128 bytes, or the width of the tile."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=min(128, columns * bits // 8), element_bitwidth=bits, rank=2)


@cache
def _descriptor() -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor


def description(x: Tensor, tile: Tile) -> dict[str, Any]:
    """The fields of a descriptor that tensors of one layout share."""
    columns = prod(x.shape[tile.axes :])
    return {
        "columns": columns,
        "width": columns if x.stride(tile.axes) else x.shape[-1],
        "strides": [x.stride(tile.axes - 1), 1],
        "block_shape": [tile.rows, tile.columns],
        "layout": _layout(8 * x.element_size(), tile.columns),
        "padding": "zero",
    }


def described(x: Tensor, known: Mapping[str, Any]) -> Any:
    """The descriptor of a tensor. Triton's checks are skipped: they ran when the launch was planned."""
    one, columns = object.__new__(_descriptor()), known["columns"]
    fields = one.__dict__
    fields.update(known)
    fields["base"], fields["shape"] = x, [x.numel() // columns, known["width"]]
    return one
