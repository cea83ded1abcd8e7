"""The forward pass of RWKV-7 on Hopper where a chunk has one anchor: tiles by ``sm90/anchored_prepare.py``, then the portable walk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent, tiled
from ....gpu.plan import Plan
from ....tokens.gpu_calls import sequences, tokens
from ..calls import Backward, C, Call, Forward
from . import chunks, segments

ROWS = 1 << 31
"""Rows of a matrix that is copied in tiles are numbered by 32-bit integers."""


def refuses(call: Call, **given: Tensor | None) -> str | None:
    """Two streams in bfloat16, 64 key channels, one anchor in a chunk, and tensors that TMA can copy: q, k, a, b and ``given``."""
    p = call.p
    if not call.anchored:
        return "it computes two streams whose decays have one anchor in 64 tokens"
    if p.groups:
        return "it takes q, k, a and b of every head of v"
    if call.K != C:
        return f"K must be {C}, this is {call.K}"
    if not 0 < p.sizes["B"] * p.sizes["T"] * call.H < ROWS:
        return f"it takes up to 2**31 tokens of all heads, this call has {p.sizes['B'] * p.sizes['T'] * call.H}"
    for name, x in {"q": p.q, "k": p.k, "a": p.a, "b": p.b, **given}.items():
        if x is not None and x.dtype != torch.bfloat16:
            return f"it takes bfloat16, {name} is {x.dtype}"
        if x is not None and not tiled(x):
            return f"{name} must be [B,T,H * {C}] with rows at multiples of 16 bytes, its strides are {x.stride()}"
    return None


def refuses_values(call: Call, **given: Tensor | None) -> str | None:
    """The same for kernels that read v, of 64 channels, and ``given``."""
    if call.anchored and call.V != C:
        return f"V must be {C}, this is {call.V}"
    return refuses(call, v=call.p.v, **given)


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
        (call.p.scale, sequences, tokens, H, *call.strides("g")), 4, (*[token] * 4, *[slot] * 6),
        writes=(late, ap, bt, qr, ar, kr, total, *[T] * solved), K=K, PACKED=call.packed, SOLVED=solved,
    )  # fmt: skip


def _forward(call: Forward) -> Plan:
    """``output`` and ``final_state``, by segments where these fill the GPU."""
    by = segments.forward if segments.avoids(call) is None else chunks.forward
    return by(call, tiles)


SIZES = {"B": 2, "N": 2, "T": 150, "H": 2, "G": 2, "J": 2, "K": 64, "V": 64}
EXAMPLES = tuple(Example("rwkv7", torch.bfloat16, SIZES | {"V": V}, ("g",)) for V in (64, 40))
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("rwkv7_prepare_sm90", _forward, absent, refuses, examples=EXAMPLES)
