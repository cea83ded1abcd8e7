"""The chunkwise forward kernel for decays per channel on Hopper, in Gluon: any decay at the same speed.

A chunk of 64 tokens is split into halves, the halves into halves, and so on: six levels of blocks of L = 32, 16, ... 1 tokens. One level
splits each pair of tokens s < t: s is in the first half of a block of 2 L tokens, t in the second. With w the decay of a token,

    X_L = q_t o w_{m+1} ... w_t   for t in the second half of a block, where m is the block's middle  ("previous": up to t - 1)
        = k_s o w_{s+1} ... w_m   for s in the first half
    A   = X_L X_L^T  for the pairs that L splits; on the diagonal q . k, or q . (u o k)
    O   = scale (A V + (q o w_1 ... w_t) S)               S' = (w_1 ... w_64) o S + (k o w_{s+1} ... w_64)^T V

All factors are at most 1, so every decay is supported. A program's warps are specialized:

- ``prepare``: loads decays one chunk ahead into registers, constant ones once. Each thread has 16 tokens of two channels, so factors of
  levels up to 8 are cumulative products in its registers. It writes X_1, X_2, ... X_32 into a ring of tiles, then q and k with the
  factors of the state.
- ``walk``, 4 warps: computes A from X X^T level by level, then the products with V and the state, which stays in registers.

Tiles of q, k and v are in a ring buffer of STAGES, which the tensor memory accelerator (TMA) fills.

float16: A and S have no bound. S is multiplied by a power of two, and each row of A by one of its own, so no later token changes a row of
O. O is multiplied by the inverses and by ``scale`` in float32.
float32: ``walk_in_parts`` in place of ``walk``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ....gpu.hopper_tiles import let_next_begin, meet, sequence_with_pieces
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import slot_of, tokens_of
from ..heads import MEDIUM, SMALL
from .channel_state import walk
from .channel_state_float32 import walk_in_parts
from .channel_tiles import GROUPS, prepare
from .dyadic import C


@gluon.jit(do_not_specialize=["N", "T", "L", "H"])
def penstock_channel_fwd_sm90(
    q_tiles, k_tiles, v_tiles, o_tiles, g_tiles, g, u, initial_state, output, final_state, chunk_states, cu_seqlens, slots,
    scale, N, T, L, H,
    g_b, g_t, g_h, g_k, u_h, u_k, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, SEGMENTS: gl.constexpr, PREVIOUS: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr,
    EVERY: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr,
    REGISTERS: gl.constexpr, TILED: gl.constexpr, STATIC: gl.constexpr, PIECE: gl.constexpr, ROWS_GIVEN: gl.constexpr, NARROW: gl.constexpr,
    BLOCKS: gl.constexpr, PARTS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """S_t = exp(g_t) o S_{t-1} + k_t^T v_t, o_t = scale q_t S_t; PREVIOUS: o_t = scale q_t (S_{t-1} + u o k_t^T v_t).

    Reads q, k [B,T,H,K] and v [B,T,H,V] as TMA tiles, g [B,T,H,K], u [H,K] and the initial state [N,H,K,V] by strides. Writes output
    [B,T,H,V] and final_state [N,H,K,V]. Program (sequence or segment, head, block of V): chunk by chunk. ``prepare`` has WARPS warps, with
    REGISTERS registers per thread.

    PARTS: of float32 operands, see ``parts``; else 0.

    EARLY, not of float32: this launch may begin while the one ahead runs, which computes the initial states of segments.

    BLOCKS > 1: heads of BLOCKS K key channels. Each of the H heads here is a block of K of them, with an output of its own, float32.

    PIECE > 0: updates in place, see ``in_place.py`` and the plain kernel. NARROW: the pool has 16 bits, to which states are rounded.
    """
    gl.static_assert(V % C == 0)
    if PARTS > 0:
        gl.static_assert(K == SMALL)
        gl.static_assert(q_tiles.dtype == gl.float32)
    else:
        gl.static_assert(K == SMALL or K == MEDIUM)
        gl.static_assert(q_tiles.dtype == gl.bfloat16 or q_tiles.dtype == gl.float16)
    HALF: gl.constexpr = q_tiles.dtype == gl.float16
    NV: gl.constexpr = V // C
    pid = gl.program_id(0)
    if PIECE > 0:
        pid = let_next_begin(pid)
    vb = pid % NV
    slot = pid // NV // H
    h = pid // NV % H
    if PIECE > 0 and PACKED:
        slot = sequence_with_pieces(slot, cu_seqlens, N, PIECE)
        if slot == N:
            return
    n, b, row, _, begin, done, tokens = tokens_of(slot, cu_seqlens, N, T, L, SEGMENTS, PACKED, False)
    head = h.to(gl.int64)
    owner = slot.to(gl.int64)
    f_k = V
    f_v = 1
    last = final_state + (owner * H + head) * (K * V) + vb * C
    if PIECE > 0:
        tokens = tokens // PIECE * PIECE
        if ROWS_GIVEN:
            owner = gl.load(slots + n).to(gl.int64)
        if tokens == 0 or owner < 0:
            return
    chunks = (gl.maximum(tokens, 0) + (C - 1)) // C
    whole = head // BLOCKS
    block = head % BLOCKS * K
    first = initial_state + owner * s_n + whole * s_h + block * s_k + vb * C * s_v
    if PIECE > 0:
        last = first
        f_k = s_k
        f_v = s_v
    kept = chunk_states
    if EVERY > 0:
        kept += (slot_of(n, begin, done, T, EVERY, PACKED).to(gl.int64) * H + head) * (K * V) + vb * C
    output += ((b * T + row) * H + head) * V + vb * C
    g += b * g_b + row * g_t + whole * g_h + block * g_k
    u += whole * u_h + block * u_k
    row = (b * T + row).to(gl.int32)

    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_s = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, C, K], q_tiles.layout)
    k_s = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, C, K], k_tiles.layout)
    v_s = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, C, C], v_tiles.layout)
    if PARTS > 0:
        half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        x_s = gl.allocate_shared_memory(gl.float16, [SLOTS * PARTS, C, K], half)
        S_s = gl.allocate_shared_memory(gl.float16, [PARTS, K, C], half)
        w_s = gl.allocate_shared_memory(gl.float16, [PARTS, C, C], half)
        column_s = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        own_s = gl.allocate_shared_memory(gl.float32, [STAGES, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        ups_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        u_s = own_s
    else:
        x_s = gl.allocate_shared_memory(q_tiles.dtype, [SLOTS, C, K], q_tiles.layout)
        S_s = gl.allocate_shared_memory(q_tiles.dtype, [1, K, C], v_tiles.layout)
        u_s = gl.allocate_shared_memory(q_tiles.dtype, [K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        own_s = u_s
        ups_s = u_s
    part_s = gl.allocate_shared_memory(gl.float32, [2, GROUPS, K], plain2)
    total_s = gl.allocate_shared_memory(gl.float32, [STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    loaded, full, empty, ready = barriers(STAGES, 1), barriers(SLOTS // 2, 1), barriers(SLOTS // 2, 1), barriers(STAGES, 1)
    ring = (q_s, k_s, v_s)
    g_s = part_s
    arrived = loaded
    if TILED:
        g_s = gl.allocate_shared_memory(g_tiles.dtype, [C, K], g_tiles.layout)
        arrived = barriers(1, 1)
    fence_async_shared()
    meet()
    sides = (part_s, total_s, g_s, own_s, ups_s)
    bars = (loaded, full, empty, ready, arrived.index(0))
    key_column = h * K
    value_column = h // BLOCKS * V + vb * C
    tiles = (q_tiles, k_tiles, g_tiles, v_tiles, o_tiles)
    place = (row, key_column, value_column, chunks, tokens)
    memory = (first, last, kept, output)
    steps = (s_k, s_v, f_k, f_v)
    bonus = (u, u_k, u_s)
    if PARTS > 0:
        gl.warp_specialize(
            [(walk_in_parts, (tiles, ring, (S_s, w_s, column_s), x_s, sides, bars, place, memory, steps, scale, H,
                              K, V, INITIAL, FINAL, EVERY, STAGES, NARROW, BLOCKS, PARTS)),
             (prepare, (g, tiles, ring, x_s, sides, bars, place, bonus, scale, g_t, g_k,
                        K, TILED, STATIC, PREVIOUS, STAGES, HALF, PARTS))],
            [WARPS],
            [REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(walk, (tiles, ring, S_s, x_s, sides, bars, place, memory, steps, bonus, scale, H,
                     K, V, PREVIOUS, INITIAL, FINAL, EVERY, STAGES, NARROW, BLOCKS, HALF, EARLY)),
             (prepare, (g, tiles, ring, x_s, sides, bars, place, bonus, scale, g_t, g_k,
                        K, TILED, STATIC, PREVIOUS, STAGES, HALF, PARTS))],
            [WARPS],
            [REGISTERS],
        )  # fmt: skip
    invalidate((loaded, full, empty, ready))
    if TILED:
        invalidate((arrived,))
