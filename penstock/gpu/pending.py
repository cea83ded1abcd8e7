"""Device functions of token-serial kernels: decays of single tokens, and decays that stay pending.

A row of a state is exp(P) times the stored row. Reads are multiplied by exp(P) and writes by exp(-P). The row is multiplied by exp(P) when
P is below -0.5. Without this, a float32 state that decays weakly at each token rounds back to itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decays import CHANNEL, FLOOR, SCALAR, by_row, decayed, exp


@triton.jit
def log_decay(base, j, stride_j, there, DECAY: tl.constexpr):
    """A token's log decay, per channel or one for all; finite or NaN."""
    if DECAY == SCALAR:
        g = tl.load(base)
    else:
        g = tl.load(base + j * stride_j, mask=there, other=0.0)
    return tl.maximum(g.to(tl.float32), FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def add(total, rest, x):
    """Add x to a compensated sum; ``rest`` is the sum's rounding error."""
    addend = x + rest
    grown = total + addend
    return grown, addend - (grown - total)


@triton.jit
def pend(P, rest, g):
    """Add a log decay to the pending sum P.

    Returns P, its rounding error, the factor of the state and the factor of later reads. Writes are divided by the factor of reads.
    """
    P, rest = add(P, rest, g)
    e = exp(P)
    stays = P >= -0.5
    return tl.where(stays, P, 0.0), tl.where(stays, rest, 0.0), tl.where(stays, 1.0, e), tl.where(stays, e, 1.0)


@triton.jit
def nothing_pending(BK: tl.constexpr, DECAY: tl.constexpr):
    """Pending decays of zero: per channel [BK], or a scalar."""
    if DECAY == CHANNEL:
        zero = tl.zeros((BK,), tl.float32)
    else:
        zero = tl.zeros((), tl.float32)
    return zero


@triton.jit
def apply_or_pend(S, P, rest, read, g, DECAY: tl.constexpr, PENDING: tl.constexpr):
    """Apply a log decay to the state or, if PENDING, to the pending decay (see ``pend``)."""
    if PENDING:
        P, rest, w, read = pend(P, rest, g)
        S *= by_row(w, DECAY)
    else:
        S = decayed(S, g, DECAY)
    return S, P, rest, read
