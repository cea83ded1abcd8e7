"""The passes of the Triton implementations: each runs a plan on the tensors of a canonical problem."""

from __future__ import annotations

from torch import Tensor

from ...gpu import launch
from ...gpu.plan import dense
from ...gpu.target import Target
from ...tokens.gpu_calls import plan_name
from ..declaration import Advance, Delta, DeltaTokens
from ..gradients import Gradients
from . import plan

Inputs = dict[str, Tensor | None]


def _tokens(p: DeltaTokens, **more: Tensor | None) -> Inputs:
    given = {"q": p.q, "k": p.k, "v": p.v, "g": p.g, "beta": p.beta, "a": p.a, "b": p.b}
    return {**given, "cu_seqlens": dense(p.cu_seqlens), **more}


def _inputs(p: Delta, **more: Tensor | None) -> Inputs:
    return _tokens(p, initial_state=p.initial_state, **more)


def chunk_forward(p: Delta) -> tuple[Tensor, Tensor]:
    """Output and final state, chunk by chunk."""
    found = launch.run("delta chunk forward", p, Target.of, lambda at: plan.chunk_forward_plan(p, at), _inputs(p))
    return found["output"], found["final_state"]


def recurrent_forward(p: Delta) -> tuple[Tensor, Tensor]:
    """Output and final state, token by token."""
    found = launch.run("delta recurrent forward", p, Target.of, lambda at: plan.recurrent_forward_plan(p, at), _inputs(p))
    return found["output"], found["final_state"]


def advance(p: Advance) -> Tensor:
    """Output; the states are updated in place: whole pieces of 64 tokens by chunks, the other tokens one by one."""
    tensors = _tokens(p, state=p.state, slots=dense(p.slots))
    return launch.run("delta advance", p, Target.of, lambda at: plan.advance_plan(p, at), tensors)["output"]


def chunk_backward(p: Delta, d_output: Tensor, d_final_state: Tensor | None, state_alone: bool) -> Gradients:
    """All gradients, chunk by chunk; with ``state_alone`` that of the initial state."""
    found = launch.run(
        plan_name("delta state backward" if state_alone else "delta chunk backward", p), p, Target.of,
        lambda at: plan.chunk_backward_plan(p, d_output, d_final_state, at, state_alone),
        _inputs(p, d_output=d_output, d_final_state=d_final_state), d_output, d_final_state,
    )  # fmt: skip
    state = p.initial_state
    d_initial = None if state is None else found["d_initial_state"].to(state.dtype)
    names = [] if state_alone else [name for name in Gradients._fields if name != "initial_state"]
    none: Inputs = dict.fromkeys(Gradients._fields)
    return Gradients(**none | {name: found.get("d" + name) for name in names} | {"initial_state": d_initial})
