"""Products of tiles that are the sums of two bfloat16 parts on Hopper, in Gluon: 16 significant bits and the range of float32.

Such a product is three: that of both low parts is left out. A tile is a tuple of its parts, of one where 8 bits suffice.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ....gpu.hopper_tiles import in_two, reinterpret, store_in_two
from .layouts import C


@gluon.jit
def as_halves(memory):
    """The memory of tiles as float16."""
    return reinterpret(memory, gl.float16, memory.shape, memory.layout)


@gluon.jit
def parts_at(memory, first, PARTS: gl.constexpr):
    """The parts of the tile that begins at tile ``first`` of a memory [tiles,C,C]."""
    if PARTS == 2:
        return memory.index(first), memory.index(first + 1)
    else:
        return (memory.index(first),)


@gluon.jit
def store_parts(x, parts):
    """Store a tile in its parts: in two, or rounded to one."""
    if len(parts) == 2:
        store_in_two(x, parts[0], parts[1])
    else:
        parts[0].store(x.to(parts[0].dtype))


@gluon.jit
def load_parts(parts, layout: gl.constexpr):
    """A tile in float32, the sum of its parts."""
    x = parts[0].load(layout).to(gl.float32)
    if len(parts) == 2:
        x += parts[1].load(layout).to(gl.float32)
    return x


@gluon.jit
def in_parts(x, kind: gl.constexpr, PARTS: gl.constexpr):
    """A tile in registers in two parts, or rounded to one."""
    if PARTS == 2:
        return in_two(x, kind)
    else:
        return (x.to(kind),)


@gluon.jit
def as_left(parts):
    """The parts of an accumulator as the left operand of products."""
    left: gl.constexpr = gl.DotOperandLayout(0, parts[0].type.layout, 2)
    found = ()
    for m in gl.static_range(len(parts)):
        found = found + (gl.convert_layout(parts[m], left, assert_trivial=True),)
    return found


@gluon.jit
def left_parts(x, kind: gl.constexpr):
    """A tile in registers, in two parts, as the left operand of products."""
    return as_left(in_two(x, kind))


@gluon.jit
def product_in_two(x, high_s, low_s):
    """The product of a tile in registers with one in two parts."""
    wide: gl.constexpr = x.type.layout
    high, low = left_parts(x, high_s.dtype)
    y = warpgroup_mma(low, high_s, gl.zeros([C, C], gl.float32, wide), use_acc=False)
    y = warpgroup_mma(high, low_s, y)
    return warpgroup_mma(high, high_s, y)


@gluon.jit
def product_of_parts(left, right, wide: gl.constexpr):
    """The product, in progress, of two tiles in as many parts each."""
    zero = gl.zeros([C, C], gl.float32, wide)
    if len(left) == 1:
        return warpgroup_mma(left[0], right[0], zero, use_acc=False, is_async=True)
    else:
        y = warpgroup_mma(left[1], right[0], zero, use_acc=False, is_async=True)
        y = warpgroup_mma(left[0], right[1], y, is_async=True)
        return warpgroup_mma(left[0], right[0], y, is_async=True)


@gluon.jit
def added_in_parts(left, right, acc):
    """``acc`` plus the product, in progress, of two tiles."""
    if len(left) == 2 and len(right) == 2:
        acc = warpgroup_mma(left[1], right[0], acc, is_async=True)
        acc = warpgroup_mma(left[0], right[1], acc, is_async=True)
        acc = warpgroup_mma(left[0], right[0], acc, is_async=True)
    else:
        for m in gl.static_range(len(left)):
            for n in gl.static_range(len(right)):
                acc = warpgroup_mma(left[m], right[n], acc, is_async=True)
    return acc


@gluon.jit
def transposed(parts):
    """All parts [C,C] transposed, in shared memory."""
    found = ()
    for m in gl.static_range(len(parts)):
        found = found + (parts[m].permute((1, 0)),)
    return found
