"""The quadratic form, in the log domain: every token attends to every token before it.

    o_i = scale * sum_j A_ij v_j + scale * (q_i o exp(sum_{t<=i} g_t)) S_0
    A_ij = sum_d q_id k_jd exp(D_ijd),     D_ij = sum_{j<t<=i} g_t   ["previous": j<t<i, and u on the diagonal]

D is a separate running sum for every j, not a difference of two long sums, so it is accurate and finite for any decay. Time and memory
grow with T^2 (T^2 K for decays per channel), so this is for short sequences, for teaching, and as an independent check of the token loop.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..call.implementation import Implementation
from ..tokens.dtypes import state_dtype
from ..tokens.pieces import advance_by
from .declaration import Recurrence, refuses_bonus


def _attend(problem: Recurrence, q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence: q, k [L,H,K], v [L,H,V], g [L,H,K or 1], u [H,K], S [H,K,V]. Returns output and final state."""
    L = q.shape[0]
    later = torch.ones(L, L, dtype=torch.bool, device=q.device).tril(-1)[:, :, None, None]  # [i, j]: i > j
    D = torch.where(later, g[:, None], 0).cumsum(0)  # [i, j, H, K or 1]
    from_start = g.cumsum(0)
    to_end = D[-1]
    if problem.variant.read == "previous":
        D, from_start = _token_before(D), _token_before(from_start)
    if g.shape[-1] == 1:
        A = torch.einsum("ihd,jhd->ijh", q, k) * D[..., 0].exp()
    else:
        A = (q[:, None] * k[None] * D.exp()).sum(-1)
    if u is None:
        A = A.masked_fill(~(later[..., 0] | torch.eye(L, dtype=torch.bool, device=q.device)[..., None]), 0)
    else:
        A = A.masked_fill(~later[..., 0], 0)
        own = (q * k * u).sum(-1)  # [L, H]
        A = A + torch.diag_embed(own.T).permute(1, 2, 0)
    output = torch.einsum("ijh,jhv->ihv", A, v) + torch.einsum("ihd,hdv->ihv", q * from_start.exp(), S)
    final = torch.einsum("jhd,jhv->hdv", k * to_end.exp(), v) + g.sum(0)[:, :, None].exp() * S
    return problem.scale * output, final


def _token_before(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


def forward(problem: Recurrence) -> tuple[Tensor, Tensor]:
    """The quadratic form of every sequence, in float32, or float64 for float64 inputs."""
    problem, dtype = problem.forward_in_time(), state_dtype(problem.q.dtype)
    q, k, v = (x.to(dtype) for x in (problem.q, problem.k, problem.v))
    gate = problem.gate
    g = q.new_zeros(1, 1, 1, 1) if gate is None else gate.to(dtype)
    g = g.expand(*q.shape[:3], g.shape[3])
    u = None if problem.u is None else problem.u.to(dtype)
    S = q.new_zeros(problem.state_shape) if problem.initial_state is None else problem.initial_state.to(dtype)
    packed = problem.cu_seqlens is not None
    outputs, finals = [], []
    for n, (begin, end) in enumerate(problem.spans()):
        if begin == end:
            outputs.append(v[0, :0])
            finals.append(S[n])
            continue
        row = 0 if packed else n
        o, final = _attend(problem, q[row, begin:end], k[row, begin:end], v[row, begin:end], g[row, begin:end], u, S[n])
        outputs.append(o)
        finals.append(final)
    if not outputs:
        return torch.zeros_like(problem.v), S.clone()
    output = torch.cat(outputs)[None] if packed else torch.stack(outputs)
    return problem.back_in_time(output.to(problem.v.dtype), torch.stack(finals))


IMPLEMENTATION = Implementation(
    name="parallel",
    summary="quadratic form in the log domain, plain PyTorch",
    forward=forward,
    advance=partial(advance_by, forward),
    refuses=refuses_bonus,
)
