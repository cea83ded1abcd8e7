"""The backward pass without decays per channel on Hopper, in Gluon, of heads of 128 key channels and 64 value channels.

Formulas are those of ``scalar_backward``. A program has two groups of four warps, and two programs fit on a
multiprocessor: 128 registers a thread and 109 KB of shared memory, so there is one stage of tiles. Tiles of the next chunk are loaded
as soon as no product needs the memory: k, dO and S during the products of dk, q and v while gradients are stored. While a program waits for
them, the other one computes. Addresses of tiles are computed in the loop: as loop invariants they spilled.

Each group has half of the columns of every tile but dS, of which it has half of the key channels. So the weights are operands in shared
memory. Sums over columns are stored by halves, one of each group. v is multiplied by 2^R in place, so both terms of dk are products of one
sum.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, async_store, exp2, meet, reinterpret, unknown, zeroed_behind
from ....gpu.tiles import slot_of, tokens_of
from ..heads import MEDIUM
from .scalar_decays import (
    C,
    barriers,
    decay_vectors,
    expect,
    gradients_of_decays,
    log_decays,
    place_of_decays,
    store_decays,
    sums_of_decays,
)

K = gl.constexpr(128)
STAGES = gl.constexpr(1)


@gluon.jit
def ask(tiles, parts, bars, rows, columns, live):
    """Start loads of tiles at these rows and columns."""
    for n in gl.static_range(len(tiles)):
        async_load(tiles[n], [rows[n], columns[n]], bars[n].index(0), parts[n].index(0), pred=live)


@gluon.jit
def halves(x):
    """The sums over the columns of each group of warps, [rows,2]."""
    return gl.sum(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 2)


@gluon.jit(do_not_specialize=["N", "T"])
def penstock_scalar_bwd_128_sm90(
    q_tiles, k_tiles, v_tiles, o_tiles, state_tiles, dq_tiles, dk_tiles, dv_tiles, g, last, dq, dk, dv, dg, first, cu_seqlens,
    scale, N, T, H, q_h, k_h, g_b, g_t, g_h, s_n, s_h, s_k, s_v,
    DECAYS: gl.constexpr, STATIC: gl.constexpr, DG: gl.constexpr, LAST: gl.constexpr, FIRST: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Program (sequence, head). TMA tiles: [C, K] of q, k and their gradients, [C, C] of v and dO, [K, C] of states [slots H K, C].

    ``q_h`` and ``k_h`` are K, or 0 if all heads share q or k. dq, dk, dv and dg are contiguous; a constant decay's dg is [slots, H].
    LAST: ``last`` [N,H,K,C] is the gradient of the final state. FIRST: that of the initial state is stored in ``first``, contiguous.
    """
    gl.static_assert(q_tiles.block_shape[1] == MEDIUM)
    gl.static_assert(q_tiles.dtype == gl.bfloat16)
    WARPS: gl.constexpr = 8
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, K // 2, 16])
    of_dS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, square)
    by_column: gl.constexpr = gl.SliceLayout(0, square)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])  # every warp has all tokens
    channels: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    pairs: gl.constexpr = gl.BlockedLayout([2, 2], [32, 1], [WARPS, 1], [1, 0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    pid = gl.program_id(0)
    h = pid % H
    head = h.to(gl.int64)
    n, b, row, _, begin, done, tokens = tokens_of(pid // H, cu_seqlens, N, T, T, False, PACKED, False)
    first_chunk = slot_of(n, begin, done, T, C, PACKED)
    owner = n.to(gl.int64)
    chunks = (tokens + (C - 1)) // C
    i = gl.arange(0, C, line)
    i_row = gl.arange(0, C, by_row)[:, None]
    i_column = gl.arange(0, C, by_column)[None, :]
    key = gl.arange(0, K, gl.SliceLayout(1, of_dS))[:, None]
    value = gl.arange(0, C, gl.SliceLayout(0, of_dS))[None, :]
    dS = gl.zeros([K, C], gl.float32, of_dS)
    if LAST:
        last += owner * s_n + head * s_h + key.to(gl.int64) * s_k + value.to(gl.int64) * s_v
        dS = gl.load(last).to(gl.float32)
    g += b * g_b + row * g_t + head * g_h
    token = b * T + row
    dg = place_of_decays(dg, first_chunk, token, n, begin + tokens, chunks, H, head, STATIC, DG and PACKED)

    q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], half)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], half)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, K, C], half)
    all_dS_s = gl.allocate_shared_memory(gl.bfloat16, [1, K, C], half)  # later dk
    all_dA_s = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], half)  # later dv
    both_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], half)  # A and scale 2^G o dO, later dq
    vectors = decay_vectors()
    of_queries_s = gl.allocate_shared_memory(gl.float32, [C, 2], plain2)
    of_pairs_s = gl.allocate_shared_memory(gl.float32, [C, 2], plain2)
    of_keys_s = gl.allocate_shared_memory(gl.float32, [C, 2], plain2)
    of_state_s = gl.allocate_shared_memory(gl.float32, [K], plain)
    e_s = gl.allocate_shared_memory(gl.float32, [C], plain)
    bars = (barriers(STAGES), barriers(STAGES), barriers(STAGES), barriers(STAGES), barriers(STAGES))
    for tensor in gl.static_range(5):
        mbarrier.init(bars[tensor].index(0), count=1)
    fence_async_shared()
    meet()
    line_of = token.to(gl.int32)
    state_of = ((first_chunk * H + h) * K).to(gl.int32)
    late, late_s, late_bars, late_columns = (q_tiles, v_tiles), (q_s, v_s), (bars[0], bars[2]), (h * q_h, h * C)
    early, early_s, early_bars = (k_tiles, o_tiles, state_tiles), (k_s, o_s, state_s), (bars[1], bars[3], bars[4])
    early_columns = (h * k_h, h * C, 0)
    at = line_of + (chunks - 1) * C
    state_at = state_of + (chunks - 1) * (H * K)
    expect(late, late_bars, chunks * 0, chunks, STAGES)
    expect(early, early_bars, chunks * 0, chunks, STAGES)
    meet()
    ask(late, late_s, late_bars, (at, at), late_columns, chunks > 0)
    ask(early, early_s, early_bars, (at, at, state_at), early_columns, chunks > 0)
    total = 1.0
    d = gl.zeros([C], gl.float32, line)
    if DECAYS:
        start = gl.maximum(chunks - 1, 0) * C
        d = log_decays(g + start.to(gl.int64) * g_t, g_t, tokens - start, i)
        total = sums_of_decays(d, vectors, chunks * 0, scale)

    for c in range(chunks):
        chunk = chunks - 1 - c
        t = chunk * C
        known = c % 2
        zero = unknown(c * 0)
        q = q_s.index(zero)
        k = k_s.index(zero)
        v = v_s.index(zero)
        o = o_s.index(zero)
        S = state_s.index(zero)
        dS_s = all_dS_s.index(zero)
        dA_s = all_dA_s.index(zero)
        A_s = both_s.index(zero)
        read_s = both_s.index(zero + 1)
        dq_s = reinterpret(both_s, gl.bfloat16, [1, C, K], half).index(zero)
        dk_s = reinterpret(all_dS_s, gl.bfloat16, [1, C, K], half).index(zero)
        if DECAYS:
            coming = log_decays(g + (gl.maximum(t, C) - C).to(gl.int64) * g_t, g_t, gl.minimum(tokens, C), i)
        for tensor in gl.static_range(5):
            mbarrier.wait(bars[tensor].index(0), c & 1)
        if t + C > tokens:
            zeroed_behind(q, tokens - t, rows)
            zeroed_behind(k, tokens - t, rows)
            zeroed_behind(v, tokens - t, rows)
            zeroed_behind(o, tokens - t, rows)
        tma.store_wait(0)
        meet()
        dS_s.store(dS.to(gl.bfloat16))
        factor = scale
        if DECAYS:
            factor = vectors[2].index(known).load(gl.SliceLayout(1, rows))[:, None]
        O = o.load(rows).to(gl.float32)
        read_s.store((O * factor).to(gl.bfloat16))
        if DG:
            e_s.store(gl.sum(O * v.load(rows).to(gl.float32), 1) * scale)
            of_state_s.store(gl.sum(S.load(of_dS).to(gl.float32) * dS, 1))
        fence_async_shared()
        meet()
        A = warpgroup_mma(k, q.permute((1, 0)), gl.zeros([C, C], gl.float32, square), use_acc=False, is_async=True)
        dA = warpgroup_mma(v, o.permute((1, 0)), gl.zeros([C, C], gl.float32, square), use_acc=False, is_async=True)
        dV = warpgroup_mma(k, dS_s, gl.zeros([C, C], gl.float32, square), use_acc=False, is_async=True)
        A, dA, dV = warpgroup_mma_wait(0, [A, dA, dV])

        D = scale
        if DECAYS:
            coarse = vectors[0].index(known).load(by_column)[None, :] - vectors[0].index(known).load(by_row)[:, None]
            fine = vectors[1].index(known).load(by_column)[None, :] - vectors[1].index(known).load(by_row)[:, None]
            D = exp2(coarse + fine) * scale
            rest = vectors[3].index(known).load(by_row)[:, None]
            dV = dV * rest
            V = v.load(square).to(gl.float32)
            if DG:
                of_keys_s.store(halves(V * dV))
            V = (V * rest).to(gl.bfloat16)
        if DG:
            dA = gl.where(i_row < i_column, dA * D, 0.0).to(gl.bfloat16)
            of_pairs_s.store(halves(dA.to(gl.float32) * A))
        else:
            dA = gl.where(i_row <= i_column, dA * D, 0.0).to(gl.bfloat16)
        A_s.store(gl.where(i_row <= i_column, A * D, 0.0).to(gl.bfloat16))
        dA_s.store(dA)
        if DECAYS:
            meet()  # v is read by both groups
            v.store(V)
            dS = dS * total
        fence_async_shared()
        meet()
        dV = warpgroup_mma(A_s, o, dV, is_async=True)
        dQ = warpgroup_mma(read_s, S.permute((1, 0)), gl.zeros([C, K], gl.float32, wide), use_acc=False, is_async=True)
        dQ = warpgroup_mma(dA_s.permute((1, 0)), k, dQ, is_async=True)
        dS = warpgroup_mma(q.permute((1, 0)), read_s, dS, is_async=True)
        dV, dQ, dS = warpgroup_mma_wait(0, [dV, dQ, dS])

        dV = dV.to(gl.bfloat16)
        if DG:
            of_queries_s.store(halves(q.load(wide).to(gl.float32) * dQ))
            dQ += e_s.load(gl.SliceLayout(1, wide))[:, None] * k.load(wide).to(gl.float32)
        dQ = dQ.to(gl.bfloat16)
        expect(early, early_bars, c + 1, chunks, STAGES)
        fence_async_shared()
        meet()
        at = line_of + t
        ask(early, early_s, early_bars, (at - C, at - C, state_of + (chunk - 1) * (H * K)), early_columns, t > 0)
        if t + C <= tokens:
            dq_s.store(dQ)
        else:
            i_wide = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
            where = ((token + t + i_wide) * H + head) * K + gl.arange(0, K, gl.SliceLayout(0, wide))[None, :]
            gl.store(dq + where, dQ, mask=i_wide < tokens - t)
        dK = warpgroup_mma(v, dS_s.permute((1, 0)), gl.zeros([C, K], gl.float32, wide), use_acc=False, is_async=True)
        dK = warpgroup_mma(dA_s, q, dK, is_async=True)
        decay = total
        if DECAYS:
            total = sums_of_decays(coming, vectors, 1 - known, scale)
        dK = warpgroup_mma_wait(0, [dK])
        if DG:
            dK += e_s.load(gl.SliceLayout(1, wide))[:, None] * q.load(wide).to(gl.float32)
        dK = dK.to(gl.bfloat16)
        expect(late, late_bars, c + 1, chunks, STAGES)
        fence_async_shared()
        meet()
        ask(late, late_s, late_bars, (at - C, at - C), late_columns, t > 0)
        if t + C <= tokens:
            dA_s.store(dV)
            dk_s.store(dK)
            fence_async_shared()
            meet()
            async_store(dq_tiles, [at, h * K], dq_s)
            async_store(dv_tiles, [at, h * C], dA_s)
            async_store(dk_tiles, [at, h * K], dk_s)
        else:
            where = (token + t + i_row) * H + head
            gl.store(dv + where * C + i_column, dV, mask=i_row < tokens - t)
            i_wide = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
            where = ((token + t + i_wide) * H + head) * K + gl.arange(0, K, gl.SliceLayout(0, wide))[None, :]
            gl.store(dk + where, dK, mask=i_wide < tokens - t)
        if DG:
            queries = gl.convert_layout(gl.sum(of_queries_s.load(pairs) - of_pairs_s.load(pairs), 1), line, assert_trivial=True)
            keys = gl.convert_layout(gl.sum(of_keys_s.load(pairs), 1), line, assert_trivial=True)
            of_state = gl.sum(of_state_s.load(channels), 0) * decay
            d_gate = gradients_of_decays(queries, keys, of_state, d, i >= tokens - t)
            store_decays(dg, d_gate, chunk, i, tokens - t, H, STATIC)
        if DECAYS:
            d = coming
    if FIRST:
        first += (owner * H + head) * (K * C) + key * C + value
        gl.store(first, dS.to(first.dtype.element_ty))
    tma.store_wait(0)
