"""Compiles the kernels of a pass that will probably follow in threads, while the program goes on.

Triton keeps what it has compiled by kernel and types of arguments, so the pass finds it there. Nothing is loaded onto the device before
the pass itself runs: loading would break a CUDA graph that is captured meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .plan import Launch, Plan, Sizes

THREADS = 4
_lock = threading.Lock()
_running: dict[int, list[Future[None]]] = {}
"""By the kernel's id."""


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "penstock-compile")


def begin(plan: Plan, tensors: Mapping[str, Tensor | None], instead: str, sizes: Sizes, gpu: int | None) -> None:
    """Begin to compile the kernels of a plan. ``instead``: the tensor whose pointer kernels get in the place of those that are None."""
    plan = plan.at(sizes)
    given = {name: _without_memory(tensors[instead] if x is None else x) for name, x in tensors.items()}  # type: ignore[arg-type]
    given |= {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in plan.memory.items()}
    given |= {name: function(*rest, torch.device("meta")) for name, (function, *rest) in plan.constants.items()}
    for one in plan.launches:
        future = _pool().submit(partial(_compile, one, given, gpu))
        with _lock:
            _running.setdefault(id(one.kernel), []).append(future)


def wait_for(kernel: Any) -> None:
    """Wait until this kernel is compiled, if it is being compiled. An error is left to the pass, which compiles it again."""
    if _running:
        with _lock:
            found = _running.pop(id(kernel), ())
        for future in found:
            future.exception()


def _without_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _compile(one: Launch, tensors: Mapping[str, Tensor], gpu: int | None) -> None:
    with nullcontext() if gpu is None else torch.cuda.device(gpu):
        one.kernel.warmup(*one.arguments(tensors), *one.typed, *one.constants, grid=(1, 1, 1), **dict(one.options))
