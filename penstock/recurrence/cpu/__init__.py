"""Launches the native CPU kernels of ``native/``: forward, backward and decode step, multi-threaded.

Storage is float32, bfloat16 or float16, arithmetic float32; any strides. All decays are read as [B,T,H,K], with strides of 0 for missing
axes. The variant says which axes are missing, because a caller's tensor may also have strides of 0. At most
``torch.get_num_threads()`` threads run; each takes (sequence, head) units from a shared counter.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from ...call.implementation import Implementation, Mode, Upstream
from ...cpu import Strided, run, unavailable
from ..declaration import Advance, Recurrence, Tokens, refuses_bonus
from ..gradients import Gradients

_TENSORS = (
    *("q", "k", "v", "g", "u", "initial_state", "output", "final_state"),
    *("d_output", "d_final_state", "dq", "dk", "dv", "dg", "du", "d_initial_state"),
)
_NUMBERS = ["N", "T", "H", "K", "V", "previous", "reverse", "constant_decay", "scalar_decay", "advance", "threads"]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, Strided) for name in _TENSORS),
        ("cu_seqlens", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("scale", ctypes.c_double),
        ("next", ctypes.c_int64),
    ]


def _call(problem: Tokens, reverse: bool = False) -> _Call:
    gate, axes = problem.gate, problem.variant.decay
    sizes = {axis: problem.sizes[axis] for axis in "NTHKV"}
    call = _Call(**sizes, previous=problem.variant.read == "previous", reverse=reverse, scale=problem.scale)
    call.q, call.k, call.v = Strided.of(problem.q), Strided.of(problem.k), Strided.of(problem.v)
    if gate is not None:
        call.g = Strided.of(gate.expand(problem.q.shape))
        call.constant_decay, call.scalar_decay = "T" not in axes, "K" not in axes
    if problem.u is not None:
        call.u = Strided.of(problem.u)
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
        call.initial_state = Strided.of(problem.initial_state)
    return call


def forward(problem: Recurrence) -> tuple[Tensor, Tensor]:
    """One pass over the tokens, with the state of a block of columns in the L1 or L2 cache."""
    sizes = problem.sizes
    output = problem.v.new_empty(problem.v.shape)
    final_state = problem.q.new_empty(problem.state_shape, dtype=torch.float32)
    call = _whole(problem)
    call.output, call.final_state = Strided.of(output), Strided.of(final_state)
    run("forward", call, problem.q.numel() * sizes["V"])
    return output, final_state


def backward(problem: Recurrence, upstream: Upstream) -> Gradients:
    """States between checkpoints are recomputed: the scratch is one state per 16 tokens and thread."""
    N, H, K, _ = problem.state_shape
    d_output, d_final_state = upstream.gradients
    assert d_output is not None
    call = _whole(problem)
    call.d_output = Strided.of(d_output)
    if d_final_state is not None:
        call.d_final_state = Strided.of(d_final_state)
    dq, dk = (x.new_empty(x.shape, dtype=problem.of_heads(x)) for x in (problem.q, problem.k))
    dv = problem.v.new_empty(problem.v.shape)
    call.dq, call.dk, call.dv = Strided.of(dq), Strided.of(dk), Strided.of(dv)
    du = dg = d_initial_state = None
    if problem.u is not None:
        du = problem.u.new_zeros(N, H, K, dtype=torch.float64)
        call.du = Strided.of(du)
    if problem.g is not None:
        constant = "T" not in problem.variant.decay
        dg = problem.g.new_zeros(N, H, K, dtype=torch.float64) if constant else problem.g.new_empty(problem.g.shape)
        call.dg = Strided.of(dg)
    if problem.initial_state is not None:
        d_initial_state = problem.initial_state.new_empty(problem.state_shape)
        call.d_initial_state = Strided.of(d_initial_state)
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
    call.initial_state, call.output, call.final_state = Strided.of(state), Strided.of(output), Strided.of(state)
    call.slots = _offsets(call, problem.slots)
    run("forward", call, problem.q.numel() * v.shape[3])
    return output


def refuses(problem: Tokens, mode: Mode) -> str | None:
    """Why the kernels cannot take a call, or None."""
    if (why := refuses_bonus(problem, mode)) is not None:
        return why
    if problem.q.device.type != "cpu":
        return f"its tensors are on {problem.q.device}, it works on the CPU"
    if problem.q.dtype == torch.float64:
        return "it computes in float32, and the inputs are float64"
    return None


IMPLEMENTATION = Implementation(
    name="cpu",
    summary="native multi-threaded kernels, float32 arithmetic",
    available=partial(unavailable, "forward", "backward"),
    refuses=refuses,
    forward=forward,
    backward=backward,
    advance=advance,
)
