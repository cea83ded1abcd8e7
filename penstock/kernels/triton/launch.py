"""Launches the Triton kernels: grids, scratch memory, block sizes. Nothing here waits for the device."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem import Problem, Step
from ..contract import Gradients
from . import chunk_backward, chunk_forward, interpreting, recurrent, segments, tiles
from .table import config

LIMITS = {"bf16": 150.0, "tf32x3": 32.0, "ieee": 32.0}
"""How far decays may fall inside a chunk, log2 units, before stretches are cut: factors must not overflow in float32, and where
products are as exact as float32 the sums of decays should be too (half an ulp of 32 is 2e-6)."""

NONE, SCALAR, CHANNEL = (kind.value for kind in (tiles.NONE, tiles.SCALAR, tiles.CHANNEL))
SPAN = 16
"""Tokens between the states that the token-serial backward pass keeps; those within are computed again."""

LEAST = 64
"""Blocks of the chunk kernels: with 32 columns and chunks of 64, Triton 3.6 made code that read out of bounds on Hopper."""


def _power(x: int, least: int = 16) -> int:
    return max(least, 1 << max(x - 1, 0).bit_length())


def precision(dtype: torch.dtype) -> str:
    """How products take their operands.

    float16 cannot hold the factors of a chunk, so it goes the way of float32: three TF32 products, exact to float32. One TF32
    product would do for float16, and for float32 where torch allows it, but gave a wrong output in one case on Hopper
    (benchmarks/NOTES.md), so nothing uses it.
    """
    if interpreting():
        return "ieee"
    return "bf16" if dtype == torch.bfloat16 else "tf32x3"


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors to fill; under the interpreter a few, so that segments are walked there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class Call(NamedTuple):
    """What all launches of one problem share."""

    B: int
    T: int
    H: int
    K: int
    V: int
    N: int
    gate: Tensor
    u: Tensor
    cu_seqlens: Tensor
    decay: int
    static: bool
    previous: bool
    packed: bool
    precision: str

    @property
    def flags(self) -> dict[str, Any]:
        """The constants that every chunk kernel takes."""
        return {"K": self.K, "V": self.V, "DECAY": self.decay, "PACKED": self.packed, "PRECISION": self.precision}


def _call(p: Problem) -> Call:
    B, T, H, K = p.q.shape
    axes = p.variant.decay
    packed = p.cu_seqlens is not None
    gate = p.gate.expand(p.q.shape) if p.gate is not None else p.q
    decay = NONE if not axes else CHANNEL if "K" in axes else SCALAR
    return Call(
        B, T, H, K, p.v.shape[3], p.cu_seqlens.shape[0] - 1 if p.cu_seqlens is not None else B,
        gate, p.u if p.u is not None else p.q, p.cu_seqlens if p.cu_seqlens is not None else p.q,
        decay, bool(axes) and "T" not in axes, p.variant.read == "previous", packed, precision(p.q.dtype),
    )  # fmt: skip


def _slots(c: Call, L: int) -> int:
    """Stretches of L tokens that the sequences may need together."""
    return c.T // L + c.N if c.packed else c.B * math.ceil(c.T / L)


def _segment(c: Call, C: int, programs: int, target: int) -> int:
    """Tokens in a segment, a multiple of C, such that ``target`` programs run where one a sequence made ``programs``."""
    chunks = max(math.ceil(c.T / C), 1)
    if 2 * programs > target:
        return chunks * C
    tokens = c.T * c.B if c.packed else c.T
    segments = min(target // programs if not c.packed else math.ceil(target * c.N / programs), max(tokens // (4 * C), 1))
    return math.ceil(tokens / segments / C) * C


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()]


def _segment_states(
    c: Call, x: Tensor, y: Tensor, L: int, C: int, scale: float, reverse: bool, start: Tensor | None, end: Tensor | None,
    adjoint: bool, chunks: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Chunk states and their decays, and what each segment starts from; ``end`` is written."""
    o = config("states", x, c.K, c.V)
    BK, BV = min(_power(c.K), o["BK"]), min(_power(c.V), o["BV"])
    blocks = math.ceil(c.K / BK) * math.ceil(c.V / BV)
    slots, chunk_slots = _slots(c, L), _slots(c, C)
    segment_states = _empty(x, slots, c.H, c.K, c.V)
    segment_decays = _empty(x, slots, c.H, c.K) if c.decay else x
    chunk_states = _empty(x, chunk_slots, c.H, c.K, c.V, dtype=chunks) if chunks is not None else x
    chunk_decays = _empty(x, chunk_slots, c.H, c.K) if chunks is not None and c.decay else x
    segments.states[(slots * c.H * blocks,)](
        x, y, c.gate, chunk_states, chunk_decays, segment_states, segment_decays, c.cu_seqlens, scale, c.N, c.T, c.H,
        *_strides(x, y, c.gate), **c.flags, BK=BK, BV=BV, C=C, L=L, ADJOINT=adjoint, PREVIOUS=c.previous,
        CHUNKS=chunks is not None, REVERSE=reverse, STAGES=o["stages"], num_warps=o["warps"],
    )  # fmt: skip
    if start is None and end is None and L >= c.T:
        return chunk_states, chunk_decays, segment_states, segment_decays
    state = start if start is not None else segment_states
    BK, BV = min(_power(c.K), 64), 16
    segments.scan[(c.N * c.H * math.ceil(c.K / BK) * math.ceil(c.V / BV),)](
        segment_states, segment_decays, state, end if end is not None else segment_states, c.cu_seqlens, c.N, c.T, c.H,
        *_strides(state), K=c.K, V=c.V, BK=BK, BV=BV, L=L, DECAY=c.decay, ADJOINT=adjoint, INITIAL=start is not None,
        FINAL=end is not None, PACKED=c.packed, num_warps=2,
    )  # fmt: skip
    return chunk_states, chunk_decays, segment_states, segment_decays


def chunk_forward_pass(p: Problem) -> tuple[Tensor, Tensor]:
    """Output and final state by chunks."""
    c = _call(p)
    o = config("forward", p.q, c.K, c.V, c.decay)
    C, BK, BV = o["C"], _power(c.K, LEAST), min(_power(c.V, LEAST), o["BV"])
    blocks = math.ceil(c.V / BV)
    output = torch.empty(p.v.shape, dtype=p.v.dtype, device=p.v.device)
    final = _empty(p.q, c.N, c.H, c.K, c.V)
    programs = c.N * c.H * blocks
    L = _segment(c, C, programs, o["fill"] * processors(p.q.device))
    initial = p.initial_state
    if L < c.T:
        _, _, initial, _ = _segment_states(c, p.k, p.v, L, C, 1.0, p.reverse, initial, final, False, None)
        programs = _slots(c, L) * c.H * blocks
    else:
        L = 0
    state = initial if initial is not None else final
    resume = torch.empty(programs, dtype=torch.int32, device=p.q.device) if c.decay == CHANNEL else p.q
    for exact in (False, True) if c.decay == CHANNEL else (False,):
        chunk_forward.forward[(programs,)](
            p.q, p.k, p.v, c.gate, c.u, state, output, final, resume, c.cu_seqlens, p.scale, c.N, c.T, c.H,
            *_strides(p.q, p.k, p.v, c.gate), *c.u.stride()[-2:], *_strides(state), **c.flags, BK=BK, BV=BV, C=C, L=L,
            PREVIOUS=c.previous, INITIAL=initial is not None, FINAL=L == 0, REVERSE=p.reverse, LIMIT=LIMITS[c.precision],
            STAGES=1 if exact else o["stages"], EXACT=exact, num_warps=o["warps"],
        )  # fmt: skip
    return output, final


def chunk_backward_pass(p: Problem, d_output: Tensor, d_final_state: Tensor | None) -> Gradients:
    """All gradients by chunks."""
    c = _call(p)
    o = config("backward", p.q, c.K, c.V)
    C, BK, BV = o["C"], min(_power(c.K, LEAST), o["BK"]), min(_power(c.V, LEAST), o["BV"])
    stored = torch.bfloat16 if c.precision == "bf16" else torch.float32
    d_initial = None if p.initial_state is None else torch.empty(p.initial_state.shape, dtype=p.initial_state.dtype, device=p.q.device)
    walkers = config("states", p.q, c.K, c.V)
    programs = c.N * c.H * math.ceil(c.K / min(_power(c.K), walkers["BK"])) * math.ceil(c.V / min(_power(c.V), walkers["BV"]))
    L = _segment(c, C, programs, walkers["fill"] * processors(p.q.device))
    S = _segment_states(c, p.k, p.v, L, C, 1.0, p.reverse, p.initial_state, None, False, stored)
    dS = _segment_states(c, p.q, d_output, L, C, p.scale, p.reverse, d_final_state, d_initial, True, stored)
    slots = _slots(c, C)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (p.q, p.k, p.v))
    dg = du = p.q
    if p.g is not None:
        dg = _empty(p.q, slots, *p.g.shape) if c.static else torch.empty(p.g.shape, dtype=p.g.dtype, device=p.g.device)
    if p.u is not None:
        du = _empty(p.q, slots, c.H, c.K)
    several = c.T > L
    todo = torch.empty(slots * c.H, dtype=torch.int32, device=p.q.device) if c.decay == CHANNEL else p.q
    for exact in (False, True) if c.decay == CHANNEL else (False,):
        chunk_backward.backward[(slots * c.H,)](
            p.q, p.k, p.v, c.gate, c.u, d_output, *S[:3], *dS[:3], dq, dk, dv, dg, du, todo, c.cu_seqlens, p.scale, c.N, c.T, c.H,
            *_strides(p.q, p.k, p.v, c.gate), *c.u.stride()[-2:], *d_output.stride(), **c.flags, BK=BK, BV=BV, C=C, L=L,
            STATIC=c.static, PREVIOUS=c.previous, CARRIED=several or p.initial_state is not None,
            D_CARRIED=several or d_final_state is not None, REVERSE=p.reverse, LIMIT=LIMITS[c.precision], EXACT=exact,
            num_warps=o["warps"],
        )  # fmt: skip
    return Gradients(
        dq, dk, dv,
        None if p.g is None else dg.sum(0).to(p.g.dtype) if c.static else dg,
        None if p.u is None else du.sum(0).to(p.u.dtype),
        d_initial,
    )  # fmt: skip


def recurrent_forward_pass(p: Problem, pool: Tensor | None = None, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and final state token by token; with a ``pool`` of states, those are read and written in place at ``slots``."""
    c = _call(p)
    o = config("recurrent", p.q, c.K, c.V)
    BK = _power(c.K)
    BV = min(_power(c.V), o["BV"])
    output = torch.empty(p.v.shape, dtype=p.v.dtype, device=p.v.device)
    final = pool if pool is not None else _empty(p.q, c.N, c.H, c.K, c.V)
    state = pool if pool is not None else p.initial_state
    initial = state if state is not None else final
    recurrent.forward[(c.N * c.H * math.ceil(c.V / BV),)](
        p.q, p.k, p.v, c.gate, c.u, initial, output, final, c.cu_seqlens, slots if slots is not None else p.q, p.scale, c.T, c.H,
        *_strides(p.q, p.k, p.v, c.gate), *c.u.stride()[-2:], *_strides(initial, final), K=c.K, V=c.V, BK=BK, BV=BV,
        DECAY=c.decay, PREVIOUS=c.previous, INITIAL=state is not None, PACKED=c.packed, REVERSE=p.reverse,
        SLOTS=slots is not None, num_warps=o["warps"],
    )  # fmt: skip
    return output, final


def recurrent_backward_pass(p: Problem, d_output: Tensor, d_final_state: Tensor | None) -> Gradients:
    """All gradients token by token; shares of blocks of V are summed afterwards."""
    c = _call(p)
    o = config("recurrent", p.q, c.K, c.V)
    BK, BV = _power(c.K), min(_power(c.V), o["BV"])
    NV = math.ceil(c.V / BV)
    kept = c.N * (SPAN + 1) + c.T // SPAN if c.packed else c.N * (SPAN + math.ceil(c.T / SPAN))
    scratch = _empty(p.q, kept * c.H * NV * BK * BV)
    dq, dk = _empty(p.q, NV, *p.q.shape), _empty(p.q, NV, *p.k.shape)
    dv = torch.empty(p.v.shape, dtype=p.v.dtype, device=p.v.device)
    dg = du = p.q
    if p.g is not None:
        dg = _empty(p.q, NV, c.N, *p.g.shape) if c.static else _empty(p.q, NV, *p.g.shape)
    if p.u is not None:
        du = _empty(p.q, NV, c.N, c.H, c.K)
    d_initial = _empty(p.q, c.N, c.H, c.K, c.V)
    initial = p.initial_state if p.initial_state is not None else d_initial
    d_final = d_final_state if d_final_state is not None else d_initial
    recurrent.backward[(c.N * c.H * NV,)](
        p.q, p.k, p.v, c.gate, c.u, initial, d_output, d_final, dq, dk, dv, dg, du, d_initial, scratch, c.cu_seqlens,
        p.scale, c.N, c.T, c.H, c.B * c.T,
        *_strides(p.q, p.k, p.v, c.gate), *c.u.stride()[-2:], *_strides(initial, d_output, d_final),
        K=c.K, V=c.V, BK=BK, BV=BV, DECAY=c.decay, STATIC=c.static, PREVIOUS=c.previous, INITIAL=p.initial_state is not None,
        D_FINAL=d_final_state is not None, PACKED=c.packed, REVERSE=p.reverse, SPAN=SPAN,
        num_warps=o["warps"],
    )  # fmt: skip
    return Gradients(
        dq.sum(0).to(p.q.dtype), dk.sum(0).to(p.k.dtype), dv,
        None if p.g is None else dg.sum((0, 1)).to(p.g.dtype) if c.static else dg.sum(0).to(p.g.dtype),
        None if p.u is None else du.sum((0, 1)).to(p.u.dtype),
        None if p.initial_state is None else d_initial.to(p.initial_state.dtype),
    )  # fmt: skip


def step_pass(s: Step) -> Tensor:
    """A decode step: one launch, states in place."""
    return recurrent_forward_pass(s.problem(s.state), s.state, s.slots)[0]
