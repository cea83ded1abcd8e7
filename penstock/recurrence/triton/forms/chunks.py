"""The plain chunk kernels, forward and backward: every size and layout, on every GPU."""

from __future__ import annotations

import math

import torch

from ....call.implementation import Example
from ....gpu.dyadic import lengths
from ....gpu.plan import Plan, strides
from ....gpu.target import power
from ....tokens.gpu_calls import sequences, tokens
from ..calls import CHANNEL, Backward, Call, Forward
from ..portable import chunk_backward, chunk_forward
from ..states import Segments, before_chunks, segments_before_chunks
from ..table import LEAST
from . import states
from .passes import BackwardForm, ForwardForm, gradients, gradients_of_operands, gradients_of_parameters, results, start, states_form


def refuses(call: Call) -> str | None:
    """The kernels read the previous state where decays are per channel."""
    if call.previous and call.decay != CHANNEL:
        return "it reads the previous state only with decays per channel"
    return None


def _segments(call: Forward) -> Segments | None:
    b = call.config("forward")
    L = call.segment(call.unit(b.C), math.ceil(call.V / b.BV), b.programs_per_sm)
    return None if L is None else Segments(states_form(FORWARD.parts, call), b.C, L)


def _forward(call: Forward) -> Plan:
    plan, p, b = Plan(), call.p, call.config("forward")
    C, blocks = b.C, math.ceil(call.V / b.BV)
    found = results(plan, call, call.every(C))
    begin = start(plan, call, found, _segments(call))
    first, steps = begin.state if begin.state is not None else (found.final, (0, 0, 0, 0))
    programs = call.programs(begin.owners, blocks)
    resume = plan.empty("resume", programs, dtype=torch.int32) if call.decay == CHANNEL else "q"
    for part in call.parts:
        plan.launch(
            chunk_forward.penstock_chunk_fwd, programs,
            ("q", "k", "v", "g", "u", call.levels(plan, C), first, found.output, found.final, found.chunk_states or "q", resume,
             "cu_seqlens", "q"),
            (p.scale, sequences, tokens, begin.L or 0, call.H, *strides(p.q, p.k, p.v), *call.gate, *call.bonus, *steps), b.warps,
            **call.flags, BK=power(call.K, LEAST), BV=b.BV, C=C, LEVELS=len(lengths(C)), PREVIOUS=call.previous, REVERSE=p.reverse,
            SEGMENTS=begin.L is not None, INITIAL=begin.state is not None, FINAL=begin.L is None, EVERY=found.every, STAGES=b.stages,
            PART=part, PIECE=0, SLOTS=False,
        )  # fmt: skip
    return plan


def _backward(call: Backward) -> Plan:
    plan, p, b = Plan(), call.p, call.config("backward")
    C, form = b.C, states_form(BACKWARD.parts, call)
    found = gradients(plan, call, form, C)
    dq, dk, dv = gradients_of_operands(plan, call)
    dS = before_chunks(plan, call, form, found.terms, C, call.stored(C))
    d_gate, du = gradients_of_parameters(plan, call, C)
    programs = call.programs(call.chunks(C), 1)
    strong = plan.empty("strong", programs, dtype=torch.int32) if call.decay == CHANNEL else "q"
    for part in call.parts:
        plan.launch(
            chunk_backward.penstock_chunk_bwd, programs,
            ("q", "k", "v", "g", "u", call.levels(plan, C), "d_output", found.S, dS, dq, dk, dv, d_gate, du, strong, "cu_seqlens"),
            (p.scale, sequences, tokens, call.H, *strides(p.q, p.k, p.v), *call.gate, *call.bonus, *call.upstream.stride()), b.warps,
            **call.flags, BK=b.BK, BV=b.BV, C=C, LEVELS=len(lengths(C)), DG=p.g is not None and call.dg, PREVIOUS=call.previous,
            REVERSE=p.reverse, PART=part,
        )  # fmt: skip
    return plan


SIZES = {"B": 2, "N": 2, "T": 70, "H": 2, "G": 2, "K": 24, "V": 40}
EXAMPLES = tuple(Example(variant, torch.float16, SIZES) for variant in ("linear_attention", "simple_gla", "rwkv6"))
FORWARD: ForwardForm = ForwardForm("chunk_fwd", _forward, refuses=refuses, parts=states.BESIDE_PLAIN, examples=EXAMPLES, segments=_segments)
BACKWARD: BackwardForm = BackwardForm(
    "chunk_bwd", _backward, refuses=refuses, parts=states.BESIDE_PLAIN, examples=EXAMPLES, chunk=lambda call: call.config("backward").C,
    segments=lambda call: segments_before_chunks(call, states_form(BACKWARD.parts, call), call.config("backward").C),
)  # fmt: skip
