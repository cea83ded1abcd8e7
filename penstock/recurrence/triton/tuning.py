"""The passes of the kernels for ahead-of-time compilation, and how their block sizes are tuned. The tensors may have no memory."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from ...call.implementation import Implementation
from ...errors import Complaints, RangeError
from ...gpu.plan import Planned
from ...gpu.target import Target, power
from ...tokens.dtypes import state_dtype
from ...tokens.shape import Shape
from ...tokens.tuning import Tuning
from .. import chunkwise
from ..declaration import Advance, Tokens
from ..variants import VARIANTS
from . import CHUNKWISE, RECURRENT, SHORT, table_file
from .table import KernelConfig, Key

PASSES = ("forward", "backward", "pieces", "step", "short forward", "short backward")
"""The chunked kernels forward, backward and in place; the token-serial kernels for decode steps and short sequences."""
IN_PLACE = frozenset({"pieces", "step"})
SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "forward": {"warps": (4, 8), "BV": (64, 128), "C": (16, 32, 64), "stages": (1, 2, 3)},
    "backward": {"warps": (2, 4), "C": (16, 32, 64), "BK": (64, 128)},
    "states": {"warps": (2, 4), "BV": (64, 128), "BK": (32, 64), "stages": (1, 3)},
    "recurrent": {"warps": (1, 2, 4), "BV": (8, 16, 32, 64)},
    "step": {"warps": (1, 2, 4, 8), "BV": (16, 32, 64)},
}
"""Values for each kernel, tried in all combinations. Compilation dominates the time, so values that are known to be slow are left out
(8 warps in the backward pass: benchmarks/NOTES.md)."""
STEP_SEQUENCES = 64
"""Sequences of the timed decode step, unless the shape has one token."""


def without_memory(variant: str, shape: Shape, dtype: torch.dtype, groups: int = 0) -> dict[str, Tensor]:
    """Inputs of a variant by name, without memory; q and k of ``groups`` heads if that is not 0."""
    size, row = shape._asdict() | {"G": groups or shape.H}, VARIANTS[variant]
    axes = {"q": ("BTGK", dtype), "k": ("BTGK", dtype), "v": ("BTHV", dtype)}
    axes |= {"g": (row.decay, state_dtype(dtype))} if row.decay else {}
    axes |= {"u": ("HK", state_dtype(dtype))} if row.bonus else {}
    return {name: torch.empty([size[axis] for axis in of], dtype=kind, device="meta") for name, (of, kind) in axes.items()}


def planned(which: str, problem: Tokens, target: Target) -> Planned:
    """Plan a pass of a problem, with initial states of 0. Updates in place have a pool of states without slots."""
    from . import in_place, plan  # need Triton

    p = problem.whole
    given: dict[str, Tensor | None] = {name: getattr(p, name) for name in ("q", "k", "v", "g", "u", "cu_seqlens")}
    given |= {"initial_state": None, "d_final_state": None, "slots": None, "d_output": torch.empty_like(p.v)}
    if isinstance(p, Advance):
        made = in_place.advance_plan(p, target)
        given["state"] = p.state
        if which == "pieces":
            del made.launches[1:]
    elif which.endswith("forward"):
        made = (plan.chunk_forward_plan if which == "forward" else plan.recurrent_forward_plan)(p, target)  # type: ignore[arg-type]
    else:
        backward = plan.chunk_backward_plan if which == "backward" else plan.recurrent_backward_plan
        made = backward(p, torch.empty_like(p.v), None, target)  # type: ignore[arg-type]
    return Planned(made.at(p.sizes), {name: p.q if tensor is None else tensor for name, tensor in given.items()})


def in_use(kernel: str, problem: Tokens, target: Target) -> tuple[Key, KernelConfig]:
    """The key of a kernel, and the block sizes in use."""
    from .calls import Call  # needs Triton

    call = Call.of(problem, target)
    return call.key(kernel), call.config(kernel)


def candidates(key: Key, before: KernelConfig) -> list[KernelConfig]:
    """All combinations of ``SPACE`` that fit this head size, for the plain kernel; other block sizes as in ``before``."""
    space = SPACE[key.kernel]
    most = {"BV": key.V, "BK": key.K}
    values = {name: [x for x in sizes if x <= max(most.get(name, x), min(sizes))] for name, sizes in space.items()}
    plain = before._replace(form="")
    return [KernelConfig(**plain._asdict() | dict(zip(values, sizes))) for sizes in product(*values.values())]


def _shape(which: str, shape: Shape) -> Shape:
    if which == "short backward":
        return shape._replace(T=min(shape.T, SHORT["backward"]))
    return shape if which != "step" or shape.T == 1 else shape._replace(B=STEP_SEQUENCES, T=1)


def _check(complaints: Complaints, shapes: list[Shape]) -> None:
    sizes = [(power(one.K), power(one.V)) for one in shapes]
    if len(set(sizes)) < len(sizes):
        remedy = "A table has one entry for all of these: choose one."
        found = " ".join(one.text for one in shapes)
        complaints.add(RangeError, "shape", "the only one of its K and V, up to the next power of two", found, remedy)
    for one in shapes:
        if one.K > 256 or one.V > 512:
            complaints.add(RangeError, "shape", "of at most K = 256 and V = 512", one.text, "This is the limit of the chunked kernels.")


def _implementation(which: str) -> Implementation:
    return CHUNKWISE if which in ("forward", "backward") else RECURRENT


TUNING = Tuning(
    kernels=(
        ("forward", "forward"),
        ("backward", "backward"),
        ("states", "backward"),
        ("recurrent", "short backward"),
        ("step", "step"),
    ),
    candidates=candidates,
    programs_per_sm={"forward": (1, 2, 3, 4), "states": (1, 2, 4, 6)},  # not for steps: the timed one has enough sequences to fill the GPU
    shape=_shape,
    check=_check,
    without_memory=without_memory,
    in_place=IN_PLACE,
    planned=planned,
    in_use=in_use,
    implementation=_implementation,
    exact=chunkwise.IMPLEMENTATION,
    tables=table_file,
)
