"""The launches for states before segments or before all chunks, and for gradients of states after them.

If sequences and heads fill the GPU, one launch walks over whole sequences. Otherwise sequences are cut: one launch computes the sums of
segments, one scans over them (see ``segments.py``). For states before all chunks these segments are single chunks, if their sums take
little memory; else a third launch walks over the segments.

Sums and walks have several forms (``forms/states.py``), the scan has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from ...gpu.forms import Form
from ...gpu.plan import Plan, Size, Sizes, chunks, contiguous
from ...gpu.target import power
from .calls import Call, sequences, tokens
from .portable import segments

State = tuple[str, tuple[int, ...]]
"""The name and the strides of a state."""
SUMS = 32 << 20
"""Bytes of the sums of all chunks, at most. Beyond, segments are walked over: their sums take little memory."""
AT_ONCE = 8
"""Sums that a program of the scan loads at once."""


class Terms(NamedTuple):
    """The tensors of whose products states are sums, and where the states begin and end."""

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

    @property
    def prefix(self) -> str:
        """Of the names of memory."""
        return "d_" * self.adjoint

    @property
    def start(self) -> State:
        """The name and strides of the first state, or of a dummy."""
        return self.first if self.first is not None else (self.x, (0, 0, 0, 0))

    @property
    def ends(self) -> dict[str, Any]:
        """The constants of kernels that begin or end with a state of the call."""
        return {"INITIAL": self.first is not None, "FINAL": self.last is not None}


class Kernels(Protocol):
    """What a form of the states plans: the launches of sums and of walks."""

    EARLY: bool
    """Whether the scan may begin while the sums are computed (programmatic dependent launch)."""

    @staticmethod
    def parts(call: Call) -> int:
        """The number of segments for the sums in a segment of another launch."""

    @staticmethod
    def programs(call: Call) -> tuple[int, int]:
        """Programs that walk over a head, and how many of them a multiprocessor should have."""

    @staticmethod
    def sums(plan: Plan, call: Call, terms: Terms, C: int, L: Size, sums: str, decays: str) -> None:
        """Add the launch for the sums of segments of L tokens and for their decays; if L is C, of all chunks."""

    @staticmethod
    def walk(plan: Plan, call: Call, terms: Terms, C: int, L: Callable[[Sizes], int] | None, places: tuple[str, ...], rows: int) -> None:
        """Add the launch that walks over sequences, or over segments of L tokens. ``rows``: IN_ROWS of the kernel."""


StatesForm = Form[Call, type[Kernels]]


def before_segments(plan: Plan, call: Call, form: StatesForm, terms: Terms, C: int, L: Callable[[Sizes], int]) -> State:
    """Add the launches for the states before segments of L tokens, chunks of C tokens; float32.

    L is a multiple of as many chunks as the form has parts.
    """
    parts = form.plan.parts(call)
    name, shorter = terms.prefix + "segment", lambda s: L(s) // parts
    sums = _sums(plan, call, form, terms, C, name, shorter)
    states = plan.empty(name + "_states", call.chunks(L), call.H, call.K, call.V) if parts > 1 else sums[0]
    _scan(plan, call, form, terms, C, sums, shorter, parts, states)
    return states, contiguous((0, call.H, call.K, call.V))


def before_chunks(
    plan: Plan, call: Call, form: StatesForm, terms: Terms, C: int, stored: torch.dtype, in_rows: tuple[str, ...] = ()
) -> str:  # fmt: skip
    """Add the launches for the states before chunks of C tokens, of dtype ``stored``. Returns their name.

    ``in_rows``: names of tensors [B,T,H,V], each for C channels of K, whose rows get the states of whole chunks. Then the returned states
    are those of shorter chunks, [N,H,K,V], or none if there are no shorter ones.
    """
    few = call.segment(C, *form.plan.programs(call)) is not None
    by_chunks = few and 4 * chunks(call.T, C, call.N, call.packed) * call.H * call.K * call.V <= SUMS
    if by_chunks and stored == torch.float32:
        sums = _sums(plan, call, form, terms, C, terms.prefix + "chunk", C)
        _scan(plan, call, form, terms, C, sums, C, 1, sums[0])
        return sums[0]
    count = (lambda s: s["N"] if call.packed or s["T"] % C else 0) if in_rows else call.chunks(C)
    states = plan.empty(terms.prefix + "chunk_states", count, call.H, call.K, call.V, dtype=stored)
    if by_chunks:  # both directions share the memory of the sums
        _scan(plan, call, form, terms, C, _sums(plan, call, form, terms, C, "chunk", C), C, 1, states, in_rows)
        return states
    L = call.segment(C * form.plan.parts(call), *form.plan.programs(call), least=3)  # segments are read twice: two take as long as one walk
    if L is not None:
        terms = terms._replace(first=before_segments(plan, call, form, terms, C, L), last=None)
    plan.forms.append(form.name)
    form.plan.walk(plan, call, terms, C, L, _places(terms, states, in_rows), len(in_rows))
    return states


def _sums(plan: Plan, call: Call, form: StatesForm, terms: Terms, C: int, name: str, L: Size) -> tuple[str, str]:
    """Add the launch for the sums of segments of L tokens and their decays, called ``name``; if L is C, of all chunks."""
    sums = plan.empty(name + "_sums", call.chunks(L), call.H, call.K, call.V)
    decays = plan.empty(name + "_decays", call.chunks(L), call.H, call.K) if call.decay else terms.x
    plan.forms.append(form.name)
    form.plan.sums(plan, call, terms, C, L, sums, decays)
    return sums, decays


def _scan(
    plan: Plan, call: Call, form: StatesForm, terms: Terms, C: int, sums: tuple[str, str], L: Size, each: int, states: str,
    in_rows: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Add the launch for the states before every ``each`` segments of L tokens, from their sums and decays. A thread has 4 channels."""
    BK, BV, early = 8, min(power(call.V), 64), form.plan.EARLY
    plan.launch(
        segments.penstock_segment_scan, call.programs(sequences, math.ceil(call.K / BK) * math.ceil(call.V / BV)),
        (*sums, *_places(terms, states, in_rows)), (sequences, tokens, L, call.H, *terms.start[1]), BK * BV // 128, early=early,
        K=call.K, V=call.V, BK=BK, BV=BV, C=C, EACH=each, AT_ONCE=AT_ONCE, DECAY=call.decay, ADJOINT=terms.adjoint, **terms.ends,
        PACKED=call.packed, IN_ROWS=len(in_rows), EARLY=early,
    )  # fmt: skip


def _places(terms: Terms, states: str, in_rows: tuple[str, ...]) -> tuple[str, ...]:
    """The names of ``first``, the states, ``upper``, ``last_states``, ``last`` and ``cu_seqlens`` of the kernels."""
    stored = (in_rows[0], in_rows[-1], states) if in_rows else (states, terms.x, terms.x)
    return terms.start[0], *stored, terms.last if terms.last is not None else terms.x, "cu_seqlens"
