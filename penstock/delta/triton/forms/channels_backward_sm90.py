"""The backward pass with decays per channel on Hopper, for every gate: two launches, after two that repeat what a forward pass may keep."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent
from ....gpu.plan import Plan
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import Backward, C
from . import channels_sm90
from .channels_sm90 import POWERS, add_tiles, add_walk, halves, parts
from .scalar_sm90 import untiled_gradient
from .walks import over_sequences


def refuses(call: Backward) -> str | None:
    """Also the gradient of the output is copied in tiles."""
    return channels_sm90.refuses(call) or untiled_gradient(call)


def _backward(call: Backward) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg``, ``dbeta`` and ``d_initial_state``; with ``state_alone`` only what ``reverse`` computes.

    ``prepare`` and ``walk``: tiles, W and the states before chunks again, unless the forward pass kept them. ``reverse``: dv and the
    gradients of the states after chunks. ``gradients``: the others, all chunks in parallel.
    """
    from ..sm90 import gradients, reverse

    plan, p, H, K, V, slots = Plan(keeps=True), call.p, call.H, call.K, call.V, call.chunks(C)
    d_final = call.d_final_state
    assert p.g is not None
    assert p.beta is not None
    kind = p.q.dtype
    if not call.kept:
        add_tiles(plan, call, removals=True)
        if not call.state_alone:
            add_walk(plan, call, over_sequences(plan, call, output=False, keep=True))

    def like(name: str, *shape: int, dtype: torch.dtype) -> str:
        return plan.empty(name, batch, tokens, H, *shape, dtype=dtype)

    dv = like("dv", V, dtype=p.v.dtype)
    d_initial = plan.empty("d_initial_state", sequences, H, K, V)
    dS = plan.empty("d_chunk_states", slots, H, V, K, dtype=kind)
    last, last_steps = (d_initial, (0, 0, 0, 0)) if d_final is None else ("d_final_state", d_final.stride())
    rates, shared, half = p.beta.stride(), p.q.stride(2) == 0 and H > 1, halves(p)
    weights, of_values, of_slots = Tile(parts(call) * C, C, 3), Tile(C, C, 3 if half else 2), Tile(C, V, 3)
    z = plan.empty("z", slots, H, C, V, dtype=kind) if half else dv
    d_powers = plan.empty("d_powers", slots, H, 2, V) if half else "totals"
    powers, kept_powers = POWERS if half else ("totals", "totals")

    plan.launch(
        reverse.penstock_kda_reverse_sm90, call.programs(sequences, V // C),
        ("solved_keys", "d_output", "weights", "q_read", "k_read", z, dS, "beta", "totals", powers, d_powers, last, dv, d_initial,
         "cu_seqlens"),
        (sequences, tokens, H, *rates, *last_steps, p.scale), 4,
        (Tile(C, K, 3), Tile(C, C), weights, *[Tile(C, K, 3)] * 2, of_values, Tile(C, K, 3)),
        K=K, V=V, FINAL=d_final is not None, PACKED=call.packed,
    )  # fmt: skip
    if call.state_alone:
        return plan
    dq, dk = like("dq", K, dtype=kind), like("dk", K, dtype=kind)
    dg, dbeta = like("dg", K, dtype=p.g.dtype), like("dbeta", dtype=p.beta.dtype)
    plan.launch(
        gradients.penstock_kda_gradients_sm90, call.programs(slots, K // C),
        ("q", "k", "errors", "d_output", z, "chunk_states", dS, dq, dk, "g", "beta", kept_powers, d_powers, dq, dk, dv, dg, dbeta,
         "cu_seqlens"),
        (p.scale, sequences, tokens, H, H if shared else 1, *p.g.stride()[:3], *rates), 4,
        (*[Tile(C, C)] * 2, of_slots, Tile(C, V), of_slots if half else Tile(C, V), *[Tile(V, C, 3)] * 2, *[Tile(C, C)] * 2),
        K=K, V=V, PACKED=call.packed,
    )  # fmt: skip
    return plan


BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form("kda_bwd_sm90", _backward, absent, refuses, examples=channels_sm90.EXAMPLES)
