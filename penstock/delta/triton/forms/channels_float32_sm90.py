"""KDA in float32 on Hopper, for every gate: ``sm90/prepare_float32.py``, then the walks of ``float32_sm90.py``."""

from __future__ import annotations

import torch

from ....gpu.hopper import Tile
from ....gpu.plan import Plan
from ....tokens.gpu_calls import sequences, tokens
from ..calls import C, Call

W = 32
"""Key channels of a block of ``prepare_float32``."""


def add_tiles(plan: Plan, call: Call, removals: bool, piece: int = 0) -> None:
    """The memory of the tiles of all chunks, with A_k T only if ``removals``, and the launch that computes them."""
    from ..sm90 import prepare_float32

    p, H, K, slots = call.p, call.H, call.K, call.chunks(C)
    k, b, q = (plan.empty(name, slots, H, 3 * C, K, dtype=torch.bfloat16) for name in ("k_read", "solved_keys", "q_read"))
    a = plan.empty("weights", slots, H, 3 * C, C, dtype=torch.bfloat16)
    r = plan.empty("removals", slots, H, C, C) if removals else a
    totals = plan.empty("totals", slots, H, K)
    shared = p.q.stride(2) == 0 and H > 1
    plan.launch(
        prepare_float32.penstock_kda_prepare_float32_sm90, call.programs(slots, 1),
        ("q", "k", "g", q, k, b, a, r, "beta", totals, "cu_seqlens"),
        (p.scale, sequences, tokens, H, H if shared else 1, *call.strides("beta")), 4,
        (*[Tile(C, W)] * 3, *[Tile(C, W, 3)] * 3, *[Tile(C, C, 3)] * 2),
        writes=(q, k, b, a, *[r] * removals, totals), fused=not piece,
        K=K, PACKED=call.packed, REMOVALS=removals, PIECE=piece,
    )  # fmt: skip
