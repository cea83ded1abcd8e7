"""RWKV-7's chunks as steps of states on Hopper with float32 inputs, in Gluon: ``anchored_steps.py`` with operands in three bfloat16 parts.

Three parts have 24 bits and the range of float32. TF32 tiles cannot be transposed. Of the formulas in ``anchored_steps.py``, two are taken
as in ``anchored_steps_float16.py``:

    W = total o (Xk^T V) + Bt^T X        Bt = (T^T Xb) o total

A product is six. M and Q are stored in three parts for products with states, W, Y and T - I in float32. Shared memory has eight tiles of
24 KB, and Y of 16 KB: one program of four warps has a multiprocessor for itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_store, meet
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import chunk_of_slot
from .anchored import inverse_power, logarithms, power, sums_before, sums_in_two
from .anchored_inverse import inverse
from .anchored_steps import load_tiles, zero_tiles_from
from .inverse import blocks_on_diagonal, inverted_blocks, on_diagonal, store_blocks
from .layouts import GROUPS, ROWS, C
from .parts import (
    as_singles,
    finished,
    left_parts,
    load_parts,
    product_from_registers,
    product_of_parts,
    send_parts,
    store_over,
    store_parts,
    tiles_in_three,
    transposed,
)

TILES = gl.constexpr(8)
"""Xq, Xa, Xk, Xb, V, N, X and T."""


@gluon.jit
def store_factored(G, d, scale, given, tiles):
    """Xq, Xa, Xk, Xb and V in parts replace q, a, k, b and v. Returns exp2(G)."""
    wide: gl.constexpr = d.type.layout
    q_s, a_s, k_s, b_s, v_s, _, _, _ = tiles
    store_over(given.index(1).load(wide) * power(sums_before(G, d)), a_s)
    through = power(G)
    store_over(given.index(0).load(wide) * (through * scale), q_s)
    inverted = inverse_power(G)
    store_over(given.index(2).load(wide) * inverted, k_s)
    store_over(given.index(3).load(wide) * inverted, b_s)
    store_over(given.index(4).load(wide), v_s)
    return through


@gluon.jit(do_not_specialize=["N", "T", "H"])
def penstock_rwkv7_steps_float32_sm90(
    q_tiles, a_tiles, k_tiles, b_tiles, v_tiles, step_tiles, read_tiles, write_tiles, more_tiles, g, total, cu_seqlens, scale, N, T, H,
    g_b, g_t, g_h, g_k, K: gl.constexpr, PACKED: gl.constexpr, SOLVED: gl.constexpr, RAW: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """Q = Xq + Ap Xa, Y = Ap X + Aq_k V, M = Bt^T Xa, W = Bt^T X + Kr^T V with X = Aa_k V, of every chunk.

    TMA tiles: q, k, v, a, b [C,K] of [B T,H K]: V is K; the parts of M and Q [C,K] of [slots,H,3 C,K]; W and Y, with SOLVED T - I in place
    of Y, [C,K] of [slots,H,C,K] in float32. Reads g [B,T,H,K] by strides, with RAW raw gates. Writes also exp2 of the chunk's sum of g
    (``total``) [slots,H,K]. Program (slot of a chunk, head). Rows of tokens that do not exist are 0. PIECE: only chunks of C tokens are
    processed.
    """
    gl.static_assert(q_tiles.dtype == gl.float32)
    gl.static_assert(K == C)
    gl.static_assert(gl.num_warps() == GROUPS)
    kind: gl.constexpr = step_tiles.dtype
    single: gl.constexpr = q_tiles.layout
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot = gl.program_id(0) // H
    h = gl.program_id(0) % H
    batch, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    if PIECE > 0:
        if left < C:
            return
    row = (batch * T + begin).to(gl.int32)
    place = slot.to(gl.int64) * H + h
    memory = gl.allocate_shared_memory(kind, [3 * TILES, C, C], step_tiles.layout)
    given = as_singles(memory, single)
    n_s = gl.allocate_shared_memory(gl.float32, [ROWS * ROWS, GROUPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    d_s = gl.allocate_shared_memory(gl.float32, [ROWS, GROUPS * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    total_s = gl.allocate_shared_memory(gl.float32, [K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    more_s = given.index(3)  # T - I takes the place of Xb
    if not SOLVED:
        more_s = gl.allocate_shared_memory(gl.float32, [C, C], more_tiles.layout)
    bar = barriers(1, 1)
    fence_async_shared()
    meet()
    of_tokens = (given.index(0), given.index(1), given.index(2), given.index(3), given.index(4))
    load_tiles((q_tiles, a_tiles, k_tiles, b_tiles, v_tiles), of_tokens, bar.index(0), row, h * K)
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    g += batch * g_b + begin * g_t + h.to(gl.int64) * g_h + (i * g_t + j * g_k)
    total += place * K
    d = logarithms(g, (i < left) & (j < K), RAW)
    _, _, _, _, _, N_s, X_s, _ = tiles_in_three(memory, left * 0)
    G = sums_in_two(d, X_s[0], N_s, X_s[1])
    mbarrier.wait(bar.index(0), 0)
    zero_tiles_from(of_tokens, left, clean)
    through = store_factored(G, d, scale, given, tiles_in_three(memory, left * 0))
    gl.store(total + j + i * 0, through, mask=i == C - 1)
    fence_async_shared()
    meet()
    total_s.store(gl.load(total + gl.arange(0, K, gl.BlockedLayout([1], [32], [4], [0]))))

    _, a_s, k_s, b_s, v_s, N_s, X_s, _ = tiles_in_three(memory, left * 0)
    lower = warpgroup_mma_wait(0, [product_of_parts(a_s, transposed(b_s), wide)])
    lower = gl.where(i > j, lower, 0.0)
    store_parts(lower, N_s)
    store_blocks(blocks_on_diagonal(lower), n_s)
    late = warpgroup_mma_wait(0, [product_of_parts(a_s, transposed(k_s), wide)])
    store_parts(product_from_registers(gl.where(i > j, late, 0.0), v_s), X_s)
    fence_async_shared()
    meet()
    _, _, _, _, _, N_s, _, T_s = tiles_in_three(memory, left * 0)
    inverse(on_diagonal(inverted_blocks(n_s, d_s), wide), T_s, N_s)

    q_s, _, k_s, b_s, v_s, N_s, _, T_s = tiles_in_three(memory, left * 0)
    if not SOLVED:
        late = warpgroup_mma_wait(0, [product_of_parts(q_s, transposed(k_s), wide)])
        more_s.store(product_from_registers(gl.where(i >= j, late, 0.0), v_s))  # in registers, other values would spill
    Aq = product_of_parts(q_s, transposed(b_s), wide)
    B = product_of_parts(transposed(T_s), b_s, wide)
    Aq, B = finished((Aq, B), ())
    store_parts(B * total_s.load(gl.SliceLayout(0, wide))[None, :], N_s)
    ap = left_parts(product_from_registers(gl.where(i >= j, Aq, 0.0), T_s), kind, 3)
    fence_async_shared()
    meet()  # Bt is stored
    q_s, a_s, k_s, b_s, v_s, N_s, X_s, T_s = tiles_in_three(memory, left * 0)
    Q = product_of_parts(ap, a_s, wide)
    if SOLVED:
        Q = finished((Q,), ap)[0]
        more_s.store(gl.where(i == j, 0.0, load_parts(T_s, wide)))  # all warps have multiplied Xb
    else:
        Y = product_of_parts(ap, X_s, wide)
        Q, Y = finished((Q, Y), ap)
        more_s.store(Y + more_s.load(wide))
    store_parts(Q + load_parts(q_s, wide), q_s)
    bt = transposed(N_s)
    M = product_of_parts(bt, a_s, wide)
    W = product_of_parts(transposed(k_s), v_s, wide)
    of_X = product_of_parts(bt, X_s, wide)
    M, W, of_X = finished((M, W, of_X), ())
    meet()  # all warps have multiplied all tiles
    given.index(7).store(W * total_s.load(gl.SliceLayout(1, wide))[:, None] + of_X)
    store_parts(M, a_s)
    fence_async_shared()
    meet()
    at = (place * C).to(gl.int32)
    async_store(more_tiles, [at, 0], more_s)
    async_store(write_tiles, [at, 0], given.index(7))
    send_parts(q_s, read_tiles, 3 * at, 0)
    send_parts(a_s, step_tiles, 3 * at, 0)
    tma.store_wait(0)
    invalidate((bar,))
