"""Interpolations between each token and the one before it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.functions import applied
from ..call.recompute import again
from .activations import tanh
from .chains import Chain, ChainForm, native, plain
from .cpu import refusal as refusal_of_native
from .cpu.linear import Product, products, refuses_rows
from .examples import Draw, examples
from .linear import linear
from .modes import mode, ready
from .pool_rows import PoolRows
from .sequences import Sequences, drawn
from .triton import launching, refusal

FACTORS = 6
"""The most factors of the kernels."""
LOW_RANK_FACTORS = 5
"""The most factors with a low-rank part."""
RANK = 64
"""The largest M of the kernels."""


class TokensBefore(NamedTuple):
    """The token before each token."""

    x: Tensor
    """[B,T,C]"""


class Shifted(NamedTuple):
    """The results of ``decode.shifted_norm``, all of one shape."""

    total: Tensor
    """x + y."""
    normed: Tensor
    """Its norm; undefined without ``kept``."""
    before: Tensor
    """The norm of the previous token, or the row of the pool; undefined without ``kept``."""
    mixed: tuple[Tensor, ...]
    """normed + (before - normed) m_i."""


class _Shift(NamedTuple):
    """The arguments of ``token_shift``. The kernel reads rows ``slots`` of ``last``, if there are slots; ``read`` copies them."""

    x: Tensor
    last: Tensor
    rows: PoolRows | None
    sequences: Sequences
    factors: tuple[Tensor, ...]
    hidden: Tensor | None
    """[B*T,n,M]"""
    up: Tensor | None
    kept: bool
    complement: bool


class _Pairs(NamedTuple):
    """The arguments of ``token_shift`` for tokens x [R,C] and the token before each, [R,C]."""

    x: Tensor
    before: Tensor
    factors: tuple[Tensor, ...]
    hidden: Tensor | None
    """[R,n,M]"""
    up: Tensor | None


def token_shift(
    x: Tensor, last: Tensor | PoolRows | TokensBefore, sequences: Sequences, *factors: Tensor,
    low_rank: tuple[Tensor, Tensor] | None = None, kept: bool = False, complement: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    r"""Interpolations between each token and the one before it.

    .. math:: y_{i,t} = x_t + (x_{t-1} - x_t) m_i, \qquad m_i = factors_i + \tanh(hidden_{i,t}) W_i

    x : Tensor [B,T,C]
    last : Tensor [N,C], PoolRows, or TokensBefore
        The token before the first one of each sequence, or before every token.
    factors : Tensors of C elements
    low_rank : (hidden [B,T,n,M], W [n,M,C]), optional
        A low-rank part of the factors, per token.
    kept : bool
        Return x, too, for its other uses. Without ``low_rank``, the backward kernel adds their gradient to that of x.
    complement : bool
        Without ``low_rank``: m_i = 1 - factors_i, computed as :math:`x_{t-1} + (x_t - x_{t-1}) factors_i`, exact for small factors.

    Returns one Tensor [B,T,C] for each of the factors.
    """
    if kept and (low_rank is not None or not torch.is_grad_enabled()):
        return *token_shift(x, last, sequences, *factors, low_rank=low_rank, complement=complement), x
    hidden, up = low_rank or (None, None)
    if hidden is not None:
        hidden = hidden.flatten(0, 1)
    if isinstance(last, TokensBefore):
        return tuple(one.view(x.shape) for one in PAIRS(_Pairs(x.flatten(0, 1), last.x.flatten(0, 1), factors, hidden, up)))
    first, rows = (last.pool, last) if isinstance(last, PoolRows) else (last, None)
    return SHIFT(_Shift(x, first, rows, sequences, factors, hidden, up, kept, complement))


def _refuses(c: _Shift) -> str | None:
    if len(c.factors) > (most := FACTORS if c.up is None else LOW_RANK_FACTORS):
        return f"it takes at most {most} factors{'' if c.up is None else ' with a low-rank part'}, got {len(c.factors)}"
    if c.up is not None and c.up.shape[1] > RANK:
        return f"it takes low-rank parts of at most {RANK}, got {c.up.shape[1]}"
    return refusal(c.x, c.last, *c.factors, c.hidden, c.up)


def _by_kernel(c: _Shift) -> tuple[Tensor, ...]:
    launch, starts = launching("token_shift_launch"), c.sequences.starts
    if torch.is_grad_enabled():
        options = _formula_of(c), c.kept, c.complement

        def function(*given: Tensor | None) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = applied(launch.TokenShift, *given[:5], *options, *given[5:])
            return found

        last, *low_rank = _differentiable(c)
        given = c.x.contiguous(), last, starts, *low_rank, *c.factors
        return again(function(*given), function, *given)
    flat, (up, hidden) = c.x.flatten(0, 1).contiguous(), (None if one is None else one.contiguous() for one in (_up(c), c.hidden))
    rows = [factor.reshape(-1).contiguous() for factor in c.factors]
    slots = None if c.rows is None else c.rows.slots
    y: Tensor = launch.shifted(flat, c.last, starts, slots, rows, hidden, up, tanh=up is not None, complement=c.complement)
    return y.view(len(rows), *c.x.shape).unbind()


def _by_formula(c: _Shift) -> tuple[Tensor, ...]:
    function, mu, (last, *low_rank) = _formula_of(c), torch.stack([factor.reshape(-1) for factor in c.factors]), _differentiable(c)
    given = c.x.flatten(0, 1).contiguous(), last, None if c.sequences.single else c.sequences.starts, mu, *low_rank
    return tuple([one.view(c.x.shape) for one in again(function(*given), function, *given)])


def _up(c: _Shift) -> Tensor | None:
    return None if c.up is None or c.hidden is None else c.up.to(c.hidden.dtype)


def _formula_of(c: _Shift) -> Any:
    return partial(kept_formula if c.kept else shift_formula, complement=c.complement)


def _differentiable(c: _Shift) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The token before each sequence, tanh(hidden) and W, contiguous."""
    last, up = (c.last if c.rows is None else c.rows.read()).to(c.x.dtype), _up(c)
    hidden = None if c.hidden is None else tanh(c.hidden)
    return last.contiguous(), *(None if one is None else one.contiguous() for one in (hidden, up))  # type: ignore[return-value]


def _kernels(c: _Shift) -> tuple[str, ...]:
    if not torch.is_grad_enabled():
        return ("penstock_shift_fwd",)
    if c.up is None:
        return "penstock_shift_fwd", "penstock_shift_bwd"
    return "penstock_shift_fwd", "penstock_shift_low_rank_bwd", "penstock_shift_hidden_bwd", "penstock_shift_weights_bwd"


def _refuses_pairs(c: _Pairs) -> str | None:
    if torch.is_grad_enabled():
        return "it computes no gradients, and gradients are on"
    if c.hidden is None:
        return "it computes factors with a low-rank part, and there is none"
    if len(c.factors) > LOW_RANK_FACTORS:
        return f"it takes at most {LOW_RANK_FACTORS} factors, got {len(c.factors)}"
    return refusal(c.x, c.before, *c.factors, c.hidden, c.up)


def _pairs_by_kernel(c: _Pairs) -> tuple[Tensor, ...]:
    assert c.hidden is not None and c.up is not None  # noqa: PT018
    mu, rows = [one.reshape(-1).contiguous() for one in c.factors], c.up.to(c.hidden.dtype).contiguous()
    early = ready((*c.factors, c.up), (*mu, rows))
    found: tuple[Tensor, ...] = launching("few_rows_launch").low_rank(c.hidden.contiguous(), rows, mu, c.x, c.before, early=early)
    return found


def _refuses_pairs_natively(c: _Pairs) -> str | None:
    if not c.x.is_cpu:
        return "its tensors are not on a CPU"
    if c.hidden is None or c.up is None:
        return "it computes factors with a low-rank part, and there is none"
    if (why := refusal_of_native("products", (c.x, c.before, *c.factors, c.hidden, c.up), alike=True)) is not None:
        return why
    sizes = c.before.shape == c.x.shape and c.up.shape == (*c.hidden.shape[1:], c.x.shape[1]) and len(c.hidden) == len(c.x)
    if not sizes or len(c.factors) != len(c.up) or any(one.numel() != c.x.shape[1] for one in c.factors):
        return "sizes differ"
    return refuses_rows(c.hidden[:, 0], [c.up[0]]) if c.up.is_contiguous() else "the weight must be contiguous"


def _pairs_natively(c: _Pairs) -> tuple[Tensor, ...]:
    assert c.hidden is not None and c.up is not None  # noqa: PT018
    each = zip(c.factors, c.hidden.unbind(1), c.up.unbind())
    return tuple(products([Product(low, up, "tanh", shift=(c.x, c.before, mu), transposed=True) for mu, low, up in each]))


def _pairs_by_formula(c: _Pairs) -> tuple[Tensor, ...]:
    if c.hidden is None or c.up is None:
        return shift_formula(c.x, c.before, None, c.factors, None, None)
    return shift_formula(c.x, c.before, None, c.factors, tanh(c.hidden), c.up.to(c.hidden.dtype))


def _draw_shift(draw: Draw, low_rank: bool = False, pooled: bool = False, fixed: bool = True) -> _Shift:
    C, M = draw.size(72, 2048), draw.size(8, 32)
    x, ends = draw("x", 1, 19, C), [0, 7, 7, 19]
    count = LOW_RANK_FACTORS if low_rank else FACTORS
    last, factors = draw("last", 5 if pooled else 3, C, fixed=fixed), tuple(draw(f"factor {n}", C) for n in range(count))
    hidden, up = (draw("hidden", 19, 5, M), draw("up", 5, M, C, scale=0.3)) if low_rank else (None, None)
    sequences = drawn(draw, x, ends, [4, 0, 2] if pooled else [], in_place=pooled)
    rows = PoolRows(last, sequences.slots, lambda: sequences.read(last)) if sequences.slots is not None else None
    return _Shift(x, last, rows, sequences, factors, hidden, up, not (low_rank or pooled), pooled)


def _draw_pairs(draw: Draw) -> _Pairs:
    C, M, count = draw.size(72, 2048), draw.size(8, 32), draw.size(3, 5)
    factors = tuple(draw(f"factor {n}", C) for n in range(count))
    hidden, up = draw("hidden", 19, count, M), draw("up", count, M, C, scale=0.3)
    return _Pairs(draw("x", 19, C), draw("before", 19, C), factors, hidden, up)


SHIFT: Chain[_Shift, tuple[Tensor, ...]] = Chain(
    "token_shift",
    ChainForm(
        "shift", _by_kernel, _refuses, _kernels,
        (
            *examples(_draw_shift), *examples(partial(_draw_shift, low_rank=True)), *examples(partial(_draw_shift, fixed=False)),
            *examples(partial(_draw_shift, pooled=True), gradients=False),
        ),
    ),
    plain("formula", _by_formula),
)  # fmt: skip
PAIRS: Chain[_Pairs, tuple[Tensor, ...]] = Chain(
    "token_shift_of_pairs",
    native("native", "products", _pairs_natively, _refuses_pairs_natively, examples(_draw_pairs, gradients=False)),
    ChainForm(
        "low_rank", _pairs_by_kernel, _refuses_pairs, lambda c: ("penstock_low_rank",), examples(_draw_pairs, gradients=False)
    ),
    plain("formula", _pairs_by_formula),
)  # fmt: skip


def shift_formula(
    x: Tensor, last: Tensor, starts: Tensor | None, mu: Tensor | tuple[Tensor, ...], hidden: Tensor | None, up: Tensor | None,
    complement: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``token_shift`` of x [R,C]: mu are n rows of C elements, [C] or [1,1,C], hidden is [R,n,M].

    ``starts`` [R] is the index of the sequence that begins at a token, or -1. None: each token is a sequence.
    """
    if starts is not None:
        last = torch.where((starts < 0)[:, None], x.roll(1, 0), last.index_select(0, starts.clamp(min=0).long()))
    if complement:
        x, last = last, x
    dx = last - x
    if hidden is None or up is None:
        return tuple(torch.addcmul(x, dx, factor.to(x.dtype)) for factor in mu)
    rows = (mu if isinstance(mu, Tensor) else torch.stack(mu)).view(len(mu), 1, -1)
    if mode().alike:  # in torch's product, the bits of a row depend on its index
        factors = rows.to(hidden.dtype) + torch.stack([linear(one, part.T) for one, part in zip(hidden.unbind(1), up)])
    else:
        factors = torch.baddbmm(rows.to(hidden.dtype), hidden.transpose(0, 1), up)
    return torch.addcmul(x, dx, factors.to(x.dtype)).unbind()


def kept_formula(
    x: Tensor, last: Tensor, starts: Tensor | None, mu: Tensor | tuple[Tensor, ...], hidden: Tensor | None, up: Tensor | None,
    complement: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``shift_formula``, and x."""
    return *shift_formula(x, last, starts, mu, hidden, up, complement), x
