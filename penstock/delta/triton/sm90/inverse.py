"""The inverse T = (I - N)^-1 of a chunk's strictly lower triangular N [64,64] on Hopper, in Gluon.

Blocks of 16x16 by forward substitution in float32, then two merges T_21 = (T_22 N_21) T_11, 16 -> 32 -> 64, with float16 operands.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from ....gpu.hopper_tiles import meet, reinterpret
from .layouts import GROUPS, ROWS, C


@gluon.constexpr_function
def diagonal_layout():
    """The layout of an accumulator [C,C] as [GROUPS,ROWS,GROUPS,ROWS]."""
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    regs = [[0, 0, 0, 1], [0, 8, 0, 0], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, 16, 4, 16])


@gluon.jit
def store_blocks(N, n_s):
    """Store the blocks N [GROUPS,ROWS,ROWS] on the diagonal in ``n_s`` [ROWS ROWS,GROUPS], float32."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    reinterpret(n_s, gl.float32, [ROWS, ROWS, GROUPS], plain).permute((2, 0, 1)).store(N)


@gluon.jit
def inverted_blocks(n_s, d_s):
    """The inverses [GROUPS,ROWS,ROWS] of I - N for the blocks N on the diagonal, by forward substitution, rounded to the dtype of ``d_s``.

    A thread has a column. ``n_s``: see ``store_blocks``; ``d_s``: memory of [ROWS,GROUPS ROWS].
    """
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    columns: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    block: gl.constexpr = gl.SliceLayout(1, columns)
    j = gl.arange(0, ROWS, gl.SliceLayout(0, columns))[None, :]
    rows = reinterpret(d_s, d_s.dtype, [ROWS, GROUPS, ROWS], plain)
    t = (gl.where(j == 0, 1.0, gl.zeros([GROUPS, ROWS], gl.float32, columns)),)
    for r in gl.static_range(1, 16):
        x = gl.where(j == r, 1.0, gl.zeros([GROUPS, ROWS], gl.float32, columns))
        for i in gl.static_range(r):
            x += n_s.index(ROWS * r + i).load(block)[:, None] * t[i]
        t = t + (x,)
    a = gl.join(gl.join(gl.join(t[0], t[8]), gl.join(t[4], t[12])), gl.join(gl.join(t[2], t[10]), gl.join(t[6], t[14])))
    b = gl.join(gl.join(gl.join(t[1], t[9]), gl.join(t[5], t[13])), gl.join(gl.join(t[3], t[11]), gl.join(t[7], t[15])))
    x = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 3, 4, 5, 1)), [GROUPS, ROWS, ROWS])  # one store: Triton synchronizes warps between two
    rows.permute((1, 0, 2)).store(x.to(d_s.dtype))
    meet()
    return rows.permute((1, 0, 2)).load(gl.SliceLayout(2, diagonal_layout()))


@gluon.jit
def on_diagonal(D, mma: gl.constexpr):
    """The blocks D [GROUPS,ROWS,ROWS] on the diagonal of a tile [C,C], else 0."""
    column = gl.arange(0, C, gl.SliceLayout(0, mma))[None, :] // ROWS
    row = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None] // ROWS
    x = gl.expand_dims(D, 2).broadcast_to([GROUPS, ROWS, GROUPS, ROWS])
    x = gl.convert_layout(gl.reshape(x, [C, C]), mma, assert_trivial=True)
    return gl.where(row == column, x, gl.zeros_like(x))


@gluon.jit
def blocks_on_diagonal(x):
    """The blocks [GROUPS,ROWS,ROWS] on the diagonal of an accumulator [C,C]."""
    mma: gl.constexpr = x.type.layout
    column = gl.arange(0, C, gl.SliceLayout(0, mma))[None, :] // ROWS
    row = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None] // ROWS
    x = gl.reshape(gl.where(row == column, x, 0.0), [GROUPS, ROWS, GROUPS, ROWS])
    return gl.sum(gl.convert_layout(x, diagonal_layout(), assert_trivial=True), 2)


@gluon.jit
def merged(T, t_s, n_s, between, mma: gl.constexpr):
    """T + (T N) T, where the product T N is taken in the blocks ``between`` those of T: float16 [C,C]. ``t_s``, ``n_s``: T and N."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    x = gl.zeros([C, C], gl.float32, mma)
    x = warpgroup_mma(gl.convert_layout(T, left, assert_trivial=True), n_s, x, use_acc=False)
    x = gl.where(between, x, 0.0).to(gl.float16)
    y = gl.zeros([C, C], gl.float32, mma)
    y = warpgroup_mma(gl.convert_layout(x, left, assert_trivial=True), t_s, y, use_acc=False)
    return gl.where(between, y, T.to(gl.float32)).to(gl.float16)


@gluon.jit
def merge_twice(T, t_s, n_s, mma: gl.constexpr):
    """Store the inverse in ``t_s``, float16 [C,C], from T [C,C], the inverses of the blocks on the diagonal. ``n_s``: N, float16 [C,C]."""
    group = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None] // ROWS
    other = gl.arange(0, C, gl.SliceLayout(0, mma))[None, :] // ROWS
    t_s.store(T)
    fence_async_shared()
    meet()
    T = merged(T, t_s, n_s, (group == other + 1) & (group % 2 == 1), mma)
    meet()
    t_s.store(T)
    fence_async_shared()
    meet()
    T = merged(T, t_s, n_s, (group >= 2) & (other < 2), mma)
    meet()
    t_s.store(T)
    fence_async_shared()
    meet()
