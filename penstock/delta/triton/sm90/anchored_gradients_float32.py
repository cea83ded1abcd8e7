"""Gradients of RWKV-7's inputs on Hopper with float32 inputs, in Gluon: ``anchored_gradients.py`` with operands in three bfloat16 parts.

The tiles of all formulas there are 45 of 8 KB, and a multiprocessor has memory for 27. So there are two launches: the first computes U, Z,
dV and

    kept = rowsum((S + Xb^T U + Xk^T V) o E)

and the second the other gradients. It needs the pairs of U for db and those of V for dk, but not at once:

    dXq = dO S^T, dXa = Z S^T
    P = dO U^T   (s <= t)     R = Z U^T   (s < t)     dXq += P Xb, dXa += R Xb     dXb = P^T Xq + R^T Xa + U E^T
    P = dO V^T   (s <= t)     R = Z V^T   (s < t)     dXq += P Xk, dXa += R Xk     dXk = P^T Xq + R^T Xa + V E^T

A launch copies each tensor once, in float32, to where its first two parts will be. Gradients are stored from registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ....gpu.hopper_tiles import meet, unknown
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import chunk_of_slot
from .anchored import gradients_of_gates, inverse_power, logarithms, power, sums_before, sums_in_two, tokens_through
from .anchored_gradients import computed_again
from .anchored_steps import load_tiles, zero_tiles_from
from .layouts import C
from .parts import (
    added_in_parts,
    as_singles,
    finished,
    load_parts,
    product_of_parts,
    store_over,
    store_parts,
    sum_of_products,
    tiles_in_three,
    transposed,
)

TILES = gl.constexpr(9)
"""Of three parts each."""


@gluon.jit
def split_tile(memory, parts, wide: gl.constexpr):
    """A tile in its parts in place of float32."""
    store_over(memory.load(wide), parts)


@gluon.jit
def places_of(g, left, g_t, g_k, wide: gl.constexpr):
    """Pointers to the decays of a chunk with ``left`` tokens, and which exist. Computed again where they are needed, as addresses are."""
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None] + unknown(left * 0)
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    return g + (i * g_t + j * g_k), (i < left) & (j < C)


@gluon.jit
def store_rows(pointer, x, left, step):
    """Store the first ``left`` rows of a tile, which are ``step`` apart. Addresses are computed again: kept, they would take registers."""
    i = gl.arange(0, C, gl.SliceLayout(1, x.type.layout))[:, None] + unknown(left * 0)
    j = gl.arange(0, C, gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(pointer + (i * step + j), x, mask=i < left)


@gluon.jit(do_not_specialize=["N", "T", "H", "g_b", "g_t", "g_h"])
def penstock_rwkv7_values_float32_sm90(
    v_tiles, o_tiles, q_tiles, k_tiles, a_tiles, b_tiles, S_tiles, dS_tiles, solved_tiles, g, total, d_value, u, z, kept, cu_seqlens, scale,
    N, T, H, g_b, g_t, g_h, g_k, K: gl.constexpr, PACKED: gl.constexpr, RAW: gl.constexpr,
):  # fmt: skip
    """U = T (Aa_k V + Xa S), Z = T^T (Aq_b^T dO + Xb E), dV = Aq_k^T dO + Aa_k^T Z + Xk E and ``kept`` of every chunk.

    TMA tiles: v, dO, q, k, a, b [C,K] of [B T,H K]: V is K; S and dS' [K,K] of [slots,H,K,K], T - I [C,C] of [slots,H,C,C]. Reads g
    [B,T,H,K] by strides, with RAW raw gates, and exp2 of the chunk's sum of g (``total``) [slots,H,K]. Writes dV [B,T,H,K], U and Z
    [slots,H,C,K], and ``kept`` [slots,H,K]. Program (slot of a chunk, head).
    """
    gl.static_assert(q_tiles.dtype == gl.float32)
    gl.static_assert(K == C)
    GROUPS: gl.constexpr = gl.num_warps() // 4
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, C // GROUPS, 16])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    half: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    single: gl.constexpr = q_tiles.layout
    slot = gl.program_id(0) // H
    h = gl.program_id(0) % H
    batch, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    token = batch * T + begin
    row = token.to(gl.int32)
    place = slot.to(gl.int64) * H + h
    at = (place * C).to(gl.int32)
    # Xq, Xk, Xa, Xb, V, S, T - I, dO, Aa_k. Later Aq_k replaces Xq; X, U and Aq_b replace Xa, Y and Z replace V, and E S
    memory = gl.allocate_shared_memory(gl.bfloat16, [3 * TILES, C, C], half)
    given = as_singles(memory, single)
    bars = barriers(4, 1)
    fence_async_shared()
    meet()
    inputs = (given.index(0), given.index(1), given.index(2), given.index(3))
    load_tiles((q_tiles, k_tiles, a_tiles, b_tiles), inputs, bars.index(0), row, h * K)
    load_tiles((v_tiles, o_tiles), (given.index(4), given.index(7)), bars.index(1), row, h * K)
    load_tiles((S_tiles, solved_tiles), (given.index(5), given.index(6)), bars.index(2), at, 0)
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    gates, inside = places_of(g + (batch * g_b + begin * g_t + h.to(gl.int64) * g_h), left, g_t, g_k, wide)
    d = logarithms(gates, inside, RAW)
    q_s, k_s, a_s, b_s, v_s, S_s, T_s, o_s, ak_s = tiles_in_three(memory, left * 0)
    G = sums_in_two(d, q_s[2], ak_s, k_s[2])
    mbarrier.wait(bars.index(0), 0)
    zero_tiles_from(inputs, left, clean)
    store_over(given.index(2).load(wide) * power(sums_before(G, d)), a_s)
    store_over(given.index(0).load(wide) * (power(G) * scale), q_s)
    inverted = inverse_power(G)
    store_over(given.index(1).load(wide) * inverted, k_s)
    store_over(given.index(3).load(wide) * inverted, b_s)
    mbarrier.wait(bars.index(1), 0)
    zero_tiles_from((given.index(4), given.index(7)), left, clean)
    split_tile(given.index(4), v_s, wide)
    split_tile(given.index(7), o_s, wide)
    mbarrier.wait(bars.index(2), 0)
    written = given.index(5).load(wide)
    store_over(written, S_s)
    split_tile(given.index(6), T_s, wide)
    fence_async_shared()
    meet()

    q_s, k_s, a_s, b_s, v_s, S_s, T_s, o_s, ak_s = tiles_in_three(memory, left * 0)
    P = product_of_parts(q_s, transposed(b_s), wide)
    R = product_of_parts(q_s, transposed(k_s), wide)
    A = product_of_parts(a_s, transposed(k_s), wide)
    P, R, A = finished((P, R, A), ())
    meet()  # all warps have multiplied Xq
    store_parts(gl.where(i >= j, R, 0.0), q_s)
    store_parts(gl.where(i > j, A, 0.0), ak_s)
    fence_async_shared()
    meet()
    X = sum_of_products((ak_s, a_s), (v_s, S_s), wide)
    fence_async_shared()
    meet()  # all warps have multiplied Xa and S
    load_tiles((dS_tiles,), (given.index(5),), bars.index(3), at, 0)
    x_s = a_s
    store_parts(X, x_s)
    fence_async_shared()
    meet()
    U = X + sum_of_products((T_s,), (x_s,), wide)
    store_rows(u + place * (C * K), U, C, K)
    meet()  # all warps have multiplied X
    store_parts(U, x_s)
    fence_async_shared()
    meet()
    written += sum_of_products((transposed(b_s), transposed(k_s)), (x_s, v_s), wide)
    mbarrier.wait(bars.index(3), 0)
    E = given.index(5).load(wide) * gl.load(total + place * K + i)
    gl.store(kept + place * K + gl.arange(0, K, gl.SliceLayout(1, wide)), gl.sum(written * E, 1))

    qk_s, k_s, qb_s, b_s, z_s, E_s, T_s, o_s, ak_s = tiles_in_three(memory, left * 0)
    store_over(E, E_s)  # also, all warps have multiplied U and V
    store_parts(gl.where(i >= j, P, 0.0), qb_s)
    fence_async_shared()
    meet()
    Y = sum_of_products((transposed(qb_s), b_s), (o_s, E_s), wide)
    store_parts(Y, z_s)
    fence_async_shared()
    meet()
    Z = Y + sum_of_products((transposed(T_s),), (z_s,), wide)
    store_rows(z + place * (C * K), Z, C, K)
    invalidate((bars,))
    meet()  # all warps have multiplied Y
    store_parts(Z, z_s)
    fence_async_shared()
    meet()
    dV = sum_of_products((transposed(qk_s), transposed(ak_s), k_s), (o_s, z_s, E_s), wide)
    store_rows(d_value + (token * H + h) * K, dV, left, H.to(gl.int64) * K)


@gluon.jit
def store_pairs(tiles, wide: gl.constexpr):
    """P = dO W^T of tokens s <= t and R = Z W^T of s < t, where W is U or V, in the last two tiles."""
    o_s, z_s, _, _, _, w_s, _, p_s, r_s = tiles
    P = product_of_parts(o_s, transposed(w_s), wide)
    R = product_of_parts(z_s, transposed(w_s), wide)
    P, R = finished((P, R), ())
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    store_parts(gl.where(i >= j, P, 0.0), p_s)
    store_parts(gl.where(i > j, R, 0.0), r_s)
    fence_async_shared()
    meet()


@gluon.jit
def products_with_pairs(tiles, wide: gl.constexpr):
    """P Y, R Y and P^T Xq + R^T Xa + W E^T, where Y is Xb or Xk."""
    _, _, q_s, a_s, E_s, w_s, y_s, p_s, r_s = tiles
    dQ = product_of_parts(p_s, y_s, wide)
    dA = product_of_parts(r_s, y_s, wide)
    dQ, dA = finished((dQ, dA), ())
    return dQ, dA, sum_of_products((transposed(p_s), transposed(r_s), w_s), (q_s, a_s, transposed(E_s)), wide)


@gluon.jit(do_not_specialize=["N", "T", "H", "g_b", "g_t", "g_h"])
def penstock_rwkv7_gradients_float32_sm90(
    v_tiles, o_tiles, q_tiles, k_tiles, a_tiles, b_tiles, S_tiles, dS_tiles, u_tiles, z_tiles, g, total, kept, d_query, d_key, d_removal,
    d_write, d_decay, cu_seqlens, scale, N, T, H, g_b, g_t, g_h, g_k, K: gl.constexpr, PACKED: gl.constexpr, RAW: gl.constexpr,
):  # fmt: skip
    """dq = scale exp2(G) o dQ, dk, da and db alike, and dg, of every chunk.

    TMA tiles: v, dO, q, k, a, b [C,K] of [B T,H K]: V is K; S and dS' [K,K] of [slots,H,K,K], U and Z [C,K] of [slots,H,C,K]. Reads g
    [B,T,H,K] by strides, with RAW raw gates, exp2 of the chunk's sum of g (``total``) and ``kept`` [slots,H,K]. Writes dq, dk, da, db and
    dg, or the gradient of raw gates, [B,T,H,K]. Program (slot of a chunk, head).
    """
    gl.static_assert(q_tiles.dtype == gl.float32)
    gl.static_assert(K == C)
    GROUPS: gl.constexpr = gl.num_warps() // 4
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, C // GROUPS, 16])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    half: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    single: gl.constexpr = q_tiles.layout
    slot = gl.program_id(0) // H
    h = gl.program_id(0) % H
    batch, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    token = batch * T + begin
    row = token.to(gl.int32)
    place = slot.to(gl.int64) * H + h
    at = (place * C).to(gl.int32)
    # dO, Z, Xq, Xa, E, U, Xb, S, R. Later V replaces U, Xk replaces Xb, and P S
    memory = gl.allocate_shared_memory(gl.bfloat16, [3 * TILES, C, C], half)
    given = as_singles(memory, single)
    bars = barriers(3, 1)
    fence_async_shared()
    meet()
    of_tokens = (given.index(2), given.index(3), given.index(6), given.index(0))
    load_tiles((q_tiles, a_tiles, b_tiles, o_tiles), of_tokens, bars.index(0), row, h * K)
    of_slots = (given.index(1), given.index(4), given.index(5), given.index(7))
    load_tiles((z_tiles, dS_tiles, u_tiles, S_tiles), of_slots, bars.index(1), at, 0)
    g += batch * g_b + begin * g_t + h.to(gl.int64) * g_h
    gates, inside = places_of(g, left, g_t, g_k, wide)
    d = logarithms(gates, inside, RAW)
    o_s, z_s, q_s, a_s, E_s, w_s, y_s, S_s, r_s = tiles_in_three(memory, left * 0)
    G = sums_in_two(d, o_s[2], r_s, z_s[2])
    mbarrier.wait(bars.index(0), 0)
    zero_tiles_from(of_tokens, left, clean)
    store_over(given.index(2).load(wide) * (power(G) * scale), q_s)
    store_over(given.index(3).load(wide) * power(sums_before(G, d)), a_s)
    store_over(given.index(6).load(wide) * inverse_power(G), y_s)
    split_tile(given.index(0), o_s, wide)
    mbarrier.wait(bars.index(1), 0)
    split_tile(given.index(1), z_s, wide)
    store_over(given.index(4).load(wide) * gl.load(total + place * K + gl.arange(0, K, gl.SliceLayout(1, wide)))[:, None], E_s)
    split_tile(given.index(5), w_s, wide)
    split_tile(given.index(7), S_s, wide)
    fence_async_shared()
    meet()

    o_s, z_s, _, _, _, _, _, S_s, _ = tiles_in_three(memory, left * 0)
    dQ = product_of_parts(o_s, transposed(S_s), wide)
    dA = product_of_parts(z_s, transposed(S_s), wide)
    dQ, dA = finished((dQ, dA), ())
    meet()  # all warps have multiplied S
    store_pairs(tiles_in_three(memory, left * 0), wide)
    more_Q, more_A, dB = products_with_pairs(tiles_in_three(memory, left * 0), wide)
    dQ += more_Q
    dA += more_A
    G = computed_again(G[0]), G[1]
    inverted = inverse_power(G)
    _, _, _, _, _, _, y_s, _, _ = tiles_in_three(memory, left * 0)
    terms = computed_again(-load_parts(y_s, wide) * dB)
    fence_async_shared()
    meet()  # all warps have multiplied U and Xb
    later = (given.index(5), given.index(6))
    load_tiles((v_tiles, k_tiles), later, bars.index(2), row, h * K)
    first = (token * H + h) * K
    step = H.to(gl.int64) * K
    store_rows(d_write + first, dB * inverted, left, step)
    mbarrier.wait(bars.index(2), 0)
    zero_tiles_from(later, left, clean)
    _, _, _, _, _, w_s, y_s, _, _ = tiles_in_three(memory, left * 0)
    split_tile(given.index(5), w_s, wide)
    G = computed_again(G[0]), G[1]
    store_over(given.index(6).load(wide) * inverse_power(G), y_s)
    fence_async_shared()
    meet()
    store_pairs(tiles_in_three(memory, left * 0), wide)
    more_Q, more_A, dK = products_with_pairs(tiles_in_three(memory, left * 0), wide)
    dQ += more_Q
    dA += more_A
    _, _, q_s, a_s, _, _, y_s, p_s, r_s = tiles_in_three(memory, left * 0)
    terms = computed_again(terms - load_parts(y_s, wide) * dK)
    G = computed_again(G[0]), G[1]
    store_rows(d_key + first, dK * inverse_power(G), left, step)
    terms = computed_again(terms + load_parts(q_s, wide) * dQ)
    G = computed_again(G[0]), G[1]
    store_rows(d_query + first, dQ * (power(G) * scale), left, step)
    of_removals = load_parts(a_s, wide) * dA
    gates, inside = places_of(g, left, g_t, g_k, wide)
    store_rows(d_removal + first, dA * power(sums_before(G, logarithms(gates, inside, RAW))), left, step)
    meet()  # all warps have multiplied pairs
    store_parts(terms + of_removals, r_s)
    p_s[0].store(tokens_through(True, wide))
    fence_async_shared()
    meet()
    dG = finished((added_in_parts((p_s[0],), r_s, gl.zeros([C, C], gl.float32, wide)),), ())[0]
    dG += gl.load(kept + place * K + gl.arange(0, K, gl.SliceLayout(0, wide)))[None, :] - of_removals
    gates, inside = places_of(g, left, g_t, g_k, wide)
    store_rows(d_decay + first, gradients_of_gates(dG, gates, inside, RAW, True).to(d_decay.dtype.element_ty), left, step)
    invalidate((bars,))
