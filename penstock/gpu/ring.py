"""Rings of tiles in shared memory that TMA copies fill on Hopper, in Gluon: what kernels of all families share.

A ring has STAGES slots; tile n is in slot n % STAGES. Each tensor has a ring and barriers of its own: between copies with the same barrier,
Triton synchronizes all warps. Shared memory that is allocated and not used may be aliased, that of barriers too.

Two ways to use them:

- One group of warps loads and computes: ``expect`` for the slots that are free, a barrier of all warps, then ``load_tiles``. The steps in
  between (``mbarrier.wait``, products) are the kernel's.
- One warp loads and others compute. ``ring_of`` makes a ring with two barriers for each slot: full and free. The loading warp calls
  ``load_when_free``; the others ``wait_full`` and, after the last use of a tile, ``release``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_tiles import async_load, meet


@gluon.jit
def barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """A barrier for each slot of a ring. Its phases complete after ARRIVALS arrivals and their copies."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(made.index(n), count=ARRIVALS)
    return made


@gluon.jit
def invalidate(bars):
    """End the use of ``bars``, whose last phases all warps have waited for. A kernel ends with it, so its barriers keep their memory.

    The compiler gives the memory of barriers that are not used any more to tiles or its own scratch, whose numbers a barrier that is not
    invalidated may change.
    """
    meet()
    for m in gl.static_range(len(bars)):
        _invalidate_slots(bars[m])


@gluon.jit
def _invalidate_slots(bars):
    STAGES: gl.constexpr = bars.shape[0]
    for n in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(n))


@gluon.jit
def expect(tiles, bars, n, exists):
    """Announce tile n of each ring, if it exists. ``tiles``, ``bars``: descriptors and barriers of the rings."""
    for m in gl.static_range(len(bars)):
        mbarrier.expect(bars[m].index(n % bars[m].shape[0]), tiles[m].block_type.nbytes, pred=exists)


@gluon.jit
def load_tiles(tiles, rings, bars, at, n, exists):
    """Start the copy of tile n into each ring, if it exists. ``at``: its row and column for each ring."""
    for m in gl.static_range(len(bars)):
        s = n % bars[m].shape[0]
        async_load(tiles[m], at[m], bars[m].index(s), rings[m].index(s), pred=exists)


@gluon.jit
def ring_of(tiles, STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """Memory for STAGES tiles, and barriers: a slot is full after WRITERS arrivals, and free after READERS arrivals."""
    shape: gl.constexpr = tiles.block_type.shape
    memory = gl.allocate_shared_memory(tiles.dtype, [STAGES, shape[0], shape[1]], tiles.layout)
    return memory, (barriers(STAGES, WRITERS), barriers(STAGES, READERS))


@gluon.jit
def load_when_free(tiles, row, column, ring, bars, n, STAGES: gl.constexpr):
    """Start the copy of tile n into its slot when the slot is free."""
    full, free = bars
    s = n % STAGES
    mbarrier.wait(free.index(s), (n // STAGES + 1) & 1)
    mbarrier.expect(full.index(s), tiles.block_type.nbytes)
    async_load(tiles, [row, column], full.index(s), ring.index(s))


@gluon.jit
def wait_full(bars, n, STAGES: gl.constexpr):
    """Wait for tile n."""
    full, _ = bars
    mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def release(bars, n, STAGES: gl.constexpr):
    """Mark the slot of tile n as free."""
    _, free = bars
    mbarrier.arrive(free.index(n % STAGES), count=1)
