"""Operands and sums that kernels of gradients with one decay a head share, and how they store dq and dk. On Hopper, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ....gpu.hopper_tiles import async_store, in_two, meet
from .layouts import C


@gluon.jit
def removed(r_s, rate_s, layout: gl.constexpr, kind: gl.constexpr):
    """-(A_k T) diag(beta) as left operand, in two parts."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    return in_two(r_s.load(operand).to(gl.float32) * -rate_s.load(gl.SliceLayout(0, operand))[None, :], kind)


@gluon.jit
def sum_of_product(S_s, dS_s, PARTS: gl.constexpr):
    """The sum of S o dS', whose rows are loaded in PARTS parts."""
    ROWS: gl.constexpr = S_s.shape[0] // PARTS
    K: gl.constexpr = S_s.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    acc = gl.zeros([ROWS, K], gl.float32, layout)
    for n in gl.static_range(PARTS):
        x = S_s.slice(n * ROWS, ROWS).load(layout).to(gl.float32)
        acc += x * dS_s.slice(n * ROWS, ROWS).load(layout).to(gl.float32)
    return gl.sum(gl.reshape(acc, [ROWS * K]), 0)


@gluon.jit
def from_token_on(zero, layout: gl.constexpr, kind: gl.constexpr):
    """The left operand of sums over the tokens from t on: [C,C] of ones where the column is at least the row. ``zero``: see ``unknown``."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    t = gl.arange(0, C, gl.SliceLayout(1, operand))[:, None]
    i = gl.arange(0, C, gl.SliceLayout(0, operand))[None, :]
    return gl.where(i >= t + zero, 1.0, gl.zeros([C, C], gl.float32, operand)).to(kind)


@gluon.jit
def store_gradient(tiles, x, memory, pointer, row, column, token, step, left):
    """Store dq or dk [C,K] of a chunk with ``left`` tokens, by ``memory``; ``pointer``: its first element, rows are ``step`` apart."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    memory.store(x.to(memory.dtype))
    fence_async_shared()
    meet()
    if left == C:
        async_store(tiles, [row, column], memory)
    else:
        i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
        j = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
        gl.store(pointer + (token + i) * step + column + j, memory.load(layout), mask=i < left)
