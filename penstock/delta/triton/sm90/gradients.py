"""Gradients of KDA's inputs on Hopper, in Gluon: everything that needs no chain over chunks. Any decay at the same speed.

With S the state before the chunk, dS' the gradient of the state after it, X and Y = dV from the walks, and f the factors of level L, at most 1,

    R = X / beta - (A_k T) X        U = beta o R = T X              dbeta = rowsum(Y o R) / beta
    P = scale dO U^T (s <= t)       M = -Y U^T (s < t), its transpose above
    levels:  X_q = f o q (second halves), X_k = f o k;   dX_q = P_L X_k,   dX_k = M_L X_k + P_L^T X_q
    dq = sum of f o dX_q + e k + scale read o (dO S^T)                                      e the diagonal of P
    dk = sum of f o dX_k + e q - read o (Y S^T) + rest o (U dS'^T)
    dg_t = sum over levels of (X_q o dX_q + X_k o dX_k) over later tokens of the second half, over earlier tokens of the first half
           + sum i >= t of q o scale read o (dO S^T) - k o read o (Y S^T) + sum s < t of k o rest o (U dS'^T) + total o rowsum(S o dS')

Every term of dg is a pair of tokens with t between them, so there is no cancellation. A_k T is bounded and has no factor beta, so that no row
underflows in float16 where beta is tiny. It is taken as two bfloat16 numbers.

Memory that the pass reads and writes per token and head, K = V = 128: q, k, v, dO 1024 bytes, decays 512 (float32), gradients 1280, and tiles
of the other launches: X 256, A_k T 128, S and dS' 512 each. Nothing of the forward pass is kept.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from ....gpu.hopper_tiles import async_load, async_store, exp2, meet, reinterpret, zero_rows_from
from ....gpu.ring import barriers
from ....gpu.tiles import LOG2E, span_of
from .columns import (
    TILE,
    group_of,
    groups_of,
    none_of,
    ones_where,
    products_of_group,
    rows_and_columns,
    store_in_blocks,
    times,
)
from .layouts import GROUPS, ROWS, C
from .levels import far_level, near_levels
from .states import nonzero

W = gl.constexpr(64)  # key channels of a program


@gluon.jit
def decays_of(g, g_t, left, n: gl.constexpr):
    """The decays w of group n [W,ROWS], 1 after the last token."""
    token = ROWS * n + gl.arange(0, ROWS, gl.SliceLayout(0, TILE))[None, :]
    channel = gl.arange(0, W, gl.SliceLayout(1, TILE))[:, None]
    return exp2(gl.load(g + (token * g_t + channel), mask=(token < left) & (channel < W), other=0.0).to(gl.float32) * LOG2E)


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
    high = T.to(kind)
    low = (T - high.to(gl.float32)).to(kind)
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
    own_s.store(gl.sum(gl.where(i == j, P, 0.0), 1))
    store_in_blocks(P.to(kind), p_s)
    below = warpgroup_mma(y_s, x_s.permute((1, 0)), zero, use_acc=False)
    above = warpgroup_mma(x_s, y_s.permute((1, 0)), zero, use_acc=False)
    M = gl.where(i > j, -below, gl.where(i < j, -above, 0.0))
    store_in_blocks(M.to(kind), m_s)
    meet()


@gluon.jit
def state_terms(q_s, k_s, x_s, o_s, y_s, S_s, dS_s, through, remaining, total, scale):
    """The terms of dq, dk and dg of the states, for each group [W,ROWS]."""
    kind: gl.constexpr = k_s.dtype
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    zero = gl.zeros([W, C], gl.float32, square)
    T_0, T_1, T_2, T_3 = total
    one = gl.full([W], 1.0, gl.float32, gl.SliceLayout(1, TILE))
    before = (one, T_0, T_0 * T_1, T_0 * T_1 * T_2)
    after = (T_1 * T_2 * T_3, T_2 * T_3, T_3, one)
    i = gl.arange(0, W, gl.SliceLayout(1, square))[:, None]
    j = gl.arange(0, W, gl.SliceLayout(0, square))[None, :]
    whole = warpgroup_mma(S_s.permute((1, 0)), dS_s, zero, use_acc=False)  # its diagonal is rowsum(S o dS')
    whole = gl.convert_layout(gl.sum(gl.where(i == j, whole, 0.0), 1), gl.SliceLayout(1, TILE), assert_trivial=True) * (after[0] * T_0)
    a, b = rows_and_columns()
    D = groups_of(warpgroup_mma(dS_s.permute((1, 0)), x_s.permute((1, 0)), zero, use_acc=False))
    dk = ()
    dg = ()
    earlier = gl.zeros([W], gl.float32, gl.SliceLayout(1, TILE))
    for n in gl.static_range(GROUPS):
        x = D[n] * (remaining[n] * after[n][:, None])
        z = x * group_of(k_s, n).to(gl.float32)
        dk = dk + (x,)
        dg = dg + (times(z.to(kind), ones_where(a < b), none_of(z) + (whole + earlier)[:, None]),)
        earlier += gl.sum(z, 1)
    D = groups_of(warpgroup_mma(S_s.permute((1, 0)), y_s.permute((1, 0)), zero, use_acc=False))
    sums = ()
    more = ()
    found = ()
    for n in gl.static_range(GROUPS):
        x = -D[n] * (through[n] * before[n][:, None])
        z = x * group_of(k_s, n).to(gl.float32)
        more = more + (dk[n] + x,)
        sums = sums + (gl.sum(z, 1),)
        found = found + (times(z.to(kind), ones_where(a >= b), dg[n]),)
    D = groups_of(warpgroup_mma(S_s.permute((1, 0)), o_s.permute((1, 0)), zero, use_acc=False))
    dq = ()
    dg = ()
    later = gl.zeros([W], gl.float32, gl.SliceLayout(1, TILE))
    for m in gl.static_range(GROUPS):
        x = D[GROUPS - 1 - m] * (through[GROUPS - 1 - m] * (before[GROUPS - 1 - m] * scale)[:, None])
        z = x * group_of(q_s, GROUPS - 1 - m).to(gl.float32)
        dq = (x,) + dq
        dg = (times(z.to(kind), ones_where(a >= b), found[GROUPS - 1 - m] + later[:, None]),) + dg
        later += gl.sum(z, 1) + sums[GROUPS - 1 - m]
    return dq, more, dg


@gluon.jit
def far_terms(q_s, k_s, p_s, m_s, through, remaining, total, dq, dk, dg):
    """Add levels 32 and 16."""
    kind: gl.constexpr = k_s.dtype
    a, b = rows_and_columns()
    suffix = ones_where(a >= b)
    prefix = ones_where(a < b)
    rows = (through[2], through[3] * total[2][:, None])
    columns = (remaining[0] * total[1][:, None], remaining[1])
    q_r, k_r, z, k_c, z_c = far_level(q_s, k_s, p_s, m_s, rows, columns, 0, 2)
    dq_2 = dq[2] + q_r[0]
    dq_3 = dq[3] + q_r[1]
    dk_0 = dk[0] + k_c[0]
    dk_1 = dk[1] + k_c[1]
    dk_2 = dk[2] + k_r[0]
    dk_3 = dk[3] + k_r[1]
    dg_0 = times(z_c[0].to(kind), prefix, dg[0])
    dg_1 = times(z_c[1].to(kind), prefix, dg[1] + gl.sum(z_c[0], 1)[:, None])
    dg_2 = times(z[0].to(kind), suffix, dg[2] + gl.sum(z[1], 1)[:, None])
    dg_3 = times(z[1].to(kind), suffix, dg[3])
    q_r, k_r, z, k_c, z_c = far_level(q_s, k_s, p_s, m_s, (through[1],), (remaining[0],), 0, 1)
    dq_1 = dq[1] + q_r[0]
    dk_0 += k_c[0]
    dk_1 += k_r[0]
    dg_0 = times(z_c[0].to(kind), prefix, dg_0)
    dg_1 = times(z[0].to(kind), suffix, dg_1)
    q_r, k_r, z, k_c, z_c = far_level(q_s, k_s, p_s, m_s, (through[3],), (remaining[2],), 2, 1)
    dq_3 += q_r[0]
    dk_2 += k_c[0]
    dk_3 += k_r[0]
    dg_2 = times(z_c[0].to(kind), prefix, dg_2)
    dg_3 = times(z[0].to(kind), suffix, dg_3)
    return (dq[0], dq_1, dq_2, dq_3), (dk_0, dk_1, dk_2, dk_3), (dg_0, dg_1, dg_2, dg_3)


@gluon.jit(do_not_specialize=["N", "T", "H", "R"])
def penstock_kda_gradients_sm90(
    q_tiles, k_tiles, x_tiles, o_tiles, y_tiles, t_tiles, S_tiles, dS_tiles, dq_tiles, dk_tiles, g, beta, dq, dk, dg, dbeta, cu_seqlens,
    scale, N, T, H, R, g_b, g_t, g_h, b_b, b_t, b_h, K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dq, dk, dg and dbeta, from U = T X, P = scale dO U^T, M = -Y U^T.

    TMA tiles: q, k [C,W] of tokens [B T,H / R K], dO and Y [C,V] of [B T,H V], dq, dk [C,W] of [B T,H K]; X [C,V] and A_k T [C,C] of
    [slots,H,C,...], S^T and dS'^T [V,W] of [slots,H,V,K]. Reads g [B,T,H,K] and beta [B,T,H] by strides. Writes dq, dk, dg [B,T,H,K] and
    dbeta [B,T,H]. Program (head, block of W key channels; slot of a chunk).
    """
    gl.static_assert(q_tiles.dtype == gl.bfloat16)
    PARTS: gl.constexpr = K // W
    kind: gl.constexpr = q_tiles.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot = gl.program_id(1)
    p = gl.program_id(0) % PARTS
    h = gl.program_id(0) // PARTS
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, C, PACKED)
    b = n.to(gl.int64)
    if PACKED:
        b = b * 0
    left = gl.minimum(end - begin - done, C).to(gl.int32)
    if left <= 0:
        return
    line = b * T + begin + done
    row = line.to(gl.int32)
    place = slot * H + h
    x_s = gl.allocate_shared_memory(kind, [C, V], x_tiles.layout)
    o_s = gl.allocate_shared_memory(kind, [C, V], o_tiles.layout)
    y_s = gl.allocate_shared_memory(kind, [C, V], y_tiles.layout)
    t_s = gl.allocate_shared_memory(gl.float16, [C, C], t_tiles.layout)
    q_s = gl.allocate_shared_memory(kind, [C, W], q_tiles.layout)
    k_s = gl.allocate_shared_memory(kind, [C, W], k_tiles.layout)
    S_s = gl.allocate_shared_memory(kind, [V, W], S_tiles.layout)
    dS_s = gl.allocate_shared_memory(kind, [V, W], dS_tiles.layout)
    m_s = gl.allocate_shared_memory(kind, [GROUPS * GROUPS, ROWS, ROWS], plain2)
    own_s = gl.allocate_shared_memory(gl.float32, [C], flat)
    loaded = barriers(3, 1)
    fence_async_shared()
    meet()
    mbarrier.expect(loaded.index(0), 3 * x_tiles.block_type.nbytes + t_tiles.block_type.nbytes)
    async_load(t_tiles, [place * C, 0], loaded.index(0), t_s)
    async_load(x_tiles, [place * C, 0], loaded.index(0), x_s)
    async_load(o_tiles, [row, h * V], loaded.index(0), o_s)
    async_load(y_tiles, [row, h * V], loaded.index(0), y_s)
    mbarrier.expect(loaded.index(1), 2 * S_tiles.block_type.nbytes)
    async_load(S_tiles, [place * V, p * W], loaded.index(1), S_s)
    async_load(dS_tiles, [place * V, p * W], loaded.index(1), dS_s)
    mbarrier.expect(loaded.index(2), 2 * q_tiles.block_type.nbytes)
    async_load(q_tiles, [row, h // R * K + p * W], loaded.index(2), q_s)
    async_load(k_tiles, [row, h // R * K + p * W], loaded.index(2), k_s)

    mbarrier.wait(loaded.index(0), 0)
    if left < C:
        zero_rows_from(o_s, left, clean)
        zero_rows_from(y_s, left, clean)
        meet()
    fence_async_shared()
    meet()
    p_s = reinterpret(t_s, kind, [GROUPS * GROUPS, ROWS, ROWS], plain2)
    beta += b * b_b + (begin + done) * b_t + h.to(gl.int64) * b_h
    store_values_and_pairs(x_s, o_s, y_s, t_s, p_s, m_s, own_s, beta, b_t, dbeta + line * H + h, H, left, p == 0, scale)

    g += b * g_b + (begin + done) * g_t + h.to(gl.int64) * g_h + p * W
    through = ()
    remaining = ()
    total = ()
    for m in gl.static_range(GROUPS):
        one, other, whole = products_of_group(decays_of(g, g_t, left, m))
        through = through + (one,)
        remaining = remaining + (other,)
        total = total + (whole,)
    mbarrier.wait(loaded.index(1), 0)
    mbarrier.wait(loaded.index(2), 0)
    if left < C:
        zero_rows_from(q_s, left, clean)
        zero_rows_from(k_s, left, clean)
        meet()
    d_q, d_k, d_g = state_terms(q_s, k_s, x_s, o_s, y_s, S_s, dS_s, through, remaining, total, scale)
    d_q, d_k, d_g = far_terms(q_s, k_s, p_s, m_s, through, remaining, total, d_q, d_k, d_g)
    meet()  # x_s and y_s are free
    if V == 2 * W:
        out_s = reinterpret(y_s, kind, [2, C, W], q_tiles.layout)
    else:
        out_s = gl.allocate_shared_memory(kind, [2, C, W], q_tiles.layout)
    first = (line * H + h) * K + p * W
    token = gl.arange(0, ROWS, gl.SliceLayout(0, TILE))[None, :]
    channel = gl.arange(0, W, gl.SliceLayout(1, TILE))[:, None]
    for m in gl.static_range(GROUPS):
        Q = group_of(q_s, m)
        Kt = group_of(k_s, m)
        dq_m, dk_m, dg_m = near_levels(Q, Kt, decays_of(g, g_t, left, m), p_s, m_s, m, d_q[m], d_k[m], d_g[m])
        e = own_s.slice(ROWS * m, ROWS).load(gl.SliceLayout(0, TILE))[None, :]
        dq_m += e * Kt.to(gl.float32)
        dk_m += e * Q.to(gl.float32)
        out_s.index(0).slice(ROWS * m, ROWS).permute((1, 0)).store(dq_m.to(kind))
        out_s.index(1).slice(ROWS * m, ROWS).permute((1, 0)).store(dk_m.to(kind))
        where = (ROWS * m + token).to(gl.int64) * (H.to(gl.int64) * K) + channel
        gl.store(dg + first + where, dg_m.to(dg.dtype.element_ty), mask=(ROWS * m + token < left) & (channel < W))
    fence_async_shared()
    meet()
    if left == C:
        async_store(dq_tiles, [row, h * K + p * W], out_s.index(0))
        async_store(dk_tiles, [row, h * K + p * W], out_s.index(1))
    else:
        tail = gl.arange(0, C, gl.SliceLayout(1, clean))[:, None]
        there = first + tail.to(gl.int64) * (H.to(gl.int64) * K) + gl.arange(0, W, gl.SliceLayout(0, clean))[None, :]
        gl.store(dq + there, out_s.index(0).load(clean), mask=tail < left)
        gl.store(dk + there, out_s.index(1).load(clean), mask=tail < left)
    tma.store_wait(0)
