"""Device functions that the Hopper kernels share, in Gluon: barriers, exponentials, masks, and sums over groups of tokens."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .tiles import powers_of_two

# Gluon's current names, and those in older versions of Triton
meet = getattr(gl, "barrier", None) or gl.thread_barrier  # 3.6
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # 3.6, 3.7
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global  # 3.6, 3.7
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret  # 3.6 to 3.8


@gluon.jit
def exp2(x):
    """2^x, with subnormal results flushed to 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def plus(a, b):
    """The sum of a and b, for scans."""
    return a + b


@gluon.jit
def unknown(x):
    """x, opaque to the compiler, so that values derived from it are not hoisted out of the loop, where they would occupy registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_begin(x):
    """x, an integer. Allows the next launch to begin once all programs have called this, if it is a programmatic dependent launch."""
    asm: gl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def most(x):
    """The largest absolute value of a tile."""
    return gl.max(gl.reshape(gl.abs(x), [x.shape[0] * x.shape[1]]), 0)


@gluon.jit
def larger(a, b, c, d):
    """The maximum of a and c, and of b and d."""
    return gl.maximum(a, c), gl.maximum(b, d)


@gluon.jit
def most_of_both(x, y):
    """The largest absolute value of each of two tiles of one layout, by one reduction with its barriers."""
    N: gl.constexpr = x.shape[0] * x.shape[1]
    return gl.reduce((gl.reshape(gl.abs(x), [N]), gl.reshape(gl.abs(y), [N])), 0, larger)


@gluon.jit
def inverse(power):
    """The inverse of a power of two."""
    return (254 - (power.to(gl.int32, bitcast=True) >> 23) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def scaled_half(x, axis: gl.constexpr):
    """A tile in float16, each row (axis 1) or column (axis 0) times a power of two, and the inverse powers."""
    down, up = powers_of_two(gl.max(gl.abs(x), axis))
    return (x * gl.expand_dims(down, axis)).to(gl.float16), up


@gluon.jit
def zero_rows_from(tile, left, layout: gl.constexpr):
    """Zero the rows of a tile after the first ``left``. They are padding or belong to another sequence."""
    i = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    x = tile.load(layout)
    tile.store(gl.where((i < left)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def others(part, across: gl.constexpr, LATER: gl.constexpr):
    """From sums of groups [GROUPS,K]: the total [1,K] and, for each group, the sum of the groups before it (LATER: after it)."""
    GROUPS: gl.constexpr = part.shape[0]
    K: gl.constexpr = part.shape[1]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, across))[:, None]
    total = gl.zeros([1, K], gl.float32, across)
    rest = gl.zeros([GROUPS, K], gl.float32, across)
    for n in gl.static_range(GROUPS):
        one = part.slice(n, 1).load(across)
        total += one
        if LATER:
            rest += gl.where(group < n, one, 0.0)
        elif n < GROUPS - 1:
            rest += gl.where(group > n, one, 0.0)
    return total, rest


@gluon.jit
def sequence_with_pieces(rank, cu_seqlens, N, PIECE: gl.constexpr):
    """See the function of this name in ``tiles.py``."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    found = rank * 0 + N
    before = rank * 0
    i = gl.arange(0, 256, layout)
    for first in range(0, N, 256):
        begin = gl.load(cu_seqlens + first + i, mask=first + i < N, other=0)
        end = gl.load(cu_seqlens + first + i + 1, mask=first + i < N, other=0)
        long = (end - begin >= PIECE).to(gl.int32)
        wanted = (long == 1) & (before + gl.associative_scan(long, 0, plus) == rank + 1)
        found += gl.sum(gl.where(wanted, first + i - N, 0), 0)
        before += gl.sum(long, 0)
    return found


@gluon.jit
def in_two(x, kind: gl.constexpr):
    """A tile as the sum of two in bfloat16: 16 significant bits."""
    most = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)  # the bits of a bfloat16 number
    return most.to(kind), (x - most).to(kind)


@gluon.jit
def store_in_two(x, high_s, low_s):
    """Store both parts of a tile."""
    high, low = in_two(x, high_s.dtype)
    high_s.store(high)
    low_s.store(low)


@gluon.jit
def rounded(x, kind: gl.constexpr):
    """A tile in 16 bits, two neighbours at a time: the compiler converts single numbers, which is slow."""
    if kind == gl.float16:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def widened(x):
    """A bfloat16 tile in float32, one instruction for each number of a pair."""
    asm: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return gl.inline_asm_elementwise(asm, "=r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2).to(gl.float32, bitcast=True)


@gluon.jit
def in_three(x, kind: gl.constexpr):
    """A tile as the sum of three in bfloat16: 24 significant bits.

    Parts are rounded, not cut off: then what products of parts leave out has either sign. The rest of inf and NaN is NaN.
    """
    high = rounded(x, kind)
    rest = x - widened(high)
    middle = rounded(rest, kind)
    return high, middle, rounded(rest - widened(middle), kind)
