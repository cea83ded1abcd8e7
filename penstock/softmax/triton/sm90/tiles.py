"""Device functions that the softmax kernels for Hopper share: rings of tiles, stores of results, and the order of programs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....gpu.hopper_tiles import async_load, async_store, meet, zeroed_behind

ROWS = gl.constexpr(64)  # rows per group of four warps: those of one wgmma product


@gluon.jit
def exp2_here(x):
    """2^x, with subnormal results flushed to 0. Volatile, so that it overlaps with products and is not moved to its first use."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """``count`` barriers, whose phases complete after ``arrivals`` arrivals. All must be used: unused shared memory may be aliased."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(count):
        mbarrier.init(made.index(n), count=arrivals)
    return made


@gluon.jit
def ring_of(tiles, STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """Memory for STAGES tiles, and barriers: a slot is full after WRITERS arrivals, and free after READERS arrivals."""
    shape: gl.constexpr = tiles.block_type.shape
    memory = gl.allocate_shared_memory(tiles.dtype, [STAGES, shape[0], shape[1]], tiles.layout)
    return memory, (barriers(STAGES, WRITERS), barriers(STAGES, READERS))


@gluon.jit
def bring(tiles, row, column, ring, bars, n, STAGES: gl.constexpr):
    """Start the copy of the n-th tile into its slot of a ring when the slot is free."""
    full, free = bars
    s = n % STAGES
    mbarrier.wait(free.index(s), (n // STAGES + 1) & 1)
    mbarrier.expect(full.index(s), tiles.block_type.nbytes)
    async_load(tiles, [row, column], full.index(s), ring.index(s))


@gluon.jit
def there(bars, n, STAGES: gl.constexpr):
    """Wait for the n-th tile."""
    full, _ = bars
    mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def through(bars, n, STAGES: gl.constexpr):
    """Release the n-th tile."""
    _, free = bars
    mbarrier.arrive(free.index(n % STAGES), count=1)


@gluon.jit
def tidied(tile, left):
    """Zero the rows of a tile after the end of its sequence: 0 * NaN is NaN."""
    D: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    zeroed_behind(tile, left, layout)
    fence_async_shared()
    meet()


@gluon.jit
def leave(x, memory, tiles, row, column, to, stride, left):
    """Store a result [ROWS, D] to the rows of ``to`` from ``row`` on; full tiles through shared memory."""
    layout: gl.constexpr = x.type.layout
    if left >= ROWS:
        memory.store(x)
        fence_async_shared()
        meet()
        async_store(tiles, [row.to(gl.int32), column], memory)
        tma.store_wait(0)
    else:
        i = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        d = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
        gl.store(to + (i * stride)[:, None] + d[None, :], x, mask=(i < left)[:, None])


@gluon.jit
def place_in_grid(N, T, together, H: gl.constexpr, L: gl.constexpr, PACKED: gl.constexpr, LAST_FIRST: gl.constexpr):
    """The span of L tokens and the head of this program; long loops start first.

    ``together`` heads, whose streamed tensors fit into the L2 cache, run together, span by span. Packed sequences count as one.
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
