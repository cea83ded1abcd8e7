"""Matrices that select whose decays each token's factor has, when a chunk is cut into levels.

At the level of blocks of L tokens (L = C/2, C/4 ... 1) a pair of tokens lies in the two halves of a block of 2 L tokens. Every pair
belongs to one level. The decay between its tokens is the product of two factors: from the earlier token to the middle of the block, and
from there to the later one. Each factor is the exponential of one sum and at most 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(C: int) -> list[int]:
    """L by level, for chunks of C tokens, a power of two."""
    return [C >> n for n in range(1, C.bit_length())]


def levels(C: int, previous: bool, device: torch.device) -> Tensor:
    """[levels + 3, C, C] of 0 and 1: whose decays (columns) are in the factor of each token (rows) of a chunk.

    One matrix a level: tokens in the second half of a block have the decays from the middle up to themselves, without their own if
    ``previous``; tokens in the first half have those behind themselves up to the middle. Then three triangles: the decays up to and with
    a token, those before it, and those behind it.
    """
    u = torch.arange(C, device=device)  # made on the device: a copy from the host would synchronize
    t = u[:, None]
    read = u < t if previous else u <= t
    inner = [(t // L == u // L) & torch.where(t // L % 2 == 1, read, u > t) for L in lengths(C)]
    return torch.stack([*inner, u <= t, u < t, u > t]).to(torch.bfloat16)
