"""The launches of an update in place: first the chunk kernel, then the token-serial kernel.

The first launch processes the pieces of 64 tokens of each sequence, in order from the beginning of the sequence, without segments. The
second processes the remaining tokens one by one. The state is rounded to the pool's dtype behind each piece and each of these tokens. So
results depend neither on where a sequence is cut, if at multiples of 64 or behind the last one, nor on the other sequences of a call.

On Hopper the second launch begins while the first runs, if the first one is a single kernel. The programs of sequences without a piece,
which are decode steps, do not wait for it, so both take as long as the longer of the two.

No bit depends on how a kernel is compiled: fused multiply-adds are off, because the compiler may form others for other constants, and sums
across threads have the same order in all forms of a kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...call.problem import rounded
from ...gpu.hopper import tiled
from ...gpu.plan import Plan, strides
from ...gpu.target import Target, power
from ..advance import CHUNK
from ..declaration import Advance
from ..levels import lengths
from . import chunk_forward, hopper, recurrent
from .plan import Call, bonus, hopper_forward
from .table import LEAST

REGISTERS = 168
"""Of a thread with 64 float32 of a state, at most. Without a limit the compiler takes up to 222, and fewer programs share a multiprocessor.
One NVIDIA H200, gla, 128 sequences with slots: 38.2 us with 168, 40.4 without a limit, 39.4 with 144, 46.5 with 128."""


def pieces(p: Advance) -> bool:
    """Whether the host leaves the first launch in the plan. A plan is shared by calls whose counts are equal when rounded up."""
    return rounded(p.sizes["T"]) >= CHUNK


def arranged(p: Advance) -> Advance:
    """The problem, with contiguous copies of tensors that another chunk kernel, or the same with other loads, would process.

    The order of sums across threads depends on both.
    """
    given = {name: x for name, x in (("q", p.q), ("k", p.k), ("v", p.v), ("g", p.g)) if x is not None}
    copies = {name: x.clone(memory_format=torch.contiguous_format) for name, x in given.items() if not _plain(x)}
    return p.with_tensors(copies) if copies else p


def _plain(x: Tensor) -> bool:
    """Whether x is at a multiple of 16 bytes and contiguous, or a slice of a contiguous tensor along heads and channels."""
    if x.data_ptr() % 16 or x.is_contiguous():
        return x.data_ptr() % 16 == 0
    return x.dim() == 4 and x.shape[3] % 16 == 0 == x.stride(1) % 16 and tiled(x)


def advance_plan(p: Advance, target: Target) -> Plan:
    """``output``; the states of the pool are read and written in place."""
    plan, c = Plan(), Call.of(p, target)
    output = plan.empty("output", lambda s: s["B"], lambda s: s["T"], c.H, c.V, dtype=p.summand(p.v))
    _tokens(plan, c, p, output, pieces(p) and _chunks(plan, c, p, output))
    return plan


def _chunks(plan: Plan, c: Call, p: Advance, output: str) -> bool:
    """The launch of a chunk kernel: all decays, chunks that divide a piece. Returns whether it lets the next launch begin early."""
    b, state = c.config("forward"), p.state.stride()
    given = "slots" if p.slots is not None else "q"
    with_pieces = lambda s: min(s["N"], s["T"] // CHUNK) if c.packed else s["N"] * (s["T"] >= CHUNK)  # noqa: E731
    flags: dict[str, Any] = {"SEGMENTS": False, "INITIAL": True, "FINAL": True, "EVERY": 0, "PIECE": CHUNK}
    kernel = hopper.forward(p, b, c.target)
    if kernel:
        flags |= {"ROWS_GIVEN": p.slots is not None, "NARROW": p.state.element_size() < 4, "EARLY": False}
        hopper_forward(plan, c, p, kernel, with_pieces, 0, output, "state", "q", "state", state, given, False, **flags)
        return kernel.blocks == 1
    C, numbers = min(b.C, CHUNK), (p.scale, lambda s: s["N"], lambda s: s["T"], 0, c.H)
    plan.launch(
        chunk_forward.penstock_chunk_fwd, c.programs(with_pieces, math.ceil(c.V / b.BV)),
        ("q", "k", "v", "g", "u", c.levels(plan, C), "state", output, "state", "q", "q", "cu_seqlens", given),
        (*numbers, *strides(p.q, p.k, p.v), *c.gate, *bonus(p), *state), b.warps, fused=False, **c.flags, **flags,
        PREVIOUS=c.previous, BK=power(c.K, LEAST), BV=b.BV, C=C, LEVELS=len(lengths(C)), REVERSE=False, STAGES=b.stages,
        PART=c.parts[-1], SLOTS=p.slots is not None,
    )  # fmt: skip
    return False


def _tokens(plan: Plan, c: Call, p: Advance, output: str, early: bool) -> None:
    """The launch of the token-serial kernel. No decays stay pending.

    ``early``: it begins while the launch of the pieces runs, so sequences without a piece do not wait for it.
    """
    b, state, slots = c.step_config(), p.state.stride(), p.slots is not None
    grid, one = c.programs(lambda s: s["N"], math.ceil(c.V / b.BV)), c.T == 1 and not c.packed
    full = c.K * b.BV // (32 * b.warps) == 64 and power(c.K) == c.K  # gla at K = 100 spills 432 bytes with the limit, none without
    registers = REGISTERS if c.cuda and full else 0
    plan.launch(
        recurrent.penstock_recurrent_fwd, grid,
        ("q", "k", "v", "g", "u", "state", output, "state", "cu_seqlens", "slots" if slots else "q"),
        (p.scale, lambda s: s["T"], c.H, *strides(p.q, p.k, p.v), *c.gate, *bonus(p), *state, *state), b.warps, registers=registers,
        fused=False, early=early, K=c.K, V=c.V, BK=power(c.K), BV=b.BV, DECAY=c.decay, PREVIOUS=c.previous, INITIAL=True, PACKED=c.packed,
        REVERSE=False, SLOTS=slots, PENDING=False, PIECE=CHUNK, ONE=one, CUDA=c.cuda, EARLY=early,
    )  # fmt: skip
