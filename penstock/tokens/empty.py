"""Calls without tokens, for which no kernel is launched."""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import OverSequences, TokenProblem


def nothing(p: TokenProblem) -> bool:
    """Whether there are no tokens."""
    return not p.sizes["B"] or not p.sizes["T"]


def forward_of_nothing(p: OverSequences) -> tuple[Tensor, Tensor]:
    """Without tokens the final state is the initial state."""
    state = p.initial_state
    final = p.q.new_zeros(p.state_shape, dtype=torch.float32) if state is None else state.to(torch.float32, copy=True)
    return p.v.new_zeros(p.v.shape), final


def gradients_of_nothing(p: OverSequences, d_final_state: Tensor | None) -> tuple[Tensor | None, ...]:
    """For each differentiable argument: the gradient of the final state is that of the initial one; all others are 0."""
    found: list[Tensor | None] = []
    for one in p.signature.arguments:
        if one.gradient:
            x: Tensor | None = getattr(p, one.name)
            if x is None or one.name != "initial_state" or d_final_state is None:
                found.append(None if x is None else torch.zeros_like(x))
            else:
                found.append(d_final_state.to(x.dtype, copy=True))
    return tuple(found)
