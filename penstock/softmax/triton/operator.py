"""The Triton kernels as operators of torch: forward, backward, their fake kernels and autograd.

::

    penstock::softmax_forward   (q, k, v, packing, options) -> output, lse
    penstock::softmax_backward  (d_output, d_lse, output, lse, the same inputs) -> dq, dk, dv
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import PenstockError
from ...kernels.contract import dense
from ...kernels.triton import launch
from ..problem import FUNCTION, Attention
from . import plan

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, Tensor? cu_seqlens_k, bool causal, float scale, int? window"

library = torch.library.Library("penstock", "FRAGMENT")
library.define(f"softmax_forward({_INPUTS}) -> (Tensor, Tensor)")
library.define(f"softmax_backward(Tensor d_output, Tensor? d_lse, Tensor output, Tensor lse, {_INPUTS}) -> (Tensor, Tensor, Tensor)")


def _tensors(a: Attention) -> dict[str, Tensor | None]:
    return {"q": a.q, "k": a.k, "v": a.v, "cu_seqlens": dense(a.cu_seqlens), "cu_seqlens_k": dense(a.cu_seqlens_k)}


def forward(a: Attention) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    if not a.q.numel():
        return torch.zeros_like(a.q), a.q.new_zeros(a.q.shape[:3], dtype=torch.float32)
    found = launch.run("softmax forward", a, lambda target: plan.forward_plan(a, target), _tensors(a))
    return found["output"], found["lse"]


def backward(a: Attention, d_output: Tensor, d_lse: Tensor | None, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if not a.q.numel() or not a.k.numel():
        return torch.zeros_like(a.q), torch.zeros_like(a.k), torch.zeros_like(a.v)
    output, lse = output.contiguous(), lse.contiguous()  # as they were made, unless hooks of saved tensors changed them
    tensors = _tensors(a) | {"output": output, "lse": lse, "d_output": d_output, "d_lse": d_lse}
    more = d_output, d_lse, output, lse
    found = launch.run("softmax backward", a, lambda target: plan.backward_plan(a, d_output, d_lse, target), tensors, *more)
    return found["dq"], found["dk"], found["dv"]


def gradients(a: Attention, d_output: Tensor | None, d_lse: Tensor | None, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for autograd; where it builds a graph of them, with a node that says that there are no second derivatives."""
    if d_output is None:
        d_output = torch.zeros_like(output)
    if not torch.is_grad_enabled():
        return backward(a, d_output, d_lse, output, lse)
    inputs = a.q, a.k, a.v, a.cu_seqlens, a.cu_seqlens_k, a.causal, a.scale, a.window
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.penstock.softmax_backward(d_output, d_lse, output, lse, *inputs)
    return found


@torch.library.impl(library, "softmax_forward", "CompositeExplicitAutograd")
def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    return forward(Attention(*inputs))


@torch.library.register_fake("penstock::softmax_forward", lib=library)
def _forward_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    q = inputs[0]
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl(library, "softmax_backward", "CompositeExplicitAutograd")
def _backward(d_output: Tensor, d_lse: Tensor | None, output: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return backward(Attention(*inputs), d_output, d_lse, output, lse)


@torch.library.register_fake("penstock::softmax_backward", lib=library)
def _backward_fake(d_output: Tensor, d_lse: Tensor | None, output: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(x.shape) for x in inputs[:3])
    return q, k, v


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.options = inputs[5:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_output: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    *inputs, output, lse = ctx.saved_tensors
    if d_output is None:
        d_output = torch.zeros_like(output)
    found = torch.ops.penstock.softmax_backward(d_output, d_lse, output, lse, *inputs, *ctx.options)
    return *(x if need else None for x, need in zip(found, ctx.needs_input_grad)), *(None,) * 5


def _differentiate_again(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
    raise PenstockError(f"{FUNCTION}: the Triton kernels' gradients must not be differentiated, got a second derivative. Use impl='sdpa'.")


torch.library.register_autograd("penstock::softmax_forward", _differentiate, setup_context=_save, lib=library)
torch.library.register_autograd("penstock::softmax_backward", _differentiate_again, lib=library)
