"""Gradients of the inputs of a problem that an implementation computes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Gradients(NamedTuple):
    """What ``backward`` of an implementation returns, with the shapes and dtypes of the inputs; None if an input is missing or needs none.

    Those of q, k, a and b may be per head of v where groups share heads. Those of raw inputs follow from these (``inputs.py``), unless an
    implementation reads raw inputs itself: then q, k and beta are the raw ones, and it returns the last three, too.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    g: Tensor | None
    beta: Tensor | None
    a: Tensor | None
    b: Tensor | None
    initial_state: Tensor | None
    raw: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
