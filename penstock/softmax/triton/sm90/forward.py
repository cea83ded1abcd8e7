"""Softmax attention forward on Hopper, in Gluon: the formula of ``forward``, warp-specialised.

A program has GROUPS times 64 queries. One warp, ``load``, copies tiles of keys and values into two ring buffers by the tensor memory
accelerator. Groups of four warps, one group per 64 queries, loop over these tiles from the last visible one to the first. While the tensor
cores multiply the weights of one tile with its values, the warps compute the exponentials of the next. Two groups alternate.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, meet
from ....gpu.ring import barriers, invalidate, load_when_free, release, ring_of, wait_full
from ....gpu.tiles import LOG2E
from ..portable.tiles import keys_of, place_of, sees
from .tiles import ROWS, exp2_here, leave, place_in_grid, tidied


@gluon.jit
def load(loads, GROUPS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """The loading warp: copies ``count`` tiles, the last one first."""
    q_tiles, k_tiles, v_tiles, q_s, k_ring, v_ring, q_bar, k_bars, v_bars, q_row, k_row, q_column, k_column, last, count = loads
    mbarrier.expect(q_bar, GROUPS * q_tiles.block_type.nbytes)
    for one in gl.static_range(GROUPS):
        async_load(q_tiles, [q_row + one * ROWS, q_column], q_bar, q_s.index(one))
    for n in range(count):
        row = k_row + last - n * BN
        load_when_free(k_tiles, row, k_column, k_ring, k_bars, n, STAGES)
        load_when_free(v_tiles, row, k_column, v_ring, v_bars, n, STAGES)


@gluon.jit
def scores(q, k_ring, k_bars, n, BN: gl.constexpr, STAGES: gl.constexpr, mma: gl.constexpr):
    """Start q k^T for tile n."""
    wait_full(k_bars, n, STAGES)
    k = k_ring.index(n % STAGES).permute((1, 0))
    return warpgroup_mma(q, k, gl.zeros([ROWS, BN], gl.float32, mma), use_acc=False, is_async=True)


@gluon.jit
def weights(
    S, m, l, at, place, c, window, keys,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASKED: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """p of a tile, the new running maximum (not scaled) and denominator, and the factor of the earlier sums."""
    if MASKED:
        j = at + gl.arange(0, S.shape[1], gl.SliceLayout(0, mma))
        S = gl.where((j < keys)[None, :] & sees(place[:, None], j[None, :], window, CAUSAL, WINDOW), S, float("-inf"))
    highest = gl.maximum(m, gl.max(S, 1))
    base = highest * c
    if MASKED:
        base = gl.where(highest == float("-inf"), 0.0, base)
    p = exp2_here(S * c - base[:, None])
    rest = exp2_here(m * c - base)
    return p, highest, l * rest + gl.sum(p, 1), rest


@gluon.jit
def walk(
    shared, ONE: gl.constexpr,
    H: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The computing warps of queries from ROWS * ONE."""
    q_s, k_ring, v_ring, q_bar, k_bars, v_bars, turns, o_tiles, output, lse, numbers, ends = shared
    c, window, first, left, keys, row, h = numbers
    low, begin, end, high, count = ends
    q = q_s.index(ONE)
    half: gl.constexpr = v_ring.dtype
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    rows: gl.constexpr = gl.SliceLayout(1, mma_s)
    i = gl.arange(0, ROWS, rows)
    first += ROWS * ONE
    left -= ROWS * ONE
    row += ROWS * ONE
    place = first + i
    m = gl.full([ROWS], float("-inf"), gl.float32, rows)
    l = gl.zeros([ROWS], gl.float32, rows)
    acc = gl.zeros([ROWS, D], gl.float32, mma)
    mbarrier.wait(q_bar, 0)
    if count > 0:
        last = low + (count - 1) * BN
        S = warpgroup_mma_wait(0, [scores(q, k_ring, k_bars, 0, BN, STAGES, mma_s)])
        release(k_bars, 0, STAGES)
        p, m, l, rest = weights(S, m, l, last, place, c, window, keys, CAUSAL, WINDOW, True, mma_s)
        P = gl.convert_layout(p.to(half), operand)
        if last + BN > keys:
            wait_full(v_bars, 0, STAGES)
            tidied(v_ring.index(0), keys - last)
        right = gl.maximum((gl.maximum(high - end, 0) + (BN - 1)) // BN, 1)
        middle = gl.maximum((high - begin + (BN - 1)) // BN, right)
        n = 1
        for part in gl.static_range(3 if WINDOW else 2):
            until = right if part == 0 else (middle if part == 1 and WINDOW else count)
            for now in range(n, until):
                if GROUPS > 1:
                    mbarrier.wait(turns.index(ONE), (now + ONE) & 1)
                S = scores(q, k_ring, k_bars, now, BN, STAGES, mma_s)
                wait_full(v_bars, now - 1, STAGES)
                acc = warpgroup_mma(P, v_ring.index((now - 1) % STAGES), acc, is_async=True)
                if GROUPS > 1:
                    mbarrier.arrive(turns.index(1 - ONE), count=1)
                S = warpgroup_mma_wait(1, [S])
                release(k_bars, now, STAGES)
                p, m, l, rest = weights(S, m, l, last - now * BN, place, c, window, keys, CAUSAL, WINDOW, part != 1, mma_s)
                acc, P = warpgroup_mma_wait(0, [acc, P])
                release(v_bars, now - 1, STAGES)
                acc = acc * gl.convert_layout(rest, gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
                P = gl.convert_layout(p.to(half), operand)
            n = gl.maximum(until, n)
        wait_full(v_bars, count - 1, STAGES)
        acc = warpgroup_mma(P, v_ring.index((count - 1) % STAGES), acc)
    none = l == 0.0
    l = gl.where(none, 1.0, l)
    gl.store(lse + row * H + h + i * H, gl.where(none, float("-inf"), (m * c + gl.log2(l)) / LOG2E), mask=i < left)
    acc = acc / gl.convert_layout(l, gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
    leave(acc.to(half), q, o_tiles, row, h * D, output + (row * H + h) * D, H * D, left)


@gluon.jit(do_not_specialize=["N", "Tq", "Tk", "together"])
def penstock_attention_fwd_sm90(
    q_tiles, k_tiles, v_tiles, o_tiles, output, lse, cu_seqlens, cu_seqlens_k, scale, window, N, Tq, Tk, together,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """o = softmax(scale q k^T) v, lse = log(sum(exp(scale q k^T))).

    Reads q [B,Tq,H,D], k, v [B,Tk,G,D] as TMA tiles of matrices [B T,H D]. Writes output [B,Tq,H,D] and lse [B,Tq,H]. Program (head, span
    of queries); the longest loops start first.
    """
    BM: gl.constexpr = ROWS * GROUPS
    slot, h = place_in_grid(N, Tq, together, H, BM, PACKED, True)
    b, begins, done, queries, k_begins, keys = place_of(slot, cu_seqlens, cu_seqlens_k, N, Tq, Tk, BM, PACKED)
    if done >= queries:
        return
    first = done + keys - queries
    low, begin, end, high = keys_of(first, BM, keys, window, BN, CAUSAL, WINDOW)
    count = (high - low + (BN - 1)) // BN
    row = b * Tq + begins + done

    q_s = gl.allocate_shared_memory(q_tiles.dtype, [GROUPS, ROWS, D], q_tiles.layout)
    k_ring, k_bars = ring_of(k_tiles, STAGES, 1, GROUPS)
    v_ring, v_bars = ring_of(v_tiles, STAGES, 1, GROUPS)
    loaded = barriers(1, 1)
    q_bar = loaded.index(0)
    turns = loaded
    if GROUPS > 1:
        turns = barriers(GROUPS, 1)
    fence_async_shared()
    meet()
    numbers = (scale * LOG2E, window, first, queries - done, keys, row, h)
    ends = (low, begin, end, high, count)
    shared = (q_s, k_ring, v_ring, q_bar, k_bars, v_bars, turns, o_tiles, output, lse, numbers, ends)
    k_row = (b * Tk + k_begins).to(gl.int32)
    loads = (
        q_tiles, k_tiles, v_tiles, q_s, k_ring, v_ring, q_bar, k_bars, v_bars,
        row.to(gl.int32), k_row, h * D, h // (H // G) * D, low + (count - 1) * BN, count,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [(walk, (shared, 0, H, D, BN, CAUSAL, WINDOW, GROUPS, STAGES)), (load, (loads, GROUPS, BN, STAGES))],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (walk, (shared, 0, H, D, BN, CAUSAL, WINDOW, GROUPS, STAGES)),
                (walk, (shared, 1, H, D, BN, CAUSAL, WINDOW, GROUPS, STAGES)),
                (load, (loads, GROUPS, BN, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    invalidate(k_bars + v_bars + (loaded,))
    if GROUPS > 1:
        invalidate((turns,))
