"""Device functions that the softmax kernels for Hopper share: rings of tiles, results on their way out, and the order of programs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...gpu.hopper_tiles import meet, zeroed_behind

ROWS = gl.constexpr(64)  # that four warps have: as many as one product of theirs takes


@gluon.jit
def exp2_here(x):
    """2^x, 0 where that is no normal number; taken here, while products are under way, not where it is first needed."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """So many barriers, open when so many have arrived. Whoever makes them uses them: what nobody uses is given to others."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(count):
        mbarrier.init(made.index(n), count=arrivals)
    return made


@gluon.jit
def ring_of(tiles, STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """Memory for STAGES tiles, and its barriers: a slot is full when WRITERS have put in what they bring, free when READERS are through."""
    shape: gl.constexpr = tiles.block_type.shape
    memory = gl.allocate_shared_memory(tiles.dtype, [STAGES, shape[0], shape[1]], tiles.layout)
    return memory, (barriers(STAGES, WRITERS), barriers(STAGES, READERS))


@gluon.jit
def bring(tiles, row, column, ring, bars, n, STAGES: gl.constexpr):
    """Have the n-th tile brought into its slot of a ring when that is free."""
    full, free = bars
    s = n % STAGES
    mbarrier.wait(free.index(s), (n // STAGES + 1) & 1)
    mbarrier.expect(full.index(s), tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(tiles, [row, column], full.index(s), ring.index(s))


@gluon.jit
def there(bars, n, STAGES: gl.constexpr):
    """Wait for the n-th tile."""
    full, _ = bars
    mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def through(bars, n, STAGES: gl.constexpr):
    """These warps are through with the n-th tile."""
    _, free = bars
    mbarrier.arrive(free.index(n % STAGES), count=1)


@gluon.jit
def tidied(tile, left):
    """Zeros instead of the rows of a tile behind its sequence: what is not a number there must not meet a weight of 0."""
    D: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    zeroed_behind(tile, left, layout)
    fence_async_shared()
    meet()


@gluon.jit
def leave(x, memory, tiles, row, column, to, stride, left):
    """Store a result [ROWS, D] to the rows from ``row``, where ``to`` points; if all are there, by way of shared memory."""
    layout: gl.constexpr = x.type.layout
    if left >= ROWS:
        memory.store(x)
        fence_async_shared()
        meet()
        tma.async_copy_shared_to_global(tiles, [row.to(gl.int32), column], memory)
        tma.store_wait(0)
    else:
        i = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        d = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
        gl.store(to + (i * stride)[:, None] + d[None, :], x, mask=(i < left)[:, None])


@gluon.jit
def place_in_grid(N, T, together, H: gl.constexpr, L: gl.constexpr, PACKED: gl.constexpr, LAST_FIRST: gl.constexpr):
    """Stretch of L tokens and head of this program, such that long walks begin first.

    ``together`` heads, whose walks the GPU's L2 cache can hold, go at a time from stretch to stretch; packed, all sequences are one.
    """
    pid = gl.program_id(0)
    if PACKED:
        slots = gl.num_programs(0) // H
        pairs = slots * 0 + H
    else:
        slots = (T + (L - 1)) // L
        pairs = N * H
    group = pid // (together * slots)
    size = gl.minimum(together, pairs - group * together)
    at = pid - group * together * slots
    pair = group * together + at % size
    slot = at // size
    if LAST_FIRST:
        slot = slots - 1 - slot
    if not PACKED:
        slot += pair // H * slots
    return slot, pair % H
