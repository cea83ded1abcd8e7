"""Launches of linear maps with quantized weights. There are no gradients. All tensors are contiguous."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...gpu.launch import on_device_of
from ...gpu.target import Target, power
from ..quantization import GROUP, HALF, Kind, Quantized
from . import launch, quantized
from .few_rows_launch import PARTS, Tile, early_of


def tile_of(rows: int, alike: bool, kind: Kind, K: int) -> Tile:
    """The tile for this number of rows. The results of tiles with ``apart`` are bitwise equal; ``alike`` has no others.

    Those of one row and of up to 16 are measured in a decode step of RWKV-7 1.5B on one NVIDIA H100. Registers are limited so that enough
    programs are resident to read all weights of a map at once.
    """
    if rows == 1 and not alike:
        if K > 2048:
            return Tile(1, 1, 8192, 1, 0, registers=48 if kind == "int8" else 80)
        return Tile(4, 1, 2048, 1, 0, registers=48) if kind == "int8" else Tile(2, 1, 2048, 1, 0, registers=72)
    if rows <= 32:
        return Tile(16, launch.multiplied(rows), GROUP, 5 if rows > 16 else 9 if kind == "int8" else 6, 4)
    if rows <= 64:
        return Tile(16, 64, GROUP, 4, 4)
    return Tile(64 if kind == "int8" else 32, 64, GROUP, 3, 4)  # int4 spills with 64


def products(
    inputs: Sequence[Tensor], weights: Sequence[Quantized], gate: Tensor | None = None, *, relu_squared: bool = False, alike: bool = False,
    fixed: bool = False, tile: Tile | None = None,
) -> list[Tensor]:  # fmt: skip
    """x_i W_i^T of x_i [R,K] and weights [N,K] of one kind, rounded once.

    With ``relu_squared`` the first result y becomes relu(y)^2, with ``gate`` [R,N] y sigmoid(gate). ``alike``: to the bit, a row does not
    depend on the other rows. ``fixed``: no earlier kernel still writes the weights, so they may be read early.
    """
    (R, K), x = inputs[0].shape, inputs[0]
    rows = [len(one.codes) for one in weights]
    tile = tile or tile_of(R, alike, weights[0].kind, K)
    results = [one.new_empty(R, N) for one, N in zip(inputs, rows)]
    begins = [sum(-(-N // tile.BN) for N in rows[:part]) for part in range(len(rows) + 1)]
    pdl, more = early_of(x, *(one.codes for one in weights)) if fixed else {}, PARTS - len(weights)
    limit = launch.limit(x, tile.registers) if tile.registers else {}
    BK = min(tile.BK, power(K, GROUP)) if tile.apart == 0 else tile.BK
    if R:
        on_device_of(x, quantized.penstock_quantized_products)[begins.pop(), -(-R // tile.BM)](
            *inputs, *[x] * more, *(one.codes for one in weights), *[weights[0].codes] * more, *(one.scales for one in weights),
            *[weights[0].scales] * more, *results, *[results[0]] * more, x if gate is None else gate, *rows, *[0] * more, *begins[1:],
            *[2**31 - 1] * more, R, K=K, PARTS=len(weights), BITS=8 if weights[0].kind == "int8" else 4, HALF=HALF,
            RELU_SQUARED=relu_squared, GATE=gate is not None, BN=tile.BN, BM=tile.BM, BK=BK, STAGES=_stages(x, tile), APART=tile.apart,
            WARPS=tile.warps, PDL=bool(pdl), num_warps=tile.warps, **limit, **pdl,
        )  # fmt: skip
    return results


def _stages(x: Tensor, tile: Tile) -> int:
    """The stages of a tile, or as many as fit into shared memory; one fewer than these are there."""
    size = tile.apart * tile.BK * (tile.BN + tile.BM * x.element_size())
    return tile.stages if size == 0 else max(2, min(tile.stages, 1 + Target.of(x.device).shared_memory // (size + size // 4)))


def dequantize(one: Quantized, columns: int, dtype: torch.dtype) -> Tensor:
    """The weight [N,columns] in this dtype."""
    y, BK = torch.empty(len(one.codes), columns, dtype=dtype, device=one.codes.device), 2048
    if y.numel():
        on_device_of(y, quantized.penstock_dequantize)[len(y), -(-columns // BK)](
            one.codes, one.scales, y, columns, BITS=8 if one.kind == "int8" else 4, HALF=HALF, BK=BK, num_warps=4
        )
    return y
