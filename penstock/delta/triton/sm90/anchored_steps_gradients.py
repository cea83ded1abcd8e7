"""Gradients of RWKV-7's inputs on Hopper, in Gluon, from the states that ``anchored_steps.py`` computes: all chunks at once.

With G_t the sums of log2 decays g up to and including token t, S the state before the chunk, dS' the gradient of the state after it,
total = exp2(G) of the last token, E = total o dS', T = (I - Xa Xb^T)^-1 of ``anchored_prepare.py``, and V the values,

    Xq = scale q exp2(G)    Xa = a exp2(G - g)    Xb = b exp2(-G)    Xk = k exp2(-G)
    Aq_b = Xq Xb^T    Aq_k = Xq Xk^T   (s <= t)    Aa_k = Xa Xk^T   (s < t)
    U = T (Aa_k V + Xa S)       Z = T^T (Aq_b^T dO + Xb E)       dV = Aq_k^T dO + Aa_k^T Z + Xk E

and with U, Z and E the gradients of ``anchored_gradients.py``. Shared memory has 16 tiles of 8 KB: U, Z, v, dO, q, k, a, b, S, dS', four
tiles of pairs, and both parts of T - I.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, meet, unknown
from ....gpu.ring import barriers
from ....gpu.tiles import chunk_of_slot
from .anchored import logarithms
from .anchored_gradients import (
    computed_again,
    pairs_of,
    store_columns,
    store_factored,
    store_rows,
    store_tile,
    sums_through,
    tiles_of,
    zero_tiles_from,
)
from .layouts import C


@gluon.jit
def load_tiles(descriptors, solved_tiles, memory, bars, at, row, column):
    """Start the copies of q, k, a and b, of v and dO, and of S, dS' and both parts of T - I, with a barrier for each group."""
    size: gl.constexpr = descriptors[0].block_type.nbytes
    mbarrier.expect(bars.index(0), 4 * size)
    for n in gl.static_range(2, 6):
        async_load(descriptors[n], [row, column], bars.index(0), memory.index(n + 2))
    mbarrier.expect(bars.index(1), 2 * size)
    for n in gl.static_range(2):
        async_load(descriptors[n], [row, column], bars.index(1), memory.index(n + 2))
    mbarrier.expect(bars.index(2), 4 * size)
    for n in gl.static_range(6, 8):
        async_load(descriptors[n], [at, 0], bars.index(2), memory.index(n + 2))
    for n in gl.static_range(2):
        async_load(solved_tiles, [2 * at + n * C, 0], bars.index(2), memory.index(n + 14))


@gluon.jit
def store_weights(memory, offset, wide: gl.constexpr):
    """Aq_b, Aq_k and Aa_k in the memory of the pairs that have their places in ``anchored_gradients.py``."""
    zero = gl.zeros([C, C], gl.float32, wide)
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    _, _, _, _, q_s, k_s, a_s, b_s, _, _ = tiles_of(memory, offset)
    qb_s, qk_s, _, ak_s = pairs_of(memory, offset)
    P = warpgroup_mma(q_s, b_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    R = warpgroup_mma(q_s, k_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    A = warpgroup_mma(a_s, k_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    P, R, A = warpgroup_mma_wait(0, [P, R, A])
    qb_s.store(gl.where(i >= j, P, 0.0).to(memory.dtype))
    qk_s.store(gl.where(i >= j, R, 0.0).to(memory.dtype))
    ak_s.store(gl.where(i > j, A, 0.0).to(memory.dtype))


@gluon.jit
def decay_rows(memory, offset, total, wide: gl.constexpr):
    """E replaces dS'. ``total``: pointers [C,1]."""
    dS_s = memory.index(offset + 9)
    dS_s.store((dS_s.load(wide).to(gl.float32) * gl.load(total)).to(memory.dtype))


@gluon.jit
def store_values(memory, offset, wide: gl.constexpr):
    """U and Z: first what T and T^T multiply, then their products."""
    kind: gl.constexpr = memory.dtype
    zero = gl.zeros([C, C], gl.float32, wide)
    u_s, z_s, v_s, o_s, _, _, a_s, b_s, S_s, E_s = tiles_of(memory, offset)
    qb_s, _, _, ak_s = pairs_of(memory, offset)
    X = warpgroup_mma(ak_s, v_s, zero, use_acc=False, is_async=True)
    X = warpgroup_mma(a_s, S_s, X, is_async=True)
    Y = warpgroup_mma(qb_s.permute((1, 0)), o_s, zero, use_acc=False, is_async=True)
    Y = warpgroup_mma(b_s, E_s, Y, is_async=True)
    X, Y = warpgroup_mma_wait(0, [X, Y])
    X, Y = X.to(kind), Y.to(kind)
    u_s.store(X)
    z_s.store(Y)
    fence_async_shared()
    meet()
    high_s, low_s = memory.index(offset + 14), memory.index(offset + 15)
    U = warpgroup_mma(high_s, u_s, X.to(gl.float32), is_async=True)
    U = warpgroup_mma(low_s, u_s, U, is_async=True)
    Z = warpgroup_mma(high_s.permute((1, 0)), z_s, Y.to(gl.float32), is_async=True)
    Z = warpgroup_mma(low_s.permute((1, 0)), z_s, Z, is_async=True)
    U, Z = warpgroup_mma_wait(0, [U, Z])
    meet()  # the products of all warps are done
    u_s.store(U.to(kind))
    z_s.store(Z.to(kind))
    fence_async_shared()
    meet()


@gluon.jit
def store_pairs(memory, offset, wide: gl.constexpr):
    """dV in the memory of T - I, and the gradients of pairs in that of pairs, from dO, Z, U and V."""
    zero = gl.zeros([C, C], gl.float32, wide)
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    u_s, z_s, v_s, o_s, _, k_s, _, _, _, E_s = tiles_of(memory, offset)
    qb_s, qk_s, ab_s, ak_s = pairs_of(memory, offset)
    dV = warpgroup_mma(qk_s.permute((1, 0)), o_s, zero, use_acc=False, is_async=True)
    dV = warpgroup_mma(ak_s.permute((1, 0)), z_s, dV, is_async=True)
    dV = warpgroup_mma(k_s, E_s, dV, is_async=True)
    P = warpgroup_mma(o_s, u_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    R = warpgroup_mma(o_s, v_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    dV, P, R = warpgroup_mma_wait(0, [dV, P, R])
    meet()  # no warp multiplies T - I and the pairs of the forward pass any more
    memory.index(offset + 14).store(dV.to(memory.dtype))
    qb_s.store(gl.where(i >= j, P, 0.0).to(memory.dtype))
    qk_s.store(gl.where(i >= j, R, 0.0).to(memory.dtype))
    P = warpgroup_mma(z_s, u_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    R = warpgroup_mma(z_s, v_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    P, R = warpgroup_mma_wait(0, [P, R])
    ab_s.store(gl.where(i > j, P, 0.0).to(memory.dtype))
    ak_s.store(gl.where(i > j, R, 0.0).to(memory.dtype))
    fence_async_shared()
    meet()


@gluon.jit
def products_with_states(memory, offset, kept_s, wide: gl.constexpr):
    """U E^T and V E^T; rowsum((S + Xb^T U + Xk^T V) o E) in ``kept_s`` [K]. After it U and V are free."""
    zero = gl.zeros([C, C], gl.float32, wide)
    u_s, _, v_s, _, _, k_s, _, b_s, S_s, E_s = tiles_of(memory, offset)
    R = warpgroup_mma(b_s.permute((1, 0)), u_s, zero, use_acc=False, is_async=True)
    R = warpgroup_mma(k_s.permute((1, 0)), v_s, R, is_async=True)
    dB = warpgroup_mma(u_s, E_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    dK = warpgroup_mma(v_s, E_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    R, dB, dK = warpgroup_mma_wait(0, [R, dB, dK])
    kept_s.store(gl.sum((R + S_s.load(wide).to(gl.float32)) * E_s.load(wide).to(gl.float32), 1))
    meet()
    return dB, dK


@gluon.jit(do_not_specialize=["N", "T", "H", "g_b", "g_t", "g_h"])
def penstock_rwkv7_steps_bwd_sm90(
    v_tiles, o_tiles, q_tiles, k_tiles, a_tiles, b_tiles, S_tiles, dS_tiles, solved_tiles, dq_tiles, dk_tiles, dv_tiles, da_tiles, db_tiles,
    g, total, d_query, d_key, d_value, d_removal, d_write, d_decay, cu_seqlens, scale, N, T, H, g_b, g_t, g_h, g_k,
    K: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dV = Aq_k^T dO + Aa_k^T Z + Xk E, dq = scale exp2(G) o (dO S^T + Pq_b Xb + Pq_k Xk), dk, da and db alike, and dg, of every chunk.

    TMA tiles: v, dO, q, k, a, b, dq, dk, dv, da, db [C,K] of [B T,H K]: V is K; S and dS' [K,K] of [slots,H,K,K], both parts of T - I [C,C]
    of [slots,H,2 C,C]. Reads g [B,T,H,K] by strides and exp2 of the chunk's sum of g (``total``) [slots,H,K]. Writes dq, dk, dv, da, db and
    dg [B,T,H,K]. Program (slot of a chunk, head).
    """
    gl.static_assert(q_tiles.dtype == gl.bfloat16)
    gl.static_assert(K == C)
    kind: gl.constexpr = q_tiles.dtype
    GROUPS: gl.constexpr = gl.num_warps() // 4
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, C // GROUPS, 16])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    slot = gl.program_id(0) // H
    h = gl.program_id(0) % H
    batch, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    token = batch * T + begin
    row = token.to(gl.int32)
    place = slot.to(gl.int64) * H + h
    memory = gl.allocate_shared_memory(kind, [16, C, K], q_tiles.layout)
    kept_s = gl.allocate_shared_memory(gl.float32, [K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = barriers(3, 1)
    fence_async_shared()
    meet()
    descriptors = (v_tiles, o_tiles, q_tiles, k_tiles, a_tiles, b_tiles, S_tiles, dS_tiles)
    load_tiles(descriptors, solved_tiles, memory, bars, (place * C).to(gl.int32), row, h * K)
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    g += batch * g_b + begin * g_t + h.to(gl.int64) * g_h + (i * g_t + j * g_k)
    inside = (i < left) & (j < K)
    d = logarithms(g, inside)

    G = sums_through(d, memory, unknown(left * 0), False, gl.zeros([C, C], gl.float32, wide))
    mbarrier.wait(bars.index(0), 0)
    zero_tiles_from(memory, 4, 7, left, clean)
    mbarrier.wait(bars.index(1), 0)
    zero_tiles_from(memory, 2, 3, left, clean)
    meet()
    store_factored(G, d, scale, memory, unknown(left * 0))
    store_weights(memory, unknown(left * 0), wide)
    mbarrier.wait(bars.index(2), 0)
    decay_rows(memory, unknown(left * 0), total + place * K + i, wide)
    fence_async_shared()
    meet()
    store_values(memory, unknown(left * 0), wide)
    store_pairs(memory, unknown(left * 0), wide)
    dB, dK = products_with_states(memory, unknown(left * 0), kept_s, wide)
    across = store_columns(dB, dK, computed_again(G), memory, unknown(left * 0))
    of_queries, of_removals = store_rows(computed_again(G), g, inside, scale, memory, unknown(left * 0))
    fence_async_shared()
    meet()  # all products are done
    u_s, _, v_s, _, q_s, _, a_s, _, _, _ = tiles_of(memory, unknown(left * 0))
    first = (token * H + h) * K
    step = H.to(gl.int64) * K
    store_tile(dq_tiles, q_s, d_query, row, h * K, first, step, left)
    store_tile(dk_tiles, v_s, d_key, row, h * K, first, step, left)
    store_tile(da_tiles, a_s, d_removal, row, h * K, first, step, left)
    store_tile(db_tiles, u_s, d_write, row, h * K, first, step, left)
    store_tile(dv_tiles, memory.index(14), d_value, row, h * K, first, step, left)
    kept = kept_s.load(gl.SliceLayout(0, wide))[None, :]
    dG = sums_through(across + of_queries + of_removals, memory, unknown(left * 0), True, kept - of_removals)
    gl.store(d_decay + first + (i * step + j), dG.to(d_decay.dtype.element_ty), mask=inside)
    tma.store_wait(0)
