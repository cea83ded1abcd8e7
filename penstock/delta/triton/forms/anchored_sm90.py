"""RWKV-7 on Hopper where a chunk has one anchor, as steps of states: all chunks at once, then one product a chunk; both passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent, tiled
from ....gpu.plan import Plan
from ....tokens.gpu_calls import sequences, tokens
from ..calls import Backward, C, Call, Forward, InPlace
from .chunks import end, gradient, in_place, start
from .walks import Walk, over_pieces, over_sequences

WARPS = 8
"""Of the gradients."""
STAGES = 3
"""Chunks whose tiles a chain has in memory: loads of two are under way while it computes one."""


def stages(call: Call, output: bool) -> int:
    """``STAGES``; of a chain with outputs, whose tiles are more, fewer where two programs share a multiprocessor."""
    programs = call.N * call.H
    return 2 if output and programs > call.target.multiprocessors else STAGES


ROWS = 1 << 31
"""Rows of a matrix that is copied in tiles are numbered by 32-bit integers. The tallest has two rows for a token of a chunk."""


def refuses(call: Call, **given: Tensor | None) -> str | None:
    """Two streams in bfloat16, heads of 64, one anchor in a chunk, and tensors that TMA can copy: q, k, v, a, b and ``given``."""
    p = call.p
    if not call.anchored:
        return "it computes two streams whose decays have one anchor in 64 tokens"
    if p.groups:
        return "it takes q, k, a and b of every head of v"
    if call.K != C or call.V != C:
        return f"K and V must be {C}, these are {call.K} and {call.V}"
    rows = call.chunks(C)(p.sizes) * C * call.H if p.sizes["B"] * p.sizes["T"] else 0
    if not 0 < 2 * rows < ROWS:
        return f"it takes up to 2**30 tokens of all heads, in whole chunks, this call has {rows}"
    for name, x in {"q": p.q, "k": p.k, "v": p.v, "a": p.a, "b": p.b, **given}.items():
        if x is not None and x.dtype != torch.bfloat16:
            return f"it takes bfloat16, {name} is {x.dtype}"
        if x is not None and not tiled(x):
            return f"{name} must be [B,T,H * {C}] with rows at multiples of 16 bytes, its strides are {x.stride()}"
    return None


def gate(call: Call) -> str:
    """The name of the log decays, or of raw gates."""
    return "g" if call.p.raw is None else "raw"


def _steps(plan: Plan, call: Call, piece: int = 0) -> str:
    """Add the memory of M, Q, W and decays of all chunks, and the launch that computes them. The name of Y or, for gradients, of T - I."""
    from ..sm90 import anchored_steps

    slots, H, K, solved = call.chunks(C), call.H, call.K, isinstance(call, Backward)
    step, read = (plan.empty(name, slots, H, C, K, dtype=call.tile) for name in ("step", "read"))
    write = plan.empty("write", slots, H, 2 * C, K, dtype=call.tile)
    more = plan.empty("solved" if solved else "own", slots, H, C * (1 + solved), C, dtype=call.tile)
    total = plan.empty("total", slots, H, K)
    plan.launch(
        anchored_steps.penstock_rwkv7_steps_sm90, call.programs(slots, 1),
        ("q", "a", "k", "b", "v", step, read, write, more, gate(call), total, "cu_seqlens"),
        (call.p.scale, sequences, tokens, H, *call.strides("g")), 4, (*[Tile(C, K)] * 5, *[Tile(C, K, 3)] * 4),
        writes=(step, read, write, more, total), fused=not piece,
        K=K, PACKED=call.packed, SOLVED=solved, RAW=call.p.raw is not None, PIECE=piece,
    )  # fmt: skip
    return more


def _chain(plan: Plan, call: Call, own: str, walk: Walk) -> None:
    """Add the launch of the states of all chunks: outputs by Y, which is ``own``, or the states before chunks are kept."""
    from ..sm90 import anchored_chain

    first, steps = walk.initial
    made, tile = (walk.kept[1], Tile(C, C, 3)) if walk.kept else (walk.output, Tile(C, C))
    assert made is not None
    plan.launch(
        anchored_chain.penstock_rwkv7_chain_sm90, call.programs(walk.number, 1),
        ("step", "write", "read", own, made, "total", first or "total", made, walk.final or "total", "cu_seqlens", walk.rows or "step"),
        (sequences, tokens, call.H, *steps), 4, (*[Tile(C, C, 3)] * 4, tile), fused=not walk.piece,
        K=C, STAGES=stages(call, walk.output is not None), **walk.constants(call),
    )  # fmt: skip


def _forward(call: Forward) -> Plan:
    """``output`` and ``final_state``."""
    plan = Plan(keeps=True)
    own = _steps(plan, call)
    _chain(plan, call, own, over_sequences(plan, call, output=True, keep=False))
    return plan


def _pieces(plan: Plan, call: InPlace, output: str, piece: int) -> None:
    """Add the launches for whole pieces, each one chunk."""
    own = _steps(plan, call, piece)
    _chain(plan, call, own, over_pieces(call, output, piece))


def _backward(call: Backward) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg`` or ``draw``, ``da``, ``db`` and ``d_initial_state``; with ``state_alone`` only the last."""
    from ..sm90 import anchored_chain, anchored_gradients

    plan, p, H, K, slots = Plan(keeps=True), call.p, call.H, call.K, call.chunks(C)
    solved = _steps(plan, call)
    token, slot = Tile(C, K), Tile(C, K, 3)
    if not call.state_alone:
        states = plan.empty("chunk_states", slots, H, K, K, dtype=call.tile)
        _chain(plan, call, "read", Walk(sequences, start(call), kept=("", states)))
    last, steps = end(call)
    dS = plan.empty("d_chunk_states", slots, H, K, K, dtype=call.tile)
    d_initial = plan.empty("d_initial_state", sequences, H, K, K)
    plan.launch(
        anchored_chain.penstock_rwkv7_chain_bwd_sm90, call.programs(sequences, 1),
        ("step", "read", "d_output", dS, "total", last or d_initial, d_initial, "cu_seqlens"), (sequences, tokens, H, *steps), 4,
        (slot, slot, token, slot), K=K, FINAL=last is not None, PACKED=call.packed, STAGES=stages(call, False),
    )  # fmt: skip
    if call.state_alone:
        return plan
    names = ("dq", "dk", "dv", "da", "db")
    made = tuple([gradient(plan, call, name, K, dtype=p.v.dtype if name == "dv" else p.q.dtype) for name in names])
    given = p.raw if p.g is None else p.g
    assert given is not None
    dg = gradient(plan, call, "d" + gate(call), K, dtype=given.dtype)
    plan.launch(
        anchored_gradients.penstock_rwkv7_gradients_sm90, call.programs(slots, 1),
        ("v", "d_output", "q", "k", "a", "b", "chunk_states", dS, solved, *made, gate(call), "total", *made, dg, "cu_seqlens"),
        (p.scale, sequences, tokens, H, *call.strides("g")), WARPS, (*[token] * 6, *[slot] * 3, *[token] * 5),
        K=K, PACKED=call.packed, RAW=p.raw is not None,
    )  # fmt: skip
    return plan


SIZES = {"B": 2, "N": 2, "T": 150, "H": 2, "G": 2, "J": 2, "K": 64, "V": 64}
EXAMPLES = (Example("rwkv7", torch.bfloat16, SIZES, ("g",)),)
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("rwkv7_sm90", _forward, absent, refuses, examples=EXAMPLES)
BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form(
    "rwkv7_bwd_sm90", _backward, absent, lambda call: refuses(call, d_output=call.d_output), examples=EXAMPLES
)
PIECES: Form[InPlace, Callable[[Plan, InPlace, str, int], None]] = Form(
    "rwkv7_pieces_sm90", _pieces, absent, refuses, examples=in_place(EXAMPLES)
)
