"""When ``chunk_backward_groups`` computes the chunks of the backward pass of heads that share q and k, and its launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...gpu.plan import Plan, chunks, strides
from ...gpu.target import power
from ..declaration import Recurrence
from . import chunk_backward_groups
from .table import LEAST

if TYPE_CHECKING:
    from .plan import Call

C = 64
"""Tokens in a chunk, as of the states that the Hopper kernels store, and value channels at most."""
WIDEST = 128
"""Key channels at most: gradients of q and k of all of them are in registers."""
WARPS, STAGES = 8, 3
"""Loads of a head begin two heads before. At 128 key channels a program has 175 KB of shared memory."""


class Groups(NamedTuple):
    """The launch."""

    G: int
    parts: int
    """Programs for the heads of a group in a chunk. Beyond one, gradients of q and k are float32 sums of each."""


def of(p: Recurrence, c: Call) -> Groups | None:
    """The launch if heads of the call share q and k and the kernel supports it, or None."""
    G = p.groups
    if not G or G == c.H or p.partial or p.variant.bonus or "K" in p.variant.decay or c.K > WIDEST or c.V > C:
        return None
    fits = c.target.arch == "sm_90" and c.precision == "bf16" and shared_bytes(c.K) <= c.target.shared_memory
    if c.T <= C or not (fits or c.target.interpreted):  # states of a single chunk are float32
        return None
    return Groups(G, parts(c, G, chunks(c.T, C, c.N, c.packed)))


def parts(c: Call, G: int, count: int) -> int:
    """Parts of each group: as many as ``count`` chunks leave multiprocessors for."""
    heads = c.H // G
    return max(P for P in range(1, heads + 1) if heads % P == 0 and (P == 1 or P * G * count <= c.target.multiprocessors))


def shared_bytes(K: int) -> int:
    """Shared memory of a program at most: q and k, three stages of v, dO and states, the weights, and 4 KB of vectors."""
    BK = power(K, LEAST)
    return 2 * (2 * C * BK + 6 * C * C + 6 * BK * C + C * C) + 4096


def launch(plan: Plan, c: Call, p: Recurrence, one: Groups, S: str, dS: str, d_output: Tensor, d_gate: str) -> None:
    """Add the launch. ``S`` and ``dS``: states before chunks and gradients of states behind them. dq and dk are planned here."""
    slots, heads = c.chunks(C), c.H // (one.G * one.parts)
    dtype = p.q.dtype if one.parts == 1 else torch.float32
    for name in ("dq", "dk"):
        plan.empty(name, lambda s: s["B"], lambda s: s["T"], one.G * one.parts, c.K, dtype=dtype)
    vectors = plan.empty("vectors", slots, c.H, 5 * C) if c.decay else "q"
    plan.launch(
        chunk_backward_groups.penstock_chunk_bwd_groups, lambda s: slots(s) * one.G * one.parts,
        ("q", "k", "v", "g", "d_output", S, dS, "dq", "dk", "dv", d_gate, vectors, "cu_seqlens"),
        (p.scale, lambda s: s["N"], lambda s: s["T"], c.H, *strides(p.q, p.k, p.v), *c.gate[:3], *d_output.stride()), WARPS,
        HEADS=heads, K=c.K, V=c.V, BK=power(c.K, LEAST), C=C, DECAY=c.decay, STATIC=c.static, DG=d_gate != "q", PACKED=c.packed,
        REVERSE=p.reverse, PRECISION=c.precision, STAGES=STAGES,
    )  # fmt: skip
