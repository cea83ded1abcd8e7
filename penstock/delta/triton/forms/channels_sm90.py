"""The forward pass with decays per channel on Hopper, for every gate: ``sm90/prepare.py``, then ``sm90/walk.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent, tiled, tiled_or_shared
from ....gpu.plan import Plan
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import CHANNEL, C, Call, Forward
from .chunks import start

K, VALUES = 128, (64, 128)
"""Key channels of a head, and value channels."""
W = 32
"""Key channels that ``prepare`` has in registers at once. With 64 it spills 192 bytes (Triton 3.6)."""
ROWS = 1 << 31
"""Rows of a matrix that is copied in tiles are numbered by 32-bit integers."""


def refuses(call: Call) -> str | None:
    """Decays per channel that are read after, bfloat16, heads of 128, and tensors that the tensor memory accelerator can copy."""
    p = call.p
    if call.decay != CHANNEL or call.streams != 1 or not call.after:
        return "it computes one stream with decays per channel"
    if p.q.dtype != torch.bfloat16:
        return f"it takes bfloat16, this is {p.q.dtype}"
    if call.K != K:
        return f"K must be {K}, this is {call.K}"
    if call.V not in VALUES:
        return f"V must be {' or '.join(map(str, VALUES))}, this is {call.V}"
    if not 0 < p.sizes["B"] * p.sizes["T"] < ROWS:
        return f"it takes up to 2**31 tokens, this call has {p.sizes['B'] * p.sizes['T']}"
    if p.g is None or p.beta is None:
        return "it takes a decay and beta"
    for name, x, allowed in (("q", p.q, tiled_or_shared), ("k", p.k, tiled_or_shared), ("v", p.v, tiled), ("g", p.g, tiled)):
        if not allowed(x):
            return f"{name} must be [B,T,H * D] with rows at multiples of 16 bytes, its strides are {x.stride()}"
    if p.sizes["H"] > 1 and (p.q.stride(2) == 0) != (p.k.stride(2) == 0):
        return "q and k must have the same heads"
    return call.grouped


def _forward(call: Forward) -> Plan:
    from ..sm90 import prepare, walk

    plan, p, H, V, slots = Plan(), call.p, call.H, call.V, call.chunks(C)
    output = plan.empty("output", batch, tokens, H, V, dtype=p.v.dtype)
    final = plan.empty("final_state", sequences, H, K, V)
    q, k, b = (plan.empty(name, slots, H, C, K, dtype=p.q.dtype) for name in ("q_tiles", "k_tiles", "b_tiles"))
    a = plan.empty("weights", slots, H, C, C, dtype=p.q.dtype)
    totals = plan.empty("totals", slots, H, K)
    first, steps = start(call)
    shared = p.q.stride(2) == 0 and p.sizes["H"] > 1
    plan.launch(
        prepare.penstock_kda_prepare_sm90, call.programs(slots, 1), ("q", "k", "g", q, k, b, a, a, "beta", totals, "cu_seqlens"),
        (p.scale, sequences, tokens, H, H if shared else 1, *call.strides("beta")), 4,
        (*[Tile(C, W)] * 3, *[Tile(C, W, 3)] * 3, *[Tile(C, C, 3)] * 2),
        K=K, PACKED=call.packed, W=W, REMOVALS=False,
    )  # fmt: skip
    plan.launch(
        walk.penstock_kda_walk_sm90, call.programs(sequences, V // C),
        (k, q, b, a, "v", output, "beta", totals, first or final, output, final, "cu_seqlens"),
        (sequences, tokens, H, *call.strides("beta"), *steps), 4, (*[Tile(C, K, 3)] * 3, Tile(C, C, 3), *[Tile(C, C)] * 2),
        K=K, V=V, BV=C, INITIAL=first is not None, FINAL=True, PACKED=call.packed,
    )  # fmt: skip
    return plan


SIZES = {"B": 2, "N": 2, "T": 150, "H": 2, "G": 2, "J": 2, "K": K, "V": 128}
EXAMPLES = (Example("kda", torch.bfloat16, SIZES), Example("kda", torch.bfloat16, SIZES | {"V": 64, "H": 1, "G": 1, "J": 1}))
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form("kda_prepare_sm90", _forward, absent, refuses, examples=EXAMPLES)
