"""Autograd functions on the fast path: ``private.fast`` holds for the tensors, so there are no transforms."""

from __future__ import annotations

from typing import Any

import torch


class _NoGraph:
    """The context of a forward pass that no backward pass follows. It keeps what ``forward`` sets until ``forward`` returns."""

    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Saves nothing."""

    def set_materialize_grads(self, value: bool) -> None:
        """There are no gradients."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """No result is differentiable."""


def applied(function: Any, *arguments: Any) -> Any:
    """``function.apply(*arguments)`` without torch's support for transforms; where gradients are off, ``forward`` alone."""
    if torch.is_grad_enabled():
        return super(torch.autograd.Function, function).apply(*arguments)
    return function.forward(_NoGraph(), *arguments)
