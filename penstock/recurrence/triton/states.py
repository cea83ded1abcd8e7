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
from ...tokens.gpu_calls import sequences, tokens
from .calls import Call
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


class Segments(NamedTuple):
    """The segments of a pass whose states come from sums of segments."""

    form: StatesForm
    C: int
    """Tokens in a chunk."""
    L: Callable[[Sizes], int]
    """Tokens in a segment: a multiple of as many chunks as the form has parts."""


def before_segments(plan: Plan, call: Call, of: Segments, terms: Terms) -> State:
    """Add the launches for the states before segments; float32."""
    parts, name = of.form.plan.parts(call), terms.prefix + "segment"
    sums, shorter = _sums_of_segments(plan, call, of, terms)
    states = plan.empty(name + "_states", call.chunks(of.L), call.H, call.K, call.V) if parts > 1 else sums[0]
    _scan(plan, call, of.form, terms, of.C, sums, shorter, parts, states)
    return states, contiguous((0, call.H, call.K, call.V))


def after_segments(plan: Plan, call: Call, of: Segments, terms: Terms, decay: str) -> None:
    """Add the launches for the state after all segments, ``terms.last``, and for the log ``decay`` of all. The sums can be shared."""
    plan.keeps = True
    sums, shorter = _sums_of_segments(plan, call, of, terms)
    _scan(plan, call, of.form, terms, of.C, sums, shorter, 1, decay, summary=True)


def _sums_of_segments(plan: Plan, call: Call, of: Segments, terms: Terms) -> tuple[tuple[str, str], Callable[[Sizes], int]]:
    """Add the launch for sums. They are those of as many shorter segments as the form has parts; also returns their tokens."""
    parts, L = of.form.plan.parts(call), of.L
    shorter = (lambda s: L(s) // parts) if parts > 1 else L
    return _sums(plan, call, of.form, terms, of.C, terms.prefix + "segment", shorter), shorter


def segments_before_chunks(call: Call, form: StatesForm, C: int) -> Segments | None:
    """The segments of ``before_chunks``, or None if its launches walk over whole sequences or compute the sums of chunks."""
    if _by_chunks(call, form, C):
        return None
    L = call.segment(C * form.plan.parts(call), *form.plan.programs(call), least=3)  # segments are read twice: two take as long as one walk
    return None if L is None else Segments(form, C, L)


def _by_chunks(call: Call, form: StatesForm, C: int) -> bool:
    """Whether segments are single chunks: if programs are few, and the sums take little memory."""
    few = call.segment(C, *form.plan.programs(call)) is not None
    return few and 4 * chunks(call.T, C, call.N, call.packed) * call.H * call.K * call.V <= SUMS


def before_chunks(
    plan: Plan, call: Call, form: StatesForm, terms: Terms, C: int, stored: torch.dtype, in_rows: tuple[str, ...] = ()
) -> str:  # fmt: skip
    """Add the launches for the states before chunks of C tokens, of dtype ``stored``. Returns their name.

    ``in_rows``: names of tensors [B,T,H,V], each for C channels of K, whose rows get the states of whole chunks. Then the returned states
    are those of shorter chunks, [N,H,K,V], or none if there are no shorter ones.
    """
    by_chunks = _by_chunks(call, form, C)
    if by_chunks and stored == torch.float32:
        sums = _sums(plan, call, form, terms, C, terms.prefix + "chunk", C)
        _scan(plan, call, form, terms, C, sums, C, 1, sums[0])
        return sums[0]
    count = (lambda s: s["N"] if call.packed or s["T"] % C else 0) if in_rows else call.chunks(C)
    states = plan.empty(terms.prefix + "chunk_states", count, call.H, call.K, call.V, dtype=stored)
    if by_chunks:  # both directions share the memory of the sums
        _scan(plan, call, form, terms, C, _sums(plan, call, form, terms, C, "chunk", C), C, 1, states, in_rows)
        return states
    found = segments_before_chunks(call, form, C)
    if found is not None:
        terms = terms._replace(first=before_segments(plan, call, found, terms), last=None)
    plan.forms.append(form.name)
    form.plan.walk(plan, call, terms, C, None if found is None else found.L, _places(terms, states, in_rows), len(in_rows))
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
    in_rows: tuple[str, ...] = (), summary: bool = False,
) -> None:  # fmt: skip
    """Add the launch for the states before every ``each`` segments of L tokens, from their sums and decays. A thread has 4 channels.

    ``summary``: for the state after all of them and, as ``states``, their decay.
    """
    BK, BV, early = 8, min(power(call.V), 64), form.plan.EARLY
    plan.launch(
        segments.penstock_segment_scan, call.programs(sequences, math.ceil(call.K / BK) * math.ceil(call.V / BV)),
        (*sums, *_places(terms, states, in_rows)), (sequences, tokens, L, call.H, *terms.start[1]), BK * BV // 128, early=early,
        K=call.K, V=call.V, BK=BK, BV=BV, C=C, EACH=each, AT_ONCE=AT_ONCE, DECAY=call.decay, ADJOINT=terms.adjoint, **terms.ends,
        PACKED=call.packed, IN_ROWS=len(in_rows), EARLY=early, SUMMARY=summary,
    )  # fmt: skip


def _places(terms: Terms, states: str, in_rows: tuple[str, ...]) -> tuple[str, ...]:
    """The names of ``first``, the states, ``upper``, ``last_states``, ``last`` and ``cu_seqlens`` of the kernels."""
    stored = (in_rows[0], in_rows[-1], states) if in_rows else (states, terms.x, terms.x)
    return terms.start[0], *stored, terms.last if terms.last is not None else terms.x, "cu_seqlens"
