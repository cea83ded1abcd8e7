"""The plan of a pass: that of the first form of its list that neither refuses nor avoids the call."""

from __future__ import annotations

from torch import Tensor

from ...gpu.forms import first, planned
from ...gpu.plan import Plan
from ...gpu.target import Target
from ...tokens.gpu_calls import batch, tokens
from ...tokens.gpu_pieces import has_pieces
from ...tokens.pieces import CHUNK
from ..declaration import Advance, Delta
from .calls import Backward, Forward, InPlace
from .forms.lists import CHUNK_BACKWARD, CHUNK_FORWARD, PIECES, TOKEN_FORWARD, TOKENS_IN_PLACE


def chunk_forward_plan(p: Delta, target: Target, keep: bool = False) -> Plan:
    """``output`` and ``final_state`` by chunks; if ``keep``, also residuals for the backward pass, if its form takes them."""
    return planned(CHUNK_FORWARD, Forward.of(p, target, keep=keep))


def chunk_backward_plan(
    p: Delta, d_output: Tensor, d_final_state: Tensor | None, target: Target, state_alone: bool = False, kept: bool = False
) -> Plan:
    """All gradients by chunks, by the names of the arguments with a d in front; ``d_initial_state``, with ``state_alone`` only this.

    ``kept``: whether there are residuals of the forward pass, by their names in its plan.
    """
    call = Backward.of(p, target, d_output=d_output, d_final_state=d_final_state, state_alone=state_alone, kept=kept)
    return planned(CHUNK_BACKWARD, call)


def recurrent_forward_plan(p: Delta, target: Target) -> Plan:
    """``output`` and ``final_state`` token by token."""
    return planned(TOKEN_FORWARD, Forward.of(p, target))


def advance_plan(p: Advance, target: Target) -> Plan:
    """``output``; the states of the pool are read and written in place: first whole pieces of 64 tokens, then the other tokens one by one.

    The state is rounded to the pool's dtype after each piece and each of these tokens. So results depend neither on where a sequence is
    cut, if at multiples of 64 or after the last one, nor on the other sequences of a call.
    """
    plan, call = Plan(), InPlace.of(p, target)
    output = plan.empty("output", batch, tokens, call.H, call.V, dtype=p.v.dtype)
    for forms in (PIECES, TOKENS_IN_PLACE)[not has_pieces(p) :]:
        form = first(forms, call)
        form.plan(plan, call, output, CHUNK)
        plan.forms.append(form.name)
    return plan
