"""The chunkwise forward kernel for decays per channel on Hopper at K = 256, in Gluon: factors with one anchor per chunk and channel.

It replaces the first loop of ``chunk_forward`` (formula there) for bfloat16 products. A program processes the chunks of a span of
tokens with BLOCKS blocks of 64 value channels. Its warps are specialized:

- ``prepare``: loads decays one chunk ahead into registers. It replaces k in shared memory by k o 2^(M - G) and q by q o 2^(Gq - M). It
  also stores 2^M, 2^(G_L - M), the exponent of the latter and, with a bonus, the diagonal of A. It processes 128 channels at a time.
- ``walk``, 4 warps for each block: computes products, with a block of the state in registers. Outputs are stored through shared memory.

Tiles of q, k and v are in a ring buffer of STAGES, which the tensor memory accelerator fills. Barrier ``loaded`` completes when a slot is
filled, ``prepared`` when its factors are applied, ``done`` when all blocks have read it and it can be filled again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...gpu.hopper_tiles import exp2, meet, others, plus, zeroed_behind
from ...gpu.tiles import LOG2E, slot_of, span_of
from .tiles import FLOOR, SUITS

C = gl.constexpr(64)  # tokens in a chunk, and value channels in a block: a tile row of 128 bytes, and the rows of one product


@gluon.jit
def decays_at(g, g_t, g_k, left, K: gl.constexpr, layout: gl.constexpr):
    """Load a chunk's decays [64,K] in their dtype, 0 behind the last token.

    The opaque zero keeps the compiler from hoisting the rows' offsets out of the loop over chunks, where they take registers.
    """
    zero = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [left * 0], dtype=gl.int32, is_pure=False, pack=1)
    i = gl.arange(0, C, gl.SliceLayout(1, layout)) + zero
    j = gl.arange(0, K, gl.SliceLayout(0, layout))
    return gl.load(g + (i[:, None] * g_t + j[None, :] * g_k), mask=(i < left)[:, None], other=0.0)


@gluon.jit
def fill(q_tiles, k_tiles, v_tiles, ring, loaded, c, chunks, row, key_column, value_column, BLOCKS: gl.constexpr, STAGES: gl.constexpr):
    """Start the loads of chunk c into its slot, if the chunk exists."""
    q_s, k_s, v_s = ring
    s = c % STAGES
    there = c < chunks
    bar = loaded.index(s)
    mbarrier.expect(bar, q_tiles.block_type.nbytes + k_tiles.block_type.nbytes + BLOCKS * v_tiles.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(q_tiles, [row + c * C, key_column], bar, q_s.index(s), pred=there)
    tma.async_copy_global_to_shared(k_tiles, [row + c * C, key_column], bar, k_s.index(s), pred=there)
    for block in gl.static_range(BLOCKS):
        tma.async_copy_global_to_shared(v_tiles, [row + c * C, value_column + block * C], bar, v_s.index(s * BLOCKS + block), pred=there)


@gluon.jit
def factors(
    d, q, k, part, before, behind, least,
    K: gl.constexpr, PREVIOUS: gl.constexpr, layout: gl.constexpr, grouped: gl.constexpr, GROUPS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Multiply q and k by the factors of decays d [64,K]. A thread sums the tokens of a group; a chunk is GROUPS groups."""
    R: gl.constexpr = C // GROUPS
    across: gl.constexpr = gl.SliceLayout(1, grouped)  # [GROUPS,K]
    x = gl.convert_layout(gl.reshape(d, [GROUPS, R, K]), grouped, assert_trivial=True)
    part.store(gl.sum(x, 1))
    P = gl.associative_scan(x, 1, plus)
    total, earlier = others(part, across, False)
    total = gl.maximum(total * LOG2E, FLOOR)
    whole = gl.floor(0.5 * total + 0.5)  # 2^whole is a power of two: multiplying by it does not round in bfloat16
    M = total - whole
    before.store(gl.reshape(exp2(M), [K]))
    behind.store(gl.reshape(exp2(whole), [K]))
    ints = gl.reshape(whole.to(gl.int32), [K // (32 * COLUMNS), 32 * COLUMNS]) if COLUMNS == 2 else gl.reshape(whole.to(gl.int32), [1, K])
    least.store(gl.min(ints, 1))
    shift = earlier * LOG2E - M
    G = gl.fma(P, gl.full([GROUPS, R, K], LOG2E, gl.float32, grouped), gl.broadcast(gl.expand_dims(shift, 1), P)[0])
    Kt = k.load(layout).to(gl.float32)
    k.store((Kt * exp2(-gl.convert_layout(gl.reshape(G, [C, K]), layout, assert_trivial=True))).to(gl.bfloat16))
    Q = q.load(layout).to(gl.float32)
    if PREVIOUS:
        G = gl.fma(x, gl.full([GROUPS, R, K], -LOG2E, gl.float32, grouped), G)
    q.store((Q * exp2(gl.convert_layout(gl.reshape(G, [C, K]), layout, assert_trivial=True))).to(gl.bfloat16))


@gluon.jit
def prepare(
    g, u, ring, sides, bars, chunks, tokens, g_t, g_k, u_k,
    K: gl.constexpr, PREVIOUS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """The warps that multiply q and k by their factors and zero the padding. A thread has COLUMNS channels of a group of tokens."""
    q_s, k_s, v_s = ring
    part_s, before_s, behind_s, least_s, own_s = sides
    loaded, prepared, _ = bars
    W: gl.constexpr = part_s.type.shape[2]  # channels that all threads hold at a time
    LEAST: gl.constexpr = least_s.type.shape[1] * W // K
    WARPS: gl.constexpr = gl.num_warps()
    DOWN: gl.constexpr = COLUMNS // 2  # lanes of a warp along the tokens
    GROUPS: gl.constexpr = 4 * DOWN
    layout: gl.constexpr = gl.BlockedLayout([C // GROUPS, COLUMNS], [DOWN, 32 // DOWN], [4, WARPS // 4], [1, 0])
    grouped: gl.constexpr = gl.BlockedLayout([1, C // GROUPS, COLUMNS], [DOWN, 1, 32 // DOWN], [4, 1, WARPS // 4], [2, 1, 0])
    j = gl.arange(0, W, gl.SliceLayout(0, layout))
    bonus = j.to(gl.float32)
    if PREVIOUS and K == W:
        bonus = gl.load(u + j * u_k).to(gl.float32)
    d = decays_at(g, g_t, g_k, tokens, W, layout)
    for c in range(chunks):
        s = c % STAGES
        left = tokens - c * C
        following = g + (g_t + left * 0).to(gl.int64) * C
        for first in gl.static_range(0, K, W):
            q = q_s.index(s) if K == W else q_s.index(s).slice(first, W, 1)
            k = k_s.index(s) if K == W else k_s.index(s).slice(first, W, 1)
            ahead = following if first + W == K else g + (first + W) * g_k
            there = left - C if first + W == K else left
            if not PREVIOUS:
                d_ahead = decays_at(ahead, g_t, g_k, there, W, layout)
            if first == 0:
                mbarrier.wait(loaded.index(s), (c // STAGES) & 1)
            if PREVIOUS:
                if K > W:
                    bonus = gl.load(u + (first + j) * u_k).to(gl.float32)
                own = q.load(layout).to(gl.float32) * bonus[None, :] * k.load(layout).to(gl.float32)
                own_s.index(s * (K // W) + first // W).store(gl.sum(own, 1))
            factors(
                d.to(gl.float32), q, k, part_s.index((c * (K // W) + first // W) & 1), before_s.index(s).slice(first, W),
                behind_s.index(s).slice(first, W), least_s.index(s).slice(first // W * LEAST, LEAST),
                W, PREVIOUS, layout, grouped, GROUPS, COLUMNS,
            )  # fmt: skip
            if PREVIOUS:  # not before: decays and their sums take all registers
                d_ahead = decays_at(ahead, g_t, g_k, there, W, layout)
            if left < C:
                zeroed_behind(k, left, layout)
            d = d_ahead
        if left < C:
            for block in gl.static_range(BLOCKS):
                zeroed_behind(v_s.index(s * BLOCKS + block), left, layout)
        fence_async_shared()
        meet()
        mbarrier.arrive(prepared.index(s), count=1)
        g = following


@gluon.jit
def walk(
    tiles, sides, bars, place, memory, steps, scale, H,
    K: gl.constexpr, V: gl.constexpr, PREVIOUS: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, EVERY: gl.constexpr,
    BLOCKS: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """The 4 warps of block BLOCK of the program's value channels. They hold the state and compute the products."""
    q_tiles, k_tiles, v_tiles, o_tiles, ring, S_all, o_all = tiles
    q_s, k_s, v_s = ring
    row, key_column, value_column, chunks, tokens = place
    first, left_behind, last, kept, output, resume = memory
    s_k, s_v, l_k, l_v = steps
    _, before_s, behind_s, least_s, own_s = sides
    loaded, prepared, done = bars
    PARTS: gl.constexpr = own_s.type.shape[0] // STAGES
    S_s = S_all.index(BLOCK)
    o_s = o_all.index(BLOCK)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    channel: gl.constexpr = gl.SliceLayout(1, mma)
    copied: gl.constexpr = gl.BlockedLayout([least_s.type.shape[1]], [32], [4], [0])
    i = gl.arange(0, C, gl.SliceLayout(1, mma))
    j = gl.arange(0, C, gl.SliceLayout(0, mma))
    dk = gl.arange(0, K, channel)
    S = gl.zeros([K, C], gl.float32, mma)
    if INITIAL:
        S = gl.load(first + dk[:, None] * s_k + (BLOCK * C + j)[None, :] * s_v).to(gl.float32)
    suited = tokens
    for c in range(chunks):
        s = c % STAGES
        phase = (c // STAGES) & 1
        t = c * C
        qt = q_s.index(s)
        kt = k_s.index(s)
        v = v_s.index(s * BLOCKS + BLOCK)
        if EVERY > 0:
            if t % EVERY == 0:
                wide: gl.constexpr = gl.DistributedLinearLayout(  # the layout of S, but with 16 contiguous bytes of a row
                    [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]] + ([[64, 0]] if K >= 128 else []) + ([[128, 0]] if K == 256 else []),
                    [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
                    [[16, 0], [32, 0]], [], [K, C],
                )  # fmt: skip
                wk = gl.arange(0, K, gl.SliceLayout(1, wide))
                wv = gl.arange(0, C, gl.SliceLayout(0, wide))
                slot = kept + (t // EVERY) * (H.to(gl.int64) * (K * V)) + BLOCK * C
                gl.store(slot + (wk[:, None] * V + wv[None, :]), gl.convert_layout(S.to(gl.bfloat16), wide))
        mbarrier.wait(loaded.index(s), phase)
        mbarrier.wait(prepared.index(s), phase)
        worst = gl.min(least_s.index(s).load(copied), 0)
        if (worst < -SUITS / 2) & (suited >= tokens):
            gl.store(left_behind + dk[:, None] * l_k + (BLOCK * C + j)[None, :] * l_v, S)
            suited = t
        A = warpgroup_mma(qt, kt.permute((1, 0)), gl.zeros([C, C], gl.float32, mma), use_acc=False)
        if PREVIOUS:
            own = own_s.index(s * PARTS).load(gl.SliceLayout(1, mma))
            for part in gl.static_range(1, PARTS):
                own += own_s.index(s * PARTS + part).load(gl.SliceLayout(1, mma))
            A = gl.where(i[:, None] > j[None, :], A, gl.where(i[:, None] == j[None, :], own[:, None], 0.0))
        else:
            A = gl.where(i[:, None] >= j[None, :], A, 0.0)
        P = gl.convert_layout(A.to(gl.bfloat16), operand)
        S = S * before_s.index(s).load(channel)[:, None]
        S_s.store(S.to(gl.bfloat16))
        behind = behind_s.index(s).load(channel)
        fence_async_shared()
        meet()
        O = warpgroup_mma(qt, S_s, gl.zeros([C, C], gl.float32, mma), use_acc=False, is_async=True)
        O = warpgroup_mma(P, v, O, is_async=True)
        S = warpgroup_mma(kt.permute((1, 0)), v, S, is_async=True)
        O, P, S = warpgroup_mma_wait(0, [O, P, S])
        S = S * behind[:, None]
        tma.store_wait(0)
        meet()
        if BLOCK > 0:
            mbarrier.arrive(done.index(s), count=1)
        O = (O * scale).to(gl.bfloat16)
        if t + C <= tokens:
            o_s.store(O)
            fence_async_shared()
            meet()
            tma.async_copy_shared_to_global(o_tiles, [row + t, value_column + BLOCK * C], o_s)
        else:
            gl.store(output + (t + i)[:, None] * (H.to(gl.int64) * V) + (BLOCK * C + j)[None, :], O, mask=(t + i < tokens)[:, None])
        if BLOCK == 0:
            if c + STAGES < chunks:
                if BLOCKS > 1:
                    mbarrier.wait(done.index(s), phase)
                fill(q_tiles, k_tiles, v_tiles, ring, loaded, c + STAGES, chunks, row, key_column, value_column, BLOCKS, STAGES)
    gl.store(resume + BLOCK, suited)
    if FINAL:
        if suited >= tokens:
            gl.store(last + dk[:, None] * V + (BLOCK * C + j)[None, :], S)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "T", "L", "H"])
def penstock_chunk_fwd_hopper_anchored(
    q_tiles, k_tiles, v_tiles, o_tiles, g, u, initial_state, output, final_state, chunk_states, resume, cu_seqlens, scale, N, T, L, H,
    g_b, g_t, g_h, g_k, u_h, u_k, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, SEGMENTS: gl.constexpr, PREVIOUS: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr,
    EVERY: gl.constexpr, PACKED: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, COLUMNS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Program (sequence or segment, head, BLOCKS blocks of V). ``resume`` has an element per block: a program of the next launch.

    ``prepare`` has WARPS warps, with REGISTERS registers per thread.
    """
    NV: gl.constexpr = V // (C * BLOCKS)
    pid = gl.program_id(0)
    vb = pid % NV
    slot = pid // NV // H
    h = pid // NV % H
    if SEGMENTS:
        n, begin, end, behind = span_of(slot, cu_seqlens, N, T, L, PACKED)
        tokens = gl.minimum(end - begin - behind, L).to(gl.int32)
    else:
        n = slot
        begin = (slot * 0).to(gl.int64)
        end = begin + T
        if PACKED:
            begin = gl.load(cu_seqlens + n).to(gl.int64)
            end = gl.load(cu_seqlens + n + 1).to(gl.int64)
        behind = begin * 0
        tokens = (end - begin).to(gl.int32)
    row = begin + behind
    b = n.to(gl.int64)
    if PACKED:
        b = b * 0
    chunks = (gl.maximum(tokens, 0) + (C - 1)) // C
    head = h.to(gl.int64)
    state = (slot.to(gl.int64) * H + head) * (K * V) + vb * (C * BLOCKS)
    first = initial_state + slot.to(gl.int64) * s_n + head * s_h + vb * (C * BLOCKS) * s_v
    last = final_state + state
    kept = chunk_states
    if EVERY > 0:
        kept += (slot_of(n, begin, behind, T, EVERY, PACKED).to(gl.int64) * H + head) * (K * V) + vb * (C * BLOCKS)
    output += ((b * T + row) * H + head) * V + vb * (C * BLOCKS)
    g += b * g_b + row * g_t + head * g_h
    u += head * u_h
    row = (b * T + row).to(gl.int32)

    q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], q_tiles.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], k_tiles.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES * BLOCKS, C, C], v_tiles.layout)
    S_s = gl.allocate_shared_memory(gl.bfloat16, [BLOCKS, K, C], v_tiles.layout)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [BLOCKS, C, C], o_tiles.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    W: gl.constexpr = min(K, 128)
    part_s = gl.allocate_shared_memory(gl.float32, [2, 2 * COLUMNS, W], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    before_s = gl.allocate_shared_memory(gl.float32, [STAGES, K], flat)
    behind_s = gl.allocate_shared_memory(gl.float32, [STAGES, K], flat)
    least_s = gl.allocate_shared_memory(gl.int32, [STAGES, K // (32 * COLUMNS) if COLUMNS == 2 else K // W], flat)
    own_s = gl.allocate_shared_memory(gl.float32, [STAGES * (K // W), C], flat)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    prepared = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = prepared
    if BLOCKS > 1:  # only if used: unused shared memory may be aliased, and a valid barrier must not be overwritten
        done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(loaded.index(s), count=1)
        mbarrier.init(prepared.index(s), count=1)
        if BLOCKS > 1:
            mbarrier.init(done.index(s), count=1)
    fence_async_shared()
    meet()

    ring = (q_s, k_s, v_s)
    sides = (part_s, before_s, behind_s, least_s, own_s)
    bars = (loaded, prepared, done)
    key_column = h * K
    value_column = h * V + vb * (C * BLOCKS)
    for c in gl.static_range(STAGES):
        fill(q_tiles, k_tiles, v_tiles, ring, loaded, c, chunks, row, key_column, value_column, BLOCKS, STAGES)
    left_behind = first if SEGMENTS else last
    l_k = s_k if SEGMENTS else V
    l_v = s_v if SEGMENTS else 1
    tiles = (q_tiles, k_tiles, v_tiles, o_tiles, ring, S_s, o_s)
    place = (row, key_column, value_column, chunks, tokens)
    memory = (first, left_behind, last, kept, output, resume + pid * BLOCKS)
    steps = (s_k, s_v, l_k, l_v)
    if BLOCKS == 2:
        gl.warp_specialize(
            [
                (walk, (tiles, sides, bars, place, memory, steps, scale, H, K, V, PREVIOUS, INITIAL, FINAL, EVERY, BLOCKS, STAGES, 0)),
                (prepare, (g, u, ring, sides, bars, chunks, tokens, g_t, g_k, u_k, K, PREVIOUS, BLOCKS, STAGES, COLUMNS)),
                (walk, (tiles, sides, bars, place, memory, steps, scale, H, K, V, PREVIOUS, INITIAL, FINAL, EVERY, BLOCKS, STAGES, 1)),
            ],
            [WARPS, 4],
            [REGISTERS, 256 - REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (walk, (tiles, sides, bars, place, memory, steps, scale, H, K, V, PREVIOUS, INITIAL, FINAL, EVERY, BLOCKS, STAGES, 0)),
                (prepare, (g, u, ring, sides, bars, chunks, tokens, g_t, g_k, u_k, K, PREVIOUS, BLOCKS, STAGES, COLUMNS)),
            ],
            [WARPS],
            [REGISTERS],
        )
