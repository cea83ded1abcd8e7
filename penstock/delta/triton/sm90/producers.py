"""The warps of Hopper's KDA kernel that prepare chunks, in Gluon: ``prepare`` computes pairs and tiles, ``invert`` the inverse and its products.

See ``prepare.py`` for the formulas. Both write tiles to rings of DEPTH chunks in memory, from where the warps that walk load them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ....gpu.hopper_tiles import async_load, async_store, meet, reinterpret, zero_rows_from
from .exchange import count_of, release_count, wait_for_copies, wait_for_room
from .inverse import inverted_blocks, merge_twice, on_diagonal, store_blocks
from .layouts import GROUPS, ROWS, C
from .prepare import assembled, no_pairs, pairs_and_tiles, store_factors, store_group_sums


@gluon.jit
def ask_unit(tiles, memory, bars, place, u, SHARE: gl.constexpr):
    """Start the loads of unit u, which is W channels of a chunk, if it exists."""
    q_tiles, k_tiles, g_tiles = tiles
    q_s, k_s, g_s = memory
    first_row, q_column, g_column, units = place
    W: gl.constexpr = q_s.shape[2]
    PARTS: gl.constexpr = q_s.shape[0]
    p = u % PARTS
    row = first_row + u // PARTS * (SHARE * C)
    there = u < units
    bar = bars.index(p)
    mbarrier.expect(bar, q_tiles.block_type.nbytes + k_tiles.block_type.nbytes + g_tiles.block_type.nbytes, pred=there)
    async_load(g_tiles, [row, g_column + p * W], bar, g_s.index(p), pred=there)
    async_load(q_tiles, [row, q_column + p * W], bar, q_s.index(p), pred=there)
    async_load(k_tiles, [row, q_column + p * W], bar, k_s.index(p), pred=there)


@gluon.jit
def prepare(
    tiles, x_tiles, memory, rest_s, near_s, far_s, sides, pair_s, bars, place, rates_at, totals, counts, scale,
    K: gl.constexpr, NV: gl.constexpr, SHARE: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Pairs and tiles of chunks r, r + SHARE, ... of a sequence: a unit of W channels after another."""
    gl.static_assert(NV <= 2)
    q_s, k_s, g_s = memory
    part_s, factors_s = sides
    n_s, N_s, aq_s = pair_s
    loaded, made, done = bars
    first_row, q_column, g_column, r, chunks, tokens, ring = place
    beta, b_t = rates_at
    PARTS: gl.constexpr = q_s.shape[0]
    W: gl.constexpr = q_s.shape[2]
    inner: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    mine = (chunks - r + (SHARE - 1)) // SHARE
    where = (first_row + r * C, q_column, g_column, mine * PARTS)
    i = gl.arange(0, C, gl.SliceLayout(1, mma))
    for u in gl.static_range(PARTS - 1):
        ask_unit(tiles, memory, loaded, where, chunks * 0 + u, SHARE)
    for j in range(mine):
        c = r + j * SHARE
        left = tokens - c * C
        slot = ring * DEPTH + c % DEPTH
        rates = gl.load(beta + (c * C + i).to(gl.int64) * b_t, mask=i < left, other=0.0).to(gl.float32)
        taken = counts + SHARE
        found = count_of(taken)
        if NV > 1:
            found_1 = count_of(taken + (NV - 1))
        of_q = no_pairs()
        of_k = no_pairs()
        for p in range(PARTS):
            q = q_s.index(p)
            k = k_s.index(p)
            g = g_s.index(p)
            mbarrier.wait(loaded.index(p), j & 1)
            if left < C:
                zero_rows_from(q, left, clean)
                zero_rows_from(k, left, clean)
                zero_rows_from(g, left, clean)
                meet()
            store_group_sums(g, part_s, W)
            meet()
            store_factors(part_s, factors_s, totals + slot.to(gl.int64) * K + p * W, scale, W)
            meet()
            rest = rest_s.index((j & 1) * PARTS + p)
            of_q, of_k = pairs_and_tiles(q, k, g, rest, near_s, far_s, factors_s, of_q, of_k, W)
            fence_async_shared()
            meet()
            if p == 0:
                wait_for_room(found, taken, c - (DEPTH - 1))
                if NV > 1:
                    wait_for_room(found_1, taken + (NV - 1), c - (DEPTH - 1))
            async_store(x_tiles, [slot * (3 * C), p * W], k)
            async_store(x_tiles, [slot * (3 * C) + C, p * W], q)
            wait_for_copies(j, 2)
            ask_unit(tiles, memory, loaded, where, j * PARTS + p + (PARTS - 1), SHARE)
        mbarrier.wait(done, (j & 1) ^ 1)
        N = assembled(of_k, narrow, mma) * -rates[:, None]
        N_s.store(N.to(gl.float16))
        own = gl.convert_layout(gl.reshape(rates, [GROUPS, ROWS]), gl.SliceLayout(2, inner))
        store_blocks(of_k[0] * -gl.expand_dims(own, 2), n_s)
        aq_s.store((assembled(of_q, narrow, mma) * scale).to(gl.float16))
        wait_for_copies(j, 0)
        fence_async_shared()
        meet()
        mbarrier.arrive(made, count=1)


@gluon.jit
def invert(
    x_tiles, a_tiles, rest_s, pair_s, t_s, d_s, bars, place, counts,
    K: gl.constexpr, SHARE: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """A and B^T of chunks r, r + SHARE, ... of a sequence."""
    n_s, N_s, aq_s = pair_s
    made, done = bars
    r, chunks, ring = place
    W: gl.constexpr = rest_s.shape[2]
    PARTS: gl.constexpr = K // W
    kind: gl.constexpr = x_tiles.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    parted: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    mine = (chunks - r + (SHARE - 1)) // SHARE
    for j in range(mine):
        slot = ring * DEPTH + (r + j * SHARE) % DEPTH
        mbarrier.wait(made, j & 1)
        merge_twice(on_diagonal(inverted_blocks(n_s, d_s), mma), t_s, N_s, mma)
        A = warpgroup_mma(aq_s, t_s, gl.zeros([C, C], gl.float32, mma), use_acc=False)
        a_s = reinterpret(N_s, kind, [C, C], half)
        a_s.store(A.to(kind))
        for p in gl.static_range(PARTS):
            rest = rest_s.index((j & 1) * PARTS + p)
            B = warpgroup_mma(t_s.permute((1, 0)), rest, gl.zeros([C, W], gl.float32, parted), use_acc=False)
            meet()
            reinterpret(rest, kind, [C, W], x_tiles.layout).store(B.to(kind))
        fence_async_shared()
        meet()
        async_store(a_tiles, [slot * C, 0], a_s)
        for p in gl.static_range(PARTS):
            b_s = reinterpret(rest_s.index((j & 1) * PARTS + p), kind, [C, W], x_tiles.layout)
            async_store(x_tiles, [slot * (3 * C) + 2 * C, p * W], b_s)
        wait_for_copies(j, 0)
        release_count(counts + r, j + 1)
        mbarrier.arrive(done, count=1)
