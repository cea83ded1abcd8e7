"""The backward pass of gated DeltaNet and DeltaNet on Hopper: two launches, after two that repeat what a forward pass may keep."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent
from ....gpu.plan import Plan
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import NONE, Backward, C
from . import scalar_sm90
from .scalar_sm90 import add_prepare, add_walk, block, columns, gates, halves, key_heads, untiled_gradient
from .walks import over_sequences


def refuses(call: Backward) -> str | None:
    """Also the gradient of the output is copied in tiles."""
    reason = scalar_sm90.refuses(call)
    if reason is None and call.p.groups:
        return "it takes the heads of q and k that groups share as they are"
    return reason or untiled_gradient(call)


def _backward(call: Backward) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg``, ``dbeta`` and ``d_initial_state``; with ``state_alone`` only what ``reverse`` computes.

    ``prepare`` and ``walk``: A, A_k T, B^T, E and the states before chunks, unless the forward pass kept them. ``reverse``: dv and the
    gradients of the states after chunks. ``gradients``: the others, all chunks in parallel; dq and dk are those of the heads of q and k.
    float16: ``reverse`` computes Z = dv / beta, ``gradients`` dv.
    """
    from ..sm90 import scalar_gradients, scalar_gradients_float16, scalar_reverse

    plan, p, H, K, V, slots, BV, G = Plan(keeps=True), call.p, call.H, call.K, call.V, call.chunks(C), block(call), key_heads(call)
    d_final, kind, R = call.d_final_state, p.q.dtype, H // G
    assert p.beta is not None
    if not call.kept:
        add_prepare(plan, call, removals=True)
        if not call.state_alone:
            add_walk(plan, call, over_sequences(plan, call, output=False, keep=True, powers=halves(call)))

    def like(name: str, *shape: int, dtype: torch.dtype) -> str:
        return plan.empty(name, batch, tokens, *shape, dtype=dtype)

    dv = y = like("dv", H, V, dtype=p.v.dtype)
    b, a, lacking = "solved_keys", "weights", ("reads",) * 5  # dummies
    of_values, of_block = Tile(C, V), Tile(C, BV)
    if halves(call):  # Z in place of dv
        b, a = "half_keys", "half_weights"
        y = plan.empty("z", slots, H, C, V, dtype=kind)
        of_values, of_block = Tile(C, V, 3), Tile(C, BV, 3)
        of_z, of_dS = plan.empty("z_powers", slots, H, V), plan.empty("d_state_powers", slots, H, V)
        lacking = ("powers", "error_powers", of_z, "state_powers", of_dS)
    d_initial = plan.empty("d_initial_state", sequences, H, K, V)
    dS = plan.empty("d_chunk_states", slots, H, V, K, dtype=kind)
    last, last_steps = (d_initial, (0, 0, 0, 0)) if d_final is None else ("d_final_state", d_final.stride())
    (q_h, k_h), rates, (g, g_steps) = columns(call), call.strides("beta"), gates(call)
    chunk, values, state, walk = Tile(C, K), Tile(C, BV), Tile(BV, K, 3), call.programs(sequences, V // BV)

    plan.launch(
        scalar_reverse.penstock_gdn_reverse_sm90, walk,
        (b, "d_output", a, "q", "k", y, dS, "beta", "reads", last, dv, d_initial, "cu_seqlens", *[lacking[n] for n in (0, 2, 4)]),
        (p.scale, sequences, tokens, H, R, q_h, k_h, *rates, *last_steps), BV // 16,
        (Tile(C, K, 3), values, Tile(C, C, 3), chunk, chunk, of_block, state),
        K=K, V=V, BV=BV, STAGES=2, COPIES=2 if BV == C else 1, FINAL=d_final is not None, PACKED=call.packed,
    )  # fmt: skip
    if call.state_alone:
        return plan
    dq, dk, dbeta = like("dq", G, K, dtype=kind), like("dk", G, K, dtype=kind), like("dbeta", H, dtype=p.beta.dtype)
    dg = dbeta if p.g is None else like("dg", H, dtype=p.g.dtype)
    half = halves(call)
    plan.launch(
        scalar_gradients_float16.penstock_gdn_gradients_float16_sm90 if half else scalar_gradients.penstock_gdn_gradients_sm90,
        lambda s: slots(s) * G,
        ("q", "k", "errors", y, "d_output", "removals", "chunk_states", dS, dq, dk, g, "beta", dq, dk, dg, dbeta, "cu_seqlens",
         *((dv, *lacking[1:]) if half else ())),
        (p.scale, sequences, tokens, H, R, q_h, k_h, *g_steps, *rates), 8 if half else 4,
        (chunk, chunk, Tile(C, V, 3), of_values, Tile(C, V), Tile(C, C, 3), *[Tile(V, K, 3)] * 2, chunk, chunk),
        registers=0 if half else 168, K=K, V=V, DECAYS=call.decay != NONE, PACKED=call.packed,
    )  # fmt: skip
    return plan


BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form("gdn_bwd_sm90", _backward, absent, refuses, examples=scalar_sm90.EXAMPLES)
