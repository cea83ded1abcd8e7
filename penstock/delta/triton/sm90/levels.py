"""Gradients of the dyadic levels of a chunk of KDA on Hopper, in Gluon. See ``gradients.py`` for the formulas.

P is the gradient of the pair matrix of q and k, scaled, and M that of k and k with its transpose. A level takes from P and M the pairs that
it splits. Tiles are transposed, see ``columns.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .columns import TILE, block, group_of, in_second_half, none_of, ones_where, rows_and_columns, times, widened


@gluon.jit
def far_level(q_s, k_s, p_s, m_s, rows, columns, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """A level of whole groups: columns are groups FIRST, ..., rows the COUNT groups after them. ``rows``, ``columns``: their factors.

    Returns, for each row group, the terms of dq and dk and the sum of their products with q and k; for each column group, the term of dk and its
    product with k.
    """
    kind: gl.constexpr = k_s.dtype
    X = ()
    for c in gl.static_range(COUNT):
        X = X + ((group_of(k_s, FIRST + c).to(gl.float32) * columns[c]).to(kind),)
    Q = ()
    R = ()
    dq = ()
    dk = ()
    z = ()
    for r in gl.static_range(COUNT):
        Q = Q + ((group_of(q_s, FIRST + COUNT + r).to(gl.float32) * rows[r]).to(kind),)
        R = R + ((group_of(k_s, FIRST + COUNT + r).to(gl.float32) * rows[r]).to(kind),)
        dQ = none_of(X[0])
        dR = none_of(X[0])
        for c in gl.static_range(COUNT):
            dQ = times(X[c], block(p_s, FIRST + COUNT + r, FIRST + c, True), dQ)
            dR = times(X[c], block(m_s, FIRST + COUNT + r, FIRST + c, True), dR)
        dq = dq + (dQ * rows[r],)
        dk = dk + (dR * rows[r],)
        z = z + (Q[r].to(gl.float32) * dQ + R[r].to(gl.float32) * dR,)
    dk_c = ()
    z_c = ()
    for c in gl.static_range(COUNT):
        dX = none_of(X[0])
        for r in gl.static_range(COUNT):
            dX = times(Q[r], block(p_s, FIRST + COUNT + r, FIRST + c, False), dX)
            dX = times(R[r], block(m_s, FIRST + c, FIRST + COUNT + r, True), dX)
        dk_c = dk_c + (dX * columns[c],)
        z_c = z_c + (X[c].to(gl.float32) * dX,)
    return dq, dk, z, dk_c, z_c


@gluon.jit
def near_levels(q, k, decay, p_s, m_s, g: gl.constexpr, dq, dk, dg):
    """Add the levels within group g, whose tiles are q, k, bfloat16, and ``decay`` [W,ROWS], to its gradients."""
    kind: gl.constexpr = k.dtype
    a, b = rows_and_columns()
    P = block(p_s, g, g, False)
    transposed = block(p_s, g, g, True)
    M = block(m_s, g, g, True)
    none = gl.zeros_like(P)
    through = decay
    total = decay
    remaining = gl.full([decay.shape[0], decay.shape[1]], 1.0, gl.float32, TILE)
    for n in gl.static_range(4):
        second = in_second_half(n)
        factor = gl.where(second, through, remaining)
        Q = (q.to(gl.float32) * through).to(kind)
        X = (k.to(gl.float32) * factor).to(kind)
        split = (a ^ b) >> n == 1
        dQ = times(X, gl.where(split, transposed, none), none_of(decay))
        dX = times(X, gl.where(split, M, none), none_of(decay))
        dX = times(Q, gl.where(split, P, none), dX)
        dq += dQ * through
        dk += dX * factor
        z = X.to(gl.float32) * dX + Q.to(gl.float32) * dQ
        straddles = (a >> n == b >> n) & (((a >> n) & 1 == 1) == (a >= b))
        dg = times(z.to(kind), ones_where(straddles), dg)
        if n < 3:
            through, remaining, total = widened(through, remaining, total, n)
    return dq, dk, dg
