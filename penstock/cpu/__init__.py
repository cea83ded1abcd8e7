"""The native CPU library: loads it, picks the instruction set, and runs its functions on torch's own threads (``openmp``).

Its sources are the folders ``cpu/native`` of the package: rows of tensors here, kernels beside those that launch them. ``hatch_build.py``
compiles them once per instruction set into one library; torch's CPU capability selects one.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ..call import private
from ..errors import PenstockError
from . import openmp

SUFFIXES = {"darwin": "dylib", "win32": "dll"}
LIBRARY = Path(__file__).parent / "native" / f"libpenstock_cpu.{SUFFIXES.get(sys.platform, 'so')}"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}  # the enum of rows.h
THREAD_WORK = 1 << 16
"""The least multiply-adds per thread: waking a thread takes about 5 us, and a thread computes about 10 multiply-adds per ns."""

TEAM = [(name, ctypes.c_int64) for name in ("threads", "next")]
"""The last fields of the struct of a call: ``run`` sets the first, threads take units of work by the second."""

_Strides = ctypes.c_int64 * 4


class Strided(ctypes.Structure):
    """The struct ``tensor`` of rows.h."""

    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int64), ("stride", _Strides)]

    @classmethod
    def of(cls, x: Tensor) -> Strided:
        """Up to four axes."""
        return cls(x.data_ptr(), DTYPES[x.dtype], _Strides(*x.stride()))


def address(x: Tensor | None) -> int | None:
    """Of the first element."""
    return None if x is None else x.data_ptr()


@cache
def _library() -> ctypes.CDLL | str:
    """The native library, or why it is not available."""
    if not LIBRARY.exists():
        return f"the native library is missing ({LIBRARY.name}): install the package with pip, which builds it"
    if openmp.parallel() is None:
        return "this torch has no OpenMP runtime"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"the native library does not load here: {error}"
    return library


@cache
def unavailable(*functions: str) -> str | None:
    """Why these functions of the native library cannot be used on this machine, or None."""
    library = _library()
    if isinstance(library, str):
        return library
    if not all(hasattr(library, f"penstock_{name}_baseline") for name in functions):
        return f"the native library is not of this version ({LIBRARY.name}): install the package again with pip, which builds it"
    return None


@cache
def _function(name: str) -> Any:
    """penstock_<name> for this CPU."""
    library = _library()
    assert isinstance(library, ctypes.CDLL)
    capability = torch.backends.cpu.get_cpu_capability()
    wanted = "avx512" if capability.startswith("AVX512") else "avx2" if capability == "AVX2" else "baseline"
    return getattr(library, f"penstock_{name}_{wanted}", None) or getattr(library, f"penstock_{name}_baseline")


def run(name: str, call: Any, work: int) -> None:
    """Run on torch's own threads (a second pool would compete for the cores), as many as the work is worth.

    work : int
        The number of multiply-adds.
    """
    threads = max(1, min(torch.get_num_threads(), work // THREAD_WORK))
    call.threads = threads
    watched = private.profiling()  # on the fast path, no torch operator shows this call in a profile; a range costs 17 us
    region = openmp.parallel()
    assert region is not None  # else the library is unavailable
    if watched:
        with record_function(f"penstock::cpu_{name}"):
            region(_function(name), ctypes.byref(call), threads)
    else:
        region(_function(name), ctypes.byref(call), threads)
    if not call.next:  # a thread without memory takes no unit, and leaves all to the others
        raise PenstockError(f"cpu: no memory left for the scratch of the {name} pass. Use shorter sequences, or fewer threads.")
