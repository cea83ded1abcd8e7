"""Gradients of the dyadic levels of a chunk of KDA on Hopper, in Gluon. See ``gradients.py`` for the formulas.

P is the gradient of the pair matrix of q and k, scaled, 0 above the diagonal, and M that of k and k with its transpose. A level takes the
pairs that it splits from P and M. Tiles are transposed, see ``columns.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .columns import TILE, block, group_of, in_second_half, none_of, ones_where, rounded, rows_and_columns, times, widened
from .layouts import GROUPS


@gluon.jit
def near_levels(q, k, decay, p_s, m_s, m):
    """The levels within group m, whose tiles are q, k, bfloat16, and ``decay`` [W,ROWS]: terms of dq, dk, dg.

    Also returns the products of decays up to each token of the group, and after it.
    """
    a, b = rows_and_columns()
    P = block(p_s, m, m, False)
    transposed = block(p_s, m, m, True)
    M = block(m_s, m, m, True)
    none = gl.zeros_like(P)
    through = decay
    total = decay
    remaining = gl.full([decay.shape[0], decay.shape[1]], 1.0, gl.float32, TILE)
    dq = none_of(decay)
    dk = none_of(decay)
    dg = none_of(decay)
    for n in gl.static_range(4):
        factor = gl.where(in_second_half(n), through, remaining)
        Q = rounded(q.to(gl.float32) * through)
        X = rounded(k.to(gl.float32) * factor)
        split = (a ^ b) >> n == 1
        dQ = times(X, gl.where(split, transposed, none), none_of(decay))
        dX = times(X, gl.where(split, M, none), none_of(decay))
        dX = times(Q, gl.where(split, P, none), dX)
        dq += dQ * through
        dk += dX * factor
        z = X.to(gl.float32) * dX + Q.to(gl.float32) * dQ
        straddles = (a >> n == b >> n) & (((a >> n) & 1 == 1) == (a >= b))
        dg = times(rounded(z), ones_where(straddles), dg)
        through, remaining, total = widened(through, remaining, total, n)
    return dq, dk, dg, through, remaining


@gluon.jit
def far_level(tiles_q, tiles_k, p_s, m_s, m, first, COUNT: gl.constexpr):
    """A level of whole groups, for group m: ``first`` and COUNT - 1 groups after it are the other half.

    ``tiles_k`` [2 GROUPS,ROWS,W], ``tiles_q`` [GROUPS,ROWS,W] of second halves: tiles of levels 32 (COUNT = 2) and 16 (COUNT = 1). Returns
    the gradients of those of group m and the sum of their products. A group in a first half takes any tile of q: P is 0 above the diagonal.
    """
    SHIFT: gl.constexpr = 2 - COUNT  # of the number of a group with a tile of q
    K: gl.constexpr = GROUPS * SHIFT
    Q: gl.constexpr = 2 * SHIFT
    own = group_of(tiles_k, K + m)
    dQ = none_of(own)
    dX = none_of(own)
    for c in gl.static_range(COUNT):
        X = group_of(tiles_k, K + first + c)
        other = group_of(tiles_q, Q + (((first + c) >> SHIFT) & 1))
        dQ = times(X, block(p_s, m, first + c, True), dQ)
        dX = times(X, block(m_s, m, first + c, True), dX)
        dX = times(other, block(p_s, first + c, m, False), dX)
    return dQ, dX, group_of(tiles_q, Q + ((m >> SHIFT) & 1)).to(gl.float32) * dQ + own.to(gl.float32) * dX
