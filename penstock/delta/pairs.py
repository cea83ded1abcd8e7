"""Pairs of tokens of a chunk: how later rows (q and a) see earlier columns (b, and k with two streams) through the decays between them.

    A_ts = sum over channels of row_t o exp(sum_{s<u<=t} g_u) o column_s            s < t; for rows q also s = t, without a decay
    rows a that read "before" the decay of their token:  exp(sum_{s<u<t} g_u)

With decays per channel A is built by halving: a span of 2 L tokens is split in two, and every token of its second half sees each token of
the first through the border between them. Both factors begin at the border and are at most 1, so any decay is exact. A decay that is the
same for all channels multiplies the products of rows and columns. Tensors are [..., C, *], C a power of two. All operations are
differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..tokens.chunks import beyond, through
from .arithmetic import EXACT, Arithmetic


class Pairs(NamedTuple):
    """Matrices [..., C, C] of each column tensor."""

    q: tuple[Tensor, ...]
    """s <= t"""
    a: tuple[Tensor, ...]
    """s < t"""


class Inputs(NamedTuple):
    """What pairs are computed from."""

    q: Tensor
    a: Tensor
    columns: tuple[Tensor, ...]
    """b, and k with two streams"""
    g: Tensor | None
    """[..., C, K or 1]"""
    after: bool
    """Whether a reads after the decay of its token."""
    by: Arithmetic = EXACT

    @property
    def halved(self) -> bool:
        """Whether pairs are computed by halving."""
        return self.g is not None and (self.g.shape[-1] > 1 or not self.after)


class Level(NamedTuple):
    """One halving: rows of second halves, columns of first halves [..., spans, L, *], and their factors."""

    factors: tuple[Tensor, Tensor]
    """of q and of a"""
    rows: tuple[Tensor, Tensor]
    """q and a times their factors"""
    factor: Tensor
    """of columns"""
    columns: tuple[Tensor, ...]
    """columns times their factor"""


def _level(x: Inputs, half: int) -> Level:
    def halves(y: Tensor) -> Tensor:
        found: Tensor = y.unflatten(-2, (-1, 2, half))
        return found

    assert x.g is not None
    g = halves(x.g)
    later, earlier = g[..., 1, :, :], g[..., 0, :, :]
    of_q = through(later, own=True).exp()
    of_a = of_q if x.after else through(later, own=False).exp()
    of_columns = beyond(earlier).exp()
    rows = halves(x.q)[..., 1, :, :] * of_q, halves(x.a)[..., 1, :, :] * of_a
    return Level((of_q, of_a), rows, of_columns, tuple(halves(y)[..., 0, :, :] * of_columns for y in x.columns))


def _halves_of(size: int) -> list[int]:
    """1, 2, 4, ... below ``size``."""
    return [1 << power for power in range(size.bit_length() - 1)]


def forward(x: Inputs) -> Pairs:
    """The matrices of all pairs."""
    product, own = x.by.product, [(x.q * column).sum(-1) for column in x.columns]
    if not x.halved:
        decays = _decays(x)
        of_q, of_a = ([product(y, column.mT) for column in x.columns] for y in (x.q, x.a))
        if decays is not None:
            of_q, of_a = [A * decays for A in of_q], [A * decays for A in of_a]
        of_q = [A.tril(-1) + torch.diag_embed(e) for A, e in zip(of_q, own)]
        return Pairs(tuple(of_q), tuple(A.tril(-1) for A in of_a))
    blocks = [[e[..., None, None] for e in own], [torch.zeros_like(e)[..., None, None] for e in own]]  # [..., spans, L, L]
    for half in _halves_of(x.q.shape[-2]):
        level = _level(x, half)
        for of_rows, rows in zip(blocks, level.rows):
            for place, (block, columns) in enumerate(zip(of_rows, level.columns)):
                upper, lower = block.unflatten(-3, (-1, 2)).unbind(-3)
                crossing = product(rows, columns.mT)
                whole = torch.cat([upper, torch.zeros_like(crossing)], -1), torch.cat([crossing, lower], -1)
                of_rows[place] = torch.cat(whole, -2)
    return Pairs(*(tuple(block.squeeze(-3) for block in of_rows) for of_rows in blocks))


def _decays(x: Inputs) -> Tensor | None:
    """exp(sum_{s<u<=t} g_u) [..., C, C] of decays that are the same for all channels: a sum of its own for every s."""
    if x.g is None:
        return None
    C = x.q.shape[-2]
    later = torch.ones(C, C, dtype=torch.bool, device=x.q.device).tril(-1)
    return torch.where(later, x.g, 0).cumsum(-2).exp()


class Gradients(NamedTuple):
    """Gradients of ``Inputs``."""

    q: Tensor
    a: Tensor
    columns: tuple[Tensor, ...]
    g: Tensor | None


def backward(x: Inputs, A: Pairs, dA: Pairs) -> Gradients:
    """From the matrices and their gradients. Every term of dg is a pair that lies on both sides of its token."""
    product = x.by.product
    own = [torch.diagonal(d, dim1=-2, dim2=-1)[..., None] for d in dA.q]
    dq, da = sum((e * column for e, column in zip(own, x.columns)), torch.zeros_like(x.q)), torch.zeros_like(x.a)
    columns = [e * x.q for e in own]
    if not x.halved:
        decays = _decays(x)
        of_q, of_a = [d.tril(-1) for d in dA.q], [d.tril(-1) for d in dA.a]
        dg = None if decays is None else _between(sum(d * B for d, B in zip((*of_q, *of_a), (*A.q, *A.a))))  # type: ignore[arg-type]
        if decays is not None:
            of_q, of_a = [d * decays for d in of_q], [d * decays for d in of_a]
        for place, column in enumerate(x.columns):
            dq, da = dq + product(of_q[place], column), da + product(of_a[place], column)
            columns[place] = columns[place] + product(of_q[place].mT, x.q) + product(of_a[place].mT, x.a)
        return Gradients(dq, da, tuple(columns), dg)
    assert x.g is not None
    dg = torch.zeros_like(x.q)
    for half in _halves_of(x.q.shape[-2]):
        level, none = _level(x, half), torch.zeros_like
        rows = []
        seen = [torch.zeros_like(y) for y in level.columns]
        for r, d in zip(level.rows, dA):
            crossing = [_crossing(y, half) for y in d]
            rows.append(sum(product(P, y) for P, y in zip(crossing, level.columns)))
            seen = [y + product(P.mT, r) for y, P in zip(seen, crossing)]
        products = [r * d for r, d in zip(level.rows, rows)]
        later = _from(products[0], own=True) + _from(products[1], own=x.after)
        earlier = through(sum(y * d for y, d in zip(level.columns, seen)), own=False)  # type: ignore[arg-type]
        dg = dg + _joined(earlier, later)
        dq, da = (old + _joined(none(new), f * new) for old, f, new in zip((dq, da), level.factors, rows))  # type: ignore[arg-type]
        columns = [old + _joined(level.factor * new, none(new)) for old, new in zip(columns, seen)]
    return Gradients(dq, da, tuple(columns), dg.sum(-1, keepdim=True) if x.g.shape[-1] == 1 else dg)


def _crossing(d: Tensor, half: int) -> Tensor:
    """The blocks [..., spans, L, L] of a matrix whose rows are second halves and whose columns are first halves of one span."""
    blocks = d.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))  # [..., spans, 2, L, spans, 2, L]
    return torch.diagonal(blocks[..., 1, :, :, 0, :], dim1=-4, dim2=-2).movedim(-1, -3)


def _joined(earlier: Tensor, later: Tensor) -> Tensor:
    """Halves of all spans back to [..., C, *]."""
    return torch.stack([earlier, later], -3).flatten(-4, -2)


def _from(x: Tensor, own: bool) -> Tensor:
    """Sums over axis -2 of all tokens from each token on, itself included or not."""
    return through(x.flip(-2), own).flip(-2)


def _between(terms: Sequence[Tensor] | Tensor) -> Tensor:
    """The sum of terms [..., i, s] with s < t <= i, for each t: [..., C, 1]."""
    assert isinstance(terms, Tensor)
    before = torch.nn.functional.pad(terms.cumsum(-1)[..., :-1], (1, 0))  # [i, t]: s < t
    return before.tril().sum(-2)[..., None]
