"""Linear maps. On a CPU, those of few tokens without gradients run the native kernel, which reads the weights once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call import private
from ..gpu.target import unavailable
from ..recurrence.cpu import linear as native

_alike: ContextVar[bool] = ContextVar("penstock_rows_alike", default=False)


@contextmanager
def rows_alike() -> Iterator[None]:
    """The bits of a token do not depend on the number of tokens in linear maps inside, without gradients, where a kernel of ours runs.

    On a CPU this is the native kernel for any number of tokens, on a GPU a Triton kernel.
    """
    token = _alike.set(True)
    try:
        yield
    finally:
        _alike.reset(token)


class Linear(nn.Linear):
    """``nn.Linear`` by way of ``linear``."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [...,inputs] to [...,outputs]."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``."""
    y = _own(x, weight, bias)
    if y is None:
        return F.linear(x, weight, bias)
    return y if bias is None else y + bias


def _own(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The product by a kernel of ours, or None where torch computes it."""
    if torch.compiler.is_compiling() or not (_alike.get() or native.few(x, weight)):
        return None
    given = [one for one in (x, weight, bias) if one is not None]
    if not private.fast(given) or private.autocasting() or (torch.is_grad_enabled() and any(one.requires_grad for one in given)):
        return None
    if native.takes(x, weight):
        return native.linear(x, weight)
    if not x.is_cuda or x.dtype != weight.dtype or x.dtype == torch.float64 or unavailable():
        return None
    y: Tensor = import_module(".triton.launch", __package__).multiply(x.reshape(-1, x.shape[-1]).contiguous(), weight)
    return y.view(*x.shape[:-1], weight.shape[0])
