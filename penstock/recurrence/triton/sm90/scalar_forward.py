"""The forward pass without decays per channel on Hopper, in Gluon: a program walks over a whole sequence of one head.

Heads have 64 value channels and 64 or 128 key channels. With the state S before the chunk in registers, and G, R, D and L as in
``scalar_backward``::

    O  = scale ((D o Q K^T) V + 2^G o Q S)
    S <- 2^(G_L) S + K^T (2^R o V)

Three stages of tiles, or two of 128 key channels, are loaded ahead by the tensor memory accelerator (TMA). Two programs fit on a
multiprocessor. With 128 key channels a program has two groups of four warps. Each has half of the columns of A, so A is an operand in
shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_decays import C, decay_vectors, factors_between, log_decays, sums_of_decays
from ....gpu.hopper_tiles import async_store, meet, reinterpret
from ....gpu.ring import barriers, expect, invalidate, load_tiles
from ....gpu.tiles import slot_of, tokens_of
from ..heads import MEDIUM, SMALL
from .scalar_decays import zero_padding


@gluon.jit
def load_chunk(tiles, rings, bars, line, columns, c, chunks):
    """Start the loads of chunk c: q, k and v."""
    row = line + c * C
    load_tiles(tiles, rings, bars, ([row, columns[0]], [row, columns[1]], [row, columns[2]]), c, c < chunks)


@gluon.jit
def weights_operand(A, D, q, indices, GROUPS: gl.constexpr, half: gl.constexpr, mma: gl.constexpr):
    """D o A on and below the diagonal as left operand: in registers or, with two groups of warps, in the memory of q."""
    i, j = indices
    A = gl.where(i >= j, A * D, 0.0).to(gl.bfloat16)
    if GROUPS == 1:
        return gl.convert_layout(A, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
    else:
        A_s = reinterpret(q, gl.bfloat16, [C, C], half)
        meet()
        A_s.store(A)
        fence_async_shared()
        meet()
        return A_s


@gluon.jit
def store_rows(output, O, token, tokens, H, head, indices):
    """Store the first ``tokens`` rows of O [C,C] from row ``token`` of a contiguous tensor on."""
    i, j = indices
    gl.store(output + ((token + i) * H + head) * C + j, O.to(gl.bfloat16), mask=i < tokens)


@gluon.jit(do_not_specialize=["N", "T"])
def penstock_scalar_fwd_sm90(
    q_tiles, k_tiles, v_tiles, output_tiles, state_tiles, g, first, output, last, cu_seqlens,
    scale, N, T, H, q_h, k_h, g_b, g_t, g_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, DECAYS: gl.constexpr, INITIAL: gl.constexpr, KEEP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """S_t = exp(g_t) S_{t-1} + k_t^T v_t, o_t = scale q_t S_t with one decay per head.

    Reads q, k [B,T,H,K], v [B,T,H,C] as TMA tiles [C,K] and [C,C] of tokens, g [B,T,H]. Writes output [B,T,H,C] and states [N,H,K,C],
    before chunks as tiles [K,C]. Program (sequence, head): chunk by chunk.

    ``q_h`` and ``k_h`` are K, or 0 if all heads share q or k. ``first`` is the initial state, ``last`` [N,H,K,C] the final state.
    KEEP: states before chunks are stored.
    """
    gl.static_assert(K == SMALL or K == MEDIUM)
    gl.static_assert(q_tiles.dtype == gl.bfloat16)
    WARPS: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = WARPS // 4
    STAGES: gl.constexpr = 3 if GROUPS == 1 else 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, C // GROUPS, 16])
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    pid = gl.program_id(0)
    h = pid % H
    head = h.to(gl.int64)
    n, b, row, _, begin, done, tokens = tokens_of(pid // H, cu_seqlens, N, T, T, False, PACKED, False)
    owner = n.to(gl.int64)
    chunks = (tokens + (C - 1)) // C
    i = gl.arange(0, C, line)
    indices = (gl.arange(0, C, by_row)[:, None], gl.arange(0, C, gl.SliceLayout(0, mma))[None, :])
    key = gl.arange(0, K, gl.SliceLayout(1, of_state))[:, None]
    value = gl.arange(0, C, gl.SliceLayout(0, of_state))[None, :]
    S = gl.zeros([K, C], gl.float32, of_state)
    if INITIAL:
        first += owner * s_n + head * s_h + key.to(gl.int64) * s_k + value.to(gl.int64) * s_v
        S = gl.load(first).to(gl.float32)
    g += b * g_b + row * g_t + head * g_h
    token = b * T + row

    q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], half)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], half)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], half)
    S_s = gl.allocate_shared_memory(gl.bfloat16, [K, C], half)
    out_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)
    vectors = decay_vectors()
    bars = (barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1))
    fence_async_shared()
    meet()
    tiles = (q_tiles, k_tiles, v_tiles)
    rings = (q_s, k_s, v_s)
    at = token.to(gl.int32)
    column = h * C
    columns = (h * q_h, h * k_h, column)
    state = ((slot_of(n, begin, done, T, C, PACKED) * H + h) * K).to(gl.int32)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks * 0 + m < chunks)
    meet()
    for m in gl.static_range(STAGES):
        load_chunk(tiles, rings, bars, at, columns, chunks * 0 + m, chunks)
    total = 1.0
    if DECAYS:
        value_s = out_s  # until the state has been updated
        if GROUPS == 1:
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
            zero_padding((k, v), tokens - t, rows)
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
            async_store(state_tiles, [state + c * (H * K), 0], S_s)
        A = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
        O = warpgroup_mma(q, S_s, gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
        S = warpgroup_mma(k.permute((1, 0)), update, S, is_async=True)
        A, O, S = warpgroup_mma_wait(0, [A, O, S])
        D = scale
        if DECAYS:
            D = factors_between(vectors, known, scale, False, mma)
            O = O * vectors[2].index(known).load(by_row)[:, None]
        else:
            O = O * scale
        A = weights_operand(A, D, q, indices, GROUPS, half, mma)
        O = warpgroup_mma(A, v, O, is_async=True)
        if DECAYS:
            total = sums_of_decays(coming, vectors, 1 - known, scale)
        if GROUPS == 1:
            A, O = warpgroup_mma_wait(0, [A, O])
        else:
            O = warpgroup_mma_wait(0, [O])
        expect(tiles, bars, c + STAGES, c + STAGES < chunks)
        if t + C <= tokens:
            out_s.store(O.to(gl.bfloat16))
        fence_async_shared()
        meet()
        if t + C <= tokens:
            async_store(output_tiles, [at + t, column], out_s)
        else:
            store_rows(output, O, token + t, tokens - t, H, head, indices)
        load_chunk(tiles, rings, bars, at, columns, c + STAGES, chunks)
    last += (owner * H + head) * (K * C) + key * C + value
    gl.store(last, S.to(last.dtype.element_ty))
    tma.store_wait(0)
    invalidate(bars)
