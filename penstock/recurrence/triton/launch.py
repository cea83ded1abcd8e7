"""The passes of the Triton implementations: each runs a plan on the tensors of a problem."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...gpu import launch
from ...gpu.plan import Plan, dense
from ...gpu.target import Target
from ...tokens.gpu_calls import plan_name
from ...tokens.gpu_pieces import arranged
from ...tokens.sharing import summed
from ..declaration import Advance, Recurrence, Tokens
from ..gradients import Gradients
from . import in_place, plan, wide
from .table_file import target

Inputs = dict[str, Tensor | None]
Residuals = tuple[Tensor | None, ...]


def _tokens(p: Tokens, **more: Tensor | None) -> Inputs:
    return {"q": p.q, "k": p.k, "v": p.v, "g": p.g, "u": p.u, "cu_seqlens": dense(p.cu_seqlens), **more}


def _inputs(p: Recurrence, **more: Tensor | None) -> Inputs:
    return _tokens(p, initial_state=p.initial_state, **more)


def chunk_forward(p: Recurrence, keep: bool = False) -> tuple[Tensor, Tensor, Residuals]:
    """Output, final state and residuals, chunk by chunk. Residuals are states before chunks if ``keep`` and where that pays, else None."""
    if p.sizes["K"] > wide.WIDTH:
        return wide.forward(p, partial(chunk_forward, keep=keep))
    name = plan_name("chunk forward" + " with residuals" * keep, p)
    later = (partial(_backward_to_come, p),) if keep else ()
    found = launch.run(name, p, target, lambda at: plan.chunk_forward_plan(p, at, keep), _inputs(p), later=later)
    return found["output"], found["final_state"], (found.get("chunk_states"),)


def _backward_to_come(p: Recurrence, at: Target, forward: Plan) -> tuple[Plan, Inputs]:
    """The backward pass of a forward pass whose residuals are kept, if its final state has no gradient; its tensors, without memory."""
    made = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in forward.at(p.sizes).memory.items()}
    d_output, states = made["output"], made.get("chunk_states")
    planned = plan.chunk_backward_plan(p, d_output, None, at, states, True)
    return planned, _inputs(p, d_output=d_output, d_final_state=None, states=states)


def recurrent_forward(p: Recurrence) -> tuple[Tensor, Tensor, Residuals]:
    """Output and final state token by token; no residuals."""
    if p.sizes["K"] > wide.WIDTH:
        return wide.forward(p, recurrent_forward)
    found = launch.run(plan_name("recurrent forward", p), p, target, lambda at: plan.recurrent_forward_plan(p, at), _inputs(p))
    return found["output"], found["final_state"], ()


def advance(p: Advance) -> Tensor:
    """Output; the states are updated in place: whole pieces of 64 tokens by chunks, the other tokens one by one."""
    if p.sizes["K"] > wide.WIDTH:
        return wide.advance(p, advance)
    p = arranged(p)
    tensors = _tokens(p, state=p.state, slots=dense(p.slots))
    return launch.run(plan_name("advance", p), p, target, lambda at: in_place.advance_plan(p, at), tensors)["output"]


def chunk_backward(p: Recurrence, d_output: Tensor, d_final_state: Tensor | None, residuals: Residuals = (), dg: bool = True) -> Gradients:
    """All gradients chunk by chunk; the decay's only if ``dg``. ``residuals``: of the forward pass, or empty."""
    if p.sizes["K"] > wide.WIDTH:
        return wide.backward(p, d_final_state, lambda n, one, d_state: chunk_backward(one, d_output, d_state, residuals[n : n + 1], dg))
    states = residuals[0] if residuals else None
    name = plan_name("chunk backward" + " without dg" * (not dg), p)
    if states is not None:
        name += f" from {states.shape[0]} states"  # the plan depends on this number
    found = launch.run(
        name, p, target,
        lambda at: plan.chunk_backward_plan(p, d_output, d_final_state, at, states, dg),
        _inputs(p, d_output=d_output, d_final_state=d_final_state, states=states), d_output, d_final_state, states,
    )  # fmt: skip
    d_gate, du = found.get("dg"), found.get("du")
    if d_gate is not None and p.g is not None:
        d_gate = summed(d_gate, p.g, p.summand(p.g))
    if du is not None and p.u is not None:
        du = summed(du, p.u, p.summand(p.u))
    return Gradients(found["dq"], found["dk"], found["dv"], d_gate, du, found.get("d_initial_state"))


def recurrent_backward(p: Recurrence, d_output: Tensor, d_final_state: Tensor | None) -> Gradients:
    """All gradients token by token. Partial sums of blocks of V are added here."""
    if p.sizes["K"] > wide.WIDTH:
        return wide.backward(p, d_final_state, lambda n, one, d_state: recurrent_backward(one, d_output, d_state))
    tensors = _inputs(p, d_output=d_output, d_final_state=d_final_state)
    found = launch.run(
        plan_name("recurrent backward", p), p, target, lambda at: plan.recurrent_backward_plan(p, d_output, d_final_state, at),
        tensors, d_output, d_final_state,
    )  # fmt: skip
    dq, dk = summed(found["dq"], p.q), summed(found["dk"], p.k)
    dg, du = (None if x is None else summed(found[name], x, p.summand(x)) for name, x in (("dg", p.g), ("du", p.u)))
    d_initial = None if p.initial_state is None else found["d_initial_state"].to(p.initial_state.dtype)
    return Gradients(dq, dk, found["dv"], dg, du, d_initial)
