"""Updates in place: the chunk kernels for the pieces of each sequence, in order from its beginning, without segments."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.dyadic import lengths
from ....gpu.forms import Form
from ....gpu.hopper import absent
from ....gpu.plan import Plan, strides
from ....gpu.target import power
from ....tokens.gpu_calls import sequences, tokens
from ..calls import InPlace
from ..portable import chunk_forward
from ..table import LEAST
from . import channels_sm90, chunks, sm90

PiecesForm = Form[InPlace, Callable[[Plan, InPlace, str, int], bool]]
"""Adds the launch for pieces of a number of tokens. Returns whether it lets the next launch begin early."""


def _sm90(plan: Plan, call: InPlace, output: str, piece: int) -> bool:
    state, slots = call.p.state, "slots" if call.p.slots is not None else "q"
    channels_sm90.launch_forward(
        plan, call, call.with_piece(piece), 0, output, "state", "q", "state", state.stride(), slots, False, SEGMENTS=False, INITIAL=True,
        FINAL=True, EVERY=0, PIECE=piece, ROWS_GIVEN=call.p.slots is not None, NARROW=state.element_size() < 4, EARLY=False,
    )  # fmt: skip
    return sm90.blocks(call.p) == 1


def _plain(plan: Plan, call: InPlace, output: str, piece: int) -> bool:
    """All decays, in chunks that divide a piece."""
    p, b, state = call.p, call.config("forward"), call.p.state.stride()
    C, slots = min(b.C, piece), p.slots is not None
    plan.launch(
        chunk_forward.penstock_chunk_fwd, call.programs(call.with_piece(piece), math.ceil(call.V / b.BV)),
        ("q", "k", "v", "g", "u", call.levels(plan, C), "state", output, "state", "q", "q", "cu_seqlens", "slots" if slots else "q"),
        (p.scale, sequences, tokens, 0, call.H, *strides(p.q, p.k, p.v), *call.gate, *call.bonus, *state), b.warps, fused=False,
        **call.flags, SEGMENTS=False, INITIAL=True, FINAL=True, EVERY=0, PIECE=piece, PREVIOUS=call.previous, BK=power(call.K, LEAST),
        BV=b.BV, C=C, LEVELS=len(lengths(C)), REVERSE=False, STAGES=b.stages, PART=call.parts[-1], SLOTS=slots,
    )  # fmt: skip
    return False


SIZES = {"B": 2, "N": 2, "P": 2, "T": 67, "H": 1, "G": 1}
HOPPER: PiecesForm = Form(
    "channel_pieces_sm90", _sm90, absent, channels_sm90.refuses_forward, channels_sm90.avoids_forward,
    examples=tuple(
        Example("rwkv6", dtype, SIZES | {"T": 128, "K": K, "V": 64})
        for dtype, K in ((torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 64), (torch.bfloat16, 256))
    ),
)  # fmt: skip
PLAIN: PiecesForm = Form(
    "chunk_pieces", _plain, refuses=chunks.refuses,
    examples=tuple(Example(variant, torch.float16, SIZES | {"K": 24, "V": 40}) for variant in ("simple_gla", "rwkv6")),
)  # fmt: skip
