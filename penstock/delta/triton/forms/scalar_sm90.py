"""The forward pass of gated DeltaNet and DeltaNet on Hopper, for every gate: ``sm90/scalar_prepare.py``, then ``sm90/scalar_walk.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent, tiled, tiled_or_shared
from ....gpu.plan import Plan, chunks
from ....tokens.gpu_calls import sequences, tokens
from ..calls import CHANNEL, NONE, Backward, C, Call, Forward, InPlace
from .chunks import in_place
from .walks import Walk, over_pieces, over_sequences

HEADS = (64, 128)
"""Key and value channels of a head."""
ROWS = 1 << 31
"""Rows of a matrix that is copied in tiles are numbered by 32-bit integers."""


def unlike(call: Call) -> str | None:
    """One stream with one log decay per token or none, in bfloat16."""
    if call.p.raw is not None:
        return "it takes log decays"
    if call.decay == CHANNEL or call.streams != 1:
        return "it computes one stream without decays per channel"
    return None if call.p.q.dtype == torch.bfloat16 else f"it takes bfloat16, this is {call.p.q.dtype}"


def untiled(call: Call) -> str | None:
    """Tensors that TMA can copy."""
    p = call.p
    if not 0 < p.sizes["B"] * p.sizes["T"] < ROWS:
        return f"it takes up to 2**31 tokens, this call has {p.sizes['B'] * p.sizes['T']}"
    for name, x, allowed in (("q", p.q, tiled_or_shared), ("k", p.k, tiled_or_shared), ("v", p.v, tiled)):
        if not allowed(x):
            return f"{name} must be [B,T,H * D] with rows at multiples of 16 bytes, its strides are {x.stride()}"
    return None


def untiled_gradient(call: Backward) -> str | None:
    """The gradient of the output, too."""
    if call.d_output is None or tiled(call.d_output):
        return None
    return f"d_output must be [B,T,H * V] with rows at multiples of 16 bytes, its strides are {call.d_output.stride()}"


def other_heads(call: Call) -> str | None:
    """Heads for which there are other kernels, here and for decays per channel."""
    for name, D in (("K", call.K), ("V", call.V)):
        if D not in HEADS:
            return f"{name} must be {' or '.join(map(str, HEADS))}, this is {D}"
    return None


def refuses(call: Call) -> str | None:
    """One stream with one decay per token or none, bfloat16, heads of 64 or 128, and tensors that TMA can copy."""
    return unlike(call) or other_heads(call) or untiled(call)


def key_heads(call: Call) -> int:
    """The heads of q and k. Each is shared by as many heads of v."""
    return int(call.p.sizes["G"])


def columns(call: Call) -> tuple[int, int]:
    """The columns between heads of q and of k in their matrices: 0 where all heads share one."""
    return tuple([call.K if x.stride(2) else 0 for x in (call.p.q, call.p.k)])  # type: ignore[return-value]


def gates(call: Call) -> tuple[str, tuple[int, ...]]:
    """The name and strides [B,T,H] of the decay; beta and zeros as dummies where there is none."""
    return ("g", call.gate[:3]) if call.decay != NONE else ("beta", (0, 0, 0))


KEPT = ("solved_keys", "weights", "removals", "reads", "errors", "chunk_states")
"""What the forward pass keeps for the backward pass, by the names of its plan: B^T, A, A_k T, read_t, E and the states before chunks. With
K = V = 128 it is 1284 bytes for a token and head of v."""


def keeps(call: Forward) -> bool:
    """Whether the forward pass keeps residuals. Many short sequences have more slots than tokens."""
    dense = chunks(call.T, C, call.N, call.packed) * C <= 2 * call.B * call.T
    return call.keep and not call.p.groups and dense


def add_prepare(plan: Plan, call: Call, removals: bool, piece: int = 0) -> None:
    """The memory of B^T, A, read_t and, with ``removals``, A_k T of all chunks, and the launch that computes them."""
    from ..sm90 import scalar_prepare

    p, slots, H, K = call.p, call.chunks(C), call.H, call.K
    b = plan.empty("solved_keys", slots, H, C, K, dtype=p.q.dtype)
    a = plan.empty("weights", slots, H, C, C, dtype=p.q.dtype)
    r = plan.empty("removals", slots, H, C, C, dtype=torch.float16) if removals else a
    reads = plan.empty("reads", slots, H, C)
    g, steps = gates(call)
    plan.launch(
        scalar_prepare.penstock_gdn_prepare_sm90, call.programs(slots, 1), ("q", "k", b, a, r, g, "beta", reads, "cu_seqlens"),
        (p.scale, sequences, tokens, H, H // key_heads(call), *columns(call), *steps, *call.strides("beta")), 4,
        (*[Tile(C, K)] * 2, Tile(C, K, 3), *[Tile(C, C, 3)] * 2),
        registers=(168 if removals else 128) if K <= 128 else 0, writes=(b, a, *[r] * removals, reads), fused=not piece,
        K=K, DECAYS=call.decay != NONE, PACKED=call.packed, REMOVALS=removals, PIECE=piece,
    )  # fmt: skip


def block(call: Call) -> int:
    """Value channels of a program that walks over a sequence: all of a head, which loads tiles once, if the programs fill the GPU."""
    programs = call.N * call.H
    return call.V if programs >= call.target.multiprocessors else C


def add_walk(plan: Plan, call: Call, walk: Walk) -> None:
    """The launch that walks over the chunks."""
    from ..sm90 import scalar_walk

    p, H, K, V, BV = call.p, call.H, call.K, call.V, block(call)
    first, steps = walk.initial
    values, kept = Tile(C, BV), (Tile(C, BV, 3), Tile(BV, K, 3))
    plan.launch(
        scalar_walk.penstock_gdn_walk_sm90, call.programs(walk.number, V // BV),
        ("k", "q", "v", "solved_keys", "weights", walk.output or "v", *(walk.kept or ("v", "v")), "beta", "reads", first or "reads",
         walk.output or "v", walk.final or "reads", "cu_seqlens", walk.rows or "q"),
        (p.scale, sequences, tokens, H, H // key_heads(call), *columns(call), *call.strides("beta"), *steps), BV // 16,
        (*[Tile(C, K)] * 2, values, Tile(C, K, 3), Tile(C, C, 3), values, *(kept if walk.kept else (values, values))),
        fused=not walk.piece, K=K, V=V, BV=BV, STAGES=3 if BV == C else 2, **walk.constants(call),
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
EXAMPLES = (Example("gated_delta_rule", torch.bfloat16, SIZES), Example("delta_rule", torch.bfloat16, SIZES | {"K": 64, "V": 64}))
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("gdn_prepare_sm90", _forward, absent, refuses, examples=EXAMPLES)
PIECES: Form[InPlace, Callable[[Plan, InPlace, str, int], None]] = Form(
    "gdn_pieces_sm90", _pieces, absent, refuses, examples=in_place(EXAMPLES)
)
