"""What layers exchange between the slices of a context: tokens before a slice, all tokens, and results that belong to sequences.

One sequence, or each batch row, crosses a border. A rank offers the last tokens of the sequence that leaves its slice, and all ranks
gather them; the ranks after it take what they need, from several ranks if slices are short. Every rank makes every call, also without
tokens, and each result is a function of this rank's tokens for autograd: so the backward pass, which sums the gradients of a token on its
rank, exchanges in the same order on every rank. Gradients of gradients are not supported.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .context import FUNCTION, ContextParallel, Slice
from .exchange import exchange, gathered, summed


def earlier(context: ContextParallel, x: Tensor, most: int | None = None) -> Tensor:
    """The last tokens before this slice of its first sequence (each batch row), as x [B,T,...] of the ranks before: [B,m,...].

    m is the number of such tokens, but at most ``most``; 0 if the sequence begins here.
    """
    leaving = [_leaving(context, one) for one in context.slices]
    width = max(leaving) if most is None else min(max(leaving), most)
    if width == 0:
        return x[:, :0]
    own = min(leaving[context.rank], width)
    padding = x.new_zeros(x.shape[0], width - own, *x.shape[2:])
    offered = _gathered(torch.cat([padding, x[:, context.tokens - own :]], 1), context)
    taken = [offered[rank][:, width - count :] for rank, count in _taken(context, context.slice.begin if most is None else most)]
    return torch.cat(taken, 1) if taken else offered[0][:, :0]


def entering(context: ContextParallel, x: Tensor, tails: Tensor) -> Tensor:
    """The W rows before the tokens of each sequence of this slice, [n,W,...].

    ``tails`` [N,W,...] are the rows before all sequences. Rows of x [B,T,...], of the ranks before, follow them.
    """
    rows, tails, own = earlier(context, x, tails.shape[1]), tails.to(x.dtype), context.slice.sequences
    count = rows.shape[1]
    if context.offsets is None:
        return torch.cat([tails[:, count:], rows], 1)
    before = tails[own.start : own.start + 1] if own else tails.new_zeros(1, *tails.shape[1:])
    first = torch.cat([before[:, count:], rows], 1)
    return torch.cat([first[: len(own[:1])], tails[own.start + 1 : own.stop]])


def ending(context: ContextParallel, x: Tensor) -> Tensor:
    """The rows of all sequences [N,...], on every rank, from the ranks on which they end: x [n,...] of the sequences of this slice."""
    return _summed(context.of_ended(x), context)


def whole(context: ContextParallel, x: Tensor) -> Tensor:
    """The tokens of all ranks, [B,T',...], from those of this rank, x [B,T,...]."""
    lengths = [one.end - one.begin for one in context.slices]
    padding = x.new_zeros(x.shape[0], max(lengths) - context.tokens, *x.shape[2:])
    found = _gathered(torch.cat([x, padding], 1), context)
    return torch.cat([one[:, :length] for one, length in zip(found, lengths)], 1)


def following(context: ContextParallel, x: Tensor, fill: int) -> Tensor:
    """The token after this slice of its last sequence, [B,1], from x [B,T]: that of a later rank, or ``fill`` if the sequence ends here."""
    first = torch.cat([x[:, :1], x.new_full((x.shape[0], 1 - min(context.tokens, 1)), fill)], 1)
    if not any(one.leaves for one in context.slices):
        return torch.full_like(first, fill)
    found = _gathered(first, context)
    if not context.slice.leaves:
        return torch.full_like(first, fill)
    return found[next(rank for rank, one in enumerate(context.slices) if one.begin < one.end and one.begin >= context.slice.end)]


def total(context: ContextParallel, x: Tensor) -> Tensor:
    """The sum over ranks of x, without gradients."""
    return _summed(x.detach(), context)


def _begin(context: ContextParallel, one: Slice, place: int) -> int:
    """The token with which a slice's first or last sequence begins, on the whole token axis."""
    return 0 if context.offsets is None else context.offsets[one.sequences[place]]


def _leaving(context: ContextParallel, one: Slice) -> int:
    """The tokens of a slice that belong to the sequence that leaves it."""
    return one.end - max(one.begin, _begin(context, one, -1)) if one.leaves else 0


def _taken(context: ContextParallel, most: int) -> list[tuple[int, int]]:
    """The ranks whose tokens are the last ones before this slice, and how many each has, the earliest first."""
    found: list[tuple[int, int]] = []
    if not context.slice.enters:
        return found
    begin = _begin(context, context.slice, 0)
    for rank in range(context.rank - 1, -1, -1):
        one = context.slices[rank]
        count = min(one.end - max(one.begin, begin), most - sum(taken for _, taken in found))
        if count > 0:
            found.insert(0, (rank, count))
    return found


def _gathered(x: Tensor, context: ContextParallel) -> Tensor:
    """X of all ranks, [R,...]."""
    return _exchanged(_Gathered, x, context)


def _summed(x: Tensor, context: ContextParallel) -> Tensor:
    """The sum of x over the ranks, on every rank."""
    return _exchanged(_Summed, x, context)


def _exchanged(function: Any, x: Tensor, context: ContextParallel) -> Tensor:
    apply = function.apply
    if torch.compiler.is_compiling():  # compiled graphs break here; the decorator would import the compiler at once
        apply = torch.compiler.disable(apply)
    found: Tensor = apply(x.contiguous(), context.group)
    return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(FUNCTION, x, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if gradient.is_cuda:
            own = gradient.new_empty(gradient.shape[1:])
            exchange(FUNCTION, dist.reduce_scatter_tensor, own, gradient.contiguous(), group=ctx.group)
            return own, None
        every = summed(FUNCTION, gradient.contiguous().clone(), ctx.group)
        return every[dist.get_rank(ctx.group)].clone(), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return summed(FUNCTION, x.clone(), group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(FUNCTION, gradient.contiguous().clone(), ctx.group), None
