"""The passes of the Triton implementations: each runs a plan on the tensors of a canonical problem."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ...gpu import launch
from ...gpu.launch import Coming
from ...gpu.plan import Plan, dense
from ...gpu.target import Target
from ...tokens.empty import nothing
from ...tokens.gpu_calls import plan_name
from ...tokens.gpu_pieces import arranged
from .. import inputs
from ..declaration import Advance, Delta, DeltaTokens
from ..gradients import Gradients
from . import plan
from .forms import raw
from .forms.lists import residuals_of

Inputs = dict[str, Tensor | None]
Residuals = tuple[Tensor, ...]


def _tokens(p: DeltaTokens, **more: Tensor | None) -> Inputs:
    given = {name: getattr(p, name) for name in ("q", "k", "v", "g", "beta", "a", "b", "raw", "A_log", "dt_bias")}
    return {**given, "cu_seqlens": dense(p.cu_seqlens), **more}


def _inputs(p: Delta, **more: Tensor | None) -> Inputs:
    return _tokens(p, initial_state=p.initial_state, **more)


def _raw(p: DeltaTokens) -> Inputs:
    return {name: getattr(p, name) for name in raw.INPUTS}


def raw_forward(p: DeltaTokens, wide: bool, follows: inputs.Follows | None = None) -> dict[str, Tensor]:
    """The canonical tensors of a call with raw inputs: q, k, g and beta, where they follow from those.

    ``follows``: the chunkwise forward pass that follows, whose kernels are compiled meanwhile.
    """
    if nothing(p):
        return inputs.computed(p, wide)
    beside = partial(_forward_to_come, follows) if follows is not None else None
    later: tuple[partial[Coming], ...] = ()
    if follows is not None and follows.gradients:
        later = partial(_backward_after_stage, follows), partial(_raw_backward_to_come, p)
    found = launch.run("delta raw", p, Target.of, lambda at: raw.forward_plan(p), _raw(p), beside=beside, later=later)
    return {name: found[made] for name, made in raw.MADE.items() if made in found}


def _forward_to_come(follows: inputs.Follows, at: Target) -> Coming:
    """The forward pass after the stage; its tensors, without values."""
    p = follows.problem()
    return plan.chunk_forward_plan(p, at, follows.gradients).at(p.sizes), _inputs(p)


def _backward_after_stage(follows: inputs.Follows, at: Target, stage: Plan) -> Coming:
    """The backward pass of that forward pass; its tensors, without values."""
    p = follows.problem()
    planned, tensors = _backward_to_come(p, at, plan.chunk_forward_plan(p, at, True))
    return planned.at(p.sizes), tensors


def _raw_backward_to_come(p: DeltaTokens, at: Target, forward: Plan) -> Coming:
    """The backward pass of the stage; its tensors, without memory."""
    made = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in forward.at(p.sizes).memory.items()}
    upstream = {f"d_{name}": made.get(name) for name in raw.MADE.values()}
    return raw.backward_plan(p, upstream), _raw(p) | upstream


def raw_differentiable(p: DeltaTokens, wide: bool) -> tuple[dict[str, Tensor], inputs.Pull]:
    """The same, and a function from their gradients to those of the raw inputs."""
    if nothing(p):
        return inputs.differentiable(p, wide)

    def pull(given: dict[str, Tensor]) -> dict[str, Tensor | None]:
        upstream = {f"d_{made}": given.get(name) for name, made in raw.MADE.items()}
        assert all(x is None or x.is_contiguous() for x in upstream.values())
        tensors = _raw(p) | upstream
        found = launch.run("delta raw backward", p, Target.of, lambda at: raw.backward_plan(p, upstream), tensors, *upstream.values())
        return {name: found["d" + name] for name in raw.INPUTS if "d" + name in found}

    return raw_forward(p, wide), pull


def chunk_forward(p: Delta, keep: bool = False) -> tuple[Tensor, Tensor, Residuals]:
    """Output, final state and residuals, chunk by chunk. ``keep``: gradients will be wanted; their kernels are compiled meanwhile.

    There are no residuals unless ``keep``, nor where the form of the backward pass takes none.
    """
    name = plan_name("delta chunk forward" + " with residuals" * keep, p)
    later = (partial(_backward_to_come, p),) if keep else ()
    found = launch.run(name, p, Target.of, lambda at: plan.chunk_forward_plan(p, at, keep), _inputs(p), later=later)
    return found["output"], found["final_state"], tuple(_kept(p, found).values()) if keep else ()


def _kept(p: Delta, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The residuals in the memory of a forward pass."""
    names = residuals_of(p)
    return {name: found[name] for name in names} if names[-1] in found else {}


def _backward_to_come(p: Delta, at: Target, forward: Plan) -> Coming:
    """The backward pass of a forward pass, if its final state has no gradient; its tensors, without memory."""
    made = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in forward.at(p.sizes).memory.items()}
    d_output, kept = made["output"], _kept(p, made)
    planned = plan.chunk_backward_plan(p, d_output, None, at, kept=bool(kept))
    return planned, _inputs(p, d_output=d_output, d_final_state=None, **kept)


def recurrent_forward(p: Delta) -> tuple[Tensor, Tensor]:
    """Output and final state, token by token."""
    found = launch.run("delta recurrent forward", p, Target.of, lambda at: plan.recurrent_forward_plan(p, at), _inputs(p))
    return found["output"], found["final_state"]


def advance(p: Advance) -> Tensor:
    """Output; the states are updated in place: whole pieces of 64 tokens by chunks, the other tokens one by one."""
    p = arranged(p)
    tensors = _tokens(p, state=p.state, slots=dense(p.slots))
    return launch.run("delta advance", p, Target.of, lambda at: plan.advance_plan(p, at), tensors)["output"]


def chunk_backward(p: Delta, d_output: Tensor, d_final_state: Tensor | None, state_alone: bool, residuals: Residuals = ()) -> Gradients:
    """All gradients, chunk by chunk; with ``state_alone`` that of the initial state. ``residuals``: of the forward pass, or empty."""
    name = "delta state backward" if state_alone else "delta chunk backward"
    kept = dict(zip(residuals_of(p), residuals))
    found = launch.run(
        plan_name(name + " from residuals" * bool(kept), p), p, Target.of,
        lambda at: plan.chunk_backward_plan(p, d_output, d_final_state, at, state_alone, bool(kept)),
        _inputs(p, d_output=d_output, d_final_state=d_final_state, **kept), d_output, d_final_state,
    )  # fmt: skip
    state = p.initial_state
    d_initial = None if state is None else found["d_initial_state"].to(state.dtype)
    names = [] if state_alone else [name for name in Gradients._fields if name != "initial_state"]
    none: Inputs = dict.fromkeys(Gradients._fields)
    return Gradients(**none | {name: found.get("d" + name) for name in names} | {"initial_state": d_initial})
