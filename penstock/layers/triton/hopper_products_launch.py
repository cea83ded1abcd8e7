"""Launches of linear maps with up to a few hundred rows on Hopper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.derivatives import count_write
from ...gpu.hopper import Tile, described, description
from ...gpu.launch import on_device_of
from ...gpu.target import power
from . import hopper_products
from .few_rows_launch import Lasts

UNIT = hopper_products.UNIT.value
PARTS = 7
"""The most linear maps of one launch: three maps and four low-rank maps of RWKV-7."""
ROWS = 128
"""The most rows of x per program, if its form does not say."""


class Tiling(NamedTuple):
    """The constants of ``penstock_products_hopper``. The bits of a result depend only on APART * SPREAD."""

    APART: int
    """Parts of K in one product, each with 64 / APART rows of the weight."""
    GROUPS: int
    """Products per stage."""
    STAGES: int
    """The most stages of the ring of weights. All are loaded before the wait for the previous kernel."""
    warps: int = 4
    HEIGHT: int = 64
    """Rows of the left operand: 64, or 128 with 8 warps, APART = 1 and GROUPS = 1."""
    rows: int = 0
    """Rows of x per program, a power of two from 8 to 256. 0: all, at most 128."""
    x_stages: int = 0
    """Stages of the ring of x. 0: as many as for weights."""
    SPREAD: int = 1
    """Parts of K with programs of their own. Above 1, APART and GROUPS are 1."""


WIDE = 100
"""The least number of tiles of 64 weights for which K is not split: about one program per multiprocessor."""
HALF = 112
"""The most tiles of 64 weights for which K is in two parts: tiles of 32 weights then have two programs per multiprocessor. One NVIDIA
H100, a step of RWKV-7 1.5B (105 tiles) of 1 row: 1.35 ms; 1.49 with K in one part, 1.39 in four; of 8 rows 1.56 and 1.66."""
HALVES = Tiling(2, 2, 5)
"""Tiles of 32 weights and two parts of K."""
TILES = 2**16 - 1
"""The most tiles of 64 weights of a launch, the second axis of a grid."""


def takes(weights: Sequence[Tensor]) -> bool:
    """Whether the kernel can read 16-bit weights and their inputs: rows, or columns of transposed weights, are aligned to 16 bytes."""
    dense = (weight if weight.is_contiguous() else weight.T for weight in weights)
    lengths = {weights[0].shape[1], *(one.shape[1] for one in dense)}
    return _tiles(weights) <= TILES and all(2 * n % 16 == 0 for n in lengths) and all(one.data_ptr() % 16 == 0 for one in weights)


def _tiles(weights: Sequence[Tensor]) -> int:
    return sum(-(-weight.shape[0] // UNIT) for weight in weights)


def split_of(weights: Sequence[Tensor]) -> int:
    """The number of parts of K: more for small weights, whatever the number of rows."""
    tiles = _tiles(weights)
    return 1 if tiles > HALF else 2 if tiles >= WIDE else 4


def form_of(rows: int, weights: Sequence[Tensor], multiprocessors: int, *, alike: bool = True) -> Tiling | None:
    """The form of a launch, measured on an H200 with the maps of RWKV-6 of 1.6 billion parameters.

    None: for this many rows, other kernels are as fast. ``alike``: a form that is bitwise equal for all numbers of rows.
    """
    split = split_of(weights)
    if split == 2 and (alike or rows <= 16):
        return _halves(rows, weights, multiprocessors)
    if split == 4:
        if rows <= 32:
            return Tiling(4, 1, 8 if rows <= 8 else 6 if rows <= 16 else 4)
        few = sum(-(-weight.shape[0] // 16) for weight in weights) * -(-rows // 16) <= multiprocessors
        return Tiling(4, 1, 4, rows=16) if few else _spread(rows, weights, multiprocessors)
    if rows > 64:
        return _wide(rows, sum(-(-weight.shape[0] // 128) for weight in weights), multiprocessors)
    if rows > 32:
        return Tiling(1, 1, 8, rows=64, x_stages=8 if _tiles(weights) <= multiprocessors else 4)
    if not alike and 4 < rows <= 8 and len(weights) == 5 and _tiles(weights) <= multiprocessors:
        return HALVES  # 8 rows: 0.96 times the time of a step; 4 rows 0.99, 1 row 1.05, the two maps of a channel mix 1.08 to 1.09
    return Tiling(1, 2, 6 if rows <= 8 else 5 if rows <= 16 else 4)


def _halves(rows: int, weights: Sequence[Tensor], multiprocessors: int) -> Tiling | None:
    """The form with two parts of K; above 64 rows each has programs of its own."""
    if rows <= 32:
        return HALVES if rows <= 8 else Tiling(2, 2, 4) if rows <= 16 else Tiling(2, 1, 6)
    if rows <= 64:
        return Tiling(2, 1, 4, rows=64)
    programs = 2 * sum(-(-weight.shape[0] // 128) for weight in weights) * -(-rows // 128)
    return Tiling(1, 1, 9, 8, 128, 128, 4, 2) if programs <= 2 * multiprocessors else None


def _wide(rows: int, tiles: int, multiprocessors: int) -> Tiling | None:
    """The form for this many tiles of 128 weights. If there are more programs than multiprocessors, two share one."""
    if tiles * -(-rows // 128) <= multiprocessors or rows <= 128:
        return Tiling(1, 1, 9, 8, 128, 128, 4)
    if rows <= 192:
        return Tiling(1, 1, 5, 8, 128, 64, 4)
    if rows <= 384 and tiles * -(-rows // 128) <= 2 * multiprocessors:
        return Tiling(1, 1, 4, 8, 128, 128, 3)
    return Tiling(1, 1, 4, 8, 128, 256) if rows <= 512 and tiles * 2 <= multiprocessors else None


def _spread(rows: int, weights: Sequence[Tensor], multiprocessors: int) -> Tiling | None:
    """The form with 4 parts of K, each with programs of its own."""
    HEIGHT = 64 if rows <= 128 else 128
    programs = 4 * sum(-(-weight.shape[0] // HEIGHT) for weight in weights) * -(-rows // 128)
    if programs > 2 * multiprocessors:
        return None
    if rows > 128:
        return Tiling(1, 1, 8, 8, 128, 128, 5, 4)
    return Tiling(1, 1, 12 if rows <= 64 else 16, 8, 64, 64 if rows <= 64 else 128, 6, 4)


class Arguments(NamedTuple):
    """The arguments of a launch."""

    programs: tuple[int, int, int]
    """Blocks of rows, tiles of weights, parts of K."""
    tiles: list[tuple[Tensor, dict[str, Any]]]
    """Inputs and weights, and the fields that their descriptors share."""
    others: list[Any]
    constants: dict[str, Any]


def _in_rows(x: Tensor) -> Tensor:
    """A contiguous x [n,K] with row stride K, which a descriptor needs: a single row may have any stride."""
    return x if x.stride(0) == x.shape[1] else x.as_strided(x.shape, (x.shape[1], 1))


def arguments(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], results: list[Tensor], gate: Tensor | None, form: Tiling, *, relu_squared: bool,
    early: bool, counts: Tensor | None = None, lasts: Lasts | None = None,
) -> Arguments:  # fmt: skip
    """The arguments of ``penstock_products_hopper``."""
    (R, K), more = inputs[0].shape, PARTS - len(weights)
    BM, BN, BK = form.rows or power(min(R, ROWS), 8), form.HEIGHT // form.APART, UNIT * form.APART * form.GROUPS
    columns = [not one.is_contiguous() for one in weights]
    inputs = [_in_rows(x if x.data_ptr() % 16 == 0 else x.clone()) for x in inputs]
    weights = [_in_rows(weight) if weight.is_contiguous() else weight for weight in weights]
    tiles = [(x, description(x, Tile(BM, BK, 1))) for x in inputs]
    tiles += [tiles[0]] * more
    for i, weight in enumerate(weights):
        of_columns, of_rows = Tile(BK, BN, 1), Tile(BN, BK, 1)
        tiles.append((weight.T, description(weight.T, of_columns)) if columns[i] else (weight, description(weight, of_rows)))
    tiles += [tiles[PARTS]] * more
    rows = [weight.shape[0] for weight in weights]
    begins = [sum(-(-N // BN) for N in rows[:part]) for part in range(len(rows) + 1)]
    programs = (-(-R // BM), begins.pop(), form.SPREAD)
    parts = x = inputs[0]
    if form.SPREAD > 1:
        assert counts is not None
        parts = x.new_empty(prod(programs) * BN * BM, dtype=torch.float32)
    others: list[Any] = [
        *results, *[results[0]] * more, x if gate is None else gate, *(lasts or (x, x, x)), parts, x if counts is None else counts,
        *rows, *[0] * more, *begins[1:], *[2**31 - 1] * more, 0 if lasts is None else lasts.pool.stride(0), R,
    ]  # fmt: skip
    room = BN // 64 if form.APART == 1 else form.APART * BM // 32  # for results [BN,BM], or for float32 [HEIGHT,APART*BM]
    stages, x_stages = (
        max(min(count, -(-K // (form.SPREAD * BK))), -(-room // form.GROUPS)) for count in (form.STAGES, form.x_stages or form.STAGES)
    )
    constants = {
        "K": K, "PARTS": len(weights), "RELU_SQUARED": relu_squared, "COLUMNS": sum(one << i for i, one in enumerate(columns)),
        "GATE": gate is not None, "LASTS": lasts is not None, "BM": BM, "APART": form.APART, "GROUPS": form.GROUPS, "STAGES": stages,
        "X_STAGES": x_stages, "HEIGHT": form.HEIGHT, "SPREAD": form.SPREAD, "PDL": early,
    }  # fmt: skip
    return Arguments(programs, tiles, others, constants)


def products(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], gate: Tensor | None = None, *, relu_squared: bool = False,
    form: Tiling, early: bool = False, counts: Callable[[], Tensor] | None = None, lasts: Lasts | None = None,
) -> list[Tensor]:  # fmt: skip
    """``few_rows_launch.products`` for 16-bit rows. ``early``: no earlier kernel still writes the weights.

    ``counts``, for a form with SPREAD > 1: returns one int32 zero per tile, which the launch resets to 0. Concurrent launches must not
    share them. ``lasts``, for one map of one row with as many columns: the row of a shift state to replace.
    """
    results = [one.new_empty(one.shape[0], weight.shape[0]) for one, weight in zip(inputs, weights)]
    zeros = counts() if counts is not None and form.SPREAD > 1 else None
    given = arguments(inputs, weights, results, gate, form, relu_squared=relu_squared, early=early, counts=zeros, lasts=lasts)
    options = {"launch_pdl": True} if early else {}
    on_device_of(inputs[0], hopper_products.penstock_products_hopper)[given.programs](
        *[described(x, known) for x, known in given.tiles], *given.others, **given.constants, num_warps=form.warps, **options
    )
    if lasts is not None:
        count_write(lasts.pool)
    return results
