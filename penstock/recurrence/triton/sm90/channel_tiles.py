"""The warps of Hopper's forward kernel that make tiles, and the ring through which the other warps get them, in Gluon.

The ring has slots for pairs of tiles. A chunk has four pairs: X_1 and X_2, X_4 and X_8, X_16 and X_32, q and k with the factors of the
state. float32: a tile is PARTS tiles of float16, see ``parts``. q and k of each token are multiplied by a power of two each. Their
inverses, and the weight of each token for itself, are in ``sides``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....gpu.hopper_tiles import async_load, exp2, meet, unknown
from ....gpu.tiles import LOG2E, powers_of_two
from .dyadic import C, around, between, factored, flat, grouped, spread, widened
from .parts import LEAST, parts_of, store_parts

GROUPS = gl.constexpr(4)  # groups of R tokens; a thread holds all tokens of a group
R = gl.constexpr(16)
LEVELS = gl.constexpr(6)
TILES = gl.constexpr(8)  # of a chunk in the ring: one for each level, then q and k with the factors of the state


@gluon.jit
def decays_at(g, g_t, g_k, left, K: gl.constexpr, layout: gl.constexpr):
    """Load a chunk's decays [64,K] in their dtype, 0 after the last token."""
    i = gl.arange(0, C, gl.SliceLayout(1, layout)) + unknown(left * 0)
    j = gl.arange(0, K, gl.SliceLayout(0, layout))
    return gl.load(g + (i[:, None] * g_t + j[None, :] * g_k), mask=(i < left)[:, None], other=0.0)


@gluon.jit
def publish(X, Y, n: gl.constexpr, c, x_s, full, empty, PARTS: gl.constexpr):
    """Store pair n of a chunk's tiles in the ring, when its slot is empty."""
    PAIRS: gl.constexpr = full.type.shape[0]
    s: gl.constexpr = n % PAIRS
    mbarrier.wait(empty.index(s), (c * (TILES // 2 // PAIRS) + n // PAIRS) & 1 ^ 1)
    if PARTS > 0:
        store_parts(x_s, 2 * s * PARTS, X, PARTS)
        store_parts(x_s, (2 * s + 1) * PARTS, Y, PARTS)
    else:
        x_s.index(2 * s).store(X)
        x_s.index(2 * s + 1).store(Y)
    fence_async_shared()
    meet()
    mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def awaited(n: gl.constexpr, c, zero, x_s, full, PARTS: gl.constexpr):
    """Wait for pair n of a chunk's tiles in the ring. Returns two tiles or, of float32, the parts of two."""
    PAIRS: gl.constexpr = full.type.shape[0]
    s: gl.constexpr = n % PAIRS
    mbarrier.wait(full.index(s), (c * (TILES // 2 // PAIRS) + n // PAIRS) & 1)
    if PARTS > 0:
        return parts_of(x_s, zero + 2 * s * PARTS, PARTS), parts_of(x_s, zero + (2 * s + 1) * PARTS, PARTS)
    else:
        return x_s.index(zero + 2 * s), x_s.index(zero + (2 * s + 1))


@gluon.jit
def released(n: gl.constexpr, empty):
    """Mark the slot of pair n as empty."""
    mbarrier.arrive(empty.index(n % empty.type.shape[0]), count=1)


@gluon.jit
def ask(tiles, tile, bar, row, column, there):
    """Start the TMA load of a tile; the barrier waits for nothing else."""
    mbarrier.expect(bar, tiles.block_type.nbytes, pred=there)
    async_load(tiles, [row, column], bar, tile, pred=there)


@gluon.jit
def ask_next(tiles, v_s, bars, row, column, c, chunks, STAGES: gl.constexpr):
    """Start the load of v of chunk c - 1 + STAGES after the output of chunk c - 1, which is stored from the same slot, has left it."""
    if c > 0:
        if c - 1 + STAGES < chunks:
            tma.store_wait(0)
            meet()
            slot = (c - 1) % STAGES
            ask(tiles, v_s.index(slot), bars.index(slot), row + (c - 1 + STAGES) * C, column, True)


@gluon.jit
def ask_both(q_tiles, k_tiles, q, k, bar, row, column, there):
    """Start the TMA loads of tiles of q and k, with one barrier."""
    mbarrier.expect(bar, q_tiles.block_type.nbytes + k_tiles.block_type.nbytes, pred=there)
    async_load(q_tiles, [row, column], bar, q, pred=there)
    async_load(k_tiles, [row, column], bar, k, pred=there)


@gluon.jit
def prepare(
    g, tiles, ring, x_s, sides, bars, place, bonus, scale, g_t, g_k,
    K: gl.constexpr, TILED: gl.constexpr, STATIC: gl.constexpr, PREVIOUS: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """The warps that multiply q and k by their factors. A thread has two channels of a group's tokens."""
    FLOAT: gl.constexpr = PARTS > 0
    q_s, k_s, _ = ring
    part_s, total_s, g_s, own_s, ups_s = sides
    u, u_k, _ = bonus
    loaded, full, empty, _, arrived = bars
    row, key_column, _, chunks, tokens = place
    q_tiles, k_tiles, g_tiles, _, _ = tiles
    if HALF or FLOAT:
        scale = 1.0
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([R, 2], [1, 32], [GROUPS, WARPS // GROUPS], [1, 0])
    by_group: gl.constexpr = gl.BlockedLayout([1, R, 2], [1, 1, 32], [GROUPS, 1, WARPS // GROUPS], [2, 1, 0])
    across: gl.constexpr = gl.SliceLayout(1, by_group)  # [GROUPS,K]
    i = gl.arange(0, C, gl.SliceLayout(1, layout))
    if FLOAT:
        own = gl.full([1, K], 1.0, gl.float32, layout)
        if PREVIOUS:
            own = gl.load(u + gl.arange(0, K, gl.SliceLayout(0, layout)) * u_k).to(gl.float32)[None, :]
    for n in gl.static_range(STAGES):
        ask_both(q_tiles, k_tiles, q_s.index(n), k_s.index(n), loaded.index(n), row + n * C, key_column, n < chunks)
    if TILED:
        ask(g_tiles, g_s, arrived, row, key_column, chunks > 0)
    elif STATIC:
        constant = gl.load(g + gl.arange(0, K, gl.SliceLayout(0, layout)) * g_k).to(gl.float32)[None, :]
    else:
        d = decays_at(g, g_t, g_k, tokens, K, layout)
    for c in range(chunks):
        s = c % STAGES
        left = tokens - c * C
        if TILED:
            mbarrier.wait(arrived, c & 1)
            d = g_s.load(layout).to(gl.float32)
            if left < C:
                d = gl.where((i < left)[:, None], d, 0.0)
        elif STATIC:
            d = gl.where((i < left)[:, None], constant, 0.0)
        x = grouped(d.to(gl.float32) * LOG2E, GROUPS, by_group)
        part = part_s.index(c & 1)
        part.store(gl.sum(x, 1))
        total = exp2(x)
        mbarrier.wait(loaded.index(s), (c // STAGES) & 1)
        Q = q_s.index(s).load(layout)
        Kt = k_s.index(s).load(layout)
        if FLOAT:
            if left < C:  # rows of another sequence have no part in the powers of two
                Q = gl.where((i < left)[:, None], Q, 0.0)
                Kt = gl.where((i < left)[:, None], Kt, 0.0)
            own_s.index(s).store(gl.sum(Q * (Kt * own), 1))
            down_q, up_q = powers_of_two(gl.max(gl.abs(Q), 1), LEAST)
            down_k, up_k = powers_of_two(gl.max(gl.abs(Kt), 1), LEAST)
            Q *= down_q[:, None]
            Kt *= down_k[:, None]
            ups_s.index(2 * s).store(up_q)
            ups_s.index(2 * s + 1).store(up_k)
        through = gl.full([GROUPS, R, K], scale, gl.float32, by_group)
        if not PREVIOUS:
            through = total * scale
        remaining = gl.full([GROUPS, R, K], 1.0, gl.float32, by_group)
        for n in gl.static_range(LEVELS):
            if 1 << n < R:
                X = factored(Q, Kt, through, remaining, n, layout)
                through, remaining, total = widened(through, remaining, total, by_group, WARPS)
            else:
                if 1 << n == R:
                    if not (TILED or STATIC):
                        g += (g_t + left * 0).to(gl.int64) * C
                        d = decays_at(g, g_t, g_k, left - C, K, layout)
                    Qf = Q.to(gl.float32) * flat(through, layout)
                    Kf = Kt.to(gl.float32) * flat(remaining, layout)
                X = gl.where(((i >> n) & 1)[:, None] == 1, Qf, Kf)
                if 1 << n > R:
                    X = X * spread(exp2(between(part, (1 << n) // R, across)), R, layout)
                X = X.to(q_s.dtype)
            if n % 2 == 0:
                E = X
            else:
                publish(E, X, n // 2, c, x_s, full, empty, PARTS)
                if TILED and n == 1:  # all warps have read the decays
                    ask(g_tiles, g_s, arrived, row + (c + 1) * C, key_column, c + 1 < chunks)
                if n == 5:  # ``walk`` has read q and k
                    there = c + STAGES < chunks
                    ask_both(q_tiles, k_tiles, q_s.index(s), k_s.index(s), loaded.index(s), row + (c + STAGES) * C, key_column, there)
        before, after, whole = around(part, across)
        total_s.index(s).store(gl.reshape(exp2(whole), [K]))
        X = (Qf * spread(exp2(before), R, layout)).to(q_s.dtype)
        Y = (Kf * spread(exp2(after), R, layout)).to(q_s.dtype)
        if left < C:
            Y = gl.where((i < left)[:, None], Y, gl.zeros_like(Y))
        publish(X, Y, 3, c, x_s, full, empty, PARTS)
