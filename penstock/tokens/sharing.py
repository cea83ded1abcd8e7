"""Arguments that several heads, sequences or tokens share, and the sums of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..call.declaration import Sizes
from ..errors import Complaints, ShapeError


def repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of x [B,T,G,K] for the heads that share it: [B,T,heads,K]. A single head is expanded with stride 0."""
    G = x.shape[2]
    if heads == G:
        return x
    return x.expand(-1, -1, heads, -1) if G == 1 else x.repeat_interleave(heads // G, 2)


def over_groups(x: Tensor, G: int, dtype: torch.dtype) -> Tensor:
    """The sums over consecutive heads of x [B,T,heads,K]: [B,T,G,K]."""
    return (x if x.shape[2] == G else x.unflatten(2, (G, -1)).sum(3)).to(dtype)


def summed(shares: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of an input's gradient over leading axes that the input does not have, in its dtype or the given one."""
    more = shares.dim() - like.dim()
    found = shares.sum(tuple(range(more))) if more else shares
    dtype = dtype or like.dtype
    return found if found.dtype == dtype else found.to(dtype)


def groups(query: str) -> Callable[[Complaints, Mapping[str, Tensor | None], Sizes], None]:
    """For ``Signature.rules``: each head of q (named ``query``) and k is shared by the same number of heads of v."""

    def rule(complaints: Complaints, tensors: Mapping[str, Tensor | None], sizes: Sizes) -> None:
        if {"k", "v"} <= tensors.keys() and sizes["G"] and sizes["H"] % sizes["G"]:
            wanted = f"of shape [B,T,H,V] with H a multiple of the G = {sizes['G']} heads of {query} and k"
            shape = [sizes[axis] for axis in "BTHV"]
            remedy = f"Each head of {query} and k serves as many heads of v: give them a divisor of H, or one for every head of v."
            complaints.add(ShapeError, "v", wanted, shape, remedy)

    return rule
