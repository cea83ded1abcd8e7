"""Eager calls without torch's dispatcher, as ``penstock.eager`` makes them: what is true of a call is found out once for its signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import Complaints, ImplementationRefused, RangeError
from ..problem import reads_values, signature
from . import sdpa, triton
from .problem import FUNCTION, Attention

IMPLEMENTATIONS: dict[str, Any] = {"triton": triton, "sdpa": sdpa}

Tensors = tuple[Any, ...]
"""q, k, v, cu_seqlens and cu_seqlens_k."""


def pick(a: Attention, impl: str) -> str:
    """The named implementation, or the first that takes the call. Raises ImplementationRefused."""
    if impl != "auto":
        reason = IMPLEMENTATIONS[impl].refuses(a)
        if reason is None:
            return impl
        raise ImplementationRefused(f"{FUNCTION}: impl must be one that takes this call, got {impl!r}: {reason}. Use impl='auto'.")
    reasons = []
    for name, one in IMPLEMENTATIONS.items():
        reason = one.refuses(a) or (triton.avoids(a) if one is triton else None)
        if reason is None:
            return name
        reasons.append(f"{name} refuses: {reason}")
    raise ImplementationRefused(f"{FUNCTION}: no implementation takes this call. {'; '.join(reasons)}.")


def check_impl(impl: object) -> None:
    """Raise unless it is the name of an implementation or "auto"."""
    if impl not in ("auto", *IMPLEMENTATIONS):
        complaints = Complaints(FUNCTION)
        complaints.add(RangeError, "impl", f"one of {', '.join(['auto', *IMPLEMENTATIONS])}", repr(impl), "'auto' takes the fastest.")
        complaints.raise_any()


class Call:
    """What all calls of one signature have in common. It is their signature, too: quick to compare."""

    def __init__(self, tensors: Tensors, causal: bool, scale: float | None, window: int | None, impl: str) -> None:
        first = Attention.checked(*(*tensors, causal, scale, window))
        self.given, self.known = (causal, scale, window), (causal, first.scale, window)
        self.of_tensors = signature(*tensors)
        self.implementation = pick(first, impl)

    def attention(self, tensors: Tensors) -> Attention:
        """The call with these tensors; validated again where values are looked at."""
        if reads_values(tensors[0]):
            return Attention.checked(*(*tensors, *self.given))
        *others, cu_seqlens, cu_seqlens_k = tensors
        return Attention.known(self, *others, cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k, *self.known)

    def attention_of_saved(self, tensors: Tensors) -> Attention:
        """The same in the backward pass: hooks of saved tensors may have given them other strides."""
        as_saved = signature(*tensors) == self.of_tensors
        return self.attention(tensors) if as_saved else Attention.checked(*(*tensors, *self.given))


class SoftmaxAttention(torch.autograd.Function):
    """Autograd's view of the Triton kernels."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run, and keep inputs and results."""
        from .triton import operator

        output, lse = operator.forward(call.attention(tensors))
        ctx.save_for_backward(*tensors, output, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(ctx: Any, d_output: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the inputs that need one."""
        from .triton import operator

        *tensors, output, lse = ctx.saved_tensors
        a = ctx.call.attention_of_saved(tuple(tensors))
        gradients = operator.gradients(a, d_output, d_lse, output, lse)
        return None, *(x if need else None for x, need in zip(gradients, ctx.needs_input_grad[1:])), None, None


def run(call: Call, tensors: Tensors, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp, this perhaps only if asked for; differentiable where an input requires gradients."""
    if call.implementation == "sdpa":
        return sdpa.attend(call.attention(tensors), return_lse)
    inside = forward_ad._current_level >= 0  # then it refuses tensors with a tangent
    if inside or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors[:3])):
        return SoftmaxAttention.apply(call, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    from .triton import operator

    return operator.forward(call.attention(tensors))
