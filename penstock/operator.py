"""The only file that talks to torch.library: forward, backward, decode step, their fake kernels and autograd.

Three operators serve every variant and every implementation::

    penstock::forward   (tokens, states, packing, options) -> output, final state
    penstock::backward  (their gradients, the same inputs) -> gradients of q, k, v, g, u, initial_state
    penstock::step      (tokens, state pool, slots)        -> output; the pool is updated in place

Results are contiguous and new. A tensor that was not asked for, or whose input was None, comes back empty. ``impl``
travels as a string, so that a compiled graph holds one operator whatever runs inside it. Derivatives of the backward pass
are those of the plain PyTorch chunkwise form, whatever computed the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .kernels import chunkwise
from .kernels.contract import gradients_of
from .problem import Problem, Step, state_dtype

_TOKENS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? u"
_INPUTS = f"{_TOKENS}, Tensor? initial_state, Tensor? cu_seqlens, str variant, float? scale, bool reverse"

library = torch.library.Library("penstock", "DEF")
library.define(f"forward({_INPUTS}, bool output_final_state, str impl) -> (Tensor, Tensor)")
library.define(f"backward(Tensor d_output, Tensor? d_final_state, {_INPUTS}, str impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
library.define(f"step({_TOKENS}, Tensor(a!) state, Tensor? slots, str variant, float? scale, str impl) -> Tensor")


def autocasting(kind: str) -> bool:
    """Whether autocast is on for devices of this kind."""
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


_NOTHING = nullcontext()


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Kernels choose their own precision."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if autocasting(kind) else _NOTHING


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, floating-point tensors in its dtype, as for a matrix product."""
    kind = tensors[0].device.type
    if not autocasting(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


@torch.library.impl(library, "forward", "CompositeExplicitAutograd")
def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    *call, output_final_state, impl = inputs
    problem = Problem.checked(*call)
    with no_autocast(problem.q):
        output, final_state = dispatch.pick(problem, "forward", impl).forward(problem)
    return output.contiguous(), final_state.contiguous() if output_final_state else _empty(output)


@torch.library.register_fake("penstock::forward", lib=library)
def _forward_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    *call, output_final_state, _ = inputs
    problem = Problem.checked(*call)
    output = problem.v.new_empty(problem.v.shape)
    if not output_final_state:
        return output, _empty(output)
    return output, output.new_empty(problem.state_shape, dtype=state_dtype(output.dtype))


@torch.library.impl(library, "backward", "CompositeExplicitAutograd")
def _backward(d_output: Tensor, d_final_state: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    *call, impl = inputs
    problem = Problem.checked(*call)
    with no_autocast(d_output), torch.no_grad():
        gradients = dispatch.pick(problem, "backward", impl).backward(problem, d_output, d_final_state)
    return tuple(_empty(d_output) if x is None else x.contiguous() for x in gradients)


@torch.library.register_fake("penstock::backward", lib=library)
def _backward_fake(d_output: Tensor, d_final_state: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(_empty(d_output) if x is None else x.new_empty(x.shape) for x in inputs[:6])


@torch.library.impl(library, "step", "CompositeExplicitAutograd")
def _step(*inputs: Any) -> Tensor:
    *call, impl = inputs
    step = Step.checked(*call)
    with no_autocast(step.q):
        return dispatch.pick(step.problem(step.state), "step", impl).step(step).contiguous()


@torch.library.register_fake("penstock::step", lib=library)
def _step_fake(*inputs: Any) -> Tensor:
    step = Step.checked(*inputs[:-1])
    return step.v.new_empty(step.v.shape)


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, variant, scale, reverse, output_final_state, impl = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = variant, scale, reverse
    ctx.output_final_state, ctx.impl = output_final_state, impl
    ctx.set_materialize_grads(False)


def differentiated(
    tensors: Sequence[Any],
    options: tuple[Any, ...],
    d_output: Tensor | None,
    d_final_state: Tensor | None,
    backward: Callable[[Tensor, Tensor | None], Sequence[Tensor | None]],
) -> Sequence[Tensor | None]:
    """Gradients of a call's inputs by ``backward``; where they must be differentiable again, by the plain PyTorch form."""
    if d_output is None:
        d_output = tensors[2].new_zeros(tensors[2].shape)
    if not torch.is_grad_enabled():
        return backward(d_output, d_final_state)
    problem = Problem.checked(*(*tensors, *options))
    with no_autocast(d_output):
        return gradients_of(chunkwise.forward, problem, d_output, d_final_state)


def _differentiate(ctx: Any, d_output: Tensor | None, d_final_state: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    if not ctx.output_final_state:
        d_final_state = None

    def backward(d_output: Tensor, d_final_state: Tensor | None) -> tuple[Tensor, ...]:
        return torch.ops.penstock.backward(d_output, d_final_state, *tensors, *ctx.options, ctx.impl)  # type: ignore[no-any-return]

    gradients = differentiated(tensors, ctx.options, d_output, d_final_state, backward)
    return *(grad if need else None for grad, need in zip(gradients, ctx.needs_input_grad[:6])), *(None,) * 6


torch.library.register_autograd("penstock::forward", _differentiate, setup_context=_save, lib=library)
