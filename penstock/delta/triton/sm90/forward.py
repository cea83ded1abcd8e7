"""The forward pass of KDA on Hopper in one launch, in Gluon: any decay at the same speed.

    S' = total o S + (B^T)^T X      O = A X + q S      X = beta o (V - k S)

``prepare.py`` has the formulas of what a chunk needs besides the state, ``walk.py`` those of the chain of states. SHARE programs are a
group, which takes one head of a sequence after another. Each prepares every SHARE-th chunk. The first V / 64 also walk over all chunks,
with 64 value channels each. Tiles go through a ring of DEPTH chunks in memory, which stays in the L2 cache, and counts of progress. A
program's warps are specialized: ``walk`` holds the state, ``load`` is one warp that loads tiles for it, the others are in ``producers.py``.

The launch must be cooperative, so that all programs run at once, or none. That holds beside kernels of other streams and processes and in
graphs. Then nothing can deadlock: the preparation of chunk e of a group waits for earlier chunks of its program and until the walks took
chunk e - DEPTH, and a walk waits for chunks in order. So the earliest chunk that is not finished never waits for a later one. Results do
not depend on the order: counts decide when a tile is read, not what is in it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, async_store, meet, unknown, zero_rows_from
from ....gpu.ring import barriers
from .exchange import release_count, wait_for_count
from .layouts import GROUPS, ROWS, C
from .prepare import memory_of_factors
from .producers import copy, head_at, invert, prepare


@gluon.jit
def ask(tiles, tile, bar, row, column):
    """Start the TMA load of a tile; the barrier waits for nothing else."""
    mbarrier.expect(bar, tiles.block_type.nbytes)
    async_load(tiles, [row, column], bar, tile)


@gluon.jit
def load(
    tiles, rings, sides, bars, place, sizes, cu_seqlens, beta, steps, totals, counts,
    K: gl.constexpr, NV: gl.constexpr, SHARE: gl.constexpr, DEPTH: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The warp that loads tiles for ``walk`` when chunks are prepared and memory is free, and tells when the ring's tiles are taken."""
    x_tiles, a_tiles, v_tiles, _ = tiles
    k_s, q_s, b_s, a_s, v_s, _ = rings
    total_s, rate_s = sides
    arrived, sided, read, used = bars
    group, groups, vb = place
    N, T, H, _ = sizes
    b_b, b_t, b_h = steps
    line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    channel = gl.arange(0, K, line)
    token = gl.arange(0, C, line)
    heads = N * H
    if vb >= NV:
        heads = heads * 0
    totals += group.to(gl.int64) * (2 * DEPTH * K)
    base = group * 0
    for w in range(group, heads, groups):
        _, h, b, first_row, tokens, chunks = head_at(w, cu_seqlens, N, T, H, PACKED)
        row = (b * T + first_row).to(gl.int32)
        rates_at = beta + b * b_b + first_row * b_t + h.to(gl.int64) * b_h
        for c in range(chunks):
            e = base + c
            phase = e & 1
            i = c * C + token
            rates = gl.load(rates_at + i.to(gl.int64) * b_t, mask=i < tokens, other=0.0).to(gl.float32)
            wait_for_count(counts + e % SHARE, e // SHARE + 1)
            total = gl.load(totals + (e % (2 * DEPTH) * K + channel))
            at = (group * DEPTH + e % DEPTH) * C
            mbarrier.wait(read, phase ^ 1)
            ask(x_tiles, k_s, arrived.index(0), 3 * at, 0)
            ask(v_tiles, v_s, arrived.index(1), row + c * C, h * (NV * C) + vb * C)
            total_s.index(phase).store(total)
            rate_s.index(phase).store(rates)
            meet()
            mbarrier.arrive(sided, count=1)
            mbarrier.wait(used, phase ^ 1)
            ask(x_tiles, b_s, arrived.index(2), 3 * at + 2 * C, 0)
            ask(x_tiles, q_s, arrived.index(3), 3 * at + C, 0)
            ask(a_tiles, a_s, arrived.index(4), at, 0)
            release_count(counts + (SHARE + vb), e)
        base += chunks


@gluon.jit
def walk(
    tiles, rings, sides, bars, place, sizes, cu_seqlens, memory, state_steps,
    K: gl.constexpr, V: gl.constexpr, INITIAL: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The warps that hold the state [64,K], transposed, of 64 value channels."""
    _, _, v_tiles, o_tiles = tiles
    k_s, q_s, b_s, a_s, v_s, out_s = rings
    total_s, rate_s = sides
    arrived, sided, read, used = bars
    group, groups, vb = place
    N, T, H, _ = sizes
    initial_state, final_state, output = memory
    s_n, s_h, s_k, s_v = state_steps
    kind: gl.constexpr = v_tiles.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads = N * H
    if vb >= V // C:  # this program only prepares chunks
        heads = heads * 0
    base = group * 0
    for w in range(group, heads, groups):
        n, h, b, first_row, tokens, chunks = head_at(w, cu_seqlens, N, T, H, PACKED)
        line = b * T + first_row
        head = h.to(gl.int64)
        dk = gl.arange(0, K, gl.SliceLayout(0, mma))[None, :] + unknown(w * 0)
        dv = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None] + vb * C
        S = gl.zeros([C, K], gl.float32, mma)
        if INITIAL:
            first = initial_state + n.to(gl.int64) * s_n + head * s_h
            S = gl.load(first + dk.to(gl.int64) * s_k + dv.to(gl.int64) * s_v).to(gl.float32)
        for c in range(chunks):
            t = c * C
            phase = (base + c) & 1
            L = gl.convert_layout(S.to(kind), left, assert_trivial=True)
            mbarrier.wait(arrived.index(0), phase)
            Y = gl.zeros([C, C], gl.float32, out_mma)
            Y = warpgroup_mma(L, k_s.permute((1, 0)), Y, use_acc=False, is_async=True)
            mbarrier.wait(arrived.index(1), phase)
            if t + C > tokens:
                zero_rows_from(v_s, tokens - t, rows)
                meet()
            X = v_s.permute((1, 0)).load(out_mma).to(gl.float32)
            mbarrier.wait(sided, phase)
            rate = rate_s.index(phase).load(gl.SliceLayout(0, out_mma))[None, :]
            S = S * total_s.index(phase).load(gl.SliceLayout(0, mma))[None, :]
            Y, L = warpgroup_mma_wait(0, [Y, L])
            meet()
            mbarrier.arrive(read, count=1)
            X = gl.convert_layout(((X - Y) * rate).to(kind), left, assert_trivial=True)
            for m in gl.static_range(2, 5):
                mbarrier.wait(arrived.index(m), phase)
            O = gl.zeros([C, C], gl.float32, out_mma)
            S = warpgroup_mma(X, b_s, S, is_async=True)
            O = warpgroup_mma(L, q_s.permute((1, 0)), O, use_acc=False, is_async=True)
            O = warpgroup_mma(X, a_s.permute((1, 0)), O, is_async=True)
            S, O, L, X = warpgroup_mma_wait(0, [S, O, L, X])
            tma.store_wait(0)
            meet()
            mbarrier.arrive(used, count=1)
            out_s.permute((1, 0)).store(O.to(kind))
            fence_async_shared()
            meet()
            if t + C <= tokens:
                async_store(o_tiles, [line.to(gl.int32) + t, h * V + vb * C], out_s)
            else:
                i = t + gl.arange(0, C, gl.SliceLayout(1, rows))[:, None]
                j = gl.arange(0, C, gl.SliceLayout(0, rows))[None, :]
                at = output + ((line + i) * H + head) * V + vb * C + j
                gl.store(at, out_s.load(rows), mask=i < tokens)
        dk = gl.arange(0, K, gl.SliceLayout(0, mma))[None, :] + unknown(chunks * 0)
        dv = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None] + vb * C
        gl.store(final_state + (n.to(gl.int64) * H + head) * (K * V) + (dk * V + dv), S)
        base += chunks
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "T", "H", "R"])
def penstock_kda_fwd_sm90(
    q_tiles, k_tiles, g_tiles, v_tiles, o_tiles, x_parts, x_tiles, a_tiles, beta, totals, counts, initial_state, output, final_state,
    cu_seqlens, scale, N, T, H, R, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, INITIAL: gl.constexpr, PACKED: gl.constexpr,
    SHARE: gl.constexpr, DEPTH: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """S_t = (I - beta_t k_t^T k_t) exp(g_t) o S_{t-1} + beta_t k_t^T v_t, o_t = scale q_t S_t.

    TMA tiles: q, k [C,W] of tokens [B T,H / R K], g [C,W] of [B T,H K], v and output [C,C] of [B T,H V]; rings of groups in memory: x
    [groups DEPTH 3 C,K] for k, q and B^T, in parts [C,W] and tiles [C,K], and A [groups DEPTH C,C]. Reads beta [B,T,H] and the initial
    state [N,H,K,V] by strides. Writes output [B,T,H,V] and final_state [N,H,K,V]; totals [groups,2 DEPTH,K]; counts [groups,SHARE + V / C],
    0 at first.
    Program (group, r < SHARE), groups of all that run at once.
    """
    gl.static_assert(q_tiles.dtype == gl.bfloat16)
    gl.static_assert(V // C <= SHARE)
    gl.static_assert(SHARE <= DEPTH)
    PARTS: gl.constexpr = K // W
    NV: gl.constexpr = V // C
    kind: gl.constexpr = q_tiles.dtype
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    pid = gl.program_id(0)
    r = pid % SHARE
    group = pid // SHARE
    groups = gl.num_programs(0) // SHARE
    counts += group * (SHARE + NV)
    q_s = gl.allocate_shared_memory(kind, [PARTS, C, W], q_tiles.layout)
    k_s = gl.allocate_shared_memory(kind, [PARTS, C, W], k_tiles.layout)
    g_s = gl.allocate_shared_memory(g_tiles.dtype, [PARTS, C, W], g_tiles.layout)
    rest_s = gl.allocate_shared_memory(gl.float16, [2 * PARTS, C, W], q_tiles.layout)
    near_s = gl.allocate_shared_memory(kind, [2, 2 * ROWS, W], gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0]))
    far_s = gl.allocate_shared_memory(kind, [C, W], q_tiles.layout)
    part_s = gl.allocate_shared_memory(gl.float32, [GROUPS, W], plain2)
    factors_s = memory_of_factors(PARTS, W)
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
    factored = barriers(PARTS, 1)
    written = barriers(PARTS, 1)
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    finished = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(made, count=1)
    mbarrier.init(finished, count=1)
    stored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    sided = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(stored, count=1)
    mbarrier.init(sided, count=1)
    mbarrier.init(read, count=1)
    mbarrier.init(used, count=1)
    arrived = barriers(5, 1)
    fence_async_shared()
    meet()

    place = (group, groups, r)
    sizes = (N, T, H, R)
    steps = (b_b, b_t, b_h)
    pair_s = (n_s, N_s, aq_s)
    memory = (q_s, k_s, g_s)
    tiles = (x_tiles, a_tiles, v_tiles, o_tiles)
    rings = (kt_s, qt_s, bt_s, a_s, v_s, out_s)
    sides = (total_s, rate_s)
    bars = (arrived, sided, read, used)
    gl.warp_specialize(
        [(walk, (tiles, rings, sides, bars, place, sizes, cu_seqlens, (initial_state, final_state, output), (s_n, s_h, s_k, s_v),
                 K, V, INITIAL, PACKED)),
         (prepare, (memory, rest_s, near_s, far_s, factors_s, pair_s, (loaded, factored, written, made, finished), place, sizes, cu_seqlens,
                    beta, steps, scale, SHARE, PACKED)),
         (invert, (x_parts, a_tiles, g_s, part_s, factors_s, rest_s, pair_s, t_s, d_s, (loaded, factored, made, finished, stored), place,
                   sizes, cu_seqlens, totals, counts, scale, K, SHARE, DEPTH, PACKED)),
         (copy, ((q_tiles, k_tiles, g_tiles), x_parts, memory, (loaded, written, stored), place, sizes, cu_seqlens, counts,
                 K, NV, SHARE, DEPTH, PACKED)),
         (load, (tiles, rings, sides, bars, place, sizes, cu_seqlens, beta, steps, totals, counts, K, NV, SHARE, DEPTH, PACKED))],
        [4, 4, 1, 1],
        REGISTERS,
    )  # fmt: skip
