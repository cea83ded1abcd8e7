"""Launches of the linear maps of up to some hundred rows on Hopper."""

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
PARTS = 5
"""Linear maps of one launch, at most."""
ROWS = 128
"""Rows of x of a program, at most, if its form does not name them."""


class Form(NamedTuple):
    """A program of ``penstock_products_hopper``. Bits depend on APART * SPREAD only."""

    APART: int
    """Parts of K side by side, each with 64 / APART weights."""
    GROUPS: int
    """Products of a stage."""
    STAGES: int
    """Stages of the ring of weights, at most. Before the wait for the kernel ahead, all are loaded."""
    warps: int = 4
    HEIGHT: int = 64
    """Rows of the left operand: 64, or 128 with 8 warps, APART = 1 and GROUPS = 1."""
    rows: int = 0
    """Rows of x of a program, a power of two from 8 to 256. 0: all, or 128."""
    x_stages: int = 0
    """Stages of the ring of x. 0: as many."""
    SPREAD: int = 1
    """Parts of K with programs of their own; APART and GROUPS are 1 then."""


WIDE = 100
"""From so many tiles of 64 weights on, K is in one part: there are about as many programs as multiprocessors."""
HALVES = Form(2, 2, 5)
"""Tiles of 32 weights and two parts of K, whose bits are others than those of one part."""
TILES = 2**16 - 1
"""Tiles of 64 weights of a launch, at most: the second axis of a grid."""


def takes(weights: Sequence[Tensor]) -> bool:
    """Whether the kernel can read weights of 16 bits: their rows, or the columns of the first one, begin at multiples of 16 bytes."""
    dense = (weight if weight.is_contiguous() else weight.T for weight in weights)
    return _tiles(weights) <= TILES and all(one.data_ptr() % 16 == 0 == 2 * one.shape[1] % 16 for one in dense)


def _tiles(weights: Sequence[Tensor]) -> int:
    return sum(-(-weight.shape[0] // UNIT) for weight in weights)


def split_of(weights: Sequence[Tensor]) -> int:
    """In how many parts K is summed: more where there are few weights, whatever the number of rows."""
    return 1 if _tiles(weights) >= WIDE else 4


def form_of(rows: int, weights: Sequence[Tensor], multiprocessors: int, *, alike: bool = True) -> Form | None:
    """The form of a launch, measured on an H200 with the maps of RWKV-6 of 1.6 billion parameters.

    None: there are too many rows, so that other kernels are as fast. ``alike``: with the bits of all other numbers of rows.
    """
    if split_of(weights) > 1:
        if rows <= 32:
            return Form(4, 1, 8 if rows <= 8 else 6 if rows <= 16 else 4)
        few = sum(-(-weight.shape[0] // 16) for weight in weights) * -(-rows // 16) <= multiprocessors
        return Form(4, 1, 4, rows=16) if few else _spread(rows, weights, multiprocessors)
    if rows > 64:
        return _wide(rows, sum(-(-weight.shape[0] // 128) for weight in weights), multiprocessors)
    if rows > 32:
        return Form(1, 1, 8, rows=64, x_stages=8 if _tiles(weights) <= multiprocessors else 4)
    if not alike and 4 < rows <= 8 and len(weights) == PARTS and _tiles(weights) <= multiprocessors:
        return HALVES  # 8 rows: 0.96 times the time of a step; 4 rows 0.99, 1 row 1.05, the two maps of a channel mix 1.08 to 1.09
    return Form(1, 2, 6 if rows <= 8 else 5 if rows <= 16 else 4)


def _wide(rows: int, tiles: int, multiprocessors: int) -> Form | None:
    """The form for this many tiles of 128 weights. If there are more programs than multiprocessors, two share one."""
    if tiles * -(-rows // 128) <= multiprocessors or rows <= 128:
        return Form(1, 1, 9, 8, 128, 128, 4)
    if rows <= 192:
        return Form(1, 1, 5, 8, 128, 64, 4)
    if rows <= 384 and tiles * -(-rows // 128) <= 2 * multiprocessors:
        return Form(1, 1, 4, 8, 128, 128, 3)
    return Form(1, 1, 4, 8, 128, 256) if rows <= 512 and tiles * 2 <= multiprocessors else None


def _spread(rows: int, weights: Sequence[Tensor], multiprocessors: int) -> Form | None:
    """The form with K in 4 parts, each with programs of its own."""
    HEIGHT = 64 if rows <= 128 else 128
    programs = 4 * sum(-(-weight.shape[0] // HEIGHT) for weight in weights) * -(-rows // 128)
    if programs > 2 * multiprocessors:
        return None
    return Form(1, 1, 12 if rows <= 64 else 16, 8, 64, 64 if rows <= 64 else 128, 6, 4) if rows <= 128 else Form(1, 1, 8, 8, 128, 128, 5, 4)


class Arguments(NamedTuple):
    """Of a launch."""

    programs: tuple[int, int, int]
    """Blocks of rows, tiles of weights, parts of K."""
    tiles: list[tuple[Tensor, dict[str, Any]]]
    """Inputs and weights, and what their descriptors share."""
    others: list[Any]
    constants: dict[str, Any]


def _in_rows(x: Tensor) -> Tensor:
    """A contiguous x [n,K] whose rows are K apart, as a descriptor needs them. A single row may have had any stride."""
    return x if x.stride(0) == x.shape[1] else x.as_strided(x.shape, (x.shape[1], 1))


def arguments(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], results: list[Tensor], gate: Tensor | None, form: Form, *, relu_squared: bool,
    early: bool, counts: Tensor | None = None, lasts: Lasts | None = None,
) -> Arguments:  # fmt: skip
    """Those of ``penstock_products_hopper``."""
    (R, K), more = inputs[0].shape, PARTS - len(weights)
    BM, BN, BK = form.rows or power(min(R, ROWS), 8), form.HEIGHT // form.APART, UNIT * form.APART * form.GROUPS
    columns = not weights[0].is_contiguous()
    inputs = [_in_rows(x if x.data_ptr() % 16 == 0 else x.clone()) for x in inputs]
    weights = [_in_rows(weight) if weight.is_contiguous() else weight for weight in weights]
    tiles = [(x, description(x, Tile(BM, BK, 1))) for x in inputs]
    tiles += [tiles[0]] * more
    for i, weight in enumerate(weights):
        turned = columns and i == 0
        tiles.append((weight.T, description(weight.T, Tile(BK, BN, 1))) if turned else (weight, description(weight, Tile(BN, BK, 1))))
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
        "K": K, "PARTS": len(weights), "RELU_SQUARED": relu_squared, "COLUMNS": columns, "GATE": gate is not None,
        "LASTS": lasts is not None, "BM": BM, "APART": form.APART, "GROUPS": form.GROUPS, "STAGES": stages, "X_STAGES": x_stages,
        "HEIGHT": form.HEIGHT, "SPREAD": form.SPREAD, "PDL": early,
    }  # fmt: skip
    return Arguments(programs, tiles, others, constants)


def products(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], gate: Tensor | None = None, *, relu_squared: bool = False,
    form: Form, early: bool = False, counts: Callable[[], Tensor] | None = None, lasts: Lasts | None = None,
) -> list[Tensor]:  # fmt: skip
    """As ``few_rows_launch.products``, for rows of 16 bits. ``early``: no kernel just ahead writes the weights.

    ``counts``, for a form with SPREAD > 1: makes int32 zeros for each tile, which are zeros again behind the launch. Launches at the same
    time must not share them. ``lasts``, for one map of one row with as many columns: a row of a shift state that is replaced.
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
