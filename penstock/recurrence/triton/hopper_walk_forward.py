"""The forward pass without decays per channel on Hopper, in Gluon: a program walks over a whole sequence of one head of 64 channels.

With the state S before the chunk in registers, and G, R, D and L as in ``hopper_walk_backward``::

    O  = scale ((D o Q K^T) V + 2^G o Q S)
    S <- 2^(G_L) S + K^T (2^R o V)

Three stages of tiles are loaded ahead by the tensor memory accelerator (TMA). Two programs fit on a multiprocessor.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ...gpu.hopper_tiles import exp2, meet, zeroed_behind
from ...gpu.tiles import slot_of, tokens_of
from .hopper_walk_backward import C, expect, log_decays, sums_of_decays

STAGES = gl.constexpr(3)


@gluon.jit
def ask(tiles, parts, bars, line, column, c, chunks):
    """Start the loads of step c: q, k and v."""
    s = c % STAGES
    for n in gl.static_range(3):
        tma.async_copy_global_to_shared(tiles[n], [line + c * C, column], bars[n].index(s), parts[n].index(s), pred=c < chunks)


@gluon.jit(do_not_specialize=["N", "T"])
def penstock_walk_fwd_hopper(
    q_tiles, k_tiles, v_tiles, output_tiles, state_tiles, g, first, output, last, cu_seqlens,
    scale, N, T, H, g_b, g_t, g_h, s_n, s_h, s_k, s_v,
    DECAYS: gl.constexpr, INITIAL: gl.constexpr, KEEP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Program (sequence, head). TMA tiles: [C, C] of tokens [B T, H C] and of states [slots H C, C]. KEEP: states before chunks are stored.

    ``first`` is the initial state, ``last`` [N,H,C,C] the final state.
    """
    WARPS: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    by_column: gl.constexpr = gl.SliceLayout(0, mma)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    pid = gl.program_id(0)
    h = pid % H
    head = h.to(gl.int64)
    n, b, row, _, begin, done, tokens = tokens_of(pid // H, cu_seqlens, N, T, T, False, PACKED, False)
    owner = n.to(gl.int64)
    chunks = (tokens + (C - 1)) // C
    i = gl.arange(0, C, line)
    i_row = gl.arange(0, C, by_row)[:, None]
    i_column = gl.arange(0, C, by_column)[None, :]
    S = gl.zeros([C, C], gl.float32, mma)
    if INITIAL:
        first += owner * s_n + head * s_h + i_row.to(gl.int64) * s_k + i_column.to(gl.int64) * s_v
        S = gl.load(first).to(gl.float32)
    g += b * g_b + row * g_t + head * g_h
    token = b * T + row

    q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    S_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)
    out_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)
    coarse_s = gl.allocate_shared_memory(gl.float32, [2, C], plain)
    fine_s = gl.allocate_shared_memory(gl.float32, [2, C], plain)
    factor_s = gl.allocate_shared_memory(gl.float32, [2, C], plain)
    rest_s = gl.allocate_shared_memory(gl.float32, [2, C], plain)
    vectors = (coarse_s, fine_s, factor_s, rest_s)
    q_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bars = (q_bars, k_bars, v_bars)
    for m in gl.static_range(STAGES):
        for tensor in gl.static_range(3):
            mbarrier.init(bars[tensor].index(m), count=1)
    fence_async_shared()
    meet()
    tiles = (q_tiles, k_tiles, v_tiles)
    parts = (q_s, k_s, v_s)
    at = token.to(gl.int32)
    column = h * C
    state = ((slot_of(n, begin, done, T, C, PACKED) * H + h) * C).to(gl.int32)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks, STAGES)
    meet()
    for m in gl.static_range(STAGES):
        ask(tiles, parts, bars, at, column, chunks * 0 + m, chunks)
    total = 1.0
    if DECAYS:
        value_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)
        total = sums_of_decays(log_decays(g, g_t, tokens, i), vectors, chunks * 0, scale)

    for c in range(chunks):
        t = c * C
        s = c % STAGES
        phase = (c // STAGES) & 1
        q = q_s.index(s)
        k = k_s.index(s)
        v = v_s.index(s)
        known = c % 2
        if DECAYS:
            g += C * g_t
            coming = log_decays(g, g_t, tokens - t - C, i)
        for tensor in gl.static_range(3):
            mbarrier.wait(bars[tensor].index(s), phase)
        if t + C > tokens:
            zeroed_behind(k, tokens - t, rows)
            zeroed_behind(v, tokens - t, rows)
        tma.store_wait(0)
        meet()
        S_s.store(S.to(gl.bfloat16))
        update = v
        if DECAYS:
            rest = vectors[3].index(known).load(gl.SliceLayout(1, rows))[:, None]
            value_s.store((v.load(rows).to(gl.float32) * rest).to(gl.bfloat16))
            update = value_s
            S = S * total
        fence_async_shared()
        meet()
        if KEEP:
            tma.async_copy_shared_to_global(state_tiles, [state + c * (H * C), 0], S_s)
        A = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
        O = warpgroup_mma(q, S_s, gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
        S = warpgroup_mma(k.permute((1, 0)), update, S, is_async=True)
        A, O, S = warpgroup_mma_wait(0, [A, O, S])
        D = scale
        if DECAYS:
            coarse = vectors[0].index(known).load(by_row)[:, None] - vectors[0].index(known).load(by_column)[None, :]
            fine = vectors[1].index(known).load(by_row)[:, None] - vectors[1].index(known).load(by_column)[None, :]
            D = exp2(coarse + fine) * scale
            O = O * vectors[2].index(known).load(by_row)[:, None]
        else:
            O = O * scale
        A = gl.convert_layout(gl.where(i_row >= i_column, A * D, 0.0).to(gl.bfloat16), left, assert_trivial=True)
        O = warpgroup_mma(A, v, O, is_async=True)
        if DECAYS:
            total = sums_of_decays(coming, vectors, 1 - known, scale)
        A, O = warpgroup_mma_wait(0, [A, O])
        expect(tiles, bars, c + STAGES, chunks, STAGES)
        if t + C <= tokens:
            out_s.store(O.to(gl.bfloat16))
        fence_async_shared()
        meet()
        if t + C <= tokens:
            tma.async_copy_shared_to_global(output_tiles, [at + t, column], out_s)
        else:
            gl.store(output + ((token + t + i_row) * H + head) * C + i_column, O.to(gl.bfloat16), mask=i_row < tokens - t)
        ask(tiles, parts, bars, at, column, c + STAGES, chunks)
    last += (owner * H + head) * (C * C) + i_row * C + i_column
    gl.store(last, S.to(last.dtype.element_ty))
    tma.store_wait(0)
