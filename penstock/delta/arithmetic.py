"""The products of a chunk, exact or with rounded operands: the same formulas give results and, in ``rounded.py``, errors of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def _solved_right(L: Tensor, x: Tensor) -> Tensor:
    found: Tensor = torch.linalg.solve_triangular(L, x, upper=False, left=False, unitriangular=True)
    return found


def _solved_transposed(L: Tensor, x: Tensor) -> Tensor:
    found: Tensor = torch.linalg.solve_triangular(L.mT, x, upper=True, unitriangular=True)
    return found


def _solved_left(L: Tensor, x: Tensor) -> Tensor:
    found: Tensor = torch.linalg.solve_triangular(L, x, upper=False, unitriangular=True)
    return found


class Arithmetic(NamedTuple):
    """Products of matrices [..., M, K] and [..., K, N], and with the inverse T of a unit lower triangular matrix L."""

    product: Callable[[Tensor, Tensor], Tensor]
    right: Callable[[Tensor, Tensor], Tensor]
    """x T, of L and x"""
    transposed: Callable[[Tensor, Tensor], Tensor]
    """T^T x"""
    left: Callable[[Tensor, Tensor], Tensor]
    """T x"""
    stored: Callable[[Tensor], Tensor]
    """States, their gradients, dv and what is written, as they are kept between passes."""


EXACT = Arithmetic(torch.matmul, _solved_right, _solved_transposed, _solved_left, lambda x: x)
