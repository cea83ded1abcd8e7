"""What an implementation is: a few functions of a problem, under a name.

Add one by writing a module that makes an ``Implementation`` and naming it in ``dispatch.py``; the contract tests then
hold it to the oracle without being told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..problem import Problem, Step

Mode = Literal["forward", "backward", "step"]


class Gradients(NamedTuple):
    """Gradients of a problem's inputs, with their shapes and dtypes; None where an input was None or its gradient not asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    u: Tensor | None
    initial_state: Tensor | None


def contiguous(*shape: int) -> tuple[int, ...]:
    """Strides of a result. ``torch.empty_strided``, which takes them, is through in half of the time of ``torch.empty``."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def dense(indices: Tensor | None) -> Tensor | None:
    """Offsets or slots one after another, as kernels on a GPU read them."""
    return None if indices is None else indices.contiguous()


def refused_by_none(problem: Problem, mode: Mode) -> str | None:
    """For implementations that take every problem."""
    return None


def exact_operands(dtype: torch.dtype) -> int | None:
    """For implementations whose products take their operands as they are."""
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute the recurrence."""

    name: str
    summary: str
    available: Callable[[], str | None]
    """Why this implementation cannot run on this machine at all, or None."""
    refuses: Callable[[Problem, Mode], str | None]
    """Why it cannot take this problem in this mode, or None."""
    forward: Callable[[Problem], tuple[Tensor, Tensor]]
    """Output [B,T,H,V] in v's dtype and final state [N,H,K,V] in ``state_dtype``."""
    backward: Callable[..., Gradients]
    """``(problem, d_output, d_final_state)``: gradients from those of the output and, unless None, of the final state."""
    step: Callable[[Step], Tensor]
    """Output [N,T,H,V] in v's dtype; the state pool is updated in place. A refused step changes nothing."""
    avoids: Callable[[Problem, Mode], str | None] = refused_by_none
    """Why "auto" had better pass it over for a problem that it can take, or None."""
    forward_keeping: Callable[[Problem], tuple[Tensor, Tensor, Tensor | None]] | None = None
    """``forward`` where gradients will be wanted: it also returns states, or None, that ``backward`` need not make again. ``backward``
    then takes them as ``states``, and as ``dg`` whether the decay's gradient is wanted."""
    operands: Callable[[torch.dtype], int | None] = exact_operands
    """The significant bits that its products round their operands to for inputs of this dtype, or None if they do not."""


def gradients_of(
    forward: Callable[[Problem], tuple[Tensor, Tensor]], problem: Problem, d_output: Tensor, d_final_state: Tensor | None
) -> Gradients:
    """Gradients by PyTorch's autograd through a ``forward`` of differentiable operations.

    Differentiable again where gradients are enabled: then the inputs of ``problem`` must require them.
    """
    again = torch.is_grad_enabled()
    names = [name for name in Gradients._fields if getattr(problem, name) is not None]
    inputs = [getattr(problem, name) for name in names]
    with torch.inference_mode(False), torch.enable_grad():  # the first also where a compiled graph runs this below autograd
        if again:
            inputs = [x if x.requires_grad else x.detach().requires_grad_() for x in inputs]
        else:
            inputs = [x.detach().requires_grad_() for x in inputs]
        output, final_state = forward(problem.with_tensors(dict(zip(names, inputs))))
        pairs = [(output, d_output)] if d_final_state is None else [(output, d_output), (final_state, d_final_state)]
        pairs = [pair for pair in pairs if pair[0].requires_grad]  # without tokens or states, they depend on nothing
        if not pairs:
            return _gradients(names, [torch.zeros_like(x) for x in inputs])
        outputs, d_outputs = zip(*pairs)
        grads = torch.autograd.grad(outputs, inputs, d_outputs, create_graph=again, allow_unused=True, materialize_grads=True)
    return _gradients(names, grads)


def _gradients(names: Sequence[str], values: Sequence[Tensor]) -> Gradients:
    given = dict(zip(names, values))
    return Gradients(given["q"], given["k"], given["v"], given.get("g"), given.get("u"), given.get("initial_state"))


def step_by_forward(forward: Callable[[Problem], tuple[Tensor, Tensor]], step: Step) -> Tensor:
    """A decode step by way of ``forward``: states are copied out of the pool and back. Waits for the device if slots are given."""
    if step.slots is None:
        output, state = forward(step.problem(step.state))
        step.state.copy_(state)
        return output
    live = (step.slots >= 0).nonzero()[:, 0]
    rows = step.slots[live].long()
    tokens = {name: x[live] for name, x in (("q", step.q), ("k", step.k), ("v", step.v))}
    if step.g is not None:
        tokens["g"] = step.g[live] if "B" in step.variant.decay else step.g
    chosen, state = forward(step.problem(step.state[rows]).with_tensors(tokens))
    step.state[rows] = state.to(step.state.dtype)
    output = step.v.new_zeros(step.v.shape)
    output[live] = chosen
    return output


def available_everywhere() -> str | None:
    """For implementations in plain PyTorch."""
    return None


def nothing(given: Problem | Step) -> bool:
    """Whether there is no token, head or channel to compute, and so nothing that a kernel could be launched for."""
    return 0 in given.q.shape or 0 in given.v.shape


def forward_of_nothing(problem: Problem) -> tuple[Tensor, Tensor]:
    """Without tokens the state stays what it was."""
    state = problem.initial_state
    final = problem.q.new_zeros(problem.state_shape, dtype=torch.float32) if state is None else state.to(torch.float32, copy=True)
    return problem.v.new_zeros(problem.v.shape), final


def backward_of_nothing(problem: Problem, d_final_state: Tensor | None) -> Gradients:
    """The gradient of the final state is that of the initial one; all others are 0."""
    p, state = problem, problem.initial_state
    q, k, v = (torch.zeros_like(x) for x in (p.q, p.k, p.v))
    g, u = (None if x is None else torch.zeros_like(x) for x in (p.g, p.u))
    d_state = None if state is None else torch.zeros_like(state) if d_final_state is None else d_final_state.to(state.dtype, copy=True)
    return Gradients(q, k, v, g, u, d_state)
