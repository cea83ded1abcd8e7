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

from ....gpu.hopper_tiles import async_load, async_store, inverse, meet, reinterpret, unknown, zeroed_behind
from ....gpu.tiles import powers_of_two, slot_of, tokens_of
from ..heads import LARGE

C = gl.constexpr(64)  # tokens in a chunk
STAGES = gl.constexpr(2)


@gluon.jit
def expect(tiles, bars, c, chunks):
    """Announce the tiles of step c. Each tensor has barriers of its own: between copies with the same one, Triton has all warps meet."""
    for n in gl.static_range(4):
        mbarrier.expect(bars[n].index(c % STAGES), tiles[n].block_type.nbytes, pred=c < chunks)


@gluon.jit
def ask(tiles, parts, bars, place, c, ADJOINT: gl.constexpr):
    """Start the loads of step c: the operand of reads, the weights, y, and the operand of updates."""
    row, key_column, value_column, slot, H, chunks = place
    chunk = c
    if ADJOINT:
        chunk = chunks - 1 - c
    s = c % STAGES
    line = row + chunk * C
    at = ([line, key_column], [(slot + chunk * H) * C, 0], [line, value_column], [line, key_column])
    for n in gl.static_range(4):
        async_load(tiles[n], at[n], bars[n].index(s), parts[n].index(s), pred=c < chunks)


@gluon.jit
def kept(x, tiles, tile, row, column):
    """Store a half of the state x [BV,K / 2] as a tile [K / 2,BV] in memory."""
    tma.store_wait(0)
    meet()
    tile.permute((1, 0)).store(x)
    fence_async_shared()
    meet()
    async_store(tiles, [row, column], tile)


@gluon.jit(do_not_specialize=["N", "T", "L", "H"])
def penstock_channel_walk_sm90(
    read_tiles, weight_tiles, y_tiles, write_tiles, output_tiles, state_tiles, totals, powers, first, output, last, cu_seqlens,
    unit, of_S, per_S, N, T, L, H, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, SEGMENTS: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr,
    EVERY: gl.constexpr, ADJOINT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Program (sequence or segment, head, block of V). TMA tiles: [C, K] of tokens [B T, H K], [C, C] of ``weights`` [slots H C, C],
    [C, BV] of tokens [B T, H V], and [K / 2, BV] of states [slots H K, V].

    EVERY: the state before every EVERY tokens (ADJOINT: its gradient behind them) is stored in ``state_tiles``; 0: none is. float16: there
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
    left: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    channel: gl.constexpr = gl.SliceLayout(0, mma)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    pid = gl.program_id(0)
    vb = pid % NV
    slot = pid // NV // H
    h = pid // NV % H
    n, b, row, _, begin, behind, tokens = tokens_of(slot, cu_seqlens, N, T, L, SEGMENTS, PACKED, False)
    head = h.to(gl.int64)
    owner = slot.to(gl.int64)
    chunks = (gl.maximum(tokens, 0) + (C - 1)) // C
    dk = gl.arange(0, HALF, channel)
    dv = gl.arange(0, BV, gl.SliceLayout(1, mma))
    S_0 = gl.zeros([BV, HALF], gl.float32, mma)
    S_1 = S_0
    if INITIAL:
        first += owner * s_n + head * s_h + (vb * BV + dv)[:, None].to(gl.int64) * s_v + dk[None, :].to(gl.int64) * s_k
        S_0 = gl.load(first).to(gl.float32)
        S_1 = gl.load(first + HALF * s_k).to(gl.float32)
        if F16:
            S_0 *= per_S
            S_1 *= per_S

    read_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    write_s = gl.allocate_shared_memory(kind, [STAGES, C, K], half)
    weight_s = gl.allocate_shared_memory(kind, [STAGES, C, C], half)
    y_s = gl.allocate_shared_memory(kind, [STAGES, C, BV], half)
    state_s = gl.allocate_shared_memory(kind, [HALF if EVERY > 0 and not F16 else C, BV], half)
    out_s = reinterpret(state_s, kind, [C, BV], half)
    total_s = gl.allocate_shared_memory(gl.float32, [2, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    read_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weight_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    y_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    write_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bars = (read_bars, weight_bars, y_bars, write_bars)
    for m in gl.static_range(STAGES):
        for tensor in gl.static_range(4):
            mbarrier.init(bars[tensor].index(m), count=1)
    fence_async_shared()
    meet()
    first_chunk = slot_of(n, begin, behind, T, C, PACKED).to(gl.int64) * H + h
    place = ((b * T + row).to(gl.int32), h * K, h * V + vb * BV, first_chunk.to(gl.int32), H, chunks)
    tiles = (read_tiles, weight_tiles, y_tiles, write_tiles)
    parts = (read_s, weight_s, y_s, write_s)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks)
    meet()
    for m in gl.static_range(STAGES):
        ask(tiles, parts, bars, place, chunks * 0 + m, ADJOINT)
    if EVERY > 0:
        state_row = ((slot_of(n, begin, behind, T, EVERY, PACKED).to(gl.int64) * H + h) * K).to(gl.int32)
    totals += first_chunk * K + gl.arange(0, K, line)
    step = H.to(gl.int64) * K
    output += ((b * T + row) * H + head) * V + vb * BV
    start = chunks * 0
    if ADJOINT:
        start = chunks - 1
    total_s.index(0).store(gl.load(totals + start * step, mask=gl.arange(0, K, line) * 0 < chunks, other=0.0))
    for c in range(chunks):
        chunk = c
        later = c + 1
        if ADJOINT:
            chunk = chunks - 1 - c
            later = chunks - 2 - c
        s = c % STAGES
        t = chunk * C
        coming = gl.load(totals + later * step, mask=c + 1 + gl.arange(0, K, line) * 0 < chunks, other=0.0)
        phase = (c // STAGES) & 1
        read = read_s.index(s)
        write = write_s.index(s)
        y = y_s.index(s)
        y_t = y.permute((1, 0))
        A = weight_s.index(s)
        if not ADJOINT:
            A = A.permute((1, 0))
        if F16:
            if EVERY > 0:
                if t % EVERY == 0:
                    at = (state_row + t // EVERY * (H * K)).to(gl.int64) * V + vb * BV
                    at = state_tiles + at + dv[:, None] + (dk[None, :] + unknown(t * 0)) * V
                    gl.store(at, S_0 * of_S)
                    gl.store(at + HALF * V, S_1 * of_S)
            powers_at = powers + (first_chunk + chunk * H) * C
            if ADJOINT:  # one for all rows
                power = gl.load(powers_at)
            else:
                power = gl.load(powers_at + gl.arange(0, C, gl.SliceLayout(0, out_mma)))[None, :]
            down, up = powers_of_two(gl.maximum(gl.max(gl.abs(S_0), 1), gl.max(gl.abs(S_1), 1)))
            X_0 = (S_0 * down[:, None]).to(kind)
            X_1 = (S_1 * down[:, None]).to(kind)
            up = gl.convert_layout(up, gl.SliceLayout(1, out_mma), assert_trivial=True)[:, None]
        else:
            X_0 = S_0.to(kind)
            X_1 = S_1.to(kind)
        L_0 = gl.convert_layout(X_0, left, assert_trivial=True)
        L_1 = gl.convert_layout(X_1, left, assert_trivial=True)
        total = total_s.index(c & 1)
        if not F16:
            S_0 = S_0 * total.slice(0, HALF).load(channel)[None, :]  # before the products: ptxas serialises all if other work is between
            S_1 = S_1 * total.slice(HALF, HALF).load(channel)[None, :]
        mbarrier.wait(read_bars.index(s), phase)
        mbarrier.wait(weight_bars.index(s), phase)
        mbarrier.wait(y_bars.index(s), phase)
        mbarrier.wait(write_bars.index(s), phase)
        if t + C > tokens:
            zeroed_behind(y, tokens - t, rows)
            for quarter in gl.static_range(4):  # the whole tile would take 64 registers
                zeroed_behind(write.slice(quarter * (C // 4), C // 4), tokens - t - quarter * (C // 4), rows)
            fence_async_shared()
            meet()
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
        expect(tiles, bars, c + STAGES, chunks)
        total_s.index((c + 1) & 1).store(coming)
        if output.dtype.element_ty == kind:
            out_s.permute((1, 0)).store(O)
        fence_async_shared()
        meet()
        ask(tiles, parts, bars, place, c + STAGES, ADJOINT)
        if output.dtype.element_ty == kind and t + C <= tokens:
            async_store(output_tiles, [place[0] + t, place[2]], out_s)
        else:
            i = gl.arange(0, C, gl.SliceLayout(0, out_mma))[None, :]
            j = gl.arange(0, BV, gl.SliceLayout(1, out_mma))[:, None]
            gl.store(output + (t + i) * (H.to(gl.int64) * V) + j, O, mask=t + i < tokens)
    if FINAL:
        if F16:
            S_0 *= of_S
            S_1 *= of_S
        last += (owner * H + head) * (K * V) + (vb * BV + dv)[:, None] + dk[None, :] * V
        gl.store(last, S_0.to(last.dtype.element_ty))
        gl.store(last + HALF * V, S_1.to(last.dtype.element_ty))
    tma.store_wait(0)
