"""Launches the native CPU kernels of ``native/``: forward, backward and decode step, multi-threaded. Matrix products are in ``linear``.

Storage is float32, bfloat16 or float16, arithmetic float32; any strides. All decays are read as [B,T,H,K], with strides of 0 for missing
axes. The variant says which axes are missing, because a caller's tensor may also have strides of 0. The library is compiled
when the package is built, once per instruction set; torch's CPU capability selects one. At most ``torch.get_num_threads()`` threads
run; each takes (sequence, head) units from a shared counter.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ...call import private
from ...call.implementation import Implementation, Mode, Upstream
from ...errors import PenstockError
from ..declaration import Advance, Recurrence, Tokens
from ..gradients import Gradients

LIBRARY = Path(__file__).parent / "native" / "libpenstock_cpu.so"
FUNCTIONS = ("forward", "backward", "linear")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}  # the enum of rows.h
THREAD_WORK = 1 << 16
"""The least multiply-adds per thread: waking a thread takes about 5 us, and a thread computes about 10 multiply-adds per ns."""


_Strides = ctypes.c_int64 * 4


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int64), ("stride", _Strides)]

    @classmethod
    def of(cls, x: Tensor) -> _Tensor:
        """Up to four axes."""
        return cls(x.data_ptr(), DTYPES[x.dtype], _Strides(*x.stride()))


_TENSORS = (
    *("q", "k", "v", "g", "u", "initial_state", "output", "final_state"),
    *("d_output", "d_final_state", "dq", "dk", "dv", "dg", "du", "d_initial_state"),
)
_NUMBERS = ["N", "T", "H", "K", "V", "previous", "reverse", "constant_decay", "scalar_decay", "advance", "threads"]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _Tensor) for name in _TENSORS),
        ("cu_seqlens", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("scale", ctypes.c_double),
        ("next", ctypes.c_int64),
        ("out_of_memory", ctypes.c_int64),
    ]


@cache
def _library() -> ctypes.CDLL | str:
    """The native library, or why it is not available."""
    if not LIBRARY.exists():
        return f"the native library is missing ({LIBRARY.name}): install the package with pip, which builds it"
    if not hasattr(_openmp(), "GOMP_parallel"):
        return "this torch has no OpenMP runtime"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"the native library does not load here: {error}"
    if not all(hasattr(library, f"penstock_{name}_baseline") for name in FUNCTIONS):
        return f"the native library is not of this version ({LIBRARY.name}): install the package again with pip, which builds it"
    return library


@cache
def _openmp() -> ctypes.CDLL:
    """The process's global symbols, among them the OpenMP runtime that torch has loaded."""
    return ctypes.CDLL(None)


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
    with record_function(f"penstock::cpu_{name}") if watched else nullcontext():
        _openmp().GOMP_parallel(_function(name), ctypes.byref(call), threads, 0)
    if call.out_of_memory:
        raise PenstockError(f"cpu: no memory left for the scratch of the {name} pass. Use shorter sequences, or fewer threads.")


def _call(problem: Tokens, reverse: bool = False) -> _Call:
    gate, axes = problem.gate, problem.variant.decay
    sizes = {axis: problem.sizes[axis] for axis in "NTHKV"}
    call = _Call(**sizes, previous=problem.variant.read == "previous", reverse=reverse, scale=problem.scale)
    call.q, call.k, call.v = _Tensor.of(problem.q), _Tensor.of(problem.k), _Tensor.of(problem.v)
    if gate is not None:
        call.g = _Tensor.of(gate.expand(problem.q.shape))
        call.constant_decay, call.scalar_decay = "T" not in axes, "K" not in axes
    if problem.u is not None:
        call.u = _Tensor.of(problem.u)
    call.cu_seqlens = _offsets(call, problem.cu_seqlens)
    return call


def _offsets(call: _Call, x: Tensor | None) -> int | None:
    """The address of int64 values. The call keeps them alive, with its other tensors."""
    if x is None:
        return None
    offsets = x.to(torch.int64).contiguous()
    call.kept = (*getattr(call, "kept", ()), offsets)
    return offsets.data_ptr()


def _whole(problem: Recurrence) -> _Call:
    call = _call(problem, problem.reverse)
    if problem.initial_state is not None:
        call.initial_state = _Tensor.of(problem.initial_state)
    return call


def forward(problem: Recurrence) -> tuple[Tensor, Tensor]:
    """One pass over the tokens, with the state of a block of columns in the L1 or L2 cache."""
    sizes = problem.sizes
    output = problem.v.new_empty(problem.v.shape)
    final_state = problem.q.new_empty(problem.state_shape, dtype=torch.float32)
    call = _whole(problem)
    call.output, call.final_state = _Tensor.of(output), _Tensor.of(final_state)
    run("forward", call, problem.q.numel() * sizes["V"])
    return output, final_state


def backward(problem: Recurrence, upstream: Upstream) -> Gradients:
    """States between checkpoints are recomputed: the scratch is one state per 16 tokens and thread."""
    N, H, K, _ = problem.state_shape
    d_output, d_final_state = upstream.gradients
    assert d_output is not None
    call = _whole(problem)
    call.d_output = _Tensor.of(d_output)
    if d_final_state is not None:
        call.d_final_state = _Tensor.of(d_final_state)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (problem.q, problem.k, problem.v))
    call.dq, call.dk, call.dv = _Tensor.of(dq), _Tensor.of(dk), _Tensor.of(dv)
    du = dg = d_initial_state = None
    if problem.u is not None:
        du = problem.u.new_zeros(N, H, K, dtype=torch.float64)
        call.du = _Tensor.of(du)
    if problem.g is not None:
        constant = "T" not in problem.variant.decay
        dg = problem.g.new_zeros(N, H, K, dtype=torch.float64) if constant else problem.g.new_empty(problem.g.shape)
        call.dg = _Tensor.of(dg)
    if problem.initial_state is not None:
        d_initial_state = problem.initial_state.new_empty(problem.state_shape)
        call.d_initial_state = _Tensor.of(d_initial_state)
    run("backward", call, 4 * problem.q.numel() * problem.v.shape[3])
    if problem.g is not None and dg is not None and constant:
        dg = dg.sum((0,) if problem.variant.decay == "HK" else (0, 2)).to(problem.g.dtype)
    if problem.u is not None and du is not None:
        du = du.sum(0).to(problem.u.dtype)
    return Gradients(dq, dk, dv, dg, du, d_initial_state)


def advance(problem: Advance) -> Tensor:
    """The forward pass on rows of the pool. The state is rounded to the pool's dtype at the end of each piece of ``advance.pieces``."""
    v, state = problem.v, problem.state
    output = v.new_empty(v.shape) if problem.slots is None else v.new_zeros(v.shape)  # 0 where skipped
    call = _call(problem)
    call.advance = True
    call.initial_state, call.output, call.final_state = _Tensor.of(state), _Tensor.of(output), _Tensor.of(state)
    call.slots = _offsets(call, problem.slots)
    run("forward", call, problem.q.numel() * v.shape[3])
    return output


def available() -> str | None:
    """Why the native library cannot be used on this machine, or None."""
    library = _library()
    return library if isinstance(library, str) else None


def refuses(problem: Tokens, mode: Mode) -> str | None:
    """Why the kernels cannot take a call, or None."""
    if problem.q.device.type != "cpu":
        return f"its tensors are on {problem.q.device}, it works on the CPU"
    if problem.q.dtype == torch.float64:
        return "it computes in float32, and the inputs are float64"
    return None


IMPLEMENTATION = Implementation(
    name="cpu",
    summary="native multi-threaded kernels, float32 arithmetic",
    available=available,
    refuses=refuses,
    forward=forward,
    backward=backward,
    advance=advance,
)
