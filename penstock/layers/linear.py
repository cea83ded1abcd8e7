"""Linear maps. On a CPU, those of few tokens without gradients run the native kernel, which reads the weights once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call import private
from ..gpu.target import unavailable
from ..recurrence.cpu import linear as native

Mode = Literal["plain", "alike", "graph"]
_mode: ContextVar[Mode] = ContextVar("penstock_linear", default="plain")
GRAPH_ROWS = 4
"""At most so many tokens run a kernel without tensor cores in a graph on a GPU."""


@contextmanager
def _entered(mode: Mode) -> Iterator[None]:
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def rows_alike() -> AbstractContextManager[None]:
    """The bits of a token do not depend on the number of tokens in linear maps inside, without gradients, where a kernel of ours runs.

    On a CPU this is the native kernel for any number of tokens, on a GPU a Triton kernel.
    """
    return _entered("alike")


def in_graph() -> AbstractContextManager[None]:
    """Launches inside become a CUDA graph, so their cost on the host does not matter: few tokens take a Triton kernel."""
    return _entered("graph")


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
    if torch.compiler.is_compiling():
        return None
    mode = _mode.get()
    few = native.few(x, weight) or (mode == "graph" and 0 < x.numel() <= GRAPH_ROWS * weight.shape[1] and weight.stride(1) == 1)
    if not few and mode != "alike":
        return None
    given = [one for one in (x, weight, bias) if one is not None]
    if not private.fast(given) or private.autocasting() or (torch.is_grad_enabled() and any(one.requires_grad for one in given)):
        return None
    if native.takes(x, weight):
        return native.linear(x, weight)
    if not x.is_cuda or x.dtype != weight.dtype or x.dtype == torch.float64 or unavailable():
        return None
    launch = import_module(".triton.launch", __package__)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y: Tensor = launch.multiply(rows, weight) if mode == "alike" else launch.multiply_few(rows, weight)
    return y.view(*x.shape[:-1], weight.shape[0])
