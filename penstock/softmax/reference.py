"""Softmax attention by its formula in float64: the oracle of this family."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.implementation import Implementation
from .declaration import Attention

BUDGET = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-11}
"""Allowed error by dtype. The tests use budgets that are derived for each element."""


def exact(a: Attention) -> tuple[Tensor, Tensor]:
    """Output [B,Tq,H,D] and log-sum-exp [B,Tq,H]; a query that sees no key has an output of 0 and a log-sum-exp of -inf."""
    q, k, v = (x.double() for x in (a.q, a.k, a.v))
    if a.cu_seqlens is None:
        return _one(a, q, k, v)
    found = [_one(a, q[:, rows], k[:, keys], v[:, keys]) for rows, keys in a.spans()]
    empty = q[:, :0], q[:, :0, :, 0]
    output, lse = (torch.cat(parts, 1) for parts in zip(empty, *found))
    return output, lse


def _one(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    Tq, Tk, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    seen = a.visible(slice(0, Tq), slice(0, Tk), Tq, Tk)
    scores = a.scale * torch.einsum("bihd,bjhd->bhij", q, k)
    scores = scores.masked_fill(~seen, float("-inf"))
    some = seen.any(1)[:, None]
    weights = torch.softmax(scores.masked_fill(~some, 0.0), -1).masked_fill(~seen, 0.0) if Tk else scores
    lse = torch.logsumexp(scores.masked_fill(~some, 0.0), -1) if Tk else scores.sum(-1)
    lse = lse.masked_fill(~some[:, 0], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse.transpose(1, 2)


def forward(a: Attention) -> tuple[Tensor, Tensor]:
    """The exact values, rounded once."""
    output, lse = exact(a)
    return output.to(a.q.dtype), lse if a.q.dtype == torch.float64 else lse.float()


IMPLEMENTATION = Implementation("reference", "the formula in float64, the oracle", forward)
