"""The walk over chunks for heads of several blocks of key channels on Hopper, in Gluon: decays per channel, forward and backward.

``channel_weights`` stores A, q and k with the factors of the state (read, rest) and the decay of the chunk (total). A chunk is then

    O  = A V + read S          S  = total o S + rest^T V       chunk after chunk
    dV = A^T dO + rest dS      dS = total o dS + read^T dO     ADJOINT: from the last chunk to the first

A program has all key channels of a block of value channels. The state is in registers, transposed, so it is the left operand of its
product without a copy in shared memory. Two stages of tiles are loaded ahead by the tensor memory accelerator (TMA).

float16: S has no bound. As an operand each of its value channels is multiplied by a power of two. ``channel_weights`` did this to A and to
scale. The products with S are multiplied by the inverse, before that with A is added to them. Stored states are float32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, inverse, meet, reinterpret, unknown, zero_rows_from
from ....gpu.ring import barriers, expect, invalidate, load_tiles
from ....gpu.tiles import powers_of_two, slot_of, tokens_of
from ..heads import LARGE

C = gl.constexpr(64)  # tokens in a chunk
STAGES = gl.constexpr(2)


@gluon.jit
def load_chunk(tiles, rings, bars, place, c, ADJOINT: gl.constexpr):
    """Start the loads of step c: the operand of reads, the weights, y, and the operand of updates."""
    row, key_column, value_column, slot, H, chunks = place
    chunk = c
    if ADJOINT:
        chunk = chunks - 1 - c
    line = row + chunk * C
    at = ([line, key_column], [(slot + chunk * H) * C, 0], [line, value_column], [line, key_column])
    load_tiles(tiles, rings, bars, at, c, c < chunks)


@gluon.jit
def rings_of(kind: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, half: gl.constexpr):
    """Memory of the four rings: the operand of reads, the weights, y, and the operand of updates."""
    read_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    write_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    weight_s = gl.allocate_shared_memory(kind, [STAGES, C, C], half)
    y_s = gl.allocate_shared_memory(kind, [STAGES, C, BV], half)
    return read_s, weight_s, y_s, write_s


@gluon.jit
def initial_halves(at, s_k, per_S, BV: gl.constexpr, HALF: gl.constexpr, INITIAL: gl.constexpr, F16: gl.constexpr, mma: gl.constexpr):
    """The two halves [BV,K / 2] of the initial state. ``at``: pointers to the first one."""
    S_0 = gl.zeros([BV, HALF], gl.float32, mma)
    S_1 = S_0
    if INITIAL:
        S_0 = gl.load(at).to(gl.float32)
        S_1 = gl.load(at + HALF * s_k).to(gl.float32)
        if F16:
            S_0 *= per_S
            S_1 *= per_S
    return S_0, S_1


@gluon.jit
def zero_padding(y, write, left, layout: gl.constexpr):
    """Zero the rows of y and of the operand of updates from ``left`` on."""
    zero_rows_from(y, left, layout)
    for quarter in gl.static_range(4):  # the whole tile would take 64 registers
        zero_rows_from(write.slice(quarter * (C // 4), C // 4), left - quarter * (C // 4), layout)
    fence_async_shared()
    meet()


@gluon.jit
def rounded_halves(S_0, S_1, kind: gl.constexpr, F16: gl.constexpr, out_mma: gl.constexpr):
    """The halves of the state, rounded, and as left operands. float16: each value channel is multiplied by a power of two.

    Returns the inverse powers last.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    up = 1.0
    if F16:
        down, up = powers_of_two(gl.maximum(gl.max(gl.abs(S_0), 1), gl.max(gl.abs(S_1), 1)))
        X_0 = (S_0 * down[:, None]).to(kind)
        X_1 = (S_1 * down[:, None]).to(kind)
        up = gl.convert_layout(up, gl.SliceLayout(1, out_mma), assert_trivial=True)[:, None]
    else:
        X_0 = S_0.to(kind)
        X_1 = S_1.to(kind)
    L_0 = gl.convert_layout(X_0, left, assert_trivial=True)
    L_1 = gl.convert_layout(X_1, left, assert_trivial=True)
    return X_0, X_1, L_0, L_1, up


@gluon.jit
def kept(x, tiles, tile, row, column):
    """Store a half of the state x [BV,K / 2] as a tile [K / 2,BV] in memory."""
    tma.store_wait(0)
    meet()
    tile.permute((1, 0)).store(x)
    fence_async_shared()
    meet()
    async_store(tiles, [row, column], tile)


@gluon.jit
def power_of_weights(at, ADJOINT: gl.constexpr, out_mma: gl.constexpr):
    """The powers of two that the rows of A lack, as a row; ADJOINT: one for all."""
    if ADJOINT:
        return gl.load(at)
    else:
        return gl.load(at + gl.arange(0, C, gl.SliceLayout(0, out_mma)))[None, :]


@gluon.jit
def store_rows(output, O, first, tokens, row_stride, layout: gl.constexpr):
    """Store O [BV,C] as rows of ``output`` from row ``first`` on, before row ``tokens``."""
    i = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    j = gl.arange(0, O.shape[0], gl.SliceLayout(1, layout))[:, None]
    gl.store(output + (first + i) * row_stride + j, O, mask=first + i < tokens)


@gluon.jit
def store_halves(S_0, S_1, to, V: gl.constexpr):
    """Store the halves of the state as rows of a contiguous state [K,V]."""
    gl.store(to, S_0.to(to.dtype.element_ty))
    gl.store(to + S_0.shape[1] * V, S_1.to(to.dtype.element_ty))


@gluon.jit(do_not_specialize=["N", "T", "L", "H"])
def penstock_channel_walk_sm90(
    read_tiles, weight_tiles, y_tiles, write_tiles, output_tiles, state_tiles, totals, powers, first, output, last, cu_seqlens,
    unit, of_S, per_S, N, T, L, H, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, SEGMENTS: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr,
    EVERY: gl.constexpr, ADJOINT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """O = A V + read S, S <- total o S + rest^T V; ADJOINT: dV = A^T dO + rest dS, dS <- total o dS + read^T dO.

    TMA tiles: [C,K] of tokens [B T,H K], [C,C] of ``weights`` [slots H C,C], [C,BV] of tokens [B T,H V], and [K / 2,BV] of states [slots H
    K,V]. Program (sequence or segment, head, block of V): chunk by chunk.

    EVERY: the state before every EVERY tokens (ADJOINT: its gradient after them) is stored in ``state_tiles``; 0: none is. float16: there
    it is [slots H K, V], float32.

    float16: A and read lack a power of two, ``unit``; ADJOINT: so does dS in registers. of_S: what S lacks there; per_S: the inverse.
    """
    gl.static_assert(K == LARGE)
    gl.static_assert(read_tiles.dtype == gl.bfloat16 or read_tiles.dtype == gl.float16)
    kind: gl.constexpr = read_tiles.dtype
    F16: gl.constexpr = read_tiles.dtype == gl.float16
    HALF: gl.constexpr = K // 2
    NV: gl.constexpr = V // BV
    WARPS: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    out_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    channel: gl.constexpr = gl.SliceLayout(0, mma)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    pid = gl.program_id(0)
    vb = pid % NV
    slot = pid // NV // H
    h = pid // NV % H
    n, b, row, _, begin, done, tokens = tokens_of(slot, cu_seqlens, N, T, L, SEGMENTS, PACKED, False)
    head = h.to(gl.int64)
    owner = slot.to(gl.int64)
    chunks = (gl.maximum(tokens, 0) + (C - 1)) // C
    dk = gl.arange(0, HALF, channel)
    dv = gl.arange(0, BV, gl.SliceLayout(1, mma))
    first += owner * s_n + head * s_h + (vb * BV + dv)[:, None].to(gl.int64) * s_v + dk[None, :].to(gl.int64) * s_k
    S_0, S_1 = initial_halves(first, s_k, per_S, BV, HALF, INITIAL, F16, mma)

    rings = rings_of(kind, K, BV, half)
    state_s = gl.allocate_shared_memory(kind, [HALF if EVERY > 0 and not F16 else C, BV], half)
    out_s = reinterpret(state_s, kind, [C, BV], half)
    total_s = gl.allocate_shared_memory(gl.float32, [2, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = (barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1))
    fence_async_shared()
    meet()
    first_chunk = slot_of(n, begin, done, T, C, PACKED).to(gl.int64) * H + h
    place = ((b * T + row).to(gl.int32), h * K, h * V + vb * BV, first_chunk.to(gl.int32), H, chunks)
    tiles = (read_tiles, weight_tiles, y_tiles, write_tiles)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks * 0 + m < chunks)
    meet()
    for m in gl.static_range(STAGES):
        load_chunk(tiles, rings, bars, place, chunks * 0 + m, ADJOINT)
    if EVERY > 0:
        state_row = ((slot_of(n, begin, done, T, EVERY, PACKED).to(gl.int64) * H + h) * K).to(gl.int32)
    totals += first_chunk * K + gl.arange(0, K, line)
    step = H.to(gl.int64) * K
    output += ((b * T + row) * H + head) * V + vb * BV
    start = chunks - 1 if ADJOINT else chunks * 0
    total_s.index(0).store(gl.load(totals + start * step, mask=gl.arange(0, K, line) * 0 < chunks, other=0.0))
    for c in range(chunks):
        chunk = chunks - 1 - c if ADJOINT else c
        later = chunks - 2 - c if ADJOINT else c + 1
        s = c % STAGES
        t = chunk * C
        coming = gl.load(totals + later * step, mask=c + 1 + gl.arange(0, K, line) * 0 < chunks, other=0.0)
        phase = (c // STAGES) & 1
        read, A, y, write = rings[0].index(s), rings[1].index(s), rings[2].index(s), rings[3].index(s)
        y_t = y.permute((1, 0))
        if not ADJOINT:
            A = A.permute((1, 0))
        if F16:
            if EVERY > 0:
                if t % EVERY == 0:
                    at = (state_row + t // EVERY * (H * K)).to(gl.int64) * V + vb * BV
                    at = state_tiles + at + dv[:, None] + (dk[None, :] + unknown(t * 0)) * V
                    store_halves(S_0 * of_S, S_1 * of_S, at, V)
            powers_at = powers + (first_chunk + chunk * H) * C
            power = power_of_weights(powers_at, ADJOINT, out_mma)
        X_0, X_1, L_0, L_1, up = rounded_halves(S_0, S_1, kind, F16, out_mma)
        total = total_s.index(c & 1)
        if not F16:
            S_0 = S_0 * total.slice(0, HALF).load(channel)[None, :]  # before the products: ptxas serialises all if other work is between
            S_1 = S_1 * total.slice(HALF, HALF).load(channel)[None, :]
        for tensor in gl.static_range(4):
            mbarrier.wait(bars[tensor].index(s), phase)
        if t + C > tokens:
            zero_padding(y, write, tokens - t, rows)
        O = gl.zeros([BV, C], gl.float32, out_mma)
        O = warpgroup_mma(L_0, read.slice(0, HALF, 1).permute((1, 0)), O, use_acc=False, is_async=True)
        O = warpgroup_mma(L_1, read.slice(HALF, HALF, 1).permute((1, 0)), O, is_async=True)
        if F16:
            O, L_0, L_1 = warpgroup_mma_wait(0, [O, L_0, L_1])
            O = O * up * inverse(power)
            S_0 = S_0 * total.slice(0, HALF).load(channel)[None, :]
            S_1 = S_1 * total.slice(HALF, HALF).load(channel)[None, :]
        O = warpgroup_mma(y_t, A, O, is_async=True)
        S_0 = warpgroup_mma(y_t, write.slice(0, HALF, 1), S_0, is_async=True)
        S_1 = warpgroup_mma(y_t, write.slice(HALF, HALF, 1), S_1, is_async=True)
        if EVERY > 0 and not F16:
            if t % EVERY == 0:
                at = state_row + t // EVERY * (H * K)
                kept(X_0, state_tiles, state_s, at, vb * BV)
                kept(X_1, state_tiles, state_s, at + HALF, vb * BV)
        if F16:
            O, S_0, S_1 = warpgroup_mma_wait(0, [O, S_0, S_1])
            O *= power * unit
        else:
            O, L_0, L_1, S_0, S_1 = warpgroup_mma_wait(0, [O, L_0, L_1, S_0, S_1])
        O = O.to(output.dtype.element_ty)
        tma.store_wait(0)
        meet()
        expect(tiles, bars, c + STAGES, c + STAGES < chunks)
        total_s.index((c + 1) & 1).store(coming)
        if output.dtype.element_ty == kind:
            out_s.permute((1, 0)).store(O)
        fence_async_shared()
        meet()
        load_chunk(tiles, rings, bars, place, c + STAGES, ADJOINT)
        if output.dtype.element_ty == kind and t + C <= tokens:
            async_store(output_tiles, [place[0] + t, place[2]], out_s)
        else:
            store_rows(output, O, t, tokens, H.to(gl.int64) * V, out_mma)
    if FINAL:
        if F16:
            S_0 *= of_S
            S_1 *= of_S
        last += (owner * H + head) * (K * V) + (vb * BV + dv)[:, None] + dk[None, :] * V
        store_halves(S_0, S_1, last, V)
    tma.store_wait(0)
    invalidate(bars)
