"""The passes of the Triton implementations: each runs a plan on the tensors of a problem."""

from __future__ import annotations

from torch import Tensor

from ...gpu import launch
from ...gpu.plan import dense
from ..declaration import Advance, Recurrence, Tokens
from ..gradients import Gradients, summed
from . import in_place, plan
from .table import target

Inputs = dict[str, Tensor | None]


def _tokens(p: Tokens, **more: Tensor | None) -> Inputs:
    return {"q": p.q, "k": p.k, "v": p.v, "g": p.g, "u": p.u, "cu_seqlens": dense(p.cu_seqlens), **more}


def _inputs(p: Recurrence, **more: Tensor | None) -> Inputs:
    return _tokens(p, initial_state=p.initial_state, **more)


def chunk_forward(p: Recurrence, keep: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, final state and, if ``keep``, residuals (states before chunks) for the backward pass, chunk by chunk."""
    name = "chunk forward with residuals" if keep else "chunk forward"
    found = launch.run(name, p, target(p.q.device), lambda at: plan.chunk_forward_plan(p, at, keep), _inputs(p))
    return found["output"], found["final_state"], found.get("chunk_states")


def recurrent_forward(p: Recurrence) -> tuple[Tensor, Tensor]:
    """Output and final state token by token."""
    found = launch.run("recurrent forward", p, target(p.q.device), lambda at: plan.recurrent_forward_plan(p, at), _inputs(p))
    return found["output"], found["final_state"]


def advance(p: Advance) -> Tensor:
    """Output; the states are updated in place: whole pieces of 64 tokens by chunks, the other tokens one by one."""
    if in_place.pieces(p):
        p = in_place.arranged(p)
    tensors = _tokens(p, state=p.state, slots=dense(p.slots))
    return launch.run("advance", p, target(p.q.device), lambda at: in_place.advance_plan(p, at), tensors)["output"]


def chunk_backward(
    p: Recurrence, d_output: Tensor, d_final_state: Tensor | None, states: Tensor | None = None, dg: bool = True
) -> Gradients:
    """All gradients chunk by chunk; the decay's only if ``dg``. ``states``: the forward pass's residuals, or None."""
    found = launch.run(
        "chunk backward" if dg else "chunk backward without dg", p, target(p.q.device),
        lambda at: plan.chunk_backward_plan(p, d_output, d_final_state, at, states, dg),
        _inputs(p, d_output=d_output, d_final_state=d_final_state, states=states), d_output, d_final_state, states,
    )  # fmt: skip
    d_gate, du = (None if x is None or name not in found else summed(found[name], x) for name, x in (("dg", p.g), ("du", p.u)))
    return Gradients(found["dq"], found["dk"], found["dv"], d_gate, du, found.get("d_initial_state"))


def recurrent_backward(p: Recurrence, d_output: Tensor, d_final_state: Tensor | None) -> Gradients:
    """All gradients token by token. Partial sums of blocks of V are added here."""
    tensors = _inputs(p, d_output=d_output, d_final_state=d_final_state)
    found = launch.run(
        "recurrent backward", p, target(p.q.device), lambda at: plan.recurrent_backward_plan(p, d_output, d_final_state, at),
        tensors, d_output, d_final_state,
    )  # fmt: skip
    dq, dk = summed(found["dq"], p.q), summed(found["dk"], p.k)
    dg, du = (None if x is None else summed(found[name], x) for name, x in (("dg", p.g), ("du", p.u)))
    d_initial = None if p.initial_state is None else found["d_initial_state"].to(p.initial_state.dtype)
    return Gradients(dq, dk, found["dv"], dg, du, d_initial)
