"""RWKV-7 on Hopper where a chunk has one anchor, with the tiles of chunks by ``sm90/anchored_prepare.py``: both passes.

The launches after it are those of ``forms/chunks.py`` or, where these fill the GPU, of ``forms/segments.py``; of the backward pass the last
one is that of ``forms/anchored_backward_sm90.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent
from ....gpu.plan import Plan
from ....tokens.gpu_calls import sequences, tokens
from ..calls import Backward, C, Call, Forward
from . import anchored_backward_sm90, chunks, segments

CHOSEN = False
"""Whether calls take these forms where no other is named. Their first kernel was not timed yet."""
REGISTERS = 168
"""Of a thread: three programs on a multiprocessor, which their shared memory allows, too. It spills up to 100 bytes."""


def avoids(call: Call) -> str | None:
    """The portable kernel prepares chunks."""
    return None if CHOSEN else "its first kernel was not timed yet"


def tiles(plan: Plan, call: Call) -> None:
    """Add the memory of ``chunks.prepared`` and the launch that computes it. T - I is for gradients: a forward pass has none."""
    from ..sm90 import anchored_prepare

    slots, H, K, solved = call.chunks(C), call.H, call.K, isinstance(call, Backward)
    late = plan.empty("late", slots, H, 2 * C, C, dtype=call.tile)
    ap = plan.empty("ap", slots, H, C, C, dtype=call.tile)
    bt, qr, ar, kr = (plan.empty(name, slots, H, C, K, dtype=call.tile) for name in ("bt", "qr", "ar", "kr"))
    total = plan.empty("total", slots, H, K)
    T = plan.empty("solved", slots, H, C, C) if solved else "q"
    token, slot = Tile(C, K), Tile(C, K, 3)
    plan.launch(
        anchored_prepare.penstock_rwkv7_prepare_sm90, call.programs(slots, 1),
        ("q", "a", "k", "b", late, ap, bt, qr, ar, kr, "g", T, total, "cu_seqlens"),
        (call.p.scale, sequences, tokens, H, *call.strides("g")), 4, (*[token] * 4, *[slot] * 6), REGISTERS,
        writes=(late, ap, bt, qr, ar, kr, total, *[T] * solved), K=K, PACKED=call.packed, SOLVED=solved,
    )  # fmt: skip


def _forward(call: Forward) -> Plan:
    """``output`` and ``final_state``."""
    by = segments.forward if segments.avoids(call) is None else chunks.forward
    return by(call, tiles)


def _backward(call: Backward) -> Plan:
    """The gradients of ``forms/chunks.py``."""
    return anchored_backward_sm90.backward(call, tiles)


SIZES = anchored_backward_sm90.SIZES | {"V": 40}
EXAMPLES = (*anchored_backward_sm90.EXAMPLES, Example("rwkv7", torch.bfloat16, SIZES, ("g",)))
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form(
    "rwkv7_prepare_sm90", _forward, absent, anchored_backward_sm90.refuses_tiles, avoids, examples=EXAMPLES
)
BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form(
    "rwkv7_prepare_bwd_sm90", _backward, absent, anchored_backward_sm90.refuses, avoids, examples=anchored_backward_sm90.EXAMPLES
)
