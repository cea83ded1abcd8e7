"""The oracle: one token after another, in float64. It defines the correct results, and is written for readability.

    after:   w_t = a_t diag(exp(g_t)) S_{t-1}           before:   w_t = a_t S_{t-1}                o_t = scale * q_t S_t
    one stream:   S_t = diag(exp(g_t)) S_{t-1} + beta_t b_t^T (v_t + w_t),   a = -k, b = k
    two streams:  S_t = diag(exp(g_t)) S_{t-1} + b_t^T w_t + k_t^T v_t

Raw inputs are computed in float64, too. Gradients are PyTorch's, through the same loop. The output is rounded once, to v's dtype; the final
state is rounded to ``state_dtype``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..call.implementation import FormVerdict, Implementation, Mode
from ..tokens.dtypes import state_dtype
from ..tokens.pieces import advance_by
from .declaration import Delta, DeltaTokens
from .inputs import canonical, computed, is_raw, of_every_head, refuses_options


def _tokens(p: Delta, x: Tensor | None, sequences: int) -> list[tuple[Tensor | None, ...]]:
    """The tokens [H, *] of each sequence of x [B, T, H, *]. By unbind, because the gradient of each slice would have the size of x."""
    if x is None:
        return [(None,) * p.sizes["T"]] * sequences
    parts = x.unbind() if p.cu_seqlens is None else x[0].split([end - begin for begin, end in p.spans()])
    return [part.unbind() for part in parts]


def exact(problem: Delta) -> tuple[Tensor, Tensor]:
    """Output and final state in float64, before any rounding."""
    given = {name: x.double() for name, x in zip(problem.operator.names, problem.tensors) if x is not None and x.is_floating_point()}
    p = problem.with_tensors(given)
    p = of_every_head(canonical(p, computed(p, wide=True)) if is_raw(p) else p)
    states = p.q.new_zeros(p.state_shape) if p.initial_state is None else p.initial_state
    N, gate = len(states), p.gate
    decays = None if gate is None else gate.exp().expand(p.q.shape)
    q, k, v, w, beta, a, b = (_tokens(p, x, N) for x in (p.q, p.k, p.v, decays, p.beta, p.a, p.b))
    rows: dict[int, list[Tensor]] = {n: [] for n in range(p.sizes["B"])}
    finals = []
    for n, S in enumerate(states.unbind()):
        for t in range(len(q[n])):
            S, o = _token(p, S, *(x[n][t] for x in (q, k, v, w, beta, a, b)))  # type: ignore[arg-type]
            rows[n if p.cu_seqlens is None else 0].append(o)
        finals.append(S)
    outputs = torch.zeros_like(p.v)
    if any(rows.values()):
        outputs = torch.stack([torch.stack(row) for row in rows.values()]) * p.scale
    return outputs, torch.stack(finals) if finals else p.q.new_zeros(p.state_shape)


def _token(
    p: DeltaTokens, S: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, a: Tensor | None, b: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The state after a token and its output before ``scale``, from the state [H,K,V] and the token's q, k, v, decays, ... [H,*]."""
    decayed = S if w is None else w[..., None] * S
    read = decayed if p.variant.removal == "after" else S
    if beta is not None:
        S = decayed + (beta[:, None] * k)[..., None] * (v - (k[..., None] * read).sum(1))[:, None]
    else:
        assert a is not None
        assert b is not None
        S = decayed + b[..., None] * (a[..., None] * read).sum(1)[:, None] + k[..., None] * v[:, None]
    return S, (q[..., None] * S).sum(1)


def forward(problem: Delta) -> tuple[Tensor, Tensor]:
    """The exact values, rounded once."""
    output, final_state = exact(problem)
    return output.to(problem.v.dtype), final_state.to(state_dtype(problem.q.dtype))


def _verdicts(p: DeltaTokens, mode: Mode) -> tuple[FormVerdict, ...]:
    return (FormVerdict("raw inputs", "in its own pass", None),) if is_raw(p) else ()


IMPLEMENTATION = Implementation(
    name="reference",
    summary="float64 token loop, the oracle",
    forward=forward,
    advance=partial(advance_by, forward),
    refuses=lambda p, mode: refuses_options(p),
    verdicts=_verdicts,
)
