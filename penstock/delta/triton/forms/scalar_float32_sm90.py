"""Gated DeltaNet and DeltaNet in float32 on Hopper, for every gate.

The launches of the forward pass are ``sm90/scalar_prepare_float32.py``, then ``sm90/walk_float32.py``. Those of the backward pass are
``sm90/reverse_float32.py`` and ``sm90/scalar_gradients_float32.py``, after two that repeat what a forward pass may keep.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent
from ....gpu.plan import Plan
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import NONE, Backward, C, Call, Forward, InPlace
from .chunks import in_place
from .float32_sm90 import PART, PARTS, add_reverse, add_tiles, add_walk
from .scalar_sm90 import columns, gates, key_heads, other_dtype, other_heads, unlike, untiled, untiled_gradient
from .walks import keeps, over_pieces, over_sequences


def refuses(call: Call) -> str | None:
    """One stream with one decay per token or none, float32, heads of 64 or 128, and tensors that TMA can copy."""
    return unlike(call) or other_heads(call) or other_dtype(call, torch.float32) or call.other_rows(C, PARTS * C) or untiled(call)


def add_prepare(plan: Plan, call: Call, removals: bool, piece: int = 0) -> None:
    """The tiles of all chunks, with A_k T only if ``removals``, and the launch that computes them."""
    from ..sm90 import scalar_prepare_float32

    p, H = call.p, call.H
    tiles = add_tiles(plan, call, removals)
    g, steps = gates(call)
    plan.launch(
        scalar_prepare_float32.penstock_gdn_prepare_float32_sm90, call.programs(call.chunks(C), 1),
        ("q", "k", *tiles, g, "beta", "cu_seqlens"),
        (p.scale, sequences, tokens, H, H // key_heads(call), *columns(call), *steps, *call.strides("beta")), 4,
        (*[Tile(C, C)] * 2, *[PART] * 5), writes=tuple(sorted({*tiles})), fused=not piece,
        K=call.K, DECAYS=call.decay != NONE, PACKED=call.packed, REMOVALS=removals, PIECE=piece,
    )  # fmt: skip


def refuses_backward(call: Backward) -> str | None:
    """Also the gradient of the output is copied in tiles."""
    if call.p.groups:
        return "it takes the heads of q and k that groups share as they are"
    return refuses(call) or untiled_gradient(call)


def _forward(call: Forward) -> Plan:
    """``output`` and ``final_state``; what ``KEPT`` names where gradients are wanted."""
    plan, keep = Plan(keeps=True), keeps(call) and not call.p.groups
    add_prepare(plan, call, removals=keep)
    add_walk(plan, call, over_sequences(plan, call, output=True, keep=keep))
    return plan


def _pieces(plan: Plan, call: InPlace, output: str, piece: int) -> None:
    """Add the launches for whole pieces, each one chunk."""
    add_prepare(plan, call, False, piece)
    add_walk(plan, call, over_pieces(call, output, piece))


def _backward(call: Backward) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg``, ``dbeta`` and ``d_initial_state``; with ``state_alone`` only what ``reverse_float32.py`` computes.

    Tiles, W and the states before chunks are computed again, unless the forward pass kept them. dq and dk are those of heads of q and k.
    """
    from ..sm90 import scalar_gradients_float32

    plan, p, H, K, V, slots, G = Plan(keeps=True), call.p, call.H, call.K, call.V, call.chunks(C), key_heads(call)
    assert p.beta is not None
    if not call.kept:
        add_prepare(plan, call, removals=not call.state_alone)
        if not call.state_alone:
            add_walk(plan, call, over_sequences(plan, call, output=False, keep=True))
    add_reverse(plan, call)
    if call.state_alone:
        return plan
    dq, dk = (plan.empty(name, batch, tokens, G, K) for name in ("dq", "dk"))
    dbeta = plan.empty("dbeta", batch, tokens, H, dtype=p.beta.dtype)
    dg = dbeta if p.g is None else plan.empty("dg", batch, tokens, H, dtype=p.g.dtype)
    g, steps = gates(call)
    plan.launch(
        scalar_gradients_float32.penstock_gdn_gradients_float32_sm90, lambda s: slots(s) * G,
        ("q", "k", "d_output", "z", "errors", "chunk_states", "d_chunk_states", g, "beta", dq, dk, dg, dbeta, "cu_seqlens"),
        (p.scale, sequences, tokens, H, H // G, *columns(call), *steps, *call.strides("beta")), 4, (*[Tile(C, C)] * 3, *[PART] * 4),
        K=K, V=V, DECAYS=call.decay != NONE, PACKED=call.packed,
    )  # fmt: skip
    return plan


SIZES = {"B": 2, "N": 2, "T": 150, "H": 4, "G": 2, "J": 2, "K": 128, "V": 128}
EXAMPLES = (
    Example("gated_delta_rule", torch.float32, SIZES),
    Example("delta_rule", torch.float32, SIZES | {"K": 64, "V": 64}),
)
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("gdn_float32_sm90", _forward, absent, refuses, examples=EXAMPLES)
BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form("gdn_bwd_float32_sm90", _backward, absent, refuses_backward, examples=EXAMPLES)
PIECES: Form[InPlace, Callable[[Plan, InPlace, str, int], None]] = Form(
    "gdn_pieces_float32_sm90", _pieces, absent, refuses, examples=in_place(EXAMPLES)
)
