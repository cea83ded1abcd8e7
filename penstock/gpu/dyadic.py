"""Matrices that select the decays in each token's factor, when a chunk is cut into levels.

The pairs of the level of blocks of L tokens (L = C/2, C/4 ... 1) have one token in each half of a block of 2 L tokens. Every pair belongs
to exactly one level. The decay between its tokens is the product of two factors: from the earlier token to the middle of the block, and
from there to the later one. Each factor is the exponential of one sum and at most 1.

Decays with a bound may have an anchor in place of the inner levels, at the start of each block of ``low`` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(C: int, low: int = 0) -> list[int]:
    """L by level, for chunks of C tokens, a power of two; those of at least ``low`` tokens."""
    return [C >> n for n in range(1, C.bit_length()) if C >> n >= low]


def levels(C: int, previous: bool, low: int, device: torch.device) -> Tensor:
    """[levels + 3, C, C] of 0 and 1: which decays (columns) are in the factor of each token (rows) of a chunk.

    One matrix per level: for tokens in the second half of a block, the decays from the middle up to the token, without its own if
    ``previous``; for tokens in the first half, the decays after the token up to the middle. If ``low``, one more matrix: the decays up to
    the token from the start of its block of ``low`` tokens. Then three triangles: the decays up to and including a token, those before it,
    and those after it.
    """
    u = torch.arange(C, device=device)  # made on the device: a copy from the host would synchronize
    t = u[:, None]
    read = u < t if previous else u <= t
    inner = [(t // L == u // L) & torch.where(t // L % 2 == 1, read, u > t) for L in lengths(C, low)]
    anchored = [(t // low == u // low) & read] if low else []
    return torch.stack([*inner, *anchored, u <= t, u < t, u > t]).to(torch.bfloat16)
