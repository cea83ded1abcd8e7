"""Softmax attention by ``torch.nn.functional.scaled_dot_product_attention``: the default on CPUs, elsewhere by name.

Torch aligns causal masks at the first key, this library at the last, and torch has no windows. Where that matters, queries are computed
in blocks, each with its visible keys and a mask. Torch does not return the log-sum-exp, so it is computed separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..call.implementation import Implementation, Mode
from ..call.validation import overlaps
from .declaration import Attention

ROWS = 512
"""Queries in a block."""


def refuses(a: Attention, mode: Mode) -> str | None:
    """Why this implementation cannot take a call, or None."""
    if a.cu_seqlens is not None and a.q.device.type != "cpu":
        return "torch's operator takes no packed sequences, and the host would have to wait for their lengths"
    return None


def forward(a: Attention) -> tuple[Tensor, Tensor | None]:
    """Output [B,Tq,H,D] and, if requested, log-sum-exp [B,Tq,H] in float32 (float64 for float64)."""
    if a.cu_seqlens is None:
        output = _output(a, a.q, a.k, a.v)
        return output, _lse(a, a.q, a.k) if a.return_lse else None
    parts = [(a.q[:, rows], a.k[:, keys], a.v[:, keys]) for rows, keys in a.spans()]
    output = torch.cat([_nothing(a.q, a.k, a.v), *(_output(a, *part) for part in parts)], 1)
    if not a.return_lse:
        return output, None
    none = _nothing(a.q, a.k)[..., 0].to(_sums(a.q))
    return output, torch.cat([none, *(_lse(a, q, k) for q, k, _ in parts)], 1)


def differentiable(a: Attention) -> tuple[Tensor, Tensor | None]:
    """The same by torch's math backend, which can be differentiated any number of times, in forward and reverse mode."""
    with sdpa_kernel(SDPBackend.MATH):
        return forward(a)


def _sums(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _output(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """For one sequence, or a batch of sequences of one length."""
    Tq, Tk = q.shape[1], k.shape[1]
    if not Tq or not Tk:
        return _nothing(q, k, v).new_zeros(q.shape) + sum(x[..., :0].sum() for x in (q, k, v))
    heads: dict[str, Any] = {"scale": abs(a.scale) or 1.0, "enable_gqa": q.shape[2] != k.shape[2]}
    if a.scale <= 0:  # torch 2.13 multiplies masked scores by the scale: -inf becomes inf or NaN
        q = -q if a.scale else q * 0
    # torch 2.13 computes wrong values from tensors whose elements share memory other than by strides of 0
    q, k, v = ((x.contiguous() if overlaps(x, expanded=False) else x).transpose(1, 2) for x in (q, k, v))
    if a.window is None and (not a.causal or Tq == Tk):
        return F.scaled_dot_product_attention(q, k, v, is_causal=a.causal, **heads).transpose(1, 2)
    found = [
        F.scaled_dot_product_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], attn_mask=seen, **heads)
        for rows, keys, seen in _blocks(a, Tq, Tk)
    ]
    return torch.cat(found, 2).transpose(1, 2)


def _lse(a: Attention, q: Tensor, k: Tensor) -> Tensor:
    """For one sequence, or a batch of sequences of one length."""
    Tq, Tk, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    dtype = _sums(q)
    if not Tq or not Tk:
        return q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
    q = q.to(dtype).unflatten(2, (k.shape[2], group))
    found = []
    for rows, keys, seen in _blocks(a, Tq, Tk):
        scores = a.scale * torch.einsum("bigrd,bjgd->bgrij", q[:, rows], k[:, keys].to(dtype))
        some = seen.any(1)
        scores = scores.masked_fill(~seen & some[:, None], float("-inf"))
        found.append(torch.logsumexp(scores, -1).masked_fill(~some, float("-inf")))
    return torch.cat(found, 3).flatten(1, 2).transpose(1, 2)


def _blocks(a: Attention, Tq: int, Tk: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks of queries, each with the range of its visible keys (at least one key) and its mask."""
    for start in range(0, Tq, ROWS):
        rows = slice(start, min(start + ROWS, Tq))
        first, last = rows.start + Tk - Tq, rows.stop - 1 + Tk - Tq
        reach = Tk if a.reach is None else a.reach
        low, high = first - reach + 1 if a.window is not None else 0, last + 1 if a.causal else last + reach
        low = min(max(low, 0), Tk - 1)
        keys = slice(low, max(min(high, Tk), low + 1))
        yield rows, keys, a.visible(rows, keys, Tq, Tk)


def _nothing(*tensors: Tensor) -> Tensor:
    """The first tensor without tokens, attached to the graph of all tensors."""
    return tensors[0][:, :0] + sum(x[:0].sum() for x in tensors)


IMPLEMENTATION = Implementation("sdpa", "torch.nn.functional.scaled_dot_product_attention", forward, refuses=refuses, attached=True)
