"""Walks over whole sequences without decays per channel on Hopper: ``scalar_forward.py`` and ``scalar_backward.py``.
The state, or its gradient, stays in registers. Heads have 64 value channels.
"""

from __future__ import annotations

import torch

from ....call.implementation import Example
from ....gpu.hopper import Tile, absent
from ....gpu.plan import Plan
from ....tokens.gpu_calls import sequences, tokens
from ..calls import CHANNEL, NONE, Backward, Call, Forward
from ..heads import MEDIUM, SMALL
from . import sm90, states
from .passes import BackwardForm, ForwardForm, gradients, gradients_of_operands, gradients_of_parameters, results, states_form

KEYS = {SMALL.value: (4, 0), MEDIUM.value: (8, 128)}
"""By K: warps of the forward kernel, and the limit of registers of their threads, 0 if none is needed. Two programs fit on a
multiprocessor, also of the backward kernel, which has the second pair at either K."""
WALKS = 64
"""Sequences times heads from which on walks are faster at 128 key channels (measured on an H200). At 64, as many as multiprocessors."""


def _refuses(call: Call) -> str | None:
    if call.decay == CHANNEL:
        return "it computes no decays per channel"
    if call.previous:
        return "it reads the updated state"
    if call.p.partial:
        return "its results are 16 bits, those of a block of a wide head are float32"
    if call.p.q.dtype != torch.bfloat16:
        return f"it takes bfloat16, this is {call.p.q.dtype}"
    if call.p.sizes["T"] <= sm90.C:
        return f"it takes more than {sm90.C} tokens, these are {call.p.sizes['T']}"
    return sm90.size("K", call.K, tuple(KEYS)) or sm90.size("V", call.V, (sm90.C,)) or sm90.not_copied(call, shared=True)


def _avoids(call: Call) -> str | None:
    """A program walks over a whole sequence of a head."""
    least, programs = call.target.multiprocessors, call.N * call.H
    least = min(least, WALKS) if MEDIUM.value == call.K else least
    return None if least <= programs else f"slower with fewer than {least} programs, one for each sequence and head, these are {programs}"


def _heads(call: Call) -> tuple[int, int]:
    """Channels between heads of q and of k; 0 if all heads share one."""
    p = call.p
    return (p.q.stride(2), p.k.stride(2)) if p.sizes["H"] > 1 else (call.K, call.K)


def _tiles(call: Call) -> tuple[Tile, ...]:
    """Of q, k, v, the output (or its gradient) and states before chunks."""
    return *[Tile(sm90.C, call.K)] * 2, *[Tile(sm90.C, call.V)] * 2, Tile(call.K, call.V, 3)


def _forward(call: Forward) -> Plan:
    plan, (warps, registers) = Plan(), KEYS[call.K]
    found = results(plan, call, call.every(sm90.C, over=sm90.C))
    state = call.p.initial_state
    first, steps = ("initial_state", state.stride()) if state is not None else (found.final, (0, 0, 0, 0))
    from ..sm90 import scalar_forward

    plan.launch(
        scalar_forward.penstock_scalar_fwd_sm90, call.programs(sequences, 1),
        ("q", "k", "v", found.output, found.chunk_states or found.output, "g", first, found.output, found.final, "cu_seqlens"),
        (call.p.scale, sequences, tokens, call.H, *_heads(call), *call.gate[:3], *steps), warps, _tiles(call), registers,
        K=call.K, DECAYS=call.decay != NONE, INITIAL=state is not None, KEEP=found.every > 0, PACKED=call.packed,
    )  # fmt: skip
    return plan


def _backward(call: Backward) -> Plan:
    from ..sm90 import scalar_backward

    plan, (warps, registers) = Plan(), KEYS[MEDIUM.value]
    found = gradients(plan, call, states_form(states.BESIDE_PLAIN, call), sm90.C)
    dq, dk, dv = gradients_of_operands(plan, call)
    d_gate, _ = gradients_of_parameters(plan, call, sm90.C)
    last, ends = found.d_start if found.d_start is not None else ("q", (0, 0, 0, 0))
    tiles = _tiles(call)
    plan.launch(
        scalar_backward.penstock_scalar_bwd_sm90, call.programs(sequences, 1),
        ("q", "k", "v", "d_output", found.S, dq, dk, dv, "g", last, dq, dk, dv, d_gate, found.d_initial or "q", "cu_seqlens"),
        (call.p.scale, sequences, tokens, call.H, *_heads(call), *call.gate[:3], *ends), warps, (*tiles, *tiles[:3]), registers,
        DECAYS=call.decay != NONE, STATIC=call.static, DG=d_gate != "q", LAST=found.d_start is not None,
        FIRST=found.d_initial is not None, PACKED=call.packed,
    )  # fmt: skip
    return plan


def _examples(*keys: int) -> tuple[Example, ...]:
    sizes = {"B": 1, "N": 1, "T": 130, "H": 2, "G": 2, "V": 64}
    return tuple(Example(variant, torch.bfloat16, sizes | {"K": K}) for variant in ("linear_attention", "simple_gla") for K in keys)


FORWARD = ForwardForm("scalar_fwd_sm90", _forward, absent, _refuses, _avoids, examples=_examples(64, 128))
BACKWARD = BackwardForm("scalar_bwd_sm90", _backward, absent, _refuses, _avoids, states.BESIDE_PLAIN, _examples(64, 128), chunk=sm90.chunk)
