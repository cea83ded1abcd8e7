"""Heads with more than 256 key channels: each block of key channels is a recurrence of its own.

A row of the state depends on no other row, and the output is a sum over key channels:

    o = sum of o_b over blocks b,    o_b the output for the channels of q, k, g and u and the rows of the state in block b

So the kernels run once for each block, on views. Outputs of blocks, and gradients that blocks share (dv, and dg of a scalar decay), stay
float32 until they are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from ..declaration import Advance, Recurrence, Tokens
from ..gradients import Gradients

Tensors = tuple[Tensor | None, ...]
WIDTH = 256
"""Key channels of a program, at most: a column of its state lies in registers."""
P = TypeVar("P", bound=Tokens)
AXIS = {"q": 3, "k": 3, "u": 1, "initial_state": 2, "state": 2}
"""The axis of key channels, by argument."""


def blocks(p: P) -> list[P]:
    """The problems of the blocks, whose tensors are views."""
    axes = dict(AXIS)
    if "K" in p.variant.decay:
        axes["g"] = len(p.variant.decay) - 1
    given = {name: (p.__dict__[name], axis) for name, axis in axes.items() if p.__dict__.get(name) is not None}
    found = []
    for first in range(0, p.sizes["K"], WIDTH):
        count = min(WIDTH, p.sizes["K"] - first)
        one = p.with_tensors({name: x.narrow(axis, first, count) for name, (x, axis) in given.items()})
        one.sizes, one.partial = {**p.sizes, "K": count}, True
        found.append(one)
    return found


def forward(p: Recurrence, block: Callable[[Recurrence], tuple[Tensor, Tensor, Tensors]]) -> tuple[Tensor, Tensor, Tensors]:
    """Output, final state and residuals from those that ``block`` computes of each block."""
    outputs, states, residuals = zip(*map(block, blocks(p)))
    return _total(outputs, p.v.dtype), torch.cat(states, 2), tuple(chain(*residuals))


def advance(p: Advance, block: Callable[[Advance], Tensor]) -> Tensor:
    """Output; the states are updated in place."""
    return _total([block(one) for one in blocks(p)], p.v.dtype)


def backward(p: Recurrence, d_final_state: Tensor | None, block: Callable[[int, Recurrence, Tensor | None], Gradients]) -> Gradients:
    """All gradients from those that ``block`` computes of each block, given its number and the gradient of its final state."""
    parts = blocks(p)
    ends: list[Tensor | None] = [None] * len(parts)
    if d_final_state is not None:
        ends = [d_final_state.narrow(2, n * WIDTH, one.sizes["K"]) for n, one in enumerate(parts)]
    q, k, v, g, u, state = zip(*[block(n, one, end) for n, (one, end) in enumerate(zip(parts, ends))])
    shared = p.g is not None and g[0] is not None and "K" not in p.variant.decay
    dg = _total(g, p.g.dtype) if shared else _joined(g, -1, p.g)  # type: ignore[union-attr]
    du, d_state = _joined(u, 1, p.u), _joined(state, 2, p.initial_state)
    return Gradients(torch.cat(q, 3), torch.cat(k, 3), _total(v, p.v.dtype), dg, du, d_state)


def _total(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return reduce(Tensor.add_, parts).to(dtype)


def _joined(parts: Sequence[Tensor | None], axis: int, like: Tensor | None) -> Tensor | None:
    """The blocks of a gradient, in the dtype of its input."""
    given = [x for x in parts if x is not None]
    return torch.cat(given, axis).to(like.dtype) if given and like is not None else None
