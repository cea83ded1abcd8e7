"""The token-serial kernels, ``recurrent.py`` and ``recurrent_backward.py``: whole sequences forward and backward, updates in place."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.plan import Plan, Size, Sizes, contiguous, strides
from ....gpu.target import power
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import Backward, InPlace, Whole
from ..portable import recurrent, recurrent_backward
from .passes import BackwardForm

SPAN = 16
"""Tokens between the states that the backward pass stores; states between them are recomputed. Each state has two more rows, for pending
decays."""
REGISTERS = 168
"""Of a thread with 64 float32 of a state, at most. Without a limit the compiler takes up to 222, and fewer programs share a multiprocessor.
One NVIDIA H200, gla, 128 sequences with slots: 38.2 us with 168, 40.4 without a limit, 39.4 with 144, 46.5 with 128."""


def _forward(call: Whole) -> Plan:
    plan, p = Plan(), call.p
    b, own = call.config("recurrent"), contiguous((0, call.H, call.K, call.V))
    output = plan.empty("output", batch, tokens, call.H, call.V, dtype=p.summand(p.v))
    final = plan.empty("final_state", sequences, call.H, call.K, call.V)
    state = p.initial_state
    first = state.stride() if state is not None else own
    plan.launch(
        recurrent.penstock_recurrent_fwd, call.programs(sequences, math.ceil(call.V / b.BV)),
        ("q", "k", "v", "g", "u", "initial_state" if state is not None else final, output, final, "cu_seqlens", "q"),
        (p.scale, tokens, call.H, *strides(p.q, p.k, p.v), *call.gate, *call.bonus, *first, *own),
        b.warps, K=call.K, V=call.V, BK=power(call.K), BV=b.BV, DECAY=call.decay, PREVIOUS=call.previous, INITIAL=state is not None,
        PACKED=call.packed, REVERSE=p.reverse, SLOTS=False, PENDING=call.pending, PIECE=0, ONE=False, CUDA=call.cuda, EARLY=False,
    )  # fmt: skip
    return plan


def _backward(call: Backward) -> Plan:
    """All but dv are float32 partial sums of blocks of V, which the caller adds."""
    plan, p, b = Plan(), call.p, call.config("recurrent")
    d_output, d_final, state, H, K, V = call.upstream, call.d_final_state, p.initial_state, call.H, call.K, call.V
    BK, NV = power(K), math.ceil(V / b.BV)

    def scratch(s: Sizes) -> int:
        kept = s["N"] * (SPAN + 1) + s["T"] // SPAN if call.packed else s["N"] * (SPAN + math.ceil(s["T"] / SPAN))
        return kept * H * NV * BK * (b.BV + 2)

    kept = plan.empty("kept", scratch)
    dq, dk = (plan.empty(name, NV, batch, tokens, H, K) for name in ("dq", "dk"))
    dv = plan.empty("dv", batch, tokens, H, V, dtype=p.summand(p.v))
    dg = du = "q"
    if p.g is not None:
        axes: dict[str, Size] = {"B": batch, "T": tokens, "H": H, "K": K}
        dg = plan.empty("dg", NV, *(sequences,)[: call.static], *[axes[axis] for axis in p.variant.decay])
    if p.u is not None:
        du = plan.empty("du", NV, sequences, H, K)
    d_initial = plan.empty("d_initial_state", sequences, H, K, V)
    own = contiguous((0, H, K, V))
    first, last = (x.stride() if x is not None else own for x in (state, d_final))
    plan.launch(
        recurrent_backward.penstock_recurrent_bwd, call.programs(sequences, NV),
        ("q", "k", "v", "g", "u", "initial_state" if state is not None else d_initial, "d_output",
         "d_final_state" if d_final is not None else d_initial, dq, dk, dv, dg, du, d_initial, kept, "cu_seqlens"),
        (p.scale, sequences, tokens, H, lambda s: s["B"] * s["T"], *strides(p.q, p.k, p.v), *call.gate, *call.bonus, *first,
         *d_output.stride(), *last),
        b.warps, K=K, V=V, BK=BK, BV=b.BV, DECAY=call.decay, STATIC=call.static, PREVIOUS=call.previous, INITIAL=state is not None,
        D_FINAL=d_final is not None, PACKED=call.packed, REVERSE=p.reverse, SPAN=SPAN, PENDING=call.pending,
    )  # fmt: skip
    return plan


def _in_place(plan: Plan, call: InPlace, output: str, piece: int, early: bool) -> None:
    """Add the launch for the tokens after the pieces of ``piece`` tokens. No decays stay pending.

    ``early``: it begins while the launch of the pieces runs, so sequences without a piece do not wait for it.
    """
    p, b = call.p, call.step_config()
    state, slots = p.state.stride(), p.slots is not None
    full = call.K * b.BV // (32 * b.warps) == 64 and power(call.K) == call.K  # gla at K = 100 spills 432 bytes with the limit, none without
    plan.launch(
        recurrent.penstock_recurrent_fwd, call.programs(sequences, math.ceil(call.V / b.BV)),
        ("q", "k", "v", "g", "u", "state", output, "state", "cu_seqlens", "slots" if slots else "q"),
        (p.scale, tokens, call.H, *strides(p.q, p.k, p.v), *call.gate, *call.bonus, *state, *state), b.warps,
        registers=REGISTERS if call.cuda and full else 0, fused=False, early=early, K=call.K, V=call.V, BK=power(call.K), BV=b.BV,
        DECAY=call.decay, PREVIOUS=call.previous, INITIAL=True, PACKED=call.packed, REVERSE=False, SLOTS=slots, PENDING=False, PIECE=piece,
        ONE=call.T == 1 and not call.packed, CUDA=call.cuda, EARLY=early,
    )  # fmt: skip


SIZES = {"B": 2, "N": 2, "T": 5, "H": 2, "G": 2, "K": 24, "V": 40}
VARIANTS = ("simple_gla", "rwkv6")
EXAMPLES = tuple(Example(variant, torch.float16, SIZES) for variant in VARIANTS)
FORWARD: Form[Whole, Callable[[Whole], Plan]] = Form("recurrent_fwd", _forward, examples=EXAMPLES)
BACKWARD = BackwardForm("recurrent_bwd", _backward, examples=EXAMPLES, chunk=lambda call: SPAN)
IN_PLACE: Form[InPlace, Callable[[Plan, InPlace, str, int, bool], None]] = Form(
    "recurrent_in_place", _in_place, examples=tuple(Example(variant, torch.float16, SIZES | {"P": 2}) for variant in VARIANTS)
)
