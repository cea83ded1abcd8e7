"""The forward pass with decays per channel on Hopper, for every gate: ``sm90/prepare.py``, then ``sm90/walk.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form, unrun
from ....gpu.hopper import Tile, absent, tiled, tiled_or_shared
from ....gpu.plan import Plan, chunks
from ....tokens.gpu_calls import sequences, tokens
from ..calls import CHANNEL, C, Call, Forward, InPlace
from .chunks import in_place
from .scalar_sm90 import other_heads
from .walks import Walk, over_pieces, over_sequences

W = 32
"""Key channels that ``prepare`` has in registers at once. With 64 it spills 192 bytes (Triton 3.6)."""
ROWS = 1 << 31
"""Rows of a matrix that is copied in tiles are numbered by 32-bit integers."""


def refuses(call: Call) -> str | None:
    """Decays per channel that are read after, bfloat16, heads of 64 and 128, and tensors that the tensor memory accelerator can copy."""
    p = call.p
    if call.decay != CHANNEL or call.streams != 1 or not call.after:
        return "it computes one stream with decays per channel"
    if p.q.dtype != torch.bfloat16:
        return f"it takes bfloat16, this is {p.q.dtype}"
    if (why := other_heads(call)) is not None:
        return why
    if not 0 < p.sizes["B"] * p.sizes["T"] < ROWS:
        return f"it takes up to 2**31 tokens, this call has {p.sizes['B'] * p.sizes['T']}"
    if p.g is None or p.beta is None:
        return "it takes a decay and beta"
    for name, x, allowed in (("q", p.q, tiled_or_shared), ("k", p.k, tiled_or_shared), ("v", p.v, tiled), ("g", p.g, tiled)):
        if not allowed(x):
            return f"{name} must be [B,T,H * D] with rows at multiples of 16 bytes, its strides are {x.stride()}"
    if p.sizes["H"] > 1 and (p.q.stride(2) == 0) != (p.k.stride(2) == 0):
        return "q and k must have the same heads"
    return call.grouped


def avoids(call: Call) -> str | None:
    """Heads of 64 key channels."""
    return None if call.K == 128 else unrun(call)


def avoids_backward(call: Call) -> str | None:
    """Heads of 64 value channels, too."""
    return avoids(call) if call.V == 128 else unrun(call)


KEPT = ("k_read", "solved_keys", "q_read", "weights", "totals", "errors", "chunk_states")
"""What the forward pass keeps for the backward pass, by the names of its plan: tiles, W and the states before chunks. With K = V = 128 it
is 1672 bytes for a token and head, whose inputs have 1284."""


def keeps(call: Forward) -> bool:
    """Whether the forward pass keeps residuals. Many short sequences have more slots than tokens."""
    dense = chunks(call.T, C, call.N, call.packed) * C <= 2 * call.B * call.T
    return call.keep and avoids_backward(call) is None and dense


def add_tiles(plan: Plan, call: Call, removals: bool, piece: int = 0) -> None:
    """The memory of the tiles of all chunks, with A_k T only if ``removals``, and the launch that computes them."""
    from ..sm90 import prepare

    p, H, K, slots = call.p, call.H, call.K, call.chunks(C)
    k, b, q = (plan.empty(name, slots, H, C, K, dtype=p.q.dtype) for name in KEPT[:3])
    a = plan.empty("weights", slots, H, C, C, dtype=p.q.dtype)
    r = plan.empty("removals", slots, H, C, C, dtype=torch.float16) if removals else a
    totals = plan.empty("totals", slots, H, K)
    shared = p.q.stride(2) == 0 and H > 1
    plan.launch(
        prepare.penstock_kda_prepare_sm90, call.programs(slots, 1), ("q", "k", "g", q, k, b, a, r, "beta", totals, "cu_seqlens"),
        (p.scale, sequences, tokens, H, H if shared else 1, *call.strides("beta")), 4,
        (*[Tile(C, W)] * 3, *[Tile(C, W, 3)] * 3, *[Tile(C, C, 3)] * 2), writes=(q, k, b, a, *[r] * removals, totals), fused=not piece,
        K=K, PACKED=call.packed, W=W, REMOVALS=removals, PIECE=piece,
    )  # fmt: skip


def add_walk(plan: Plan, call: Call, walk: Walk) -> None:
    """The launch that walks over the tiles."""
    from ..sm90 import walk as kernels

    K, V, keep, (first, steps) = call.K, call.V, walk.kept is not None, walk.initial
    of_tokens, of_slots, matrices = Tile(C, C), Tile(C, K, 3), Tile(C, C, 3)
    plan.launch(
        kernels.penstock_kda_walk_sm90, call.programs(walk.number, V // C),
        ("v", "k_read", "solved_keys", "q_read", "weights", "removals" if keep else "weights", walk.output or "v",
         *(walk.kept or ("v", "v")), "beta", "totals", first or "totals", walk.output or "v", walk.final or "v", "cu_seqlens",
         walk.rows or "q"),
        (sequences, tokens, call.H, *call.strides("beta"), *steps), 4,
        (of_tokens, *[of_slots] * 3, *[matrices] * 2, of_tokens, matrices if keep else of_tokens, of_slots if keep else of_tokens),
        fused=not walk.piece, K=K, V=V, BV=C, **walk.constants(call),
    )  # fmt: skip


def _forward(call: Forward) -> Plan:
    """``output`` and ``final_state``; what ``KEPT`` names where gradients are wanted."""
    plan, keep = Plan(keeps=True), keeps(call)
    add_tiles(plan, call, removals=keep)
    add_walk(plan, call, over_sequences(plan, call, output=True, keep=keep))
    return plan


def _pieces(plan: Plan, call: InPlace, output: str, piece: int) -> None:
    """Add the launches for whole pieces, each one chunk."""
    add_tiles(plan, call, False, piece)
    add_walk(plan, call, over_pieces(call, output, piece))


SIZES = {"B": 2, "N": 2, "T": 150, "H": 2, "G": 2, "J": 2, "K": 128, "V": 128}
EXAMPLES = tuple([Example("kda", torch.bfloat16, SIZES | heads) for heads in ({}, {"V": 64, "H": 1, "G": 1, "J": 1}, {"K": 64, "V": 64})])
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("kda_prepare_sm90", _forward, absent, refuses, avoids, examples=EXAMPLES)
PIECES: Form[InPlace, Callable[[Plan, InPlace, str, int], None]] = Form(
    "kda_pieces_sm90", _pieces, absent, refuses, avoids, examples=in_place(EXAMPLES)
)
