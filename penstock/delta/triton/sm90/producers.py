"""The warps of Hopper's KDA kernel that prepare chunks, in Gluon. See ``prepare.py`` for the formulas.

- ``prepare``: pairs of tokens, and q and k with the factors of the state, for W channels after another (a unit).
- ``invert``: factors of groups, ahead of ``prepare``, and after it the inverse, A and B^T.
- ``copy``, one warp: loads of q, k and g, and stores of the tiles that ``prepare`` writes in their place.

All visit the same chunks of the same heads. ``base`` counts the chunks of earlier heads, and ``seen`` those that this program prepared:
they number the slots of the ring in memory and the phases of barriers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ....gpu.hopper_tiles import async_load, async_store, meet, reinterpret, zero_rows_from
from ....gpu.tiles import tokens_of
from .exchange import release_count, wait_for_copies, wait_for_count
from .inverse import inverted_blocks, merge_twice, on_diagonal, store_blocks
from .layouts import GROUPS, ROWS, C
from .prepare import assembled, factors_of, far_pairs, near_pairs_and_tiles, no_pairs, store_factors, store_group_sums


@gluon.jit
def head_at(w, cu_seqlens, N, T, H, PACKED: gl.constexpr):
    """Head w of all sequences: the sequence, the head in it, the batch row and the row of its first token, its tokens and its chunks."""
    n, b, row, _, _, _, tokens = tokens_of(w // H, cu_seqlens, N, T, T, False, PACKED, False)
    return n, w % H, b, row, tokens, (gl.maximum(tokens, 0) + (C - 1)) // C


@gluon.jit
def own_chunks(base, r, chunks, SHARE: gl.constexpr):
    """The first chunk of a head that program r prepares, and their number."""
    first = (r + SHARE - base % SHARE) % SHARE
    return first, (chunks - first + (SHARE - 1)) // SHARE


@gluon.jit
def ask_unit(tiles, memory, loaded, row, columns, p):
    """Start the loads of part p of a chunk whose first token is ``row``."""
    q_tiles, k_tiles, g_tiles = tiles
    q_s, k_s, g_s = memory
    q_column, g_column = columns
    at = p * q_s.shape[2]
    bar = loaded.index(p)
    mbarrier.expect(bar, q_tiles.block_type.nbytes + k_tiles.block_type.nbytes + g_tiles.block_type.nbytes)
    async_load(g_tiles, [row, g_column + at], bar, g_s.index(p))
    async_load(q_tiles, [row, q_column + at], bar, q_s.index(p))
    async_load(k_tiles, [row, q_column + at], bar, k_s.index(p))


@gluon.jit
def copy(
    tiles, x_tiles, memory, bars, place, sizes, cu_seqlens, counts,
    K: gl.constexpr, NV: gl.constexpr, SHARE: gl.constexpr, DEPTH: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The copies of ``prepare``: inputs, and tiles to the ring when it has room. ``invert`` tells other programs that they are there."""
    q_s, k_s, _ = memory
    loaded, written, stored = bars
    group, groups, r = place
    N, T, H, R = sizes
    PARTS: gl.constexpr = q_s.shape[0]
    W: gl.constexpr = q_s.shape[2]
    taken = counts + SHARE
    base = group * 0
    seen = group * 0
    for w in range(group, N * H, groups):
        _n, h, b, row, _tokens, chunks = head_at(w, cu_seqlens, N, T, H, PACKED)
        first, mine = own_chunks(base, r, chunks, SHARE)
        line = (b * T + row).to(gl.int32) + first * C
        columns = (h // R * K, h * K)
        if mine > 0:
            for p in gl.static_range(PARTS):
                ask_unit(tiles, memory, loaded, line, columns, p)
        for j in range(mine):
            e = base + first + j * SHARE
            slot = group * DEPTH + e % DEPTH
            for m in gl.static_range(NV):
                wait_for_count(taken + m, e - (DEPTH - 1))
            for p in range(PARTS):
                mbarrier.wait(written.index(p), seen & 1)
                async_store(x_tiles, [slot * (3 * C), p * W], k_s.index(p))
                async_store(x_tiles, [slot * (3 * C) + C, p * W], q_s.index(p))
                wait_for_copies(seen)
                if j + 1 < mine:
                    ask_unit(tiles, memory, loaded, line + (j + 1) * (SHARE * C), columns, p)
            mbarrier.arrive(stored, count=1)
            seen += 1
        base += chunks


@gluon.jit
def prepare(
    memory, rest_s, near_s, far_s, factors_s, pair_s, bars, place, sizes, cu_seqlens, beta, steps, scale,
    SHARE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Pairs and tiles."""
    q_s, k_s, g_s = memory
    n_s, N_s, aq_s = pair_s
    loaded, factored, written, made, done = bars
    group, groups, r = place
    N, T, H, _ = sizes
    b_b, b_t, b_h = steps
    PARTS: gl.constexpr = q_s.shape[0]
    W: gl.constexpr = q_s.shape[2]
    kind: gl.constexpr = q_s.dtype
    inner: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    i = gl.arange(0, C, gl.SliceLayout(1, mma))
    base = group * 0
    seen = group * 0
    for w in range(group, N * H, groups):
        _n, h, b, row, tokens, chunks = head_at(w, cu_seqlens, N, T, H, PACKED)
        first, mine = own_chunks(base, r, chunks, SHARE)
        rates_at = beta + b * b_b + row * b_t + h.to(gl.int64) * b_h
        for j in range(mine):
            c = first + j * SHARE
            left = tokens - c * C
            phase = seen & 1
            rates = gl.load(rates_at + (c * C + i).to(gl.int64) * b_t, mask=i < left, other=0.0).to(gl.float32)
            D_q, near_q, far_q = no_pairs()
            D_k, near_k, far_k = no_pairs()
            for p in range(PARTS):
                q = q_s.index(p)
                k = k_s.index(p)
                mbarrier.wait(loaded.index(p), phase)
                if left < C:
                    zero_rows_from(q, left, clean)
                    zero_rows_from(k, left, clean)
                    meet()
                mbarrier.wait(factored.index(p), phase)
                factors = factors_of(factors_s, p, phase)
                rest = rest_s.index(phase * PARTS + p)
                D_q, D_k, Q, Kt = near_pairs_and_tiles(q, k, g_s.index(p), rest, near_s, far_s, factors, D_q, D_k, W)
                fence_async_shared()
                meet()
                mbarrier.arrive(written.index(p), count=1)
                near_q, near_k, far_q, far_k = far_pairs(Q, Kt, near_s, far_s, factors[3], near_q, near_k, far_q, far_k, kind, W)
            mbarrier.wait(done, phase ^ 1)
            A = assembled((D_k, near_k, far_k), narrow, mma) * -rates[:, None]
            N_s.store(A.to(gl.float16))
            own = gl.convert_layout(gl.reshape(rates, [GROUPS, ROWS]), gl.SliceLayout(2, inner))
            store_blocks(D_k * -gl.expand_dims(own, 2), n_s)
            aq_s.store((assembled((D_q, near_q, far_q), narrow, mma) * scale).to(gl.float16))
            fence_async_shared()
            meet()
            mbarrier.arrive(made, count=1)
            seen += 1
        base += chunks


@gluon.jit
def publish_factors(g, part_s, factors_s, factored, loaded, totals, p, phase, left, scale, W: gl.constexpr):
    """Compute the factors of part p of a chunk when its decays are loaded."""
    clean: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    mbarrier.wait(loaded.index(p), phase)
    if left < C:
        zero_rows_from(g, left, clean)
        meet()
    store_group_sums(g, part_s, W)
    meet()
    store_factors(part_s, factors_of(factors_s, p, phase), totals + p * W, scale, W)
    meet()
    mbarrier.arrive(factored.index(p), count=1)


@gluon.jit
def invert(
    x_tiles, a_tiles, g_s, part_s, factors_s, rest_s, pair_s, t_s, d_s, bars, place, sizes, cu_seqlens, totals, counts, scale,
    K: gl.constexpr, SHARE: gl.constexpr, DEPTH: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Factors of the next chunk, then A and B^T of this one."""
    n_s, N_s, aq_s = pair_s
    loaded, factored, made, done, stored = bars
    group, groups, r = place
    N, T, H, _ = sizes
    W: gl.constexpr = rest_s.shape[2]
    PARTS: gl.constexpr = K // W
    kind: gl.constexpr = x_tiles.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    parted: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    totals += group.to(gl.int64) * (2 * DEPTH * K)
    base = group * 0
    seen = group * 0
    for w in range(group, N * H, groups):
        _n, _h, _b, _row, tokens, chunks = head_at(w, cu_seqlens, N, T, H, PACKED)
        first, mine = own_chunks(base, r, chunks, SHARE)
        if mine > 0:
            at = totals + (base + first) % (2 * DEPTH) * K
            for p in range(PARTS):
                publish_factors(g_s.index(p), part_s, factors_s, factored, loaded, at, p, seen & 1, tokens - first * C, scale, W)
        for j in range(mine):
            c = first + j * SHARE
            slot = group * DEPTH + (base + c) % DEPTH
            phase = seen & 1
            more = j + 1 < mine
            at = totals + (base + c + SHARE) % (2 * DEPTH) * K
            left = tokens - (c + SHARE) * C
            if more:
                for p in range(PARTS - 1):
                    publish_factors(g_s.index(p), part_s, factors_s, factored, loaded, at, p, phase ^ 1, left, scale, W)
            mbarrier.wait(made, phase)
            merge_twice(on_diagonal(inverted_blocks(n_s, d_s), mma), t_s, N_s, mma)
            A = warpgroup_mma(aq_s, t_s, gl.zeros([C, C], gl.float32, mma), use_acc=False)
            a_s = reinterpret(N_s, kind, [C, C], half)
            a_s.store(A.to(kind))
            for p in gl.static_range(PARTS):
                rest = rest_s.index(phase * PARTS + p)
                B = warpgroup_mma(t_s.permute((1, 0)), rest, gl.zeros([C, W], gl.float32, parted), use_acc=False)
                meet()
                reinterpret(rest, kind, [C, W], x_tiles.layout).store(B.to(kind))
            fence_async_shared()
            meet()
            async_store(a_tiles, [slot * C, 0], a_s)
            for p in gl.static_range(PARTS):
                b_s = reinterpret(rest_s.index(phase * PARTS + p), kind, [C, W], x_tiles.layout)
                async_store(x_tiles, [slot * (3 * C) + 2 * C, p * W], b_s)
            mbarrier.wait(stored, phase)  # before the factors with which ``prepare`` may end the next chunk
            if more:
                publish_factors(g_s.index(PARTS - 1), part_s, factors_s, factored, loaded, at, PARTS - 1, phase ^ 1, left, scale, W)
            wait_for_copies(seen)
            seen += 1
            release_count(counts + r, seen)
            mbarrier.arrive(done, count=1)
        base += chunks
