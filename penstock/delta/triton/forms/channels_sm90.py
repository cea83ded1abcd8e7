"""Decays per channel on Hopper: the forward pass in one launch, ``sm90/forward.py``, and the backward pass in four. One form for every gate."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent, tiled, tiled_or_shared
from ....gpu.plan import Plan, Sizes
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import CHANNEL, Backward, C, Call, Forward
from .chunks import start

K, VALUES = 128, (64, 128)
"""Key channels of a head, and value channels."""
W = 32
"""Key channels that ``prepare`` has in registers at once."""
REGISTERS = (208, 112)
"""Of a thread of ``prepare`` and of ``invert``; ``walk`` has the others. With fewer these spill."""
AT_LAUNCH = 168
"""Registers of every thread at launch."""
SHARES = 8
"""Programs of a head at most."""
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
    return None


def programs_of_head(call: Call) -> int:
    """One for 64 value channels, and more while multiprocessors are idle."""
    share = call.V // C
    while share < SHARES and 2 * share * call.N * call.H <= call.target.multiprocessors:
        share *= 2
    return share


def _forward(call: Forward) -> Plan:
    from ..sm90 import exchange, forward

    plan, p, H, V, share = Plan(), call.p, call.H, call.V, programs_of_head(call)
    depth, values = max(4, 2 * share), V // C
    output = plan.empty("output", batch, tokens, H, V, dtype=p.v.dtype)
    final = plan.empty("final_state", sequences, H, K, V)
    x = plan.empty("tiles", sequences, H, depth * 3 * C, K, dtype=p.q.dtype)
    a = plan.empty("weights", sequences, H, depth * C, C, dtype=p.q.dtype)
    totals = plan.empty("totals", sequences, H, depth, K)
    counts = plan.empty("counts", sequences, H, share + values, dtype=torch.int32)

    def zeros(s: Sizes) -> int:
        return s["N"] * H * (share + values)

    first, steps = start(call)
    shared = p.q.stride(2) == 0 and p.sizes["H"] > 1
    plan.launch(exchange.penstock_zero_counts, lambda s: -(-zeros(s) // 1024), (counts,), (zeros,), 4)
    plan.launch(
        forward.penstock_kda_fwd_sm90, call.programs(sequences, share),
        ("q", "k", "g", "v", output, x, x, a, "beta", totals, counts, first or final, output, final, "cu_seqlens"),
        (p.scale, sequences, tokens, H, H if shared else 1, *p.beta.stride(), *steps), 4,
        (*[Tile(C, W)] * 3, *[Tile(C, C)] * 2, Tile(C, W, 3), Tile(C, K, 3), Tile(C, C, 3)), AT_LAUNCH,
        K=K, V=V, W=W, INITIAL=first is not None, FINAL=True, PACKED=call.packed, SHARE=share, DEPTH=depth, REGISTERS=REGISTERS,
    )  # fmt: skip
    return plan


SIZES = {"B": 2, "N": 2, "T": 150, "H": 2, "G": 2, "J": 2, "K": K, "V": 128}
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form(
    "kda_fwd_sm90", _forward, absent, refuses,
    examples=(Example("kda", torch.bfloat16, SIZES), Example("kda", torch.bfloat16, SIZES | {"V": 64, "H": 1, "G": 1, "J": 1})),
)  # fmt: skip


def _refuses_backward(call: Backward) -> str | None:
    """Also the gradient of the output is copied in tiles, and the last launch takes all value channels at once."""
    reason = refuses(call)
    if reason is None and call.V != K:
        return f"V must be {K}, this is {call.V}"
    if reason is None and call.d_output is not None and not tiled(call.d_output):
        return f"d_output must be [B,T,H * V] with rows at multiples of 16 bytes, its strides are {call.d_output.stride()}"
    return reason


def _backward(call: Backward) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg``, ``dbeta`` and ``d_initial_state``. The forward pass keeps nothing: tiles, X and states are computed again.

    ``prepare``: A, A_k T, B^T and q, k with factors, all chunks in parallel. ``states``: X and the states before chunks. ``reverse``: dv and the
    gradients of the states after chunks. ``gradients``: the others, all chunks in parallel.
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
    last = (0, 0, 0, 0) if d_final is None else d_final.stride()
    rates = p.beta.stride()

    plan.launch(
        prepare.penstock_kda_prepare_sm90, lambda s: (H, slots(s)),
        ("q", "k", "g", q_r, k_r, b, a, t, "beta", totals, "cu_seqlens"), (p.scale, sequences, tokens, H, groups, *rates), 4,
        (*[Tile(C, W)] * 3, *[Tile(C, W, 3)] * 3, *[Tile(C, C, 3)] * 2), K=K, PACKED=call.packed, W=W,
    )  # fmt: skip
    plan.launch(
        states.penstock_kda_states_sm90, call.programs(sequences, V // C),
        (k_r, b, "v", x, S, "beta", totals, first or d_initial, "cu_seqlens"), (sequences, tokens, H, *rates, *steps), 4,
        (*[Tile(C, K, 3)] * 2, Tile(C, C), Tile(C, C, 3), Tile(C, K, 3)), K=K, V=V, INITIAL=first is not None, PACKED=call.packed,
    )  # fmt: skip
    plan.launch(
        reverse.penstock_kda_reverse_sm90, call.programs(sequences, V // C),
        (b, "d_output", a, q_r, k_r, dv, dS, "beta", totals, d_initial if d_final is None else "d_final_state", dv, d_initial, "cu_seqlens"),
        (sequences, tokens, H, *rates, *last), 4,
        (Tile(C, K, 3), Tile(C, C), Tile(C, C, 3), *[Tile(C, K, 3)] * 2, Tile(C, C), Tile(C, K, 3)),
        K=K, V=V, FINAL=d_final is not None, PACKED=call.packed,
    )  # fmt: skip
    plan.launch(
        gradients.penstock_kda_gradients_sm90, lambda s: (H * (K // C), slots(s)),
        ("q", "k", x, "d_output", dv, t, S, dS, dq, dk, "g", "beta", dq, dk, dg, dbeta, "cu_seqlens"),
        (p.scale, sequences, tokens, H, groups, *p.g.stride()[:3], *rates), 4,
        (*[Tile(C, C)] * 2, Tile(C, V, 3), *[Tile(C, V)] * 2, Tile(C, C, 3), *[Tile(V, C, 3)] * 2, *[Tile(C, C)] * 2),
        K=K, V=V, PACKED=call.packed,
    )  # fmt: skip
    return plan


BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form(
    "kda_bwd_sm90", _backward, absent, _refuses_backward, examples=(Example("kda", torch.bfloat16, SIZES),)
)
