"""States between chunks for decays per channel on Hopper, in Gluon: see ``segments.py``.

The tensor memory accelerator (TMA) loads the tiles of several chunks ahead. Factors are products within groups of R tokens, as in
``channel_forward``, times exponentials of sums over groups.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import exp2, let_next_begin, meet, zero_rows_from
from ....gpu.ring import barriers, expect, invalidate, load_tiles
from ....gpu.tiles import LOG2E, slot_of, tokens_of
from ..heads import MEDIUM, SMALL
from .dyadic import around, flat, grouped, spread, widened

C = gl.constexpr(64)  # tokens in a chunk
GROUPS = gl.constexpr(4)  # groups of R tokens; a thread holds all tokens of a group
R = gl.constexpr(16)
STEPS = gl.constexpr(4)  # R is 2^STEPS


@gluon.jit
def rings(x_tiles, y_tiles, g_tiles, TILED: gl.constexpr, STAGES: gl.constexpr):
    """Memory of STAGES for tiles of x, y and, if TILED, decays, and barriers for each."""
    x_s = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, C, x_tiles.block_shape[1]], x_tiles.layout)
    y_s = gl.allocate_shared_memory(y_tiles.dtype, [STAGES, C, y_tiles.block_shape[1]], y_tiles.layout)
    parts = (x_s, y_s)
    bars = (barriers(STAGES, 1), barriers(STAGES, 1))
    if TILED:
        g_s = gl.allocate_shared_memory(g_tiles.dtype, [STAGES, C, x_tiles.block_shape[1]], g_tiles.layout)
        parts = (x_s, y_s, g_s)
        bars = (bars[0], bars[1], barriers(STAGES, 1))
    fence_async_shared()
    meet()
    return parts, bars


@gluon.jit
def load_chunk(tiles, parts, bars, place, c, ADJOINT: gl.constexpr):
    """Start the loads of step c. ADJOINT: the steps go from the last chunk to the first."""
    row, key_column, value_column, chunks = place
    chunk = c
    if ADJOINT:
        chunk = chunks - 1 - c
    line = row + chunk * C
    load_tiles(tiles, parts, bars, ([line, key_column], [line, value_column], [line, key_column]), c, c < chunks)


@gluon.jit
def load_first(tiles, parts, bars, place, ADJOINT: gl.constexpr, STAGES: gl.constexpr):
    """Start the loads of the first STAGES steps."""
    chunks = place[3]
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks * 0 + m < chunks)
    meet()
    for m in gl.static_range(STAGES):
        load_chunk(tiles, parts, bars, place, chunks * 0 + m, ADJOINT)


@gluon.jit
def decays_of(gates, g_s, first, left, s, K: gl.constexpr, TILED: gl.constexpr, STATIC: gl.constexpr, layout: gl.constexpr):
    """The decays [C,K] of the chunk whose first token is ``first``, 0 after its ``left`` tokens."""
    g, constant, g_t, g_k = gates
    i = gl.arange(0, C, gl.SliceLayout(1, layout))
    if TILED:
        d = g_s.index(s).load(layout).to(gl.float32)
        if left < C:
            d = gl.where((i < left)[:, None], d, 0.0)
    elif STATIC:
        d = gl.where((i < left)[:, None], constant, 0.0)
    else:
        at = (first + i).to(gl.int64)[:, None] * g_t + gl.arange(0, K, gl.SliceLayout(0, layout))[None, :] * g_k
        d = gl.load(g + at, mask=(i < left)[:, None], other=0.0).to(gl.float32)
    return d


@gluon.jit
def factors(d, part, ADJOINT: gl.constexpr, PREVIOUS: gl.constexpr, layout: gl.constexpr, by_group: gl.constexpr):
    """Of each token [C,K], the decays between it and the chunk's end (ADJOINT: its beginning); and the sum of all [1,K], in log2 units.

    ``part``: memory of [GROUPS,K].
    """
    across: gl.constexpr = gl.SliceLayout(1, by_group)
    d = grouped(d * LOG2E, GROUPS, by_group)
    part.store(gl.sum(d, 1))
    total = exp2(d)
    remaining = gl.full([GROUPS, R, d.shape[2]], 1.0, gl.float32, by_group)
    through = remaining
    if not PREVIOUS:
        through = total
    for _level in gl.static_range(STEPS):
        through, remaining, total = widened(through, remaining, total, by_group, gl.num_warps())
    before, after, whole = around(part, across)
    if ADJOINT:
        found = flat(through, layout) * spread(exp2(before), R, layout)
    else:
        found = flat(remaining, layout) * spread(exp2(after), R, layout)
    return found, whole


@gluon.jit
def chunk_sum(
    tiles, parts, bars, place, sides, gates, c, chunk, left, scale, ADJOINT: gl.constexpr, PREVIOUS: gl.constexpr, TILED: gl.constexpr,
    STATIC: gl.constexpr, layout: gl.constexpr, by_group: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """The sum of a chunk [K,BV], and that of its decays [1,K], log2, which ``sides`` gets as a factor.

    Starts the loads of step c + STAGES.
    """
    x_s = parts[0]
    y_s = parts[1]
    g_s = x_s
    if TILED:
        g_s = parts[2]
    f_s, part, total_s = sides
    K: gl.constexpr = x_s.shape[2]
    BV: gl.constexpr = y_s.shape[2]
    STAGES: gl.constexpr = x_s.shape[0]
    chunks = place[3]
    s = c % STAGES
    phase = (c // STAGES) & 1
    if TILED:
        mbarrier.wait(bars[2].index(s), phase)
    d = decays_of(gates, g_s, chunk * C, left, s, K, TILED, STATIC, layout)
    f, whole = factors(d, part, ADJOINT, PREVIOUS, layout, by_group)
    total_s.store(gl.reshape(exp2(whole), [K]))
    mbarrier.wait(bars[0].index(s), phase)
    X = (x_s.index(s).load(layout).to(gl.float32) * f).to(x_s.dtype)
    y = y_s.index(s)
    mbarrier.wait(bars[1].index(s), phase)
    if left < C:
        i = gl.arange(0, C, gl.SliceLayout(1, layout))
        X = gl.where((i < left)[:, None], X, gl.zeros_like(X))
        zero_rows_from(y, left, gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0]))
    f_s.store(X)
    fence_async_shared()
    meet()
    made = gl.zeros([K, BV], gl.float32, mma)
    made = warpgroup_mma(f_s.permute((1, 0)), y, made, use_acc=False, is_async=True)
    made = warpgroup_mma_wait(0, [made])
    expect(tiles, bars, c + STAGES, c + STAGES < chunks)
    meet()
    load_chunk(tiles, parts, bars, place, c + STAGES, ADJOINT)
    if ADJOINT:
        made *= scale
    return made, whole


@gluon.jit
def memory(x_tiles, K: gl.constexpr):
    """Of x with its factors, of sums over groups, and of a chunk's decays."""
    f_s = gl.allocate_shared_memory(x_tiles.dtype, [C, K], x_tiles.layout)
    part = gl.allocate_shared_memory(gl.float32, [GROUPS, K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    total_s = gl.allocate_shared_memory(gl.float32, [K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return f_s, part, total_s


@gluon.jit
def constant_decays(g, g_k, K: gl.constexpr, STATIC: gl.constexpr, layout: gl.constexpr):
    """The decays [1,K] of all tokens if STATIC."""
    constant = 0.0
    if STATIC:
        constant = gl.load(g + gl.arange(0, K, gl.SliceLayout(0, layout)) * g_k).to(gl.float32)[None, :]
    return constant


@gluon.jit(do_not_specialize=["N", "T", "L", "H"])
def penstock_segment_sums_sm90(
    x_tiles, y_tiles, g_tiles, g, sums, decays, cu_seqlens, scale, N, T, L, H, g_b, g_t, g_h, g_k,
    K: gl.constexpr, V: gl.constexpr, CHUNKS: gl.constexpr, ADJOINT: gl.constexpr, PREVIOUS: gl.constexpr, PACKED: gl.constexpr,
    TILED: gl.constexpr, STATIC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """sum_n = sum_t (x_t o exp(decays after t))^T y_t and decay_n = sum_t g_t over the tokens t of segment n.

    Reads x, g [B,T,H,K] and y [B,T,H,V] as TMA tiles [C,K] and [C,BV] of tokens. Writes ``sums`` [slots,H,K,V] and ``decays`` [slots,H,K],
    log2, of segments; if CHUNKS, of all chunks. Program (segment of L tokens, head, block of V).

    ADJOINT: x is q, y is dO. TILED: TMA copies decays too; STATIC: they are constant. The next launch may begin early.
    """
    gl.static_assert(K == SMALL or K == MEDIUM)
    gl.static_assert(x_tiles.dtype == gl.bfloat16 or x_tiles.dtype == gl.float16)
    WARPS: gl.constexpr = gl.num_warps()
    BV: gl.constexpr = y_tiles.block_shape[1]
    NV: gl.constexpr = V // BV
    layout: gl.constexpr = gl.BlockedLayout([R, 2], [1, 32], [GROUPS, WARPS // GROUPS], [1, 0])
    by_group: gl.constexpr = gl.BlockedLayout([1, R, 2], [1, 1, 32], [GROUPS, 1, WARPS // GROUPS], [2, 1, 0])
    across: gl.constexpr = gl.SliceLayout(1, by_group)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BV, 16])

    pid = let_next_begin(gl.program_id(0))
    vb = pid % NV
    slot = pid // NV // H
    h = pid // NV % H
    n, b, row, _step, begin, done, tokens = tokens_of(slot, cu_seqlens, N, T, L, True, PACKED, False)
    if tokens <= 0:
        return
    if CHUNKS:
        slot = slot_of(n, begin, done, T, C, PACKED)
    chunks = (tokens + (C - 1)) // C
    g += b * g_b + row * g_t + h.to(gl.int64) * g_h
    parts, bars = rings(x_tiles, y_tiles, g_tiles, TILED, STAGES)
    sides = memory(x_tiles, K)
    tiles = (x_tiles, y_tiles, g_tiles)
    place = ((b * T + row).to(gl.int32), h * K, h * V + vb * BV, chunks)
    load_first(tiles, parts, bars, place, ADJOINT, STAGES)

    dk = gl.arange(0, K, gl.SliceLayout(1, mma))[:, None]
    dv = gl.arange(0, BV, gl.SliceLayout(0, mma))[None, :] + vb * BV
    channel = gl.arange(0, K, gl.SliceLayout(0, across))
    step = H.to(gl.int64) * K
    to = slot * step + h * K
    gates = (g, constant_decays(g, g_k, K, STATIC, layout), g_t, g_k)
    S = gl.zeros([K, BV], gl.float32, mma)
    D = gl.zeros([1, K], gl.float32, across)
    for c in range(chunks):
        chunk = c
        if ADJOINT:
            chunk = chunks - 1 - c
        left = tokens - chunk * C
        made, whole = chunk_sum(
            tiles, parts, bars, place, sides, gates, c, chunk, left, scale, ADJOINT, PREVIOUS, TILED, STATIC, layout, by_group, mma
        )
        if CHUNKS:
            into = to + chunk * step
            gl.store(sums + (into + dk) * V + dv, made)
            if vb == 0:
                gl.store(decays + into + channel, gl.sum(whole, 0))
        else:
            S = S * sides[2].load(gl.SliceLayout(1, mma))[:, None] + made
            D += whole
    if not CHUNKS:
        gl.store(sums + (to + dk) * V + dv, S)
        if vb == 0:
            gl.store(decays + to + channel, gl.sum(D, 0))
    invalidate(bars)


@gluon.jit(do_not_specialize=["N", "T", "L", "H"])
def penstock_chunk_states_sm90(
    x_tiles, y_tiles, g_tiles, g, first, chunk_states, upper, last_states, last, cu_seqlens, scale, N, T, L, H, g_b, g_t, g_h, g_k,
    s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, SEGMENTS: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, ADJOINT: gl.constexpr,
    PREVIOUS: gl.constexpr, PACKED: gl.constexpr, IN_ROWS: gl.constexpr, TILED: gl.constexpr, STATIC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """S <- 2^G o S + sum_t (x_t o 2^(R_t))^T y_t over the tokens t of a chunk, G all decays of the chunk and R_t those after t.

    Reads and writes the tensors of ``penstock_chunk_states``, x, g [B,T,H,K] and y [B,T,H,V] as tiles [C,K] and [C,C] of tokens. Program
    (sequence or segment, head, block of C value channels): chunk by chunk.
    """
    gl.static_assert(K == SMALL or K == MEDIUM)
    gl.static_assert(x_tiles.dtype == gl.bfloat16 or x_tiles.dtype == gl.float16)
    WARPS: gl.constexpr = gl.num_warps()
    NV: gl.constexpr = V // C
    layout: gl.constexpr = gl.BlockedLayout([R, 2], [1, 32], [GROUPS, WARPS // GROUPS], [1, 0])
    by_group: gl.constexpr = gl.BlockedLayout([1, R, 2], [1, 1, 32], [GROUPS, 1, WARPS // GROUPS], [2, 1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    wide: gl.constexpr = gl.DistributedLinearLayout(  # the layout of S, but with 16 contiguous bytes of a row
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]] + ([[64, 0]] if WARPS == 8 else []), [], [K, C],
    )  # fmt: skip

    pid = gl.program_id(0)
    vb = pid % NV
    slot = pid // NV // H
    h = pid // NV % H
    n, b, row, _step, begin, done, tokens = tokens_of(slot, cu_seqlens, N, T, L, SEGMENTS, PACKED, False)
    if SEGMENTS:
        if tokens <= 0:
            return
    chunks = (gl.maximum(tokens, 0) + (C - 1)) // C
    g += b * g_b + row * g_t + h.to(gl.int64) * g_h
    parts, bars = rings(x_tiles, y_tiles, g_tiles, TILED, STAGES)
    sides = memory(x_tiles, K)
    tiles = (x_tiles, y_tiles, g_tiles)
    place = ((b * T + row).to(gl.int32), h * K, h * V + vb * C, chunks)
    load_first(tiles, parts, bars, place, ADJOINT, STAGES)

    dk = gl.arange(0, K, gl.SliceLayout(1, mma))[:, None]
    dv = gl.arange(0, C, gl.SliceLayout(0, mma))[None, :] + vb * C
    step = H.to(gl.int64) * K
    to = slot_of(n, begin, done, T, C, PACKED) * step + h * K
    gates = (g, constant_decays(g, g_k, K, STATIC, layout), g_t, g_k)
    S = gl.zeros([K, C], gl.float32, mma)
    if INITIAL:
        S = gl.load(first + slot.to(gl.int64) * s_n + h.to(gl.int64) * s_h + dk * s_k + dv * s_v).to(gl.float32)
    if IN_ROWS > 0:
        if tokens % C > 0:
            gl.store(last_states + (n * step + h * K + dk) * V + dv, S.to(last_states.dtype.element_ty))
    for c in range(chunks):
        chunk = c
        if ADJOINT:
            chunk = chunks - 1 - c
        left = tokens - chunk * C
        if chunk_states.dtype.element_ty == gl.float32:
            gl.store(chunk_states + (to + chunk * step + dk) * V + dv, S)
        else:
            kept = gl.convert_layout(S.to(chunk_states.dtype.element_ty), wide)
            wk = gl.arange(0, K, gl.SliceLayout(1, wide))[:, None]
            wv = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :] + vb * C
            if IN_ROWS == 0:
                gl.store(chunk_states + (to + chunk * step + wk) * V + wv, kept)
            else:
                at = ((b * T + row + chunk * C + wk % C) * H + h) * V + wv
                gl.store(chunk_states + at, kept, mask=(left >= C) & (wk < C))
                if IN_ROWS > 1:
                    gl.store(upper + at, kept, mask=(left >= C) & (wk >= C))
        made, _whole = chunk_sum(
            tiles, parts, bars, place, sides, gates, c, chunk, left, scale, ADJOINT, PREVIOUS, TILED, STATIC, layout, by_group, mma
        )
        S = S * sides[2].load(gl.SliceLayout(1, mma))[:, None] + made
    if FINAL:
        gl.store(last + (slot * step + h * K + dk) * V + dv, S.to(last.dtype.element_ty))
    invalidate(bars)
