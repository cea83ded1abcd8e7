"""Gradients of RWKV-7's inputs on Hopper, in Gluon, where a chunk has one anchor: everything that needs no chain over chunks.

With G_t the sums of log2 decays g up to and including token t, S the state before the chunk, dS' the gradient of the state after it,
total = exp2(G) of the last token, E = total o dS', T = (I - Xa Xb^T)^-1 of ``anchored_inverse.py``, and V the values,

    Xq = scale q exp2(G)    Xa = a exp2(G - g)    Xb = b exp2(-G)    Xk = k exp2(-G)
    Aq_b = Xq Xb^T    Aq_k = Xq Xk^T   (s <= t)    Aa_k = Xa Xk^T   (s < t)
    U = T (Aa_k V + Xa S)       Z = T^T (Aq_b^T dO + Xb E)       dV = Aq_k^T dO + Aa_k^T Z + Xk E
    Pq_b = dO U^T    Pq_k = dO V^T   (s <= t)     Pa_b = Z U^T    Pa_k = Z V^T   (s < t)
    dXq = dO S^T + Pq_b Xb + Pq_k Xk              dXa = Z S^T + Pa_b Xb + Pa_k Xk
    dXb = Pq_b^T Xq + Pa_b^T Xa + U E^T           dXk = Pq_k^T Xq + Pa_k^T Xa + V E^T
    dq = scale exp2(G) o dXq    da = exp2(G - g) o dXa    db = exp2(-G) o dXb    dk = exp2(-G) o dXk
    dg_t = sum i >= t of (Xq o dXq + Xa o dXa - Xb o dXb - Xk o dXk)_i - (Xa o dXa)_t + rowsum((S + Xb^T U + Xk^T V) o E)

The sums of dg are over the same rounded operands on both sides of a token, and summands have 16 bits: rounding cancels with the values.
Shared memory has 16 tiles of 8 KB: U, Z, v, dO, q, k, a, b, S, dS', four tiles of pairs, and both parts of T - I. Pairs take the place of
tiles of sums, dk and db that of U and v, dq and da that of q and a, dV that of T - I.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, async_store, exp2, meet, store_in_two, unknown, zero_rows_from
from ....gpu.ring import barriers
from ....gpu.tiles import chunk_of_slot
from .anchored import gradients_of_gates, logarithms, tokens_through
from .layouts import C


@gluon.jit
def computed_again(x):
    """x, opaque to the compiler, so that what follows from it is computed again: kept, it would take registers meanwhile."""
    return unknown(x.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def tiles_of(memory, offset):
    """Shared memory of U, Z, v, dO, q, k, a, b, S and dS'. The offset is 0, and the compiler should not know it.

    Else it computes addresses and descriptors of all tiles at the beginning, and spills.
    """
    tiles = ()
    for n in gl.static_range(10):
        tiles = tiles + (memory.index(offset + n),)
    return tiles


@gluon.jit
def pairs_of(memory, offset):
    """Shared memory of Pq_b, Pq_k, Pa_b and Pa_k. ``offset``: see ``tiles_of``."""
    return memory.index(offset + 10), memory.index(offset + 11), memory.index(offset + 12), memory.index(offset + 13)


@gluon.jit
def zero_tiles_from(memory, FIRST: gl.constexpr, LAST: gl.constexpr, left, layout: gl.constexpr):
    """Zero the rows after the first ``left`` of tiles FIRST to LAST: they are padding or belong to another sequence."""
    if left < C:
        for n in range(FIRST, LAST + 1):
            zero_rows_from(memory.index(n), left, layout)


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
def sums_through(x, memory, offset, AFTER: gl.constexpr, start):
    """``start`` plus the sums over tokens up to each token of a tile x, AFTER: from each token on. Uses the memory of three pairs.

    The left operand is in shared memory: in registers, constants were set after the fence of the product that reads them (Triton 3.6).
    """
    wide: gl.constexpr = x.type.layout
    high_s, low_s, chosen_s, _ = pairs_of(memory, offset)
    store_in_two(x, high_s, low_s)
    chosen_s.store(tokens_through(AFTER, wide))
    fence_async_shared()
    meet()
    G = warpgroup_mma(chosen_s, high_s, start, is_async=True)
    G = warpgroup_mma(chosen_s, low_s, G, is_async=True)
    return warpgroup_mma_wait(0, [G])


@gluon.jit
def store_factored(G, d, scale, memory, offset):
    """Xq, Xa, Xb and Xk replace q, a, b and k."""
    kind: gl.constexpr = memory.dtype
    wide: gl.constexpr = G.type.layout
    _, _, _, _, q_s, k_s, a_s, b_s, _, _ = tiles_of(memory, offset)
    inverted = exp2(-G)
    b_s.store((b_s.load(wide).to(gl.float32) * inverted).to(kind))
    k_s.store((k_s.load(wide).to(gl.float32) * inverted).to(kind))
    q_s.store((q_s.load(wide).to(gl.float32) * (exp2(G) * scale)).to(kind))
    a_s.store((a_s.load(wide).to(gl.float32) * exp2(G - d)).to(kind))
    fence_async_shared()
    meet()


@gluon.jit
def store_weights(memory, offset, wide: gl.constexpr):
    """Aq_b, Aq_k and Aa_k in the memory of Pq_b, Pq_k and Pa_k."""
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


@gluon.jit
def store_columns(dB, dK, G, memory, offset):
    """Store db and dk in the memory of U and V, from the terms of states. Returns -(Xb o dXb + Xk o dXk)."""
    wide: gl.constexpr = G.type.layout
    u_s, _, v_s, _, q_s, k_s, a_s, b_s, _, _ = tiles_of(memory, offset)
    qb_s, qk_s, ab_s, ak_s = pairs_of(memory, offset)
    dB = warpgroup_mma(qb_s.permute((1, 0)), q_s, dB, is_async=True)
    dB = warpgroup_mma(ab_s.permute((1, 0)), a_s, dB, is_async=True)
    dK = warpgroup_mma(qk_s.permute((1, 0)), q_s, dK, is_async=True)
    dK = warpgroup_mma(ak_s.permute((1, 0)), a_s, dK, is_async=True)
    dB, dK = warpgroup_mma_wait(0, [dB, dK])
    inverted = exp2(-G)
    across = -b_s.load(wide).to(gl.float32) * dB - k_s.load(wide).to(gl.float32) * dK
    u_s.store((dB * inverted).to(memory.dtype))
    v_s.store((dK * inverted).to(memory.dtype))
    return across


@gluon.jit
def store_rows(G, g, inside, scale, memory, offset, RAW: gl.constexpr):
    """Store dq and da in the memory of q and a. Returns Xq o dXq and Xa o dXa."""
    wide: gl.constexpr = G.type.layout
    zero = gl.zeros([C, C], gl.float32, wide)
    _, z_s, _, o_s, q_s, k_s, a_s, b_s, S_s, _ = tiles_of(memory, offset)
    qb_s, qk_s, ab_s, ak_s = pairs_of(memory, offset)
    dQ = warpgroup_mma(o_s, S_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    dQ = warpgroup_mma(qb_s, b_s, dQ, is_async=True)
    dQ = warpgroup_mma(qk_s, k_s, dQ, is_async=True)
    dA = warpgroup_mma(z_s, S_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    dA = warpgroup_mma(ab_s, b_s, dA, is_async=True)
    dA = warpgroup_mma(ak_s, k_s, dA, is_async=True)
    dQ, dA = warpgroup_mma_wait(0, [dQ, dA])
    meet()  # the products of all warps with q and a are done
    of_queries = q_s.load(wide).to(gl.float32) * dQ
    q_s.store((dQ * (exp2(G) * scale)).to(memory.dtype))
    of_removals = a_s.load(wide).to(gl.float32) * dA
    a_s.store((dA * exp2(G - logarithms(g, inside, RAW))).to(memory.dtype))
    return of_queries, of_removals


@gluon.jit
def store_tile(tiles, memory, pointer, row, column, first, step, left):
    """Store a gradient [C,K] of a chunk with ``left`` tokens from shared memory. ``first``: its first element; rows are ``step`` apart."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    if left == C:
        async_store(tiles, [row, column], memory)
    else:
        i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
        j = gl.arange(0, memory.shape[1], gl.SliceLayout(0, layout))[None, :]
        gl.store(pointer + first + (i * step + j), memory.load(layout), mask=i < left)


@gluon.jit(do_not_specialize=["N", "T", "H", "g_b", "g_t", "g_h"])
def penstock_rwkv7_gradients_sm90(
    v_tiles, o_tiles, q_tiles, k_tiles, a_tiles, b_tiles, S_tiles, dS_tiles, solved_tiles, dq_tiles, dk_tiles, dv_tiles, da_tiles, db_tiles,
    g, total, d_query, d_key, d_value, d_removal, d_write, d_decay, cu_seqlens, scale, N, T, H, g_b, g_t, g_h, g_k,
    K: gl.constexpr, PACKED: gl.constexpr, RAW: gl.constexpr,
):  # fmt: skip
    """dV = Aq_k^T dO + Aa_k^T Z + Xk E, dq = scale exp2(G) o (dO S^T + Pq_b Xb + Pq_k Xk), dk, da and db alike, and dg, of every chunk.

    TMA tiles: v, dO, q, k, a, b, dq, dk, dv, da, db [C,K] of [B T,H K]: V is K; S and dS' [K,K] of [slots,H,K,K], both parts of T - I [C,C]
    of [slots,H,2 C,C]. Reads g [B,T,H,K] by strides, with RAW raw gates, and exp2 of the chunk's sum of g (``total``) [slots,H,K].
    Writes dq, dk, dv, da, db and dg, or the gradient of raw gates, [B,T,H,K]. Program (slot of a chunk, head).
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
    d = logarithms(g, inside, RAW)

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
    of_queries, of_removals = store_rows(computed_again(G), g, inside, scale, memory, unknown(left * 0), RAW)
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
    dG = gradients_of_gates(dG, g, inside, RAW)
    gl.store(d_decay + first + (i * step + j), dG.to(d_decay.dtype.element_ty), mask=inside)
    tma.store_wait(0)
