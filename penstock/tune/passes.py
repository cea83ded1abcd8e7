"""Plans of the passes of the Triton kernels, for ahead-of-time compilation and tuning. The tensors may have no memory."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..gpu.plan import Plan
from ..gpu.target import Target
from ..recurrence.triton import in_place, plan
from ..recurrence.variants import VARIANTS
from ..tokens.dtypes import state_dtype
from ..verify.inputs import Inputs, Shape

Pass = Literal["forward", "backward", "pieces", "step", "short forward", "short backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "pieces", "step", "short forward", "short backward")
"""The chunked kernels forward, backward and in place; the token-serial kernels for decode steps and short sequences."""


class Planned(NamedTuple):
    """A plan and its tensors by name. Missing optional tensors get q as a dummy pointer."""

    plan: Plan
    tensors: dict[str, Tensor]


def without_memory(variant: str, shape: Shape, dtype: torch.dtype, groups: int = 0) -> Inputs:
    """Inputs with the shapes and dtypes of ``verify.inputs.inputs``, without memory; q and k of ``groups`` heads if that is not 0."""
    size, row = shape._asdict() | {"G": groups or shape.H}, VARIANTS[variant]

    def empty(axes: str, dtype: torch.dtype) -> Tensor:
        return torch.empty([size[axis] for axis in axes], dtype=dtype, device="meta")

    q, k, v = (empty(axes, dtype) for axes in ("BTGK", "BTGK", "BTHV"))
    g = empty(row.decay, state_dtype(dtype)) if row.decay else None
    return Inputs(variant, q, k, v, g, empty("HK", state_dtype(dtype)) if row.bonus else None)


def planned(which: Pass, inputs: Inputs, target: Target, cu_seqlens: Tensor | None = None) -> Planned:
    """Plan a pass over these inputs with initial states of 0. Updates in place get a pool of states without slots."""
    x = inputs
    problem = x.problem(cu_seqlens=cu_seqlens).whole
    given: dict[str, Tensor | None] = {name: getattr(problem, name) for name in ("q", "k", "v", "g", "u")} | {"cu_seqlens": cu_seqlens}
    given |= {"initial_state": None, "d_final_state": None, "slots": None, "d_output": torch.empty_like(x.v)}
    if which == "forward":
        made = plan.chunk_forward_plan(problem, target)
    elif which == "backward":
        made = plan.chunk_backward_plan(problem, torch.empty_like(x.v), None, target)
    elif which == "short forward":
        made = plan.recurrent_forward_plan(problem, target)
    elif which == "short backward":
        made = plan.recurrent_backward_plan(problem, torch.empty_like(x.v), None, target)
    else:
        given["state"] = pool = torch.empty(problem.state_shape, device=x.q.device)
        made = in_place.advance_plan(x.in_place(pool, cu_seqlens=cu_seqlens), target)
        if which == "pieces":
            del made.launches[1:]
    return Planned(made.at(problem.sizes), {name: problem.q if tensor is None else tensor for name, tensor in given.items()})
