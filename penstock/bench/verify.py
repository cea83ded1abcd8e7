"""Every implementation against the oracle: output, final state, every gradient and the decode step, on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from .. import dispatch
from ..kernels.contract import Implementation, Mode
from ..problem import FLOATS, Problem, Step, state_dtype
from ..softmax import FUNCTION
from ..variants import VARIANTS
from . import rounding, verify_softmax
from .cases import Inputs, Shape, inputs
from .finding import Finding
from .machine import using_threads
from .oracle import budget, by_result, error, exact_forward, exact_gradients

SHAPE = Shape(2, 70, 2, 24, 40)
"""More tokens than a chunk, sizes that no block divides, K and V different; the oracle takes a few milliseconds for it."""
SLOTS = (3, -1, 0)
"""Rows of a pool of 4 in the decode step: out of order, one skipped."""
SQUARE = SHAPE._replace(K=64, V=64)
"""For implementations that only take the heads that models have."""


def devices() -> list[str]:
    """List the CPU and every GPU that torch can use."""
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def findings(variants: tuple[str, ...] = (*VARIANTS, FUNCTION), dtypes: tuple[torch.dtype, ...] | None = None) -> Iterator[Finding]:
    """All of them, one after another."""
    for device in devices():
        for variant in variants:
            for dtype in FLOATS if dtypes is None else dtypes:
                if variant == FUNCTION:
                    yield from verify_softmax.findings(device, dtype)
                    continue
                trial = Trial.prepare(variant, dtype, device)
                for implementation in dispatch.IMPLEMENTATIONS:
                    found = list(trial.hold(implementation))
                    if _refused(found) and implementation.available() is None:
                        again = list(Trial.prepare(variant, dtype, device, SQUARE).hold(implementation))
                        found = found if _refused(again) else again
                    yield from found


def _refused(found: list[Finding]) -> bool:
    """Whether an implementation took nothing."""
    return all(one.error is None and not one.failed for one in found)


@dataclass(frozen=True)
class Trial:
    """Inputs and what the oracle says of them."""

    call: Inputs
    initial_state: Tensor
    d_output: Tensor
    d_final_state: Tensor
    step: Inputs
    pool: Tensor
    exact: dict[str, Tensor]
    """Exact values by name of the result."""

    @classmethod
    def prepare(cls, variant: str, dtype: torch.dtype, device: str, shape: Shape = SHAPE) -> Trial:
        """Make inputs and ask the oracle."""
        of_step = shape._replace(B=len(SLOTS), T=3)
        call, step = inputs(variant, shape, dtype, device), inputs(variant, of_step, dtype, device, seed=1)
        random = torch.Generator().manual_seed(2)
        sizes = [
            (shape.state, state_dtype(dtype)),
            (call.v.shape, dtype),
            (shape.state, state_dtype(dtype)),
            ((4, *of_step.state[1:]), state_dtype(dtype)),
        ]
        initial_state, d_output, d_final_state, pool = (torch.randn(size, generator=random).to(device, kind) for size, kind in sizes)
        output, final_state = exact_forward(call, initial_state)
        gradients = exact_gradients(call, d_output, initial_state, d_final_state)
        stepped, states = exact_forward(step, pool[list(SLOTS)])
        after, live = pool.double().clone(), [n for n, slot in enumerate(SLOTS) if slot >= 0]
        after[[SLOTS[n] for n in live]] = states[live]
        decoded = torch.zeros_like(stepped)
        decoded[live] = stepped[live]
        exact = {"output": output, "final state": final_state, "decode output": decoded, "decode states": after}
        exact |= by_result(gradients)
        return cls(call, initial_state, d_output, d_final_state, step, pool, exact)

    def hold(self, implementation: Implementation) -> Iterator[Finding]:
        """Compare one implementation with the exact values: what "auto" runs on all threads, the others on one."""
        at = implementation.name, str(self.call.q.device), self.call.variant, str(self.call.q.dtype).removeprefix("torch.")
        unavailable = implementation.available()
        if unavailable is not None:
            yield Finding(*at, "all", None, None, unavailable, absent=True)
            return
        problem = self.call.problem(self.initial_state)
        threads = None if dispatch.pick(problem, "forward") is implementation else 1
        bits = implementation.operands(self.call.q.dtype)
        rounded = {} if bits is None else rounding.errors(problem, bits, self.exact, self.d_output, self.d_final_state)
        for mode in get_args(Mode):
            reason = implementation.refuses(problem, mode)
            if reason is not None:
                yield Finding(*at, mode, None, None, reason)
                continue
            try:
                with using_threads(threads):
                    found = self._run(implementation, problem, mode)
            except Exception as failure:  # whatever a kernel does on an unknown machine is a finding, and the others still run
                yield Finding(*at, mode, None, None, f"{type(failure).__name__}: {failure}", failed=True)
                continue
            for name, value in found.items():
                apart, allowed = error(value, self.exact[name]), budget(self.call.q.dtype, value.dtype) + 2 * rounded.get(name, 0.0)
                yield Finding(*at, name, apart, allowed, failed=not apart <= allowed)

    def _run(self, implementation: Implementation, problem: Problem, mode: Mode) -> dict[str, Tensor]:
        with torch.no_grad():
            if mode == "forward":
                return dict(zip(("output", "final state"), implementation.forward(problem)))
            if mode == "backward":
                return by_result(implementation.backward(problem, self.d_output, self.d_final_state)._asdict())
            step, pool = self.step, self.pool.clone()
            slots = torch.tensor(SLOTS, device=pool.device)
            call = Step.checked(step.q, step.k, step.v, step.g, step.u, pool, slots, step.variant, None)
            return {"decode output": implementation.step(call), "decode states": pool}
