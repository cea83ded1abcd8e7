"""Pair products within a chunk by dyadic levels, for Hopper, in Gluon: levels 1 to 8 in registers of a warp, 16 and 32 between warps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .layouts import GROUPS, ROWS


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
def exchanged(x, y, condition):
    """y, x where the condition holds, else x, y."""
    return gl.where(condition, y, x), gl.where(condition, x, y)
