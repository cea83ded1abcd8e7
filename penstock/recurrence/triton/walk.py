"""The launches for heads of several blocks of key channels on Hopper: weights of all chunks at once, then a walk over chunks.

Forward, the walk computes the outputs. Backward in time it computes dv and the state's gradients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ...gpu.hopper import Tile
from ...gpu.plan import Plan, Size
from ..declaration import Recurrence
from . import hopper

if TYPE_CHECKING:
    from .plan import Call

State = tuple[str, tuple[int, ...]]
"""The name and the strides of a state."""


def weights(plan: Plan, c: Call, p: Recurrence, kernels: hopper.Walk, adjoint: bool) -> None:
    """Add the launch for ``weights``, ``read``, ``rest``, ``totals`` and ``powers``, which the walk reads."""
    slots, tokens = c.chunks(hopper.C), (lambda s: s["B"], lambda s: s["T"], c.H)
    made = (
        plan.empty("weights", slots, c.H, hopper.C, hopper.C, dtype=p.k.dtype),
        *(plan.empty(name, *tokens, c.K, dtype=p.k.dtype) for name in ("read", "rest")),
        plan.empty("totals", slots, c.H, c.K),
        plan.empty("powers", slots, c.H, hopper.C) if _half(p) else "totals",
    )
    (g_b, g_t, g_h, g_k), (warps, registers) = c.gate, hopper.WEIGHTS
    plan.launch(
        kernels.weights, c.programs(slots, 1), ("q", "k", "g", "u", *made, "cu_seqlens"),
        (_scale(p)[0], lambda s: s["N"], lambda s: s["T"], g_b, g_h, *(p.u.stride() if p.u is not None else (0, 0))), warps,
        (Tile(hopper.C, hopper.BV),) * 2, registers, g_t=g_t, g_k=g_k, H=c.H, K=c.K, PREVIOUS=c.previous, PACKED=c.packed,
        ROW_POWERS=_half(p) and not adjoint,
    )  # fmt: skip


def _half(p: Recurrence) -> bool:
    """Whether operands without a bound are multiplied by powers of two."""
    return p.k.dtype == torch.float16


def _scale(p: Recurrence) -> tuple[float, float]:
    """The factors of ``scale`` that the weights and the walk apply. float16: one of at most 1, which fits operands, and a power of two."""
    unit = 2.0 ** min(max(math.frexp(p.scale)[1], -60), 100) if _half(p) else 1.0  # products with it fit float32
    return p.scale / unit, unit


def over_chunks(
    plan: Plan, c: Call, p: Recurrence, kernels: hopper.Walk, y: str, output: str, first: State | None, last: str | None, L: Size | None,
    stored: str | None, every: int, adjoint: bool,
) -> None:  # fmt: skip
    """Add the walk: ``output`` from ``y``, and the states before every ``every`` tokens in ``stored``.

    ``first``: the state to start from; ``last``: the name of the final one. L: tokens of a segment; ``first`` then has one for each.
    """
    BV = c.walked_values(L)
    tile = Tile(hopper.C, BV)
    keys = Tile(hopper.C, c.K)
    read, rest = ("rest", "read") if adjoint else ("read", "rest")
    in_tiles = output if plan.memory[output][1].itemsize == 2 else y
    powers, unit = "powers" if _half(p) else "totals", _scale(p)[1]
    of_S = unit if adjoint else 1.0
    states = (Tile(c.K // 2, BV, 3) if stored is not None else tile,) if not _half(p) else ()
    name, steps = first if first is not None else ("totals", (0, 0, 0, 0))
    plan.launch(
        kernels.walk, c.programs(c.chunks(L) if L is not None else lambda s: s["N"], c.V // BV),
        (read, "weights", y, rest, in_tiles, stored if stored is not None else y, "totals", powers, name, output,
         last if last is not None else "totals", "cu_seqlens"),
        (unit, of_S, 1 / of_S, lambda s: s["N"], lambda s: s["T"], L if L is not None else 0, c.H, *steps), BV // 16,
        (keys, Tile(hopper.C, hopper.C, 3), tile, keys, tile, *states),
        K=c.K, V=c.V, BV=BV, SEGMENTS=L is not None, INITIAL=first is not None, FINAL=last is not None, EVERY=every, ADJOINT=adjoint,
        PACKED=c.packed,
    )  # fmt: skip
