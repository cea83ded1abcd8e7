"""The dyadic chunkwise formula with rounded operands: the error of a kernel whose matrix products have operands of low precision.

A chunk is cut into blocks of 2 L tokens for L = 32, 16, ..., 1. Every pair of tokens is split by one level, in which they lie in different
halves of a block. The decay between them is the product of two factors that meet in the middle of the block: from the earlier token to
the middle, and from there to the later token. Each factor is the exponential of one sum and at most 1, so any decay is represented.
Everything else is float64, so the error against the oracle comes from the rounded operands only.

There are several draws of the rounding. The error is the largest difference of a result, which a few roundings can dominate: with strong
decays those of the few tokens that see a large state. A rounding's error depends on where its value lies between two powers of two. Kernels
multiply sums by ``scale`` before or after a rounding, so they round other multiples than one evaluation of the formula does, and their
error is another draw from the same distribution. For gradients of g at gates and magnitudes like these, one draw is less than half of
another one in 5 of 100 pairs, and the largest of four is in 1 of 1000.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..gpu.dyadic import lengths, levels
from ..tokens.pieces import CHUNK, advance_by
from . import chunkwise, summary
from .declaration import Advance, Recurrence

BFLOAT16 = 8
"""Bits of bfloat16. If operands have as many, kernels store states before chunks in it, where a call has more than one chunk."""
DRAWS = tuple(2 ** (n / 4) for n in range(4))
"""Factors of sums of products before they are rounded: one for each draw of the error."""


class _Rounded(torch.autograd.Function):
    """Rounds x, and its gradient in the backward pass, to a number of significant bits.

    The gradient is a sum of products: it is rounded as a multiple by ``draw``. x is too if it is a ``total`` of products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int, draw: float, total: bool) -> Tensor:
        ctx.bits, ctx.draw = bits, draw
        return _significant(x, bits, draw if total else 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _significant(grads[0], ctx.bits, ctx.draw), None, None, None


def _significant(x: Tensor, bits: int, draw: float = 1.0) -> Tensor:
    """Round x times ``draw`` to ``bits`` significant bits, and divide it by ``draw``."""
    mantissa, exponent = torch.frexp(x * draw)
    return torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent) / draw


class _Carried(torch.autograd.Function):
    """The state after a chunk, total * S + added, whose backward pass rounds as kernels do.

    The gradient of this state is an operand of the products for the gradients of k and v. The gradient of total, a term of dg, is a sum
    over S times it: ``stored`` is the number of bits that both have in memory, or None if they are float32.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, S: Tensor, added: Tensor, bits: int, stored: int | None, draw: float) -> Tensor:
        ctx.save_for_backward(total, S if stored is None else _significant(S, stored, draw))
        ctx.bits, ctx.stored, ctx.draw = bits, stored, draw
        return total * S + added

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, S = ctx.saved_tensors
        (dS,) = grads
        d_total = S * (dS if ctx.stored is None else _significant(dS, ctx.stored, ctx.draw))
        return d_total.sum(3, keepdim=True), total * dS, _significant(dS, ctx.bits, ctx.draw), None, None, None


def forward(problem: Recurrence, bits: int, draw: float = 1.0) -> tuple[Tensor, Tensor]:
    """Output and final state in float64 by the dyadic chunkwise formula with operands rounded to ``bits`` significant bits.

    The problem must be float64. Any decay is allowed. ``draw``: one of ``DRAWS``.
    """
    p = problem.forward_in_time()
    gate = torch.zeros_like(p.q) if p.gate is None else p.gate.expand(p.q.shape).clamp(min=-1e4)  # 0 * inf is NaN
    S = p.q.new_zeros(p.state_shape) if p.initial_state is None else p.initial_state
    if p.cu_seqlens is None:
        output, S = _sequences(p, slice(None), gate, S, bits, draw)
    else:
        found = [_sequences(p, slice(begin, end), gate, S[n : n + 1], bits, draw) for n, (begin, end) in enumerate(p.spans())]
        output, S = torch.cat([o for o, _ in found], 1), torch.cat([state for _, state in found])
    return p.back_in_time(p.scale * output, S)


def _sequences(p: Recurrence, tokens: slice, gate: Tensor, S: Tensor, bits: int, draw: float) -> tuple[Tensor, Tensor]:
    """Output without its scale, and final state, of these tokens of all batch rows."""

    def rounded(x: Tensor, total: bool = False) -> Tensor:
        return _Rounded.apply(x, bits, draw, total)  # type: ignore[no-any-return, no-untyped-call]

    previous = p.variant.read == "previous"
    given = [x[:, tokens].transpose(1, 2) for x in (p.q, p.k, p.v, gate)]
    T = given[0].shape[2]
    q, k, v, g = (torch.nn.functional.pad(x, (0, 0, 0, -T % CHUNK)).unflatten(2, (-1, CHUNK)) for x in given)
    *inner, lower, strict, rest = ((M @ g).exp() for M in levels(CHUNK, previous, 0, g.device).to(g.dtype))  # [B, H, chunks, CHUNK, K]
    t = torch.arange(CHUNK, device=g.device)
    A = torch.diag_embed((q * k if p.u is None else q * k * p.u[:, None, None]).sum(4))
    for L, f in zip(lengths(CHUNK), inner):
        half = t // L
        X = rounded(f * torch.where((half % 2 == 1)[:, None], q, k))
        A = A + torch.where((half[:, None] == half + 1) & (half % 2 == 0), X @ X.mT, 0.0)
    output, total = rounded(A, True) @ rounded(v), g.sum(3).exp()
    reads, added = rounded(q * (strict if previous else lower)), rounded(k * rest).mT @ rounded(v)
    stored = bits if bits == BFLOAT16 and T > CHUNK else None
    of_states = []
    for n in range(g.shape[2]):
        of_states.append(reads[:, :, n] @ rounded(S, True))
        S = _Carried.apply(total[:, :, n, :, None], S, added[:, :, n], bits, stored, draw)  # type: ignore[no-untyped-call]
    if of_states:
        output = output + torch.stack(of_states, 2)
    return output.flatten(2, 3)[:, :, :T].transpose(1, 2), S


def formulas(bits: int) -> list[partial[tuple[Tensor, Tensor]]]:
    """``forward`` with each of ``DRAWS``. An error from rounding is the largest of theirs."""
    return [partial(forward, bits=bits, draw=draw) for draw in DRAWS]


def advance(problem: Advance, bits: int) -> Tensor:
    """The output of an update in place, in float64: pieces of 64 tokens by ``forward``, the other tokens without rounding."""
    return advance_by(lambda p: forward(p, bits) if p.sizes["T"] == CHUNK else chunkwise.forward(p), problem)


def advances(bits: int) -> list[Callable[[Advance], tuple[Tensor]]]:
    """``advance``, with one draw of the rounding."""
    return [lambda problem: (advance(problem, bits),)]


def summaries(bits: int) -> list[partial[tuple[Tensor, Tensor]]]:
    """Summaries in float64 whose products round their operands, with one draw of the rounding: no operand is a sum."""
    return [partial(summary.forward, operand=lambda x: _Rounded.apply(x, bits, 1.0, False))]  # type: ignore[no-untyped-call]
