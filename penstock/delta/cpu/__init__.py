"""Launches the native CPU kernels of ``native/``: forward, backward and updates in place, multi-threaded.

Storage is float32, bfloat16 or float16, arithmetic float32; any strides. At most ``torch.get_num_threads()`` threads run; each takes units,
a head of a sequence, from a shared counter. No result depends on their number.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from ...call.implementation import Implementation, Mode, Upstream
from ...cpu import Strided, run, unavailable
from ...tokens.sharing import over_groups
from ..declaration import Advance, Delta, DeltaTokens
from ..gradients import Gradients
from ..inputs import SHARED, always_groups, prepared

_INPUTS = ("q", "k", "v", "g", "beta", "a", "b")
_TENSORS = (
    *(*_INPUTS, "initial_state", "output", "final_state", "d_output", "d_final_state"),
    *("dq", "dk", "dv", "dg", "dbeta", "da", "db", "d_initial_state"),
)
_NUMBERS = ["N", "T", "H", "K", "V", "group", "removal_group", "after", "scalar", "advance", "threads"]


class _Call(ctypes.Structure):
    """The struct ``problem`` of problem.h."""

    _fields_ = [
        *((name, Strided) for name in _TENSORS),
        ("cu_seqlens", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("scale", ctypes.c_double),
        ("next", ctypes.c_int64),
    ]


def _call(problem: DeltaTokens) -> _Call:
    row, H = problem.variant, problem.sizes["H"]
    sizes = {axis: problem.sizes[axis] for axis in "NTHKV"}
    call = _Call(**sizes, after=row.removal == "after", scalar=row.decay == "BTH", scale=problem.scale, group=H // problem.q.shape[2])
    call.removal_group = H // problem.a.shape[2] if problem.a is not None else 0
    _add(call, **{name: getattr(problem, name) for name in _INPUTS})
    call.cu_seqlens = _offsets(call, problem.cu_seqlens)
    return call


def _add(call: _Call, **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None:
            setattr(call, name, Strided.of(x))


def _offsets(call: _Call, x: Tensor | None) -> int | None:
    """The address of int64 values. The call keeps them alive."""
    if x is None:
        return None
    offsets = x.to(torch.int64).contiguous()
    call.kept = (*getattr(call, "kept", ()), offsets)
    return offsets.data_ptr()


def _work(problem: DeltaTokens) -> int:
    """Elements of all states after all tokens."""
    return problem.v.numel() * problem.sizes["K"]


def forward(problem: Delta) -> tuple[Tensor, Tensor]:
    """One pass over the tokens, with the state of a strip of columns in the L1 cache."""
    output = problem.v.new_empty(problem.v.shape)
    final_state = problem.q.new_empty(problem.state_shape, dtype=torch.float32)
    call = _call(problem)
    _add(call, initial_state=problem.initial_state, output=output, final_state=final_state)
    run("delta_forward", call, 3 * _work(problem))
    return output, final_state


def backward(problem: Delta, upstream: Upstream) -> Gradients:
    """States are recomputed from checkpoints. Gradients of q, k, a and b that heads share are float32 for each head, and then summed."""
    H = problem.sizes["H"]
    wanted = upstream.wanted or (True,) * len(Gradients._fields)
    found: dict[str, Tensor | None] = {}
    for name, needed in zip(Gradients._fields, wanted):
        x: Tensor | None = getattr(problem, name)
        if x is None or not needed:
            found[name] = None
        elif name in SHARED and x.shape[2] != H:
            found[name] = x.new_empty(*x.shape[:2], H, x.shape[3], dtype=torch.float32)
        else:
            found[name] = torch.empty_like(x, memory_format=torch.contiguous_format)
    d_output, d_final_state = upstream.gradients
    call = _call(problem)
    _add(call, initial_state=problem.initial_state, d_output=d_output, d_final_state=d_final_state)
    _add(call, **{f"d_{name}" if name == "initial_state" else f"d{name}": x for name, x in found.items()})
    run("delta_backward", call, 15 * _work(problem))
    for name in SHARED:
        x, given = found[name], getattr(problem, name)
        if x is not None:
            found[name] = over_groups(x, given.shape[2], given.dtype)
    return Gradients(**found)


def advance(problem: Advance) -> Tensor:
    """The forward pass on rows of the pool. The state is rounded to the pool's dtype at the end of each piece of ``tokens.pieces``."""
    v, state = problem.v, problem.state
    output = v.new_empty(v.shape) if problem.slots is None else v.new_zeros(v.shape)  # 0 where skipped
    call = _call(problem)
    call.advance = True
    _add(call, initial_state=state, output=output, final_state=state)
    call.slots = _offsets(call, problem.slots)
    run("delta_forward", call, 3 * _work(problem))
    return output


def refuses(problem: DeltaTokens, mode: Mode) -> str | None:
    """Why the kernels cannot take a call, or None."""
    if problem.q.device.type != "cpu":
        return f"its tensors are on {problem.q.device}, it works on the CPU"
    if problem.q.dtype == torch.float64:
        return "it computes in float32, and the inputs are float64"
    return None


IMPLEMENTATION = prepared(
    Implementation(
        name="cpu",
        summary="native multi-threaded kernels, float32 arithmetic",
        available=partial(unavailable, "delta_forward", "delta_backward"),
        refuses=refuses,
        forward=forward,
        backward=backward,
        advance=advance,
    ),
    groups=always_groups,
    wide=True,
)
