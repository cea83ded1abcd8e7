"""Runs plans: allocates their memory and launches their kernels. The host never waits for the device.

A plan is compiled once for similar calls and bound once to the sizes of equal calls (``penstock.call.memory``). So the host overhead of an
equal call is little more than the launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import private
from ..call.memory import exact, layout
from ..call.problem import Problem
from . import background, direct, sharing
from .hopper import described
from .plan import Launch, Plan, Sizes, contiguous, value
from .target import Target, interpreting


class Prepared:
    """A plan with its compiled kernels, for similar calls."""

    def __init__(self, plan: Plan, device: torch.device, absent: Sequence[str], instead: str) -> None:
        """``absent``: optional tensors that are missing in these calls. Kernels get the tensor ``instead`` as a dummy pointer."""
        self.plan, self.device, self.instead = plan, device, dict.fromkeys(absent, instead)
        self.gpu = device.index if device.type == "cuda" else None
        self.kernels: tuple[Any, ...] | None = None
        self.later: Callable[[], None] | None = None
        """Called once, when all kernels but one are compiled."""
        self.raw: list[direct.Raw] = []
        """For each kernel, the function that Triton's runner calls, if this version of Triton is known."""
        self.tiled: list[list[tuple[str, dict[str, Any]]]] = []
        """For each launch, its tiled tensors and the fields that their descriptors share."""
        others = [[self.instead.get(name, name) for name in one.tensors[len(one.tiles) :]] for one in plan.launches]
        self.addressed = tuple({name: None for names in others for name in names})
        """The other tensors of all launches."""
        self.others = [tuple(map(self.addressed.index, names)) for names in others]
        """For each launch, the indices of its other tensors in ``addressed``."""
        self.numbers = [_Template(one.numbers) for one in plan.launches]
        self.memory = [(name, _Template(shape), dtype) for name, (shape, dtype) in plan.memory.items()]

    def compile(self, tensors: Mapping[str, Tensor], sizes: Sizes) -> tuple[Any, ...]:
        """Compile all kernels in parallel, for tensors like these."""
        if self.kernels is None:
            plan = self.plan.at(sizes)
            given = {**tensors, **{name: tensors[other] for name, other in self.instead.items()}}
            job = partial(self._compile_one, tensors=given)
            if len(plan.launches) == 1 or interpreting():
                made = list(map(job, plan.launches))
                self._begin_later()
            else:
                with ThreadPoolExecutor(len(plan.launches)) as pool:
                    futures = [pool.submit(job, one) for one in plan.launches]
                    for _ in islice(as_completed(futures), len(futures) - 1):
                        pass
                    self._begin_later()
                    made = [future.result() for future in futures]
            self.tiled = [list(zip(one.tensors, one.descriptions(given))) for one in plan.launches]
            self.raw = [raw for _, raw in made if raw is not None]
            self.kernels = tuple([kernel for kernel, _ in made])
        return self.kernels

    def _begin_later(self) -> None:
        later, self.later = self.later, None  # which has tensors
        if later is not None:
            later()

    def _compile_one(self, launch: Launch, tensors: Mapping[str, Tensor]) -> tuple[Any, direct.Raw | None]:
        """The compiled kernel, where ``[grid]`` returns a function that launches it; and the function that Triton's runner calls.

        The latter is created here, in parallel: the kernel is loaded onto the device.
        """
        if interpreting():
            first = len(launch.tensors)
            return _Interpreted(launch.kernel, dict(launch.options), [first + place for place in launch.wide]), None
        kernel = background.compiled(launch, tensors, self.gpu)
        with _at(self.gpu):  # each thread has its own current device
            return kernel, direct.raw(kernel, bool(launch.tiles)) if direct.KNOWN else None


class _Template:
    """The arguments that are numbers, some of them functions of the sizes."""

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

    def __init__(self, kernel: Any, options: dict[str, int], wide: Sequence[int]) -> None:
        """``wide``: the indices of 64-bit arguments."""
        self.kernel, self.options, self.wide = kernel, options, wide

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., object]:
        def launched(*arguments: Any) -> object:
            given = [_wide(x) if place in self.wide else x for place, x in enumerate(arguments)]
            return self.kernel[grid](*given, **self.options)

        return launched


def _wide(x: int) -> Any:
    """A 64-bit integer for the interpreter."""
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(numpy.array([x], dtype=numpy.int64), tl.int64), tl.int64)


class Step(NamedTuple):
    """A launch of a bound plan."""

    kernel: Any
    launcher: direct.Launcher | None
    """Launches without Triton's runner, if this version of Triton is known."""
    grid: int
    tiled: list[tuple[str, dict[str, Any]]]
    """The tiled tensors, which come first, and the fields that their descriptors share."""
    others: Callable[[Sequence[Any]], tuple[Any, ...]]
    """Picks the addresses of the other tensors."""
    numbers: tuple[Any, ...]
    """Numbers and constants."""
    launch: Launch


class Bound:
    """A prepared plan for equal calls: all sizes are numbers."""

    def __init__(self, prepared: Prepared, sizes: Sizes) -> None:
        self.prepared, self.sizes, self.device, self.gpu = prepared, sizes, prepared.device, prepared.gpu
        self.addressed, self.empty = _picked(prepared.addressed), private.empty_strided(prepared.device)
        self.constants, self.tiled = prepared.plan.constants, any(one.tiles for one in prepared.plan.launches)
        shapes = [(name, shape.at(sizes), dtype) for name, shape, dtype in prepared.memory]
        self.memory = [(name, shape, contiguous(shape), dtype) for name, shape, dtype in shapes]
        self.shares = any(one.writes for one in prepared.plan.launches)
        self.without = {name for name, shape, _ in shapes if 0 in shape}
        """Names of empty tensors. A descriptor needs an address: it gets that of the launch's first tensor, which is then not read."""
        self.steps: list[Step] | None = None

    def run(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the plan's memory to ``tensors`` and launch its kernels."""
        stream = 0 if self.gpu is None else private.raw_stream(self.gpu)
        for name, one in self.constants.items():
            tensors[name] = _constant(one, self.device, stream)
        if self.gpu is None or self.gpu == private.current_device():
            self._launch(tensors, stream)
        else:
            with torch.cuda.device(self.gpu):
                self._launch(tensors, stream)
        return tensors

    def _launch(self, tensors: dict[str, Tensor], stream: int) -> None:
        """Allocate and launch on the current device."""
        empty = self.empty
        for name, shape, strides, dtype in self.memory:
            tensors[name] = empty(shape, strides, dtype)
        if self.steps is None:
            self.steps = self._steps(tensors)
        steps, kept = self.steps, sharing.kept() if self.shares else None
        if kept is not None:
            steps = self._unshared(tensors, kept)
        given = self.addressed(tensors)
        if not interpreting():
            given = tuple(map(Tensor.data_ptr, given))
        if self.tiled and self.gpu is not None:
            _with_context(self.gpu)
        past = not direct.hooked()
        for kernel, launcher, grid, tiled, others, numbers, _ in steps:
            arguments = others(given) + numbers
            if past and launcher is not None:
                launcher(grid, stream, tensors, arguments)
            else:
                kernel[grid, 1, 1](*[described(tensors[name], known) for name, known in tiled], *arguments)

    def _steps(self, tensors: Mapping[str, Tensor]) -> list[Step]:
        prepared, sizes, steps = self.prepared, self.sizes, []
        kernels = prepared.compile(tensors, sizes)
        for at, (kernel, one) in enumerate(zip(kernels, prepared.plan.launches)):
            numbers = prepared.numbers[at].at(sizes) + one.constants
            tiled = [(one.tensors[0] if name in self.without else name, known) for name, known in prepared.tiled[at]]
            launcher = direct.Launcher(kernel, prepared.raw[at], tiled) if prepared.raw else None
            steps.append(Step(kernel, launcher, value(one.grid, sizes), tiled, _picked(prepared.others[at]), numbers, one))
        return steps

    def _unshared(self, tensors: dict[str, Tensor], kept: dict[Hashable, sharing.Kept]) -> list[Step]:
        """The launches whose results no earlier call has kept; those that are kept replace memory in ``tensors``."""
        assert self.steps is not None
        left, instead = [], self.prepared.instead
        for step in self.steps:
            one = step.launch
            if one.writes:
                read = tuple([tensors[name] for name in one.tensors if name not in one.writes and name not in instead])
                key = id(one.kernel), step.grid, step.numbers, one.options, one.tiles, exact(read), tuple(map(Tensor.data_ptr, read))
                found = kept.pop(key, None)
                if found is not None:
                    tensors.update(zip(one.writes, found[1]))
                if self.prepared.plan.keeps:
                    kept[key] = found or (read, tuple([tensors[name] for name in one.writes]))
                if found is not None:
                    continue
            left.append(step)
        return left


def _picked(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that looks up all keys and returns a tuple. ``itemgetter`` does so only for more than one key."""
    return itemgetter(*keys) if len(keys) > 1 else lambda x: tuple([x[key] for key in keys])


_kept: dict[tuple[Any, ...], Tensor] = {}


def _constant(one: tuple[Any, ...], device: torch.device, stream: int) -> Tensor:
    """A constant tensor, computed by a function of arguments.

    Cached per stream, because other streams do not wait for the values. Not cached while a CUDA graph is captured, which would own the
    memory.
    """
    found = _kept.get((one, device, stream))
    if found is None:
        function, *arguments = one
        found = function(*arguments, device)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _kept[one, device, stream] = found
    return found


_thread = threading.local()


def _with_context(gpu: int) -> None:
    """Set the device's context: the driver needs it to encode descriptors of tiled tensors, and a new thread has none."""
    known: set[int] = _thread.__dict__.setdefault("devices", set())
    if gpu not in known:
        torch.cuda.Event().record()
        known.add(gpu)


_NOTHING = nullcontext()


def _at(gpu: int | None) -> AbstractContextManager[object]:
    """Make a device the current one: Triton launches there."""
    if gpu is None or gpu == private.current_device():
        return _NOTHING
    return torch.cuda.device(gpu)


def on_device_of(x: Tensor, kernel: Any) -> Any:
    """The kernel, with launches ``[grid](...)`` on the device of x."""
    if x.device.type != "cuda":
        return kernel if _noted is None else _Noting(kernel, _noted)
    gpu = x.device.index
    return direct.runner(kernel, gpu) if gpu == private.current_device() else _Elsewhere(direct.runner(kernel, gpu), gpu)


class _Elsewhere:
    """A kernel for a device other than the current one."""

    def __init__(self, kernel: Any, gpu: int) -> None:
        self.kernel, self.gpu = kernel, gpu

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def launched(*arguments: Any, **options: Any) -> object:
            with torch.cuda.device(self.gpu):
                return self.kernel[grid](*arguments, **options)

        return launched


class Noted(NamedTuple):
    """A launch that did not run."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    """Constants by name, and the options of Triton's compiler."""


_noted: list[Noted] | None = None


@contextmanager
def noted() -> Iterator[list[Noted]]:
    """Collect the launches ``on_device_of`` tensors on a CPU inside this block, in the whole process. They do not run."""
    global _noted
    before, _noted = _noted, []
    try:
        yield _noted
    finally:
        _noted = before


class _Noting:
    """A kernel whose launches are collected."""

    def __init__(self, kernel: Any, found: list[Noted]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *arguments, **options: self.found.append(Noted(self.kernel, arguments, options))


class _Trial:
    """The settings of a block of ``trying``. They are part of the keys of calls, so calls inside the block are planned anew."""

    def __init__(self, configurations: Mapping[Any, Any], forms: tuple[str, ...]) -> None:
        self.configurations, self.forms = dict(configurations), frozenset(forms)
        self.planned: set[str] = set()
        """The forms of all plans."""

    def on(self, target: Target) -> Target:
        """The GPU with these configurations and forms."""
        return target._replace(table={**target.table, **self.configurations}, forms=self.forms)


_trial: _Trial | None = None


@contextmanager
def trying(configurations: Mapping[Any, Any], *forms: str) -> Iterator[set[str]]:
    """Inside this block, these configurations take precedence in the whole process, and these forms run wherever they can.

    Yields the names of the forms planned so far. ``penstock tune`` and ``penstock check`` use it.
    """
    global _trial
    before, _trial = _trial, _Trial(configurations, forms)
    try:
        yield _trial.planned
    finally:
        _trial = before


def tried(at: Target) -> tuple[Target, Hashable]:
    """The GPU with the configurations and forms of ``trying``, and a key of these."""
    return (at if _trial is None else _trial.on(at)), _trial


Coming = tuple[Plan, dict[str, Tensor | None]]
"""The plan of a pass that follows, and its tensors, whose contents do not matter."""


def _begin(later: Sequence[Callable[[Target, Plan], Coming]], at: Target, prepared: Prepared, instead: str, sizes: Sizes) -> None:
    for one in later:
        background.begin(*one(at, prepared.plan), instead, sizes, prepared.gpu)


def run(
    name: str,
    p: Problem,
    target: Callable[[torch.device], Target],
    planned: Callable[[Target], Plan],
    tensors: dict[str, Tensor | None],
    *more: Tensor | None,
    beside: Callable[[Target], Coming] | None = None,
    later: Sequence[Callable[[Target, Plan], Coming]] = (),
) -> dict[str, Tensor]:
    """Run a pass of a problem: find or create its plan, compiled and bound. ``more``: tensors that are not in the problem.

    ``target`` is called only for a new plan. Missing tensors get the first tensor of the problem as a dummy pointer. ``beside``: a function
    that plans the pass that follows in the same call, whose kernels are compiled beside those of this one. ``later``: functions that
    plan passes that will probably follow, from the plan of this one; their kernels are compiled once all of this one but one are.
    """
    seen = p.seen
    key = name, exact(more) if more else (), torch.get_float32_matmul_precision(), _trial
    bound = seen.bound.get(key)
    if bound is None:
        plans = seen.kind.plans
        rough = name, tuple([layout(part) for part in key[1]]), key[2], _trial
        prepared = plans.get(rough)
        if prepared is None:
            first, absent = p.operator.names[0], [name for name, x in tensors.items() if x is None]
            device = p.__dict__[first].device
            at, _ = tried(target(device))
            prepared = plans[rough] = Prepared(planned(at), device, absent, first)
            if _trial is not None:
                _trial.planned.update(prepared.plan.forms)
            if device.type == "cuda" and not interpreting():
                if beside is not None:
                    background.begin(*beside(at), first, p.sizes, prepared.gpu)
                if later:
                    prepared.later = partial(_begin, later, at, prepared, first, p.sizes)
        bound = seen.bound[key] = Bound(prepared, p.sizes)
    return bound.run(tensors)  # type: ignore[arg-type]
