"""A ring of tiles [C,K] of several tensors, and rings of tiles [C,64], for walks over chunks of wide heads on Hopper, in Gluon.

A chunk has a wide tile of each of PER tensors, in the order of their use. They share a ring of SLOTS slots, for heads of 256 of which few
fit: tile n of step m is tile m PER + n of the ring. What is loaded into its slot next is tile (n + SLOTS) % PER of a later step. Narrow
tiles have two slots each. ``steps``: for each tensor the row of its tile at step 0, the rows between steps, and its column.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ....gpu.hopper_tiles import async_load, meet
from ....gpu.ring import barriers, expect, load_tiles


@gluon.jit
def slot_of_tile(ring, m, n: gl.constexpr, PER: gl.constexpr):
    """The slot of the wide tile n of step m, and the phase of its barrier."""
    tile = m * PER + n
    return tile % ring.shape[0], (tile // ring.shape[0]) & 1


@gluon.jit
def expect_wide(tiles, ring, bars, m, n: gl.constexpr, exists):
    """Announce the wide tile n of step m, if it exists."""
    s, _ = slot_of_tile(ring, m, n, len(tiles))
    mbarrier.expect(bars.index(s), tiles[n].block_type.nbytes, pred=exists)


@gluon.jit
def load_wide(tiles, ring, bars, steps, m, n: gl.constexpr, exists):
    """Start the copy of the wide tile n of step m, if it exists."""
    first, apart, column = steps[n]
    s, _ = slot_of_tile(ring, m, n, len(tiles))
    async_load(tiles[n], [first + m * apart, column], bars.index(s), ring.index(s), pred=exists)


@gluon.jit
def wait_wide(ring, bars, m, n: gl.constexpr, PER: gl.constexpr):
    """Wait for the wide tile n of step m: its memory."""
    s, phase = slot_of_tile(ring, m, n, PER)
    mbarrier.wait(bars.index(s), phase)
    return ring.index(s)


@gluon.jit
def load_narrow(tiles, rings, bars, steps, m, exists):
    """Start the copies of the narrow tiles of step m, if it exists."""
    at = ()
    for n in gl.static_range(len(tiles)):
        first, apart, column = steps[n]
        at = at + ([first + m * apart, column],)
    load_tiles(tiles, rings, bars, at, m, exists)


@gluon.jit
def begin(wide, ring, steps, narrow, rings, narrow_steps, zero, count):
    """Start the first loads: as many wide tiles as there are slots, and the narrow tiles of two steps. ``count``: steps.

    Returns the barriers, of the wide tiles and of the narrow ones.
    """
    PER: gl.constexpr = len(wide)
    SLOTS: gl.constexpr = ring.shape[0]
    bars = barriers(SLOTS, 1)
    narrow_bars = ()
    for _ in gl.static_range(len(narrow)):
        narrow_bars = narrow_bars + (barriers(2, 1),)
    fence_async_shared()
    meet()
    for i in gl.static_range(SLOTS):
        expect_wide(wide, ring, bars, zero + i // PER, i % PER, zero + i // PER < count)
    for m in gl.static_range(2):
        expect(narrow, narrow_bars, zero + m, zero + m < count)
    meet()
    for i in gl.static_range(SLOTS):
        load_wide(wide, ring, bars, steps, zero + i // PER, i % PER, zero + i // PER < count)
    for m in gl.static_range(2):
        load_narrow(narrow, rings, narrow_bars, narrow_steps, zero + m, zero + m < count)
    return bars, narrow_bars


@gluon.jit
def expect_next(wide, ring, bars, m, n: gl.constexpr, count):
    """Announce what is loaded into the slot of the wide tile n of step m next."""
    PER: gl.constexpr = len(wide)
    other: gl.constexpr = (n + ring.shape[0]) % PER
    later: gl.constexpr = (n + ring.shape[0]) // PER
    expect_wide(wide, ring, bars, m + later, other, m + later < count)


@gluon.jit
def load_next(wide, ring, bars, steps, m, n: gl.constexpr, count):
    """Start its copy."""
    PER: gl.constexpr = len(wide)
    other: gl.constexpr = (n + ring.shape[0]) % PER
    later: gl.constexpr = (n + ring.shape[0]) // PER
    load_wide(wide, ring, bars, steps, m + later, other, m + later < count)
