"""Products of tiles that are sums of bfloat16 parts on Hopper, in Gluon: 16 significant bits in two, 24 in three, the range of float32.

A tile is a tuple of its parts, of one where 8 bits suffice. Part n is about 2^-8n of the tile. A product of two tiles is the sum of the
products of their parts m and n with m + n less than the number of parts: three with two parts, six with three. What is left out is as much
as the parts lack. The smallest are first, because tensor cores cut every sum off to 24 bits. In memory, tiles that are no operands may be
one part of float32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, in_three, in_two, meet, reinterpret, unknown


@gluon.jit
def as_halves(memory):
    """The memory of tiles as float16."""
    return reinterpret(memory, gl.float16, memory.shape, memory.layout)


@gluon.jit
def parts_at(memory, first, PARTS: gl.constexpr):
    """The parts of the tile that begins at tile ``first`` of a memory [tiles,C,C]."""
    found = ()
    for m in gl.static_range(PARTS):
        found = found + (memory.index(first + m),)
    return found


@gluon.jit
def tiles_in_three(memory, zero):
    """The parts of the tiles in a memory [3 tiles,C,columns]. As float32, a tile has the place of the first two, see ``as_singles``.

    ``zero``: 0, which the compiler should not know. Else it computes addresses and descriptors of all tiles at the beginning, and spills.
    """
    TILES: gl.constexpr = memory.shape[0] // 3
    offset = unknown(zero)
    tiles = ()
    for n in gl.static_range(TILES):
        first, second, third = offset + 2 * n, offset + (2 * n + 1), offset + (2 * TILES + n)
        tiles = tiles + ((memory.index(first), memory.index(second), memory.index(third)),)
    return tiles


@gluon.jit
def as_singles(memory, layout: gl.constexpr):
    """The tiles in a memory [3 tiles,C,columns] as float32."""
    TILES: gl.constexpr = memory.shape[0] // 3
    ROWS: gl.constexpr = memory.shape[1]
    COLUMNS: gl.constexpr = memory.shape[2]
    return reinterpret(memory, gl.float32, [TILES, ROWS, COLUMNS], layout)


@gluon.jit
def in_parts(x, kind: gl.constexpr, PARTS: gl.constexpr):
    """A tile in registers in parts, or rounded to one."""
    if PARTS == 3:
        return in_three(x, kind)
    elif PARTS == 2:
        return in_two(x, kind)
    else:
        return (x.to(kind),)


@gluon.jit
def store_parts(x, parts):
    """Store a tile in its parts, or rounded to one."""
    found = in_parts(x, parts[0].dtype, len(parts))
    for m in gl.static_range(len(parts)):
        parts[m].store(found[m])


@gluon.jit
def store_over(x, parts):
    """Store in parts what was loaded in float32 from the same memory."""
    meet()  # the elements of other threads are where the parts will be
    store_parts(x, parts)


@gluon.jit
def send_parts(parts, tiles, row, column):
    """Start the copies of the parts of a tile, one after another, to rows ``row`` and after."""
    for m in gl.static_range(len(parts)):
        async_store(tiles, [row + m * parts[m].shape[0], column], parts[m])


@gluon.jit
def load_parts(parts, layout: gl.constexpr):
    """A tile in float32, the sum of its parts."""
    x = parts[0].load(layout).to(gl.float32)
    for m in gl.static_range(1, len(parts)):
        x += parts[m].load(layout).to(gl.float32)
    return x


@gluon.jit
def as_left(parts):
    """The parts of an accumulator as the left operand of products."""
    left: gl.constexpr = gl.DotOperandLayout(0, parts[0].type.layout, 2)
    found = ()
    for m in gl.static_range(len(parts)):
        found = found + (gl.convert_layout(parts[m], left, assert_trivial=True),)
    return found


@gluon.jit
def left_parts(x, kind: gl.constexpr, PARTS: gl.constexpr):
    """A tile in registers, in parts, as the left operand of products."""
    return as_left(in_parts(x, kind, PARTS))


@gluon.jit
def product_of_parts(left, right, wide: gl.constexpr, ASYNC: gl.constexpr = True):
    """The product, in progress, of two tiles in as many parts each."""
    PARTS: gl.constexpr = len(left)
    ROWS: gl.constexpr = left[0].shape[0]
    COLUMNS: gl.constexpr = right[0].shape[1]
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, wide)
    for most in gl.static_range(PARTS - 1, -1, -1):
        for m in gl.static_range(most + 1):
            added = most < PARTS - 1 or m > 0
            acc = warpgroup_mma(left[most - m], right[m], acc, use_acc=added, is_async=ASYNC)
    return acc


@gluon.jit
def added_in_parts(left, right, acc):
    """``acc`` plus the product, in progress, of two tiles, one of which may have fewer parts."""
    PARTS: gl.constexpr = len(left) if len(left) > len(right) else len(right)
    for most in gl.static_range(PARTS - 1, -1, -1):
        for m in gl.static_range(most + 1):
            if most - m < len(left):
                if m < len(right):
                    acc = warpgroup_mma(left[most - m], right[m], acc, is_async=True)
    return acc


@gluon.jit
def finished(sums, left):
    """The values of products in progress. ``left``: their left operand, if that is in registers."""
    if len(sums) + len(left) == 1:
        return (warpgroup_mma_wait(0, sums),)
    else:
        found = warpgroup_mma_wait(0, sums + left)
        values = ()
        for m in gl.static_range(len(sums)):
            values = values + (found[m],)
        return values


@gluon.jit
def sum_of_products(left, right, wide: gl.constexpr):
    """The sum of the products of ``left[0]`` and ``right[0]``, of ``left[1]`` and ``right[1]``, ..., whose tiles are in memory.

    They are added in registers: tensor cores would cut the sum off at each step.
    """
    y = finished((product_of_parts(left[0], right[0], wide),), ())[0]
    for n in gl.static_range(1, len(left)):
        y += finished((product_of_parts(left[n], right[n], wide),), ())[0]
    return y


@gluon.jit
def product_from_registers(x, parts):
    """The product of a tile in registers with one in memory."""
    wide: gl.constexpr = x.type.layout
    left = left_parts(x, parts[0].dtype, len(parts))
    if len(parts) == 2:
        return product_of_parts(left, parts, wide, False)
    else:
        return finished((product_of_parts(left, parts, wide),), left)[0]


@gluon.jit
def transposed(parts):
    """All parts [C,C] transposed, in shared memory."""
    found = ()
    for m in gl.static_range(len(parts)):
        found = found + (parts[m].permute((1, 0)),)
    return found
