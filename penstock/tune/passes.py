"""The passes of the Triton kernels as plans, for tensors that may have no memory: what is compiled ahead of time, and tuned."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..kernels.triton import plan
from ..kernels.triton.plan import Plan
from ..kernels.triton.table import Target
from ..problem import Problem, Step, state_dtype
from ..variants import VARIANTS
from .cases import Inputs, Shape

Pass = Literal["forward", "backward", "step", "short forward", "short backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "step", "short forward", "short backward")
"""The chunked kernels forward and backward, the token-serial ones for decode steps and short sequences."""


class Planned(NamedTuple):
    """A plan and the tensors that it is given, by name; q stands in for those that there are not."""

    plan: Plan
    tensors: dict[str, Tensor]


def without_memory(variant: str, shape: Shape, dtype: torch.dtype) -> Inputs:
    """Inputs like those of ``cases.inputs``, without values."""
    size, row = shape._asdict(), VARIANTS[variant]

    def empty(axes: str, dtype: torch.dtype) -> Tensor:
        return torch.empty([size[axis] for axis in axes], dtype=dtype, device="meta")

    q, k, v = (empty(axes, dtype) for axes in ("BTHK", "BTHK", "BTHV"))
    g = empty(row.decay, state_dtype(dtype)) if row.decay else None
    return Inputs(variant, q, k, v, g, empty("HK", state_dtype(dtype)) if row.bonus else None)


def planned(which: Pass, inputs: Inputs, target: Target, cu_seqlens: Tensor | None = None) -> Planned:
    """Plan a pass over these inputs, states starting at 0; a step's states are a pool without slots."""
    x = inputs
    problem = Problem.checked(x.q, x.k, x.v, x.g, x.u, None, cu_seqlens, x.variant, None, False)
    given: dict[str, Tensor | None] = {name: getattr(x, name) for name in ("q", "k", "v", "g", "u")} | {"cu_seqlens": cu_seqlens}
    given |= {"initial_state": None, "d_final_state": None, "slots": None, "d_output": torch.empty_like(x.v)}
    if which == "forward":
        made = plan.chunk_forward_plan(problem, target)
    elif which == "backward":
        made = plan.chunk_backward_plan(problem, torch.empty_like(x.v), None, target)
    elif which == "short forward":
        made = plan.recurrent_forward_plan(problem, None, None, target)
    elif which == "short backward":
        made = plan.recurrent_backward_plan(problem, torch.empty_like(x.v), None, target)
    else:
        pool = torch.empty(x.shape.state, device=x.q.device)
        step = Step.checked(x.q, x.k, x.v, x.g, x.u, pool, None, x.variant, None)
        made, given["pool"] = plan.recurrent_forward_plan(step.problem(pool), pool, None, target), pool
    return Planned(made, {name: x.q if tensor is None else tensor for name, tensor in given.items()})
