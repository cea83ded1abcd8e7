"""Parallel regions of the OpenMP runtime that torch has loaded: the threads of a second runtime would compete for the cores.

On Linux and macOS the runtime is entered as code of GNU's compiler does it, which LLVM's runtime takes, too; on Windows as code of
Microsoft's compiler does it, which Intel's runtime takes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

BUNDLED = {"darwin": "libomp.dylib", "win32": "libiomp5md.dll"}
"""The runtime's file in torch's wheels. On Linux its symbols are global in the process or, on aarch64, those of a file in torch.libs."""


@cache
def _runtime() -> Any:
    """What has the symbols of the runtime, or None."""
    name = BUNDLED.get(sys.platform, "")
    folder = Path(torch.__file__).parent
    beside_torch = folder / "lib" / name
    if sys.platform == "linux" and not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        beside_torch = next((folder.parent / "torch.libs").glob("libgomp-*"), beside_torch)
    try:
        return ctypes.CDLL(str(beside_torch) if beside_torch.is_file() else name if sys.platform == "win32" else None)
    except OSError:
        return None


@cache
def parallel() -> Callable[[Any, Any, int], object] | None:
    """``region(function, pointer, threads)``, in which every thread calls the function with the pointer; None without a known runtime."""
    runtime = _runtime()
    if hasattr(runtime, "GOMP_parallel"):
        return lambda function, pointer, threads: runtime.GOMP_parallel(function, pointer, threads, 0)
    if hasattr(runtime, "_vcomp_fork"):

        def region(function: Any, pointer: Any, threads: int) -> object:
            runtime._vcomp_set_num_threads(threads)  # of this thread's next region
            return runtime._vcomp_fork(1, 1, function, pointer)  # in parallel, with one argument

        return region
    return None
