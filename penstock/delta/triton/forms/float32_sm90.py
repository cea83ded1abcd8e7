"""What gated DeltaNet, DeltaNet and KDA in float32 share on Hopper: tiles of every chunk, and the walks over chunks by them.

Operands of products are sums of three bfloat16 tiles: 24 bits, the range of float32. One launch of each kind of decays computes the tiles.
They contain the decays, so both walks are the same for every kind.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....gpu.hopper import Tile
from ....gpu.plan import Plan
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import Backward, C, Call
from .chunks import end
from .walks import Walk

PARTS = 3
"""bfloat16 tiles whose sum is an operand."""
HEADS = (64, 128)
"""Key and value channels of a head."""
BV = 64
"""Value channels of a program that walks."""
PART = Tile(C, C, 3)
"""As the parts of an operand are copied: 64 columns of one."""
KEPT = ("k_read", "solved_keys", "q_read", "weights", "totals", "errors", "chunk_states")
"""What the forward pass keeps for the backward pass, by the names of its plan: tiles, W and the states before chunks. With K = V = 128 it
is 4232 bytes for a token and head."""


class Tiles(NamedTuple):
    """The names of the tiles of every chunk in a plan, in the order of kernel parameters.

    An operand [C,D] is [slots,H,PARTS C,D] in memory: part n of chunk ``slot`` and head h begins at row ((slot H + h) PARTS + n) C.
    """

    k_read: str
    """k o the decay from the chunk's start through each token [C,K]."""
    q_read: str
    """scale q o the same."""
    solved_keys: str
    """B^T = T^T (k o the decay after each token) [C,K]."""
    weights: str
    """A = A_q T [C,C], where A_q includes scale."""
    removals: str
    """A_k T [C,C]; a dummy where it is not wanted."""
    totals: str
    """The chunk's decay of every channel, [slots,H,K] in float32. One value K times where decays are per token, 1 without decays."""


def add_tiles(plan: Plan, call: Call, removals: bool) -> Tiles:
    """The memory of the tiles of all chunks, with A_k T only if ``removals``."""
    slots, H, K = call.chunks(C), call.H, call.K

    def operand(name: str, columns: int) -> str:
        return plan.empty(name, slots, H, PARTS * C, columns, dtype=torch.bfloat16)

    k, q, b, a = operand("k_read", K), operand("q_read", K), operand("solved_keys", K), operand("weights", C)
    return Tiles(k, q, b, a, operand("removals", C) if removals else a, plan.empty("totals", slots, H, K))


def add_walk(plan: Plan, call: Call, walk: Walk) -> None:
    """The launch that walks over the tiles, for outputs, for what ``walk`` keeps, or for both."""
    from ..sm90 import walk_float32

    K, V, (first, steps) = call.K, call.V, walk.initial
    values, out = Tile(C, BV), walk.output or "v"
    plan.launch(
        walk_float32.penstock_delta_walk_float32_sm90, call.programs(walk.number, V // BV),
        ("k_read", "q_read", "solved_keys", "weights", "removals" if walk.kept else "weights", "v", out, "beta", "totals",
         first or "totals", out, walk.final or "totals", *(walk.kept or ("totals", "totals")), "cu_seqlens", walk.rows or "q"),
        (sequences, tokens, call.H, *call.strides("beta"), *steps), 4, (*[PART] * 5, *[values] * 2),
        fused=not walk.piece, K=K, V=V, BV=BV, **walk.constants(call),
    )  # fmt: skip


def add_reverse(plan: Plan, call: Backward) -> None:
    """The walk backward in time: ``dv``, ``d_chunk_states`` [slots,H,V,K], of the states after chunks, and ``d_initial_state``.

    Also ``z`` [slots,H,C,V], dv without its factor beta: the gradient of beta is the sum of z o W over value channels, for beta = 0, too.
    Rows of z and of W after the last token are 0.
    """
    from ..sm90 import reverse_float32

    H, K, V = call.H, call.K, call.V
    dv = plan.empty("dv", batch, tokens, H, V)
    z = plan.empty("z", call.chunks(C), H, C, V)
    dS = plan.empty("d_chunk_states", call.chunks(C), H, V, K)
    d_initial = plan.empty("d_initial_state", sequences, H, K, V)
    last, steps = end(call)
    plan.launch(
        reverse_float32.penstock_delta_reverse_float32_sm90, call.programs(sequences, V // BV),
        ("solved_keys", "q_read", "k_read", "weights", "d_output", dv, "beta", "totals", last or d_initial, dv, z, dS,
         d_initial, "cu_seqlens"),
        (sequences, tokens, H, *call.strides("beta"), *steps), 4, (*[PART] * 4, *[Tile(C, BV)] * 2),
        K=K, V=V, BV=BV, FINAL=last is not None, PACKED=call.packed,
    )  # fmt: skip
