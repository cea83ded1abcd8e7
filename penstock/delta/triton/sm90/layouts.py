"""Layouts of tiles of tokens in registers for Hopper, in Gluon: a warp has the 16 tokens of a group, as tensor cores take operands.

A chunk of C = 64 tokens is four groups of ROWS = 16. Bits 0, 1 and 2 of a token within its group number lanes, bit 3 numbers registers. So
tokens that differ in one bit exchange values by one shuffle, or not at all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

C = gl.constexpr(64)  # tokens in a chunk
ROWS = gl.constexpr(16)  # tokens in a group
GROUPS = gl.constexpr(4)


@gluon.constexpr_function
def by_token(W):
    """Layout of [C,W]: the left operand of products of 16x16 tokens."""
    more = [[0, 16 << n] for n in range((W // 16).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [8, 0], [0, 8], *more], lanes, [[16, 0], [32, 0]], [], [C.value, W])


@gluon.constexpr_function
def by_group(W):
    """The same layout of [GROUPS,ROWS,W]."""
    more = [[0, 0, 16 << n] for n in range((W // 16).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    regs = [[0, 0, 1], [0, 8, 0], [0, 0, 8], *more]
    return gl.DistributedLinearLayout(regs, lanes, [[1, 0, 0], [2, 0, 0]], [], [GROUPS.value, ROWS.value, W])


@gluon.jit
def of_partner(x, n: gl.constexpr, layout: gl.constexpr):
    """Of each token of a tile [C,W], the value of the token whose number differs in bit n: a shuffle between lanes, or other registers."""
    if n == 3:
        W: gl.constexpr = x.shape[1]
        a, b = gl.split(gl.permute(gl.reshape(x, [GROUPS, 2, 8, W]), (0, 2, 3, 1)))
        x = gl.reshape(gl.permute(gl.join(b, a), (0, 3, 1, 2)), [C, W])
        return gl.convert_layout(x, layout, assert_trivial=True)
    else:
        if n == 0:
            asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 4, 31, -1;"
        elif n == 1:
            asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 8, 31, -1;"
        else:
            asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 16, 31, -1;"
        return gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def spread(part, W: gl.constexpr, layout: gl.constexpr, grouped: gl.constexpr):
    """A tile [C,W] with the values [GROUPS,W] of each group, loaded from shared memory, for each of its tokens."""
    x = gl.expand_dims(part.load(gl.SliceLayout(1, grouped)), 1).broadcast_to([GROUPS, ROWS, W])
    return gl.convert_layout(gl.reshape(x, [C, W]), layout, assert_trivial=True)
