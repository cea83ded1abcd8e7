"""The chunkwise formula with rounded operands: the error of a kernel whose matrix products have operands of low precision.

Everything else is float64, so the error against the oracle comes from the rounded operands only. A kernel's budget is twice that error
plus one rounding of the result.
"""

from __future__ import annotations

from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..call.derivatives import Tensors, gradients_of
from ..recurrence import chunkwise
from ..recurrence.advance import CHUNK, advance_by
from ..recurrence.declaration import Advance, Recurrence
from ..recurrence.gradients import Gradients
from .oracle import by_result, error


class _Rounded(torch.autograd.Function):
    """Rounds x, and its gradient in the backward pass, to a number of significant bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int) -> Tensor:
        ctx.bits = bits
        return _significant(x, bits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _significant(grads[0], ctx.bits), None


def _significant(x: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent)


def forward(problem: Recurrence, bits: int) -> tuple[Tensor, Tensor]:
    """Output and final state in float64 by the anchored chunkwise formula with operands rounded to ``bits`` significant bits.

    The problem must be float64 and not packed, with decays within a chunk above 2 ** -1000.
    """

    def rounded(x: Tensor) -> Tensor:
        return _Rounded.apply(x, bits)  # type: ignore[no-any-return, no-untyped-call]

    p = problem.forward_in_time()
    B, T, H, K = p.q.shape
    previous = p.variant.read == "previous"
    q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))  # [B, H, T, *]
    gate = torch.zeros_like(q) if p.gate is None else p.gate.expand(B, T, H, K).transpose(1, 2)
    S = q.new_zeros(B, H, K, v.shape[3]) if p.initial_state is None else p.initial_state
    outputs = []
    for t in range(0, T, CHUNK):
        qc, kc, vc, g = (x[:, :, t : t + CHUNK] for x in (q, k, v, gate))
        G = g.cumsum(2)
        own = (qc * kc if p.u is None else qc * kc * p.u[:, None]).sum(3)
        qt, kt = rounded(qc * (G - g if previous else G).exp()), rounded(kc * (-G).exp())
        A = (qt @ kt.mT).tril(-1) + torch.diag_embed(own)
        outputs.append(rounded(A) @ rounded(vc) + qt @ rounded(S))
        S = G[:, :, -1, :, None].exp() * (S + kt.mT @ rounded(vc))
    output = torch.cat(outputs, 2).transpose(1, 2) if outputs else torch.zeros_like(p.v)
    return p.back_in_time(p.scale * output, S)


def advance(problem: Advance, bits: int) -> Tensor:
    """The output of an update in place, in float64: pieces of 64 tokens by ``forward``, the other tokens without rounding."""
    return advance_by(lambda p: forward(p, bits) if p.sizes["T"] == CHUNK else chunkwise.forward(p), problem)


def errors(problem: Recurrence, bits: int, exact: dict[str, Tensor], d_results: Tensors = ()) -> dict[str, float]:
    """Errors of the results in ``exact`` from rounding the operands, by name.

    Gradients are computed if ``d_results`` are given. An error is 0 if the formula overflows.
    """
    names = [name for name in Gradients._fields if getattr(problem, name) is not None]
    problem = problem.with_tensors({name: getattr(problem, name).detach().double() for name in names})
    formula = partial(forward, bits=bits)
    with torch.no_grad():
        found = dict(zip(("output", "final state"), formula(problem)))
        if d_results:
            doubles = [None if d is None else d.double() for d in d_results]
            found |= by_result(dict(zip(Gradients._fields, gradients_of(formula, problem, doubles))))
    found_errors = {name: error(found[name], x) for name, x in exact.items() if name in found}
    return {name: x if isfinite(x) else 0.0 for name, x in found_errors.items()}
