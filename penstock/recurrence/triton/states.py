"""The launches for states before segments or before all chunks, and for gradients of states behind them.

If sequences and heads fill the GPU, one launch walks over whole sequences. Otherwise sequences are cut: one launch computes the sums of
segments, one scans over them (see ``segments.py``). For states before all chunks these segments are single chunks, if their sums take
little memory; else a third launch walks over the segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...gpu.hopper import Tile
from ...gpu.plan import Plan, Size, Sizes, chunks, contiguous
from ...gpu.target import power
from . import hopper, segments

if TYPE_CHECKING:
    from .plan import Call

State = tuple[str, tuple[int, ...]]
"""The name and the strides of a state."""
SUMS = 32 << 20
"""Bytes of the sums of all chunks, at most. Beyond, segments are walked over: their sums take little memory."""
AT_ONCE = 8
"""Sums that a program of the scan loads at once."""
STAGES = 3
"""Of tiles that the kernels for Hopper load ahead. At K = 64, two programs fit on a multiprocessor."""


class Sum(NamedTuple):
    """What states are sums of, and where they begin and end."""

    x: str
    y: str
    steps: tuple[int, ...]
    """Strides of x and y."""
    scale: float
    reverse: bool
    first: State | None
    last: str | None
    adjoint: bool
    """Whether these are gradients of states: x is q, y is dO, and time runs backward."""
    on: hopper.States | None
    """The kernels for Hopper, if they support the problem."""

    @property
    def prefix(self) -> str:
        """Of the names of memory."""
        return "d_" * self.adjoint

    @property
    def parts(self) -> int:
        """The number of segments for the sums in a segment of another launch."""
        return self.on.parts if self.on is not None else 1

    def programs(self, c: Call) -> tuple[int, int]:
        """Programs that walk over a head, and how many of them a multiprocessor should have."""
        if self.on is not None:
            return c.V // hopper.BV, self.on.programs_per_sm
        b = c.config("states")
        return _blocks(c), b.programs_per_sm


def before_segments(plan: Plan, c: Call, of: Sum, C: int, L: Callable[[Sizes], int]) -> State:
    """Add the launches for the states before segments of L tokens, chunks of C tokens; float32. L is a multiple of ``of.parts`` chunks."""
    name, shorter = of.prefix + "segment", lambda s: L(s) // of.parts
    sums = _sums(plan, c, of, C, name, shorter)
    states = plan.empty(name + "_states", c.chunks(L), c.H, c.K, c.V) if of.parts > 1 else sums[0]
    _scan(plan, c, of, C, sums, shorter, of.parts, states)
    return states, contiguous((0, c.H, c.K, c.V))


def before_chunks(plan: Plan, c: Call, of: Sum, C: int, stored: torch.dtype, in_rows: tuple[str, ...] = ()) -> str:
    """Add the launches for the states before chunks of C tokens, of dtype ``stored``. Returns their name.

    ``in_rows``: names of tensors [B,T,H,V], each for C channels of K, whose rows get the states of whole chunks. Then the returned states
    are those of shorter chunks, [N,H,K,V], or none if there are no shorter ones.
    """
    few = c.segment(C, *of.programs(c)) is not None
    by_chunks = few and 4 * chunks(c.T, C, c.N, c.packed) * c.H * c.K * c.V <= SUMS
    if by_chunks and stored == torch.float32:
        sums = _sums(plan, c, of, C, of.prefix + "chunk", C)
        _scan(plan, c, of, C, sums, C, 1, sums[0])
        return sums[0]
    count = (lambda s: s["N"] if c.packed or s["T"] % C else 0) if in_rows else c.chunks(C)
    states = plan.empty(of.prefix + "chunk_states", count, c.H, c.K, c.V, dtype=stored)
    if by_chunks:
        _scan(plan, c, of, C, _sums(plan, c, of, C, "chunk", C), C, 1, states, in_rows)  # both directions share the memory of the sums
        return states
    L = c.segment(C * of.parts, *of.programs(c), least=3)  # segments are read twice: two take as long as one whole walk
    if L is not None:
        of = of._replace(first=before_segments(plan, c, of, C, L), last=None)
    _walk(plan, c, of, C, L, states, in_rows)
    return states


def _sums(plan: Plan, c: Call, of: Sum, C: int, name: str, L: Size) -> tuple[str, str]:
    """Add the launch for the sums of segments of L tokens and their decays, called ``name``; if L is C, of all chunks."""
    sums = plan.empty(name + "_sums", c.chunks(L), c.H, c.K, c.V)
    decays = plan.empty(name + "_decays", c.chunks(L), c.H, c.K) if c.decay else of.x
    if of.on is not None:
        W = of.parts * hopper.BV
        span = c.segment(C, c.V // W, of.on.programs_per_sm) or (lambda s: max(math.ceil(s["T"] / C), 1) * C) if L == C else L
        plan.launch(
            of.on.sums, c.programs(c.chunks(span), c.V // W), (of.x, of.y, *_decays(of), sums, decays, "cu_seqlens"),
            (of.scale, _N, _T, span, c.H, *c.gate), of.on.warps, _tiles(of, W), CHUNKS=L == C, **_flags(c, of),
            STAGES=STAGES if W <= c.K else STAGES - 1,
        )  # fmt: skip
        return sums, decays
    b = c.config("states")
    plan.launch(
        segments.penstock_segment_sums, c.programs(c.chunks(L), _blocks(c)), (of.x, of.y, "g", sums, decays, "cu_seqlens"),
        (of.scale, _N, _T, L, c.H, *of.steps, *c.gate), b.warps, **_flags(c, of), BK=b.BK, BV=b.BV, C=C, STAGES=1 if L == C else b.stages,
    )  # fmt: skip
    return sums, decays


def _scan(
    plan: Plan, c: Call, of: Sum, C: int, sums: tuple[str, str], L: Size, each: int, states: str, in_rows: tuple[str, ...] = ()
) -> None:  # fmt: skip
    """Add the launch for the states before every ``each`` segments of L tokens, from their sums and decays. A thread has 4 channels."""
    BK, BV, early = 8, min(power(c.V), 64), of.on is not None
    plan.launch(
        segments.penstock_segment_scan, c.programs(_N, math.ceil(c.K / BK) * math.ceil(c.V / BV)), (*sums, *_places(of, states, in_rows)),
        (_N, _T, L, c.H, *_first(of)[1]), BK * BV // 128, early=early, K=c.K, V=c.V, BK=BK, BV=BV, C=C, EACH=each, AT_ONCE=AT_ONCE,
        DECAY=c.decay, ADJOINT=of.adjoint, **_ends(of), PACKED=c.packed, IN_ROWS=len(in_rows), EARLY=early,
    )  # fmt: skip


def _walk(plan: Plan, c: Call, of: Sum, C: int, L: Callable[[Sizes], int] | None, states: str, in_rows: tuple[str, ...]) -> None:
    """Add the launch that walks over sequences, or over segments of L tokens."""
    owners, length, places = c.chunks(L) if L is not None else _N, L if L is not None else 0, _places(of, states, in_rows)
    flags = _flags(c, of) | _ends(of) | {"SEGMENTS": L is not None, "IN_ROWS": len(in_rows)}
    if of.on is not None:
        plan.launch(
            of.on.walk, c.programs(owners, c.V // hopper.BV), (of.x, of.y, *_decays(of), *places),
            (of.scale, _N, _T, length, c.H, *c.gate, *_first(of)[1]), of.on.warps, _tiles(of, hopper.BV), **flags, STAGES=STAGES,
        )  # fmt: skip
        return
    b = c.config("states")
    plan.launch(
        segments.penstock_chunk_states, c.programs(owners, _blocks(c)), (of.x, of.y, "g", *places),
        (of.scale, _N, _T, length, c.H, *of.steps, *c.gate, *_first(of)[1]), b.warps, **flags, BK=b.BK, BV=b.BV, C=C, STAGES=b.stages,
    )  # fmt: skip


def _blocks(c: Call) -> int:
    """Programs of the plain kernels for the state of a head."""
    b = c.config("states")
    return math.ceil(c.K / b.BK) * math.ceil(c.V / b.BV)


def _decays(of: Sum) -> tuple[str, str]:
    """The names of decays for TMA and for loads."""
    return "g" if of.on is not None and of.on.constants["TILED"] else of.x, "g"


def _tiles(of: Sum, W: int) -> tuple[Tile, ...]:
    """The tiles of x, W channels of y, and decays."""
    assert of.on is not None
    x, y, g = of.on.tiles
    return x, y._replace(columns=W), g


def _flags(c: Call, of: Sum) -> dict[str, Any]:
    """The constants that the kernels for sums and walks share."""
    flags = {"ADJOINT": of.adjoint, "PREVIOUS": c.previous, "PACKED": c.packed}
    if of.on is not None:
        return of.on.constants | flags
    return c.flags | flags | {"REVERSE": of.reverse} | ({"PRECISION": "f16"} if c.half else {})


def _first(of: Sum) -> State:
    """The name and strides of the first state, or of a dummy."""
    return of.first if of.first is not None else (of.x, (0, 0, 0, 0))


def _ends(of: Sum) -> dict[str, Any]:
    return {"INITIAL": of.first is not None, "FINAL": of.last is not None}


def _places(of: Sum, states: str, in_rows: tuple[str, ...]) -> tuple[str, ...]:
    """The names of ``first``, the states, ``behind``, ``last_states``, ``last`` and ``cu_seqlens`` of the kernels."""
    stored = (in_rows[0], in_rows[-1], states) if in_rows else (states, of.x, of.x)
    return _first(of)[0], *stored, of.last if of.last is not None else of.x, "cu_seqlens"


def _T(s: Sizes) -> int:
    return s["T"]


def _N(s: Sizes) -> int:
    return s["N"]
