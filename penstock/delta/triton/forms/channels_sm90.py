"""The forward pass with decays per channel on Hopper, for every gate: ``sm90/prepare.py``, then ``sm90/walk.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent, no_matrix
from ....gpu.plan import Plan
from ....tokens.gpu_calls import sequences, tokens
from ...declaration import DeltaTokens
from ..calls import CHANNEL, C, Call, Forward, InPlace
from .chunks import in_place
from .scalar_sm90 import other_dtype, other_heads, rows
from .walks import Walk, keeps, over_pieces, over_sequences

W = 32
"""Key channels that ``prepare`` has in registers at once. With 64 it spills 192 bytes (Triton 3.6)."""
DTYPES = (torch.bfloat16, torch.float16)


def unlike(call: Call, *dtypes: torch.dtype) -> str | None:
    """Decays per channel that are read after, heads of 64 and 128, and tensors of ``dtypes`` that TMA can copy."""
    p = call.p
    if call.decay != CHANNEL or call.streams != 1 or not call.after:
        return "it computes one stream with decays per channel"
    if (why := other_dtype(call, *dtypes) or other_heads(call) or rows(call)) is not None:
        return why
    if p.g is None or p.beta is None:
        return "it takes a decay and beta"
    if (why := no_matrix("q", p.q, True) or no_matrix("k", p.k, True) or no_matrix("v", p.v) or no_matrix("g", p.g)) is not None:
        return why
    if p.sizes["H"] > 1 and (p.q.stride(2) == 0) != (p.k.stride(2) == 0):
        return "q and k must have the same heads"
    return call.grouped


def refuses(call: Call) -> str | None:
    """Also 16 bits."""
    return unlike(call, *DTYPES)


def halves(p: DeltaTokens) -> bool:
    """Whether operands of products are float16 times powers of two."""
    return bool(p.q.dtype == torch.float16)


KEPT = ("k_read", "solved_keys", "q_read", "weights", "totals", "errors", "chunk_states")
"""What the forward pass keeps for the backward pass, by the names of its plan: tiles, W and the states before chunks. With K = V = 128 it
is 1672 bytes for a token and head, whose inputs have 1284."""
POWERS = ("powers", "kept_powers")
"""The powers of two that tiles, and W and states, lack in float16. With the second part of A it is 1824 bytes."""


def kept(p: DeltaTokens) -> tuple[str, ...]:
    """The names of all that is kept."""
    return KEPT + POWERS * halves(p)


def parts(call: Call) -> int:
    """Matrices in bfloat16 whose sum is A."""
    return 2 if halves(call.p) else 1


def add_tiles(plan: Plan, call: Call, removals: bool, piece: int = 0) -> None:
    """The memory of the tiles of all chunks, with A_k T only if ``removals``, and the launch that computes them."""
    from ..sm90 import prepare

    p, H, K, slots, half = call.p, call.H, call.K, call.chunks(C), halves(call.p)
    k, b, q = (plan.empty(name, slots, H, C, K, dtype=p.q.dtype) for name in KEPT[:3])
    a = plan.empty("weights", slots, H, parts(call) * C, C, dtype=torch.bfloat16)
    r = plan.empty("removals", slots, H, C, C, dtype=torch.float16) if removals else a
    totals = plan.empty("totals", slots, H, K)
    powers = plan.empty("powers", slots, H, 2, C) if half else totals
    shared = p.q.stride(2) == 0 and H > 1
    plan.launch(
        prepare.penstock_kda_prepare_sm90, call.programs(slots, 1),
        ("q", "k", "g", q, k, b, a, r, "beta", totals, powers, "cu_seqlens"),
        (p.scale, sequences, tokens, H, H if shared else 1, *call.strides("beta")), 4,
        (*[Tile(C, W)] * 3, *[Tile(C, W, 3)] * 3, *[Tile(C, C, 3)] * 2),
        writes=(q, k, b, a, *[r] * removals, totals, *[powers] * half), fused=not piece,
        K=K, PACKED=call.packed, W=W, REMOVALS=removals, PIECE=piece,
    )  # fmt: skip


def add_walk(plan: Plan, call: Call, walk: Walk) -> None:
    """The launch that walks over the tiles."""
    from ..sm90 import walk as kernels

    K, V, keep, (first, steps), half = call.K, call.V, walk.kept is not None, walk.initial, halves(call.p)
    of_tokens, of_slots, matrices, weights = Tile(C, C), Tile(C, K, 3), Tile(C, C, 3), Tile(parts(call) * C, C, 3)
    powers = "powers" if half else "totals"
    kept_powers = plan.empty("kept_powers", call.chunks(C), call.H, 2, V) if half and keep else powers
    plan.launch(
        kernels.penstock_kda_walk_sm90, call.programs(walk.number, V // C),
        ("v", "k_read", "solved_keys", "q_read", "weights", "removals" if keep else "weights", walk.output or "v",
         *(walk.kept or ("v", "v")), "beta", "totals", powers, kept_powers, first or "totals", walk.output or "v", walk.final or "v",
         "cu_seqlens", walk.rows or "q"),
        (sequences, tokens, call.H, *call.strides("beta"), *steps, call.p.scale), 4,
        (of_tokens, *[of_slots] * 3, weights, matrices, of_tokens, matrices if keep else of_tokens, of_slots if keep else of_tokens),
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
HEADS: tuple[dict[str, int], ...] = ({}, {"V": 64, "H": 1, "G": 1, "J": 1}, {"K": 64, "V": 64})
EXAMPLES = tuple([Example("kda", dtype, SIZES | heads) for dtype in DTYPES for heads in HEADS])
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("kda_prepare_sm90", _forward, absent, refuses, examples=EXAMPLES)
PIECES: Form[InPlace, Callable[[Plan, InPlace, str, int], None]] = Form(
    "kda_pieces_sm90", _pieces, absent, refuses, examples=in_place(EXAMPLES)
)
