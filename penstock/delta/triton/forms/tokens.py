"""The token-serial kernel, ``recurrent.py``: short calls, and what remains of updates in place after whole chunks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.plan import Plan, contiguous
from ....gpu.target import power
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import NONE, Call, Forward, InPlace
from ..portable import recurrent
from . import raw
from .chunks import start

FEW = 16
"""Up to this many tokens the rounding error of a float32 state that decays at each token, 2^-24 each, stays below its budget."""
ARGUMENTS = ("q", "k", "v", "g", "beta")
"""Tensors of a call. Raw gates take the place of g."""
FULL, REGISTERS = 64, 168
"""Elements of a state that a thread has in a step of a full block, and its registers at most."""
WIDEST = 256
"""Key channels of a head at most: a column of the state is in the registers of a program."""


def refuses(call: Call) -> str | None:
    """All key channels of a head are in one program."""
    return f"it takes heads of at most K = {WIDEST}, these have {call.K}" if call.K > WIDEST else call.grouped


def _launch(
    plan: Plan, call: Call, state: tuple[str, tuple[int, ...]], output: str, final: tuple[str, tuple[int, ...]], initial: bool,
    pending: bool, piece: int = 0, slots: str = "",
) -> None:  # fmt: skip
    b, p = call.config("recurrent") if piece == 0 else call.step_config(), call.p
    names = [name if name != "g" or p.raw is None else "raw" for name in ARGUMENTS]
    what = raw.constants(p)
    registers = REGISTERS if piece and call.cuda and power(call.K) * b.BV == FULL * 32 * b.warps else 0
    plan.launch(
        recurrent.penstock_delta_recurrent, call.programs(sequences, math.ceil(call.V / b.BV)),
        (*names, *call.streamed, "A_log", "dt_bias", state[0], output, final[0], "cu_seqlens", slots or "q"),
        (p.scale, p.lower_bound or 0.0, tokens, call.H, *call.strides(*ARGUMENTS, *call.streamed), *raw.parameter_strides(p), *state[1],
         *final[1]), b.warps, registers=registers, fused=piece == 0,
        K=call.K, V=call.V, BK=power(call.K), BV=b.BV, STREAMS=call.streams, DECAY=call.decay, INITIAL=initial, PACKED=call.packed,
        SLOTS=bool(slots), PENDING=pending, PIECE=piece, ONE=piece > 0 and call.T == 1 and not call.packed, CUDA=call.cuda,
        **{name: what[name] for name in ("UNIT", "LOGITS", "RAW", "BIAS")},
    )  # fmt: skip


def _forward(call: Forward) -> Plan:
    """``output`` and ``final_state`` token by token."""
    plan, own = Plan(), contiguous((0, call.H, call.K, call.V))
    output = plan.empty("output", batch, tokens, call.H, call.V, dtype=call.p.v.dtype)
    final = plan.empty("final_state", sequences, call.H, call.K, call.V)
    initial, steps = start(call)
    first = (initial, steps) if initial else (final, own)
    pending = call.decay != NONE and (call.packed or call.T > FEW)  # the host does not know the lengths of packed sequences
    _launch(plan, call, first, output, (final, own), initial is not None, pending)
    return plan


def _in_place(plan: Plan, call: InPlace, output: str, piece: int) -> None:
    """Add the launch for the tokens after the pieces of ``piece`` tokens. No decays stay pending."""
    _launch(plan, call, call.pool, output, call.pool, True, False, piece, call.rows)


SIZES = {"B": 2, "N": 2, "T": 5, "H": 2, "G": 2, "J": 2, "K": 24, "V": 40}
EXAMPLES = tuple(Example(variant, torch.float16, SIZES) for variant in ("gated_delta_rule", "kda", "rwkv7"))
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("delta_recurrent", _forward, refuses=refuses, examples=EXAMPLES)
IN_PLACE: Form[InPlace, Callable[[Plan, InPlace, str, int], None]] = Form(
    "delta_in_place", _in_place, refuses=refuses, examples=tuple(one._replace(sizes=SIZES | {"P": 2}) for one in EXAMPLES)
)
