"""Gradients of KDA's inputs on Hopper, in Gluon: everything that needs no chain over chunks. Any decay at the same speed.

With S the state before the chunk, dS' the gradient of the state after it, X and Y = dV from the walks, and f <= 1 the factors of level L,

    R = X / beta - (A_k T) X        U = beta o R = T X              dbeta = rowsum(Y o R) / beta
    P = scale dO U^T (s <= t)       M = -Y U^T (s < t), its transpose above
    levels:  X_q = f o q (second halves), X_k = f o k;   dX_q = P_L X_k,   dX_k = M_L X_k + P_L^T X_q
    dq = sum of f o dX_q + e k + scale read o (dO S^T)                                      e the diagonal of P
    dk = sum of f o dX_k + e q - read o (Y S^T) + rest o (U dS'^T)
    dg_t = sum over levels of (X_q o dX_q + X_k o dX_k) over later tokens of the second half, over earlier tokens of the first half
           + sum i >= t of q o scale read o (dO S^T) - k o read o (Y S^T) + sum s < t of k o rest o (U dS'^T) + total o rowsum(S o dS')

Every term of dg is a pair of tokens with t between them, so there is no cancellation. A_k T is bounded and has no factor beta: where beta
is tiny, no row underflows in float16. It is taken as two bfloat16 numbers.

The forward pass keeps nothing but its inputs. The launches before this one keep for it, per token and head with K = V = 128: X 256 bytes,
A_k T 128, S 512, dS' 512, and for each other q and k with decays 256 each, B^T 256, A 128. The four launches read and write 9.25 KiB.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from ....gpu.hopper_tiles import async_load, async_store, exp2, meet, reinterpret, zero_rows_from
from ....gpu.ring import barriers
from ....gpu.tiles import LOG2E, span_of
from .columns import (
    PAIRS,
    TILE,
    group_of,
    ones_where,
    products_of_group,
    rounded,
    rows_and_columns,
    store_group,
    store_in_blocks,
    store_in_groups,
    times,
)
from .layouts import GROUPS, ROWS, C
from .levels import far_level, near_levels
from .programs import nonzero

W = gl.constexpr(64)  # key channels of a program


@gluon.jit
def logarithms_of(g, g_t, left, m):
    """The log2 decays of group m [W,ROWS], 0 after the last token."""
    token = ROWS * m + gl.arange(0, ROWS, gl.SliceLayout(0, TILE))[None, :]
    channel = gl.arange(0, W, gl.SliceLayout(1, TILE))[:, None]
    return gl.load(g + (token * g_t + channel), mask=(token < left) & (channel < W), other=0.0).to(gl.float32) * LOG2E


@gluon.jit
def store_values_and_pairs(x_s, o_s, y_s, t_s, p_s, m_s, own_s, beta, b_t, dbeta, step, left, first_block, scale):
    """U replaces X. Store P and M in blocks, the diagonal of P in ``own_s`` [C], and dbeta if this is the first block of key channels."""
    kind: gl.constexpr = x_s.dtype
    V: gl.constexpr = x_s.shape[1]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    token = gl.arange(0, C, gl.SliceLayout(1, wide))
    rates = nonzero(gl.load(beta + token.to(gl.int64) * b_t, mask=token < left, other=0.0).to(gl.float32))
    inverse = 1.0 / rates
    T = -t_s.load(gl.DotOperandLayout(0, wide, 2)).to(gl.float32)
    most = (T.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)  # the bits of a bfloat16 number
    high = most.to(kind)
    low = (T - most).to(kind)
    R = x_s.load(wide).to(gl.float32) * inverse[:, None]
    R = warpgroup_mma(high, x_s, R)
    R = warpgroup_mma(low, x_s, R)
    of_beta = gl.sum(y_s.load(wide).to(gl.float32) * inverse[:, None] * R, 1)
    gl.store(dbeta + token.to(gl.int64) * step, of_beta.to(dbeta.dtype.element_ty), mask=(token < left) & first_block)
    U = R * rates[:, None]
    U = U.to(kind)
    meet()
    x_s.store(U)
    fence_async_shared()
    meet()
    zero = gl.zeros([C, C], gl.float32, square)
    i = gl.arange(0, C, gl.SliceLayout(1, square))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    P = warpgroup_mma(o_s, x_s.permute((1, 0)), zero, use_acc=False) * scale
    P = gl.where(i >= j, P, 0.0)
    reinterpret(own_s, gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(gl.sum(gl.where(i == j, P, 0.0), 1))
    store_in_blocks(P.to(kind), p_s)
    below = warpgroup_mma(y_s, x_s.permute((1, 0)), zero, use_acc=False)
    above = warpgroup_mma(x_s, y_s.permute((1, 0)), zero, use_acc=False)
    M = gl.where(i > j, -below, gl.where(i < j, -above, 0.0))
    store_in_blocks(M.to(kind), m_s)
    meet()


@gluon.jit
def store_state_products(memory_s, S_s, dS_s, across_s):
    """U dS'^T, Y S^T and dO S^T, transposed and in groups, replace U, Y and dO. rowsum(S o dS') in ``across_s`` [W]."""
    x_s = memory_s.index(0)
    y_s = memory_s.index(1)
    o_s = memory_s.index(2)
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    zero = gl.zeros([W, C], gl.float32, square)
    i = gl.arange(0, W, gl.SliceLayout(1, square))[:, None]
    j = gl.arange(0, W, gl.SliceLayout(0, square))[None, :]
    D = warpgroup_mma(S_s.permute((1, 0)), dS_s, zero, use_acc=False)
    across_s.store(gl.sum(gl.where(i == j, D, 0.0), 1))
    D_u = warpgroup_mma(dS_s.permute((1, 0)), x_s.permute((1, 0)), zero, use_acc=False)
    D_y = warpgroup_mma(S_s.permute((1, 0)), y_s.permute((1, 0)), zero, use_acc=False)
    D_o = warpgroup_mma(S_s.permute((1, 0)), o_s.permute((1, 0)), zero, use_acc=False)
    meet()
    d_s = reinterpret(memory_s, gl.float32, [3 * GROUPS, W, ROWS], PAIRS)
    store_in_groups(D_u, d_s, 0)
    store_in_groups(D_y, d_s, 1)
    store_in_groups(D_o, d_s, 2)
    return d_s


@gluon.jit
def decays_around(totals_s, m):
    """The decays of all groups before group m, of all after it, and that of level 32 between it and the middle: [W] each."""
    row: gl.constexpr = gl.SliceLayout(1, TILE)
    before = gl.full([W], 1.0, gl.float32, row)
    after = gl.full([W], 1.0, gl.float32, row)
    middle = gl.full([W], 1.0, gl.float32, row)
    for n in gl.static_range(GROUPS):
        one = totals_s.index(n).load(row)
        before = gl.where(m > n, before * one, before)
        after = gl.where(m < n, after * one, after)
        if n == 1:
            middle = gl.where(m == 0, one, middle)
        if n == 2:
            middle = gl.where(m == 3, one, middle)
    return before, after, middle


@gluon.jit
def state_terms(d_s, q, k, through, remaining, before, after, scale, m):
    """For group m, the terms of the states of dq, of dk from later tokens and from earlier ones, and their products with q and k."""
    D_u = d_s.index(m).load(TILE)
    D_y = d_s.index(GROUPS + m).load(TILE)
    D_o = d_s.index(2 * GROUPS + m).load(TILE)
    read = through * before[:, None]
    dq = D_o * (read * scale)
    dk = -D_y * read
    db = D_u * (remaining * after[:, None])
    return dq, dk, db, q.to(gl.float32) * dq + k.to(gl.float32) * dk, k.to(gl.float32) * db


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "b_b", "b_t", "b_h"])
def penstock_kda_gradients_sm90(
    q_tiles, k_tiles, x_tiles, o_tiles, y_tiles, t_tiles, S_tiles, dS_tiles, dq_tiles, dk_tiles, g, beta, d_query, d_key, d_decay, dbeta,
    cu_seqlens, scale, N, T, H, R, g_b, g_t, g_h, b_b, b_t, b_h, K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dq, dk, dg and dbeta, from U = T X, P = scale dO U^T, M = -Y U^T.

    TMA tiles: q, k [C,W] of tokens [B T,H / R K], dO and Y [C,V] of [B T,H V], dq, dk [C,W] of [B T,H K]; X [C,V] and A_k T [C,C] of
    [slots,H,C,...], S^T and dS'^T [V,W] of [slots,H,V,K]. Reads g [B,T,H,K] and beta [B,T,H] by strides. Writes dq, dk, dg [B,T,H,K] and
    dbeta [B,T,H]. Program (slot of a chunk, head, block of W key channels).
    """
    gl.static_assert(q_tiles.dtype == gl.bfloat16)
    PARTS: gl.constexpr = K // W
    kind: gl.constexpr = q_tiles.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row: gl.constexpr = gl.SliceLayout(1, TILE)
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    p = gl.program_id(0) % PARTS
    h = gl.program_id(0) // PARTS % H
    slot = gl.program_id(0) // PARTS // H
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, C, PACKED)
    b = n.to(gl.int64)
    if PACKED:
        b = b * 0
    left = gl.minimum(end - begin - done, C).to(gl.int32)
    if left <= 0:
        return
    line = b * T + begin + done
    line_32 = line.to(gl.int32)
    place = slot * H + h
    memory_s = gl.allocate_shared_memory(kind, [3, C, V], x_tiles.layout)
    x_s = memory_s.index(0)
    y_s = memory_s.index(1)
    o_s = memory_s.index(2)
    t_s = gl.allocate_shared_memory(gl.float16, [C, C], t_tiles.layout)
    q_s = gl.allocate_shared_memory(kind, [GROUPS, ROWS, W], q_tiles.layout)
    k_s = gl.allocate_shared_memory(kind, [GROUPS, ROWS, W], k_tiles.layout)
    S_s = gl.allocate_shared_memory(kind, [V, W], S_tiles.layout)
    dS_s = gl.allocate_shared_memory(kind, [V, W], dS_tiles.layout)
    m_s = gl.allocate_shared_memory(kind, [GROUPS * GROUPS, ROWS, ROWS], plain2)
    own_s = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], flat)
    whole_q = reinterpret(q_s, kind, [C, W], q_tiles.layout)
    whole_k = reinterpret(k_s, kind, [C, W], k_tiles.layout)
    loaded = barriers(3, 1)
    fence_async_shared()
    meet()
    mbarrier.expect(loaded.index(0), 3 * x_tiles.block_type.nbytes + t_tiles.block_type.nbytes)
    async_load(t_tiles, [place * C, 0], loaded.index(0), t_s)
    async_load(x_tiles, [place * C, 0], loaded.index(0), x_s)
    async_load(o_tiles, [line_32, h * V], loaded.index(0), o_s)
    async_load(y_tiles, [line_32, h * V], loaded.index(0), y_s)
    mbarrier.expect(loaded.index(1), 2 * S_tiles.block_type.nbytes)
    async_load(S_tiles, [place * V, p * W], loaded.index(1), S_s)
    async_load(dS_tiles, [place * V, p * W], loaded.index(1), dS_s)
    mbarrier.expect(loaded.index(2), 2 * q_tiles.block_type.nbytes)
    async_load(q_tiles, [line_32, h // R * K + p * W], loaded.index(2), whole_q)
    async_load(k_tiles, [line_32, h // R * K + p * W], loaded.index(2), whole_k)

    g += b * g_b + (begin + done) * g_t + h.to(gl.int64) * g_h + p * W
    beta += b * b_b + (begin + done) * b_t + h.to(gl.int64) * b_h
    total = ()
    for n in gl.static_range(GROUPS):
        total = total + (exp2(gl.sum(logarithms_of(g, g_t, left, n), 1)),)
    mbarrier.wait(loaded.index(0), 0)
    if left < C:
        zero_rows_from(o_s, left, clean)
        zero_rows_from(y_s, left, clean)
    fence_async_shared()
    meet()
    p_s = reinterpret(t_s, kind, [GROUPS * GROUPS, ROWS, ROWS], plain2)
    store_values_and_pairs(x_s, o_s, y_s, t_s, p_s, m_s, own_s, beta, b_t, dbeta + line * H + h, H, left, p == 0, scale)
    mbarrier.wait(loaded.index(1), 0)
    across_s = gl.allocate_shared_memory(gl.float32, [W], flat)
    d_s = store_state_products(memory_s, S_s, dS_s, across_s)
    meet()  # S_s and dS_s are free

    far_k = reinterpret(S_s, kind, [2 * GROUPS, ROWS, W], q_tiles.layout)  # of levels 32 and 16
    far_q = reinterpret(dS_s, kind, [2 * GROUPS, ROWS, W], q_tiles.layout)
    sums_s = reinterpret(far_q.index(GROUPS), gl.float32, [2 * GROUPS, W], flat)
    totals_s = reinterpret(far_q.index(GROUPS + 1), gl.float32, [GROUPS, W], flat)
    for n in gl.static_range(GROUPS):
        totals_s.index(n).store(total[n])
    mbarrier.wait(loaded.index(2), 0)
    if left < C:
        zero_rows_from(whole_q, left, clean)
        zero_rows_from(whole_k, left, clean)
    meet()
    logarithms = logarithms_of(g, g_t, left, 0)
    for m in range(GROUPS):
        coming = logarithms_of(g, g_t, left, (m + 1) % GROUPS)
        Q = group_of(q_s, m)
        X = group_of(k_s, m)
        through, remaining = products_of_group(exp2(logarithms))
        before, after, middle = decays_around(totals_s, m)
        _, _, _, z_r, z_c = state_terms(d_s, Q, X, through, remaining, before, after, scale, m)
        sums_s.index(m).store(gl.sum(z_r, 1))
        sums_s.index(GROUPS + m).store(gl.sum(z_c, 1))
        Y = X.to(gl.float32)
        store_group(Y * (gl.where(m > 1, through, remaining) * middle[:, None]), far_k, m)
        store_group(Y * gl.where(m % 2 == 1, through, remaining), far_k, GROUPS + m)
        Y = Q.to(gl.float32) * through
        if m > 1:
            store_group(Y * middle[:, None], far_q, m % 2)
        if m % 2 == 1:
            store_group(Y, far_q, 2 + m // 2)
        logarithms = coming
    meet()
    across = across_s.load(row)
    for n in gl.static_range(GROUPS):
        across *= totals_s.index(n).load(row)
    r, c = rows_and_columns()
    beside = gl.zeros([W], gl.float32, row)
    first = (line * H + h) * K + p * W
    token = gl.arange(0, ROWS, gl.SliceLayout(0, TILE))[None, :]
    channel = gl.arange(0, W, gl.SliceLayout(1, TILE))[:, None]
    for n in range(GROUPS):
        m = n ^ (n >> 1)  # 0, 1, 3, 2: of the groups of a half of the chunk, that which is farther from the middle first
        then = (n + 1) % GROUPS
        coming = logarithms_of(g, g_t, left, then ^ (then >> 1))
        Q = group_of(q_s, m)
        X = group_of(k_s, m)
        dq_m, dk_m, dg_m, through, remaining = near_levels(Q, X, exp2(logarithms), p_s, m_s, m)
        before, after, middle = decays_around(totals_s, m)
        suffix = ones_where(r >= c)
        prefix = ones_where(r < c)
        dQ, dX, z = far_level(far_q, far_k, p_s, m_s, m, m ^ 1, 1)
        dq_m += dQ * through
        dk_m += dX * gl.where(m % 2 == 1, through, remaining)
        dg_m = times(rounded(z), gl.where(m % 2 == 1, suffix, prefix), dg_m)
        dQ, dX, z = far_level(far_q, far_k, p_s, m_s, m, (m & 2) ^ 2, 2)
        dq_m += dQ * (through * middle[:, None])
        dk_m += dX * (gl.where(m > 1, through, remaining) * middle[:, None])
        constant = across + gl.where(n % 2 == 1, beside, 0.0)
        beside = gl.sum(z, 1)
        for j in gl.static_range(GROUPS):
            constant += gl.where(m < j, sums_s.index(j).load(row), 0.0) + gl.where(m > j, sums_s.index(GROUPS + j).load(row), 0.0)
        dg_m = times(rounded(z), gl.where(m > 1, suffix, prefix), dg_m + constant[:, None])
        dq, dk, db, z_r, z_c = state_terms(d_s, Q, X, through, remaining, before, after, scale, m)
        dg_m = times(rounded(z_r), suffix, dg_m)
        dg_m = times(rounded(z_c), prefix, dg_m)
        e = own_s.index(m).load(gl.SliceLayout(0, TILE))[None, :]
        store_group(dq_m + dq + e * X.to(gl.float32), q_s, m)
        store_group(dk_m + dk + db + e * Q.to(gl.float32), k_s, m)
        where = (ROWS * m + token).to(gl.int64) * (H.to(gl.int64) * K) + channel
        gl.store(d_decay + first + where, dg_m.to(d_decay.dtype.element_ty), mask=(ROWS * m + token < left) & (channel < W))
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
