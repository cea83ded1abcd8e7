"""Trials of block sizes on a GPU: the results are compared with the float64 chunkwise form, then the calls are timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.derivatives import Tensors, gradients_of
from ..call.implementation import Upstream
from ..gpu import launch
from ..tokens.shape import Shape
from ..verify import rounding
from ..verify.inputs import inputs
from ..verify.oracle import budget, by_result, error, growth
from .passes import tuning_of

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
    which: str
    """The pass."""
    key: Any
    """The key of the kernel whose candidates are tried."""
    other_configs: dict[Any, Any]
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


def prepared(trial: Trial, clock: Clock | None = None) -> Callable[[Any], Answer]:
    """Return a function that tries a candidate. After an exception the GPU may be unusable in this process."""
    ready = _in_place(trial) if trial.which in tuning_of(trial.variant).in_place else _pass(trial)

    def tried(config: Any) -> Answer:
        with launch.trying({**trial.other_configs, trial.key: config}), torch.no_grad():
            found = ready.checked()
            pairs = []
            for name, exact in ready.exact.items():
                allowed = growth(trial.shape.T) * budget(trial.dtype, found[name].dtype) + 2 * ready.rounded.get(name, 0.0)
                pairs.append((error(found[name], exact), allowed))
            worst = max(pairs, key=lambda pair: pair[0] / pair[1])
            return Answer((clock or gpu_clock)(ready.timed, torch.device(trial.device)), *worst)

    return tried


def _in_place(trial: Trial) -> Ready:
    """Prepare a decode step of all sequences, which updates a pool in place."""
    tuning = tuning_of(trial.variant)
    x = inputs(trial.variant, trial.shape, trial.dtype, trial.device, trial.seed)
    pool = torch.randn(trial.shape.state, generator=torch.Generator().manual_seed(trial.seed + 1)).to(trial.device)
    step = x.in_place(pool.clone())
    double = step.with_tensors({name: y.double() for name, y in {**x.tensors, "state": pool}.items()})
    advance, exact_advance = tuning.implementation(trial.which).advance, tuning.exact.advance
    assert advance is not None and exact_advance is not None  # noqa: PT018
    exact = {"output": exact_advance(double), "states": double.state}

    def checked() -> Results:
        step.state.copy_(pool)
        return {"output": advance(step), "states": step.state}

    return Ready(checked, lambda: advance(step), exact, {})


def _pass(trial: Trial) -> Ready:
    """Prepare a pass over whole sequences."""
    tuning = tuning_of(trial.variant)
    x = inputs(trial.variant, trial.shape, trial.dtype, trial.device, trial.seed)
    problem = x.problem()
    d_output = torch.randn(x.v.shape, generator=torch.Generator().manual_seed(trial.seed + 1)).to(trial.device, trial.dtype)
    forward, kernels = trial.which.endswith("forward"), tuning.implementation(trial.which)
    results = [one.name.replace("_", " ") for one in problem.operator.results]
    names = [one.name for one in problem.signature.arguments if one.gradient]
    double = problem.with_tensors({name: y.double() for name, y in x.tensors.items()})
    with torch.no_grad():
        if forward:
            exact = _named(results, tuning.exact.forward(double))
        else:
            exact = by_result(dict(zip(names, gradients_of(tuning.exact.forward, double, (d_output.double(), None)))))
    bits = kernels.operands(trial.dtype, "forward" if forward else "backward")
    rounded = {} if bits is None else rounding.errors(problem, bits, exact, () if forward else (d_output, None))

    def checked() -> Results:
        if forward:
            return _named(results, kernels.forward(problem))
        return by_result(dict(zip(names, kernels.gradients(problem, Upstream((d_output, None))))))

    return Ready(checked, checked, exact, rounded)


def _named(names: Sequence[str], found: Tensors) -> Results:
    return {name: x for name, x in zip(names, found) if x is not None}


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
