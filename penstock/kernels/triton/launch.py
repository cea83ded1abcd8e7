"""Runs plans: makes their memory, launches their kernels. Nothing here waits for the device.

A plan is made once for a signature (sizes, strides, dtypes, alignment) and kept with its compiled kernels, so that an equal call
costs the host little more than the launches themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...problem import Problem, Step, signature
from ..contract import Gradients, contiguous, dense
from . import interpreting, plan
from .plan import Launch, Plan
from .table import Blocks, Key, Target

KEPT = 1024
"""Plans that are kept; when there are more, all are forgotten."""


class Prepared:
    """A plan with its compiled kernels, for tensors of one signature on one device."""

    def __init__(self, plan: Plan, device: torch.device, absent: list[str]) -> None:
        self.device, self.C, self.absent = device, plan.C, absent
        self.memory = tuple((name, shape, contiguous(*shape), dtype) for name, (shape, dtype) in plan.memory.items())
        self.launches = tuple(plan.launches)
        self.numbers = tuple(launch.numbers + launch.constants for launch in plan.launches)
        self.runners: tuple[Callable[..., object], ...] | None = None
        self.known: tuple[list[dict[str, Any]], ...] = ()

    def run(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the plan's memory to ``tensors`` and launch its kernels."""
        device = self.device
        if self.C:
            tensors["ones"] = _ones(self.C, device)
        for name, shape, strides, dtype in self.memory:
            tensors[name] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        with _at(device):
            if self.runners is None:
                self.known = tuple(launch.descriptions(tensors) for launch in self.launches)
                self.runners = self.compiled(tensors)
            given = tensors if interpreting() else {name: x.data_ptr() for name, x in tensors.items()}  # Triton would ask in every launch
            for runner, launch, known, numbers in zip(self.runners, self.launches, self.known, self.numbers):
                runner(*launch.arguments(tensors, known, given), *numbers)
        return tensors

    def compiled(self, tensors: dict[str, Tensor]) -> tuple[Callable[..., object], ...]:
        """Compile all kernels for tensors like these, side by side; what launches each."""

        def compile_one(launch: Launch) -> Callable[..., object]:
            grid, options = (launch.grid, 1, 1), dict(launch.options)
            if interpreting():
                return partial(launch.kernel[grid], **options)
            with _at(self.device):  # the current device is a thread's own
                arguments = launch.arguments(tensors, launch.descriptions(tensors), tensors)
                compiled = launch.kernel.warmup(*arguments, *launch.numbers, *launch.constants, grid=grid, **options)
            return compiled[grid]  # type: ignore[no-any-return]

        if len(self.launches) == 1 or interpreting():
            return tuple(map(compile_one, self.launches))
        with ThreadPoolExecutor(len(self.launches)) as pool:
            return tuple(pool.map(compile_one, self.launches))


def _ones(C: int, device: torch.device) -> Tensor:
    """[C + 1, C], row n with n ones; kept, unless it would be of memory that belongs to a graph."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return _made_ones(C, device) if capturing else _kept_ones(C, device)


def _made_ones(C: int, device: torch.device) -> Tensor:
    return torch.ones(C + 1, C, dtype=torch.bfloat16, device=device).tril(-1)


_kept_ones = cache(_made_ones)


_NOTHING = nullcontext()


def _at(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


_prepared: dict[Hashable, Prepared] = {}
_tried: dict[Key, Blocks] = {}


@contextmanager
def trying(blocks: Mapping[Key, Blocks]) -> Iterator[None]:
    """Launch with these block sizes before all others, within this block, in the whole process: how ``penstock tune`` times them."""
    before = dict(_tried)
    _prepared.clear()
    _tried.update(blocks)
    try:
        yield
    finally:
        _prepared.clear()
        _tried.clear()
        _tried.update(before)


def _target(device: torch.device) -> Target:
    target = Target.of(device)
    return target._replace(table={**target.table, **_tried}) if _tried else target


class Signed(Protocol):
    """A call that knows what all calls like it have in common."""

    @property
    def q(self) -> Tensor:
        """The tensor that stands in for those that there are not."""
        ...

    @property
    def signature(self) -> Hashable:
        """Equal for calls that differ in values only."""
        ...


def run(
    kind: str, p: Signed, planned: Callable[[Target], Plan], tensors: dict[str, Tensor | None], *more: Tensor | None
) -> dict[str, Tensor]:
    """The plan of a call, made or found, run on its tensors; those that there are not are stood in for by q."""
    key = kind, p.signature, signature(*more) if more else (), torch.get_float32_matmul_precision()
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= KEPT:
            _prepared.clear()
        prepared = _prepared[key] = Prepared(planned(_target(p.q.device)), p.q.device, [name for name, x in tensors.items() if x is None])
    for name in prepared.absent:
        tensors[name] = p.q
    return prepared.run(tensors)  # type: ignore[arg-type]


def _inputs(p: Problem) -> dict[str, Tensor | None]:
    return {"q": p.q, "k": p.k, "v": p.v, "g": p.g, "u": p.u, "initial_state": p.initial_state, "cu_seqlens": dense(p.cu_seqlens)}


def chunk_forward_pass(p: Problem, keep: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, final state and, if ``keep``, states for the backward pass, by chunks."""
    kind = "chunk forward, keeping states" if keep else "chunk forward"
    found = run(kind, p, lambda target: plan.chunk_forward_plan(p, target, keep), _inputs(p))
    return found["output"], found["final_state"], found.get("chunk_states")


def recurrent_forward_pass(p: Problem) -> tuple[Tensor, Tensor]:
    """Output and final state token by token."""
    found = run("recurrent forward", p, lambda target: plan.recurrent_forward_plan(p, None, None, target), _inputs(p))
    return found["output"], found["final_state"]


def step_pass(s: Step) -> Tensor:
    """A decode step: one launch, states in place."""
    tensors = {"q": s.q, "k": s.k, "v": s.v, "g": s.g, "u": s.u, "pool": s.state, "slots": dense(s.slots), "cu_seqlens": None}
    found = run("step", s, lambda target: plan.recurrent_forward_plan(s.problem(s.state), s.state, s.slots, target), tensors)
    return found["output"]


def chunk_backward_pass(
    p: Problem, d_output: Tensor, d_final_state: Tensor | None, states: Tensor | None = None, dg: bool = True
) -> Gradients:
    """All gradients by chunks, from the states that a forward pass kept if there are any; the decay's only if ``dg``."""
    found = run(
        "chunk backward" if dg else "chunk backward without dg", p,
        lambda target: plan.chunk_backward_plan(p, d_output, d_final_state, target, states, dg),
        _inputs(p) | {"d_output": d_output, "d_final_state": d_final_state, "states": states}, d_output, d_final_state, states,
    )  # fmt: skip
    d_gate, du = (None if x is None or name not in found else _summed(found[name], x) for name, x in (("dg", p.g), ("du", p.u)))
    return Gradients(found["dq"], found["dk"], found["dv"], d_gate, du, found.get("d_initial_state"))


def _summed(shares: Tensor, like: Tensor) -> Tensor:
    """The sum of an input's gradient over the axes that the input has not, in its dtype."""
    more = tuple(range(shares.dim() - like.dim()))
    return (shares.sum(more) if more else shares).to(like.dtype)


def recurrent_backward_pass(p: Problem, d_output: Tensor, d_final_state: Tensor | None) -> Gradients:
    """All gradients token by token; shares of blocks of V are summed here."""
    tensors = _inputs(p) | {"d_output": d_output, "d_final_state": d_final_state}
    found = run(
        "recurrent backward", p, lambda target: plan.recurrent_backward_plan(p, d_output, d_final_state, target),
        tensors, d_output, d_final_state,
    )  # fmt: skip
    dq, dk = _summed(found["dq"], p.q), _summed(found["dk"], p.k)
    dg, du = (None if x is None else _summed(found[name], x) for name, x in (("dg", p.g), ("du", p.u)))
    d_initial = None if p.initial_state is None else found["d_initial_state"].to(p.initial_state.dtype)
    return Gradients(dq, dk, found["dv"], dg, du, d_initial)
