"""Gradients of KDA's inputs on Hopper, in Gluon: everything that needs no chain over chunks. Any decay at the same speed.

With S the state before the chunk, dS' the gradient of the state after it, W and Y = dV from the walks, and f <= 1 the factors of level L,

    U = beta o W                    dbeta = rowsum(Y o W) / beta
    P = scale dO U^T (s <= t)       M = -Y U^T (s < t), its transpose above
    levels:  X_q = f o q (second halves), X_k = f o k;   dX_q = P_L X_k,   dX_k = M_L X_k + P_L^T X_q
    dq = sum of f o dX_q + e k + scale read o (dO S^T)                                      e the diagonal of P
    dk = sum of f o dX_k + e q - read o (Y S^T) + rest o (U dS'^T)
    dg_t = sum over levels of (X_q o dX_q + X_k o dX_k) over later tokens of the second half, over earlier tokens of the first half
           + sum i >= t of q o scale read o (dO S^T) - k o read o (Y S^T) + sum s < t of k o rest o (U dS'^T) + total o rowsum(S o dS')

Every term of dg is a pair of tokens with t between them, so there is no cancellation. beta is a factor of rows and columns of products:
U is in no memory, and where beta is 0 nothing is divided but Y, which has the same floor.

The launches before this one keep for it, per token and head with K = V = 128, W 256 bytes, S 512 and dS' 512.

float16: W, S, dS' and, in place of Y, Z = Y / beta are float16 times a power of two for each value channel. Here they get one for a tile,
and P and M get one, too. dV is stored here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, async_store, exp2, inverse, meet, most_of_both, reinterpret, zero_rows_from
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import LOG2E, chunk_of_slot, powers_of_two
from .columns import PAIRS, RIGHT, TILE, group_of, products_of_group, store_group, store_in_blocks, store_in_groups, summed
from .layouts import GROUPS, ROWS, C
from .levels import MASKS, PREFIX, SUFFIX, far_level, near_levels, store_masks
from .programs import nonzero

W = gl.constexpr(64)  # key channels of a program


@gluon.jit
def logarithms_of(g, g_t, left, m):
    """The log2 decays of group m [W,ROWS], 0 after the last token."""
    token = ROWS * m + gl.arange(0, ROWS, gl.SliceLayout(0, TILE))[None, :]
    channel = gl.arange(0, W, gl.SliceLayout(1, TILE))[:, None]
    return gl.load(g + (token * g_t + channel), mask=(token < left) & (channel < W), other=0.0).to(gl.float32) * LOG2E


@gluon.jit
def values_of_one_power(tile, powers, layout: gl.constexpr):
    """Give a tile [C,V] whose columns lack ``powers`` [V] one power for all. Returns the tile before, float32, ``powers`` and the power."""
    V: gl.constexpr = tile.shape[1]
    lacking = gl.load(powers + gl.arange(0, V, gl.SliceLayout(0, layout)))
    most = gl.max(lacking, 0)
    x = tile.load(layout).to(gl.float32)
    tile.store((x * (lacking * inverse(most))[None, :]).to(tile.dtype))
    return x, lacking, most


@gluon.jit
def states_of_one_power(tile, powers, layout: gl.constexpr):
    """Give a tile [V,W] whose rows lack ``powers`` [V] one power for all, which is returned."""
    V: gl.constexpr = tile.shape[0]
    most = gl.max(gl.load(powers + gl.arange(0, V, gl.SliceLayout(0, layout))), 0)
    for n in gl.static_range(V // 32):  # the whole tile takes too many registers
        part = tile.slice(32 * n, 32)
        lacking = gl.load(powers + 32 * n + gl.arange(0, 32, gl.SliceLayout(1, layout)))
        part.store((part.load(layout).to(gl.float32) * (lacking * inverse(most))[:, None]).to(tile.dtype))
    return most


@gluon.jit
def store_pairs(w_s, o_s, y_s, p_s, m_s, own_s, rate_s, powers, beta, b_t, dbeta, step, left, first_block, scale):
    """Store P and M in blocks, the diagonal of P in ``own_s`` [C], beta in ``rate_s`` [C], and dbeta if this is the first block of K.

    float16: ``powers`` are those that W and Z lack. Returns what P and M lack.
    """
    kind: gl.constexpr = w_s.dtype
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    row: gl.constexpr = gl.SliceLayout(1, square)
    zero = gl.zeros([C, C], gl.float32, square)
    P = warpgroup_mma(o_s, w_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    below = warpgroup_mma(y_s, w_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    above = warpgroup_mma(w_s, y_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    token = gl.arange(0, C, row)
    rates = gl.load(beta + token.to(gl.int64) * b_t, mask=token < left, other=0.0).to(gl.float32)
    rate_s.store(rates)
    meet()
    i = token[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    columns = rate_s.load(gl.SliceLayout(0, square))[None, :]
    P, below, above = warpgroup_mma_wait(0, [P, below, above])
    power = 1.0
    if kind == gl.float16:
        of_w, of_z = powers
        P = gl.where(i >= j, P * (columns * scale) * of_w, 0.0)
        own_s.store(gl.sum(gl.where(i == j, P, 0.0), 1))
        M = gl.where(i >= j, below, above) * of_w * of_z
        if first_block:
            of_beta = gl.sum(gl.where(i == j, M, 0.0), 1)
            gl.store(dbeta + token.to(gl.int64) * step, of_beta.to(dbeta.dtype.element_ty), mask=token < left)
        M = gl.where(i == j, 0.0, M * (columns * -rates[:, None]))
        most_P, most_M = most_of_both(P, M)
        down, power = powers_of_two(gl.maximum(most_P, most_M))
        store_in_blocks((P * down).to(kind), p_s)
        store_in_blocks((M * down).to(kind), m_s)
    else:
        P = gl.where(i >= j, P * (columns * scale), 0.0)
        own_s.store(gl.sum(gl.where(i == j, P, 0.0), 1))
        store_in_blocks(P.to(kind), p_s)
        if first_block:
            of_beta = gl.sum(gl.where(i == j, below, 0.0), 1) / nonzero(rates)
            gl.store(dbeta + token.to(gl.int64) * step, of_beta.to(dbeta.dtype.element_ty), mask=token < left)
        M = gl.where(i > j, below * -columns, gl.where(i < j, above * -rates[:, None], 0.0))
        store_in_blocks(M.to(kind), m_s)
    return power


@gluon.jit
def store_state_products(d_s, w_s, y_s, o_s, S_s, dS_s, across_s, rate_s, powers):
    """U dS'^T, Y S^T and dO S^T, transposed and in groups, in ``d_s``, the memory of W, Y and dO. rowsum(S o dS') in ``across_s`` [W].

    float16: ``powers`` are those that W, Z, S and dS' lack.
    """
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    zero = gl.zeros([W, C], gl.float32, square)
    i = gl.arange(0, W, gl.SliceLayout(1, square))[:, None]
    j = gl.arange(0, W, gl.SliceLayout(0, square))[None, :]
    D = warpgroup_mma(S_s.permute((1, 0)), dS_s, zero, use_acc=False, is_async=True)
    D_u = warpgroup_mma(dS_s.permute((1, 0)), w_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    D_y = warpgroup_mma(S_s.permute((1, 0)), y_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    D_o = warpgroup_mma(S_s.permute((1, 0)), o_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    D, D_u, D_y, D_o = warpgroup_mma_wait(0, [D, D_u, D_y, D_o])
    across = gl.sum(gl.where(i == j, D, 0.0), 1)
    if w_s.dtype == gl.float16:
        of_w, of_z, of_S, of_dS = powers
        across = across * of_S * of_dS
        D_u = D_u * of_w * of_dS
        D_y = D_y * rate_s.load(gl.SliceLayout(0, square))[None, :] * of_z * of_S
        D_o = D_o * of_S
    across_s.store(across)
    D_u = D_u * rate_s.load(gl.SliceLayout(0, square))[None, :]
    meet()
    store_in_groups(D_u, d_s, 0)
    store_in_groups(D_y, d_s, 1)
    store_in_groups(D_o, d_s, 2)


@gluon.jit
def store_decays_around(factors_s, total):
    """From the decays ``total`` of the groups, [W] each: ``factors_s`` [2 GROUPS,W].

    0 to 2: the decays of all groups before groups 1 to 3. 3 to 5: of all after groups 0 to 2. 6, 7: of groups 1 and 2.
    """
    factors_s.index(0).store(total[0])
    factors_s.index(1).store(total[0] * total[1])
    factors_s.index(2).store(total[0] * total[1] * total[2])
    factors_s.index(3).store(total[1] * total[2] * total[3])
    factors_s.index(4).store(total[2] * total[3])
    factors_s.index(5).store(total[3])
    factors_s.index(6).store(total[1])
    factors_s.index(7).store(total[2])


@gluon.jit
def decays_around(factors_s, m):
    """The decays of all groups before group m, of all after it, and that of level 32 between it and the middle: [W,1] each."""
    row: gl.constexpr = gl.SliceLayout(1, TILE)
    before = gl.where(m > 0, factors_s.index(gl.maximum(m, 1) - 1).load(row)[:, None], 1.0)
    after = gl.where(m < 3, factors_s.index(gl.minimum(m, 2) + 3).load(row)[:, None], 1.0)
    middle = gl.where((m == 0) | (m == 3), factors_s.index(6 + m // 2).load(row)[:, None], 1.0)
    return before, after, middle


@gluon.jit
def store_tiles_and_sums(tiles_q, tiles_k, sums_s, d_s, factors_s, q, k, decay, scale, m):
    """Store the tiles of levels 32 and 16 of group m, see ``far_level``, and the sums over its tokens of the terms of states of dg.

    ``sums_s`` [2 GROUPS,W]: of the terms for the tokens before the group, and for those after it.
    """
    through, remaining = products_of_group(decay)
    before, after, middle = decays_around(factors_s, m)
    Q = q * through
    K = k * through
    X = k * remaining
    z = Q * (d_s.index(2 * GROUPS + m).load(TILE) * scale) - K * d_s.index(GROUPS + m).load(TILE)
    sums_s.index(m).store(gl.sum(z * before, 1))
    sums_s.index(GROUPS + m).store(gl.sum(X * d_s.index(m).load(TILE) * after, 1))
    store_group(gl.where(m > 1, K, X) * middle, tiles_k, m)
    store_group(gl.where(m % 2 == 1, K, X), tiles_k, GROUPS + m)
    if m > 1:
        store_group(Q * middle, tiles_q, m % 2)
    if m % 2 == 1:
        store_group(Q, tiles_q, 2 + m // 2)


@gluon.jit
def far_terms(tiles_q, tiles_k, p_s, m_s, power, d_s, factors_s, q, k, through, remaining, scale, m):
    """The terms of levels 16 and 32 and of the states for group m: of dq and dk [W,ROWS], and their products with q and k.

    These are of dg for earlier tokens and for later ones. Also returns the sum [W] of those of level 32, which the group beside it needs.
    """
    before, after, middle = decays_around(factors_s, m)
    dQ, dX = far_level(tiles_q, tiles_k, p_s, m_s, power, m, m ^ 1, 1)
    Q = q * through
    K = k * through
    X = k * remaining
    later = gl.where(m % 2 == 1, 1.0, 0.0)  # whether group m is in the second half of its block of level 16
    second = gl.where(m > 1, 1.0, 0.0)  # of level 32
    of_q = d_s.index(2 * GROUPS + m).load(TILE) * (before * scale) + dQ
    of_k = dX * later - d_s.index(GROUPS + m).load(TILE) * before
    of_x = d_s.index(m).load(TILE) * after + dX * (1.0 - later)
    dQ, dX = far_level(tiles_q, tiles_k, p_s, m_s, power, m, (m & 2) ^ 2, 2)
    beside = gl.sum((Q * dQ + gl.where(m > 1, K, X) * dX) * middle, 1)
    of_q += dQ * middle
    of_k += dX * (middle * second)
    of_x += dX * (middle * (1.0 - second))
    return of_q * through, of_k * through + of_x * remaining, Q * of_q + K * of_k, X * of_x, beside


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "b_b", "b_t", "b_h"])
def penstock_kda_gradients_sm90(
    q_tiles, k_tiles, w_tiles, o_tiles, y_tiles, S_tiles, dS_tiles, dq_tiles, dk_tiles, g, beta, kept_powers, d_powers, d_query, d_key,
    d_values, d_decay, dbeta, cu_seqlens, scale, N, T, H, R, g_b, g_t, g_h, b_b, b_t, b_h,
    K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dq, dk, dg and dbeta, from U = beta o W, P = scale dO U^T, M = -Y U^T.

    TMA tiles: q, k [C,W] of tokens [B T,H / R K], dO and Y [C,V] of [B T,H V], dq, dk [C,W] of [B T,H K]; W [C,V] of [slots,H,C,V], S^T
    and dS'^T [V,W] of [slots,H,V,K]. Reads g [B,T,H,K] and beta [B,T,H] by strides. Writes dq, dk, dg [B,T,H,K] and dbeta [B,T,H].
    Program (slot of a chunk, head, block of W key channels).

    float16: Z [C,V] of [slots,H,C,V] in place of Y. ``kept_powers`` and ``d_powers`` [slots,H,2,V] have what W and S^T, Z and dS'^T lack.
    Writes dV [B,T,H,V], too.
    """
    gl.static_assert(q_tiles.dtype == gl.bfloat16 or q_tiles.dtype == gl.float16)
    F16: gl.constexpr = q_tiles.dtype == gl.float16
    PARTS: gl.constexpr = K // W
    kind: gl.constexpr = q_tiles.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row: gl.constexpr = gl.SliceLayout(1, TILE)
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    p = gl.program_id(0) % PARTS
    h = gl.program_id(0) // PARTS % H
    slot = gl.program_id(0) // PARTS // H
    b, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    line = b * T + begin
    line_32 = line.to(gl.int32)
    place = slot * H + h
    FIT: gl.constexpr = 2 * W // V  # tiles of W, Y, dO and states that fit in the memory of what follows them
    d_s = gl.allocate_shared_memory(gl.float32, [3 * GROUPS, W, ROWS], PAIRS)
    memory_s = reinterpret(d_s, kind, [3 * FIT, C, V], w_tiles.layout)
    w_s = memory_s.index(0)
    y_s = memory_s.index(1)
    o_s = memory_s.index(2)
    q_s = gl.allocate_shared_memory(kind, [GROUPS, ROWS, W], q_tiles.layout)
    k_s = gl.allocate_shared_memory(kind, [GROUPS, ROWS, W], k_tiles.layout)
    far_k = gl.allocate_shared_memory(kind, [2 * GROUPS, ROWS, W], q_tiles.layout)  # of levels 32 and 16
    far_q = gl.allocate_shared_memory(kind, [2 * GROUPS, ROWS, W], q_tiles.layout)
    S_s = reinterpret(far_k, kind, [FIT, V, W], S_tiles.layout).index(0)
    dS_s = reinterpret(far_q, kind, [FIT, V, W], dS_tiles.layout).index(0)
    p_s = gl.allocate_shared_memory(kind, [GROUPS * GROUPS, ROWS, ROWS], plain2)
    m_s = gl.allocate_shared_memory(kind, [GROUPS * GROUPS, ROWS, ROWS], plain2)
    own_s = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], flat)
    rate_s = gl.allocate_shared_memory(gl.float32, [C], flat)
    whole_q = reinterpret(q_s, kind, [C, W], q_tiles.layout)
    whole_k = reinterpret(k_s, kind, [C, W], k_tiles.layout)
    loaded = barriers(3, 1)
    fence_async_shared()
    meet()
    mbarrier.expect(loaded.index(0), 3 * w_tiles.block_type.nbytes)
    async_load(w_tiles, [place * C, 0], loaded.index(0), w_s)
    async_load(o_tiles, [line_32, h * V], loaded.index(0), o_s)
    if F16:
        async_load(y_tiles, [place * C, 0], loaded.index(0), y_s)
    else:
        async_load(y_tiles, [line_32, h * V], loaded.index(0), y_s)
    mbarrier.expect(loaded.index(1), 2 * S_tiles.block_type.nbytes)
    async_load(S_tiles, [place * V, p * W], loaded.index(1), S_s)
    async_load(dS_tiles, [place * V, p * W], loaded.index(1), dS_s)
    mbarrier.expect(loaded.index(2), 2 * q_tiles.block_type.nbytes)
    async_load(q_tiles, [line_32, h // R * K + p * W], loaded.index(2), whole_q)
    async_load(k_tiles, [line_32, h // R * K + p * W], loaded.index(2), whole_k)

    g += b * g_b + begin * g_t + h.to(gl.int64) * g_h + p * W
    beta += b * b_b + begin * b_t + h.to(gl.int64) * b_h
    total = ()
    for n in gl.static_range(GROUPS):
        total = total + (exp2(gl.sum(logarithms_of(g, g_t, left, n), 1)),)
    mbarrier.wait(loaded.index(0), 0)
    if left < C:
        zero_rows_from(o_s, left, clean)
        zero_rows_from(y_s, left, clean)
    of_w, of_z, of_S, of_dS = 1.0, 1.0, 1.0, 1.0
    if F16:
        kept_powers += place.to(gl.int64) * (2 * V)
        d_powers += place.to(gl.int64) * (2 * V)
        _x, _lacking, of_w = values_of_one_power(w_s, kept_powers, clean)
        z, lacking, of_z = values_of_one_power(y_s, d_powers, clean)
        if p == 0:
            token = gl.arange(0, C, gl.SliceLayout(1, clean))
            rates = gl.load(beta + token.to(gl.int64) * b_t, mask=token < left, other=0.0).to(gl.float32)
            dV = (z * rates[:, None] * lacking[None, :]).to(kind)
            there = (
                (line * H + h) * V + token[:, None].to(gl.int64) * (H.to(gl.int64) * V) + gl.arange(0, V, gl.SliceLayout(0, clean))[None, :]
            )
            gl.store(d_values + there, dV, mask=(token < left)[:, None])
    fence_async_shared()
    meet()
    whole_own = reinterpret(own_s, gl.float32, [C], flat)
    power = store_pairs(w_s, o_s, y_s, p_s, m_s, whole_own, rate_s, (of_w, of_z), beta, b_t, dbeta + line * H + h, H, left, p == 0, scale)
    mbarrier.wait(loaded.index(1), 0)
    across_s = gl.allocate_shared_memory(gl.float32, [W], flat)
    if F16:
        of_S = states_of_one_power(S_s, kept_powers + V, clean)
        of_dS = states_of_one_power(dS_s, d_powers + V, clean)
        fence_async_shared()
        meet()
    store_state_products(d_s, w_s, y_s, o_s, S_s, dS_s, across_s, rate_s, (of_w, of_z, of_S, of_dS))
    meet()  # S_s and dS_s are free

    sums_s = reinterpret(far_q.index(GROUPS), gl.float32, [2 * GROUPS, W], flat)
    factors_s = reinterpret(far_q.index(GROUPS + 1), gl.float32, [2 * GROUPS, W], flat)
    last_s = reinterpret(far_q, kind, [2 * C, W], dS_tiles.layout).slice(3 * C // 2, C // 2)
    masks_s = reinterpret(last_s, gl.bfloat16, [MASKS, ROWS, ROWS], plain2)
    store_decays_around(factors_s, total)
    store_masks(masks_s)
    mbarrier.wait(loaded.index(2), 0)
    if left < C:
        zero_rows_from(whole_q, left, clean)
        zero_rows_from(whole_k, left, clean)
    meet()
    logarithms = logarithms_of(g, g_t, left, 0)
    for m in range(GROUPS):
        coming = logarithms_of(g, g_t, left, (m + 1) % GROUPS)
        Q = group_of(q_s, m).to(gl.float32)
        X = group_of(k_s, m).to(gl.float32)
        store_tiles_and_sums(far_q, far_k, sums_s, d_s, factors_s, Q, X, exp2(logarithms), scale, m)
        logarithms = coming
    meet()
    across = across_s.load(row)
    for n in gl.static_range(GROUPS):
        across *= total[n]
    beside = gl.zeros([W], gl.float32, row)
    first = (line * H + h) * K + p * W
    step = H.to(gl.int64) * (ROWS * K)
    token = gl.arange(0, ROWS, gl.SliceLayout(0, TILE))[None, :]
    channel = gl.arange(0, W, gl.SliceLayout(1, TILE))[:, None]
    for n in range(GROUPS):
        m = n ^ (n >> 1)  # 0, 1, 3, 2: of the groups of a half of the chunk, that which is farther from the middle first
        then = (n + 1) % GROUPS
        coming = logarithms_of(g, g_t, left, then ^ (then >> 1))
        Q = group_of(q_s, m).to(gl.float32)
        X = group_of(k_s, m).to(gl.float32)
        dq, dk, dg, through, remaining = near_levels(Q, X, exp2(logarithms), p_s, m_s, power, masks_s, m)
        constant = across + gl.where(n % 2 == 1, beside, 0.0)
        more_q, more_k, z_r, z_c, beside = far_terms(far_q, far_k, p_s, m_s, power, d_s, factors_s, Q, X, through, remaining, scale, m)
        for j in gl.static_range(GROUPS):
            constant += gl.where(m < j, sums_s.index(j).load(row), 0.0) + gl.where(m > j, sums_s.index(GROUPS + j).load(row), 0.0)
        dg = summed(z_r, masks_s.index(SUFFIX).load(RIGHT), dg + constant[:, None], kind)
        dg = summed(z_c, masks_s.index(PREFIX).load(RIGHT), dg, kind)
        e = own_s.index(m).load(gl.SliceLayout(0, TILE))[None, :]
        store_group(dq + more_q + e * X, q_s, m)
        store_group(dk + more_k + e * Q, k_s, m)
        at = d_decay + first + m * step
        gl.store(at + (token * (H * K) + channel), dg.to(d_decay.dtype.element_ty), mask=(ROWS * m + token < left) & (channel < W))
        logarithms = coming
    fence_async_shared()
    meet()
    if left == C:
        async_store(dq_tiles, [line_32, h * K + p * W], whole_q)
        async_store(dk_tiles, [line_32, h * K + p * W], whole_k)
    else:
        i = gl.arange(0, C, gl.SliceLayout(1, clean))[:, None]
        there = first + i.to(gl.int64) * (H.to(gl.int64) * K) + gl.arange(0, W, gl.SliceLayout(0, clean))[None, :]
        gl.store(d_query + there, whole_q.load(clean), mask=i < left)
        gl.store(d_key + there, whole_k.load(clean), mask=i < left)
    tma.store_wait(0)
    invalidate((loaded,))
