"""The timed call of a candidate, with its inputs allocated beforehand; the copy that is the floor; and the bytes that both move."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..tokens.dtypes import state_dtype
from ..verify.inputs import Inputs
from ..verify.machine import using_threads
from .candidates import Candidate, Mode
from .clock import TimedCall


def call_of(candidate: Candidate, inputs: Inputs, mode: Mode) -> TimedCall:
    """Return the call that is timed. It returns the output and, with a backward pass, the gradients."""
    if mode == "fwdbwd":
        leaves, upstream = candidate.arguments(inputs).with_gradients(), d_output(inputs)

        def both() -> object:
            with using_threads(candidate.threads):
                return output_and_gradients(candidate, leaves, upstream)

        return both

    given = candidate.arguments(inputs)
    if mode == "fwd":

        def forward() -> object:
            with torch.no_grad(), using_threads(candidate.threads):
                return candidate.forward(given)

        return forward

    # Every call uses the same memory: a CUDA graph that reads the result of another call would read freed memory.
    state = candidate.states(states(inputs))

    def step() -> object:
        with torch.no_grad(), using_threads(candidate.threads):
            return candidate.step(given, state)[0]

    return step


def output_and_gradients(candidate: Candidate, leaves: Inputs, upstream: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradient of each of ``leaves.trained``."""
    output = candidate.forward(leaves)
    return output, *torch.autograd.grad(output, list(leaves.trained.values()), upstream.to(output.dtype))


def d_output(inputs: Inputs) -> Tensor:
    """The output's gradient, the same for every candidate."""
    return _normal(inputs.v.shape, inputs.v.device, seed=1).to(inputs.v.dtype)


def states(inputs: Inputs) -> Tensor:
    """Initial states of a decode step, the same for every candidate."""
    return _normal(inputs.shape.state, inputs.q.device, seed=2).to(state_dtype(inputs.q.dtype))


def _normal(size: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator(device).manual_seed(seed), device=device)


def moved_bytes(inputs: Inputs, mode: Mode) -> int:
    """Count the bytes to read every input once and to write every result once.

    Forward: the inputs, such as q, k, v, g and u, and the output. The backward pass adds the same bytes again (the output's gradient
    instead of the output) and a gradient for every input. Decode: the states are read and written; the tokens are negligible.
    """
    read = sum(x.numel() * x.element_size() for x in inputs.tensors.values())
    output = inputs.v.numel() * inputs.v.element_size()
    if mode == "decode":
        return 2 * prod(inputs.shape.state) * state_dtype(inputs.q.dtype).itemsize
    return read + output if mode == "fwd" else (read + output) + (read + output) + read


def copy_of(inputs: Inputs, mode: Mode) -> TimedCall:
    """A call that moves ``moved_bytes``: a decode step scales its states in place, other modes copy one half to the other."""
    if mode == "decode":
        state = states(inputs)
        return lambda: state.mul_(1.0)
    source = torch.zeros(moved_bytes(inputs, mode) // 2, dtype=torch.uint8, device=inputs.q.device)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)
