"""Tokens from logits: weights exp((logit - largest) / temperature), ranks, top k and nucleus, and draws, bitwise equal on every device.

Only float32 operations that IEEE 754 rounds exactly are used: exp is 2^n for a whole number n, times 2^f for a remainder f between -1/2 and
1/2, computed by a polynomial. Its error is at most 1 ulp, in addition to that of the difference of the logits. Sums are of whole numbers of
1 / ``ONE``, so they do not depend on the order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ONE = 2.0**44
"""The weight of the most likely token as a whole number."""
MOST_TOKENS = 2**19 - 1
"""The most weights whose sum fits int64."""
COLDEST, HOTTEST = 2.0**-100, 2.0**120
"""Temperatures are limited to this range, so that values computed from them fit float32. Below the range the most likely token has all
weight; above it all tokens have equal weights."""
LOG2_E, LN_2 = 1 / math.log(2), math.log(2)
LEAST_POWER = -50.0
"""The least n. Tokens with this n have weight 0."""
POLYNOMIAL = (0.693147182, 0.240226477, 0.0555033237, 0.00961843692, 0.0013398875, 0.00015353362)
"""Coefficients of f, f**2 ... of 2**f: a minimax fit, whose error is 2e-9 before rounding."""
MAGIC = 12582912.0
"""1.5 * 2**23. Added to a float32 number, it leaves the nearest whole number in the lowest bits."""
LANES = 4096
"""Defines the order of draws: a kernel sums the weights of this many tokens at a time, one per lane."""
CANDIDATES = 256
"""The number of most likely tokens that are ranked first; all are ranked only if these do not suffice."""
SHORT = -256
"""A mask that leaves 16 bits of the fraction of a float32: its product with n is exact."""


def weights(logits: Tensor, largest: Tensor, temperatures: Tensor, least: Tensor | float = 1 / ONE) -> Tensor:
    """float32 [R,V] of logits [R,V] in float32, at most 1; 0 where they are below ``least``.

    largest : [R,1] float32
        The largest logit of each row; finite.
    temperatures : [R,1] float64
    """
    c = temperatures * LN_2
    scale, lowest = (1.0 / temperatures * LOG2_E).float(), (c * LEAST_POWER).float()
    high = (c.float().view(torch.int32) & SHORT).view(torch.float32)
    low = (c - high).float()
    d = torch.maximum(logits - largest, lowest)
    shifted = d * scale + MAGIC
    n = shifted - MAGIC
    f = ((d - n * high) - n * low) * scale
    p = torch.full_like(f, POLYNOMIAL[-1])
    for factor in (*POLYNOMIAL[-2::-1], 1.0):
        p = p.mul_(f).add_(factor)
    found = (p.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)
    return found.masked_fill_(found < least, 0)


def whole(found: Tensor) -> Tensor:
    """Weights as whole numbers of 1 / ``ONE``: int64."""
    return (found * ONE).long()


def at_random(sums: Tensor, numbers: Tensor) -> Tensor:
    """Tokens at positions in the cumulative sums of whole weights [D,V], in the order of (token modulo ``LANES``, token): int64 [D].

    numbers : [D] float64
        The positions as fractions of the totals, from 0 to below 1.
    """
    D, V = sums.shape
    columns = -(-V // LANES)
    if columns > 1:
        sums = torch.nn.functional.pad(sums, (0, columns * LANES - V)).view(D, columns, LANES).mT.reshape(D, -1)
    ends = sums.cumsum(-1)
    total = ends[:, -1]
    drawn = torch.minimum((numbers * total).long(), total - 1)
    place = torch.searchsorted(ends, drawn[:, None], right=True).squeeze(-1)
    return place // columns + place % columns * LANES if columns > 1 else place


def ranks_of(found: Tensor) -> Tensor:
    """A rank number per token of weights [D,V]: larger for larger weights, then for lower tokens. Its upper bits are the weight's."""
    V = found.shape[1]
    return (found.view(torch.int32).long() << 20) + torch.arange(V - 1, -1, -1, device=found.device)


def _weights_of(ranks: Tensor) -> Tensor:
    return (ranks >> 20).int().view(torch.float32)


def limits(ranks: Tensor, last: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the rank number of the last kept token, and the weight of the last of the top k: int64 and float32 [D,1].

    last, share : [D,1]
        The last rank of the top k, V - 1 to keep all, and top_p, above 1 to keep all. float64.
    """
    V = ranks.shape[1]
    if ranks.is_cuda or V <= 8 * CANDIDATES:  # the host must not wait for a GPU to know whether the candidates suffice
        return _ends(V, ranks.sort(dim=-1, descending=True)[0], last, share, None)[:2]
    totals = whole(_weights_of(ranks)).sum(-1, keepdim=True)
    least, top, enough = _ends(V, ranks.topk(CANDIDATES, -1)[0], last, share, totals)
    rest = torch.nonzero(~enough.squeeze(-1)).squeeze(1)
    if len(rest):
        least[rest], top[rest], _ = _ends(V, ranks[rest].sort(dim=-1, descending=True)[0], last[rest], share[rest], None)
    return least, top


def _ends(V: int, ranked: Tensor, last: Tensor, share: Tensor, totals: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """From sorted rank numbers [D,C]: the last kept one, the weight of the last of the top k, and whether these C suffice: all [D,1].

    totals : Tensor, optional
        Sums of all weights [D,1], for rows whose top k is not among the ranked. None if there are no such rows.
    """
    C = ranked.shape[1]
    within = last < C
    kept = whole(_weights_of(ranked)).mul_(torch.arange(C, device=ranked.device) <= last)
    sums = kept.cumsum(-1)
    total = sums[:, -1:]
    limit = share * (total if totals is None else torch.where(within, total, totals))
    end = torch.minimum((sums - kept < limit)[:, 1:].sum(-1, keepdim=True), last)
    enough = within if totals is None else within | ((last == V - 1) & (total >= limit))
    top = _weights_of(ranked.gather(1, last.clamp(max=C - 1).long())).masked_fill(last == V - 1, 0)
    return ranked.gather(1, end.long()), top, enough
