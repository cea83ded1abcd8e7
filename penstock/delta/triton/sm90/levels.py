"""Gradients of the dyadic levels of a chunk of KDA on Hopper, in Gluon. See ``gradients.py`` for the formulas.

P is the gradient of the pair matrix of q and k, scaled, 0 above the diagonal, and M that of k and k with its transpose. A level takes the
pairs that it splits from P and M. Tiles are transposed, see ``columns.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.hopper_tiles import reinterpret, rounded
from .columns import (
    RIGHT,
    TILE,
    block,
    group_of,
    in_second_half,
    masked,
    none_of,
    products_of_pairs,
    summed,
    times,
    widened,
)
from .layouts import GROUPS, ROWS

MASKS = gl.constexpr(8)
SUFFIX, PREFIX = gl.constexpr(6), gl.constexpr(7)


@gluon.jit
def store_masks(masks_s):
    """Masks of right operands [MASKS,ROWS,ROWS], 16 bits, row i and column j. The compiler would select element by element.

    0 to 2: all bits where level 0, 1 or 2 splits i and j. 3 to 5: 1.0 where i is between j and the middle of its block of level 1, 2 or 3,
    or is j. 6: 1.0 for i >= j; 7: for i < j.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
    one = gl.full([ROWS, ROWS], 1.0, gl.bfloat16, layout)
    none = gl.zeros([ROWS, ROWS], gl.bfloat16, layout)
    bits = gl.full([ROWS, ROWS], -1, gl.int16, layout)
    bits_s = reinterpret(masks_s, gl.int16, [MASKS, ROWS, ROWS], masks_s.layout)
    for n in gl.static_range(3):
        bits_s.index(n).store(gl.where((i ^ j) >> n == 1, bits, gl.zeros_like(bits)))
    for n in gl.static_range(1, 4):
        between = (i >> n == j >> n) & (((i >> n) & 1 == 1) == (i >= j))
        masks_s.index(2 + n).store(gl.where(between, one, none))
    masks_s.index(SUFFIX).store(gl.where(i >= j, one, none))
    masks_s.index(PREFIX).store(gl.where(i < j, one, none))


@gluon.jit
def split_by(x, masks_s, n: gl.constexpr):
    """A block of pairs as a right operand, 0 but for the pairs that level n splits."""
    if n < 3:
        bits_s = reinterpret(masks_s, gl.int16, [MASKS, ROWS, ROWS], masks_s.layout)
        return masked(x, bits_s.index(n).load(RIGHT))
    else:
        i = gl.arange(0, ROWS, gl.SliceLayout(1, RIGHT))[:, None]
        j = gl.arange(0, ROWS, gl.SliceLayout(0, RIGHT))[None, :]
        return gl.where((i ^ j) >> n == 1, x, gl.zeros_like(x))  # whole registers


@gluon.jit
def near_levels(q, k, decay, p_s, m_s, power, masks_s, m):
    """The levels within group m, whose tiles are q, k, float32, and ``decay`` [W,ROWS]: terms of dq, dk, dg.

    Also returns the products of decays up to each token of the group, and after it. ``power``: what P and M lack in float16.
    """
    kind: gl.constexpr = p_s.dtype
    P = block(p_s, m, m, False)
    transposed = block(p_s, m, m, True)
    M = block(m_s, m, m, True)
    through = decay
    remaining = gl.full_like(decay, 1.0)
    total = decay
    dq = none_of(decay)
    dk = none_of(decay)
    dg = none_of(decay)
    for n in gl.static_range(4):
        second = in_second_half(n)
        factor = gl.where(second, through, remaining)
        Q = q * through
        X = k * factor
        left_q = rounded(Q, kind)
        left_k = rounded(X, kind)
        dQ = times(left_k, split_by(transposed, masks_s, n), none_of(decay))
        dX = times(left_k, split_by(M, masks_s, n), none_of(decay))
        dX = times(left_q, split_by(P, masks_s, n), dX)
        if kind == gl.float16:
            dQ *= power
            dX *= power
        dq += dQ * through
        dk += dX * factor
        z = X * dX + Q * dQ
        if n == 0:
            dg += gl.where(second, z, 0.0)
            through, remaining, total = products_of_pairs(decay)
        else:
            dg = summed(z, masks_s.index(2 + n).load(RIGHT), dg, kind)
            through, remaining, total = widened(through, remaining, total, n)
    return dq, dk, dg, through, remaining


@gluon.jit
def far_level(tiles_q, tiles_k, p_s, m_s, power, m, first, COUNT: gl.constexpr):
    """A level of whole groups, for group m: ``first`` and COUNT - 1 groups after it are the other half.

    ``tiles_k`` [2 GROUPS,ROWS,W], ``tiles_q`` [GROUPS,ROWS,W] of second halves: tiles of levels 32 (COUNT = 2) and 16 (COUNT = 1). Returns
    the gradients of those of group m. A group in a first half takes any tile of q: P is 0 above the diagonal.
    """
    SHIFT: gl.constexpr = 2 - COUNT  # of the number of a group with a tile of q
    K: gl.constexpr = GROUPS * SHIFT
    Q: gl.constexpr = 2 * SHIFT
    W: gl.constexpr = tiles_k.shape[2]
    dQ = gl.zeros([W, ROWS], gl.float32, TILE)
    dX = gl.zeros([W, ROWS], gl.float32, TILE)
    for c in gl.static_range(COUNT):
        X = group_of(tiles_k, K + first + c)
        other = group_of(tiles_q, Q + (((first + c) >> SHIFT) & 1))
        dQ = times(X, block(p_s, m, first + c, True), dQ)
        dX = times(X, block(m_s, m, first + c, True), dX)
        dX = times(other, block(p_s, first + c, m, False), dX)
    if p_s.dtype == gl.float16:
        dQ *= power
        dX *= power
    return dQ, dX
