"""Pair products within a chunk by dyadic levels, for Hopper, in Gluon: levels 1 to 8 in registers of a warp, 16 and 32 between warps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .layouts import GROUPS, ROWS, C, halves_of_groups, of_partner, whole_groups


@gluon.jit
def left_operand(x, inner: gl.constexpr):
    """A tile [C,W] as the left operand [GROUPS,ROWS,W] of products within groups."""
    x = gl.reshape(x, [GROUPS, ROWS, x.shape[1]])
    return gl.convert_layout(x, gl.DotOperandLayout(0, inner, 2), assert_trivial=True)


@gluon.jit
def right_operand(x, inner: gl.constexpr):
    """The transpose of a tile [C,W] as the right operand [GROUPS,W,ROWS] of products within groups, from the same registers."""
    x = gl.permute(gl.reshape(x, [GROUPS, ROWS, x.shape[1]]), (0, 2, 1))
    return gl.convert_layout(x, gl.DotOperandLayout(1, inner, 2), assert_trivial=True)


@gluon.jit
def added(D, a, b, split, inner: gl.constexpr):
    """D plus the products a b^T within groups where ``split`` holds."""
    return gl.where(split, mma_v2(left_operand(a, inner), right_operand(b, inner), D), D)


@gluon.jit
def times_where(x, y, condition):
    """x y where the condition, an integer, is not 0, else x: one predicated instruction."""
    asm: gl.constexpr = "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.f32 $0, $1; @p mul.f32 $0, $1, $2; }"
    return gl.inline_asm_elementwise(asm, "=&f,f,f,r", [x, y, condition], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def widened(through, remaining, total, n: gl.constexpr, layout: gl.constexpr):
    """From blocks of 2^n tokens to blocks of 2^(n+1): products of decays up to each token, after each token, and of the block; n < 3."""
    second = gl.broadcast(((gl.arange(0, C, gl.SliceLayout(1, layout)) >> n) & 1)[:, None], through)[0]
    other = of_partner(total, n)
    through = times_where(through, other, second)
    if n == 0:
        remaining = gl.where(second == 1, remaining, other)
    else:
        remaining = times_where(remaining, other, second ^ 1)
    return through, remaining, total * other


@gluon.jit
def widened_to_groups(through, remaining, total, layout: gl.constexpr):
    """The same from blocks of 8 tokens to groups of 16, whose whole decay is not needed."""
    first, second = halves_of_groups(total)
    a, b = halves_of_groups(through)
    through = whole_groups(a, b * first, layout)
    a, b = halves_of_groups(remaining)
    return through, whole_groups(a * second, b, layout)
