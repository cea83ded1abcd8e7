"""Inputs without memory, and plans of passes over them, for ahead-of-time compilation and tuning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.families import Registered, families, functions
from ..gpu.plan import Planned
from ..gpu.target import Target
from ..tokens.shape import Shape
from ..tokens.tuning import Tuning
from ..verify.inputs import Inputs


def tuned() -> dict[str, Registered]:
    """The variants of all families whose block sizes can be tuned."""
    return {variant: one for one in families() if one.tuning is not None for variant in one.variants}


def tuning_of(variant: str) -> Tuning:
    """How the family of a variant is tuned."""
    tuning = functions()[variant].tuning
    assert tuning is not None, f"{variant}: its family has no block sizes to tune"
    found: Tuning = tuning()
    return found


def without_memory(variant: str, shape: Shape, dtype: torch.dtype, groups: int = 0) -> Inputs:
    """Inputs with the shapes and dtypes of ``verify.inputs.inputs``, without memory; q and k of ``groups`` heads if that is not 0."""
    return Inputs.of(variant, tuning_of(variant).without_memory(variant, shape, dtype, groups))


def problem_of(which: str, inputs: Inputs, cu_seqlens: Tensor | None = None) -> Any:
    """The problem of a pass over these inputs. Updates in place get a pool of states without slots."""
    problem = inputs.problem(cu_seqlens=cu_seqlens)
    if which not in tuning_of(inputs.variant).in_place:
        return problem
    return inputs.in_place(torch.empty(problem.state_shape, device=inputs.q.device), cu_seqlens=cu_seqlens)


def planned(which: str, inputs: Inputs, target: Target, cu_seqlens: Tensor | None = None) -> Planned:
    """Plan a pass over these inputs with initial states of 0."""
    return tuning_of(inputs.variant).planned(which, problem_of(which, inputs, cu_seqlens), target)
