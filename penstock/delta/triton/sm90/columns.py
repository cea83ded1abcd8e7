"""Tiles of channels for the gradients of a chunk on Hopper, in Gluon: a warp has 16 channels of all tokens.

Products of the gradients sum over tokens. So the tiles are transposed, [W,ROWS] with the tokens of a group of 16 as columns: a tile in TILE
is a left operand without moves, and so is a product. All dyadic levels are within a warp. Bits 1 and 2 of a token within its group number
lanes; the other bits, and the group, number registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ....gpu.hopper_tiles import reinterpret, unknown
from .layouts import GROUPS, ROWS

TILE = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))

PAIRS = gl.constexpr(
    gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
)  # of a tile in float32 in shared memory: no bank conflicts for pairs of tokens


@gluon.jit
def rounded(x):
    """A tile in bfloat16, two values of a thread by one instruction. The compiler converts values one by one where it needs them again."""
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def group_of(tiles, m):
    """Group m of a tile of tokens in shared memory, as [GROUPS,ROWS,W]; transposed: [W,ROWS]."""
    return gl.convert_layout(tiles.index(m).permute((1, 0)).load(LEFT), TILE, assert_trivial=True)


@gluon.jit
def store_group(x, tiles, m):
    """The inverse of ``group_of``, rounded to bfloat16."""
    tiles.index(m).permute((1, 0)).store(rounded(x))


@gluon.jit
def store_in_groups(x, memory, first: gl.constexpr):
    """Store a product [W,C] as tiles [W,ROWS], ``first`` and so on, of memory that is made of tiles in PAIRS."""
    W: gl.constexpr = x.shape[0]
    whole = reinterpret(memory, x.dtype, [memory.shape[0] // GROUPS, GROUPS, W, ROWS], gl.SwizzledSharedLayout(8, 2, 2, [2, 1, 0]))
    whole.index(first).store(gl.permute(gl.reshape(x, [W, GROUPS, ROWS]), (1, 0, 2)))


@gluon.jit
def times(x, y, acc):
    """acc plus the product of a tile x [W,ROWS] in bfloat16 with a block y [ROWS,ROWS] that is a right operand."""
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
def block(blocks_s, i, j, TRANSPOSED: gl.constexpr):
    """Block (i,j) of a matrix, or its transpose, as a right operand."""
    x = blocks_s.index(GROUPS * i + j)
    if TRANSPOSED:
        x = x.permute((1, 0))
    return x.load(RIGHT)


@gluon.jit
def rows_and_columns():
    """The numbers of the rows [ROWS,1] and columns [1,ROWS] of a right operand. Masks of them are not kept in registers over a loop."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, RIGHT))[:, None]
    return unknown(i), unknown(gl.arange(0, ROWS, gl.SliceLayout(0, RIGHT))[None, :])


@gluon.jit
def ones_where(condition):
    """A right operand of ones and zeros in bfloat16."""
    return gl.where(condition, gl.full([ROWS, ROWS], 1.0, gl.bfloat16, RIGHT), gl.zeros([ROWS, ROWS], gl.bfloat16, RIGHT))


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
    """From decays [W,ROWS]: their products up to each token of the group, and after it."""
    through = decay
    total = decay
    remaining = gl.full([decay.shape[0], ROWS], 1.0, gl.float32, TILE)
    for n in gl.static_range(4):
        through, remaining, total = widened(through, remaining, total, n)
    return through, remaining
