"""RWKV-7 on Hopper where a chunk has one anchor, as steps of states: all chunks at once, then one product a chunk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent, no_matrix
from ....gpu.plan import Plan
from ....tokens.gpu_calls import sequences, tokens
from ..calls import MOST_DECAY, Backward, C, Call, Forward, InPlace
from .chunks import end, gradient, in_place, start
from .scalar_sm90 import other_dtype
from .walks import Walk, over_pieces, over_sequences

WARPS = 8
"""Of the gradients."""
STAGES = 3
"""Chunks whose tiles a chain has in memory: loads of two are under way while it computes one."""
SHARED = {torch.bfloat16: ("outputs",), torch.float16: ("states", "gradients"), torch.float32: ("states",)}
"""Chains of which two programs share a multiprocessor with two stages, and do not with ``STAGES``."""


def stages(call: Call, chain: str) -> int:
    """Those of a chain that writes outputs, states or gradients of states. In float32, more do not fit beside outputs."""
    if parts(call) == 3 and chain == "outputs":
        return 2
    programs = call.N * call.H
    return 2 if chain in SHARED[call.p.q.dtype] and programs > call.target.multiprocessors else STAGES


PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""bfloat16 parts of tiles that are operands, by the dtype of inputs: 8, 16 or 24 bits."""


def refuses(call: Call, **given: Tensor | None) -> str | None:
    """Two streams, heads of 64, one anchor in a chunk, and tensors that TMA can copy: q, k, v, a, b and ``given``."""
    p = call.p
    if call.streams != 2 or call.anchors(MOST_DECAY) != C:
        return "it computes two streams whose decays have one anchor in 64 tokens"
    if call.grouped is not None:
        return call.grouped
    if call.K != C or call.V != C:
        return f"K and V must be {C}, these are {call.K} and {call.V}"
    if (why := other_dtype(call, *PARTS) or call.other_rows(C, max(2, parts(call)) * C)) is not None:
        return why
    for name, x in {"q": p.q, "k": p.k, "v": p.v, "a": p.a, "b": p.b, **given}.items():
        if x is not None and x.dtype != p.q.dtype:
            return f"it takes tensors of one dtype, q is {p.q.dtype}, {name} is {x.dtype}"
        if (why := no_matrix(name, x)) is not None:
            return why
    return None


def refuses_backward(call: Backward) -> str | None:
    """Also the gradient of the output is copied in tiles."""
    return refuses(call, d_output=call.d_output)


def avoids_backward(call: Backward) -> str | None:
    """Sequences of one token, on average: what a token reads of itself cancels in the gradients of its decays."""
    tokens = call.B * call.T
    return "gradients of the decays of one token would be rounding errors" if tokens <= call.N else None


def gate(call: Call) -> str:
    """The name of the log decays, or of raw gates."""
    return "g" if call.p.raw is None else "raw"


def parts(call: Call) -> int:
    """The bfloat16 parts of tiles that are operands."""
    return PARTS[call.p.q.dtype]


def stored(call: Call, least: int = 1) -> int:
    """The parts of other tiles in memory, at least ``least``. 0: they are float32, which is less than three parts."""
    return 0 if parts(call) == 3 else max(parts(call), least)


def _tiles(plan: Plan, call: Call, name: str, count: int) -> str:
    """Memory of tiles of all chunks in ``count`` bfloat16 parts, or, 0, in float32."""
    return plan.empty(name, call.chunks(C), call.H, C * (count or 1), C, dtype=torch.bfloat16 if count else torch.float32)


def _steps(plan: Plan, call: Call, piece: int = 0) -> str:
    """Add the memory of M, Q, W and decays of all chunks, and the launch that computes them. The name of Y or, for gradients, of T - I."""
    from ..sm90 import anchored_steps, anchored_steps_float16, anchored_steps_float32

    slots, H, K, solved = call.chunks(C), call.H, call.K, isinstance(call, Backward)
    step, read = (_tiles(plan, call, name, parts(call)) for name in ("step", "read"))
    write = _tiles(plan, call, "write", stored(call, 2))
    more = _tiles(plan, call, "solved", stored(call, 2)) if solved else _tiles(plan, call, "own", stored(call))
    total = plan.empty("total", slots, H, K)
    kernels = (
        anchored_steps.penstock_rwkv7_steps_sm90,
        anchored_steps_float16.penstock_rwkv7_steps_float16_sm90,
        anchored_steps_float32.penstock_rwkv7_steps_float32_sm90,
    )
    plan.launch(
        kernels[parts(call) - 1], call.programs(slots, 1),
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
        K=C, STAGES=stages(call, "outputs" if walk.output else "states"), **walk.constants(call), PARTS=parts(call),
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


def _gradients(plan: Plan, call: Backward, solved: str, dS: str) -> None:
    """Add the gradients of inputs, by ``solved``, T - I, and by the states before chunks and the gradients of those after, ``dS``."""
    from ..sm90 import anchored_gradients, anchored_gradients_float32

    p, H, K, slots, packed, raw = call.p, call.H, call.K, call.chunks(C), call.packed, call.p.raw is not None
    token, slot = Tile(C, K), Tile(C, K, 3)
    names = ("dq", "dk", "dv", "da", "db")
    made = tuple([gradient(plan, call, name, K, dtype=p.v.dtype if name == "dv" else p.q.dtype) for name in names])
    given = p.raw if p.g is None else p.g
    assert given is not None
    dg = gradient(plan, call, "d" + gate(call), K, dtype=given.dtype)
    inputs = ("v", "d_output", "q", "k", "a", "b", "chunk_states", dS)
    if parts(call) < 3:
        plan.launch(
            anchored_gradients.penstock_rwkv7_gradients_sm90, call.programs(slots, 1),
            (*inputs, solved, *made, gate(call), "total", *made, dg, "cu_seqlens"), (p.scale, sequences, tokens, H, *call.strides("g")),
            WARPS, (*[token] * 6, *[slot] * 3, *[token] * 5), K=K, PACKED=packed, RAW=raw, PARTS=parts(call),
        )  # fmt: skip
        return
    dq, dk, dv, da, db = made
    U, Z, kept = _tiles(plan, call, "removed", 0), _tiles(plan, call, "d_removed", 0), plan.empty("kept", slots, H, K)
    plan.launch(
        anchored_gradients_float32.penstock_rwkv7_values_float32_sm90, call.programs(slots, 1),
        (*inputs, solved, gate(call), "total", dv, U, Z, kept, "cu_seqlens"), (p.scale, sequences, tokens, H, *call.strides("g")),
        WARPS, (*[token] * 6, *[slot] * 3), K=K, PACKED=packed, RAW=raw,
    )  # fmt: skip
    plan.launch(
        anchored_gradients_float32.penstock_rwkv7_gradients_float32_sm90, call.programs(slots, 1),
        (*inputs, U, Z, gate(call), "total", kept, dq, dk, da, db, dg, "cu_seqlens"),
        (p.scale, sequences, tokens, H, *call.strides("g")), WARPS, (*[token] * 6, *[slot] * 4), K=K, PACKED=packed, RAW=raw,
    )  # fmt: skip


def _backward(call: Backward) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg`` or ``draw``, ``da``, ``db`` and ``d_initial_state``; with ``state_alone`` only the last."""
    from ..sm90 import anchored_chain

    plan, H, K = Plan(keeps=True), call.H, call.K
    solved = _steps(plan, call)
    if not call.state_alone:
        _chain(plan, call, "read", Walk(sequences, start(call), kept=("", _tiles(plan, call, "chunk_states", stored(call)))))
    last, steps = end(call)
    dS = _tiles(plan, call, "d_chunk_states", stored(call))
    d_initial = plan.empty("d_initial_state", sequences, H, K, K)
    slot = Tile(C, K, 3)
    plan.launch(
        anchored_chain.penstock_rwkv7_chain_bwd_sm90, call.programs(sequences, 1),
        ("step", "read", "d_output", dS, "total", last or d_initial, d_initial, "cu_seqlens"), (sequences, tokens, H, *steps), 4,
        (slot, slot, Tile(C, K), slot),
        K=K, FINAL=last is not None, PACKED=call.packed, STAGES=stages(call, "gradients"), PARTS=parts(call),
    )  # fmt: skip
    if not call.state_alone:
        _gradients(plan, call, solved, dS)
    return plan


SIZES = {"B": 2, "N": 2, "T": 150, "H": 2, "G": 2, "J": 2, "K": 64, "V": 64}
EXAMPLES = tuple([Example("rwkv7", dtype, SIZES, ("g",)) for dtype in PARTS])
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("rwkv7_sm90", _forward, absent, refuses, examples=EXAMPLES)
BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form(
    "rwkv7_bwd_sm90", _backward, absent, refuses_backward, avoids_backward, examples=EXAMPLES
)
PIECES: Form[InPlace, Callable[[Plan, InPlace, str, int], None]] = Form(
    "rwkv7_pieces_sm90", _pieces, absent, refuses, examples=in_place(EXAMPLES)
)
