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
    compiling = torch.compiler.is_compiling()
    mode = "plain" if compiling else _mode.get()
    given = (x, weight) if bias is None else (x, weight, bias)
    others = x.device.type != "cpu" and mode == "plain"
    if others or (torch.is_grad_enabled() and any(one.requires_grad for one in given)):
        return F.linear(x, weight, bias)
    plain = not torch.is_autocast_enabled("cpu") if compiling else private.fast(given) and not private.autocasting()
    if plain and native.takes(x, weight, many=mode == "alike"):
        y = _native(x, weight) if compiling else native.linear(x, weight)
    elif plain and x.is_cuda and x.dtype == weight.dtype != torch.float64 and _triton_takes(x, weight, mode):
        launch = import_module(".triton.launch", __package__)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y = (launch.multiply if mode == "alike" else launch.multiply_few)(rows, weight)
        y = y.view(*x.shape[:-1], weight.shape[0])
    else:
        return F.linear(x, weight, bias)
    return y if bias is None else y + bias


def _triton_takes(x: Tensor, weight: Tensor, mode: Mode) -> bool:
    few = 0 < x.numel() <= GRAPH_ROWS * weight.shape[1] and weight.stride(1) == 1
    return (mode == "alike" or few) and unavailable() is None


@torch.library.custom_op("penstock::linear_of_few_rows", mutates_args=())
def _native(x: Tensor, weight: Tensor) -> Tensor:
    """The native kernel in compiled graphs."""
    return native.linear(x, weight)


@_native.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
