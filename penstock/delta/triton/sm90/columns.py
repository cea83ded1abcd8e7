"""Tiles of channels for the gradients of a chunk on Hopper, in Gluon: a warp has 16 channels of all tokens.

Products of the gradients sum over tokens. So the tiles are transposed, [W,ROWS] with the tokens of a group of 16 as columns: a tile in TILE
is a left operand without moves, and so is a product. All dyadic levels are within a warp. Bits 1 and 2 of a token within its group number
lanes; the other bits, and the group, number registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ....gpu.hopper_tiles import reinterpret
from .layouts import GROUPS, ROWS

TILE = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))


@gluon.jit
def group_of(tile, g: gl.constexpr):
    """Group g of a tile of tokens [C,W] in shared memory, transposed: [W,ROWS]."""
    x = tile.slice(ROWS * g, ROWS).permute((1, 0)).load(LEFT)
    return gl.convert_layout(x, TILE, assert_trivial=True)


@gluon.jit
def groups_of(x):
    """The four groups [W,ROWS] of a product [W,C], without moves."""
    W: gl.constexpr = x.shape[0]
    x = gl.permute(gl.reshape(x, [W, 2, 2, ROWS]), (0, 2, 3, 1))
    a, b = gl.split(x)
    a_0, a_1 = gl.split(gl.permute(a, (0, 2, 1)))
    b_0, b_1 = gl.split(gl.permute(b, (0, 2, 1)))
    a_0 = gl.convert_layout(a_0, TILE, assert_trivial=True)
    a_1 = gl.convert_layout(a_1, TILE, assert_trivial=True)
    b_0 = gl.convert_layout(b_0, TILE, assert_trivial=True)
    b_1 = gl.convert_layout(b_1, TILE, assert_trivial=True)
    return a_0, a_1, b_0, b_1


@gluon.jit
def times(x, y, acc):
    """acc plus the product of a tile x [W,ROWS], bfloat16, with a block y [ROWS,ROWS] that is a right operand."""
    return mma_v2(gl.convert_layout(x, LEFT, assert_trivial=True), y, acc)


@gluon.jit
def none_of(x):
    """Zeros in float32 like a tile."""
    return gl.zeros([x.shape[0], ROWS], gl.float32, TILE)


@gluon.jit
def store_in_blocks(x, blocks_s):
    """Store a matrix [C,C] as blocks [GROUPS GROUPS,ROWS,ROWS], whose memory is made by blocks of two axes."""
    whole = reinterpret(blocks_s, x.dtype, [GROUPS * GROUPS, ROWS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    x = gl.permute(gl.reshape(x, [GROUPS, ROWS, GROUPS, ROWS]), (0, 2, 1, 3))
    whole.store(gl.reshape(x, [GROUPS * GROUPS, ROWS, ROWS]))


@gluon.jit
def block(blocks_s, i: gl.constexpr, j: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Block (i,j) of a matrix, or its transpose, as a right operand."""
    x = blocks_s.index(GROUPS * i + j)
    if TRANSPOSED:
        x = x.permute((1, 0))
    return x.load(RIGHT)


@gluon.jit
def rows_and_columns():
    """The numbers of the rows [ROWS,1] and columns [1,ROWS] of a right operand."""
    return gl.arange(0, ROWS, gl.SliceLayout(1, RIGHT))[:, None], gl.arange(0, ROWS, gl.SliceLayout(0, RIGHT))[None, :]


@gluon.jit
def ones_where(condition):
    """A right operand of ones and zeros in bfloat16."""
    return gl.where(condition, 1.0, gl.zeros([ROWS, ROWS], gl.float32, RIGHT)).to(gl.bfloat16)


@gluon.jit
def in_second_half(n: gl.constexpr):
    """Whether a token is in the second half of its block of level n: [1,ROWS]."""
    return ((gl.arange(0, ROWS, gl.SliceLayout(0, TILE)) >> n) & 1)[None, :] == 1


@gluon.jit
def of_partner(x, n: gl.constexpr):
    """Of each token of a tile [W,ROWS], the value of the token whose number differs in bit n."""
    W: gl.constexpr = x.shape[0]
    L: gl.constexpr = 2**n
    if n == 1:
        return gl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, 1, 31, -1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)
    elif n == 2:
        return gl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, 2, 31, -1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, [W, ROWS // (2 * L), 2, L]), (0, 1, 3, 2)))
        y = gl.reshape(gl.permute(gl.join(b, a), (0, 1, 3, 2)), [W, ROWS])
        return gl.convert_layout(y, TILE, assert_trivial=True)


@gluon.jit
def widened(through, remaining, total, n: gl.constexpr):
    """From blocks of 2^n tokens to blocks of 2^(n+1): products of decays up to each token, after each token, and of the block."""
    second = in_second_half(n)
    other = of_partner(total, n)
    return gl.where(second, through * other, through), gl.where(second, remaining, remaining * other), total * other


@gluon.jit
def products_of_group(decay):
    """From decays [W,ROWS]: products up to each token of the group, after it, and of the group [W]."""
    through = decay
    total = decay
    remaining = gl.full([decay.shape[0], ROWS], 1.0, gl.float32, TILE)
    for n in gl.static_range(4):
        through, remaining, total = widened(through, remaining, total, n)
    last = gl.arange(0, ROWS, gl.SliceLayout(0, TILE))[None, :] == ROWS - 1
    return through, remaining, gl.sum(gl.where(last, through, 0.0), 1)
