"""The warps of Hopper's forward kernel that hold the state, in Gluon, for float32 inputs: operands are sums of float16 tiles.

No later token changes a bit of an output. So q, k and v are multiplied by a power of two for each token. The columns of A by the inverses
of those of k and v, its rows by a power of two each. The chunk's sum is of later outputs only: W = V times the inverses of the powers of k
has one power of two, and

    O = up_q up_S (q S) + up_A (A V)          S' = total o S + up_W K^T W

Products with different powers have accumulators of their own. The products of a chunk are added to the state in float32, rounded to
nearest: tensor cores round sums towards zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, meet, most_of_both, reinterpret, unknown
from ....gpu.tiles import powers_of_two
from .channel_state import operand, product
from .channel_tiles import ask, ask_next, awaited, released
from .dyadic import ROWS, C
from .parts import LEAST, halved, parts_of, store_parts, times, turned


@gluon.jit
def near_pairs(x, PARTS: gl.constexpr):
    """The products of a tile [C,K], given by its parts, with itself within groups: [4,ROWS,ROWS]."""
    a = operand(x[0], True)
    b = operand(x[0], False)
    P = product(a, b)
    if PARTS > 1:
        P = mma_v2(operand(x[1], True), b, P)
        P = mma_v2(a, operand(x[1], False), P)
    return P


@gluon.jit
def far_pairs(x, n: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """The products, under way, of all tokens of a tile, given by its parts, with those of its group n: [C,ROWS]."""
    group = (x[0].slice(n * ROWS, ROWS).permute((1, 0)), x[1].slice(n * ROWS, ROWS).permute((1, 0)))
    return times(x, group, gl.zeros([C, ROWS], gl.float32, layout), PARTS)


@gluon.jit
def columns(vector, n: gl.constexpr, layout: gl.constexpr):
    """Of a vector of all tokens, those of group n as a row [1,ROWS]."""
    return vector.slice(n * ROWS, ROWS).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def split(A, PARTS: gl.constexpr, left: gl.constexpr):
    """The parts of A as left operands."""
    high, rest = halved(A, PARTS)
    return gl.convert_layout(high, left, assert_trivial=True), gl.convert_layout(rest, left, assert_trivial=True)


@gluon.jit
def weighted(high, rest, v, n: gl.constexpr, O, PARTS: gl.constexpr):
    """O plus, under way, the columns A of group n times the values of its tokens."""
    if PARTS > 1:
        O = warpgroup_mma(rest, v[0].slice(n * ROWS, ROWS), O, is_async=True)
        O = warpgroup_mma(high, v[1].slice(n * ROWS, ROWS), O, is_async=True)
    return warpgroup_mma(high, v[0].slice(n * ROWS, ROWS), O, is_async=True)


@gluon.jit
def walk_in_parts(
    tiles, ring, operands, x_s, sides, bars, place, memory, steps, scale, H,
    K: gl.constexpr, V: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, EVERY: gl.constexpr,
    STAGES: gl.constexpr, NARROW: gl.constexpr, BLOCKS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """As ``walk``, for float32 inputs and K = C. ``operands``: memory for the parts of S and W, and a vector of tokens."""
    S_s, w_s, column_s = operands
    _, _, _, v_tiles, o_tiles = tiles
    _, _, v_s = ring
    row, _, value_column, chunks, tokens = place
    first, last, kept, output = memory
    s_k, s_v, f_k, f_v = steps
    _, total_s, _, own_s, ups_s = sides
    _, full, empty, ready, _ = bars
    for n in gl.static_range(STAGES):
        ask(v_tiles, v_s.index(n), ready.index(n), row + n * C, value_column, n < chunks)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    inner: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    channel: gl.constexpr = gl.SliceLayout(1, mma)
    i = gl.arange(0, C, channel)
    j = gl.arange(0, C, gl.SliceLayout(0, mma))
    a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, inner)))[None, :, None]
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, inner)))[None, None, :]
    row_of_A: gl.constexpr = gl.SliceLayout(1, narrow)
    group = gl.arange(0, C, row_of_A)[:, None] // ROWS
    own_column = gl.arange(0, C, row_of_A)[:, None] % ROWS == gl.arange(0, ROWS, gl.SliceLayout(0, narrow))[None, :]
    dk = gl.arange(0, K, channel)
    S = gl.zeros([K, C], gl.float32, mma)
    if INITIAL:
        S = gl.load(first + dk[:, None] * s_k + j[None, :] * s_v).to(gl.float32)
    for c in range(chunks):
        s = c % STAGES
        t = c * C
        if EVERY > 0:
            if t % EVERY == 0:
                gl.store(kept + (t // EVERY) * (H.to(gl.int64) * (K * V)) + (dk[:, None] * V + j[None, :]), S)
        zero = unknown(t * 0)
        mbarrier.wait(ready.index(s), (c // STAGES) & 1)
        v = v_s.index(s).load(mma)
        if t + C > tokens:
            v = gl.where((i < tokens - t)[:, None], v, 0.0)
        down, up_v = powers_of_two(gl.max(gl.abs(v), 1), LEAST)
        v_tiles_s = reinterpret(v_s.index(s), gl.float16, [2, C, C], half)
        meet()
        store_parts(v_tiles_s, 0, v * down[:, None], PARTS)
        v_parts = parts_of(v_tiles_s, 0, PARTS)
        D = gl.zeros([C // ROWS, ROWS, ROWS], gl.float32, inner)
        for n in gl.static_range(2):
            x, y = awaited(n, c, zero, x_s, full, PARTS)
            if n == 0:  # the powers of q and k are known
                up_k = ups_s.index(2 * s + 1).load(channel)
                column_s.store(up_k * up_v)
                v *= up_k[:, None]
                largest, largest_v = most_of_both(S, v)
                down, up_S = powers_of_two(largest, LEAST)
                store_parts(S_s, 0, S * down, PARTS)
                down, up_W = powers_of_two(largest_v, LEAST)
                store_parts(w_s, 0, v * down, PARTS)
            D = gl.where(((a ^ b) >> (2 * n) == 1) & (a > b), near_pairs(x, PARTS), D)
            D = gl.where(((a ^ b) >> (2 * n + 1) == 1) & (a > b), near_pairs(y, PARTS), D)
            released(n, empty)
        ask_next(v_tiles, v_s, ready, row, value_column, c, chunks, STAGES)
        up = ups_s.index(2 * s).load(row_of_A)[:, None]
        column_0, column_1 = columns(column_s, 0, narrow), columns(column_s, 1, narrow)
        column_2, column_3 = columns(column_s, 2, narrow), columns(column_s, 3, narrow)
        D = gl.convert_layout(gl.reshape(D, [C, ROWS]), narrow, assert_trivial=True) * up
        column = gl.where(group == 0, column_0, gl.where(group == 1, column_1, gl.where(group == 2, column_2, column_3)))
        own = own_s.index(s).load(row_of_A) * gl.convert_layout(up_v, row_of_A, assert_trivial=True)
        D = gl.where(own_column, own[:, None], D * column)
        x, y = awaited(2, c, zero, x_s, full, PARTS)
        near_0, near_2 = far_pairs(x, 0, PARTS, narrow), far_pairs(x, 2, PARTS, narrow)
        far_0, far_1 = far_pairs(y, 0, PARTS, narrow), far_pairs(y, 1, PARTS, narrow)
        near_0, near_2, far_0, far_1 = warpgroup_mma_wait(0, [near_0, near_2, far_0, far_1])
        released(2, empty)
        A_0 = gl.where(group == 0, D, gl.where(group == 1, near_0, far_0) * up * column_0)
        A_1 = gl.where(group == 1, D, gl.where(group > 1, far_1 * up * column_1, 0.0))
        A_2 = gl.where(group == 2, D, gl.where(group > 2, near_2 * up * column_2, 0.0))
        A_3 = gl.where(group == 3, D, 0.0)
        of_A = gl.maximum(gl.maximum(gl.abs(A_0), gl.abs(A_1)), gl.maximum(gl.abs(A_2), gl.abs(A_3)))
        down, up_A = powers_of_two(gl.max(of_A, 1), LEAST)
        up_A = gl.convert_layout(up_A, channel, assert_trivial=True)
        down = down[:, None]
        A_0, a_0 = split(A_0 * down, PARTS, left)
        A_1, a_1 = split(A_1 * down, PARTS, left)
        A_2, a_2 = split(A_2 * down, PARTS, left)
        A_3, a_3 = split(A_3 * down, PARTS, left)
        q, k = awaited(3, c, zero, x_s, full, PARTS)
        S = S * total_s.index(s).load(channel)[:, None]
        fence_async_shared()
        meet()
        O = times(q, parts_of(S_s, 0, PARTS), gl.zeros([C, C], gl.float32, mma), PARTS)
        P = weighted(A_0, a_0, v_parts, 0, gl.zeros([C, C], gl.float32, mma), PARTS)
        P = weighted(A_1, a_1, v_parts, 1, P, PARTS)
        P = weighted(A_2, a_2, v_parts, 2, P, PARTS)
        P = weighted(A_3, a_3, v_parts, 3, P, PARTS)
        U = times(turned(k), parts_of(w_s, 0, PARTS), gl.zeros([K, C], gl.float32, mma), PARTS)
        O, P, U, A_0, a_0, A_1, a_1, A_2, a_2, A_3, a_3 = warpgroup_mma_wait(0, [O, P, U, A_0, a_0, A_1, a_1, A_2, a_2, A_3, a_3])
        up_q = ups_s.index(2 * s).load(channel)
        released(3, empty)
        S += U * up_W
        if NARROW:
            S = S.to(first.dtype.element_ty).to(gl.float32)
        O = (O * up_q[:, None] * up_S + P * up_A[:, None]) * scale
        if BLOCKS == 1 and t + C <= tokens:
            v_s.index(s).store(O)
            fence_async_shared()
            meet()
            async_store(o_tiles, [row + t, value_column], v_s.index(s))
        else:
            gl.store(output + (t + i)[:, None] * (H.to(gl.int64) * V) + j[None, :], O, mask=(t + i < tokens)[:, None])
    if FINAL:
        gl.store(last + dk[:, None] * f_k + j[None, :] * f_v, S.to(last.dtype.element_ty))
    tma.store_wait(0)
