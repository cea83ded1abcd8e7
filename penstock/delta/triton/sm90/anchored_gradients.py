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

With bfloat16 inputs PARTS is 1. Shared memory has 16 tiles of 8 KB: U, Z, v, dO, q, k, a, b, S, dS', four tiles of pairs, and both parts of
T - I. Pairs take the place of tiles of sums, dk and db that of U and v, dq and da that of q and a, dV that of T - I.

With float16 inputs PARTS is 2: all of these have two bfloat16 parts, see ``parts.py``, in 28 tiles. Inputs and gradients, float16, are
where the first parts are. T - I is where Pa_b will be, and dV takes the place of dS'. Products leave out that of both low parts, so
rounding in dg cancels to 16 bits of its terms.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, async_store, exp2, meet, unknown, zero_rows_from
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import chunk_of_slot
from .anchored import gradients_of_gates, logarithms, tokens_through
from .layouts import C
from .parts import added_in_parts, as_halves, load_parts, parts_at, product_of_parts, store_parts, transposed


@gluon.jit
def computed_again(x):
    """x, opaque to the compiler, so that what follows from it is computed again: kept, it would take registers meanwhile."""
    return unknown(x.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def tiles_of(memory, offset, PARTS: gl.constexpr):
    """Shared memory of U, Z, v, dO, q, k, a, b, S and dS'. The offset is 0, and the compiler should not know it.

    Else it computes addresses and descriptors of all tiles at the beginning, and spills.
    """
    tiles = ()
    for n in gl.static_range(10):
        tiles = tiles + (parts_at(memory, offset + PARTS * n, PARTS),)
    return tiles


@gluon.jit
def pairs_of(memory, offset, PARTS: gl.constexpr):
    """Shared memory of Pq_b, Pq_k, Pa_b and Pa_k. ``offset``: see ``tiles_of``."""
    tiles = ()
    for n in gl.static_range(10, 14):
        tiles = tiles + (parts_at(memory, offset + PARTS * n, PARTS),)
    return tiles


@gluon.jit
def solved_of(memory, offset, PARTS: gl.constexpr):
    """Shared memory of both parts of T - I: after the pairs, or with two parts where Pa_b will be."""
    return parts_at(memory, offset + (10 * PARTS + 4), 2)


@gluon.jit
def zero_tiles_from(given, FIRST: gl.constexpr, LAST: gl.constexpr, left, layout: gl.constexpr, PARTS: gl.constexpr):
    """Zero the rows after the first ``left`` of tiles FIRST to LAST: they are padding or belong to another sequence."""
    if left < C:
        for n in range(FIRST, LAST + 1):
            zero_rows_from(given.index(PARTS * n), left, layout)


@gluon.jit
def load_tiles(descriptors, solved_tiles, memory, given, bars, at, row, column, PARTS: gl.constexpr):
    """Start the copies of q, k, a and b, of v and dO, and of S, dS' and T - I in their parts, with a barrier for each group.

    ``given``: the memory in the dtype of inputs.
    """
    size: gl.constexpr = descriptors[0].block_type.nbytes
    mbarrier.expect(bars.index(0), 4 * size)
    for n in gl.static_range(2, 6):
        async_load(descriptors[n], [row, column], bars.index(0), given.index(PARTS * (n + 2)))
    mbarrier.expect(bars.index(1), 2 * size)
    for n in gl.static_range(2):
        async_load(descriptors[n], [row, column], bars.index(1), given.index(PARTS * (n + 2)))
    mbarrier.expect(bars.index(2), (2 * PARTS + 2) * size)
    for n in gl.static_range(6, 8):
        for m in gl.static_range(PARTS):
            async_load(descriptors[n], [PARTS * at + m * C, 0], bars.index(2), memory.index(PARTS * (n + 2) + m))
    for n in gl.static_range(2):
        async_load(solved_tiles, [2 * at + n * C, 0], bars.index(2), memory.index(10 * PARTS + 4 + n))


@gluon.jit
def sums_through(x, memory, offset, AFTER: gl.constexpr, start, PARTS: gl.constexpr):
    """``start`` plus the sums over tokens up to each token of a tile x, AFTER: from each token on. Uses three tiles of pairs.

    The left operand is in shared memory: in registers, constants were set after the fence of the product that reads them (Triton 3.6).
    """
    wide: gl.constexpr = x.type.layout
    summands_s, chosen_s = parts_at(memory, offset + 10 * PARTS, 2), memory.index(offset + (10 * PARTS + 2))
    store_parts(x, summands_s)
    chosen_s.store(tokens_through(AFTER, wide))
    fence_async_shared()
    meet()
    return warpgroup_mma_wait(0, [added_in_parts((chosen_s,), summands_s, start)])


@gluon.jit
def store_factored(G, d, scale, memory, given, offset, PARTS: gl.constexpr):
    """Xq, Xa, Xb and Xk replace q, a, b and k. With two parts, those of v and dO replace them."""
    wide: gl.constexpr = G.type.layout
    _, _, v_s, o_s, q_s, k_s, a_s, b_s, _, _ = tiles_of(memory, offset, PARTS)
    inverted = exp2(-G)
    store_parts(given.index(offset + 7 * PARTS).load(wide).to(gl.float32) * inverted, b_s)
    store_parts(given.index(offset + 5 * PARTS).load(wide).to(gl.float32) * inverted, k_s)
    store_parts(given.index(offset + 4 * PARTS).load(wide).to(gl.float32) * (exp2(G) * scale), q_s)
    store_parts(given.index(offset + 6 * PARTS).load(wide).to(gl.float32) * exp2(G - d), a_s)
    if PARTS == 2:
        store_parts(given.index(offset + 2 * PARTS).load(wide).to(gl.float32), v_s)
        store_parts(given.index(offset + 3 * PARTS).load(wide).to(gl.float32), o_s)
    fence_async_shared()
    meet()


@gluon.jit
def store_weights(memory, offset, wide: gl.constexpr, PARTS: gl.constexpr):
    """Aq_b, Aq_k and Aa_k in the memory of Pq_b, Pq_k and Pa_k."""
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    _, _, _, _, q_s, k_s, a_s, b_s, _, _ = tiles_of(memory, offset, PARTS)
    qb_s, qk_s, _, ak_s = pairs_of(memory, offset, PARTS)
    P = product_of_parts(q_s, transposed(b_s), wide)
    R = product_of_parts(q_s, transposed(k_s), wide)
    A = product_of_parts(a_s, transposed(k_s), wide)
    P, R, A = warpgroup_mma_wait(0, [P, R, A])
    store_parts(gl.where(i >= j, P, 0.0), qb_s)
    store_parts(gl.where(i >= j, R, 0.0), qk_s)
    store_parts(gl.where(i > j, A, 0.0), ak_s)


@gluon.jit
def decay_rows(memory, offset, total, wide: gl.constexpr, PARTS: gl.constexpr):
    """E replaces dS'. ``total``: pointers [C,1]."""
    dS_s = parts_at(memory, offset + 9 * PARTS, PARTS)
    store_parts(load_parts(dS_s, wide) * gl.load(total), dS_s)


@gluon.jit
def store_values(memory, offset, wide: gl.constexpr, PARTS: gl.constexpr):
    """U and Z: first what T and T^T multiply, then their products."""
    u_s, z_s, v_s, o_s, _, _, a_s, b_s, S_s, E_s = tiles_of(memory, offset, PARTS)
    qb_s, _, _, ak_s = pairs_of(memory, offset, PARTS)
    X = product_of_parts(ak_s, v_s, wide)
    X = added_in_parts(a_s, S_s, X)
    Y = product_of_parts(transposed(qb_s), o_s, wide)
    Y = added_in_parts(b_s, E_s, Y)
    X, Y = warpgroup_mma_wait(0, [X, Y])
    if PARTS == 1:
        X, Y = X.to(memory.dtype).to(gl.float32), Y.to(memory.dtype).to(gl.float32)
    store_parts(X, u_s)
    store_parts(Y, z_s)
    fence_async_shared()
    meet()
    solved_s = solved_of(memory, offset, PARTS)
    U = added_in_parts(solved_s, u_s, X)
    Z = added_in_parts(transposed(solved_s), z_s, Y)
    U, Z = warpgroup_mma_wait(0, [U, Z])
    meet()  # the products of all warps are done
    store_parts(U, u_s)
    store_parts(Z, z_s)
    fence_async_shared()
    meet()


@gluon.jit
def store_pairs(memory, given, offset, wide: gl.constexpr, PARTS: gl.constexpr):
    """The gradients of pairs in the memory of pairs, from dO, Z, U and V. Returns dV rounded, with one part also in the memory of T - I."""
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    u_s, z_s, v_s, o_s, _, k_s, _, _, _, E_s = tiles_of(memory, offset, PARTS)
    qb_s, qk_s, ab_s, ak_s = pairs_of(memory, offset, PARTS)
    dV = product_of_parts(transposed(qk_s), o_s, wide)
    dV = added_in_parts(transposed(ak_s), z_s, dV)
    dV = added_in_parts(k_s, E_s, dV)
    P = product_of_parts(o_s, transposed(u_s), wide)
    R = product_of_parts(o_s, transposed(v_s), wide)
    dV, P, R = warpgroup_mma_wait(0, [dV, P, R])
    dV = dV.to(given.dtype)
    meet()  # no warp multiplies T - I and the pairs of the forward pass any more
    if PARTS == 1:
        memory.index(offset + 14).store(dV)
    store_parts(gl.where(i >= j, P, 0.0), qb_s)
    store_parts(gl.where(i >= j, R, 0.0), qk_s)
    P = product_of_parts(z_s, transposed(u_s), wide)
    R = product_of_parts(z_s, transposed(v_s), wide)
    P, R = warpgroup_mma_wait(0, [P, R])
    store_parts(gl.where(i > j, P, 0.0), ab_s)
    store_parts(gl.where(i > j, R, 0.0), ak_s)
    fence_async_shared()
    meet()
    return dV


@gluon.jit
def products_with_states(memory, offset, kept_s, wide: gl.constexpr, PARTS: gl.constexpr):
    """U E^T and V E^T; rowsum((S + Xb^T U + Xk^T V) o E) in ``kept_s`` [K]. After it U, V and E are free."""
    u_s, _, v_s, _, _, k_s, _, b_s, S_s, E_s = tiles_of(memory, offset, PARTS)
    R = product_of_parts(transposed(b_s), u_s, wide)
    R = added_in_parts(transposed(k_s), v_s, R)
    dB = product_of_parts(u_s, transposed(E_s), wide)
    dK = product_of_parts(v_s, transposed(E_s), wide)
    R, dB, dK = warpgroup_mma_wait(0, [R, dB, dK])
    kept_s.store(gl.sum((R + load_parts(S_s, wide)) * load_parts(E_s, wide), 1))
    meet()
    return dB, dK


@gluon.jit
def store_columns(dB, dK, G, memory, given, offset, PARTS: gl.constexpr):
    """Store db and dk in the memory of U and V, from the terms of states. Returns -(Xb o dXb + Xk o dXk)."""
    wide: gl.constexpr = G.type.layout
    _, _, _, _, q_s, k_s, a_s, b_s, _, _ = tiles_of(memory, offset, PARTS)
    qb_s, qk_s, ab_s, ak_s = pairs_of(memory, offset, PARTS)
    dB = added_in_parts(transposed(qb_s), q_s, dB)
    dB = added_in_parts(transposed(ab_s), a_s, dB)
    dK = added_in_parts(transposed(qk_s), q_s, dK)
    dK = added_in_parts(transposed(ak_s), a_s, dK)
    dB, dK = warpgroup_mma_wait(0, [dB, dK])
    inverted = exp2(-G)
    across = -load_parts(b_s, wide) * dB - load_parts(k_s, wide) * dK
    given.index(offset).store((dB * inverted).to(given.dtype))
    given.index(offset + 2 * PARTS).store((dK * inverted).to(given.dtype))
    return across


@gluon.jit
def store_rows(G, g, inside, scale, memory, given, offset, RAW: gl.constexpr, PARTS: gl.constexpr):
    """Store dq and da in the memory of q and a. Returns Xq o dXq and Xa o dXa."""
    wide: gl.constexpr = G.type.layout
    _, z_s, _, o_s, q_s, k_s, a_s, b_s, S_s, _ = tiles_of(memory, offset, PARTS)
    qb_s, qk_s, ab_s, ak_s = pairs_of(memory, offset, PARTS)
    dQ = product_of_parts(o_s, transposed(S_s), wide)
    dQ = added_in_parts(qb_s, b_s, dQ)
    dQ = added_in_parts(qk_s, k_s, dQ)
    dA = product_of_parts(z_s, transposed(S_s), wide)
    dA = added_in_parts(ab_s, b_s, dA)
    dA = added_in_parts(ak_s, k_s, dA)
    dQ, dA = warpgroup_mma_wait(0, [dQ, dA])
    meet()  # the products of all warps with q and a are done
    of_queries = load_parts(q_s, wide) * dQ
    given.index(offset + 4 * PARTS).store((dQ * (exp2(G) * scale)).to(given.dtype))
    of_removals = load_parts(a_s, wide) * dA
    given.index(offset + 6 * PARTS).store((dA * exp2(G - logarithms(g, inside, RAW))).to(given.dtype))
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
    K: gl.constexpr, PACKED: gl.constexpr, RAW: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """dV = Aq_k^T dO + Aa_k^T Z + Xk E, dq = scale exp2(G) o (dO S^T + Pq_b Xb + Pq_k Xk), dk, da and db alike, and dg, of every chunk.

    TMA tiles: v, dO, q, k, a, b, dq, dk, dv, da, db [C,K] of [B T,H K]: V is K; S and dS' [K,K] of [slots,H,PARTS K,K], both parts of T - I
    [C,C] of [slots,H,2 C,C]. Reads g [B,T,H,K] by strides, with RAW raw gates, and exp2 of the chunk's sum of g (``total``) [slots,H,K].
    Writes dq, dk, dv, da, db and dg, or the gradient of raw gates, [B,T,H,K]. Program (slot of a chunk, head). PARTS: 2 with float16
    inputs, else 1.
    """
    gl.static_assert(q_tiles.dtype == (gl.float16 if PARTS == 2 else gl.bfloat16))
    gl.static_assert(K == C)
    kind: gl.constexpr = S_tiles.dtype
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
    memory = gl.allocate_shared_memory(kind, [12 * PARTS + 4, C, K], q_tiles.layout)
    given = memory
    if PARTS == 2:
        given = as_halves(memory)
    kept_s = gl.allocate_shared_memory(gl.float32, [K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = barriers(3, 1)
    fence_async_shared()
    meet()
    descriptors = (v_tiles, o_tiles, q_tiles, k_tiles, a_tiles, b_tiles, S_tiles, dS_tiles)
    load_tiles(descriptors, solved_tiles, memory, given, bars, (place * C).to(gl.int32), row, h * K, PARTS)
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    g += batch * g_b + begin * g_t + h.to(gl.int64) * g_h + (i * g_t + j * g_k)
    inside = (i < left) & (j < K)
    d = logarithms(g, inside, RAW)

    G = sums_through(d, memory, unknown(left * 0), False, gl.zeros([C, C], gl.float32, wide), PARTS)
    mbarrier.wait(bars.index(0), 0)
    zero_tiles_from(given, 4, 7, left, clean, PARTS)
    mbarrier.wait(bars.index(1), 0)
    zero_tiles_from(given, 2, 3, left, clean, PARTS)
    meet()
    store_factored(G, d, scale, memory, given, unknown(left * 0), PARTS)
    store_weights(memory, unknown(left * 0), wide, PARTS)
    mbarrier.wait(bars.index(2), 0)
    decay_rows(memory, unknown(left * 0), total + place * K + i, wide, PARTS)
    fence_async_shared()
    meet()
    store_values(memory, unknown(left * 0), wide, PARTS)
    dV = store_pairs(memory, given, unknown(left * 0), wide, PARTS)
    dB, dK = products_with_states(memory, unknown(left * 0), kept_s, wide, PARTS)
    dv_s = memory.index(14)
    if PARTS == 2:
        dv_s = given.index(unknown(left * 0) + 18)
        dv_s.store(dV)
    across = store_columns(dB, dK, computed_again(G), memory, given, unknown(left * 0), PARTS)
    of_queries, of_removals = store_rows(computed_again(G), g, inside, scale, memory, given, unknown(left * 0), RAW, PARTS)
    fence_async_shared()
    meet()  # all products are done
    offset = unknown(left * 0)
    first = (token * H + h) * K
    step = H.to(gl.int64) * K
    store_tile(dq_tiles, given.index(offset + 4 * PARTS), d_query, row, h * K, first, step, left)
    store_tile(dk_tiles, given.index(offset + 2 * PARTS), d_key, row, h * K, first, step, left)
    store_tile(da_tiles, given.index(offset + 6 * PARTS), d_removal, row, h * K, first, step, left)
    store_tile(db_tiles, given.index(offset), d_write, row, h * K, first, step, left)
    store_tile(dv_tiles, dv_s, d_value, row, h * K, first, step, left)
    kept = kept_s.load(gl.SliceLayout(0, wide))[None, :]
    dG = sums_through(across + of_queries + of_removals, memory, unknown(left * 0), True, kept - of_removals, PARTS)
    dG = gradients_of_gates(dG, g, inside, RAW)
    gl.store(d_decay + first + (i * step + j), dG.to(d_decay.dtype.element_ty), mask=inside)
    tma.store_wait(0)
    invalidate((bars,))
