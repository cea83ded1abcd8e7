"""Results of public functions over sequences."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Result(NamedTuple):
    """The result of the functions over sequences."""

    output: Tensor
    """[B,T,H,V], v's dtype"""
    final_state: Tensor | None
    """[N,H,K,V], float32 (float64 for float64 inputs); None unless asked for"""
