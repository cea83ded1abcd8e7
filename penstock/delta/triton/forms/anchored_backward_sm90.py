"""The backward pass of RWKV-7 on Hopper where a chunk has one anchor: the portable walks, then one launch for all gradients but dv."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent, tiled
from ....gpu.plan import Plan
from ....tokens.gpu_calls import sequences, tokens
from ..calls import Backward, C, Call
from . import chunks, segments

ROWS = 1 << 31
"""Rows of a matrix that is copied in tiles are numbered by 32-bit integers."""
WARPS = 8


def refuses_tiles(call: Call, **given: Tensor | None) -> str | None:
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


def refuses(call: Backward) -> str | None:
    """Such tensors with values of 64 channels."""
    if call.anchored and call.V != C:
        return f"V must be {C}, this is {call.V}"
    return refuses_tiles(call, v=call.p.v, d_output=call.d_output)


def _gradients(plan: Plan, call: Backward) -> None:
    """Add the launch of the gradients that are left after both walks, one program a chunk and head."""
    from ..sm90 import anchored_gradients

    p, K = call.p, call.K
    assert p.g is not None
    made = tuple([chunks.gradient(plan, call, name, K, dtype=p.q.dtype) for name in ("dq", "dk", "da", "db")])
    dg = chunks.gradient(plan, call, "dg", K, dtype=p.g.dtype)
    token, slot = Tile(C, K), Tile(C, K, 3)
    plan.launch(
        anchored_gradients.penstock_rwkv7_gradients_sm90, call.programs(call.chunks(C), 1),
        ("q", "k", "v", "a", "b", "x", "z", "d_output", "chunk_states", "d_chunk_states", *made, "g", "solved", "total", *made, dg,
         "cu_seqlens"),
        (p.scale, sequences, tokens, call.H, *call.strides("g")), WARPS,
        (*[token] * 5, slot, slot, token, slot, slot, *[token] * 4),
        K=K, PACKED=call.packed,
    )  # fmt: skip


def backward(call: Backward, tiles: chunks.Tiles = chunks.prepared) -> Plan:
    """The gradients of ``forms/chunks.py``, by segments where these fill the GPU."""
    by = segments.backward if segments.avoids(call) is None else chunks.backward
    return by(call, _gradients, tiles)


SIZES = {"B": 2, "N": 2, "T": 150, "H": 2, "G": 2, "J": 2, "K": 64, "V": 64}
EXAMPLES = (Example("rwkv7", torch.bfloat16, SIZES, ("g",)),)
BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form("rwkv7_bwd_sm90", backward, absent, refuses, examples=EXAMPLES)
