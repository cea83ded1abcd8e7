"""Eager calls without torch's dispatcher: what is true of a call is found out once for its signature.

Where nobody but autograd listens (no tracing, no modes, no transforms, no tensor subclasses), a call goes straight to its
implementation. Validation and the choice of an implementation are repeated only where values are looked at, on a CPU and
inside ``checks()``; elsewhere both follow from sizes, strides, dtypes and devices, so an equal signature has an equal answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import dispatch
from .kernels.contract import Gradients, Implementation
from .operator import differentiated, no_autocast
from .problem import Problem, Step, reads_values, signature

PLAIN = frozenset({Tensor, torch.nn.Parameter})
KEPT = 4096
"""Signatures that are remembered; when there are more, all are forgotten."""

Tensors = tuple[Any, ...]
"""Those of a call in its order; None where there is none."""


def unobserved(q: object, k: object, v: object, *optional: object) -> bool:
    """Whether these are plain tensors (optional ones may be None), and nothing but autograd listens to what happens to them."""
    if torch.compiler.is_compiling():
        return False
    for x in (q, k, v, *optional):
        if x is None and x is not q and x is not k and x is not v:
            continue
        if type(x) not in PLAIN or x.layout != torch.strided or x.is_meta:  # type: ignore[attr-defined]
            return False
    return (
        not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


class Call:
    """What all calls over sequences of one signature have in common. It is their problems' signature, too: quick to compare."""

    def __init__(self, tensors: Tensors, variant: str, scale: float | None, reverse: bool, impl: str) -> None:
        first = Problem.checked(*(*tensors, variant, scale, reverse))
        self.impl, self.options = impl, (variant, scale, reverse)
        self.of_tensors = signature(*tensors)
        self.known = first.variant, first.scale, first.reverse
        self.implementation = dispatch.pick(first, "forward", impl)
        self.backward_implementation: Implementation | None = None

    def problem(self, tensors: Tensors) -> Problem:
        """The problem with these tensors."""
        if reads_values(tensors[0]):
            return Problem.checked(*(*tensors, *self.options))
        variant, *options = self.known
        return Problem.known(self, variant, *tensors, *options)

    def forward(self, tensors: Tensors, output_final_state: bool, keep: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Output, the final state if asked for, and if ``keep`` states for ``backward``, where what runs that can keep them forward."""
        problem, states = self.problem(tensors), None
        keep = keep and (self.impl == "auto" or self.implementation.forward_keeping is not None)
        keeping = self.runs_backward(problem).forward_keeping if keep else None
        with no_autocast(problem.q):
            if keeping is not None:
                output, final_state, states = keeping(problem)
            else:
                output, final_state = self.implementation.forward(problem)
        return output.contiguous(), final_state.contiguous() if output_final_state else None, states

    def runs_backward(self, problem: Problem) -> Implementation:
        """What runs the backward pass."""
        if self.backward_implementation is None:
            self.backward_implementation = dispatch.pick(problem, "backward", self.impl)
        return self.backward_implementation

    def backward(self, tensors: Tensors, states: Tensor | None, dg: bool, d_output: Tensor, d_final_state: Tensor | None) -> Gradients:
        """The gradients of all inputs; the decay's may be None without ``dg``."""
        as_saved = signature(*tensors) == self.of_tensors  # hooks of saved tensors may give them other strides
        problem = self.problem(tensors) if as_saved else Problem.checked(*(*tensors, *self.options))
        implementation = self.runs_backward(problem)
        options = {"states": states, "dg": dg} if implementation.forward_keeping is not None else {}
        with no_autocast(d_output), torch.no_grad():
            return implementation.backward(problem, d_output, d_final_state, **options)


class Recurrence(torch.autograd.Function):
    """Autograd's view of a call."""

    @staticmethod
    def forward(ctx: Any, call: Call, output_final_state: bool, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run; keep the inputs, and what the backward pass can use of the work."""
        output, final_state, states = call.forward(tensors, output_final_state, True)
        ctx.save_for_backward(*tensors, states)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return output, final_state

    @staticmethod
    def backward(ctx: Any, d_output: Tensor | None, d_final_state: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the inputs that need one."""
        *inputs, states = ctx.saved_tensors
        tensors, call, needed = tuple(inputs), ctx.call, ctx.needs_input_grad[2:]
        gradients = differentiated(tensors, call.options, d_output, d_final_state, partial(call.backward, tensors, states, needed[3]))
        return None, None, *(x.contiguous() if need and x is not None else None for x, need in zip(gradients, needed)), None


class StepCall:
    """What all decode steps of one signature have in common."""

    def __init__(self, tensors: Tensors, variant: str, scale: float | None, impl: str) -> None:
        first = Step.checked(*(*tensors, variant, scale))
        self.options = variant, scale
        self.variant, self.scale = first.variant, first.scale
        self.implementation = dispatch.pick(first.problem(first.state), "step", impl)

    def run(self, tensors: Tensors) -> Tensor:
        """The output; the pool is updated in place."""
        wants_gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        if wants_gradients or reads_values(tensors[0]):
            step = Step.checked(*(*tensors, *self.options))
        else:
            step = Step.known(self, self.variant, *tensors, self.scale)
        with no_autocast(step.q):
            return self.implementation.step(step).contiguous()


_calls: dict[Hashable, Any] = {}


def find(*values: object) -> Any:
    """The call with this signature that was remembered, or None."""
    try:
        return _calls.get(signature(*values))
    except TypeError:  # an argument that cannot be hashed is not one that was found valid
        return None


def remember(kind: Callable[..., Any], values: Sequence[object], *inputs: Any) -> Any:
    """Validate a call and choose its implementation, for all that have the signature of ``values``."""
    call = kind(*inputs)
    if len(_calls) >= KEPT:
        _calls.clear()
    _calls[signature(*values)] = call
    return call


def run(call: Call, tensors: Tensors, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """Output, and the final state if asked for; differentiable where an input requires gradients."""
    inside, wanted = forward_ad._current_level >= 0, torch.is_grad_enabled()
    if inside or wanted:  # inside of forward derivatives it refuses tensors with a tangent
        for x in tensors:
            if x is not None and (inside or x.requires_grad):
                return Recurrence.apply(call, output_final_state, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    return call.forward(tensors, output_final_state, False)[:2]
