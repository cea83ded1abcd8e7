"""Trials of block sizes on a GPU: the results are compared with the float64 chunkwise form, then the calls are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.derivatives import Tensors, gradients_of
from ..call.implementation import Upstream
from ..gpu import launch
from ..recurrence import chunkwise
from ..recurrence.gradients import Gradients
from ..recurrence.triton import CHUNKWISE, RECURRENT
from ..recurrence.triton.table import KernelConfig, Key
from ..verify import rounding
from ..verify.inputs import Shape, inputs
from ..verify.oracle import budget, by_result, error, growth
from .passes import Pass

CALLS = 20
FLUSHED = 1 << 28
"""Bytes written before each call to evict its inputs from the cache, as other layers do in a model."""


@dataclass(frozen=True)
class Trial:
    """The call that candidates are tried on. It is plain data, which can be sent to another process."""

    variant: str
    shape: Shape
    dtype: torch.dtype
    device: str
    seed: int
    which: Pass
    key: Key
    other_configs: dict[Key, KernelConfig]
    """Block sizes of the other kernels that differ from those in use."""


class Answer(NamedTuple):
    """Time and error of one candidate."""

    milliseconds: float
    error: float
    """The error that is largest relative to the allowed error."""
    allowed: float


Results = dict[str, Tensor]
Clock = Callable[[Callable[[], object], torch.device], float]


class Ready(NamedTuple):
    """A trial's calls and exact results, shared by all candidates."""

    checked: Callable[[], Results]
    """Runs the call and returns its results."""
    timed: Callable[[], object]
    exact: Results
    rounded: dict[str, float]
    """Errors from rounded operands of the products, see ``rounding.errors``."""


def prepared(trial: Trial, clock: Clock | None = None) -> Callable[[KernelConfig], Answer]:
    """Return a function that tries a candidate. After an exception the GPU may be unusable in this process."""
    ready = _step(trial) if trial.which == "step" else _pass(trial)

    def tried(config: KernelConfig) -> Answer:
        with launch.trying({**trial.other_configs, trial.key: config}), torch.no_grad():
            found = ready.checked()
            pairs = []
            for name, exact in ready.exact.items():
                allowed = growth(trial.shape.T) * budget(trial.dtype, found[name].dtype) + 2 * ready.rounded.get(name, 0.0)
                pairs.append((error(found[name], exact), allowed))
            worst = max(pairs, key=lambda pair: pair[0] / pair[1])
            return Answer((clock or gpu_clock)(ready.timed, torch.device(trial.device)), *worst)

    return tried


def _step(trial: Trial) -> Ready:
    """Prepare a decode step of all sequences, which updates a pool in place."""
    x = inputs(trial.variant, trial.shape, trial.dtype, trial.device, trial.seed)
    pool = torch.randn(trial.shape.state, generator=torch.Generator().manual_seed(trial.seed + 1)).to(trial.device)
    step = x.in_place(pool.clone())
    double = step.with_tensors({name: y.double() for name, y in {**x.tensors, "state": pool}.items()})
    assert chunkwise.IMPLEMENTATION.advance is not None and RECURRENT.advance is not None  # noqa: PT018
    exact, advance = {"output": chunkwise.IMPLEMENTATION.advance(double), "states": double.state}, RECURRENT.advance

    def checked() -> Results:
        step.state.copy_(pool)
        return {"output": advance(step), "states": step.state}

    return Ready(checked, lambda: advance(step), exact, {})


def _pass(trial: Trial) -> Ready:
    """Prepare a pass over whole sequences by the chunked kernels, or by the token-serial ones for short sequences."""
    x = inputs(trial.variant, trial.shape, trial.dtype, trial.device, trial.seed)
    problem = x.problem()
    d_output = torch.randn(x.v.shape, generator=torch.Generator().manual_seed(trial.seed + 1)).to(trial.device, trial.dtype)
    forward, kernels = trial.which == "forward", RECURRENT if trial.which == "short backward" else CHUNKWISE
    double = problem.with_tensors({name: y.double() for name, y in x.tensors.items()})
    with torch.no_grad():
        if forward:
            exact = _outputs(chunkwise.forward(double))
        else:
            exact = _gradients(gradients_of(chunkwise.forward, double, (d_output.double(), None)))
    bits = kernels.operands(trial.dtype, "forward" if forward else "backward")
    rounded = {} if bits is None else rounding.errors(problem, bits, exact, () if forward else (d_output, None))

    def checked() -> Results:
        return _outputs(kernels.forward(problem)) if forward else _gradients(kernels.gradients(problem, Upstream((d_output, None))))

    return Ready(checked, checked, exact, rounded)


def _outputs(found: Tensors) -> Results:
    return {name: x for name, x in zip(("output", "final state"), found) if x is not None}


def _gradients(found: Tensors) -> Results:
    return by_result(dict(zip(Gradients._fields, found)))


def gpu_clock(call: Callable[[], object], device: torch.device) -> float:
    """Median GPU time of ``CALLS`` calls in milliseconds. The GPU sleeps before each call while the host launches its kernels."""
    with torch.cuda.device(device):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        begin = perf_counter()
        call()
        cycles = int((perf_counter() - begin) * 4e9)  # twice as long as the host takes, at 2 GHz
        torch.cuda.synchronize()
        flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(CALLS)]
        for first, last in pairs:
            flushed.zero_()
            torch.cuda._sleep(cycles)
            first.record()
            call()
            last.record()
        torch.cuda.synchronize()
        return float(median(first.elapsed_time(last) for first, last in pairs))
