"""Compiles the kernels of the pass that will probably run next, in background threads.

Triton caches compiled kernels by kernel and argument types, so the pass finds them there. Nothing is loaded onto the device before the
pass itself runs: loading would break a CUDA graph that is being captured.
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
"""Compilations in flight, by the kernel's id."""


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "penstock-compile")


def begin(plan: Plan, tensors: Mapping[str, Tensor | None], instead: str, sizes: Sizes, gpu: int | None) -> None:
    """Begin to compile the kernels of a plan. ``instead``: the tensor used as a dummy for tensors that are None."""
    plan = plan.at(sizes)
    given = {name: _without_memory(tensors[instead] if x is None else x) for name, x in tensors.items()}  # type: ignore[arg-type]
    given |= {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in plan.memory.items()}
    given |= {name: function(*rest, torch.device("meta")) for name, (function, *rest) in plan.constants.items()}
    for one in plan.launches:
        future = _pool().submit(partial(_compile, one, given, gpu))
        with _lock:
            _running.setdefault(id(one.kernel), []).append(future)


def wait_for(kernel: Any) -> None:
    """Wait for this kernel if it is being compiled. Errors are ignored here: the pass compiles the kernel again and raises them."""
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
