"""Heads of 256 key channels on Hopper: ``channel_weights.py`` computes the weights of all chunks at once, then ``channel_walk.py`` walks
over chunks. Forward, the walk computes the outputs. Backward in time it computes dv and the state's gradients, for
``channel_backward.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.hopper import Tile, absent
from ....gpu.plan import Plan, Size, Sizes
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import Backward, Call, Forward
from ..heads import LARGE
from ..states import Segments, State, before_segments
from . import channels_sm90, sm90, states
from .passes import BackwardForm, ForwardForm, gradients, gradients_of_operands, gradients_of_parameters, results, start, states_form

KEYS = (LARGE.value,)
"""K of the heads."""
WEIGHTS = (8, 128)
"""Warps of ``channel_weights``, and registers of their threads. Two programs fit on a multiprocessor."""
LONG = 4096
"""Tokens from which on sequences of few programs are cut into segments."""


def refuses(call: Call) -> str | None:
    """Sizes of heads and layouts."""
    if sm90.parts(call.p):
        return "it takes 16 bits, these are float32"
    return (
        sm90.other_decays(call)
        or sm90.size("K", call.K, KEYS)
        or sm90.multiple("V", call.V, sm90.BV)
        or sm90.far_decays(call.p)
        or sm90.not_copied(call)
    )


def _avoids_forward(call: Call) -> str | None:
    return sm90.plain_in_table(call.config("forward"))


def segment(call: Call) -> Callable[[Sizes], int] | None:
    """Tokens in a segment of the walk. Predicted, not measured: shorter walks cost less than the states of segments."""
    each = call.V // sm90.BV
    return call.segment(sm90.C, each, 1) if call.T >= LONG and 4 * call.N * call.H * each <= call.target.multiprocessors else None


def values(call: Call, L: Size | None) -> int:
    """Value channels of a program of the walk: 64 if its programs are few."""
    programs = call.N * call.H * (call.V // 64)
    return 64 if L is not None or call.V % 128 or programs <= call.target.multiprocessors else 128


def _half(call: Call) -> bool:
    """Whether operands without a bound are multiplied by powers of two."""
    return call.p.k.dtype == torch.float16


def _scale(call: Call) -> tuple[float, float]:
    """The factors of ``scale`` that the weights and the walk apply. float16: one of at most 1, which fits operands, and a power of two."""
    scale = call.p.scale
    unit = 2.0 ** min(max(math.frexp(scale)[1], -60), 100) if _half(call) else 1.0  # products with it fit float32
    return scale / unit, unit


def weights(plan: Plan, call: Call, adjoint: bool) -> None:
    """Add the launch for ``weights``, ``read``, ``rest``, ``totals`` and ``powers``, which the walk reads."""
    from ..sm90 import channel_weights

    slots, dtype, half = call.chunks(sm90.C), call.p.k.dtype, _half(call)
    made = (
        plan.empty("weights", slots, call.H, sm90.C, sm90.C, dtype=dtype),
        *(plan.empty(name, batch, tokens, call.H, call.K, dtype=dtype) for name in ("read", "rest")),
        plan.empty("totals", slots, call.H, call.K),
        plan.empty("powers", slots, call.H, sm90.C) if half else "totals",
    )
    (g_b, g_t, g_h, g_k), (warps, registers) = call.gate, WEIGHTS
    plan.launch(
        channel_weights.penstock_channel_weights_sm90, call.programs(slots, 1), ("q", "k", "g", "u", *made, "cu_seqlens"),
        (_scale(call)[0], sequences, tokens, g_b, g_h, *call.bonus), warps, (Tile(sm90.C, sm90.BV),) * 2, registers,
        g_t=g_t, g_k=g_k, H=call.H, K=call.K, PREVIOUS=call.previous, PACKED=call.packed, ROW_POWERS=half and not adjoint,
    )  # fmt: skip


def walk(
    plan: Plan, call: Call, y: str, output: str, first: State | None, last: str | None, L: Size | None, stored: str | None, every: int,
    adjoint: bool,
) -> None:  # fmt: skip
    """Add the walk: ``output`` from ``y``, and the states before every ``every`` tokens in ``stored``.

    ``first``: the state to start from; ``last``: the name of the final one. L: tokens of a segment; ``first`` then has one for each.
    """
    from ..sm90 import channel_walk

    BV, half = values(call, L), _half(call)
    tile, keys = Tile(sm90.C, BV), Tile(sm90.C, call.K)
    read, rest = ("rest", "read") if adjoint else ("read", "rest")
    in_tiles = output if plan.memory[output][1].itemsize == 2 else y
    powers, unit = "powers" if half else "totals", _scale(call)[1]
    of_S = unit if adjoint else 1.0
    of_states = (Tile(call.K // 2, BV, 3) if stored is not None else tile,) if not half else ()
    name, steps = first if first is not None else ("totals", (0, 0, 0, 0))
    plan.launch(
        channel_walk.penstock_channel_walk_sm90, call.programs(call.chunks(L) if L is not None else sequences, call.V // BV),
        (read, "weights", y, rest, in_tiles, stored if stored is not None else y, "totals", powers, name, output,
         last if last is not None else "totals", "cu_seqlens"),
        (unit, of_S, 1 / of_S, sequences, tokens, L if L is not None else 0, call.H, *steps), BV // 16,
        (keys, Tile(sm90.C, sm90.C, 3), tile, keys, tile, *of_states),
        K=call.K, V=call.V, BV=BV, SEGMENTS=L is not None, INITIAL=first is not None, FINAL=last is not None, EVERY=every,
        ADJOINT=adjoint, PACKED=call.packed,
    )  # fmt: skip


def segments(call: Call) -> Segments | None:
    """The segments of a walk, forward or backward in time."""
    L = segment(call)
    return None if L is None else Segments(states_form(states.BESIDE_PLAIN, call), sm90.C, L)


def _forward(call: Forward) -> Plan:
    plan = Plan()
    found = results(plan, call, call.every(sm90.C, over=sm90.C))
    begin = start(plan, call, found, segments(call))
    weights(plan, call, False)
    last = None if begin.L is not None else found.final
    walk(plan, call, "v", found.output, begin.state, last, begin.L, found.chunk_states, found.every, False)
    return plan


def _backward(call: Backward) -> Plan:
    plan, C = Plan(), sm90.C
    found = gradients(plan, call, states_form(states.BESIDE_PLAIN, call), C)
    operands = gradients_of_operands(plan, call)
    dS = plan.empty("d_chunk_states", call.chunks(C), call.H, call.K, call.V, dtype=call.stored(C))
    of, begin, last = segments(call), found.d_start, found.d_initial
    if of is not None:
        begin, last = before_segments(plan, call, of, found.terms), None
    weights(plan, call, True)
    walk(plan, call, "d_output", operands[2], begin, last, None if of is None else of.L, dS, C, True)
    channels_sm90.launch_backward(plan, call, found.S, dS, operands, gradients_of_parameters(plan, call, C))
    return plan


SIZES = {"B": 1, "N": 1, "T": 70, "H": 1, "G": 1, "K": 256, "V": 128}
EXAMPLES = tuple(Example(variant, dtype, SIZES) for variant, dtype in (("gla", torch.bfloat16), ("rwkv6", torch.float16)))
FORWARD = ForwardForm("chunk_scalar_fwd_sm90", _forward, absent, refuses, _avoids_forward, states.BESIDE_PLAIN, EXAMPLES, segments=segments)
BACKWARD = BackwardForm(
    "chunk_scalar_bwd_sm90", _backward, absent, lambda call: refuses(call) or channels_sm90.refuses_backward(call),
    channels_sm90.avoids_backward, states.BESIDE_PLAIN, EXAMPLES, chunk=sm90.chunk, segments=segments,
)  # fmt: skip
