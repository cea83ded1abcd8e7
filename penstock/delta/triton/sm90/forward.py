"""The forward pass of KDA on Hopper in one launch, in Gluon: any decay at the same speed.

    S' = total o S + (B^T)^T X      O = A X + q S      X = beta o (V - k S)

``prepare.py`` has the formulas of what a chunk needs besides the state, ``walk.py`` those of the chain of states. SHARE programs work on a
head of a sequence. Each prepares every SHARE-th chunk. The first V / 64 of them also walk over all chunks, with 64 value channels each. The
tiles go through a ring of DEPTH chunks in memory, which stays in the L2 cache, and counts of progress. A program's warps are specialized:

- ``walk``, 4 warps: holds the state, loads tiles from the ring.
- ``prepare``, 4 warps: pairs of tokens by dyadic levels, and q and k with the factors of the state.
- ``invert``, 4 warps: the inverse T, A and B^T.

All programs of a head must run at once: they have consecutive numbers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, async_store, meet
from ....gpu.ring import barriers
from ....gpu.tiles import tokens_of
from .exchange import release_count, wait_for_count
from .layouts import GROUPS, ROWS, C
from .prepare import memory_of_factors
from .producers import invert, prepare


@gluon.jit
def ask(tiles, tile, bar, row, column, there):
    """Start the TMA load of a tile; the barrier waits for nothing else."""
    mbarrier.expect(bar, tiles.block_type.nbytes, pred=there)
    async_load(tiles, [row, column], bar, tile, pred=there)


@gluon.jit
def ask_chunk(tiles, rings, bars, counts, c, slot, there, SHARE: gl.constexpr):
    """Wait until chunk c is prepared, if it exists, and start the loads of its tiles."""
    x_tiles, a_tiles = tiles
    if there:
        wait_for_count(counts + c % SHARE, c // SHARE + 1)
    meet()
    for m in gl.static_range(3):
        ask(x_tiles, rings[m], bars.index(m), slot * (3 * C) + m * C, 0, there)
    ask(a_tiles, rings[3], bars.index(3), slot * C, 0, there)


@gluon.jit
def walk(
    tiles, rings, sides, bars, place, memory, steps, rates_at, totals, counts,
    K: gl.constexpr, V: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, SHARE: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """The warps that hold the state [64,K], transposed, of 64 value channels."""
    x_tiles, a_tiles, v_tiles, o_tiles = tiles
    k_s, q_s, b_s, a_s, v_s, out_s = rings
    total_s, rate_s = sides
    row, value_column, vb, chunks, tokens, ring, H = place
    first, last, output = memory
    s_k, s_v = steps
    beta, b_t = rates_at
    kind: gl.constexpr = v_tiles.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    walks = vb < V // C
    if not walks:
        chunks = chunks * 0
    x = (x_tiles, a_tiles)
    tile = (k_s, q_s, b_s, a_s)
    ask(v_tiles, v_s, bars.index(4), row, value_column, chunks > 0)
    dk = gl.arange(0, K, gl.SliceLayout(0, mma))[None, :]
    dv = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None]
    S = gl.zeros([C, K], gl.float32, mma)
    if INITIAL:
        of_S = first + dk.to(gl.int64) * s_k + dv.to(gl.int64) * s_v
        S = gl.load(of_S, mask=(dk + dv) * 0 + vb < V // C, other=0.0).to(gl.float32)
    channel = gl.arange(0, K, line)
    token = gl.arange(0, C, line)
    column = gl.arange(0, C, gl.SliceLayout(0, out_mma))[None, :]
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ask_chunk(x, tile, bars, counts, chunks * 0, ring * DEPTH, chunks > 0, SHARE)
    total_s.index(0).store(gl.load(totals + ring.to(gl.int64) * (DEPTH * K) + channel, mask=channel * 0 < chunks, other=0.0))
    rate_s.index(0).store(gl.load(beta + token.to(gl.int64) * b_t, mask=token < tokens, other=0.0).to(gl.float32))
    for c in range(chunks):
        t = c * C
        phase = c & 1
        more = c + 1 < chunks
        rates = gl.load(beta + (t + C + token).to(gl.int64) * b_t, mask=t + C + token < tokens, other=0.0).to(gl.float32)
        L = gl.convert_layout(S.to(kind), left, assert_trivial=True)
        mbarrier.wait(bars.index(0), phase)
        Y = gl.zeros([C, C], gl.float32, out_mma)
        Y = warpgroup_mma(L, k_s.permute((1, 0)), Y, use_acc=False, is_async=True)
        mbarrier.wait(bars.index(4), phase)
        meet()  # totals and rates are stored
        X = v_s.permute((1, 0)).load(out_mma).to(gl.float32)
        rate = rate_s.index(c & 1).load(gl.SliceLayout(0, out_mma))[None, :]
        S = S * total_s.index(c & 1).load(gl.SliceLayout(0, mma))[None, :]
        Y, L = warpgroup_mma_wait(0, [Y, L])
        X = gl.where(t + column < tokens, (X - Y) * rate, 0.0).to(kind)
        for m in gl.static_range(1, 4):
            mbarrier.wait(bars.index(m), phase)
        O = gl.zeros([C, C], gl.float32, out_mma)
        X = gl.convert_layout(X, left, assert_trivial=True)
        S = warpgroup_mma(X, b_s, S, is_async=True)
        O = warpgroup_mma(L, q_s.permute((1, 0)), O, use_acc=False, is_async=True)
        O = warpgroup_mma(X, a_s.permute((1, 0)), O, is_async=True)
        S, O, L, X = warpgroup_mma_wait(0, [S, O, L, X])
        tma.store_wait(0)
        release_count(counts + (SHARE + vb), c + 1)
        slot = ring * DEPTH + (c + 1) % DEPTH
        ask(v_tiles, v_s, bars.index(4), row + t + C, value_column, more)
        O = O.to(kind)
        out_s.permute((1, 0)).store(O)
        fence_async_shared()
        meet()
        if t + C <= tokens:
            async_store(o_tiles, [row + t, value_column], out_s)
        else:
            i = t + gl.arange(0, C, gl.SliceLayout(1, rows))[:, None]
            j = gl.arange(0, C, gl.SliceLayout(0, rows))[None, :]
            gl.store(output + i.to(gl.int64) * (H.to(gl.int64) * V) + j, out_s.load(rows), mask=i < tokens)
        ask_chunk(x, tile, bars, counts, c + 1, slot, more, SHARE)
        coming = gl.load(totals + slot.to(gl.int64) * K + channel, mask=channel * 0 + c + 1 < chunks, other=0.0)
        total_s.index((c + 1) & 1).store(coming)
        rate_s.index((c + 1) & 1).store(rates)
    if FINAL:
        gl.store(last + dk * V + dv, S, mask=(dk + dv) * 0 + vb < V // C)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "T", "H", "R"])
def penstock_kda_fwd_sm90(
    q_tiles, k_tiles, g_tiles, v_tiles, o_tiles, x_parts, x_tiles, a_tiles, beta, totals, counts, initial_state, output, final_state,
    cu_seqlens, scale, N, T, H, R, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, PACKED: gl.constexpr,
    SHARE: gl.constexpr, DEPTH: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """S_t = (I - beta_t k_t^T k_t) exp(g_t) o S_{t-1} + beta_t k_t^T v_t, o_t = scale q_t S_t.

    TMA tiles: q, k [C,W] of tokens [B T,H / R K], g [C,W] of [B T,H K], v and output [C,C] of [B T,H V]; rings in memory: x [N H DEPTH 3 C,K]
    for k, q and B^T, in parts [C,W] and tiles [C,K], and A [N H DEPTH C,C]. Reads beta [B,T,H] and the initial state [N,H,K,V] by strides.
    Writes output [B,T,H,V] and final_state [N,H,K,V]; totals [N H DEPTH,K]; counts [N H,SHARE + V / C], 0 at first. Program (sequence,
    head, r < SHARE).
    """
    gl.static_assert(q_tiles.dtype == gl.bfloat16)
    gl.static_assert(V // C <= SHARE)
    PARTS: gl.constexpr = K // W
    NV: gl.constexpr = V // C
    kind: gl.constexpr = q_tiles.dtype
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    pid = gl.program_id(0)
    r = pid % SHARE
    ring = pid // SHARE
    h = ring % H
    slot = ring // H
    n, b, row, _, begin, done, tokens = tokens_of(slot, cu_seqlens, N, T, T, False, PACKED, False)
    head = h.to(gl.int64)
    owner = slot.to(gl.int64)
    chunks = (gl.maximum(tokens, 0) + (C - 1)) // C

    q_s = gl.allocate_shared_memory(kind, [PARTS, C, W], q_tiles.layout)
    k_s = gl.allocate_shared_memory(kind, [PARTS, C, W], k_tiles.layout)
    g_s = gl.allocate_shared_memory(g_tiles.dtype, [PARTS, C, W], g_tiles.layout)
    rest_s = gl.allocate_shared_memory(gl.float16, [2 * PARTS, C, W], q_tiles.layout)
    near_s = gl.allocate_shared_memory(kind, [2, 2 * ROWS, W], gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0]))
    far_s = gl.allocate_shared_memory(kind, [C, W], q_tiles.layout)
    part_s = gl.allocate_shared_memory(gl.float32, [GROUPS, W], plain2)
    factors_s = memory_of_factors(W)
    n_s = gl.allocate_shared_memory(gl.float32, [ROWS * ROWS, GROUPS], flat)
    d_s = gl.allocate_shared_memory(gl.float16, [ROWS, GROUPS * ROWS], plain2)
    t_s = gl.allocate_shared_memory(gl.float16, [C, C], half)
    N_s = gl.allocate_shared_memory(gl.float16, [C, C], half)
    aq_s = gl.allocate_shared_memory(gl.float16, [C, C], half)
    kt_s = gl.allocate_shared_memory(kind, [C, K], half)
    qt_s = gl.allocate_shared_memory(kind, [C, K], half)
    bt_s = gl.allocate_shared_memory(kind, [C, K], half)
    a_s = gl.allocate_shared_memory(kind, [C, C], half)
    v_s = gl.allocate_shared_memory(kind, [C, C], half)
    out_s = gl.allocate_shared_memory(kind, [C, C], half)
    total_s = gl.allocate_shared_memory(gl.float32, [2, K], flat)
    rate_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    loaded = barriers(PARTS, 1)
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    finished = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(made, count=1)
    mbarrier.init(finished, count=1)
    arrived = barriers(5, 1)
    fence_async_shared()
    meet()

    token = b * T + row
    counts += ring.to(gl.int64) * (SHARE + NV)
    beta += b * b_b + row * b_t + head * b_h
    first = initial_state + owner * s_n + head * s_h + r.to(gl.int64) * (C * s_v.to(gl.int64))
    last = final_state + (owner * H + head) * (K * V) + r * C
    output += (token * H + head) * V + r * C
    at = token.to(gl.int32)
    rates_at = (beta, b_t)
    pair_s = (n_s, N_s, aq_s)
    gl.warp_specialize(
        [(walk, ((x_tiles, a_tiles, v_tiles, o_tiles), (kt_s, qt_s, bt_s, a_s, v_s, out_s), (total_s, rate_s), arrived,
                 (at, h * V + r * C, r, chunks, tokens, ring, H), (first, last, output), (s_k, s_v), rates_at, totals, counts,
                 K, V, INITIAL, FINAL, SHARE, DEPTH)),
         (prepare, ((q_tiles, k_tiles, g_tiles), x_parts, (q_s, k_s, g_s), rest_s, near_s, far_s, (part_s, factors_s), pair_s,
                    (loaded, made, finished), (at, h // R * K, h * K, r, chunks, tokens, ring), rates_at, totals, counts, scale,
                    K, NV, SHARE, DEPTH)),
         (invert, (x_parts, a_tiles, rest_s, pair_s, t_s, d_s, (made, finished), (r, chunks, ring), counts, K, SHARE, DEPTH))],
        [4, 4],
        REGISTERS,
    )  # fmt: skip
