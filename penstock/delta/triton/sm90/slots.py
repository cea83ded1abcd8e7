"""The tiles of one chunk in shared memory on Hopper, in Gluon, for walks in float32 whose rings would not fit.

Each tensor has a slot for 64 of its columns, which holds one chunk's tile [C,64]: three bfloat16 parts of an operand, or one of float32.
The tile of the next chunk is loaded into it once all warps have read it: ``expect_slots``, a barrier of all warps, then ``load_slots``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....gpu.hopper_tiles import async_load, unknown
from ....gpu.ring import barriers
from .layouts import C
from .parts import finished, product_of_parts, transposed

PARTS = gl.constexpr(3)


@gluon.jit
def slots_of(tiles, SLOTS: gl.constexpr, EACH: gl.constexpr):
    """Memory and barriers of SLOTS tiles, each of EACH tiles of a descriptor.

    Every tile of the descriptor has its own: else Triton synchronizes all warps between two copies.
    """
    shape: gl.constexpr = tiles.block_type.shape
    slots = ()
    for _ in gl.static_range(SLOTS):
        slot = ()
        for _ in gl.static_range(EACH):
            memory = gl.allocate_shared_memory(tiles.dtype, [1, shape[0], shape[1]], tiles.layout)
            slot = slot + ((memory, barriers(1, 1)),)
        slots = slots + (slot,)
    return slots


@gluon.jit
def expect_slots(tiles, slots, exists):
    """Announce a tile in each slot, if there are such tiles."""
    for n in gl.static_range(len(slots)):
        for m in gl.static_range(len(slots[n])):
            mbarrier.expect(slots[n][m][1].index(0), tiles.block_type.nbytes, pred=exists)


@gluon.jit
def load_slots(tiles, slots, row, column, exists):
    """Start their copies: the parts of 64 columns, then those of the next."""
    for n in gl.static_range(len(slots)):
        for m in gl.static_range(len(slots[n])):
            memory, bar = slots[n][m]
            async_load(tiles, [row + m * C, column + n * C], bar.index(0), memory.index(0), pred=exists)


@gluon.jit
def wait_slots(slots, phase):
    """Wait for them."""
    for n in gl.static_range(len(slots)):
        for m in gl.static_range(len(slots[n])):
            mbarrier.wait(slots[n][m][1].index(0), phase)


@gluon.jit
def barriers_of(operands):
    """The barriers of several tensors."""
    found = ()
    for m in gl.static_range(len(operands)):
        for n in gl.static_range(len(operands[m])):
            for part in gl.static_range(len(operands[m][n])):
                found = found + (operands[m][n][part][1],)
    return found


@gluon.jit
def tile_in(slots, n: gl.constexpr, zero):
    """The tiles of a descriptor that are in slot n. ``zero``: 0, see ``tiles_in_three``."""
    found = ()
    for m in gl.static_range(len(slots[n])):
        found = found + (slots[n][m][0].index(unknown(zero)),)
    return found


@gluon.jit
def expect_operands(tiles, operands, exists):
    """Announce the tiles of several tensors."""
    for m in gl.static_range(len(operands)):
        expect_slots(tiles[m], operands[m], exists)


@gluon.jit
def load_operands(tiles, operands, row, exists):
    """Start their copies."""
    for m in gl.static_range(len(operands)):
        load_slots(tiles[m], operands[m], row, 0, exists)


@gluon.jit
def wait_operands(operands, phase):
    """Wait for them."""
    for m in gl.static_range(len(operands)):
        wait_slots(operands[m], phase)


@gluon.jit
def store_totals(total_s, totals, at, exists):
    """Copy the decays of a chunk, if it exists, to rows ``at``, ``at`` + 2, ... of ``total_s`` [2 TILES,C]."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    channel = gl.arange(0, C, line)
    TILES: gl.constexpr = total_s.shape[0] // 2
    for n in gl.static_range(TILES):
        total_s.index(at + 2 * n).store(gl.load(totals + n * C + channel, mask=(channel >= 0) & exists, other=0.0))


@gluon.jit
def start_product(left, slots, n: gl.constexpr, zero, TRANSPOSED: gl.constexpr, wide: gl.constexpr):
    """The product, in progress, of a tile in parts with the operand in slot n. ``zero``: see ``tile_in``."""
    right = tile_in(slots, n, zero)
    if TRANSPOSED:
        right = transposed(right)
    return product_of_parts(left, right, wide)


@gluon.jit
def start_products(left, operands, n: gl.constexpr, zero, TRANSPOSED: gl.constexpr, wide: gl.constexpr):
    """The same with slot n of each operand."""
    sums = ()
    for m in gl.static_range(len(operands)):
        sums = sums + (start_product(left, operands[m], n, zero, TRANSPOSED, wide),)
    return sums


@gluon.jit
def add_products(sums, left, operands, n: gl.constexpr, zero, TRANSPOSED: gl.constexpr, wide: gl.constexpr):
    """``sums`` plus these products. One at a time is in progress, because each takes registers."""
    found = ()
    for m in gl.static_range(len(operands)):
        found = found + (sums[m] + finished((start_product(left, operands[m], n, zero, TRANSPOSED, wide),), left)[0],)
    return found


@gluon.jit
def store_rows(memory, first, step, left, zero):
    """Store the first ``left`` rows of a tile, ``step`` apart. ``first``: the first element. ``zero``: 0, see ``tiles_in_three``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    ROWS: gl.constexpr = 2 * gl.num_warps()  # at a time: few registers
    i = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None] + unknown(zero)
    j = gl.arange(0, memory.shape[1], gl.SliceLayout(0, layout))[None, :]
    for n in gl.static_range(C // ROWS):
        t = n * ROWS + i
        gl.store(first + t * step + j, memory.slice(n * ROWS, ROWS).load(layout), mask=(t < left) & (j >= 0))
