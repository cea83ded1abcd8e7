"""The launch of ``penstock_shifted_products``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu.hopper import Tile, described, description
from ...gpu.launch import on_device_of
from ...gpu.target import power
from . import hopper_shifted_products as kernels
from .few_rows_launch import PARTS, Shift
from .hopper_products_launch import UNIT, in_rows, split_of

HEIGHT, GROUPS, LINES = kernels.HEIGHT.value, kernels.GROUPS.value, kernels.LINES.value
STAGES = 6
"""Of the ring of weights, as for the same maps with given inputs. Two programs share a multiprocessor."""
HELD = 8
"""Blocks of weights in registers, 0 or 8."""
MOST = 4096
"""Elements of a token, at most: as many for each thread as it has registers for."""


def takes(weights: Sequence[Tensor]) -> bool:
    """Whether the kernel can read these weights, and they are so many that a program sums over all of K."""
    K = weights[0].shape[1]
    whole = all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in weights)
    return whole and K % (LINES * UNIT) == 0 and K <= MOST and split_of(weights) == 1


class Arguments(NamedTuple):
    """Of a launch."""

    programs: int
    tiles: list[tuple[Tensor, dict[str, Any]]]
    """Weights, and what their descriptors share."""
    given: list[Any]
    constants: dict[str, Any]


def arguments(
    shift: Shift, weights: Sequence[Tensor], results: Sequence[Tensor], *, complement: bool, relu_squared: bool, early: bool
) -> Arguments:
    """Those of ``penstock_shifted_products``. ``results``: the sum, its norm, and the products."""
    x, y, weight, bias, eps, centre, pool, slots, factors = shift
    total, normed, products, more, K = results[0], results[1], list(results[2:]), PARTS - len(weights), x.shape[1]
    held = HELD if K > LINES * UNIT else 0
    tiles = [(one, description(one, Tile(HEIGHT, UNIT * GROUPS, 1))) for one in map(in_rows, weights)]
    rows = [one.shape[0] for one in weights]
    begins = [sum(-(-N // HEIGHT) for N in rows[:part]) for part in range(len(rows) + 1)]
    programs = begins.pop()
    others: list[Any] = [
        x, x if y is None else y, total, weight, weight if bias is None else bias, pool, slots, normed, *factors, *factors[:1] * more,
        *weights, *[weights[0]] * more, *products, *products[:1] * more, *rows, *[0] * more, *begins[1:], *[2**31 - 1] * more,
        pool.shape[0], pool.stride(0), eps,
    ]  # fmt: skip
    constants = {
        "K": K, "ADD": y is not None, "CENTRE": centre, "BIAS": bias is not None, "COMPLEMENT": complement, "PARTS": len(weights),
        "RELU_SQUARED": relu_squared, "BLOCKS": power(K) // UNIT, "STAGES": min(STAGES, (K // UNIT - held) // GROUPS), "HELD": held,
        "PDL": early,
    }  # fmt: skip
    return Arguments(programs, [*tiles, *tiles[:1] * more], others, constants)


def shifted_products(
    shift: Shift, weights: Sequence[Tensor], *, complement: bool, relu_squared: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The sum [1,K] of a ``Shift``, its norm, and the products of its interpolations and the weights [N,K].

    All are of 16 bits. No kernel just ahead writes the weights. The pool does not change: the norm is to be written to its row behind this
    launch. ``complement``: factors are 1 - mu_i. ``relu_squared``: the first product is relu(y)^2.
    """
    x, y = shift.x, shift.y
    results = [x if y is None else torch.empty_like(x), torch.empty_like(x), *(x.new_empty(1, one.shape[0]) for one in weights)]
    given = arguments(shift, weights, results, complement=complement, relu_squared=relu_squared, early=True)
    on_device_of(x, kernels.penstock_shifted_products)[given.programs, 1, 1](
        *[described(one, known) for one, known in given.tiles], *given.given, **given.constants, num_warps=4, launch_pdl=True
    )
    return results[0], results[1], results[2:]
