"""Where ``hopper_forward`` takes the place of the forward kernel's first launch, and what its launch is told.

Gluon came into Triton late and still changes: it is imported when a launch for Hopper is planned, and done without where it
cannot be.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .table import Blocks, Target

if TYPE_CHECKING:
    from ...problem import Problem

FORM = "hopper"
"""Its name in the tables."""
C, BV = 64, 64
"""Tokens in a chunk, and value channels that are one program of the launch that follows."""
STAGES, COLUMNS = 3, 2
REGISTERS = 128
"""A thread's before they are divided anew: 512 threads then have all of a multiprocessor's."""
SIZES = {(64, 64): (4, 120), (128, 128): (8, 112)}
"""By K and V: warps that prepare, and registers for their threads. With fewer they spill; with more, those that hold the state do."""


@cache
def kernel() -> Any:
    """The kernel; None where Triton has no Gluon as it is written in."""
    try:
        return import_module(".hopper_forward", __package__).forward
    except (ImportError, AttributeError):
        return None


def applies(p: Problem, blocks: Blocks, target: Target, precision: str) -> bool:
    """Whether the table wants it, and it can compute this problem: decays per channel, bfloat16, tiles that the hardware can copy."""
    sizes = p.sizes
    return (
        blocks.form == FORM
        and blocks.BV == BV
        and target.arch == "sm_90"
        and precision == "bf16"
        and "K" in p.variant.decay
        and not p.reverse
        and (sizes["K"], sizes["V"]) in SIZES
        and 0 < sizes["B"] * sizes["T"] < 1 << 31
        and all(map(_tiled, (p.q, p.k, p.v)))
        and kernel() is not None
    )


def _tiled(x: Tensor) -> bool:
    """Whether [B,T,H,D] is a matrix [B * T,H * D] with rows that begin at multiples of 16 bytes."""
    B, T, H, D = x.shape
    b, t, h, d = x.stride()
    return d == 1 and h in (D, h * (H == 1)) and b in (T * t, b * (B == 1)) and t * x.element_size() % 16 == 0 == x.data_ptr() % 16


def constants(K: int, V: int) -> dict[str, Any]:
    """What it is compiled for besides the problem."""
    warps, registers = SIZES[K, V]
    return {"HALVES": V // BV, "STAGES": STAGES, "COLUMNS": COLUMNS, "WARPS": warps, "REGISTERS": registers}


def tiles(K: int) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the tiles of its first tensors: q, k, v and the output."""
    return (C, K), (C, K), (C, BV), (C, BV)


@cache
def _layout() -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@cache
def _descriptor() -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor


def described(x: Tensor, tile: tuple[int, int]) -> Any:
    """[B,T,H,D] as a matrix [B * T,H * D] that is copied in tiles. ``applies`` has looked at it, so Triton need not once more."""
    B, T, H, D = x.shape
    one = object.__new__(_descriptor())
    one.__dict__.update(base=x, shape=[B * T, H * D], strides=[x.stride(1), 1], block_shape=list(tile), layout=_layout(), padding="zero")
    return one
