"""Launches the CUDA kernels on torch's current stream. Nothing here waits for the device, and equal calls give equal bits.

A kernel takes one argument, ``Call``: addresses and strides of all tensors. So any strides are taken as they are, and nothing is copied.
"""

from __future__ import annotations

import ctypes
from functools import cache
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ...errors import PenstockError
from ...problem import Problem, Step
from ..contract import Gradients
from .compile import Configuration, Kernel, machine_code

COLUMNS = 16
"""Of the state, in a block of threads: as in tokens.cuh."""
CHUNK = 8
"""Tokens that the backward kernel takes at once."""


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_longlong * 4)]

    @classmethod
    def of(cls, x: Tensor) -> _Tensor:
        """Up to four axes."""
        return cls(x.data_ptr(), (ctypes.c_longlong * 4)(*x.stride()))


class Call(ctypes.Structure):
    """The argument of both kernels: as in tokens.cuh."""

    _fields_ = [
        *((name, _Tensor) for name in ("q", "k", "v", "g", "u", "initial_state", "output", "final_state")),
        *((name, _Tensor) for name in ("d_output", "d_final_state", "dq", "dk", "dv", "dg", "du", "d_initial_state")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens", "slots", "kept")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("T", "H", "reverse", "span", "spans")),
    ]


def forward_pass(p: Problem) -> tuple[Tensor, Tensor]:
    """Output [B,T,H,V] in v's dtype and final state [N,H,K,V] in float32."""
    output, final_state = p.v.new_empty(p.v.shape), p.q.new_empty(p.state_shape, dtype=torch.float32)
    call = _call(p, output=output, final_state=final_state)
    _launch(_configuration(p, "forward"), p, call)
    return output, final_state


def step_pass(s: Step) -> Tensor:
    """Output [N,T,H,V]; the states of the pool are updated in place."""
    p, output = s.problem(s.state), s.v.new_empty(s.v.shape)
    call = _call(p, output=output, final_state=s.state)
    if s.slots is not None:
        slots = s.slots.contiguous()
        call.slots = slots.data_ptr()
    _launch(_configuration(p, "forward", s.state.dtype, s.slots), p, call)
    return output


def backward_pass(p: Problem, d_output: Tensor, d_final_state: Tensor | None) -> Gradients:
    """All gradients; blocks of columns give shares of those that are sums over columns, which are summed here."""
    sizes = p.sizes
    B, T, H, K, N, static = sizes["B"], sizes["T"], sizes["H"], sizes["K"], sizes["N"], "T" not in p.variant.decay
    blocks = K // COLUMNS
    assert p.g is not None and p.u is not None  # noqa: PT018
    dq, dk = (p.q.new_empty((B, T, H, blocks * K), dtype=torch.float32) for _ in range(2))
    du = p.q.new_empty((N, H, 1, blocks * K), dtype=torch.float32)
    dg = torch.empty_like(du if static else dq)
    dv = p.v.new_empty(p.v.shape)
    d_initial = None if p.initial_state is None else p.initial_state.new_empty(p.state_shape)
    span = CHUNK * max(1, round(sqrt(T / CHUNK)))  # as many states of spans as of chunks in a span
    spans = B * T // span + N
    kept = p.q.new_empty(H * (spans + N * (span // CHUNK)) * K * K, dtype=torch.float32)
    d_final = None if d_final_state is None else d_final_state.to(torch.float32)
    more = {"d_final_state": d_final, "d_initial_state": d_initial}
    call = _call(p, d_output=d_output, dq=dq, dk=dk, dv=dv, dg=dg, du=du, **more)
    call.kept, call.span, call.spans = kept.data_ptr(), span, spans
    _launch(_configuration(p, "backward"), p, call)
    dq, dk = (_summed(x, like) for x, like in ((dq, p.q), (dk, p.k)))
    return Gradients(dq, dk, dv, _summed(dg, p.g), _summed(du, p.u), d_initial)


def _summed(shares: Tensor, like: Tensor) -> Tensor:
    """Over blocks of columns and, for what all sequences share, over sequences: the gradient of ``like``, in its dtype."""
    K = like.shape[-1]
    total: Tensor = shares.unflatten(-1, (-1, K)).sum(-2) if like.dim() == 4 else shares.unflatten(-1, (-1, K)).sum((0, 2, 3))
    return total.to(like.dtype)


def _configuration(p: Problem, kernel: str, final_state: torch.dtype = torch.float32, indices: Tensor | None = None) -> Configuration:
    assert p.g is not None and p.u is not None  # noqa: PT018
    indices = p.cu_seqlens if indices is None else indices
    return Configuration(
        "forward" if kernel == "forward" else "backward",
        p.q.shape[3],
        p.q.dtype,
        p.g.dtype,
        p.u.dtype,
        torch.float32 if p.initial_state is None else p.initial_state.dtype,
        final_state,
        torch.int64 if indices is None else indices.dtype,
        kernel == "backward" and "T" not in p.variant.decay,
    )


def _call(p: Problem, **results: Tensor | None) -> Call:
    """The addresses and strides of inputs and results; what there is not has the address 0."""
    sizes = p.sizes
    assert p.gate is not None
    inputs = {"q": p.q, "k": p.k, "v": p.v, "g": p.gate.expand(p.q.shape), "u": p.u, "initial_state": p.initial_state}
    call = Call(T=sizes["T"], H=sizes["H"], reverse=p.reverse, scale=p.scale)
    for name, x in (inputs | results).items():
        if x is not None:
            setattr(call, name, _Tensor.of(x))
    if p.cu_seqlens is not None:
        call.kept_alive = p.cu_seqlens.contiguous()
        call.cu_seqlens = call.kept_alive.data_ptr()
    return call


def _launch(configuration: Configuration, p: Problem, call: Call) -> None:
    """One block of threads a sequence, head and 16 columns."""
    N, H, _, V = p.state_shape
    run(configuration, N * H * (V // COLUMNS), p.q.device, call)


def run(kernel: Kernel, blocks: int, device: torch.device, *arguments: ctypes.Structure | ctypes._SimpleCData[Any]) -> None:
    """Launch so many blocks of threads. The tests put a CPU in the place of this function."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        _ensure_context(torch.cuda.current_device())
        function = _function(kernel, torch.cuda.current_device())
        stream = torch.cuda.current_stream().cuda_stream
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        (status,) = driver.cuLaunchKernel(function, blocks, 1, 1, kernel.threads, 1, 1, 0, stream, ctypes.addressof(addresses), 0)
    _check(status, "launch")


def _ensure_context(device: int) -> None:
    """A thread that has asked the runtime for nothing yet has no context: give it the one that torch uses."""
    from cuda.bindings import driver

    status, context = driver.cuCtxGetCurrent()
    _check(status, "have a context for")
    if not int(context):
        status, handle = driver.cuDeviceGet(device)
        _check(status, "find the device for")
        status, context = driver.cuDevicePrimaryCtxRetain(handle)
        _check(status, "have a context for")
        (status,) = driver.cuCtxSetCurrent(context)
        _check(status, "have a context for")


@cache
def _function(kernel: Kernel, device: int) -> object:
    """The kernel, compiled or found on disk, and loaded into torch's context of a device, which must be the current one."""
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    code = machine_code(kernel, f"sm_{major}{minor}")
    status, module = driver.cuModuleLoadData(code)
    _check(status, "load")
    status, function = driver.cuModuleGetFunction(module, kernel.kernel.encode())
    _check(status, "find")
    return function


def _check(status: object, what: str) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        raise PenstockError(f"cuda: the driver must {what} the kernel, got {status}. Use impl='auto', and please report it.")
