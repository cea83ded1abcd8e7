"""Launches the CUDA kernels on torch's current stream. The host never waits for the device, and equal calls give equal bits.

A kernel takes one argument, ``Call``: addresses and strides of all tensors. So tensors with any strides are read without a copy.
Everything but the addresses is the same for equal calls and is cached (``penstock.call.memory``): an equal call allocates its results,
writes addresses and launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from ...call.memory import exact
from ...gpu.nvrtc import run
from ...gpu.plan import contiguous, dense
from ..declaration import Advance, Recurrence, Tokens
from ..gradients import Gradients
from .configuration import Configuration
from .sizes import COLUMNS, FAR

CHUNK = 8
"""Tokens that the backward kernel processes together."""


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_longlong * 4)]


class Call(ctypes.Structure):
    """The argument of both kernels, as in tokens.cuh."""

    _fields_ = [
        *((name, _Tensor) for name in ("q", "k", "v", "g", "u", "initial_state", "output", "final_state")),
        *((name, _Tensor) for name in ("d_output", "d_final_state", "dq", "dk", "dv", "dg", "du", "d_initial_state")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens", "slots", "kept")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("T", "H", "reverse", "span", "spans")),
    ]


Words = ctypes.c_longlong * (ctypes.sizeof(Call) // 8)
"""``Call`` as an array of words, into which addresses are written faster."""
Tensors = dict[str, Tensor | None]
Memory = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes by name."""


class Prepared:
    """The state shared by equal calls: the kernel, the shapes of its results, and its argument without the addresses."""

    def __init__(self, kernel: Configuration, p: Tokens, tensors: Tensors, memory: Memory, reverse: bool, **numbers: int) -> None:
        N, H, _, V = p.state_shape
        assert p.gate is not None
        self.kernel, self.device = kernel, p.q.device
        self.blocks = N * H * (V // COLUMNS)  # thread blocks: one per sequence, head and 16 columns
        self.memory = [(name, tuple(shape), contiguous(shape), dtype) for name, (shape, dtype) in memory.items()]
        strides = {name: x.stride() for name, x in tensors.items() if x is not None}
        strides |= {name: steps for name, _, steps, _ in self.memory}
        self.words = {name: getattr(Call, name).offset // 8 for name in strides}  # the words of addresses
        call = Call(T=p.q.shape[1], H=H, reverse=reverse, scale=p.scale, **numbers)
        for name, steps in (strides | {"g": p.gate.expand(p.q.shape).stride()}).items():
            place = getattr(call, name)
            if isinstance(place, _Tensor):
                place.stride[: len(steps)] = steps
        self.call = bytes(call)

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        """Add the results to ``tensors`` and launch. A missing tensor has the address 0."""
        for name, shape, strides, dtype in self.memory:
            tensors[name] = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
        call = Words.from_buffer_copy(self.call)
        for name, word in self.words.items():
            call[word] = tensors[name].data_ptr()  # type: ignore[union-attr]
        run(self.kernel, self.blocks, self.device, call)
        return tensors  # type: ignore[return-value]


def _run(p: Tokens, name: str, tensors: Tensors, prepare: Callable[[], Prepared], *more: Tensor | None) -> dict[str, Tensor]:
    """Run a call, prepared once for all equal calls. ``more``: tensors that are not in the problem."""
    bound, key = p.seen.bound, (name, exact(more))
    if key not in bound:
        bound[key] = prepare()
    found: dict[str, Tensor] = bound[key].run(tensors)
    return found


def forward_pass(p: Recurrence) -> tuple[Tensor, Tensor]:
    """Output [B,T,H,V] in v's dtype and final state [N,H,K,V] in float32."""
    tensors = _inputs(p)

    def prepare() -> Prepared:
        memory = {"output": (p.v.shape, p.v.dtype), "final_state": (p.state_shape, torch.float32)}
        return Prepared(_configuration(p, "forward", p.initial_state), p, tensors, memory, p.reverse)

    found = _run(p, "cuda forward", tensors, prepare)
    return found["output"], found["final_state"]


def advance_pass(p: Advance) -> Tensor:
    """Output; the states of the pool are updated in place."""
    slots = dense(p.slots)
    tensors = _tokens(p) | {"initial_state": p.state, "final_state": p.state, "slots": slots}

    def prepare() -> Prepared:
        kernel = _configuration(p, "forward", p.state, p.state.dtype, slots)
        return Prepared(kernel, p, tensors, {"output": (p.v.shape, p.v.dtype)}, False)

    return _run(p, "cuda advance", tensors, prepare)["output"]


def backward_pass(p: Recurrence, d_output: Tensor, d_final_state: Tensor | None) -> Gradients:
    """All gradients. For gradients that are sums over columns, blocks of columns return partial sums, which are added here."""
    d_final = None if d_final_state is None else d_final_state.to(torch.float32)
    if d_output.stride(1) >= FAR:  # gradients are copied, not refused
        d_output = d_output.contiguous()
    tensors = _inputs(p) | {"d_output": d_output, "d_final_state": d_final}

    def prepare() -> Prepared:
        B, T, H, K, N = (p.sizes[name] for name in "BTHKN")
        tokens, sequences = ((*axes, K // COLUMNS * K) for axes in ((B, T, H), (N, H, 1)))
        shares = {"dq": tokens, "dk": tokens, "dg": tokens if "T" in p.variant.decay else sequences, "du": sequences}
        span = CHUNK * max(1, round(sqrt(T / CHUNK)))  # as many states of spans as of chunks per span
        spans = B * T // span + N
        kept = H * (spans + N * (span // CHUNK)) * K // COLUMNS * K * (COLUMNS + 2)
        memory: Memory = {name: (shape, torch.float32) for name, shape in shares.items()}
        memory |= {"dv": (p.v.shape, p.v.dtype), "kept": ((kept,), torch.float32)}
        if p.initial_state is not None:
            memory["d_initial_state"] = p.state_shape, p.initial_state.dtype
        return Prepared(_configuration(p, "backward", p.initial_state), p, tensors, memory, p.reverse, span=span, spans=spans)

    found = _run(p, "cuda backward", tensors, prepare, d_output, d_final)
    assert p.g is not None and p.u is not None  # noqa: PT018
    dq, dk, dg, du = (_summed(found[name], like) for name, like in (("dq", p.q), ("dk", p.k), ("dg", p.g), ("du", p.u)))
    return Gradients(dq, dk, found["dv"], dg, du, found.get("d_initial_state"))


def _tokens(p: Tokens) -> Tensors:
    return {"q": p.q, "k": p.k, "v": p.v, "g": p.g, "u": p.u, "cu_seqlens": dense(p.cu_seqlens)}


def _inputs(p: Recurrence) -> Tensors:
    return _tokens(p) | {"initial_state": p.initial_state}


def _summed(shares: Tensor, like: Tensor) -> Tensor:
    """The gradient of ``like``, in its dtype: the sum over blocks of columns and, if all sequences share ``like``, over sequences."""
    K = like.shape[-1]
    blocks = shares.view(*shares.shape[:-1], -1, K)
    total: Tensor = blocks.sum(-2) if like.dim() == 4 else blocks.sum((0, 2, 3))
    return total.to(like.dtype)


def _configuration(
    p: Tokens, direction: Literal["forward", "backward"], state: Tensor | None, final_state: torch.dtype = torch.float32,
    slots: Tensor | None = None,
) -> Configuration:  # fmt: skip
    assert p.g is not None and p.u is not None  # noqa: PT018
    indices = p.cu_seqlens if slots is None else slots
    return Configuration(
        direction,
        p.q.shape[3],
        p.q.dtype,
        p.g.dtype,
        p.u.dtype,
        torch.float32 if state is None else state.dtype,
        final_state,
        torch.int64 if indices is None else indices.dtype,
        direction == "backward" and "T" not in p.variant.decay,
    )
