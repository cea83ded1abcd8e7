"""Operators: a declaration, its implementations, and the paths of a call.

A public function calls its ``Operator``. A call takes one of three paths, which all end in ``run``:

- the fast path (``eager``): no tracing, modes or subclasses. The cache of equal calls is looked up, and an implementation runs.
- ``torch.func`` transforms and forward derivatives (``transforms``).
- torch's operators (``registration``): everything else, for example compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import eager, private, registration, transforms
from .autocast import cast
from .declaration import Signature
from .declared import Declared, P
from .derivatives import Tensors
from .dispatch import Explanation
from .implementation import Upstream
from .memory import Seen
from .validation import check_types


class Explain(str):
    """An ``impl`` for calls that are explained, not run."""


class Explained(Exception):
    """Carries an explanation out of a call."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__()
        self.explanation = explanation


def explain(function: Callable[..., object], *args: Any, impl: str = "auto", **kwargs: Any) -> Explanation:
    """Which implementations a public function would run for these arguments, which are validated as in a call."""
    try:
        function(*args, impl=Explain(impl), **kwargs)
    except Explained as found:
        return found.explanation
    raise TypeError(f"{function} calls no operator")


class Operator(Declared[P]):
    """An operator that public functions call."""

    def declared(self) -> None:
        """Register torch's operators."""
        self.in_torch, self.gradients_in_torch = registration.register(self)

    def __call__(self, function: str, tensors: Tensors, options: Sequence[Any], impl: str = "auto") -> Tensors:
        """The results, None if not requested."""
        fast = private.fast(tensors)
        if fast:
            if private.autocasting():
                tensors = cast(tensors, self.cast)
            seen = self.recall(function, tensors, options)
            if seen is not None and type(impl) is str:
                return self.eager(seen, tensors, impl)
        signature = self._typed(function, tensors, options, impl)
        if fast:
            return self.eager(self.learn(signature, tensors, options), tensors, impl)
        tensors, options = cast(tensors, self.cast), self.plain(options)
        if isinstance(impl, Explain):
            raise Explained(self.explain(self.checked(function, tensors, options), impl))
        if private.forward_derivatives() if torch.compiler.is_compiling() else private.transforming():
            return transforms.run(self, signature, tensors, options, impl)
        return self.asked_for(self.unpacked(self.in_torch(*tensors, function, *options, impl)), options)

    def forward(self, function: str, tensors: Tensors, options: Sequence[Any], impl: str) -> tuple[Tensors, Tensors]:
        """All results and the residuals of a later ``backward``, without autograd. The tensors are cast."""
        if not private.fast(tensors):
            with torch.no_grad():
                return self(function, tensors, options, impl), ()
        seen = self.recall(function, tensors, options)
        if seen is None:
            seen = self.learn(self._typed(function, tensors, options, impl), tensors, options)
        return self.run(self.known(seen, tensors), impl, saved=True, residuals=True)

    def backward(self, function: str, tensors: Tensors, options: Sequence[Any], impl: str, upstream: Upstream) -> Tensors:
        """The gradient of each argument of ``forward``, None if it is not wanted. ``upstream.wanted``: one flag an argument."""
        return eager.gradients(self, function, tensors, options, impl, upstream)

    def _typed(self, function: str, tensors: Tensors, options: Sequence[Any], impl: str) -> Signature:
        """The signature of a call whose arguments have the types of its schema. Raises for others."""
        signature = self.signature(function)
        check_types(signature, tensors, self.options, options)
        self.family.check_name(function, impl)
        return signature

    def eager(self, seen: Seen, tensors: Tensors, impl: str) -> Tensors:
        """The results of a cached call, differentiable if an argument requires gradients."""
        if isinstance(impl, Explain):
            raise Explained(self.explain(self.known(seen, tensors), impl))
        if torch.is_grad_enabled() and not self.in_place:
            for x, gradient in zip(tensors, self.gradient):
                if gradient and x is not None and x.requires_grad:
                    return eager.differentiable(self, seen, tensors, impl)
        return self.run(self.known(seen, tensors), impl)[0]
