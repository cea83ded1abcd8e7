"""The launch of ``penstock_shifted_low_rank``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu.launch import on_device_of
from ...gpu.target import power
from . import hopper_low_rank
from .few_rows_launch import Shift

WARPS = hopper_low_rank.WARPS.value
WEIGHTS = 2**16
"""Of a part of ``down``, at most: half of the registers of a multiprocessor."""
WIDE = 512
"""Columns of a program, at most; half as many if all programs run side by side then."""
RANK = 64
"""M, at most, as for ``token_shift``."""
REGISTERS = 216
"""Of a thread, at most, so that a program runs beside those of the launches ahead and behind, which fill the shared memory."""


def takes(R: int, C: int, parts: int, M: int, multiprocessors: int) -> bool:
    """Whether the weights fit into registers, and the programs of all rows run side by side."""
    return M <= RANK and _padded(C) * power(M) <= WEIGHTS and -(-C // WIDE) * parts * R <= multiprocessors


def _padded(C: int) -> int:
    return power(C, 32 * WARPS)


class Arguments(NamedTuple):
    """Of a launch."""

    programs: tuple[int, int, int]
    """Blocks of columns, parts, rows."""
    given: list[Any]
    constants: dict[str, Any]


def arguments(
    shift: Shift, mu: Tensor, down: Tensor, up: Tensor, results: Sequence[Tensor], multiprocessors: int, *, early: bool
) -> Arguments:
    """Those of ``penstock_shifted_low_rank``. ``results``: the sum, its norm, and the interpolations [n,R,C]."""
    x, y, weight, bias, eps, centre, pool, slots, factors = shift
    total, normed, shifted = results
    (R, C), (n, M, _) = x.shape, up.shape
    BN = WIDE // 2 if -(-C // (WIDE // 2)) * n * R <= multiprocessors else WIDE
    given: list[Any] = [
        x, x if y is None else y, total, weight, weight if bias is None else bias, pool, slots, normed, mu, down,
        up, *factors, *factors[:1] * (5 - n), shifted, C, pool.shape[0], pool.stride(0), eps,
    ]  # fmt: skip
    constants = {
        "ADD": y is not None, "CENTRE": centre, "BIAS": bias is not None, "PARTS": n, "M": M, "BM": power(M),
        "BC": _padded(C), "BN": BN, "PDL": early,
    }  # fmt: skip
    return Arguments((-(-C // BN), n, R), given, constants)


def shifted_low_rank(shift: Shift, mu: Tensor, down: Tensor, up: Tensor, multiprocessors: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sum [R,C] of a ``Shift``, its norm, and the interpolations [n,R,C] that RWKV-6 has: mu [C], down [C,n*M], up [n,M,C].

    All are of 16 bits. No kernel just ahead writes the weights. The pool does not change: ``normed`` is to be written to its rows behind
    this launch.
    """
    x, y = shift.x, shift.y
    total, normed, shifted = x if y is None else torch.empty_like(x), torch.empty_like(x), x.new_empty(up.shape[0], *x.shape)
    programs, given, constants = arguments(shift, mu, down, up, (total, normed, shifted), multiprocessors, early=True)
    on_device_of(x, hopper_low_rank.penstock_shifted_low_rank)[programs](
        *given, **constants, num_warps=WARPS, maxnreg=REGISTERS, launch_pdl=True
    )
    return total, normed, shifted
