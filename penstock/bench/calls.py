"""One call of a candidate in a mode, with everything it needs made beforehand; the copy beside it; and the bytes both move."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..recurrence.declaration import state_dtype
from ..verify.inputs import Inputs
from ..verify.machine import using_threads
from .candidates import Candidate, Mode
from .clock import Call


def call_of(candidate: Candidate, inputs: Inputs, mode: Mode) -> Call:
    """Make what is timed. It returns what has to exist afterwards: the output and, with a backward pass, the gradients."""
    if mode == "fwdbwd":
        leaves, upstream = inputs.with_gradients(), d_output(inputs)

        def both() -> object:
            with using_threads(candidate.threads):
                return output_and_gradients(candidate, leaves, upstream)

        return both

    if mode == "fwd":

        def forward() -> object:
            with torch.no_grad(), using_threads(candidate.threads):
                return candidate.forward(inputs)

        return forward

    state = states(inputs)  # always this memory: a graph would go on reading states that a call before it left and nobody holds

    def step() -> object:
        with torch.no_grad(), using_threads(candidate.threads):
            return candidate.step(inputs, state)[0]

    return step


def output_and_gradients(candidate: Candidate, leaves: Inputs, upstream: Tensor) -> tuple[Tensor, ...]:
    """The output, then the gradient of each of ``leaves.trained``."""
    output = candidate.forward(leaves)
    return output, *torch.autograd.grad(output, list(leaves.trained.values()), upstream.to(output.dtype))


def d_output(inputs: Inputs) -> Tensor:
    """The output's gradient, the same for every candidate."""
    return _normal(inputs.v.shape, inputs.v.device, seed=1).to(inputs.v.dtype)


def states(inputs: Inputs) -> Tensor:
    """States to decode from, the same for every candidate."""
    return _normal(inputs.shape.state, inputs.q.device, seed=2).to(state_dtype(inputs.q.dtype))


def _normal(size: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator(device).manual_seed(seed), device=device)


def moved_bytes(inputs: Inputs, mode: Mode) -> int:
    """Count the bytes of reading every input once and writing every result once.

    Forward: q, k, v, g, u and the output. Backward, on top: all of these again (the output's gradient in the place of the
    output) and a gradient for every input. Decode: the states, read and written; its tokens are too few to count.
    """
    read = sum(x.numel() * x.element_size() for x in inputs.tensors.values())
    output = inputs.v.numel() * inputs.v.element_size()
    if mode == "decode":
        return 2 * prod(inputs.shape.state) * state_dtype(inputs.q.dtype).itemsize
    return read + output if mode == "fwd" else (read + output) + (read + output) + read


def copy_of(inputs: Inputs, mode: Mode) -> Call:
    """Move as many bytes as the floor counts: for decoding the states in place, else from one half to another."""
    if mode == "decode":
        state = states(inputs)
        return lambda: state.mul_(1.0)
    source = torch.zeros(moved_bytes(inputs, mode) // 2, dtype=torch.uint8, device=inputs.q.device)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)
