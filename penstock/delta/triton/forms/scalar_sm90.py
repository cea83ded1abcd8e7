"""The forward pass of gated DeltaNet and DeltaNet on Hopper, for every gate: ``sm90/scalar_prepare.py``, then ``sm90/scalar_walk.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent, no_matrix
from ....gpu.plan import Plan
from ....tokens.gpu_calls import sequences, tokens
from ...declaration import Delta
from ..calls import CHANNEL, NONE, Backward, C, Call, Forward, InPlace
from .chunks import in_place
from .walks import Walk, keeps, over_pieces, over_sequences

HEADS = (64, 128)
"""Key and value channels of a head."""


def rows(call: Call) -> str | None:
    """Rows of the tiles of chunks, which have two parts in float16, and of their states [K,V] or [V,K]."""
    return call.other_rows(C, max(2 * C, call.K, call.V))


def unlike(call: Call) -> str | None:
    """One stream with one log decay per token or none."""
    if call.p.raw is not None:
        return "it takes log decays"
    if call.decay == CHANNEL or call.streams != 1:
        return "it computes one stream without decays per channel"
    return None


def other_dtype(call: Call, *dtypes: torch.dtype) -> str | None:
    """The dtypes of q."""
    dtype = call.p.q.dtype
    return None if dtype in dtypes else f"it takes {' or '.join(str(one).removeprefix('torch.') for one in dtypes)}, this is {dtype}"


def untiled(call: Call) -> str | None:
    """Tensors that TMA can copy."""
    p = call.p
    return rows(call) or no_matrix("q", p.q, True) or no_matrix("k", p.k, True) or no_matrix("v", p.v)


def untiled_gradient(call: Backward) -> str | None:
    """The gradient of the output, too."""
    return no_matrix("the output's gradient", call.d_output)


def other_heads(call: Call) -> str | None:
    """Heads for which there are other kernels, here and for decays per channel."""
    for name, D in (("K", call.K), ("V", call.V)):
        if D not in HEADS:
            return f"{name} must be {' or '.join(map(str, HEADS))}, this is {D}"
    return None


def refuses(call: Call) -> str | None:
    """One stream with one decay per token or none, 16 bits, heads of 64 or 128, and tensors that TMA can copy."""
    return unlike(call) or other_dtype(call, torch.bfloat16, torch.float16) or other_heads(call) or untiled(call)


def halves(call: Call) -> bool:
    """Whether inputs are float16. Then A and B^T are two bfloat16 tiles each."""
    return bool(call.p.q.dtype == torch.float16)


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
KEPT_HALVES = ("half_keys", "half_weights", "powers", "removals", "reads", "errors", "error_powers", "state_powers", "chunk_states")
"""The same of float16: B^T and A as float16 tiles, and what rows and columns of tiles lack. With K = V = 128 it is 1308 bytes."""


def kept(p: Delta) -> tuple[str, ...]:
    """The names of all that is kept."""
    return KEPT_HALVES if p.q.dtype == torch.float16 else KEPT


def add_prepare(plan: Plan, call: Call, removals: bool, piece: int = 0) -> None:
    """The memory of B^T, A, read_t and, with ``removals``, A_k T of all chunks, and the launch that computes them."""
    from ..sm90 import scalar_prepare

    p, slots, H, K = call.p, call.chunks(C), call.H, call.K
    half = halves(call)
    rows = 2 * C if half else C
    b = plan.empty("solved_keys", slots, H, rows, K, dtype=torch.bfloat16)
    a = plan.empty("weights", slots, H, rows, C, dtype=torch.bfloat16)
    r = plan.empty("removals", slots, H, C, C, dtype=torch.float16) if removals else a
    made: tuple[str, ...] = ()
    if half and removals:
        made += (plan.empty("half_weights", slots, H, C, C, dtype=torch.float16),)
        made += (plan.empty("half_keys", slots, H, C, K, dtype=torch.float16), plan.empty("powers", slots, H, 2, C))
    a_half, b_half, powers = made or (a, b, "beta")
    reads = plan.empty("reads", slots, H, C)
    g, steps = gates(call)
    plan.launch(
        scalar_prepare.penstock_gdn_prepare_sm90, call.programs(slots, 1),
        ("q", "k", b, a, r, a_half, b_half, g, "beta", reads, powers, "cu_seqlens"),
        (p.scale, sequences, tokens, H, H // key_heads(call), *columns(call), *steps, *call.strides("beta")), 4,
        (*[Tile(C, K)] * 2, Tile(C, K, 3), *[Tile(C, C, 3)] * 3, Tile(C, K, 3)),
        registers=0 if K > 128 or (removals and half) else 168 if removals or half else 128,
        writes=(b, a, *[r] * removals, *made, reads), fused=not piece,
        K=K, DECAYS=call.decay != NONE, PACKED=call.packed, REMOVALS=removals, PIECE=piece,
    )  # fmt: skip


def block(call: Call) -> int:
    """Value channels of a program that walks over a sequence: all of a head, which loads tiles once, if the programs fill the GPU."""
    programs = call.N * call.H
    return call.V if programs >= call.target.multiprocessors else C


def stages(call: Call, BV: int) -> int:
    """Tiles in shared memory of each tensor that a walk loads. B^T and A of float16 take twice the memory."""
    return 3 if BV == C and not (halves(call) and call.K > C) else 2


def add_walk(plan: Plan, call: Call, walk: Walk) -> None:
    """The launch that walks over the chunks."""
    from ..sm90 import scalar_walk

    p, H, K, V = call.p, call.H, call.K, call.V
    BV = C if walk.kept and walk.output and halves(call) else block(call)  # else it takes too much shared memory
    first, steps = walk.initial
    values, kept = Tile(C, BV), (Tile(C, BV, 3), Tile(BV, K, 3))
    plan.launch(
        scalar_walk.penstock_gdn_walk_sm90, call.programs(walk.number, V // BV),
        ("k", "q", "v", "solved_keys", "weights", walk.output or "v", *(walk.kept or ("v", "v")), "beta", "reads", first or "reads",
         walk.output or "v", walk.final or "reads", "cu_seqlens", walk.rows or "q", *(walk.powers or ("reads", "reads"))),
        (p.scale, sequences, tokens, H, H // key_heads(call), *columns(call), *call.strides("beta"), *steps), BV // 16,
        (*[Tile(C, K)] * 2, values, Tile(C, K, 3), Tile(C, C, 3), values, *(kept if walk.kept else (values, values))),
        fused=not walk.piece, K=K, V=V, BV=BV, STAGES=stages(call, BV), **walk.constants(call),
    )  # fmt: skip


def _forward(call: Forward) -> Plan:
    """``output`` and ``final_state``; what ``KEPT`` names where gradients are wanted."""
    plan, keep = Plan(keeps=True), keeps(call) and not call.p.groups
    add_prepare(plan, call, removals=keep)
    add_walk(plan, call, over_sequences(plan, call, output=True, keep=keep, powers=halves(call)))
    return plan


def _pieces(plan: Plan, call: InPlace, output: str, piece: int) -> None:
    """Add the launches for whole pieces, each one chunk."""
    add_prepare(plan, call, False, piece)
    add_walk(plan, call, over_pieces(call, output, piece))


SIZES = {"B": 2, "N": 2, "T": 150, "H": 4, "G": 2, "J": 2, "K": 128, "V": 128}
CALLS = (("gated_delta_rule", SIZES), ("delta_rule", SIZES | {"K": 64, "V": 64}))
EXAMPLES = tuple([Example(variant, dtype, sizes) for dtype in (torch.bfloat16, torch.float16) for variant, sizes in CALLS])
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("gdn_prepare_sm90", _forward, absent, refuses, examples=EXAMPLES)
PIECES: Form[InPlace, Callable[[Plan, InPlace, str, int], None]] = Form(
    "gdn_pieces_sm90", _pieces, absent, refuses, examples=in_place(EXAMPLES)
)
