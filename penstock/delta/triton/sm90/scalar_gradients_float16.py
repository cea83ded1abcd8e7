"""The gradients of ``scalar_gradients.py`` for float16 inputs, by two groups of warps that have half of the columns of every product each.

Tiles of E, Z = Y / beta and both states have a power of two for each value channel. Products sum over value channels. So each tile is
multiplied to have one power of two, and beta is a factor of rows and columns of products, never of an operand. P, M and F have one as
operands, too. Sums over heads stay in float32.

Loads of the next head are in flight all the time: E, Z and dO have two copies, the states are free before the last products of a head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_decays import decay_vectors, factors_between, gradients_of_decays, log_decays, sums_of_decays
from ....gpu.hopper_tiles import inverse, meet, most, unknown, zero_rows_from
from ....gpu.ring import barriers, expect, invalidate, load_tiles
from ....gpu.tiles import chunk_of_slot, powers_of_two
from .gradient_terms import from_token_on, store_gradient, sum_of_product
from .layouts import C

GROUPS = gl.constexpr(2)  # groups of four warps: each has half of the columns of every product
GROWTH = gl.constexpr(2.0**8)  # W may be as many times as large as E: a chunk writes at most 128 times the largest E of its tokens


@gluon.jit
def power_of_tile(powers, V: gl.constexpr):
    """The largest of the powers of two [V] that value channels lack. All warps find it."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0]))
    return gl.max(gl.load(powers + gl.arange(0, V, layout)), 0)


@gluon.jit
def with_one_power(S_s, powers, zero):
    """Multiply a state, whose value channels lack ``powers``, to lack one power of two, which is returned. ``zero``: see ``unknown``."""
    ROWS: gl.constexpr = S_s.shape[0] // 4
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    channel = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) + unknown(zero)
    power = power_of_tile(powers, S_s.shape[0])
    down = inverse(power)
    for n in gl.static_range(4):
        part = S_s.slice(n * ROWS, ROWS)
        factor = gl.load(powers + n * ROWS + channel) * down
        part.store((part.load(layout).to(gl.float32) * factor[:, None]).to(S_s.dtype))
    return power


@gluon.jit
def store_value_gradients(z_s, powers, rate_s, d_values, step, left, zero):
    """dV = beta o Z, of ``left`` tokens whose rows are ``step`` apart, and Z with one power of two, which is returned."""
    V: gl.constexpr = z_s.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    i = gl.arange(0, C, gl.SliceLayout(1, layout)) + unknown(zero)
    j = gl.arange(0, V, gl.SliceLayout(0, layout)) + unknown(zero)
    power = power_of_tile(powers, V)
    of_channels = gl.load(powers + j)[None, :]
    Z = z_s.load(layout).to(gl.float32)
    x = Z * of_channels * rate_s.load(gl.SliceLayout(1, layout))[:, None]
    gl.store(d_values + i.to(gl.int64)[:, None] * step + j[None, :], x.to(z_s.dtype), mask=(i < left)[:, None])
    z_s.store((Z * (of_channels * inverse(power))).to(z_s.dtype))
    return power


@gluon.jit
def store_halves(e_s, z_s, r_s, rate_s, powers, of_Z, dbeta, H, left, zero):
    """W replaces E, whose value channels lack ``powers``. Returns the one power of two that W lacks. Store dbeta.

    ``of_Z``: what Z lacks. The memory of A_k T is free after it.
    """
    V: gl.constexpr = e_s.shape[1]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, V // GROUPS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    token = gl.arange(0, C, gl.SliceLayout(1, wide))
    removals = (r_s.load(operand).to(gl.float32) * -rate_s.load(gl.SliceLayout(0, operand))[None, :]).to(gl.float16)
    power = power_of_tile(powers, V) * GROWTH
    factors = gl.load(powers + gl.arange(0, V, gl.SliceLayout(0, wide)) + unknown(zero)) * inverse(power)
    W = warpgroup_mma(removals, e_s, e_s.load(wide).to(gl.float32)) * factors[None, :]
    of_beta = gl.sum(z_s.load(wide).to(gl.float32) * W, 1) * (power * of_Z)
    gl.store(dbeta + token.to(gl.int64) * H, of_beta.to(dbeta.dtype.element_ty), mask=token < left)
    W = W.to(gl.float16)
    fence_async_shared()
    meet()
    e_s.store(W)
    return power


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "q_h", "k_h", "g_b", "g_t", "g_h", "b_b", "b_t", "b_h"])
def penstock_gdn_gradients_float16_sm90(
    q_tiles, k_tiles, e_tiles, z_tiles, o_tiles, r_tiles, S_tiles, dS_tiles, dq_tiles, dk_tiles, g, beta, d_query, d_key, d_decay, dbeta,
    cu_seqlens, d_values, e_powers, z_powers, S_powers, dS_powers, scale, N, T, H, R, q_h, k_h, g_b, g_t, g_h, b_b, b_t, b_h,
    K: gl.constexpr, V: gl.constexpr, DECAYS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dq, dk, dv, dg and dbeta, from W = E - (A_k T) (beta o E), P = scale dO U^T o D, M = -Y U^T o D.

    TMA tiles: q, k, dq, dk [C,K] of tokens [B T,H / R K], dO [C,V] of [B T,H V], E, Z [C,V] and A_k T [C,C] of [slots,H,C,...], S^T and
    dS'^T [V,K] of [slots,H,V,K]; value channels of E, Z and the states lack powers of two [slots,H,V]. Reads g and beta [B,T,H] by strides.
    Writes dq, dk [B,T,H / R,K], dV [B,T,H,V], dg and dbeta [B,T,H]. Program (slot of a chunk, head of q and k): the R heads of v that share
    it one after another. ``q_h`` and ``k_h`` are K, or 0 if all heads share q and k.
    """
    gl.static_assert(q_tiles.dtype == gl.float16)
    gl.static_assert(gl.num_warps() == 4 * GROUPS)
    kind: gl.constexpr = q_tiles.dtype
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, C // GROUPS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, K // GROUPS, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, wide)
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4 * GROUPS], [0])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4 * GROUPS, 1], [1, 0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    G = H // R
    slot = gl.program_id(0) // G
    group = gl.program_id(0) % G
    b, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    token = b * T + begin
    row = token.to(gl.int32)
    first = group * R
    q_ring = gl.allocate_shared_memory(kind, [1, C, K], q_tiles.layout)
    k_ring = gl.allocate_shared_memory(kind, [1, C, K], k_tiles.layout)
    x_ring = gl.allocate_shared_memory(kind, [2, C, V], e_tiles.layout)
    z_ring = gl.allocate_shared_memory(kind, [2, C, V], z_tiles.layout)
    o_ring = gl.allocate_shared_memory(kind, [2, C, V], o_tiles.layout)
    r_ring = gl.allocate_shared_memory(gl.float16, [1, C, C], r_tiles.layout)
    S_ring = gl.allocate_shared_memory(kind, [1, V, K], S_tiles.layout)
    dS_ring = gl.allocate_shared_memory(kind, [1, V, K], dS_tiles.layout)
    p_ring = gl.allocate_shared_memory(kind, [1, C, C], half)
    m_ring = gl.allocate_shared_memory(kind, [1, C, C], half)
    if DECAYS:
        f_ring = gl.allocate_shared_memory(kind, [1, C, C], half)
        vectors = decay_vectors()
    rate_s = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles = (e_tiles, z_tiles, o_tiles)
    rings = (x_ring, z_ring, o_ring)
    bars = (barriers(2, 1), barriers(2, 1), barriers(2, 1))
    state_tiles = (S_tiles, dS_tiles)
    state_rings = (S_ring, dS_ring)
    state_bars = (barriers(1, 1), barriers(1, 1))
    r_bars = (barriers(1, 1),)
    qk_bars = (barriers(1, 1), barriers(1, 1))
    fence_async_shared()
    meet()
    head = slot * H + first
    zero = left * 0
    expect((q_tiles, k_tiles), qk_bars, zero, left > 0)
    expect((r_tiles,), r_bars, zero, left > 0)
    expect(tiles, bars, zero, left > 0)
    expect(state_tiles, state_bars, zero, left > 0)
    expect(tiles, bars, zero + 1, R > 1)
    meet()
    load_tiles((q_tiles, k_tiles), (q_ring, k_ring), qk_bars, ([row, group * q_h], [row, group * k_h]), zero, left > 0)
    load_tiles((r_tiles,), (r_ring,), r_bars, ([head * C, 0],), zero, left > 0)
    load_tiles(tiles, rings, bars, ([head * C, 0], [head * C, 0], [row, first * V]), zero, left > 0)
    load_tiles(state_tiles, state_rings, state_bars, ([head * V, 0], [head * V, 0]), zero, left > 0)
    load_tiles(tiles, rings, bars, ([(head + 1) * C, 0], [(head + 1) * C, 0], [row, (first + 1) * V]), zero + 1, R > 1)
    i = gl.arange(0, C, gl.SliceLayout(1, square))
    j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    at = gl.arange(0, C, line)
    g += b * g_b + begin * g_t + first.to(gl.int64) * g_h
    beta += b * b_b + begin * b_t + first.to(gl.int64) * b_h + at.to(gl.int64) * b_t
    d_decay += token * H + first
    dbeta += token * H + first
    d_values += (token * H + first) * V
    at_powers = head.to(gl.int64) * V
    square_zero = gl.zeros([C, C], gl.float32, square)
    wide_zero = gl.zeros([C, K], gl.float32, wide)
    d_q = wide_zero
    d_k = wide_zero
    q_s = q_ring.index(0)
    k_s = k_ring.index(0)
    for n in gl.static_range(2):
        mbarrier.wait(qk_bars[n].index(0), 0)
    if left < C:
        zero_rows_from(q_s, left, clean)
        zero_rows_from(k_s, left, clean)

    for r in range(R):
        phase = r & 1
        zero = unknown(r * 0)  # addresses and descriptors of tiles are computed where they are used: as loop invariants they spill
        q_s = q_ring.index(zero)
        k_s = k_ring.index(zero)
        copy = unknown(phase)
        x_s = x_ring.index(copy)
        z_s = z_ring.index(copy)
        o_s = o_ring.index(copy)
        r_s = r_ring.index(zero)
        S_s = S_ring.index(zero)
        dS_s = dS_ring.index(zero)
        p_s = p_ring.index(zero)
        m_s = m_ring.index(zero)
        rate_s.store(gl.load(beta + r * b_h.to(gl.int64), mask=at < left, other=0.0).to(gl.float32))
        if DECAYS:
            d = log_decays(g + r * g_h.to(gl.int64), g_t, left, at)
            total = sums_of_decays(d, vectors, phase, 1.0)
        mbarrier.wait(r_bars[0].index(0), phase)
        for n in gl.static_range(3):
            mbarrier.wait(bars[n].index(copy), (r >> 1) & 1)
        if left < C:
            zero_rows_from(z_s, left, clean)
            zero_rows_from(o_s, left, clean)
        meet()  # beta is stored
        powers_at = at_powers + unknown(r * V)
        values_at = d_values + unknown(r * V)
        of_Z = store_value_gradients(z_s, z_powers + powers_at, rate_s, values_at, H.to(gl.int64) * V, left, zero)
        fence_async_shared()
        meet()
        of_W = store_halves(x_s, z_s, r_s, rate_s, e_powers + powers_at, of_Z, dbeta + r, H, left, zero)
        expect((r_tiles,), r_bars, zero, r + 1 < R)
        fence_async_shared()
        meet()  # W is stored, A_k T is free
        load_tiles((r_tiles,), (r_ring,), r_bars, ([(head + r + 1) * C, 0],), zero, r + 1 < R)
        P = warpgroup_mma(o_s, x_s.permute((1, 0)), square_zero, use_acc=False, is_async=True)
        M = warpgroup_mma(z_s, x_s.permute((1, 0)), square_zero, use_acc=False, is_async=True)
        if DECAYS:
            of_q = warpgroup_mma(q_s, k_s.permute((1, 0)), square_zero, use_acc=False, is_async=True)
            of_k = warpgroup_mma(k_s, k_s.permute((1, 0)), square_zero, use_acc=False, is_async=True)
            D = factors_between(vectors, phase, 1.0, False, square)
            P, M, of_q, of_k = warpgroup_mma_wait(0, [P, M, of_q, of_k])
            P = P * D
            M = M * D
        else:
            P, M = warpgroup_mma_wait(0, [P, M])
        by_column = rate_s.load(gl.SliceLayout(0, square))[None, :] * of_W
        P = gl.where(i[:, None] >= j, P * by_column * scale, 0.0)
        M = gl.where(i[:, None] > j, M * by_column * (rate_s.load(gl.SliceLayout(1, square)) * -of_Z)[:, None], 0.0)
        if DECAYS:
            F = P * of_q + M * of_k
            down, of_F = powers_of_two(most(F))
            f_ring.index(zero).store((F * down).to(kind))
        down, of_pairs = powers_of_two(most(gl.maximum(gl.abs(P), gl.abs(M))))
        p_s.store((P * down).to(kind))
        m_s.store((M * down).to(kind))
        for n in gl.static_range(2):
            mbarrier.wait(state_bars[n].index(0), phase)
        of_S = with_one_power(S_s, S_powers + powers_at, zero)
        of_dS = with_one_power(dS_s, dS_powers + powers_at, zero)
        if DECAYS:
            of_state = sum_of_product(S_s, dS_s, 4) * total * (of_S * of_dS)
        fence_async_shared()
        meet()
        dQ = warpgroup_mma(o_s, S_s, wide_zero, use_acc=False, is_async=True)
        dA = warpgroup_mma(z_s, S_s, wide_zero, use_acc=False, is_async=True)
        if DECAYS:
            read = vectors[2].index(phase).load(by_row)[:, None]
            dQ = warpgroup_mma_wait(1, [dQ]) * (read * (scale * of_S))
            read = read * rate_s.load(by_row)[:, None] * (of_Z * of_S)
            of_rows = q_s.load(wide).to(gl.float32) * dQ
            d_q += dQ
            dA = warpgroup_mma_wait(0, [dA]) * read
            dB = warpgroup_mma(x_s, dS_s, wide_zero, use_acc=False, is_async=True)
            of_rows = gl.sum(of_rows - k_s.load(wide).to(gl.float32) * dA, 1)
            d_k -= dA
            dB = warpgroup_mma_wait(0, [dB]) * vectors[3].index(phase).load(by_row)[:, None]
            dB = dB * rate_s.load(by_row)[:, None] * (of_W * of_dS)
            of_columns = gl.sum(k_s.load(wide).to(gl.float32) * dB, 1)
            d_k += dB
        else:
            dQ = warpgroup_mma_wait(1, [dQ])
            d_q += dQ * (scale * of_S)
            dA = warpgroup_mma_wait(0, [dA]) * rate_s.load(by_row)[:, None] * (of_Z * of_S)
            dB = warpgroup_mma(x_s, dS_s, wide_zero, use_acc=False, is_async=True)
            d_k -= dA
            d_k += warpgroup_mma_wait(0, [dB]) * rate_s.load(by_row)[:, None] * (of_W * of_dS)
        expect(state_tiles, state_bars, zero, r + 1 < R)
        expect(tiles, bars, copy, r + 2 < R)
        fence_async_shared()
        meet()  # W, Z, dO and the states are free
        place = head + r + 1
        load_tiles(state_tiles, state_rings, state_bars, ([place * V, 0], [place * V, 0]), zero, r + 1 < R)
        column = (first + r + 2) * V
        load_tiles(tiles, rings, bars, ([(place + 1) * C, 0], [(place + 1) * C, 0], [row, column]), copy, r + 2 < R)
        d_q = d_q * down
        d_k = d_k * down
        d_q = warpgroup_mma(p_s, k_s, d_q, is_async=True)
        d_k = warpgroup_mma(p_s.permute((1, 0)), q_s, d_k, is_async=True)
        d_k = warpgroup_mma(m_s, k_s, d_k, is_async=True)
        d_k = warpgroup_mma(m_s.permute((1, 0)), k_s, d_k, is_async=True)
        if DECAYS:
            F = warpgroup_mma(from_token_on(unknown(zero), square, kind), f_ring.index(zero), square_zero, use_acc=False, is_async=True)
            d_q, d_k, F = warpgroup_mma_wait(0, [d_q, d_k, F])
            F = F * of_F
            pairs = gl.sum(gl.where(j < i[:, None], F, 0.0), 1)
            queries = gl.convert_layout(of_rows, line)
            keys = gl.convert_layout(of_columns, line)
            gradient = gradients_of_decays(queries, keys, of_state, d, at >= left) + gl.convert_layout(pairs, line)
            gl.store(d_decay + r + at.to(gl.int64) * H, gradient.to(d_decay.dtype.element_ty), mask=at < left)
        else:
            d_q, d_k = warpgroup_mma_wait(0, [d_q, d_k])
        d_q = d_q * of_pairs
        d_k = d_k * of_pairs
    meet()  # no product reads q and k
    q_s = q_ring.index(0)
    k_s = k_ring.index(0)
    step = G.to(gl.int64) * K
    store_gradient(dq_tiles, d_q, q_s, d_query, row, group * K, token, step, left)
    store_gradient(dk_tiles, d_k, k_s, d_key, row, group * K, token, step, left)
    tma.store_wait(0)
    invalidate(bars + state_bars + r_bars + qk_bars)
