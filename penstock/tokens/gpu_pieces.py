"""Updates in place on a GPU, of every family: whether a call has pieces, and its tensors as the kernels of pieces read them.

The order of sums across threads depends on the loads of a kernel, and those on strides and addresses. Of other strides another kernel may
take the call, too. So results would depend on how a caller's tensors lie in memory, which may differ for one and for several sequences.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ..call.memory import rounded
from ..gpu.hopper import tiled
from ..gpu.plan import contiguous
from .pieces import CHUNK
from .problem import InPlace, TokenProblem

Update = TypeVar("Update", bound=InPlace)
APART = ("state", "slots", "cu_seqlens")
"""What is read and written where it lies, and indices."""


def has_pieces(p: TokenProblem) -> bool:
    """Whether the launches of whole pieces are in the plan, which is shared by calls whose counts are equal when rounded up."""
    return rounded(p.sizes["T"]) >= CHUNK


def arranged(p: Update) -> Update:
    """The problem; where it has pieces, with copies of tensors that are not ``plain``."""
    if not has_pieces(p):
        return p
    given = {name: getattr(p, name) for name in p.signature.axes if name not in APART}
    copies = {name: _copy(x) for name, x in given.items() if x is not None and not plain(x)}
    return p.with_tensors(copies) if copies else p


def plain(x: Tensor) -> bool:
    """Whether x is at a multiple of 16 bytes and contiguous, or [B,T,H,D] that is a slice of a contiguous tensor along heads and channels.

    Contiguous tensors have the strides of a new one on axes of size 1, too; a first axis may be a slice, if that changes no load.
    """
    if x.data_ptr() % 16:
        return False
    new, own = contiguous(x.shape), x.stride()
    if own[1:] == new[1:] and (own[0] == new[0] or (x.shape[0] == 1 and _compiled_alike(own[0], new[0]))):
        return True
    heads = x.dim() == 4 and own[2] == x.shape[3] and x.shape[3] % 16 == 0 == own[1] % 16
    return heads and tiled(x) and (x.shape[0] > 1 or _compiled_alike(own[0], 16))


def _compiled_alike(a: int, b: int) -> bool:
    """Whether Triton compiles the same code for two strides: it knows 1 and multiples of 16."""
    return (a == 1, a % 16 == 0) == (b == 1, b % 16 == 0)


def _copy(x: Tensor) -> Tensor:
    """A copy with the strides of a new tensor."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
