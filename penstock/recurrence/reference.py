"""The oracle: one token after another, in float64. It defines the correct results, and is written for readability.

    S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t
    updated:  o_t = scale * q_t S_t            previous:  o_t = scale * q_t (S_{t-1} + diag(u) k_t^T v_t)

Gradients are PyTorch's, through the same loop. The output is rounded once, to v's dtype; the final state is rounded to
``state_dtype``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..call.implementation import Implementation
from ..tokens.dtypes import state_dtype
from ..tokens.pieces import advance_by
from .declaration import Recurrence, refuses_row


def _tokens(problem: Recurrence, x: Tensor) -> list[tuple[Tensor, ...]]:
    """The tokens [H, *] of each sequence of x [B, T, H, *]. By unbind, because the gradient of each slice would have the size of x."""
    sequences = x.unbind() if problem.cu_seqlens is None else x[0].split([end - begin for begin, end in problem.spans()])
    return [sequence.unbind() for sequence in sequences]


def exact(problem: Recurrence) -> tuple[Tensor, Tensor]:
    """Output and final state in float64, before any rounding."""
    q, k, v = problem.q.double(), problem.k.double(), problem.v.double()
    w = None if problem.gate is None else problem.gate.double().exp().expand(q.shape)
    u = None if problem.u is None else problem.u.double()[:, :, None]  # converted once, so that its gradient is summed in float64
    states = q.new_zeros(problem.state_shape) if problem.initial_state is None else problem.initial_state.double()
    decays = None if w is None else _tokens(problem, w)
    outputs = torch.zeros_like(v)
    rows: dict[int, list[Tensor]] = {n: [] for n in range(problem.sizes["B"])}
    finals = []
    for n, (S, q_, k_, v_) in enumerate(zip(states.unbind(), _tokens(problem, q), _tokens(problem, k), _tokens(problem, v))):
        o: list[Tensor] = []
        for t in reversed(range(len(q_))) if problem.reverse else range(len(q_)):
            kv = k_[t][:, :, None] * v_[t][:, None, :]
            read = S if u is None else S + u * kv
            S = kv + (S if decays is None else decays[n][t][:, :, None] * S)
            if problem.variant.read == "updated":
                read = S
            o.append((q_[t][:, :, None] * read).sum(1))
        rows[n if problem.cu_seqlens is None else 0] += o[::-1] if problem.reverse else o
        finals.append(S)
    if any(rows.values()):
        outputs = torch.stack([torch.stack(row) for row in rows.values()]) * problem.scale
    return outputs, torch.stack(finals) if finals else q.new_zeros(problem.state_shape)


def forward(problem: Recurrence) -> tuple[Tensor, Tensor]:
    """The exact values, rounded once."""
    output, final_state = exact(problem)
    return output.to(problem.v.dtype), final_state.to(state_dtype(problem.q.dtype))


IMPLEMENTATION = Implementation(
    name="reference",
    summary="float64 token loop, the oracle",
    forward=forward,
    advance=partial(advance_by, forward),
    refuses=refuses_row,
)
