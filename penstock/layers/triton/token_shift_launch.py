"""Token shifts: the launches of their kernels, and the autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...gpu.launch import on_device_of
from ...gpu.target import Target, power
from . import token_shift
from .launch import Formula, Tensors, blocks, by_formula, by_torch, contiguous, first_tokens, limit, precision, shares, summed

FACTORS = 6
"""The most factors."""
LOW_RANK_FACTORS = 5
"""The most factors with a low-rank part."""


def shifted(
    x: Tensor, last: Tensor, starts: Tensor, slots: Tensor | None, factors: Sequence[Tensor], hidden: Tensor | None, up: Tensor | None,
    *, tanh: bool, complement: bool = False,
) -> Tensor:  # fmt: skip
    """y [N,R,C] of ``TokenShift`` for N factors [C]. With slots, ``last`` is a pool. ``tanh``: apply tanh to hidden."""
    (R, C), N, M = x.shape, len(factors), 0 if up is None else up.shape[1]
    y = x.new_empty(N, R, C)
    BR, BC, warps = (64, 64, 8) if M else (16, 256, 4)
    if y.numel():
        on_device_of(x, token_shift.penstock_shift_fwd)[blocks(R, BR), blocks(C, BC)](
            x, last, starts, starts if slots is None else slots, *factors, *[x] * (FACTORS - N), x if hidden is None else hidden,
            x if up is None else up, y, R, C, last.stride(0), N=N, M=M, BM=power(M, 16), BR=BR, BC=BC, PRECISION=precision(x),
            SLOTS=slots is not None, TANH=tanh, COMPLEMENT=complement, num_warps=warps,
        )  # fmt: skip
    return y


class TokenShift(torch.autograd.Function):
    """x [...,C], last [n,C], starts [R], hidden [R,N,M] and up [N,M,C] or None, and N factors of C elements: y_i [...,C].

    See ``token_shift``. Without a low-rank part: with ``kept``, x is a further result, whose gradient the backward kernel adds to that of
    x. With ``complement``, factors are 1 minus those given.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, last: Tensor, starts: Tensor, hidden: Tensor | None, up: Tensor | None, formula: Formula, kept: bool,
        complement: bool, *factors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The results."""
        rows = [one.reshape(-1).contiguous() for one in factors]
        y = shifted(x.flatten(0, -2), last, starts, None, rows, hidden, up, tanh=False, complement=complement)
        ctx.save_for_backward(x, last, starts, hidden, up, *factors)
        ctx.formula, ctx.complement = formula, complement
        ctx.set_materialize_grads(False)
        results = y.view(len(factors), *x.shape).unbind()
        return (*results, x) if kept else results

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> Tensors:
        """Gradients of all arguments."""
        x, last, starts, hidden, up, *factors = tensors = contiguous(*ctx.saved_tensors)
        if by_torch(*d_results):
            grads = by_formula(partial(_by_rows, ctx.formula), tuple(tensors), d_results)
            return *grads[:5], None, None, None, *grads[5:]
        N, shape, x, mu = len(factors), x.shape, x.flatten(0, -2), torch.stack([one.reshape(-1) for one in factors])
        dy = [torch.zeros_like(x) if d is None else d.contiguous().view(x.shape) for d in d_results[:N]]
        d_last = _of_last(last, starts, mu, hidden, up, dy, ctx.complement) if ctx.needs_input_grad[1] else None
        if hidden is not None and up is not None:
            dx, dmu, d_hidden, d_up = _low_rank_backward(x, last, starts, mu, hidden, up, dy)
            return dx.view(shape), d_last, None, d_hidden, d_up, None, None, None, *summed(dmu, *factors, programs=0)
        (R, C), further = x.shape, None if len(d_results) == N else d_results[N]
        BR, BC = 8 if N <= 2 else 2, 256
        programs, each = shares(blocks(R, BR), blocks(C, BC))
        dx, dmu = torch.empty_like(x), mu.new_empty(programs, N, C, dtype=torch.float32)
        if x.numel():
            on_device_of(x, token_shift.penstock_shift_bwd)[programs, blocks(C, BC)](
                x, last, starts, mu, *dy, *[x] * (FACTORS - N), x if further is None else further.contiguous(), dx, dmu, R, C, each,
                N=N, ADD=further is not None, COMPLEMENT=ctx.complement, BR=BR, BC=BC, AMD=Target.of(x.device).amd, num_warps=4,
                **limit(x, 128),
            )  # fmt: skip
        return dx.view(shape), d_last, *[None] * 6, *summed(dmu, *factors, programs=0)


def _by_rows(
    formula: Formula, x: Tensor, last: Tensor, starts: Tensor, hidden: Tensor | None, up: Tensor | None, *factors: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    """``TokenShift`` by the formula of rows."""
    return tuple([one.view(x.shape) for one in formula(x.flatten(0, -2), last, starts, factors, hidden, up)])


def _of_last(
    last: Tensor, starts: Tensor, mu: Tensor, hidden: Tensor | None, up: Tensor | None, dy: list[Tensor], complement: bool
) -> Tensor:
    """The gradient of ``last`` [n,C]: sum dy_t m at the first token of each sequence, in float32, rounded once."""
    if not len(starts):
        return torch.zeros_like(last)
    first, given = first_tokens(starts, len(last))
    m = mu.float()[:, None]
    if hidden is not None and up is not None:
        m = m + hidden[first].transpose(0, 1).float() @ up.float()
    d = torch.stack([one[first] for one in dy]).float()
    total = (d * (1 - m if complement else m)).sum(0)
    return torch.where(given[:, None], total, 0).to(last.dtype)


def _low_rank_backward(
    x: Tensor, last: Tensor, starts: Tensor, mu: Tensor, hidden: Tensor, up: Tensor, dy: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of mu in parts [programs,N,C], of hidden and of up.

    Each kernel recomputes dm = dy (p - x): storing it would cost one write and two reads.
    """
    (R, C), (N, M, _) = x.shape, up.shape
    given = [*dy, *[x] * (LOW_RANK_FACTORS - N)]
    constants = {"N": N, "M": M, "BM": power(M, 16), "PRECISION": precision(x)}
    half, BR, BC, amd = x.element_size() == 2, 64, 64, Target.of(x.device).amd
    options, stages = limit(x, 128) if half else {}, 2 if half and not amd else 1  # on Hopper, one stage takes 1.1 to 1.4 times as long
    programs, each = shares(blocks(R, BR), blocks(C, BC) * N)
    dx, d_hidden = torch.empty_like(x), torch.empty_like(hidden)
    dmu, d_up = (x.new_empty(programs, *shape, dtype=torch.float32) for shape in (mu.shape, (1, *up.shape)))
    if x.numel():
        tile = 32 if half else 16
        many, rows = shares(blocks(R, tile - 1), 2 * blocks(C, BC))  # programs of 8 warps, so half as many
        on_device_of(x, token_shift.penstock_shift_low_rank_bwd)[many, blocks(C, BC)](
            starts, mu, hidden, up, *given, dx, R, C, rows, **constants, BR=tile, BC=BC, num_warps=8,
            num_stages=stages, **options,
        )  # fmt: skip
        on_device_of(x, token_shift.penstock_shift_hidden_bwd)[(N * blocks(R, BR),)](
            x, last, starts, up, *given, d_hidden, R, C, **constants, BR=BR, BC=BC, AMD=amd, num_warps=4, num_stages=stages, **options
        )
        on_device_of(x, token_shift.penstock_shift_weights_bwd)[N, blocks(C, BC), programs](
            x,
            last,
            starts,
            hidden,
            *given,
            d_up,
            dmu,
            R,
            C,
            each,
            **constants,
            BR=BR,
            BC=BC,
            AMD=amd,
            num_warps=4,
            num_stages=stages,
            **options,
        )
    (d_up,) = summed(d_up, up, programs=0)
    return dx, dmu, d_hidden, d_up
