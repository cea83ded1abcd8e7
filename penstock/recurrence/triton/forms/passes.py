"""What the forms of a pass share: the memory of results, and the states from which programs start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ....gpu.forms import Form, Part, first
from ....gpu.plan import Plan, Size, Sizes, strides
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import Backward, Call, Forward
from ..states import Segments, State, StatesForm, Terms, before_chunks, before_segments


def whole(call: Call) -> None:
    """The default of ``segments``: sequences are not cut into segments."""


@dataclass(frozen=True)
class ForwardForm(Form[Forward, Callable[[Forward], Plan]]):
    """A form of the forward pass."""

    segments: Callable[[Forward], Segments | None] = field(kw_only=True, default=whole)
    """The segments of a call for whose states it needs their sums, or None."""


@dataclass(frozen=True)
class BackwardForm(Form[Backward, Callable[[Backward], Plan]]):
    """A form of the backward pass."""

    segments: Callable[[Backward], Segments | None] = field(kw_only=True, default=whole)
    """The segments of a call for whose gradients of states it needs their sums, or None."""
    chunk: Callable[[Call], int] = field(kw_only=True)
    """Tokens in a chunk. The forward pass keeps the states before these chunks."""


class Results(NamedTuple):
    """The names of the memory of a forward pass."""

    output: str
    final: str
    chunk_states: str | None
    """States that are kept for the backward pass."""
    every: int
    """Tokens between them; 0 if there are none."""


def results(plan: Plan, call: Forward, every: int) -> Results:
    """Add the memory of the results, and of the states before every ``every`` tokens."""
    output = plan.empty("output", batch, tokens, call.H, call.V, dtype=call.p.summand(call.p.v))
    final = plan.empty("final_state", sequences, call.H, call.K, call.V)
    kept = None
    if every:
        kept = plan.empty("chunk_states", call.chunks(every), call.H, call.K, call.V, dtype=call.stored(every))
    return Results(output, final, kept, every)


class Start(NamedTuple):
    """Where the programs of a forward pass start: sequences at the initial state, segments at states that other launches compute."""

    state: State | None
    owners: Size
    """Sequences or segments."""
    L: Callable[[Sizes], int] | None
    """Tokens in a segment."""


def start(plan: Plan, call: Forward, found: Results, of: Segments | None) -> Start:
    """The start of programs for sequences or for segments, whose states are added to the plan."""
    p = call.p
    state = None if p.initial_state is None else ("initial_state", p.initial_state.stride())
    if of is None:
        return Start(state, sequences, None)
    terms = Terms("k", "v", strides(p.k, p.v), 1.0, p.reverse, state, found.final, False)
    return Start(before_segments(plan, call, of, terms), call.chunks(of.L), of.L)


def states_form(parts: tuple[Part, ...], call: Call) -> StatesForm:
    """The form of the states of a pass."""
    ((_, forms),) = parts
    return first(forms, call)


class Gradients(NamedTuple):
    """The states before chunks, and the names of the memory of a backward pass."""

    S: str
    terms: Terms
    """Of the gradients of states."""
    d_initial: str | None
    d_start: State | None
    """The gradient of the final state."""


def gradients(plan: Plan, call: Backward, states: StatesForm, C: int) -> Gradients:
    """Add the memory of the initial state's gradient and, if the forward pass kept none, the launches of states before chunks."""
    p, d_output, d_final = call.p, call.upstream, call.d_final_state
    d_initial = None
    if p.initial_state is not None:
        d_initial = plan.empty("d_initial_state", sequences, call.H, call.K, call.V, dtype=p.initial_state.dtype)
    if call.states is not None and call.states.shape[0] == call.chunks(C)(p.sizes):
        S = "states"
    else:
        start = None if p.initial_state is None else ("initial_state", p.initial_state.stride())
        S = before_chunks(plan, call, states, Terms("k", "v", strides(p.k, p.v), 1.0, p.reverse, start, None, False), C, call.stored(C))
    d_start = None if d_final is None else ("d_final_state", d_final.stride())
    terms = Terms("q", "d_output", strides(p.q, d_output), p.scale, p.reverse, d_start, d_initial, True)
    return Gradients(S, terms, d_initial, d_start)


def gradients_of_operands(plan: Plan, call: Backward) -> tuple[str, str, str]:
    """Add the memory of dq, dk and dv."""
    dq, dk = (plan.empty("d" + name, batch, tokens, call.H, call.K, dtype=call.p.q.dtype) for name in ("q", "k"))
    return dq, dk, gradient_of_v(plan, call)


def gradient_of_v(plan: Plan, call: Backward) -> str:
    """Add the memory of dv."""
    return plan.empty("dv", batch, tokens, call.H, call.V, dtype=call.p.summand(call.p.v))


def gradients_of_parameters(plan: Plan, call: Backward, C: int) -> tuple[str, str]:
    """Add the memory of dg and du, of a constant decay and of u a share of each chunk; "q" if there is none."""
    p, d_gate, du = call.p, "q", "q"
    if p.g is not None and call.dg:
        axes: dict[str, Size] = {"B": batch, "T": tokens, "H": call.H, "K": call.K}
        shape = [axes[axis] for axis in p.variant.decay]
        d_gate = plan.empty("dg", call.chunks(C), *shape) if call.static else plan.empty("dg", *shape, dtype=p.summand(p.g))
    if p.u is not None:
        du = plan.empty("du", call.chunks(C), call.H, call.K)
    return d_gate, du
