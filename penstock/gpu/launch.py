"""Runs plans: allocates their memory and launches their kernels. The host never waits for the device.

A plan is compiled once for alike calls and bound once to the sizes of equal calls (``penstock.call.memory``). So the host overhead of an
equal call is little more than the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..call.memory import exact, layout
from ..call.problem import Problem
from .plan import Launch, Plan, Sizes, contiguous, value
from .target import Target, interpreting


class Prepared:
    """A plan with its compiled kernels, for alike calls."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.kernels: tuple[Any, ...] | None = None
        self.descriptions: list[list[dict[str, Any]]] = []
        """For each launch, the descriptors of its tiled tensors."""
        self.numbers = [_Template(one.numbers) for one in plan.launches]
        self.memory = [(name, _Template(shape), dtype) for name, (shape, dtype) in plan.memory.items()]

    def compile(self, tensors: Mapping[str, Tensor], sizes: Sizes) -> tuple[Any, ...]:
        """Compile all kernels in parallel, for tensors like these."""
        if self.kernels is None:
            plan = self.plan.at(sizes)
            self.descriptions = [one.descriptions(tensors) for one in plan.launches]
            job = partial(self._compile_one, tensors=tensors)
            if len(plan.launches) == 1 or interpreting():
                self.kernels = tuple(map(job, plan.launches))
            else:
                with ThreadPoolExecutor(len(plan.launches)) as pool:
                    self.kernels = tuple(pool.map(job, plan.launches))
        return self.kernels

    def _compile_one(self, launch: Launch, tensors: Mapping[str, Tensor]) -> Any:
        """The compiled kernel; ``[grid]`` gives a function that launches it."""
        if interpreting():
            return _Interpreted(launch.kernel, dict(launch.options))
        with _at(self.device):  # each thread has its own current device
            arguments = launch.arguments(tensors, launch.descriptions(tensors), tensors)
            return launch.kernel.warmup(*arguments, *launch.numbers, *launch.constants, grid=(1, 1, 1), **dict(launch.options))


class _Template:
    """Numbers, some of them functions of the sizes."""

    __slots__ = ("fixed", "open")

    def __init__(self, numbers: Sequence[Any]) -> None:
        self.fixed = list(numbers)
        self.open = [(place, x) for place, x in enumerate(numbers) if callable(x)]

    def at(self, sizes: Sizes) -> tuple[Any, ...]:
        """The numbers for these sizes."""
        found = self.fixed.copy()
        for place, x in self.open:
            found[place] = x(sizes)
        return tuple(found)


class _Interpreted:
    """A kernel under the interpreter, with the interface of a compiled kernel."""

    def __init__(self, kernel: Any, options: dict[str, int]) -> None:
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., object]:
        return partial(self.kernel[grid], **self.options)


class Bound:
    """A prepared plan for equal calls: all sizes are numbers."""

    def __init__(self, prepared: Prepared, sizes: Sizes, absent: list[str]) -> None:
        self.prepared, self.sizes, self.absent = prepared, sizes, absent
        self.launches, self.constants, self.device = prepared.plan.launches, prepared.plan.constants, prepared.device
        shapes = [(name, shape.at(sizes), dtype) for name, shape, dtype in prepared.memory]
        self.memory = [(name, shape, contiguous(shape), dtype) for name, shape, dtype in shapes]
        self.numbers = [numbers.at(sizes) + one.constants for numbers, one in zip(prepared.numbers, self.launches)]
        self.runners: list[Callable[..., object]] | None = None

    def run(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the plan's memory to ``tensors`` and launch its kernels."""
        device, launches = self.device, self.launches
        for name, one in self.constants.items():
            tensors[name] = _constant(*one, device)
        for name, shape, strides, dtype in self.memory:
            tensors[name] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        with _at(device):
            if self.runners is None:
                kernels = self.prepared.compile(tensors, self.sizes)
                self.runners = [kernel[value(one.grid, self.sizes), 1, 1] for kernel, one in zip(kernels, launches)]
            given = (
                tensors if interpreting() else {name: x.data_ptr() for name, x in tensors.items()}
            )  # saves Triton a call of data_ptr per launch
            for runner, one, known, numbers in zip(self.runners, launches, self.prepared.descriptions, self.numbers):
                runner(*one.arguments(tensors, known, given), *numbers)
        return tensors


def _constant(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """A constant tensor. Cached, unless it is made during the capture of a CUDA graph, which owns the memory."""
    key, device = (function, *arguments), arguments[-1]
    found = _kept.get(key)
    if found is None:
        found = function(*arguments)
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _kept[key] = found
    return found


_kept: dict[tuple[Any, ...], Tensor] = {}
_NOTHING = nullcontext()


def _at(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


_trial: Hashable = None
_tried: Mapping[Any, Any] = {}


@contextmanager
def trying(configurations: Mapping[Any, Any]) -> Iterator[None]:
    """Within this block, these configurations take precedence in the whole process. ``penstock tune`` uses it."""
    global _trial, _tried
    before = _trial, _tried
    _trial, _tried = object(), dict(configurations)
    try:
        yield
    finally:
        _trial, _tried = before


def run(
    name: str, p: Problem, target: Target, planned: Callable[[Target], Plan], tensors: dict[str, Tensor | None], *more: Tensor | None
) -> dict[str, Tensor]:
    """Run a pass of a problem: find or create its plan, compiled and bound. ``more``: tensors that are not in the problem.

    Missing tensors get the first tensor of the problem as a dummy pointer.
    """
    seen, first = p.seen, p.tensors[0]
    assert first is not None
    key = name, exact(more) if more else (), torch.get_float32_matmul_precision(), _trial
    bound = seen.bound.get(key)
    if bound is None:
        plans = seen.kind.plans
        rough = name, tuple([layout(part) for part in key[1]]), key[2], _trial
        prepared = plans.get(rough)
        if prepared is None:
            at = target._replace(table={**target.table, **_tried}) if _tried else target
            prepared = plans[rough] = Prepared(planned(at), first.device)
        bound = seen.bound[key] = Bound(prepared, p.sizes, [name for name, x in tensors.items() if x is None])
    for one in bound.absent:
        tensors[one] = first
    found: dict[str, Tensor] = bound.run(tensors)  # type: ignore[arg-type]
    return found
