"""The chunkwise formulas with rounded operands: the errors of a kernel whose matrix products have operands of low precision.

Everything else is float64, so the error against the oracle comes from the rounded operands only. Operands of the products that make T, and
of those with T (Aq T, T^T (b o rest)), keep 11 bits where others have 8: float16 beside bfloat16. The backward pass is that of
``chunkwise.py``.

There are several draws of the rounding. The error is the largest difference of a result, which a few roundings can dominate, and the error
of a rounding depends on where its value lies between two powers of two. So values that are not exact are rounded as multiples by each of
``DRAWS``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..call.derivatives import Tensors
from ..call.implementation import Upstream
from ..tokens.pieces import CHUNK, advance_by
from . import chunkwise
from .arithmetic import EXACT, Arithmetic
from .declaration import Advance, Delta
from .inputs import canonical, computed, is_raw, of_every_head

BFLOAT16, FLOAT16 = 8, 11
"""Bits of operands. With those of bfloat16, kernels keep states before chunks in it."""
DRAWS = tuple(2 ** (n / 4) for n in range(4))


def significant(x: Tensor, bits: int, draw: float = 1.0) -> Tensor:
    """Round x times ``draw`` to ``bits`` significant bits, and divide it by ``draw``. What has so few bits stays."""

    def nearest(y: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(y)
        return torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent)

    return x if draw == 1.0 and bits > 52 else torch.where(nearest(x) == x, x, nearest(x * draw) / draw)


def arithmetic(bits: int, draw: float) -> Arithmetic:
    """Products whose operands are rounded."""
    more = FLOAT16 if bits == BFLOAT16 else bits

    def operand(x: Tensor) -> Tensor:
        return significant(x, bits, draw)

    def inner(x: Tensor) -> Tensor:
        return significant(x, more, draw)

    def beyond_identity(L: Tensor) -> Tensor:
        """T less the identity: entries of L are operands of the products that make it."""
        one = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
        return EXACT.left(one + inner(L - one), one.expand_as(L)) - one

    def product(x: Tensor, y: Tensor) -> Tensor:
        return operand(x) @ operand(y)

    return Arithmetic(
        product,
        lambda L, x: x + inner(x) @ inner(beyond_identity(L)),
        lambda L, x: x + inner(beyond_identity(L)).mT @ inner(x),
        lambda L, x: x + product(beyond_identity(L), x),
        operand if bits == BFLOAT16 else EXACT.stored,
    )


class _Rounded(torch.autograd.Function):
    """Output and final state of a canonical problem, with the gradients of ``chunkwise.canonical_backward``."""

    @staticmethod
    def forward(ctx: Any, problem: Delta, by: Arithmetic, names: tuple[str, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.problem, ctx.by, ctx.names = problem.with_tensors(dict(zip(names, tensors))), by, names
        return chunkwise.canonical_forward(ctx.problem, by)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = chunkwise.canonical_backward(ctx.problem, Upstream(grads), ctx.by)._asdict()
        return None, None, None, *(found[name] for name in ctx.names)


def forward(problem: Delta, bits: int, draw: float = 1.0) -> Tensors:
    """Output and final state in float64 with operands rounded to ``bits`` significant bits. The problem must be float64.

    ``draw``: one of ``DRAWS``.
    """
    p = canonical(problem, computed(problem, wide=True)) if is_raw(problem) else problem
    p = of_every_head(p)
    given = {one.name: getattr(p, one.name) for one in p.signature.arguments if one.gradient}
    given = {name: x for name, x in given.items() if x is not None}
    found: Tensors = _Rounded.apply(p, arithmetic(bits, draw), tuple(given), *given.values())  # type: ignore[no-untyped-call]
    return found


def formulas(bits: int) -> list[partial[Tensors]]:
    """``forward`` with each of ``DRAWS``. An error from rounding is the largest of theirs."""
    return [partial(forward, bits=bits, draw=draw) for draw in DRAWS]


def advance(problem: Advance, bits: int) -> Tensor:
    """The output of an update in place, in float64: pieces of 64 tokens by ``forward``, the other tokens without rounding."""
    return advance_by(lambda p: forward(p, bits) if p.sizes["T"] == CHUNK else chunkwise.forward(p), problem)


def advances(bits: int) -> list[Callable[[Advance], tuple[Tensor]]]:
    """``advance``, with one draw of the rounding."""
    return [lambda problem: (advance(problem, bits),)]
