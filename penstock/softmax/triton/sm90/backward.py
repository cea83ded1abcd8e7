"""Softmax attention backward on Hopper, in Gluon: the formulas of ``portable/backward.py``, warp-specialised as ``forward``.

``by_queries`` runs first. It also stores delta = rowsum(dO o O) - d lse and the log-sum-exps in log2 units (inf for queries without keys)
by heads, for ``by_keys``. The first operand of a product stays in registers if it depends on the tile:
``by_queries`` multiplies ds with keys, ``by_keys`` p^T with dO and ds^T with q.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, exp2, meet
from ....gpu.ring import barriers, invalidate, load_when_free, release, ring_of, wait_full
from ....gpu.tiles import LOG2E
from ..portable.tiles import keys_of, place_of, queries_of, sees
from .tiles import ROWS, leave, place_in_grid, tidied


@gluon.jit
def both(a, b, x_ring, y_ring, bars, n, L: gl.constexpr, STAGES: gl.constexpr, mma: gl.constexpr):
    """Start a x^T and b y^T with the n-th tiles x and y of two rings."""
    x_bars, y_bars = bars
    x = x_ring.index(n % STAGES).permute((1, 0))
    y = y_ring.index(n % STAGES).permute((1, 0))
    wait_full(x_bars, n, STAGES)
    S = warpgroup_mma(a, x, gl.zeros([ROWS, L], gl.float32, mma), use_acc=False, is_async=True)
    wait_full(y_bars, n, STAGES)
    dP = warpgroup_mma(b, y, gl.zeros([ROWS, L], gl.float32, mma), use_acc=False, is_async=True)
    return S, dP


@gluon.jit
def load_keys(loads, GROUPS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """The loading warp of ``by_queries``."""
    tiles, shared, bars, q_bar, q_row, k_row, q_column, k_column, count = loads
    q_tiles, o_tiles, k_tiles, v_tiles = tiles
    q_s, o_s, k_ring, v_ring = shared
    k_bars, v_bars = bars
    mbarrier.expect(q_bar, 2 * GROUPS * q_tiles.block_type.nbytes)
    for one in gl.static_range(GROUPS):
        async_load(o_tiles, [q_row + one * ROWS, q_column], q_bar, o_s.index(one))
        async_load(q_tiles, [q_row + one * ROWS, q_column], q_bar, q_s.index(one))
    for n in range(count):
        load_when_free(k_tiles, k_row + n * BN, k_column, k_ring, k_bars, n, STAGES)
        load_when_free(v_tiles, k_row + n * BN, k_column, v_ring, v_bars, n, STAGES)


@gluon.jit
def walk_keys(
    shared, bars, memory, numbers, ends, ONE: gl.constexpr,
    H: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, D_LSE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The computing warps of ``by_queries`` for queries from ROWS * ONE."""
    q_s, o_s, k_ring, v_ring = shared
    k_bars, v_bars = bars
    q_bar, dq_tiles, dq, output, lse, d_lse, exponents, deltas = memory
    scale, window, first, left, keys, row, h, l_t = numbers
    low, begin, end, high = ends
    half: gl.constexpr = k_ring.dtype
    q = q_s.index(ONE)
    dO = o_s.index(ONE)
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    rows: gl.constexpr = gl.SliceLayout(1, mma_s)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    first += ROWS * ONE
    left -= ROWS * ONE
    row += ROWS * ONE
    i = gl.arange(0, ROWS, rows)
    live = i < left
    e = gl.load(lse + row * H + h + i * H, mask=live, other=float("-inf")) * LOG2E
    e = gl.where(e == float("-inf"), float("inf"), e)
    i_w = gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    d_w = gl.arange(0, D, gl.SliceLayout(0, wide))
    O = gl.load(output + (row * H + h) * D + (i_w * (H * D))[:, None] + d_w[None, :], mask=(i_w < left)[:, None], other=0.0)
    mbarrier.wait(q_bar, 0)
    delta = gl.convert_layout(gl.sum(O.to(gl.float32) * dO.load(wide).to(gl.float32), 1), rows)
    if D_LSE:
        delta -= gl.load(d_lse + ROWS * ONE * l_t + i * l_t, mask=live, other=0.0).to(gl.float32)
        delta = gl.where(e == float("inf"), 0.0, delta)  # the gradient may be NaN
    gl.store(exponents + ROWS * ONE + i, e, mask=live)
    gl.store(deltas + ROWS * ONE + i, delta, mask=live)
    c = scale * LOG2E
    place = first + i
    acc = gl.zeros([ROWS, D], gl.float32, mma)
    n = low * 0
    at = low
    for part in gl.static_range(0 if WINDOW else 1, 3):
        until = begin if part == 0 else (end if part == 1 else high)
        while at < until:
            S, dP = both(q, dO, k_ring, v_ring, bars, n, BN, STAGES, mma_s)
            S = warpgroup_mma_wait(1, [S])
            S = S * c - e[:, None]
            if part != 1:
                j = at + gl.arange(0, BN, gl.SliceLayout(0, mma_s))
                S = gl.where((j < keys)[None, :] & sees(place[:, None], j[None, :], window, CAUSAL, WINDOW), S, float("-inf"))
            p = exp2(S)
            dP = warpgroup_mma_wait(0, [dP])
            release(v_bars, n, STAGES)
            if part != 1:
                dP = gl.where((j < keys)[None, :], dP, 0.0)
                if at + BN > keys:
                    tidied(k_ring.index(n % STAGES), keys - at)
            ds = gl.convert_layout((p * (dP - delta[:, None])).to(half), operand)
            acc = warpgroup_mma(ds, k_ring.index(n % STAGES), acc, is_async=True)
            acc, ds = warpgroup_mma_wait(0, [acc, ds])
            release(k_bars, n, STAGES)
            n += 1
            at += BN
    leave((acc * scale).to(half), q, dq_tiles, row, h * D, dq + (row * H + h) * D, H * D, left)


@gluon.jit(do_not_specialize=["N", "Tq", "Tk", "together", "pitch"])
def penstock_attention_bwd_dq_sm90(
    q_tiles, o_tiles, k_tiles, v_tiles, dq_tiles, dq, output, lse, d_lse, rows, cu_seqlens, cu_seqlens_k,
    scale, window, N, Tq, Tk, together, pitch, l_b, l_t, l_h,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, D_LSE: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq = scale ds k, ds = p o (dO v^T - delta), delta = rowsum(dO o O) - d lse, p = exp(scale q k^T - lse).

    Reads q, dO [B,Tq,H,D], k, v [B,Tk,G,D] as TMA tiles, output [B,Tq,H,D], lse [B,Tq,H]. Writes dq [B,Tq,H,D], and exponents and deltas to
    ``rows`` [2,H,pitch], for ``by_keys``. Program (head, span of queries); the longest loops start first.
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
    o_s = gl.allocate_shared_memory(o_tiles.dtype, [GROUPS, ROWS, D], o_tiles.layout)
    k_ring, k_bars = ring_of(k_tiles, STAGES, 1, GROUPS)
    v_ring, v_bars = ring_of(v_tiles, STAGES, 1, GROUPS)
    loaded = barriers(1, 1)
    q_bar = loaded.index(0)
    fence_async_shared()
    meet()
    shared = (q_s, o_s, k_ring, v_ring)
    bars = (k_bars, v_bars)
    d_lse += b * l_b + (begins + done) * l_t + h * l_h
    exponents = rows + h.to(gl.int64) * pitch + row
    memory = (q_bar, dq_tiles, dq, output, lse, d_lse, exponents, exponents + H * pitch)
    numbers = (scale, window, first, queries - done, keys, row, h, l_t)
    ends = (low, begin, end, high)
    tiles = (q_tiles, o_tiles, k_tiles, v_tiles)
    k_row = (b * Tk + k_begins).to(gl.int32) + low
    loads = (tiles, shared, bars, q_bar, row.to(gl.int32), k_row, h * D, h // (H // G) * D, count)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (walk_keys, (shared, bars, memory, numbers, ends, 0, H, D, BN, CAUSAL, WINDOW, D_LSE, STAGES)),
                (load_keys, (loads, GROUPS, BN, STAGES)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (walk_keys, (shared, bars, memory, numbers, ends, 0, H, D, BN, CAUSAL, WINDOW, D_LSE, STAGES)),
                (walk_keys, (shared, bars, memory, numbers, ends, 1, H, D, BN, CAUSAL, WINDOW, D_LSE, STAGES)),
                (load_keys, (loads, GROUPS, BN, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    invalidate(k_bars + v_bars + (loaded,))


@gluon.jit
def load_queries(loads, GROUPS: gl.constexpr, EACH: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """The loading warp of ``by_keys``, for EACH heads of queries."""
    tiles, shared, bars, k_bar, rows, k_row, q_row, k_column, count, queries, far, pitch = loads
    k_tiles, v_tiles, q_tiles, o_tiles = tiles
    k_s, v_s, q_ring, o_ring, row_ring = shared
    q_bars, o_bars = bars
    layout: gl.constexpr = gl.BlockedLayout([BM // 32], [32], [1], [0])
    i = gl.arange(0, BM, layout)
    mbarrier.expect(k_bar, 2 * GROUPS * k_tiles.block_type.nbytes)
    for one in gl.static_range(GROUPS):
        async_load(k_tiles, [k_row + one * ROWS, k_column], k_bar, k_s.index(one))
        async_load(v_tiles, [k_row + one * ROWS, k_column], k_bar, v_s.index(one))
    for n in range(count * EACH):
        at = n % count * BM
        column = (k_column // D * EACH + n // count) * D
        here = rows + n // count * pitch + at + i
        live = at + i < queries
        e = gl.load(here, mask=live, other=float("inf"))
        delta = gl.load(here + far, mask=live, other=0.0)
        load_when_free(q_tiles, q_row + at, column, q_ring, q_bars, n, STAGES)
        row_ring.index(n % STAGES * 2).store(e)
        row_ring.index(n % STAGES * 2 + 1).store(delta)
        meet()
        full, _ = q_bars
        mbarrier.arrive(full.index(n % STAGES), count=1)
        load_when_free(o_tiles, q_row + at, column, o_ring, o_bars, n, STAGES)


@gluon.jit
def walk_queries(
    shared, bars, memory, numbers, ends, ONE: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, EACH: gl.constexpr, BM: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The computing warps of ``by_keys`` for keys from ROWS * ONE."""
    k_s, v_s, q_ring, o_ring, row_ring = shared
    q_bars, o_bars = bars
    k_bar, dk_tiles, dv_tiles, dk, dv = memory
    scale, window, first, left, shift, queries, row, head = numbers
    low, begin, end, high = ends
    half: gl.constexpr = q_ring.dtype
    k = k_s.index(ONE)
    v = v_s.index(ONE)
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    columns: gl.constexpr = gl.SliceLayout(0, mma_s)
    first += ROWS * ONE
    left -= ROWS * ONE
    row += ROWS * ONE
    j = first + gl.arange(0, ROWS, gl.SliceLayout(1, mma_s))
    c = scale * LOG2E
    acc_k = gl.zeros([ROWS, D], gl.float32, mma)
    acc_v = gl.zeros([ROWS, D], gl.float32, mma)
    n = low * 0
    mbarrier.wait(k_bar, 0)
    for _one in range(EACH):
        at = low
        for part in gl.static_range(0 if CAUSAL or WINDOW else 1, 3):
            until = begin if part == 0 else (end if part == 1 else high)
            while at < until:
                i = at + gl.arange(0, BM, columns)
                live = i < queries
                S, dP = both(k, v, q_ring, o_ring, bars, n, BM, STAGES, mma_s)
                S = warpgroup_mma_wait(1, [S])
                S = S * c - row_ring.index(n % STAGES * 2).load(columns)[None, :]
                if part != 1:
                    seen = live[None, :] & sees(shift + i[None, :], j[:, None], window, CAUSAL, WINDOW)
                    S = gl.where(seen, S, float("-inf"))
                p = exp2(S)
                P = gl.convert_layout(p.to(half), operand)
                if part != 1:
                    if at + BM > queries:
                        tidied(q_ring.index(n % STAGES), queries - at)
                        tidied(o_ring.index(n % STAGES), queries - at)
                dP = warpgroup_mma_wait(0, [dP])
                acc_v = warpgroup_mma(P, o_ring.index(n % STAGES), acc_v, is_async=True)
                if part != 1:
                    dP = gl.where(live[None, :], dP, 0.0)
                delta = row_ring.index(n % STAGES * 2 + 1).load(columns)
                ds = gl.convert_layout((p * (dP - delta[None, :])).to(half), operand)
                acc_k = warpgroup_mma(ds, q_ring.index(n % STAGES), acc_k, is_async=True)
                acc_v, P = warpgroup_mma_wait(1, [acc_v, P])
                release(o_bars, n, STAGES)
                acc_k, ds = warpgroup_mma_wait(0, [acc_k, ds])
                release(q_bars, n, STAGES)
                n += 1
                at += BM
    to = (row * G + head) * D
    leave((acc_k * scale).to(half), k, dk_tiles, row, head * D, dk + to, G * D, left)
    leave(acc_v.to(half), v, dv_tiles, row, head * D, dv + to, G * D, left)


@gluon.jit(do_not_specialize=["N", "Tq", "Tk", "together", "pitch"])
def penstock_attention_bwd_dkdv_sm90(
    k_tiles, v_tiles, q_tiles, o_tiles, dk_tiles, dv_tiles, dk, dv, rows, cu_seqlens, cu_seqlens_k,
    scale, window, N, Tq, Tk, together, pitch,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dv = p^T dO, dk = scale ds^T q, ds = p o (dO v^T - delta), p = exp(scale q k^T - lse).

    Reads q, dO [B,Tq,H,D], k, v [B,Tk,G,D] as TMA tiles, and ``rows`` [2,H,pitch]. Writes dk, dv [B,Tk,G,D]. Program (head of keys, span of
    keys), for all heads of queries of this head; the longest loops start first.
    """
    BN: gl.constexpr = ROWS * GROUPS
    EACH: gl.constexpr = H // G
    slot, head = place_in_grid(N, Tk, together, G, BN, PACKED, False)
    b, begins, done, keys, q_begins, queries = place_of(slot, cu_seqlens_k, cu_seqlens, N, Tk, Tq, BN, PACKED)
    if done >= keys:
        return
    shift = keys - queries
    low, begin, end, high = queries_of(done, BN, shift, queries, window, BM, CAUSAL, WINDOW)
    count = (high - low + (BM - 1)) // BM
    row = b * Tk + begins + done
    q_row = b * Tq + q_begins
    k_s = gl.allocate_shared_memory(k_tiles.dtype, [GROUPS, ROWS, D], k_tiles.layout)
    v_s = gl.allocate_shared_memory(v_tiles.dtype, [GROUPS, ROWS, D], v_tiles.layout)
    q_ring, q_bars = ring_of(q_tiles, STAGES, 2, GROUPS)  # a tile of q, and the exponents and deltas of its rows
    o_ring, o_bars = ring_of(o_tiles, STAGES, 1, GROUPS)
    row_ring = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    loaded = barriers(1, 1)
    k_bar = loaded.index(0)
    fence_async_shared()
    meet()
    shared = (k_s, v_s, q_ring, o_ring, row_ring)
    bars = (q_bars, o_bars)
    memory = (k_bar, dk_tiles, dv_tiles, dk, dv)
    numbers = (scale, window, done, keys - done, shift, queries, row, head)
    ends = (low, begin, end, high)
    tiles = (k_tiles, v_tiles, q_tiles, o_tiles)
    rows += head.to(gl.int64) * EACH * pitch + q_row + low
    far = pitch * H
    loads = (tiles, shared, bars, k_bar, rows, row.to(gl.int32), q_row.to(gl.int32) + low, head * D, count, queries - low, far, pitch)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (walk_queries, (shared, bars, memory, numbers, ends, 0, G, D, EACH, BM, CAUSAL, WINDOW, STAGES)),
                (load_queries, (loads, GROUPS, EACH, BM, D, STAGES)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (walk_queries, (shared, bars, memory, numbers, ends, 0, G, D, EACH, BM, CAUSAL, WINDOW, STAGES)),
                (walk_queries, (shared, bars, memory, numbers, ends, 1, G, D, EACH, BM, CAUSAL, WINDOW, STAGES)),
                (load_queries, (loads, GROUPS, EACH, BM, D, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    invalidate(q_bars + o_bars + (loaded,))
