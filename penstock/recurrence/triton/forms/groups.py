"""The backward pass of heads that share q and k, without decays per channel: ``group_backward.py``."""

from __future__ import annotations

import torch

from ....call.implementation import Example
from ....gpu.plan import Plan, chunks, strides
from ....gpu.target import Target, power
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import CHANNEL, Backward, Call
from ..heads import GROUPED
from ..portable import group_backward
from ..states import before_chunks, segments_before_chunks
from ..table import LEAST
from . import states
from .passes import BackwardForm, gradient_of_v, gradients, gradients_of_parameters, states_form

C = 64
"""Tokens in a chunk, as of the states that the Hopper kernels store, and value channels at most."""
WARPS, STAGES = 8, 3
"""Loads of a head begin two heads before. At 128 key channels a program has 175 KB of shared memory."""


def _absent(target: Target) -> str | None:
    return None if target.arch == "sm_90" or target.interpreted else f"it was compiled and measured for sm_90 alone, this is {target.arch}"


def _refuses(call: Call) -> str | None:
    G, target = call.p.groups, call.target
    if not G or call.H == G:
        return "heads do not share q and k"
    if call.p.partial:
        return "its results are 16 bits, those of a block of a wide head are float32"
    if call.decay == CHANNEL or call.previous:
        return "it computes no decays per channel, and reads the updated state"
    if GROUPED.value < call.K or call.V > C:
        return f"heads have at most K = {GROUPED.value} and V = {C}, these have {call.K} and {call.V}"
    if call.T <= C:
        return f"it takes more than {C} tokens: states of a single chunk are float32"
    if target.interpreted:
        return None
    if call.precision != "bf16":
        return f"it takes bfloat16, this is {call.p.q.dtype}"
    if shared_bytes(call.K) > target.shared_memory:
        return f"it takes {shared_bytes(call.K)} bytes of shared memory, of {target.shared_memory}"
    return None


def programs(call: Call, count: int) -> int:
    """Programs of each group in each of ``count`` chunks: one per idle multiprocessor. If several, each has float32 sums for dq and dk."""
    G, heads = call.p.groups, call.H // call.p.groups
    return max(P for P in range(1, heads + 1) if heads % P == 0 and (P == 1 or P * G * count <= call.target.multiprocessors))


def shared_bytes(K: int) -> int:
    """Shared memory of a program at most: q and k, three stages of v, dO and states, the weights, and 4 KB of vectors."""
    BK = power(K, LEAST)
    return 2 * (2 * C * BK + 6 * C * C + 6 * BK * C + C * C) + 4096


def _backward(call: Backward) -> Plan:
    plan, p, form = Plan(), call.p, states_form(BACKWARD.parts, call)
    parts = p.groups * programs(call, chunks(call.T, C, call.N, call.packed))
    found = gradients(plan, call, form, C)
    dv = gradient_of_v(plan, call)
    dS = before_chunks(plan, call, form, found.terms, C, call.stored(C))
    d_gate, _ = gradients_of_parameters(plan, call, C)
    for name in ("dq", "dk"):
        plan.empty(name, batch, tokens, parts, call.K, dtype=p.q.dtype if parts == p.groups else torch.float32)
    slots = call.chunks(C)
    vectors = plan.empty("vectors", slots, call.H, 5 * C) if call.decay else "q"
    plan.launch(
        group_backward.penstock_chunk_bwd_groups, lambda s: slots(s) * parts,
        ("q", "k", "v", "g", "d_output", found.S, dS, "dq", "dk", dv, d_gate, vectors, "cu_seqlens"),
        (p.scale, sequences, tokens, call.H, *strides(p.q, p.k, p.v), *call.gate[:3], *call.upstream.stride()), WARPS,
        HEADS=call.H // parts, K=call.K, V=call.V, BK=power(call.K, LEAST), C=C, DECAY=call.decay, STATIC=call.static, DG=d_gate != "q",
        PACKED=call.packed, REVERSE=p.reverse, PRECISION=call.precision, STAGES=STAGES,
    )  # fmt: skip
    return plan


SIZES = {"B": 1, "N": 1, "T": 130, "H": 4, "G": 2, "K": 16, "V": 16}
EXAMPLES = tuple(
    Example(variant, dtype, SIZES) for variant in ("linear_attention", "simple_gla") for dtype in (torch.bfloat16, torch.float16)
)
BACKWARD: BackwardForm = BackwardForm(
    "chunk_bwd_groups", _backward, _absent, _refuses, parts=states.BESIDE_PLAIN, examples=EXAMPLES, chunk=lambda call: C,
    segments=lambda call: segments_before_chunks(call, states_form(BACKWARD.parts, call), C),
)  # fmt: skip
