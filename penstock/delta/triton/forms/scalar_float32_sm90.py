"""The forward pass of gated DeltaNet and DeltaNet in float32 on Hopper, for every gate.

The launches are ``sm90/scalar_prepare_float32.py``, then ``sm90/walk_float32.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent, no_matrix
from ....gpu.plan import Plan, chunks
from ....tokens.gpu_calls import sequences, tokens
from ..calls import NONE, C, Call, Forward, InPlace
from .chunks import in_place
from .float32_sm90 import PART, PARTS, add_tiles, add_walk
from .scalar_sm90 import columns, gates, key_heads, other_dtype, other_heads, unlike
from .walks import over_pieces, over_sequences

NOT_RUN = "its kernels for float32 have not run on a GPU yet"


def refuses(call: Call) -> str | None:
    """One stream with one decay per token or none, float32, heads of 64 or 128, and tensors that TMA can copy."""
    p = call.p
    reason = unlike(call) or other_dtype(call, torch.float32) or other_heads(call) or call.other_rows(C, max(PARTS * C, call.K, call.V))
    return reason or no_matrix("q", p.q, True) or no_matrix("k", p.k, True) or no_matrix("v", p.v)


def avoids(call: Call) -> str | None:
    """Every call."""
    return NOT_RUN


def keeps(call: Forward) -> bool:
    """Whether the forward pass keeps residuals. Many short sequences have more slots than tokens."""
    dense = chunks(call.T, C, call.N, call.packed) * C <= 2 * call.B * call.T
    return call.keep and not call.p.groups and dense


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


SIZES = {"B": 2, "N": 2, "T": 150, "H": 4, "G": 2, "J": 2, "K": 128, "V": 128}
EXAMPLES = (
    Example("gated_delta_rule", torch.float32, SIZES),
    Example("delta_rule", torch.float32, SIZES | {"K": 64, "V": 64}),
)
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("gdn_float32_sm90", _forward, absent, refuses, avoids, examples=EXAMPLES)
PIECES: Form[InPlace, Callable[[Plan, InPlace, str, int], None]] = Form(
    "gdn_pieces_float32_sm90", _pieces, absent, refuses, avoids, examples=in_place(EXAMPLES)
)
