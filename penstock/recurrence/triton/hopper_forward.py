"""The chunkwise forward kernel for decays per channel on Hopper, in Gluon: any decay at the same speed.

A chunk of 64 tokens is split into halves, the halves into halves, and so on: six levels of blocks of L = 32, 16, ... 1 tokens. One level
splits each pair of tokens s < t: s is in the first half of a block of 2 L tokens, t in the second. With w the decay of a token,

    X_L = q_t o w_{m+1} ... w_t   for t in the second half of a block, where m is the block's middle  ("previous": up to t - 1)
        = k_s o w_{s+1} ... w_m   for s in the first half
    A   = X_L X_L^T  for the pairs that L splits; on the diagonal q . k, or q . (u o k)
    O   = scale (A V + (q o w_1 ... w_t) S)               S' = (w_1 ... w_64) o S + (k o w_{s+1} ... w_64)^T V

All factors are at most 1, so every decay is supported. A program's warps are specialized:

- ``prepare``: loads decays one chunk ahead into registers, constant ones once. Each thread has 16 tokens of two channels, so factors of
  levels up to 8 are cumulative products in its registers. It writes X_1, X_2, ... X_32 into a ring of tiles, then q and k with the
  factors of the state.
- ``walk``, 4 warps: computes A from X X^T level by level, then the products with V and the state, which stays in registers.

Tiles of q, k and v are in a ring buffer of STAGES, which the tensor memory accelerator (TMA) fills.

float16: A and S have no bound. Both are multiplied by one power of two for a chunk, and O by its inverse and by ``scale``, in float32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from ...gpu.hopper_tiles import exp2, let_next_begin, meet, plus, unknown, zeroed_behind
from ...gpu.tiles import LOG2E, powers_of_two, slot_of, tokens_of
from .hopper_dyadic import around, between, factored, flat, grouped, spread, widened

C = gl.constexpr(64)  # tokens in a chunk, and value channels in a block
GROUPS = gl.constexpr(4)  # groups of R tokens; a thread holds all tokens of a group
R = gl.constexpr(16)
ROWS = gl.constexpr(16)  # rows of a warp's product
LEVELS = gl.constexpr(6)
TILES = gl.constexpr(8)  # of a chunk in the ring: one for each level, then q and k with the factors of the state


@gluon.jit
def decays_at(g, g_t, g_k, left, K: gl.constexpr, layout: gl.constexpr):
    """Load a chunk's decays [64,K] in their dtype, 0 behind the last token."""
    i = gl.arange(0, C, gl.SliceLayout(1, layout)) + unknown(left * 0)
    j = gl.arange(0, K, gl.SliceLayout(0, layout))
    return gl.load(g + (i[:, None] * g_t + j[None, :] * g_k), mask=(i < left)[:, None], other=0.0)


@gluon.jit
def publish(X, Y, n: gl.constexpr, c, x_s, full, empty):
    """Store pair n of a chunk's tiles in the ring, when its slot is empty."""
    PAIRS: gl.constexpr = x_s.type.shape[0] // 2
    s: gl.constexpr = n % PAIRS
    mbarrier.wait(empty.index(s), (c * (TILES // 2 // PAIRS) + n // PAIRS) & 1 ^ 1)
    x_s.index(2 * s).store(X)
    x_s.index(2 * s + 1).store(Y)
    fence_async_shared()
    meet()
    mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def awaited(n: gl.constexpr, c, zero, x_s, full):
    """Wait for pair n of a chunk's tiles in the ring."""
    PAIRS: gl.constexpr = x_s.type.shape[0] // 2
    s: gl.constexpr = n % PAIRS
    mbarrier.wait(full.index(s), (c * (TILES // 2 // PAIRS) + n // PAIRS) & 1)
    return x_s.index(zero + 2 * s), x_s.index(zero + (2 * s + 1))


@gluon.jit
def released(n: gl.constexpr, x_s, empty):
    """Mark the slot of pair n as empty."""
    mbarrier.arrive(empty.index(n % (x_s.type.shape[0] // 2)), count=1)


@gluon.jit
def ask(tiles, tile, bar, row, column, there):
    """Start the TMA load of a tile; the barrier waits for nothing else."""
    mbarrier.expect(bar, tiles.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(tiles, [row, column], bar, tile, pred=there)


@gluon.jit
def ask_both(q_tiles, k_tiles, q, k, bar, row, column, there):
    """Start the TMA loads of tiles of q and k, with one barrier."""
    mbarrier.expect(bar, q_tiles.block_type.nbytes + k_tiles.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(q_tiles, [row, column], bar, q, pred=there)
    tma.async_copy_global_to_shared(k_tiles, [row, column], bar, k, pred=there)


@gluon.jit
def prepare(
    g, tiles, ring, x_s, sides, bars, place, scale, g_t, g_k,
    K: gl.constexpr, TILED: gl.constexpr, STATIC: gl.constexpr, PREVIOUS: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """The warps that multiply q and k by their factors. A thread has two channels of a group's tokens."""
    q_s, k_s, _ = ring
    part_s, total_s, g_s = sides
    loaded, full, empty, _, arrived = bars
    row, key_column, _, chunks, tokens = place
    q_tiles, k_tiles, g_tiles, _, _ = tiles
    if HALF:
        scale = 1.0
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([R, 2], [1, 32], [GROUPS, WARPS // GROUPS], [1, 0])
    by_group: gl.constexpr = gl.BlockedLayout([1, R, 2], [1, 1, 32], [GROUPS, 1, WARPS // GROUPS], [2, 1, 0])
    across: gl.constexpr = gl.SliceLayout(1, by_group)  # [GROUPS,K]
    i = gl.arange(0, C, gl.SliceLayout(1, layout))
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
        through = gl.full([GROUPS, R, K], scale, gl.float32, by_group)
        if not PREVIOUS:
            through = total * scale
        behind = gl.full([GROUPS, R, K], 1.0, gl.float32, by_group)
        for n in gl.static_range(LEVELS):
            if 1 << n < R:
                X = factored(Q, Kt, through, behind, n, layout)
                through, behind, total = widened(through, behind, total, by_group, WARPS)
            else:
                if 1 << n == R:
                    if not (TILED or STATIC):
                        g += (g_t + left * 0).to(gl.int64) * C
                        d = decays_at(g, g_t, g_k, left - C, K, layout)
                    Qf = Q.to(gl.float32) * flat(through, layout)
                    Kf = Kt.to(gl.float32) * flat(behind, layout)
                X = gl.where(((i >> n) & 1)[:, None] == 1, Qf, Kf)
                if 1 << n > R:
                    X = X * spread(exp2(between(part, (1 << n) // R, across)), R, layout)
                X = X.to(q_s.dtype)
            if n % 2 == 0:
                E = X
            else:
                publish(E, X, n // 2, c, x_s, full, empty)
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
        publish(X, Y, 3, c, x_s, full, empty)


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
    _, total_s, _ = sides
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
        flat_u: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        own = gl.load(u + gl.arange(0, K, flat_u) * u_k).to(gl.float32)
        if HALF:
            down, of_u = powers_of_two(gl.max(gl.abs(own), 0) * 2**15)
            own *= down
        u_s.store(own.to(q_s.dtype))
        meet()
    S = gl.zeros([K, C], gl.float32, mma)
    if INITIAL:
        S = gl.load(first + dk[:, None] * s_k + j[None, :] * s_v).to(gl.float32)
    for c in range(chunks):
        s = c % STAGES
        phase = (c // STAGES) & 1
        t = c * C
        if EVERY > 0 and HALF:
            if t % EVERY == 0:
                gl.store(kept + (t // EVERY) * (H.to(gl.int64) * (K * V)) + (dk[:, None] * V + j[None, :]), S)
        elif EVERY > 0:
            if t % EVERY == 0:
                wide: gl.constexpr = gl.DistributedLinearLayout(  # the layout of S, but with 16 contiguous bytes of a row
                    [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]] + ([[64, 0]] if K >= 128 else []),
                    [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
                    [[16, 0], [32, 0]], [], [K, C],
                )  # fmt: skip
                wk = gl.arange(0, K, gl.SliceLayout(1, wide))
                wv = gl.arange(0, C, gl.SliceLayout(0, wide))
                slot = kept + (t // EVERY) * (H.to(gl.int64) * (K * V))
                gl.store(slot + (wk[:, None] * V + wv[None, :]), gl.convert_layout(S.to(gl.bfloat16), wide))
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
            x, y = awaited(n, c, zero, x_s, full)
            P = product(operand(x, True), operand(x, False))
            D = gl.where(((a ^ b) >> (2 * n) == 1) & (a > b), P, D)
            P = product(operand(y, True), operand(y, False))
            D = gl.where(((a ^ b) >> (2 * n + 1) == 1) & (a > b), P, D)
            released(n, x_s, empty)
        if c > 0:
            if c - 1 + STAGES < chunks:  # wait until the previous output has left its slot, which it shares with v
                tma.store_wait(0)
                meet()
                slot = (c - 1) % STAGES
                ask(v_tiles, v_s.index(slot), ready.index(slot), row + (c - 1 + STAGES) * C, value_column, True)
        D = gl.convert_layout(gl.reshape(D, [C, ROWS]), narrow, assert_trivial=True)
        x, y = awaited(2, c, zero, x_s, full)
        near_0, near_2 = pairs(x, 0, narrow), pairs(x, 2, narrow)
        far_0, far_1 = pairs(y, 0, narrow), pairs(y, 1, narrow)
        near_0, near_2, far_0, far_1 = warpgroup_mma_wait(0, [near_0, near_2, far_0, far_1])
        released(2, x_s, empty)
        A_0 = gl.where(group == 0, D, gl.where(group == 1, near_0, far_0))
        A_1 = gl.where(group == 1, D, gl.where(group > 1, far_1, 0.0))
        A_2 = gl.where(group == 2, D, gl.where(group > 2, near_2, 0.0))
        A_3 = gl.where(group == 3, D, 0.0)
        if HALF:  # one power of two for A and S, whose products have one accumulator
            of_A = gl.maximum(gl.maximum(gl.abs(A_0), gl.abs(A_1)), gl.maximum(gl.abs(A_2), gl.abs(A_3)))
            of_S = gl.max(gl.max(gl.reshape(gl.abs(S), [K // C, C, C]), 2), 0)
            of_A = gl.where(t + gl.arange(0, C, gl.SliceLayout(1, narrow)) < tokens, gl.max(of_A, 1), 0.0)  # others belong to no row of O
            largest = gl.maximum(of_A, gl.convert_layout(of_S, gl.SliceLayout(1, narrow), assert_trivial=True))
            down, up = powers_of_two(gl.max(largest, 0))
            A_0, A_1, A_2, A_3 = A_0 * down, A_1 * down, A_2 * down, A_3 * down
            S_s.store((S * down).to(S_s.dtype))
        A_0, A_1, A_2, A_3 = A_0.to(q_s.dtype), A_1.to(q_s.dtype), A_2.to(q_s.dtype), A_3.to(q_s.dtype)
        v = v_s.index(s)
        mbarrier.wait(ready.index(s), phase)
        if t + C > tokens:
            zeroed_behind(v, tokens - t, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
        q, k = awaited(3, c, zero, x_s, full)
        S = S * total_s.index(s).load(channel)[:, None]
        fence_async_shared()
        meet()
        O = warpgroup_mma(q, S_s, gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
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
        released(3, x_s, empty)
        if NARROW:
            S = S.to(first.dtype.element_ty).to(gl.float32)
        if HALF:
            O *= scale * up
        O = O.to(output.dtype.element_ty)
        if BLOCKS == 1 and t + C <= tokens:
            v.store(O)
            fence_async_shared()
            meet()
            tma.async_copy_shared_to_global(o_tiles, [row + t, value_column], v)
        else:
            gl.store(output + (t + i)[:, None] * (H.to(gl.int64) * V) + j[None, :], O, mask=(t + i < tokens)[:, None])
    if FINAL:
        gl.store(last + dk[:, None] * f_k + j[None, :] * f_v, S.to(last.dtype.element_ty))
    tma.store_wait(0)


@gluon.jit
def sequence_with_pieces(rank, cu_seqlens, N, PIECE: gl.constexpr):
    """See the plain kernels' function of this name."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    found = rank * 0 + N
    before = rank * 0
    i = gl.arange(0, 256, layout)
    for first in range(0, N, 256):
        begin = gl.load(cu_seqlens + first + i, mask=first + i < N, other=0)
        end = gl.load(cu_seqlens + first + i + 1, mask=first + i < N, other=0)
        long = (end - begin >= PIECE).to(gl.int32)
        wanted = (long == 1) & (before + gl.associative_scan(long, 0, plus) == rank + 1)
        found += gl.sum(gl.where(wanted, first + i - N, 0), 0)
        before += gl.sum(long, 0)
    return found


@gluon.jit(do_not_specialize=["N", "T", "L", "H"])
def penstock_chunk_fwd_hopper(
    q_tiles, k_tiles, v_tiles, o_tiles, g_tiles, g, u, initial_state, output, final_state, chunk_states, cu_seqlens, slots,
    scale, N, T, L, H,
    g_b, g_t, g_h, g_k, u_h, u_k, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, SEGMENTS: gl.constexpr, PREVIOUS: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr,
    EVERY: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr,
    REGISTERS: gl.constexpr, TILED: gl.constexpr, STATIC: gl.constexpr, PIECE: gl.constexpr, ROWS_GIVEN: gl.constexpr, NARROW: gl.constexpr,
    BLOCKS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Program (sequence or segment, head, block of V). ``prepare`` has WARPS warps, with REGISTERS registers per thread.

    EARLY: this launch may begin while the one ahead runs, which computes the initial states of segments.

    BLOCKS > 1: heads of BLOCKS K key channels. Each of the H heads here is a block of K of them, with an output of its own, float32.

    PIECE > 0: updates in place, see ``in_place.py`` and the plain kernel. NARROW: the pool has 16 bits, to which states are rounded.
    """
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    NV: gl.constexpr = V // C
    pid = gl.program_id(0)
    if PIECE > 0:
        pid = let_next_begin(pid)
    vb = pid % NV
    slot = pid // NV // H
    h = pid // NV % H
    if PIECE > 0 and PACKED:
        slot = sequence_with_pieces(slot, cu_seqlens, N, PIECE)
        if slot == N:
            return
    n, b, row, _, begin, behind, tokens = tokens_of(slot, cu_seqlens, N, T, L, SEGMENTS, PACKED, False)
    head = h.to(gl.int64)
    owner = slot.to(gl.int64)
    f_k = V
    f_v = 1
    last = final_state + (owner * H + head) * (K * V) + vb * C
    if PIECE > 0:
        tokens = tokens // PIECE * PIECE
        if ROWS_GIVEN:
            owner = gl.load(slots + n).to(gl.int64)
        if tokens == 0 or owner < 0:
            return
    chunks = (gl.maximum(tokens, 0) + (C - 1)) // C
    whole = head // BLOCKS
    block = head % BLOCKS * K
    first = initial_state + owner * s_n + whole * s_h + block * s_k + vb * C * s_v
    if PIECE > 0:
        last = first
        f_k = s_k
        f_v = s_v
    kept = chunk_states
    if EVERY > 0:
        kept += (slot_of(n, begin, behind, T, EVERY, PACKED).to(gl.int64) * H + head) * (K * V) + vb * C
    output += ((b * T + row) * H + head) * V + vb * C
    g += b * g_b + row * g_t + whole * g_h + block * g_k
    u += whole * u_h + block * u_k
    row = (b * T + row).to(gl.int32)

    q_s = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, C, K], q_tiles.layout)
    k_s = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, C, K], k_tiles.layout)
    v_s = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, C, C], v_tiles.layout)
    x_s = gl.allocate_shared_memory(q_tiles.dtype, [SLOTS, C, K], q_tiles.layout)
    S_s = gl.allocate_shared_memory(q_tiles.dtype, [1, K, C], v_tiles.layout)
    u_s = gl.allocate_shared_memory(q_tiles.dtype, [K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    part_s = gl.allocate_shared_memory(gl.float32, [2, GROUPS, K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    total_s = gl.allocate_shared_memory(gl.float32, [STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SLOTS // 2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS // 2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(loaded.index(s), count=1)
        mbarrier.init(ready.index(s), count=1)
    for s in gl.static_range(SLOTS // 2):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    ring = (q_s, k_s, v_s)
    g_s = part_s
    arrived = loaded
    if TILED:
        g_s = gl.allocate_shared_memory(g_tiles.dtype, [C, K], g_tiles.layout)
        arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(arrived, count=1)
    fence_async_shared()
    meet()
    sides = (part_s, total_s, g_s)
    bars = (loaded, full, empty, ready, arrived)
    key_column = h * K
    value_column = h // BLOCKS * V + vb * C
    tiles = (q_tiles, k_tiles, g_tiles, v_tiles, o_tiles)
    place = (row, key_column, value_column, chunks, tokens)
    memory = (first, last, kept, output)
    steps = (s_k, s_v, f_k, f_v)
    bonus = (u, u_k, u_s)
    gl.warp_specialize(
        [
            (walk, (tiles, ring, S_s, x_s, sides, bars, place, memory, steps, bonus, scale, H,
                    K, V, PREVIOUS, INITIAL, FINAL, EVERY, STAGES, NARROW, BLOCKS, HALF, EARLY)),
            (prepare, (g, tiles, ring, x_s, sides, bars, place, scale, g_t, g_k, K, TILED, STATIC, PREVIOUS, STAGES, HALF)),
        ],
        [WARPS],
        [REGISTERS],
    )  # fmt: skip
