"""What ``penstock tune`` asks of a family: which kernels have block sizes in tables, and how candidates are planned, run and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call.implementation import Implementation
from ..errors import Complaints
from ..gpu.plan import Planned
from ..gpu.target import Target
from .shape import Shape


@dataclass(frozen=True)
class Tuning:
    """The kernels of a family whose block sizes are measured. A key names what a table has an entry for, a configuration its sizes."""

    kernels: tuple[tuple[str, str], ...]
    """Kernels, and the pass in which each is timed. A kernel of two passes is timed in the longer one."""
    candidates: Callable[[Any, Any], list[Any]]
    """Configurations to try, of a key and the configuration in use."""
    programs_per_sm: Mapping[str, tuple[int, ...]]
    """Values of ``programs_per_sm`` that are tried with the best configuration of a kernel."""
    shape: Callable[[str, Shape], Shape]
    """The shape that is timed in a pass."""
    check: Callable[[Complaints, list[Shape]], None]
    """Adds complaints about shapes that cannot be tuned, or not together."""
    without_memory: Callable[[str, Shape, torch.dtype, int], dict[str, Tensor]]
    """Inputs of a variant by name, without memory. The last argument is the number of heads of q and k, or 0."""
    in_place: frozenset[str]
    """The passes that update states in place."""
    planned: Callable[[str, Any, Target], Planned]
    """The plan of a pass of a problem."""
    in_use: Callable[[str, Any, Target], tuple[Any, Any]]
    """The key of a kernel for a problem, and the configuration in use."""
    implementation: Callable[[str], Implementation]
    """The implementation that runs a pass."""
    exact: Implementation
    """In plain PyTorch, for exact results in float64."""
    tables: Any
    """The module of its tables: ``Entry``, ``read``, ``write``, ``user_path``, ``shipped`` and ``target``."""
