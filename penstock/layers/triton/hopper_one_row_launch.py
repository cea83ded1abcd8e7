"""Launches for a decode step of one token of RWKV-6 on Hopper, each with the launch of the linear maps that follow.

All tensors are contiguous, with dtypes of 16 bits. No kernel still writes weights, interpolation factors or parameters of norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu.hopper import Tile, described, description
from ...gpu.launch import on_device_of
from ...gpu.target import Target, power
from . import hopper_one_row as kernels
from . import hopper_products_launch as maps
from .few_rows_launch import Lasts
from .hopper_products_launch import UNIT

WARPS, PARTS = kernels.WARPS.value, kernels.PARTS.value
HEIGHT, GROUPS, LINES = kernels.HEIGHT.value, kernels.GROUPS.value, kernels.LINES.value
COLUMNS = 256
"""Columns per program of low-rank maps. With 512, a step took 1.217 times the time instead of 1.191 (H200, with earlier forms of the next
maps)."""
WEIGHTS = 2**16
"""The most weights of a part of ``down``: half of a multiprocessor's registers."""
RANK = 64
"""The largest M, as for ``token_shift``."""
REGISTERS = 216
"""The most registers per thread of low-rank maps. So a program can run beside those of the previous and the next launch, which fill the
shared memory."""
STAGES = 6
"""Stages of the ring of weights, as for the same maps without the norm. Two programs share a multiprocessor."""


class Shift(NamedTuple):
    """The norm of x + y, and its interpolations with a row of a pool, for one token."""

    x: Tensor
    """[1,C]"""
    y: Tensor | None
    """[1,C]"""
    weight: Tensor
    """[C]"""
    bias: Tensor | None
    """[C]"""
    eps: float
    centre: bool
    """True: layer norm. False: RMS norm."""
    pool: Tensor
    """[P,C], contiguous rows, at least one."""
    slots: Tensor
    """[1]"""
    factors: Sequence[Tensor]
    """mu_i [C]."""


class Arguments(NamedTuple):
    """The arguments of a launch."""

    programs: tuple[int, ...]
    tiles: list[tuple[Tensor, dict[str, Any]]]
    """Weights, and the fields that their descriptors share."""
    given: list[Any]
    constants: dict[str, Any]


def takes_low_rank(up: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether ``low_rank_maps`` takes low-rank maps up [5,M,C] and the linear maps after them: all weights fit into registers.

    Weights so small that ``form_of`` has four parts of K were not measured.
    """
    n, M, C = up.shape
    fits = n == PARTS == len(weights) and M <= RANK and _padded(C) * power(M) <= WEIGHTS
    return fits and maps.takes(weights) and maps.split_of(weights) < 4


def _padded(C: int) -> int:
    return power(C, 32 * WARPS)


def low_rank_arguments(shift: Shift, mu: Tensor, down: Tensor, up: Tensor, results: Sequence[Tensor], *, early: bool) -> Arguments:
    """The arguments of ``penstock_shifted_low_rank``. ``results``: the sum, its norm, and the interpolations [5,1,C]."""
    x, y, weight, bias, eps, centre, pool, slots, factors = shift
    total, normed, shifted = results
    C, M = x.shape[1], up.shape[1]
    given: list[Any] = [
        x, x if y is None else y, total, weight, weight if bias is None else bias, pool, slots, normed, mu, down, up, *factors, shifted, C,
        pool.shape[0], pool.stride(0), eps,
    ]  # fmt: skip
    constants = {
        "ADD": y is not None, "CENTRE": centre, "BIAS": bias is not None, "M": M, "BM": power(M), "BC": _padded(C), "BN": COLUMNS,
        "PDL": early,
    }  # fmt: skip
    return Arguments((-(-C // COLUMNS), PARTS), [], given, constants)


def low_rank_maps(shift: Shift, mu: Tensor, down: Tensor, up: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], Lasts]:
    """The sum of a ``Shift``, and the products of the weights [N,C] with RWKV-6's interpolations, in two launches.

    mu [C], down [C,5*M], up [5,M,C]. The first weight may be the transpose of a contiguous tensor. The pool does not change.
    """
    x, y = shift.x, shift.y
    total, normed, shifted = x if y is None else torch.empty_like(x), torch.empty_like(x), x.new_empty(PARTS, *x.shape)
    programs, _, given, constants = low_rank_arguments(shift, mu, down, up, (total, normed, shifted), early=True)
    on_device_of(x, kernels.penstock_shifted_low_rank)[programs](*given, **constants, num_warps=WARPS, maxnreg=REGISTERS, launch_pdl=True)
    results = maps.products(shifted.unbind(), weights, form=maps.HALVES, early=True)
    return total, results, Lasts(normed, shift.pool, shift.slots)


def takes_channel_mix(key: Tensor, receptance: Tensor, value: Tensor) -> bool:
    """Whether ``channel_mix`` takes these maps: key and receptance are so large that a program sums over all of K."""
    (F, C), both = key.shape, [key, receptance]
    same = receptance.shape == (C, C) and value.shape == (C, F)
    return same and C % (LINES * UNIT) == 0 and maps.split_of(both) < 4 and maps.takes(both) and maps.takes([value])


def channel_arguments(shift: Shift, weights: Sequence[Tensor], results: Sequence[Tensor], *, early: bool) -> Arguments:
    """The arguments of ``penstock_shifted_products``. ``results``: the sum, its norm, and the two products."""
    x, y, weight, bias, eps, centre, pool, slots, factors = shift
    K, rows = x.shape[1], [one.shape[0] for one in weights]
    total, normed, *products = results
    begin, end = -(-rows[0] // HEIGHT), sum(-(-N // HEIGHT) for N in rows)
    given: list[Any] = [
        x, x if y is None else y, total, weight, weight if bias is None else bias, pool, slots, normed, *factors, *products, *rows, begin,
        pool.shape[0], pool.stride(0), eps,
    ]  # fmt: skip
    constants = {
        "K": K, "ADD": y is not None, "CENTRE": centre, "BIAS": bias is not None, "BLOCKS": power(K) // UNIT,
        "STAGES": min(STAGES, K // (UNIT * GROUPS)), "PDL": early,
    }  # fmt: skip
    return Arguments((end,), [(one, description(one, Tile(HEIGHT, UNIT * GROUPS, 1))) for one in weights], given, constants)


def channel_mix(shift: Shift, key: Tensor, receptance: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of a ``Shift``, and the channel mix of its norm, in two launches. The norm replaces the row of the pool."""
    x, y = shift.x, shift.y
    results = [x if y is None else torch.empty_like(x), torch.empty_like(x), x.new_empty(1, key.shape[0]), torch.empty_like(x)]
    programs, tiles, given, constants = channel_arguments(shift, [key, receptance], results, early=True)
    on_device_of(x, kernels.penstock_shifted_products)[programs](
        *[described(one, known) for one, known in tiles], *given, **constants, num_warps=4, launch_pdl=True
    )
    total, normed, hidden, gate = results
    form = maps.form_of(1, [value], Target.of(x.device).multiprocessors)
    assert form is not None  # there is always a form for one row
    (found,) = maps.products([hidden], [value], gate, form=form, early=True, lasts=Lasts(normed, shift.pool, shift.slots))
    return total, found
