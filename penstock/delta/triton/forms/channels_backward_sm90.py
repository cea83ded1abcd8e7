"""The backward pass with decays per channel on Hopper, in four launches for every gate."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent, tiled
from ....gpu.plan import Plan
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import Backward, C
from . import channels_sm90
from .channels_sm90 import K, W
from .chunks import start


def refuses(call: Backward) -> str | None:
    """Also the gradient of the output is copied in tiles, and the last launch takes all value channels at once."""
    reason = channels_sm90.refuses(call)
    if reason is None and call.V != K:
        return f"V must be {K}, this is {call.V}"
    if reason is None and call.d_output is not None and not tiled(call.d_output):
        return f"d_output must be [B,T,H * V] with rows at multiples of 16 bytes, its strides are {call.d_output.stride()}"
    return reason


def _backward(call: Backward) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg``, ``dbeta`` and ``d_initial_state``. The forward pass keeps nothing but its inputs.

    ``prepare``: A, A_k T, B^T and q, k with decays, all chunks in parallel. ``states``: X and the states before chunks, again. ``reverse``:
    dv and the gradients of the states after chunks. ``gradients``: the others, all chunks in parallel.
    """
    from ..sm90 import gradients, prepare, reverse, states

    plan, p, H, V, slots = Plan(), call.p, call.H, call.V, call.chunks(C)
    d_final = call.d_final_state
    assert p.g is not None
    assert p.beta is not None
    kind = p.q.dtype

    def like(name: str, *shape: int, dtype: torch.dtype) -> str:
        return plan.empty(name, batch, tokens, H, *shape, dtype=dtype)

    def tile(name: str, *shape: int, dtype: torch.dtype = kind) -> str:
        return plan.empty(name, slots, H, *shape, dtype=dtype)

    dq, dk, dv = like("dq", K, dtype=kind), like("dk", K, dtype=kind), like("dv", V, dtype=p.v.dtype)
    dg, dbeta = like("dg", K, dtype=p.g.dtype), like("dbeta", dtype=p.beta.dtype)
    d_initial = plan.empty("d_initial_state", sequences, H, K, V)
    q_r, k_r, b, x = tile("q_read", C, K), tile("k_read", C, K), tile("solved_keys", C, K), tile("x", C, V)
    a, t = tile("weights", C, C), tile("removals", C, C, dtype=torch.float16)
    S, dS = tile("chunk_states", V, K), tile("d_chunk_states", V, K)
    totals = tile("totals", K, dtype=torch.float32)
    shared = p.q.stride(2) == 0 and H > 1
    groups = H if shared else 1
    first, steps = start(call)
    last, last_steps = (d_initial, (0, 0, 0, 0)) if d_final is None else ("d_final_state", d_final.stride())
    rates = p.beta.stride()

    plan.launch(
        prepare.penstock_kda_prepare_sm90, call.programs(slots, 1),
        ("q", "k", "g", q_r, k_r, b, a, t, "beta", totals, "cu_seqlens"), (p.scale, sequences, tokens, H, groups, *rates), 4,
        (*[Tile(C, W)] * 3, *[Tile(C, W, 3)] * 3, *[Tile(C, C, 3)] * 2), K=K, PACKED=call.packed, W=W, REMOVALS=True,
    )  # fmt: skip
    plan.launch(
        states.penstock_kda_states_sm90, call.programs(sequences, V // C),
        (k_r, b, "v", x, S, "beta", totals, first or d_initial, "cu_seqlens"), (sequences, tokens, H, *rates, *steps), 4,
        (*[Tile(C, K, 3)] * 2, Tile(C, C), Tile(C, C, 3), Tile(C, K, 3)), K=K, V=V, INITIAL=first is not None, PACKED=call.packed,
    )  # fmt: skip
    plan.launch(
        reverse.penstock_kda_reverse_sm90, call.programs(sequences, V // C),
        (b, "d_output", a, q_r, k_r, dv, dS, "beta", totals, last, dv, d_initial, "cu_seqlens"),
        (sequences, tokens, H, *rates, *last_steps), 4,
        (Tile(C, K, 3), Tile(C, C), Tile(C, C, 3), *[Tile(C, K, 3)] * 2, Tile(C, C), Tile(C, K, 3)),
        K=K, V=V, FINAL=d_final is not None, PACKED=call.packed,
    )  # fmt: skip
    plan.launch(
        gradients.penstock_kda_gradients_sm90, call.programs(slots, K // C),
        ("q", "k", x, "d_output", dv, t, S, dS, dq, dk, "g", "beta", dq, dk, dg, dbeta, "cu_seqlens"),
        (p.scale, sequences, tokens, H, groups, *p.g.stride()[:3], *rates), 4,
        (*[Tile(C, C)] * 2, Tile(C, V, 3), *[Tile(C, V)] * 2, Tile(C, C, 3), *[Tile(V, C, 3)] * 2, *[Tile(C, C)] * 2),
        K=K, V=V, PACKED=call.packed,
    )  # fmt: skip
    return plan


BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form(
    "kda_bwd_sm90", _backward, absent, refuses, examples=(Example("kda", torch.bfloat16, channels_sm90.SIZES),)
)
