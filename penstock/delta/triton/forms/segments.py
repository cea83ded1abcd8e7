"""The same passes for few sequences and heads: their segments are walked side by side.

A segment turns a state S into M S + L. L is what a walk over the segment leaves of zeros, M what a walk without values leaves of the
identity. A short launch turns these into the states before all segments, and from these the last walks begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.plan import Plan, Sizes, contiguous
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import Backward, C, Call, Forward
from ..portable import chain
from . import chunks
from .chunks import NOTHING, State

LEAST = 6
"""Segments of a sequence, at least: three walks in place of one."""


def avoids(call: Call) -> str | None:
    """Other launches fill the GPU, or sequences are short."""
    return "sequences and heads fill the GPU, or the sequences are short" if of_programs(call) is None else None


def of_programs(call: Call) -> Callable[[Sizes], int] | None:
    """Tokens of segments that fill the GPU, or None."""
    return call.segment(C, math.ceil(call.V / call.config("walk").BV), 1, LEAST)


def _segment(call: Call) -> Callable[[Sizes], int]:
    """Tokens of a segment; where this form is wanted for other calls, those of a chunk."""
    return of_programs(call) or (lambda s: C)


def _matrices(plan: Plan, call: Call, L: Callable[[Sizes], int]) -> str:
    """Add the launch for M of all segments."""
    found = plan.empty("segment_matrices", call.chunks(L), call.H, call.K, call.K)
    identity = plan.constant("identity", _identity, call.K), (0, 0, call.K, 1)
    none = plan.constant("no_values", _zero, call.p.v.dtype), call.K, (0, 0, 0, 0)
    chunks.walked(plan, call, call.chunks(L), identity, None, found, keep=False, segments=L, values=none)
    return found


def _identity(K: int, device: torch.device) -> torch.Tensor:
    return torch.eye(K, device=device)


def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype, device=device)


def _chained(plan: Plan, call: Call, L: Callable[[Sizes], int], matrices: str, sums: str, first: State, last: str, adjoint: bool) -> State:
    """Add the launch for the states before all segments, or their gradients after all segments."""
    b, H, K, V = call.config("chain"), call.H, call.K, call.V
    states = plan.empty("d_segment_states" if adjoint else "segment_states", call.chunks(L), H, K, V)
    plan.launch(
        chain.penstock_delta_chain, call.programs(sequences, math.ceil(V / b.BV)),
        (matrices, sums, first[0] or last, states, last, "cu_seqlens"), (sequences, tokens, L, H, *first[1]), b.warps,
        K=K, V=V, BK=call.BK, BJ=b.BJ, BV=b.BV, ADJOINT=adjoint, INITIAL=first[0] is not None, PACKED=call.packed,
        PRECISION="tf32x3" if call.target.nvidia else "ieee",
    )  # fmt: skip
    return states, contiguous((0, H, K, V))


def _states(plan: Plan, call: Call, L: Callable[[Sizes], int], matrices: str, final: str) -> tuple[State, str]:
    """Add the launches for the states before all segments and the final state. Also the name of memory for states of segments."""
    sums = plan.empty("segment_sums", call.chunks(L), call.H, call.K, call.V)
    chunks.walked(plan, call, call.chunks(L), NOTHING, None, sums, keep=False, segments=L)
    return _chained(plan, call, L, matrices, sums, chunks.start(call), final, False), sums


def forward(call: Forward) -> Plan:
    """``output`` and ``final_state``."""
    plan, L = Plan(keeps=True), _segment(call)
    output = plan.empty("output", batch, tokens, call.H, call.V, dtype=call.p.v.dtype)
    final = plan.empty("final_state", sequences, call.H, call.K, call.V)
    chunks.prepared(plan, call)
    states, sums = _states(plan, call, L, _matrices(plan, call, L), final)
    chunks.walked(plan, call, call.chunks(L), states, output, sums, keep=False, segments=L)
    return plan


def backward(call: Backward) -> Plan:
    """The gradients of ``forms/chunks.py``."""
    plan, L, H, K, V = Plan(keeps=chunks.keeps_tiles(call)), _segment(call), call.H, call.K, call.V
    chunks.prepared(plan, call)
    matrices = _matrices(plan, call, L)
    d_initial, d_sums = plan.empty("d_initial_state", sequences, H, K, V), plan.empty("d_segment_sums", call.chunks(L), H, K, V)
    chunks.walked_back(plan, call, call.chunks(L), NOTHING, d_sums, L)
    d_states = _chained(plan, call, L, matrices, d_sums, chunks.end(call), d_initial, True)
    if call.state_alone:
        return plan
    states, sums = _states(plan, call, L, matrices, plan.empty("final_state", sequences, H, K, V))
    chunks.walked(plan, call, call.chunks(L), states, None, sums, keep=True, segments=L)
    chunks.walked_back(plan, call, call.chunks(L), d_states, d_sums, L)
    chunks.gradients_of_chunks(plan, call)
    return plan


SIZES = {"B": 1, "N": 1, "T": 150, "H": 2, "G": 2, "J": 2, "K": 24, "V": 40}
EXAMPLES = tuple(Example(variant, torch.float16, SIZES) for variant in ("delta_rule", "gated_delta_rule", "kda", "rwkv7"))
EXAMPLES += (Example("gated_delta_rule", torch.float16, SIZES | {"K": 200}),)
FORWARD: Form[Forward, Callable[[Forward], Plan]] = Form(
    "delta_segments", forward, refuses=chunks.refuses, avoids=avoids, examples=EXAMPLES
)
BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form(
    "delta_segments_bwd", backward, refuses=chunks.refuses, avoids=avoids, examples=EXAMPLES
)
