"""KDA in float32 on Hopper, for every gate: ``sm90/prepare_float32.py``, the walks of ``float32_sm90.py``, two launches of gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent
from ....gpu.plan import Plan
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import Backward, C, Call, Forward, InPlace
from .channels_sm90 import unlike
from .chunks import in_place
from .float32_sm90 import PART, PARTS, add_reverse, add_tiles, add_walk
from .scalar_sm90 import untiled_gradient
from .walks import keeps, over_pieces, over_sequences

W = 32
"""Key channels of a block of ``prepare_float32``."""
BLOCK = 16
"""Rows of the blocks of pair matrices."""
BLOCK_ROWS = 2 * PARTS * C * C // BLOCK
"""Of all blocks of both pair matrices of a chunk, in parts."""
WARPS = 8
"""Of the gradients of pairs and of products with states."""


def refuses(call: Call) -> str | None:
    """As in 16 bits, of float32, with decays in float32, and operands that have three parts."""
    if (why := unlike(call, torch.float32) or call.other_rows(C, PARTS * C)) is not None:
        return why
    assert call.p.g is not None
    return None if call.p.g.dtype == torch.float32 else f"g must be float32, it is {call.p.g.dtype}"


def refuses_backward(call: Backward) -> str | None:
    """Also the gradient of the output and the blocks of pair matrices are copied in tiles."""
    return refuses(call) or call.other_rows(C, BLOCK_ROWS) or untiled_gradient(call)


def add_prepare(plan: Plan, call: Call, removals: bool, piece: int = 0) -> None:
    """The tiles of all chunks, with A_k T only if ``removals``, and the launch that computes them."""
    from ..sm90 import prepare_float32

    p, H = call.p, call.H
    tiles = add_tiles(plan, call, removals)
    shared = p.q.stride(2) == 0 and H > 1
    plan.launch(
        prepare_float32.penstock_kda_prepare_float32_sm90, call.programs(call.chunks(C), 1),
        ("q", "k", "g", *tiles, "beta", "cu_seqlens"),
        (p.scale, sequences, tokens, H, H if shared else 1, *call.strides("beta")), 4,
        (*[Tile(C, W)] * 3, *[Tile(C, W, 3)] * 2, *[PART] * 3),
        writes=tuple(sorted({*tiles})), fused=not piece,
        K=call.K, PACKED=call.packed, REMOVALS=removals, PIECE=piece,
    )  # fmt: skip


def _forward(call: Forward) -> Plan:
    """``output`` and ``final_state``; what ``KEPT`` names where gradients are wanted."""
    plan, keep = Plan(keeps=True), keeps(call)
    add_prepare(plan, call, removals=keep)
    add_walk(plan, call, over_sequences(plan, call, output=True, keep=keep))
    return plan


def _pieces(plan: Plan, call: InPlace, output: str, piece: int) -> None:
    """Add the launches for whole pieces, each one chunk."""
    add_prepare(plan, call, False, piece)
    add_walk(plan, call, over_pieces(call, output, piece))


def add_gradients(plan: Plan, call: Backward) -> None:
    """The launches for ``dq``, ``dk``, ``dg`` and ``dbeta``, from what both walks keep, all chunks in parallel."""
    from ..sm90 import gradients_float32, pairs_gradients_float32

    p, H, K, V, slots = call.p, call.H, call.K, call.V, call.chunks(C)
    assert p.g is not None
    assert p.beta is not None

    def like(name: str, *shape: int, dtype: torch.dtype) -> str:
        return plan.empty(name, batch, tokens, H, *shape, dtype=dtype)

    dq, dk, dg = (like(name, K, dtype=torch.float32) for name in ("dq", "dk", "dg"))
    dbeta = like("dbeta", dtype=p.beta.dtype)
    pairs = plan.empty("pairs", slots, H, BLOCK_ROWS, BLOCK, dtype=torch.bfloat16)
    own, of_states, kept = plan.empty("own", slots, H, C), plan.empty("of_states", slots, H, 3, K, C), plan.empty("kept", slots, H, K)
    plan.launch(
        pairs_gradients_float32.penstock_kda_pairs_float32_sm90, call.programs(slots, 1),
        ("errors", "z", "d_output", "chunk_states", "d_chunk_states", "beta", pairs, own, of_states, kept, dbeta, "cu_seqlens"),
        (p.scale, sequences, tokens, H, *call.strides("beta")), WARPS, (*[PART] * 2, Tile(C, C), *[PART] * 2),
        K=K, V=V, PACKED=call.packed,
    )  # fmt: skip
    plan.launch(
        gradients_float32.penstock_kda_gradients_float32_sm90, call.programs(slots, K // C),
        (pairs, "q", "k", "g", own, of_states, kept, dq, dk, dg, "cu_seqlens"),
        (p.scale, sequences, tokens, H, *p.q.stride()[:3], *p.k.stride()[:3], *p.g.stride()[:3]), 4, (Tile(BLOCK * BLOCK, BLOCK, 3),),
        K=K, PACKED=call.packed,
    )  # fmt: skip


def _backward(call: Backward) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg``, ``dbeta`` and ``d_initial_state``; with ``state_alone`` only what the walk backward computes."""
    plan = Plan(keeps=True)
    if not call.kept:
        add_prepare(plan, call, removals=True)
        if not call.state_alone:
            add_walk(plan, call, over_sequences(plan, call, output=False, keep=True))
    add_reverse(plan, call)
    if not call.state_alone:
        add_gradients(plan, call)
    return plan


SIZES = {"B": 2, "N": 2, "T": 150, "H": 2, "G": 2, "J": 2, "K": 128, "V": 128}
HEADS: tuple[dict[str, int], ...] = ({}, {"V": 64, "H": 1, "G": 1, "J": 1}, {"K": 64, "V": 64})
EXAMPLES = tuple([Example("kda", torch.float32, SIZES | heads) for heads in HEADS])
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("kda_float32_sm90", _forward, absent, refuses, examples=EXAMPLES)
BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form("kda_bwd_float32_sm90", _backward, absent, refuses_backward, examples=EXAMPLES)
PIECES: Form[InPlace, Callable[[Plan, InPlace, str, int], None]] = Form(
    "kda_pieces_float32_sm90", _pieces, absent, refuses, examples=in_place(EXAMPLES)
)
