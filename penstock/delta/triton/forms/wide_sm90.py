"""Gated DeltaNet and DeltaNet on Hopper for heads that ``scalar_sm90.py`` does not take: of 256 key channels, or of more value channels.

The state of a block of 64 value channels is in registers, and tiles of all key channels share a ring (``sm90/wide_ring.py``).
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
from .chunks import end, in_place
from .scalar_sm90 import HEADS, add_prepare, columns, gates, other_dtype, unlike, untiled, untiled_gradient
from .walks import Walk, over_pieces, over_sequences

KEYS = (64, 128, 256)
"""Key channels of a head."""
BV = 64
"""Value channels of a program, or of a block."""
KB = 128
"""Key channels whose gradients are in registers at once."""


def _other_heads(call: Call) -> str | None:
    if call.K not in KEYS or call.V % BV:
        return f"K must be 64, 128 or 256 and V a multiple of {BV}, these are {call.K} and {call.V}"
    return "it takes wider heads" if call.K in HEADS and call.V in HEADS else call.grouped


def refuses(call: Call) -> str | None:
    """One stream with one decay per token or none, bfloat16, wide heads, and tensors that TMA can copy."""
    return unlike(call) or other_dtype(call, torch.bfloat16) or _other_heads(call) or untiled(call)


def refuses_backward(call: Backward) -> str | None:
    """Also the gradient of the output is copied in tiles."""
    return refuses(call) or untiled_gradient(call)


def slots(call: Call) -> int:
    """Tiles [C,K] in shared memory."""
    return 4 if call.K > 128 else 6


def add_walk(plan: Plan, call: Call, walk: Walk) -> None:
    """The launch that walks over the chunks, for outputs or for what ``walk`` keeps."""
    from ..sm90 import wide_walk

    p, H, K, V, (first, steps) = call.p, call.H, call.K, call.V, walk.initial
    out, kept = walk.output or "v", (Tile(C, BV, 3), Tile(K, BV, 3))
    g, g_steps = gates(call)
    chunk, values = Tile(C, K), Tile(C, BV)
    plan.launch(
        wide_walk.penstock_gdn_wide_walk_sm90, call.programs(walk.number, V // BV),
        ("k", "q", "solved_keys", "v", "weights", out, *(walk.kept or ("v", "v")), g, "beta", first or "reads", out, walk.final or "reads",
         "cu_seqlens", walk.rows or "q"),
        (p.scale, sequences, tokens, H, *columns(call), *g_steps, *call.strides("beta"), *steps), 8,
        (chunk, chunk, Tile(C, K, 3), values, Tile(C, C, 3), values, *(kept if walk.kept else (values, values))),
        fused=not walk.piece, K=K, V=V, BV=BV, SLOTS=slots(call), DECAYS=call.decay != NONE, **walk.constants(call),
    )  # fmt: skip


def _forward(call: Forward) -> Plan:
    """``output`` and ``final_state``."""
    plan = Plan(keeps=True)
    add_prepare(plan, call, removals=False)
    add_walk(plan, call, over_sequences(plan, call, output=True, keep=False, transposed=False))
    return plan


def _pieces(plan: Plan, call: InPlace, output: str, piece: int) -> None:
    """Add the launches for whole pieces, each one chunk."""
    add_prepare(plan, call, False, piece)
    add_walk(plan, call, over_pieces(call, output, piece))


def _backward(call: Backward) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg``, ``dbeta`` and ``d_initial_state``; with ``state_alone`` only what ``reverse`` computes.

    The launches are those of ``scalar_backward_sm90.py``. A, A_k T, B^T, E and the states before chunks are computed again.
    """
    from ..sm90 import wide_gradients, wide_reverse

    plan, p, H, K, V, kind = Plan(keeps=True), call.p, call.H, call.K, call.V, call.p.q.dtype
    assert p.beta is not None
    add_prepare(plan, call, removals=True)
    if not call.state_alone:
        add_walk(plan, call, over_sequences(plan, call, output=False, keep=True, transposed=False))

    def like(name: str, *shape: int, dtype: torch.dtype) -> str:
        return plan.empty(name, batch, tokens, H, *shape, dtype=dtype)

    dv = like("dv", V, dtype=p.v.dtype)
    dS = plan.empty("d_chunk_states", call.chunks(C), H, K, V, dtype=kind)
    d_initial = plan.empty("d_initial_state", sequences, H, K, V)
    last, steps = end(call)
    g, g_steps = gates(call)
    heads, rates, chunk, values, state = columns(call), call.strides("beta"), Tile(C, K), Tile(C, BV), Tile(K, BV, 3)
    plan.launch(
        wide_reverse.penstock_gdn_wide_reverse_sm90, call.programs(sequences, V // BV),
        ("solved_keys", "q", "k", "d_output", "weights", dv, dS, g, "beta", last or d_initial, dv, d_initial, "cu_seqlens"),
        (p.scale, sequences, tokens, H, *heads, *g_steps, *rates, *steps), 8,
        (Tile(C, K, 3), chunk, chunk, values, Tile(C, C, 3), values, state),
        K=K, V=V, BV=BV, SLOTS=slots(call), DECAYS=call.decay != NONE, FINAL=last is not None, PACKED=call.packed,
    )  # fmt: skip
    if call.state_alone:
        return plan
    dq, dk, dbeta, part = like("dq", K, dtype=kind), like("dk", K, dtype=kind), like("dbeta", dtype=p.beta.dtype), min(K, KB)
    dg = dbeta if p.g is None else like("dg", dtype=p.g.dtype)
    keys, states = Tile(C, part), Tile(part, BV, 3)
    plan.launch(
        wide_gradients.penstock_gdn_wide_gradients_sm90, call.programs(call.chunks(C), 1),
        ("q", "k", "errors", dv, "d_output", "removals", "chunk_states", dS, dq, dk, g, "beta", dq, dk, dg, dbeta, "cu_seqlens"),
        (p.scale, sequences, tokens, H, *heads, *g_steps, *rates), 8,
        (keys, keys, Tile(C, BV, 3), values, values, Tile(C, C, 3), states, states, keys, keys),
        K=K, V=V, KB=part, DECAYS=call.decay != NONE, PACKED=call.packed,
    )  # fmt: skip
    return plan


SIZES = {"B": 2, "N": 2, "T": 150, "H": 2, "G": 2, "J": 2, "K": 256, "V": 128}
EXAMPLES = (Example("gated_delta_rule", torch.bfloat16, SIZES), Example("delta_rule", torch.bfloat16, SIZES | {"K": 128, "V": 192}))
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("gdn_wide_sm90", _forward, absent, refuses, examples=EXAMPLES)
BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form("gdn_wide_bwd_sm90", _backward, absent, refuses_backward, examples=EXAMPLES)
PIECES: Form[InPlace, Callable[[Plan, InPlace, str, int], None]] = Form(
    "gdn_wide_pieces_sm90", _pieces, absent, refuses, examples=in_place(EXAMPLES)
)
