"""Tiles of channels for the gradients of a chunk on Hopper, in Gluon: a warp has 16 channels of all tokens.

Products of the gradients sum over tokens. So the tiles are transposed, [W,ROWS] with the tokens of a group of 16 as columns: a tile in TILE
is a left operand without moves, and so is a product. All dyadic levels are within a warp. Bits 1 and 2 of a token within its group number
lanes; the other bits, and the group, number registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ....gpu.hopper_tiles import in_two, reinterpret, rounded
from .layouts import GROUPS, ROWS

TILE = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))

PAIRS = gl.constexpr(
    gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
)  # of a tile in float32 in shared memory: no bank conflicts for pairs of tokens


@gluon.jit
def group_of(tiles, m):
    """Group m of a tile of tokens in shared memory, as [GROUPS,ROWS,W]; transposed: [W,ROWS]."""
    return gl.convert_layout(tiles.index(m).permute((1, 0)).load(LEFT), TILE, assert_trivial=True)


@gluon.jit
def store_group(x, tiles, m):
    """The inverse of ``group_of``, rounded."""
    tiles.index(m).permute((1, 0)).store(rounded(x, tiles.dtype))


@gluon.jit
def store_in_groups(x, memory, first: gl.constexpr):
    """Store a product [W,C] as tiles [W,ROWS], ``first`` and so on, of memory that is made of tiles in PAIRS."""
    W: gl.constexpr = x.shape[0]
    whole = reinterpret(memory, x.dtype, [memory.shape[0] // GROUPS, GROUPS, W, ROWS], gl.SwizzledSharedLayout(8, 2, 2, [2, 1, 0]))
    whole.index(first).store(gl.permute(gl.reshape(x, [W, GROUPS, ROWS]), (1, 0, 2)))


@gluon.jit
def times(x, y, acc):
    """acc plus the product of a tile x [W,ROWS] in 16 bits with a block y [ROWS,ROWS] that is a right operand."""
    return mma_v2(gl.convert_layout(x, LEFT, assert_trivial=True), y, acc)


@gluon.jit
def summed(z, mask, acc, kind: gl.constexpr):
    """acc plus sums of a tile z [W,ROWS], as a product with a mask in bfloat16. float16: z, which has no bound, is in two parts."""
    if kind == gl.float16:
        high, low = in_two(z, gl.bfloat16)
        return times(low, mask, times(high, mask, acc))
    else:
        return times(rounded(z, gl.bfloat16), mask, acc)


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
def in_second_half(n: gl.constexpr):
    """Whether a token is in the second half of its block of level n: [1,ROWS]."""
    return ((gl.arange(0, ROWS, gl.SliceLayout(0, TILE)) >> n) & 1)[None, :] == 1


@gluon.jit
def masked(x, mask):
    """A right operand where ``mask`` has all bits set, else 0. ``mask``: 16-bit integers, two by one instruction."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def halves_of(x):
    """Tokens of even and of odd number of a tile [W,ROWS], of which a thread has both: [W,ROWS/2] each."""
    return gl.split(gl.reshape(x, [x.shape[0], ROWS // 2, 2]))


@gluon.jit
def joined(even, odd):
    """The inverse of ``halves_of``."""
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [even.shape[0], ROWS]), TILE, assert_trivial=True)


@gluon.jit
def of_partner(x, n: gl.constexpr):
    """Of each pair of tokens of a tile [W,ROWS/2], the value of the pair whose number differs in bit n: a shuffle, or another register."""
    if n == 0:
        return gl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, 1, 31, -1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)
    elif n == 1:
        return gl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, 2, 31, -1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)
    else:
        W: gl.constexpr = x.shape[0]
        a, b = gl.split(gl.permute(gl.reshape(x, [W, 2, ROWS // 4]), (0, 2, 1)))
        y = gl.reshape(gl.permute(gl.join(b, a), (0, 2, 1)), [W, ROWS // 2])
        return gl.convert_layout(y, x.type.layout, assert_trivial=True)


@gluon.jit
def products_of_pairs(decay):
    """Of decays [W,ROWS] in pairs of tokens: products up to each token and after it; of each pair [W,ROWS/2]."""
    even, odd = halves_of(decay)
    total = even * odd
    return joined(even, total), joined(odd, gl.full_like(odd, 1.0)), total


@gluon.jit
def widened(through, remaining, total, n: gl.constexpr):
    """From blocks of 2^n tokens, n > 0, to blocks of 2^(n+1): products of decays up to each token, after it, and of the block."""
    other = of_partner(total, n - 1)
    second = in_second_half(n)
    factor = joined(other, other)
    return through * gl.where(second, factor, 1.0), remaining * gl.where(second, 1.0, factor), total * other


@gluon.jit
def products_of_group(decay):
    """From decays [W,ROWS]: their products up to each token of the group, and after it."""
    through, remaining, total = products_of_pairs(decay)
    for n in gl.static_range(1, 4):
        through, remaining, total = widened(through, remaining, total, n)
    return through, remaining
