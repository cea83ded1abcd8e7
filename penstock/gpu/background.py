"""Compiles kernels in threads: none twice at a time, and those of passes that follow in the background.

Triton caches compiled kernels by kernel and argument types, so a pass finds there what was compiled for it. Its front end, a tenth of the
time, is Python and holds the interpreter's lock; its compiler passes and ptxas do not. Nothing is loaded onto the device before a pass
itself runs: loading would break a CUDA graph that is being captured.
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

from ..cores import affinity
from . import direct
from .plan import Launch, Plan, Sizes

THREADS = 8
"""The most threads in the background; not more than cores."""
Key = tuple[Any, ...]
_lock = threading.RLock()
_running: dict[Key, Future[Any]] = {}
"""Compilations that are queued or run."""


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(THREADS, len(affinity())), "penstock-compile")


def begin(plan: Plan, tensors: Mapping[str, Tensor | None], instead: str, sizes: Sizes, gpu: int | None) -> None:
    """Begin to compile the kernels of a plan. ``instead``: the tensor used as a dummy for tensors that are None."""
    plan = plan.at(sizes)
    given = {name: _without_memory(tensors[instead] if x is None else x) for name, x in tensors.items()}  # type: ignore[arg-type]
    given |= {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in plan.memory.items()}
    constants = {name: function(*rest, torch.device("cpu")) for name, (function, *rest) in plan.constants.items()}
    given |= {name: _without_memory(x) for name, x in constants.items()}
    for one in plan.launches:
        key = _key(one, given, gpu)
        with _lock:
            if key in _running:
                continue
            future = _running[key] = _pool().submit(_compile, one, given, gpu)
        future.add_done_callback(partial(_forget, key))


def compiled(one: Launch, tensors: Mapping[str, Tensor], gpu: int | None) -> Any:
    """Compile the kernel of a launch in this thread, or wait for another thread that does so.

    One that is only queued in the background is cancelled. One that fails in another thread is repeated here, where it raises its error.
    """
    key, own = _key(one, tensors, gpu), Future[Any]()
    own.set_running_or_notify_cancel()
    with _lock:
        other = _running.get(key)
        if other is None or other.cancel():
            other, _running[key] = None, own
    if other is not None:
        other.exception()
    try:
        return _compile(one, tensors, gpu)
    finally:
        own.set_result(None)
        _forget(key, own)


def _key(one: Launch, tensors: Mapping[str, Tensor], gpu: int | None) -> Key:
    """Equal only for launches with one machine code, unless their tensors' addresses are aligned differently."""
    types = tuple([tensors[name].dtype for name in one.tensors])
    return id(one.kernel), gpu, types, one.typed, one.constants, one.options, one.tiles


def _forget(key: Key, future: Future[Any]) -> None:
    with _lock:
        if _running.get(key) is future:
            del _running[key]


def _without_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _compile(one: Launch, tensors: Mapping[str, Tensor], gpu: int | None) -> Any:
    """The compiled kernel. Each thread has its own current device."""
    arguments, options = (*one.arguments(tensors), *one.typed, *one.constants), dict(one.options)
    with nullcontext() if gpu is None else torch.cuda.device(gpu), direct.launcher_meanwhile(one.kernel, arguments, options, gpu):
        return one.kernel.warmup(*arguments, grid=(1, 1, 1), **options)
