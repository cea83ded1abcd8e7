"""Gradients of the inputs of the recurrence."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Gradients(NamedTuple):
    """Gradients of the differentiable inputs, with their shapes and dtypes; None if an input is missing or needs no gradient."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    g: Tensor | None
    u: Tensor | None
    initial_state: Tensor | None
