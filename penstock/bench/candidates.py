"""What is timed: an implementation of ours, or a peer, behind two functions that take the same inputs."""

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
from ..recurrence.functional import decode_step
from ..recurrence.operators import FAMILY
from ..verify import oracle
from ..verify.inputs import Inputs
from ..verify.machine import using_threads
from .loop import token_loop

Mode = Literal["fwd", "fwdbwd", "decode"]
MODES: tuple[Mode, ...] = ("fwd", "fwdbwd", "decode")
ASKED: dict[Mode, tuple[implementation.Mode, ...]] = {"fwd": ("forward",), "fwdbwd": ("forward", "backward"), "decode": ("advance",)}
"""What an implementation is asked for in each mode."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute a call."""

    name: str
    forward: Callable[[Inputs], Tensor]
    """The output [B,T,H,V]; differentiable where inputs require gradients."""
    step: Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]
    """Output and new states from the tokens and states [B,H,K,V] of B sequences; may update the states in place."""
    budget: Callable[[torch.dtype, torch.dtype], float]
    """The largest error allowed, from the dtype of the inputs and that of the result."""
    threads: int | None = None
    """CPU threads, if fewer than torch's."""
    operand_bits: int | None = None
    """Significant bits to which its products round their operands, if they do; the budget then grows by what that costs."""
    ours: bool = False
    """Whether a fault of it is one of this library."""


def ours(impl: str, inputs: Inputs, mode: Mode) -> Candidate:
    """Take an implementation of this library, or "auto", for inputs like these. Raises ImplementationRefused with its reason."""
    FAMILY.check_name("bench", impl)
    name, problem = impl, problem_of(inputs, mode)
    taken = [FAMILY.choose(problem, asked, impl, gradients=mode == "fwdbwd") for asked in ASKED[mode]]
    if impl == "auto":
        name = f"auto ({', '.join(dict.fromkeys(one.name for one in taken))})"
    # What is checked comes from the last: gradients of the backward pass; a decode step has no products.
    bits = None if mode == "decode" else taken[-1].operands(inputs.q.dtype)

    def step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        return decode_step(inputs.variant, inputs.q, inputs.k, inputs.v, inputs.g, inputs.u, state=state, impl=impl), state

    return Candidate(name, lambda inputs: inputs.run(impl), step, oracle.budget, operand_bits=bits, ours=True)


def problem_of(inputs: Inputs, mode: Mode) -> Problem:
    """The call as implementations see it."""
    return inputs.in_place(inputs.q.new_empty(inputs.shape.state)) if mode == "decode" else inputs.problem()


def loop(inputs: Inputs) -> Candidate:
    """Take the token loop, the baseline, with one thread or all: whichever is faster on the first tokens of these inputs.

    Its operations are so small that more threads may slow it down. It multiplies by rounded float32 decays over and over,
    hence its own budget; its gradients are rounded as any result is.
    """
    threads = None
    if inputs.q.device.type == "cpu" and torch.get_num_threads() > 1 and _seconds(inputs, 1) < _seconds(inputs, None):
        threads = 1

    def budget(inputs: torch.dtype, result: torch.dtype) -> float:
        return 1e-4 + oracle.rounding_once(result)

    return Candidate("token loop", lambda inputs: token_loop(inputs)[0], token_loop, budget, threads)


def _seconds(inputs: Inputs, threads: int | None) -> float:
    """Time the loop's first tokens: the median, because threads that wait for busy cores are quick now and then."""
    taken = []
    with using_threads(threads), torch.no_grad():
        for _ in range(5):
            begin = perf_counter()
            token_loop(inputs.first(8))
            taken.append(perf_counter() - begin)
    return median(taken)
