"""The warps of Hopper's forward kernel that hold the state, in Gluon, for inputs of 16 bits."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra import cuda

from ....gpu.hopper_tiles import async_store, meet, most, unknown, zero_rows_from
from ....gpu.tiles import powers_of_two
from .channel_tiles import ask, ask_next, awaited, released
from .dyadic import ROWS, C


@gluon.jit
def operand(tile, LEFT: gl.constexpr):
    """Load a tile [64,K] as an operand of products within groups: [4,ROWS,K] if LEFT, else its transpose [4,K,ROWS]."""
    K: gl.constexpr = tile.type.shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    more: gl.constexpr = [[0, 16], [0, 32]] + ([[0, 64]] if K >= 128 else [])
    lanes: gl.constexpr = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    warps: gl.constexpr = [[16, 0], [32, 0]]
    if LEFT:
        layout: gl.constexpr = gl.DistributedLinearLayout([[0, 1], [8, 0], [0, 8]] + more, lanes, warps, [], [C, K])
        x = gl.reshape(tile.load(layout), [4, ROWS, K])
        return gl.convert_layout(x, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
    else:
        layout: gl.constexpr = gl.DistributedLinearLayout([[0, 1], [0, 8], [8, 0]] + more, lanes, warps, [], [C, K])
        x = gl.permute(gl.reshape(tile.load(layout), [4, ROWS, K]), (0, 2, 1))
        return gl.convert_layout(x, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.jit
def product(a, b):
    """The products a b within groups: [4,ROWS,ROWS]."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    return mma_v2(a, b, gl.zeros([4, ROWS, ROWS], gl.float32, mma))


@gluon.jit
def pairs(x, n: gl.constexpr, layout: gl.constexpr):
    """The products of all tokens of a tile with those of its group n: [64,ROWS]."""
    return warpgroup_mma(x, x.slice(n * ROWS, ROWS).permute((1, 0)), gl.zeros([C, ROWS], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def store_bonus(u, u_k, u_s, K: gl.constexpr, HALF: gl.constexpr):
    """Store the bonus u [K] in shared memory; float16: times a power of two, whose inverse is returned."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    own = gl.load(u + gl.arange(0, K, flat) * u_k).to(gl.float32)
    of_u = 1.0
    if HALF:
        down, of_u = powers_of_two(gl.max(gl.abs(own), 0) * 2**15)
        own *= down
    u_s.store(own.to(u_s.dtype))
    meet()
    return of_u


@gluon.jit
def store_state(S, to, V: gl.constexpr, HALF: gl.constexpr, mma: gl.constexpr):
    """Store S [K,C] as rows of a contiguous state [K,V]: float32, or rounded to bfloat16."""
    K: gl.constexpr = S.shape[0]
    if HALF:
        dk = gl.arange(0, K, gl.SliceLayout(1, mma))
        j = gl.arange(0, C, gl.SliceLayout(0, mma))
        gl.store(to + (dk[:, None] * V + j[None, :]), S)
    else:
        wide: gl.constexpr = gl.DistributedLinearLayout(  # the layout of S, but with 16 contiguous bytes of a row
            [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]] + ([[64, 0]] if K >= 128 else []),
            [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]], [], [K, C],
        )  # fmt: skip
        wk = gl.arange(0, K, gl.SliceLayout(1, wide))
        wv = gl.arange(0, C, gl.SliceLayout(0, wide))
        gl.store(to + (wk[:, None] * V + wv[None, :]), gl.convert_layout(S.to(gl.bfloat16), wide))


@gluon.jit
def walk(
    tiles, ring, S_all, x_s, sides, bars, place, memory, steps, bonus, scale, H,
    K: gl.constexpr, V: gl.constexpr, PREVIOUS: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, EVERY: gl.constexpr,
    STAGES: gl.constexpr, NARROW: gl.constexpr, BLOCKS: gl.constexpr, HALF: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The 4 warps that hold the state and compute the products. They alone use memory that other launches of the call write."""
    _, _, _, v_tiles, o_tiles = tiles
    q_s, k_s, v_s = ring
    row, _, value_column, chunks, tokens = place
    first, last, kept, output = memory
    s_k, s_v, f_k, f_v = steps
    u, u_k, u_s = bonus
    _, total_s, _, _, _ = sides
    loaded, full, empty, ready, _ = bars
    for n in gl.static_range(STAGES):
        ask(v_tiles, v_s.index(n), ready.index(n), row + n * C, value_column, n < chunks)
    if EARLY:
        cuda.gdc_wait()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    inner: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    channel: gl.constexpr = gl.SliceLayout(1, mma)
    i = gl.arange(0, C, gl.SliceLayout(1, mma))
    j = gl.arange(0, C, gl.SliceLayout(0, mma))
    a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, inner)))[None, :, None]
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, inner)))[None, None, :]
    group = gl.arange(0, C, gl.SliceLayout(1, narrow))[:, None] // ROWS
    dk = gl.arange(0, K, channel)
    if PREVIOUS:
        across: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.DotOperandLayout(1, inner, 2)))
        of_u = store_bonus(u, u_k, u_s, K, HALF)
    S = gl.zeros([K, C], gl.float32, mma)
    if INITIAL:
        S = gl.load(first + dk[:, None] * s_k + j[None, :] * s_v).to(gl.float32)
    for c in range(chunks):
        s = c % STAGES
        phase = (c // STAGES) & 1
        t = c * C
        if EVERY > 0:
            if t % EVERY == 0:
                store_state(S, kept + (t // EVERY) * (H.to(gl.int64) * (K * V)), V, HALF, mma)
        zero = unknown(t * 0)
        S_s = S_all.index(zero)
        if not HALF:
            S_s.store(S.to(S_s.dtype))
        mbarrier.wait(loaded.index(s), phase)
        x = operand(k_s.index(s), False)
        if PREVIOUS:
            x = x * u_s.load(across)[None, :, None]
        D = product(operand(q_s.index(s), True), x)
        if not HALF:
            D *= scale
        elif PREVIOUS:
            D *= of_u
        D = gl.where(a == b, D, 0.0)
        for n in gl.static_range(2):
            x, y = awaited(n, c, zero, x_s, full, 0)
            P = product(operand(x, True), operand(x, False))
            D = gl.where(((a ^ b) >> (2 * n) == 1) & (a > b), P, D)
            P = product(operand(y, True), operand(y, False))
            D = gl.where(((a ^ b) >> (2 * n + 1) == 1) & (a > b), P, D)
            released(n, empty)
        ask_next(v_tiles, v_s, ready, row, value_column, c, chunks, STAGES)
        D = gl.convert_layout(gl.reshape(D, [C, ROWS]), narrow, assert_trivial=True)
        x, y = awaited(2, c, zero, x_s, full, 0)
        near_0, near_2 = pairs(x, 0, narrow), pairs(x, 2, narrow)
        far_0, far_1 = pairs(y, 0, narrow), pairs(y, 1, narrow)
        near_0, near_2, far_0, far_1 = warpgroup_mma_wait(0, [near_0, near_2, far_0, far_1])
        released(2, empty)
        A_0 = gl.where(group == 0, D, gl.where(group == 1, near_0, far_0))
        A_1 = gl.where(group == 1, D, gl.where(group > 1, far_1, 0.0))
        A_2 = gl.where(group == 2, D, gl.where(group > 2, near_2, 0.0))
        A_3 = gl.where(group == 3, D, 0.0)
        if HALF:  # a power of two for S, and one for each row of A and of the sum of the products: later rows have no part in it
            of_A = gl.maximum(gl.maximum(gl.abs(A_0), gl.abs(A_1)), gl.maximum(gl.abs(A_2), gl.abs(A_3)))
            largest = most(S)
            down_S, up_S = powers_of_two(largest)
            S_s.store((S * down_S).to(S_s.dtype))
            down_A, up_A = powers_of_two(gl.maximum(gl.max(of_A, 1), largest))
            A_0, A_1, A_2, A_3 = A_0 * down_A[:, None], A_1 * down_A[:, None], A_2 * down_A[:, None], A_3 * down_A[:, None]
            down_O = gl.convert_layout(down_A, channel, assert_trivial=True) * up_S
            up_O = gl.convert_layout(up_A, channel, assert_trivial=True) * scale
        A_0, A_1, A_2, A_3 = A_0.to(q_s.dtype), A_1.to(q_s.dtype), A_2.to(q_s.dtype), A_3.to(q_s.dtype)
        v = v_s.index(s)
        mbarrier.wait(ready.index(s), phase)
        if t + C > tokens:
            zero_rows_from(v, tokens - t, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
        q, k = awaited(3, c, zero, x_s, full, 0)
        S = S * total_s.index(s).load(channel)[:, None]
        fence_async_shared()
        meet()
        O = warpgroup_mma(q, S_s, gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
        if HALF:
            O = warpgroup_mma_wait(0, [O])
            O *= down_O[:, None]
        A_0 = gl.convert_layout(A_0, left, assert_trivial=True)
        A_1 = gl.convert_layout(A_1, left, assert_trivial=True)
        A_2 = gl.convert_layout(A_2, left, assert_trivial=True)
        A_3 = gl.convert_layout(A_3, left, assert_trivial=True)
        O = warpgroup_mma(A_0, v.slice(0, ROWS), O, is_async=True)
        O = warpgroup_mma(A_1, v.slice(ROWS, ROWS), O, is_async=True)
        O = warpgroup_mma(A_2, v.slice(2 * ROWS, ROWS), O, is_async=True)
        O = warpgroup_mma(A_3, v.slice(3 * ROWS, ROWS), O, is_async=True)
        S = warpgroup_mma(k.permute((1, 0)), v, S, is_async=True)
        O, A_0, A_1, A_2, A_3, S = warpgroup_mma_wait(0, [O, A_0, A_1, A_2, A_3, S])
        released(3, empty)
        if NARROW:
            S = S.to(first.dtype.element_ty).to(gl.float32)
        if HALF:
            O *= up_O[:, None]
        O = O.to(output.dtype.element_ty)
        if BLOCKS == 1 and t + C <= tokens:
            v.store(O)
            fence_async_shared()
            meet()
            async_store(o_tiles, [row + t, value_column], v)
        else:
            gl.store(output + (t + i)[:, None] * (H.to(gl.int64) * V) + j[None, :], O, mask=(t + i < tokens)[:, None])
    if FINAL:
        gl.store(last + dk[:, None] * f_k + j[None, :] * f_v, S.to(last.dtype.element_ty))
    tma.store_wait(0)
