"""The plain chunk kernels: every row of the table, on every GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from ....call.implementation import Example
from ....gpu.dyadic import lengths
from ....gpu.forms import Form
from ....gpu.plan import Plan, Size
from ....tokens.gpu_calls import batch, sequences, tokens
from ... import inputs
from ..calls import CHANNEL, NONE, SCALAR, Backward, C, Call, Forward, InPlace
from ..portable import anchored_prepare, gradients, pairs_backward, prepare, scalar_gradients, walk, walk_backward

WIDEST = 256
"""Key channels of a head at most: the rows of a state are in the registers of a program, for all of them and a block of value channels."""


def refuses(call: Call) -> str | None:
    """All key channels of a head are one tile. Log decays have been computed."""
    if call.p.raw is not None:
        return "it takes log decays"
    return f"it takes heads of at most K = {WIDEST}, these have {call.K}" if call.K > WIDEST else call.grouped


def pairs(call: Call, low: int) -> str | None:
    """How pairs with decays per channel are computed, for ``explain``. ``low``: tokens of blocks with one anchor, or 0."""
    if call.decay != CHANNEL:
        return None
    count, bound = len(lengths(C, low)), inputs.bound(call.p)
    if not low:
        why = "no bound of the decays is known" if bound is None else f"a bound of {bound:.4g} is too far from 0"
        return f"{count} levels, because {why}"
    return f"{count} levels and " * (count > 0) + f"one anchor in {low} tokens, because decays are at least {bound:.4g}"


def prepared(plan: Plan, call: Call, piece: int = 0, fused: bool = True) -> None:
    """Add the memory of tiles that depend on no states, and the launch that computes them. Other passes over its tokens may take them."""
    slots, H, BK, tile, two = call.chunks(C), call.H, call.BK, call.tile, call.streams == 2
    channel = call.decay == CHANNEL

    def memory(name: str, *shape: Size, dtype: torch.dtype = tile, needed: bool = True) -> str:
        return plan.empty(name, slots, H, *shape, dtype=dtype) if needed else "q"

    tiles = (
        memory("late", 2 * C, C, needed=two), memory("solved", C, C, dtype=torch.float32), memory("ap", C, C), memory("bt", C, BK),
        memory("qr", C, BK, needed=channel), memory("ar", C, BK, needed=channel), memory("kr", C, BK, needed=two),
        memory("total", BK, dtype=torch.float32, needed=channel),
    )  # fmt: skip
    if call.anchored:
        b = call.config("prepare_anchored")
        plan.launch(
            anchored_prepare.penstock_delta_prepare_anchored, call.programs(slots, 1), ("q", "k", "g", "a", "b", *tiles, "cu_seqlens"),
            (call.p.scale, sequences, tokens, H, *call.strides("q", "k", "g", "a", "b")), b.warps, fused=fused, writes=tiles,
            K=call.K, BK=BK, C=C, PACKED=call.packed, PIECE=piece, PRECISION=call.precision,
            SOLVE="bf16" if call.precision == "bf16" else call.solve,
        )  # fmt: skip
        return
    b = call.config("prepare" if channel else "scalar_prepare")
    products = memory("pairs", 2, C, C, dtype=torch.float32)
    plan.launch(
        prepare.penstock_delta_prepare, call.programs(slots, 1),
        ("q", "k", "g", "beta", *call.streamed, *call.matrices(plan), products, *tiles, "cu_seqlens"),
        (call.p.scale, sequences, tokens, H, *call.strides("q", "k", "g", "beta", *call.streamed)), b.warps,
        registers=b.registers, fused=fused, writes=(products, *[name for name in tiles if name != "q"]),
        K=call.K, BK=BK, BJ=b.BJ, C=C, STREAMS=call.streams, AFTER=call.after, GATE=call.decay, LEVELS=len(lengths(C, call.low)),
        ANCHOR=call.low > 0, PACKED=call.packed, PIECE=piece, PRECISION=call.precision, SOLVE=call.solve, STAGES=b.stages,
    )  # fmt: skip


def present(plan: Plan, *names: str) -> tuple[str, ...]:
    """Names of memory; "q" as a dummy for what the plan does not have."""
    return tuple([name if name in plan.memory else "q" for name in names])


TILES = ("ap", "bt", "qr", "ar", "kr", "late", "total")
State = tuple[str | None, tuple[int, ...]]
"""A state's name, None for zeros, and its strides."""
NOTHING: State = (None, (0, 0, 0, 0))


def walked(
    plan: Plan, call: Call, programs: Size, initial: State, output: str | None, final: str, keep: bool, piece: int = 0, slots: str = "",
    fused: bool = True, segments: Size | None = None, values: tuple[str, int, tuple[int, ...]] | None = None,
) -> None:  # fmt: skip
    """Add the launch of the walk forward in time; with ``keep``, the memory of what the backward pass reads.

    ``segments``: tokens of the segments whose walks are side by side. ``values``: a name, V and strides in place of those of v.
    """
    H, K = call.H, call.K
    v, V, steps = values or ("v", call.V, call.strides("v"))
    b = call.config("walk")
    x = states = "q"
    if keep:
        x = plan.empty("x", call.chunks(C), H, C, V, dtype=call.tile)
        states = plan.empty("chunk_states", call.chunks(C), H, K, V, dtype=call.tile)
    plan.launch(
        walk.penstock_delta_walk, call.programs(programs, math.ceil(V / b.BV)),
        ("q", "k", v, "g", "beta", *present(plan, *TILES), initial[0] or final, output or "q", final, x, states, "cu_seqlens",
         slots or "q"),
        (call.p.scale, sequences, tokens, segments or 0, H, *call.strides("q", "k"), *steps, *call.strides("g", "beta"), *initial[1]),
        b.warps, registers=b.registers, fused=fused,
        K=K, V=V, BK=call.BK, BV=b.BV, C=C, STREAMS=call.streams, GATE=call.decay, INITIAL=initial[0] is not None,
        OUTPUT=output is not None, KEEP=keep, PACKED=call.packed, PIECE=piece, SLOTS=bool(slots), SEGMENTS=segments is not None,
        PRECISION=call.precision, STAGES=b.stages,
    )  # fmt: skip


def start(call: Call) -> State:
    """The initial state's name and strides."""
    state = call.p.initial_state
    return NOTHING if state is None else ("initial_state", state.stride())


def forward(call: Forward) -> Plan:
    """``output`` and ``final_state``."""
    plan = Plan(keeps=True)
    output = plan.empty("output", batch, tokens, call.H, call.V, dtype=call.p.v.dtype)
    final = plan.empty("final_state", sequences, call.H, call.K, call.V)
    prepared(plan, call)
    walked(plan, call, sequences, start(call), output, final, keep=False)
    return plan


def gradient(plan: Plan, call: Backward, name: str, *shape: Size, dtype: torch.dtype, needed: bool = True) -> str:
    """Memory of a gradient [B,T,H,...]."""
    return plan.empty(name, batch, tokens, call.H, *shape, dtype=dtype) if needed else "q"


def keeps_tiles(call: Backward) -> bool:
    """Whether other passes may take the tiles of a backward pass. Gradients of the pairs of two streams take the place of pairs."""
    return call.streams == 1 or call.state_alone


def backward(call: Backward) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg``, ``dbeta``, ``da``, ``db`` and ``d_initial_state``. States and X are computed again.

    With ``state_alone`` only ``d_initial_state``, which depends on no states.
    """
    plan, H, K, V = Plan(keeps=keeps_tiles(call)), call.H, call.K, call.V
    prepared(plan, call)
    if not call.state_alone:
        walked(plan, call, sequences, start(call), None, plan.empty("final_state", sequences, H, K, V), keep=True)
    walked_back(plan, call, sequences, end(call), plan.empty("d_initial_state", sequences, H, K, V))
    if not call.state_alone:
        gradients_of_chunks(plan, call)
    return plan


def end(call: Backward) -> State:
    """The name of the gradient of the final state and its strides."""
    return NOTHING if call.d_final_state is None else ("d_final_state", call.d_final_state.stride())


def walked_back(plan: Plan, call: Backward, programs: Size, final: State, initial: str, segments: Size | None = None) -> None:
    """Add the launch of the walk backward in time: ``dv``, ``z``, ``d_chunk_states``, and the gradient of the initial state.

    ``final``: the gradient of the final state; ``segments``: as of ``walked``.
    """
    d_output, slots, H, K, V, b = call.d_output, call.chunks(C), call.H, call.K, call.V, call.config("walk_backward")
    assert d_output is not None
    made = (
        plan.empty("z", slots, H, C, V, dtype=call.tile), gradient(plan, call, "dv", V, dtype=call.p.v.dtype),
        plan.empty("d_chunk_states", slots, H, K, V, dtype=call.tile),
    )  # fmt: skip
    plan.launch(
        walk_backward.penstock_delta_walk_bwd, call.programs(programs, math.ceil(V / b.BV)),
        ("q", "k", "g", "beta", *present(plan, *TILES), "d_output", final[0] or "q", *made, initial, "cu_seqlens"),
        (call.p.scale, sequences, tokens, segments or 0, H, *call.strides("q", "k", "g", "beta"), *d_output.stride(), *final[1]), b.warps,
        registers=b.registers, K=K, V=V, BK=call.BK, BV=b.BV, C=C, STREAMS=call.streams, GATE=call.decay, D_FINAL=final[0] is not None,
        SEGMENTS=segments is not None, PACKED=call.packed, PRECISION=call.precision, STAGES=b.stages,
    )  # fmt: skip


def gradients_of_chunks(plan: Plan, call: Backward) -> None:
    """Add the launches of the gradients that are left after both walks, one program a chunk."""
    p, H, K, V, streams, slots, d_output = call.p, call.H, call.K, call.V, call.streams, call.chunks(C), call.d_output
    assert d_output is not None
    like = partial(gradient, plan, call)
    dq, dk = (like(name, K, dtype=p.of_heads(p.q)) for name in ("dq", "dk"))
    da, db = (like(name, K, dtype=p.of_heads(p.q), needed=streams == 2) for name in ("da", "db"))
    dbeta = like("dbeta", dtype=p.beta.dtype) if p.beta is not None else "q"
    dg = like("dg", *[K] * (call.decay == CHANNEL), dtype=p.g.dtype) if call.decay != NONE and p.g is not None else "q"
    states, arguments = ("x", "z", "chunk_states", "d_chunk_states", "d_output"), ("q", "k", "v", "g", "beta")
    b = call.config("pairs_backward")
    weights = plan.empty("weights", slots, H, 2, C, C, dtype=call.tile)
    straddling = plan.empty("straddling", slots, H, C) if call.decay == SCALAR else "q"
    plan.launch(
        pairs_backward.penstock_delta_pairs_bwd, call.programs(slots, 1),
        ("v", "g", "beta", *present(plan, "pairs"), weights, *present(plan, "late", "solved", "x"), "z", "d_output", straddling, dbeta,
         "cu_seqlens"),
        (p.scale, sequences, tokens, H, *call.strides("v", "g", "beta"), *d_output.stride()), b.warps,
        V=V, BV=b.BV, C=C, STREAMS=streams, GATE=call.decay, PACKED=call.packed, PRECISION=call.precision, SOLVE=call.solve,
        STAGES=b.stages,
    )  # fmt: skip
    if call.decay != CHANNEL:
        b = call.config("scalar_gradients")
        plan.launch(
            scalar_gradients.penstock_delta_scalar_gradients, call.programs(slots, 1),
            ("q", "k", "g", "beta", weights, *states, straddling, dq, dk, dg, "cu_seqlens"),
            (p.scale, sequences, tokens, H, *call.strides("q", "k", "g", "beta"), *d_output.stride()), b.warps,
            K=K, V=V, BJ=b.BJ, BV=b.BV, C=C, GATE=call.decay, PACKED=call.packed, PRECISION=call.precision, STAGES=b.stages,
        )  # fmt: skip
        return
    b = call.config("gradients")
    plan.launch(
        gradients.penstock_delta_gradients, call.programs(slots, math.ceil(K / b.BJ)),
        (*arguments, *call.streamed, *call.matrices(plan), weights, *present(plan, "late"), *states, dq, dk, dg, da, db, "cu_seqlens"),
        (p.scale, sequences, tokens, H, *call.strides(*arguments, *call.streamed), *d_output.stride()), b.warps,
        K=K, V=V, BJ=b.BJ, BV=b.BV, C=C, STREAMS=streams, AFTER=call.after, LEVELS=len(lengths(C, call.low)), ANCHOR=call.low > 0,
        DG=dg != "q", PACKED=call.packed, PRECISION=call.precision,
    )  # fmt: skip


def _pieces(plan: Plan, call: InPlace, output: str, piece: int) -> None:
    """Add the launches for whole pieces, each one chunk. No bit depends on how the kernels are compiled: multiply-adds are not fused."""
    prepared(plan, call, piece, fused=False)
    walked(plan, call, call.with_piece(piece), call.pool, output, "state", False, piece, call.rows, False)


def in_place(examples: tuple[Example, ...]) -> tuple[Example, ...]:
    """The same calls as updates of pools that have a row for each sequence."""
    return tuple(one._replace(sizes={**one.sizes, "P": one.sizes["N"]}) for one in examples)


SIZES = {"B": 2, "N": 2, "T": 70, "H": 2, "G": 2, "J": 2, "K": 24, "V": 40}
EXAMPLES = tuple(Example(variant, torch.float16, SIZES) for variant in ("delta_rule", "gated_delta_rule", "kda", "rwkv7"))
EXAMPLES += (Example("rwkv7", torch.bfloat16, SIZES, ("g",)),)
WIDE = SIZES | {"B": 1, "N": 1, "K": 200}
EXAMPLES += (Example("gated_delta_rule", torch.bfloat16, WIDE), Example("kda", torch.float16, WIDE), Example("dplr", torch.float32, WIDE))
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("delta_chunks", forward, refuses=refuses, examples=EXAMPLES)
BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form("delta_chunks_bwd", backward, refuses=refuses, examples=EXAMPLES)
PIECES: Form[InPlace, Callable[[Plan, InPlace, str, int], None]] = Form(
    "delta_pieces", _pieces, refuses=refuses, examples=in_place(EXAMPLES)
)
