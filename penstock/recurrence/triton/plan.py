"""The plan of a pass: that of the first form of its list that neither refuses nor avoids the call."""

from __future__ import annotations

from torch import Tensor

from ...gpu.forms import first, planned, refusal
from ...gpu.plan import Plan
from ...gpu.target import Target
from ..declaration import Recurrence
from .calls import Backward, Forward, Whole, shared
from .forms.lists import CHUNK_BACKWARD, CHUNK_FORWARD, TOKEN_BACKWARD, TOKEN_FORWARD


def forward_call(p: Recurrence, target: Target, keep: bool = False) -> Forward:
    """A forward pass by chunks. It keeps states before the chunks of the backward pass that would follow, if there is one.

    Raises ImplementationRefused if no form of the forward pass takes the call.
    """
    fields = shared(p, target)
    first(CHUNK_FORWARD, Whole(**fields))
    backward = Backward(**fields)
    if refusal(CHUNK_BACKWARD, backward) is not None:
        return Forward(**fields, keep=False, backward_chunk=1)
    return Forward(**fields, keep=keep, backward_chunk=first(CHUNK_BACKWARD, backward).chunk(backward))


def chunk_forward_plan(p: Recurrence, target: Target, keep: bool = False) -> Plan:
    """``output`` and ``final_state`` by chunks; if ``keep``, also ``chunk_states`` for the backward pass if its chunks are multiples."""
    return planned(CHUNK_FORWARD, forward_call(p, target, keep))


def chunk_backward_plan(
    p: Recurrence, d_output: Tensor, d_final_state: Tensor | None, target: Target, states: Tensor | None = None, dg: bool = True
) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg``, ``du`` and ``d_initial_state`` by chunks. ``du`` and a constant decay's ``dg`` are partial sums.

    ``dq`` and ``dk`` are those of every head or, of heads that share q and k, of (parts of) groups. ``states``: those that the forward
    pass kept, or None. ``dg``: whether to compute dg.
    """
    call = Backward.of(p, target, d_output=d_output, d_final_state=d_final_state, states=states, dg=dg)
    return planned(CHUNK_BACKWARD, call)


def recurrent_forward_plan(p: Recurrence, target: Target) -> Plan:
    """``output`` and ``final_state`` token by token."""
    return planned(TOKEN_FORWARD, Whole.of(p, target))


def recurrent_backward_plan(p: Recurrence, d_output: Tensor, d_final_state: Tensor | None, target: Target) -> Plan:
    """All gradients token by token. All but dv are float32 partial sums of blocks of V, which the caller adds."""
    return planned(TOKEN_BACKWARD, Backward.of(p, target, d_output=d_output, d_final_state=d_final_state))
