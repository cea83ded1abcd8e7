"""Candidates: implementations of this library and peers, with one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from ..call import implementation
from ..call.problem import Problem
from ..verify import oracle
from ..verify.inputs import Inputs
from ..verify.machine import using_threads
from .loop import token_loop

Mode = Literal["fwd", "fwdbwd", "decode"]
MODES: tuple[Mode, ...] = ("fwd", "fwdbwd", "decode")
IMPLEMENTATION_MODES: dict[Mode, tuple[implementation.Mode, ...]] = {
    "fwd": ("forward",),
    "fwdbwd": ("forward", "backward"),
    "decode": ("advance",),
}
"""The modes of an implementation that each mode of a benchmark runs."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute a call."""

    name: str
    forward: Callable[[Inputs], Tensor]
    """The output [B,T,H,V]; differentiable if inputs require gradients."""
    step: Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]
    """Output and new states of a decode step, from tokens and states [B,H,K,V]; may update the states in place."""
    budget: Callable[[torch.dtype, torch.dtype], float]
    """The largest error allowed, by dtype of the inputs and dtype of the result."""
    threads: int | None = None
    """CPU threads; None: as many as torch uses."""
    operand_bits: int | None = None
    """Significant bits of the rounded operands of its products, or None. The budget includes the error of this rounding."""
    ours: bool = False
    """Whether it belongs to this library."""
    arguments: Callable[[Inputs], Inputs] = lambda inputs: inputs
    """What it takes by the same names, such as logits in place of decays; made before the clock starts."""
    gradients: Callable[[Inputs, dict[str, Tensor]], dict[str, Tensor]] = lambda inputs, gradients: gradients
    """Gradients of the inputs, by name, from those of what it takes."""
    values_first: bool = False
    """Whether its states are [B,H,V,K]."""
    not_captured: str | None = None
    """Why its calls are not captured in a CUDA graph, or None. Others are captured if that succeeds."""

    def states(self, states: Tensor) -> Tensor:
        """States [B,H,K,V] as it takes them."""
        return states.mT.contiguous() if self.values_first else states


def ours(impl: str, inputs: Inputs, mode: Mode) -> Candidate:
    """The candidate for an implementation of this library, or "auto". Raises ImplementationRefused with the reason."""
    family = inputs.family.family
    family.check_name("bench", impl)
    name, problem = impl, problem_of(inputs, mode)
    modes = IMPLEMENTATION_MODES[mode]
    taken = [family.choose(problem, run_mode, impl, gradients=mode == "fwdbwd") for run_mode in modes]
    if impl == "auto":
        name = f"auto ({', '.join(dict.fromkeys(one.name for one in taken))})"
    # The checked results come from the last mode: gradients from the backward pass. A decode step has no matrix products.
    bits = None if mode == "decode" else taken[-1].operands(inputs.q.dtype, modes[-1])

    def step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        return inputs.step(state, impl), state

    return Candidate(name, lambda inputs: inputs.run(impl), step, oracle.budget, operand_bits=bits, ours=True)


def problem_of(inputs: Inputs, mode: Mode) -> Problem:
    """The problem that implementations get for a mode."""
    pool = inputs.q.new_empty(inputs.shape.state)
    problem: Problem = inputs.in_place(pool, inputs.slots) if mode == "decode" else inputs.problem()
    return problem


def loop(inputs: Inputs) -> Candidate:
    """The token loop, the baseline. It uses one thread or all of them, whichever is faster on the first tokens of these inputs.

    Its operations are small, and more threads can slow it down. Its budget is larger because it multiplies repeatedly by
    rounded float32 decays.
    """
    threads = None
    if inputs.q.device.type == "cpu" and torch.get_num_threads() > 1 and _seconds(inputs, 1) < _seconds(inputs, None):
        threads = 1

    def budget(inputs: torch.dtype, result: torch.dtype) -> float:
        return 1e-4 + oracle.rounding_once(result)

    return Candidate("token loop", lambda inputs: token_loop(inputs)[0], gathered(token_loop), budget, threads)


def gathered(step: Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]:
    """A decode step of ``Inputs.slots``, from one of states in order: rows are gathered before it and scattered after it."""

    def of_slots(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        if inputs.slots is None:
            return step(inputs, state)
        output, rows = step(inputs, state[inputs.slots])
        return output, state.index_copy_(0, inputs.slots, rows)

    return of_slots


def _seconds(inputs: Inputs, threads: int | None) -> float:
    """Median time of the loop's first tokens; single times vary when other processes use the cores."""
    taken = []
    with using_threads(threads), torch.no_grad():
        for _ in range(5):
            begin = perf_counter()
            token_loop(inputs.first(8))
            taken.append(perf_counter() - begin)
    return median(taken)
