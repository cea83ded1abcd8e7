"""Gradients of KDA's q, k and decays with float32 inputs on Hopper, in Gluon: the dyadic levels of ``gradients.py`` in three parts.

The formulas are those of ``gradients.py``; ``pairs_gradients_float32.py`` computes P, M and the products with states before. Tiles are
transposed, see ``columns.py``, and a product of parts is six. The sums of log decays of levels have two parts, see ``prepare_float32.py``:
a level's factor is one exponential. Every term of dg is a pair of tokens with t between them, so there is no cancellation.

P is stored with its transpose above the diagonal. So one product of a level has the terms of dq of second halves, from tiles of k, and the
terms of dk of first halves, from tiles of q.

Inputs, products with states and gradients are read and written in registers: a warp's accesses are whole sectors of 32 bytes. Shared memory
has P and M (48 KB) and in float32 the tiles of levels 16 and 32 (48 KB), so two programs share a multiprocessor.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ....gpu.hopper_tiles import async_load, in_three, meet, reinterpret
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import chunk_of_slot
from .anchored import power
from .columns import PAIRS, RIGHT, TILE, halves_of, in_second_half, joined, none_of, of_partner, times
from .gradients import decays_around
from .layouts import GROUPS, ROWS, C
from .levels import MASKS, PREFIX, SUFFIX, split_by, store_masks
from .pairs_gradients_float32 import BLOCKS
from .prepare_float32 import in_two_sums

W = gl.constexpr(64)
"""Key channels of a program."""


@gluon.jit
def elements(pointer, step, left, m):
    """Pointers to the elements of group m [W,ROWS] whose tokens are ``step`` apart, and which exist."""
    token = ROWS * m + gl.arange(0, ROWS, gl.SliceLayout(0, TILE))[None, :]
    channel = gl.arange(0, W, gl.SliceLayout(1, TILE))[:, None]
    return pointer + (token * step + channel), (token < left) & (channel < W)


@gluon.jit
def group_at(pointer, step, left, m):
    """Group m of a tensor, transposed: [W,ROWS]."""
    at, exists = elements(pointer, step, left, m)
    return gl.load(at, mask=exists, other=0.0)


@gluon.jit
def store_group(x, pointer, step, left, m):
    """The inverse of ``group_at``."""
    at, exists = elements(pointer, step, left, m)
    gl.store(at, x.to(pointer.dtype.element_ty), mask=exists)


@gluon.jit
def of_states_at(of_states, K: gl.constexpr, n: gl.constexpr, m):
    """Group m of product n with states [W,ROWS]."""
    token = ROWS * m + gl.arange(0, ROWS, gl.SliceLayout(0, TILE))[None, :]
    channel = gl.arange(0, W, gl.SliceLayout(1, TILE))[:, None]
    return gl.load(of_states + ((n * K + channel) * C + token))


@gluon.jit
def sums_of_pairs(x):
    """Of log decays [W,ROWS] in pairs of tokens: sums up to each token; of each pair [W,ROWS/2]."""
    even, odd = halves_of(x)
    total = even + odd
    return joined(even, total), total


@gluon.jit
def widened_sums(through, total, n: gl.constexpr):
    """From blocks of 2^n tokens, n > 0, to blocks of 2^(n+1): sums up to each token, and of the block."""
    other = of_partner(total, n - 1)
    return through + gl.where(in_second_half(n), joined(other, other), 0.0), total + other


@gluon.jit
def sums_of_group(d):
    """From log decays [W,ROWS] in two parts: their sums up to each token of the group, and after it, in two parts each."""
    through, total = sums_of_pairs(d[0])
    rest, rest_total = sums_of_pairs(d[1])
    for n in gl.static_range(1, 4):
        through, total = widened_sums(through, total, n)
        rest, rest_total = widened_sums(rest, rest_total, n)
    return (through, rest), (joined(total, total) - through, joined(rest_total, rest_total) - rest)


@gluon.jit
def blocks_at(pairs_s, matrix: gl.constexpr, i, j):
    """The parts of block (i,j) of P (0) or M (1) as right operands."""
    found = ()
    for m in gl.static_range(3):
        found = found + (pairs_s.index((3 * matrix + m) * BLOCKS + GROUPS * i + j).load(RIGHT),)
    return found


@gluon.jit
def split_parts(parts, masks_s, n: gl.constexpr):
    """The parts of a block of pairs, 0 but for the pairs that level n splits."""
    return split_by(parts[0], masks_s, n), split_by(parts[1], masks_s, n), split_by(parts[2], masks_s, n)


@gluon.jit
def product(x, y):
    """The product of a tile [W,ROWS] and a block, both in three parts."""
    acc = none_of(x[0])
    for most in gl.static_range(2, -1, -1):
        for m in gl.static_range(most + 1):
            acc = times(x[most - m], y[m], acc)
    return acc


@gluon.jit
def summed(z, mask):
    """Sums of a tile z [W,ROWS], as a product with a mask of 0 and 1."""
    parts = in_three(z, gl.bfloat16)
    return times(parts[0], mask, times(parts[1], mask, times(parts[2], mask, none_of(z))))


@gluon.jit
def near_levels(q, k, d, pairs_s, masks_s, m):
    """The levels within group m, whose tiles are q, k and the log decays d in two parts: terms of dq, dk, dg.

    Also returns the sums of log decays up to each token of the group, and after it, in two parts each.
    """
    P = blocks_at(pairs_s, 0, m, m)
    M = blocks_at(pairs_s, 1, m, m)
    through, rest = d
    total, rest_total = d
    every, every_rest = d
    dq = none_of(q)
    dk = none_of(q)
    dg = none_of(q)
    for n in gl.static_range(4):
        second = in_second_half(n)
        factor = power((gl.where(second, through, every - through), gl.where(second, rest, every_rest - rest)))
        Q = q * factor
        X = k * factor
        both = product(in_three(gl.where(second, Q, X), gl.bfloat16), split_parts(P, masks_s, n))
        dQ = gl.where(second, both, 0.0)
        dX = product(in_three(X, gl.bfloat16), split_parts(M, masks_s, n)) + gl.where(second, 0.0, both)
        dq += dQ * factor
        dk += dX * factor
        z = X * dX + Q * dQ
        if n == 0:
            dg += gl.where(second, z, 0.0)
            through, total = sums_of_pairs(through)
            rest, rest_total = sums_of_pairs(rest)
        else:
            dg += summed(z, masks_s.index(2 + n).load(RIGHT))
            through, total = widened_sums(through, total, n)
            rest, rest_total = widened_sums(rest, rest_total, n)
        every = joined(total, total)
        every_rest = joined(rest_total, rest_total)
    return dq, dk, dg, (through, rest), (every - through, every_rest - rest)


@gluon.jit
def far_level(tiles_s, pairs_s, m, first, second, COUNT: gl.constexpr):
    """A level of whole groups, for group m: ``first`` and COUNT - 1 groups after it are the other half.

    ``second``: whether m is in the second half. ``tiles_s`` [3 GROUPS,W,ROWS]: tiles of k of levels 32 (COUNT = 2) and 16 (COUNT = 1), then
    those of q of second halves. Returns the products with M, and those with P: of tiles of k for dq in the second half, of q for dk in the
    first.
    """
    SHIFT: gl.constexpr = 2 - COUNT  # of the number of a group with a tile of q
    dX = gl.zeros([W, ROWS], gl.float32, TILE)
    both = gl.zeros([W, ROWS], gl.float32, TILE)
    for c in gl.static_range(COUNT):
        of_k = GROUPS * SHIFT + first + c
        of_q = 2 * GROUPS + 2 * SHIFT + (((first + c) >> SHIFT) & 1)
        dX += product(in_three(tiles_s.index(of_k).load(TILE), gl.bfloat16), blocks_at(pairs_s, 1, first + c, m))
        X = in_three(tiles_s.index(gl.where(second, of_k, of_q)).load(TILE), gl.bfloat16)
        both += product(X, blocks_at(pairs_s, 0, first + c, m))
    return dX, both


@gluon.jit
def store_decays_around(factors_s, coarse, rest):
    """``store_decays_around`` of ``gradients.py`` from the log decays of the groups in two parts. Returns the decay of the chunk [W]."""
    factors_s.index(0).store(power((coarse[0], rest[0])))
    factors_s.index(1).store(power((coarse[0] + coarse[1], rest[0] + rest[1])))
    factors_s.index(2).store(power((coarse[0] + coarse[1] + coarse[2], rest[0] + rest[1] + rest[2])))
    factors_s.index(3).store(power((coarse[1] + coarse[2] + coarse[3], rest[1] + rest[2] + rest[3])))
    factors_s.index(4).store(power((coarse[2] + coarse[3], rest[2] + rest[3])))
    factors_s.index(5).store(power((coarse[3], rest[3])))
    factors_s.index(6).store(power((coarse[1], rest[1])))
    factors_s.index(7).store(power((coarse[2], rest[2])))
    return power((coarse[0] + coarse[1] + coarse[2] + coarse[3], rest[0] + rest[1] + rest[2] + rest[3]))


@gluon.jit
def store_tiles_and_sums(tiles_s, sums_s, of_states, factors_s, q, k, d, scale, K: gl.constexpr, m):
    """Store the tiles of levels 32 and 16 of group m, see ``far_level``, and the sums over its tokens of the terms of states of dg.

    ``sums_s`` [2 GROUPS,W]: of the terms for the tokens before the group, and for those after it.
    """
    through, remaining = sums_of_group(d)
    before, after, middle = decays_around(factors_s, m)
    decay = power(through)
    Q = q * decay
    Kt = k * decay
    X = k * power(remaining)
    z = Q * (of_states_at(of_states, K, 2, m) * scale) - Kt * of_states_at(of_states, K, 1, m)
    sums_s.index(m).store(gl.sum(z * before, 1))
    sums_s.index(GROUPS + m).store(gl.sum(X * of_states_at(of_states, K, 0, m) * after, 1))
    tiles_s.index(m).store(gl.where(m > 1, Kt, X) * middle)
    tiles_s.index(GROUPS + m).store(gl.where(m % 2 == 1, Kt, X))
    if m > 1:
        tiles_s.index(2 * GROUPS + m % 2).store(Q * middle)
    if m % 2 == 1:
        tiles_s.index(2 * GROUPS + 2 + m // 2).store(Q)


@gluon.jit
def far_terms(tiles_s, pairs_s, of_states, factors_s, q, k, through, remaining, scale, K: gl.constexpr, m):
    """The terms of levels 16 and 32 and of the states for group m: of dq and dk [W,ROWS], and their products with q and k.

    These are of dg for earlier tokens and for later ones. Also returns the sum [W] of those of level 32, which the group beside it needs.
    """
    before, after, middle = decays_around(factors_s, m)
    dX, both = far_level(tiles_s, pairs_s, m, m ^ 1, m % 2 == 1, 1)
    decay = power(through)
    decay_after = power(remaining)
    Q = q * decay
    Kt = k * decay
    X = k * decay_after
    later = gl.where(m % 2 == 1, 1.0, 0.0)  # whether group m is in the second half of its block of level 16
    second = gl.where(m > 1, 1.0, 0.0)  # of level 32
    dX += both * (1.0 - later)
    of_q = of_states_at(of_states, K, 2, m) * (before * scale) + both * later
    of_k = dX * later - of_states_at(of_states, K, 1, m) * before
    of_x = of_states_at(of_states, K, 0, m) * after + dX * (1.0 - later)
    dX, both = far_level(tiles_s, pairs_s, m, (m & 2) ^ 2, m > 1, 2)
    dQ = both * second
    dX += both * (1.0 - second)
    beside = gl.sum((Q * dQ + gl.where(m > 1, Kt, X) * dX) * middle, 1)
    of_q += dQ * middle
    of_k += dX * (middle * second)
    of_x += dX * (middle * (1.0 - second))
    return of_q * decay, of_k * decay + of_x * decay_after, Q * of_q + Kt * of_k, X * of_x, beside


@gluon.jit(do_not_specialize=["N", "T", "H", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "g_b", "g_t", "g_h"])
def penstock_kda_gradients_float32_sm90(
    pair_tiles, q, k, g, own, of_states, kept, d_query, d_key, d_decay, cu_seqlens, scale, N, T, H, q_b, q_t, q_h, k_b, k_t, k_h,
    g_b, g_t, g_h, K: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dq = P k, dk = P^T q + (M + M^T) k by levels and dg with the products with states of ``pairs_gradients_float32.py``, of all chunks.

    TMA tiles: the parts of the blocks of P and M [256,16] of [slots,H,2 3 BLOCKS 16,16]. Reads q, k and g [B,T,H,K] by strides, ``own``
    [slots,H,C], the diagonal of P, ``of_states`` [slots,H,3,K,C] and ``kept`` [slots,H,K]. Writes dq, dk and dg [B,T,H,K]. Program (slot of
    a chunk, head, block of W key channels).
    """
    PARTS: gl.constexpr = K // W
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row: gl.constexpr = gl.SliceLayout(1, TILE)
    p = gl.program_id(0) % PARTS
    h = gl.program_id(0) // PARTS % H
    slot = gl.program_id(0) // PARTS // H
    b, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    token = b * T + begin
    place = slot.to(gl.int64) * H + h
    pairs_s = gl.allocate_shared_memory(gl.bfloat16, [6 * BLOCKS, ROWS, ROWS], pair_tiles.layout)
    tiles_s = gl.allocate_shared_memory(gl.float32, [3 * GROUPS, W, ROWS], PAIRS)  # of levels 32 and 16, see ``far_level``
    sums_s = gl.allocate_shared_memory(gl.float32, [2 * GROUPS, W], flat)
    factors_s = gl.allocate_shared_memory(gl.float32, [2 * GROUPS, W], flat)
    masks_s = gl.allocate_shared_memory(gl.bfloat16, [MASKS, ROWS, ROWS], plain2)
    loaded = barriers(1, 1)
    fence_async_shared()
    meet()
    given = reinterpret(pairs_s, gl.bfloat16, [6, BLOCKS * ROWS, ROWS], pair_tiles.layout)
    mbarrier.expect(loaded.index(0), 6 * pair_tiles.block_type.nbytes)
    for n in gl.static_range(6):
        async_load(pair_tiles, [((place * 6 + n) * (BLOCKS * ROWS)).to(gl.int32), 0], loaded.index(0), given.index(n))

    head = h.to(gl.int64)
    q += b * q_b + begin * q_t + head * q_h + p * W
    k += b * k_b + begin * k_t + head * k_h + p * W
    g += b * g_b + begin * g_t + head * g_h + p * W
    of_states += place * (3 * K * C) + p * (W * C)
    coarse = ()
    rest = ()
    for n in gl.static_range(GROUPS):
        d = in_two_sums(group_at(g, g_t, left, n))
        coarse = coarse + (gl.sum(d[0], 1),)
        rest = rest + (gl.sum(d[1], 1),)
    across = store_decays_around(factors_s, coarse, rest)
    across *= gl.load(kept + place * K + p * W + gl.arange(0, W, row))
    store_masks(masks_s)
    meet()
    for m in range(GROUPS):
        Q = group_at(q, q_t, left, m)
        X = group_at(k, k_t, left, m)
        d = in_two_sums(group_at(g, g_t, left, m))
        store_tiles_and_sums(tiles_s, sums_s, of_states, factors_s, Q, X, d, scale, K, m)
    meet()
    mbarrier.wait(loaded.index(0), 0)
    beside = gl.zeros([W], gl.float32, row)
    first = (token * H + h) * K + p * W
    step = H.to(gl.int64) * K
    for n in range(GROUPS):
        m = n ^ (n >> 1)  # 0, 1, 3, 2: of the groups of a half of the chunk, that which is farther from the middle first
        Q = group_at(q, q_t, left, m)
        X = group_at(k, k_t, left, m)
        d = in_two_sums(group_at(g, g_t, left, m))
        dq, dk, dg, through, remaining = near_levels(Q, X, d, pairs_s, masks_s, m)
        constant = across + gl.where(n % 2 == 1, beside, 0.0)
        more_q, more_k, z_r, z_c, beside = far_terms(tiles_s, pairs_s, of_states, factors_s, Q, X, through, remaining, scale, K, m)
        for j in gl.static_range(GROUPS):
            constant += gl.where(m < j, sums_s.index(j).load(row), 0.0) + gl.where(m > j, sums_s.index(GROUPS + j).load(row), 0.0)
        dg += summed(z_r, masks_s.index(SUFFIX).load(RIGHT)) + summed(z_c, masks_s.index(PREFIX).load(RIGHT)) + constant[:, None]
        e = gl.load(own + place * C + ROWS * m + gl.arange(0, ROWS, gl.SliceLayout(0, TILE)))[None, :]
        store_group(dq + more_q + e * X, d_query + first, step, left, m)
        store_group(dk + more_k + e * Q, d_key + first, step, left, m)
        store_group(dg, d_decay + first, step, left, m)
    invalidate((loaded,))
