"""Device functions that the softmax kernels for Hopper share: padding, stores of results, and the order of programs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ....gpu.hopper_tiles import async_store, meet, zero_rows_from

ROWS = gl.constexpr(64)  # rows per group of four warps: those of one wgmma product


@gluon.jit
def exp2_here(x):
    """2^x, with subnormal results flushed to 0. Volatile, so that it overlaps with products and is not moved to its first use."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def tidied(tile, left):
    """Zero the rows of a tile after the end of its sequence: 0 * NaN is NaN."""
    D: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    zero_rows_from(tile, left, layout)
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
