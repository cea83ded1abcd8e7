"""Rows of state pools that Triton kernels read and write in place, without a copy of the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .chains import Chain, ChainForm, plain
from .examples import Draw, examples
from .triton import launching, refusal


class PoolRows(NamedTuple):
    """Rows of a pool. Some kernels read them in place; others need a copy."""

    pool: Tensor
    """[P,C]"""
    slots: Tensor
    """[N]; negative ones are skipped."""
    read: Callable[[], Tensor]
    """Makes a copy of the rows, [N,C]."""


def reads_rows(x: Tensor, pool: Tensor) -> bool:
    """Whether kernels for tokens x read rows of a pool in place."""
    return not torch.is_grad_enabled() and pool.shape[0] > 0 and pool[0].is_contiguous() and refusal(x, pool) is None


def write_rows(states: Tensor, pool: Tensor, slots: Tensor, ends: Tensor | None = None) -> bool:
    """Write states [N,...] to rows of a pool, except for negative slots. Returns whether a kernel did it.

    With ends [N+1]: write the last of the packed tokens [T,...] of each sequence, nothing for an empty one.
    """
    return WRITE_ROWS(_Write(states, pool, slots, ends))


class _Write(NamedTuple):
    """The arguments of ``write_rows``."""

    states: Tensor
    pool: Tensor
    slots: Tensor
    ends: Tensor | None


def _refuses(c: _Write) -> str | None:
    if (why := refusal(c.states, c.pool)) is not None:
        return why
    return None if c.states[0].is_contiguous() and c.pool[0].is_contiguous() else "rows must be contiguous"


def _written(c: _Write) -> bool:
    launching("rows").write_rows(c.states, c.pool, c.slots.contiguous(), None if c.ends is None else c.ends.contiguous())
    return True


def _formula(c: _Write) -> Tensor:
    """The pool with the rows of all slots that are not negative."""
    for n, slot in enumerate(c.slots.tolist()):
        begin, end = (n, n + 1) if c.ends is None else c.ends[n : n + 2].tolist()
        if slot >= 0 and begin < end:
            c.pool[slot] = c.states[end - 1].to(c.pool.dtype)
    return c.pool


def _draw(draw: Draw, packed: bool = False) -> _Write:
    C = draw.size(30, 1024)
    states, pool, slots = draw("states", 9 if packed else 4, 2, C), draw("pool", 5, 2, C), draw.whole([3, -1, 0, 4])
    return _Write(states, pool, slots, draw.whole([0, 3, 5, 5, 9]) if packed else None)


WRITE_ROWS: Chain[_Write, bool] = Chain(
    "write_rows",
    ChainForm(
        "write_rows", _written, _refuses, lambda c: ("penstock_write_rows",),
        (*examples(_draw, gradients=False), *examples(partial(_draw, packed=True), gradients=False)),
    ),
    plain("caller", lambda c: False),
    formula=_formula,
    results=lambda c, written: c.pool,
)  # fmt: skip
