"""Gradients of the inputs of the recurrence, and results of calls without tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .declaration import Recurrence, Tokens


class Gradients(NamedTuple):
    """Gradients of the differentiable inputs, with their shapes and dtypes; None if an input is missing or needs no gradient."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    g: Tensor | None
    u: Tensor | None
    initial_state: Tensor | None


def summed(shares: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of an input's gradient over leading axes that the input does not have, in its dtype or the given one."""
    more = shares.dim() - like.dim()
    found = shares.sum(tuple(range(more))) if more else shares
    dtype = dtype or like.dtype
    return found if found.dtype == dtype else found.to(dtype)


def nothing(p: Tokens) -> bool:
    """Whether there are no tokens, so no kernel is launched."""
    return not p.sizes["B"] or not p.sizes["T"]


def forward_of_nothing(p: Recurrence) -> tuple[Tensor, Tensor]:
    """Without tokens the final state is the initial state."""
    state = p.initial_state
    final = p.q.new_zeros(p.state_shape, dtype=torch.float32) if state is None else state.to(torch.float32, copy=True)
    return p.v.new_zeros(p.v.shape), final


def backward_of_nothing(p: Recurrence, d_final_state: Tensor | None) -> Gradients:
    """The gradient of the final state is that of the initial one; all others are 0."""
    state = p.initial_state
    q, k, v = (torch.zeros_like(x) for x in (p.q, p.k, p.v))
    g, u = (None if x is None else torch.zeros_like(x) for x in (p.g, p.u))
    d_state = None if state is None else torch.zeros_like(state) if d_final_state is None else d_final_state.to(state.dtype, copy=True)
    return Gradients(q, k, v, g, u, d_state)
