"""Gradients of the inputs of gated DeltaNet or DeltaNet on Hopper, in Gluon: everything that needs no chain over chunks. bfloat16.

With S the state before the chunk, dS' the gradient of the state after it, E = X / beta and Y = dV from the walks, and D, read, rest and A_k
as in ``scalar_prepare.py``,

    W = E - (A_k T) (beta o E)      U = beta o W = T X              dbeta = rowsum(Y o W) / beta
    P = scale dO U^T o D (s <= t)   M = -Y U^T o D (s < t)          F = P o q k^T + M o k k^T
    dq = P k + scale read o (dO S^T)
    dk = P^T q + (M + M^T) k - read o (Y S^T) + rest o (U dS'^T)
    dg_t = sum over s < t <= i of F_is + sum i >= t of (q o scale read o (dO S^T) - k o read o (Y S^T))_i
           + sum s < t of (k o rest o (U dS'^T))_s + total sum(S o dS')

Every term of dg is a pair of tokens with t between them, or a token and a state on both sides of it, so there is no cancellation. A_k T is
bounded and has no factor beta: where beta is tiny, no row underflows in float16. Times beta it is taken as two bfloat16 numbers.

A program computes a chunk for all heads of v that share a head of q and k. Their dq and dk are summed in float32 and rounded once. Three
groups of warps wait for each other by barriers in memory:

    of queries: U, dbeta, P, dq, sum(S o dS'), and the sums over decays of the next head, while
    of keys: M, F, dk and dg of this head
    of loads: one warp, which copies the tiles of the next head where both are done with those of this one

F is the sum of P o q k^T, which the group of queries stores in two parts, and M o k k^T. Where keys are near each other these cancel, so
their sum is rounded, not each of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_decays import decay_vectors, factors_between, gradients_of_decays, log_decays, sums_of_decays
from ....gpu.hopper_tiles import meet, store_in_two, unknown, zero_rows_from
from ....gpu.ring import barriers, invalidate, load_when_free, release, ring_of, wait_full
from ....gpu.tiles import chunk_of_slot
from .gradient_terms import from_token_on, removed, store_gradient, sum_of_product
from .layouts import C
from .parts import load_parts
from .programs import nonzero

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
LINE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
CLEAN = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def token_of_row():
    """Tokens as rows of pairs [C,C]."""
    return gl.arange(0, C, gl.SliceLayout(1, SQUARE))[:, None]


@gluon.jit
def token_of_column():
    """Tokens as columns of pairs [C,C]."""
    return gl.arange(0, C, gl.SliceLayout(0, SQUARE))[None, :]


@gluon.jit
def store_values(e_s, y_s, r_s, rate_s, dbeta, H, left):
    """U replaces E. Store dbeta."""
    kind: gl.constexpr = e_s.dtype
    token = gl.arange(0, C, gl.SliceLayout(1, SQUARE))
    rates = rate_s.load(gl.SliceLayout(1, SQUARE))
    high, low = removed(r_s, rate_s, SQUARE, kind)
    of_beta = gl.zeros([C], gl.float32, gl.SliceLayout(1, SQUARE))
    for n in gl.static_range(e_s.shape[1] // C):
        part = e_s.slice(n * C, C, dim=1)
        W = part.load(SQUARE).to(gl.float32)
        W = warpgroup_mma(high, part, W, is_async=True)
        W = warpgroup_mma(low, part, W, is_async=True)
        W, _high, _low = warpgroup_mma_wait(0, [W, high, low])
        of_beta += gl.sum(y_s.slice(n * C, C, dim=1).load(SQUARE).to(gl.float32) * W, 1)
        meet()  # no product reads these channels of E
        part.store((W * rates[:, None]).to(kind))
    of_beta = of_beta / nonzero(rates)
    gl.store(dbeta + token.to(gl.int64) * H, of_beta.to(dbeta.dtype.element_ty), mask=token < left)


@gluon.jit
def signal(bar, n):
    """Arrive at barrier n for another group of warps, once all warps of this one have stored to shared memory."""
    fence_async_shared()
    meet()
    mbarrier.arrive(bar.index(n), count=1)


@gluon.jit
def product_over_channels(a_s, b_s):
    """The product a b^T [C,C] of two tiles, in progress."""
    return warpgroup_mma(a_s, b_s.permute((1, 0)), gl.zeros([C, C], gl.float32, SQUARE), use_acc=False, is_async=True)


@gluon.jit
def pairs_between(f_s, beside, zero):
    """Sums over s < t <= i of F_is, of each token t, and the result of the product ``beside``, which is in progress."""
    left = from_token_on(unknown(zero), SQUARE, f_s.dtype)
    F = warpgroup_mma(left, f_s, gl.zeros([C, C], gl.float32, SQUARE), use_acc=False, is_async=True)
    F, beside, _left = warpgroup_mma_wait(0, [F, beside, left])
    return gl.sum(gl.where(token_of_column() < token_of_row(), F, 0.0), 1), beside


@gluon.jit
def element(vector, n: gl.constexpr):
    """Element n of a vector [C] in shared memory."""
    return gl.sum(gl.where(gl.arange(0, C, LINE) == n, vector.load(LINE), 0.0), 0)


@gluon.jit
def load_heads(shared, own, tiles, rings, head, row, columns, R):
    """The loading warp. ``head``: index [slots,H] of the first head; ``row``, ``columns``: of its tokens in v, q and k."""
    column, q_column, k_column = columns
    load_when_free(shared[0], row, q_column, own[0][0], own[0][1], 0, 1)
    load_when_free(shared[1], row, k_column, own[1][0], own[1][1], 0, 1)
    e_tiles, y_tiles, r_tiles, o_tiles, S_tiles, dS_tiles = tiles
    e, y, r_, o, S, dS = rings
    V: gl.constexpr = e[0].shape[2]
    for r in range(R):
        at = (head + r) * C
        load_when_free(e_tiles, at, 0, e[0], e[1], r, 2)
        load_when_free(r_tiles, at, 0, r_[0], r_[1], r, 1)
        load_when_free(y_tiles, row, column + r * V, y[0], y[1], r, 2)
        load_when_free(o_tiles, row, column + r * V, o[0], o[1], r, 1)
        load_when_free(S_tiles, (head + r) * V, 0, S[0], S[1], r, 1)
        load_when_free(dS_tiles, (head + r) * V, 0, dS[0], dS[1], r, 1)


@gluon.jit
def begin_head(rings, vectors, u_bar, pointers, numbers, r, DECAYS: gl.constexpr):
    """Sums over the decays of head r, dbeta, and U in the memory of E, for the warps of keys and of queries."""
    e, y, r_, _, _, _ = rings
    g, beta, dbeta = pointers
    H, left, _, g_t, g_h, b_t, b_h = numbers
    of_decays, rate_s, _ = vectors
    at = gl.arange(0, C, LINE)
    copy = r & 1
    rate_s.store(gl.load(beta + r * b_h.to(gl.int64) + at.to(gl.int64) * b_t, mask=at < left, other=0.0).to(gl.float32))
    if DECAYS:
        sums_of_decays(log_decays(g + r * g_h.to(gl.int64), g_t, left, at), of_decays, copy, 1.0)
    zero = unknown(r * 0)
    y_s = y[0].index(copy)
    wait_full(y[1], r, 2)
    if left < C:
        zero_rows_from(y_s, left, CLEAN)
    meet()  # beta is stored
    wait_full(e[1], r, 2)
    wait_full(r_[1], r, 1)
    store_values(e[0].index(copy), y_s, r_[0].index(zero), rate_s, dbeta + r, H, left)
    signal(u_bar, copy)
    release(r_[1], r, 1)


@gluon.jit
def gradients_of_queries(rings, own, signals, squares, vectors, pointers, numbers, out, R, DECAYS: gl.constexpr):
    """dq, and what keys and dg need of it: U, P, P o q k^T and, for each head, rowsum(q o dq) and sum(S o dS')."""
    e, _, _, o, S, dS = rings
    q, k = own
    u_bar, p_bar, free_bar, done_bar = signals
    of_decays, _, found = vectors
    _, left, scale, _, _, _, _ = numbers
    K: gl.constexpr = q[0].shape[2]
    kind: gl.constexpr = q[0].dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    wide_zero = gl.zeros([C, K], gl.float32, wide)
    d_q = wide_zero
    for n in gl.static_range(2):
        wait_full(own[n][1], 0, 1)
        if left < C:
            zero_rows_from(own[n][0].index(0), left, CLEAN)
    begin_head(rings, vectors, u_bar, pointers, numbers, R * 0, DECAYS)
    for r in range(R):
        copy = r & 1
        zero = unknown(r * 0)  # addresses and descriptors of tiles are computed where they are used: as loop invariants they spill
        q_s = q[0].index(zero)
        k_s = k[0].index(zero)
        p_s = squares.index(zero)
        o_s = o[0].index(zero)
        S_s = S[0].index(zero)
        wait_full(o[1], r, 1)
        if left < C:
            zero_rows_from(o_s, left, CLEAN)
            fence_async_shared()
            meet()
        P = product_over_channels(o_s, e[0].index(copy))
        if DECAYS:
            of_q = product_over_channels(q_s, k_s)
            D = factors_between(of_decays, copy, 1.0, False, SQUARE)
            P, of_q = warpgroup_mma_wait(0, [P, of_q])
            P = P * D
        else:
            P = warpgroup_mma_wait(0, [P])
        P = gl.where(token_of_row() >= token_of_column(), P * scale, 0.0)
        mbarrier.wait(free_bar.index(0), (r + 1) & 1)  # keys have multiplied P of the head before
        p_s.store(P.to(kind))
        if DECAYS:
            store_in_two(P * of_q, squares.index(zero + 2), squares.index(zero + 3))
        wait_full(S[1], r, 1)
        signal(p_bar, 0)
        dQ = warpgroup_mma(o_s, S_s, wide_zero, use_acc=False, is_async=True)
        wait_full(dS[1], r, 1)
        if DECAYS:
            of_state = sum_of_product(S_s, dS[0].index(zero), 8)
        dQ = warpgroup_mma_wait(0, [dQ])
        meet()  # all warps have read the tiles
        release(o[1], r, 1)
        release(e[1], r, 2)
        release(S[1], r, 1)
        release(dS[1], r, 1)
        if DECAYS:
            dQ = dQ * (of_decays[2].index(copy).load(gl.SliceLayout(1, wide))[:, None] * scale)
        else:
            dQ = dQ * scale
        d_q += dQ
        d_q = warpgroup_mma(p_s, k_s, d_q, is_async=True)
        if DECAYS:
            found[0].index(copy).store(gl.sum(q_s.load(wide).to(gl.float32) * dQ, 1))
            found[1].index(copy).store(gl.zeros([C], gl.float32, LINE) + of_state)
        d_q = warpgroup_mma_wait(0, [d_q])
        signal(done_bar, 0)
        if r + 1 < R:
            begin_head(rings, vectors, u_bar, pointers, numbers, r + 1, DECAYS)
    tiles, pointer, row, column, token, step = out
    mbarrier.wait(free_bar.index(0), (R + 1) & 1)  # no product reads q
    store_gradient(tiles, d_q, q[0].index(0), pointer, row, column, token, step, left)
    tma.store_wait(0)


@gluon.jit
def gradients_of_keys(rings, own, signals, squares, vectors, g, numbers, out, d_decay, R, DECAYS: gl.constexpr):
    """dk, and dg of every head."""
    e, y, _, _, S, dS = rings
    q, k = own
    u_bar, p_bar, free_bar, done_bar = signals
    of_decays, _, found = vectors
    H, left, _, g_t, g_h, _, _ = numbers
    K: gl.constexpr = q[0].shape[2]
    kind: gl.constexpr = q[0].dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, wide)
    at = gl.arange(0, C, LINE)
    wide_zero = gl.zeros([C, K], gl.float32, wide)
    d_k = wide_zero
    for r in range(R):
        copy = r & 1
        zero = unknown(r * 0)  # see ``gradients_of_queries``
        k_s = k[0].index(zero)
        m_s = squares.index(zero + 1)
        u_s = e[0].index(copy)
        y_s = y[0].index(copy)
        mbarrier.wait(u_bar.index(copy), (r >> 1) & 1)
        M = product_over_channels(y_s, u_s)
        if DECAYS:
            of_k = product_over_channels(k_s, k_s)
            D = factors_between(of_decays, copy, 1.0, False, SQUARE)
            M, of_k = warpgroup_mma_wait(0, [M, of_k])
            M = M * D
        else:
            M = warpgroup_mma_wait(0, [M])
        M = gl.where(token_of_row() > token_of_column(), -M, 0.0)
        m_s.store(M.to(kind))
        mbarrier.wait(p_bar.index(0), copy)
        if DECAYS:
            f_s = squares.index(zero + 2)
            f_s.store((M * of_k + load_parts((f_s, squares.index(zero + 3)), SQUARE)).to(kind))
        wait_full(S[1], r, 1)
        wait_full(dS[1], r, 1)
        fence_async_shared()
        meet()  # M and F are stored
        dA = warpgroup_mma(y_s, S[0].index(zero), wide_zero, use_acc=False, is_async=True)
        if DECAYS:
            pairs, dA = pairs_between(f_s, dA, zero)
            of_pairs = gl.convert_layout(pairs, LINE)
        else:
            dA = warpgroup_mma_wait(0, [dA])
        dB = warpgroup_mma(u_s, dS[0].index(zero), wide_zero, use_acc=False, is_async=True)
        if DECAYS:
            dA = dA * of_decays[2].index(copy).load(by_row)[:, None]
            of_rows = gl.convert_layout(gl.sum(k_s.load(wide).to(gl.float32) * dA, 1), LINE)
            d = log_decays(g + r * g_h.to(gl.int64), g_t, left, at)
            total = element(of_decays[2].index(copy), C - 1)
        d_k -= dA
        dB = warpgroup_mma_wait(0, [dB])
        meet()  # all warps have multiplied the tiles
        release(y[1], r, 2)
        release(e[1], r, 2)
        release(S[1], r, 1)
        release(dS[1], r, 1)
        if DECAYS:
            dB = dB * of_decays[3].index(copy).load(by_row)[:, None]
            of_columns = gl.convert_layout(gl.sum(k_s.load(wide).to(gl.float32) * dB, 1), LINE)
        d_k += dB
        d_k = warpgroup_mma(m_s, k_s, d_k, is_async=True)
        d_k = warpgroup_mma(m_s.permute((1, 0)), k_s, d_k, is_async=True)
        d_k = warpgroup_mma(squares.index(zero).permute((1, 0)), q[0].index(zero), d_k, is_async=True)
        d_k = warpgroup_mma_wait(0, [d_k])
        mbarrier.wait(done_bar.index(0), copy)
        if DECAYS:
            of_queries = found[0].index(copy).load(LINE)
            of_state = element(found[1].index(copy), 0) * total
            gradient = gradients_of_decays(of_queries - of_rows, of_columns, of_state, d, at >= left)
            gradient += of_pairs
            gl.store(d_decay + r + at.to(gl.int64) * H, gradient.to(d_decay.dtype.element_ty), mask=at < left)
        meet()  # all warps have multiplied P
        mbarrier.arrive(free_bar.index(0), count=1)
    tiles, pointer, row, column, token, step = out
    store_gradient(tiles, d_k, k[0].index(0), pointer, row, column, token, step, left)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "q_h", "k_h", "g_b", "g_t", "g_h", "b_b", "b_t", "b_h"])
def penstock_gdn_gradients_sm90(
    q_tiles, k_tiles, e_tiles, y_tiles, o_tiles, r_tiles, S_tiles, dS_tiles, dq_tiles, dk_tiles, g, beta, d_query, d_key, d_decay, dbeta,
    cu_seqlens, scale, N, T, H, R, q_h, k_h, g_b, g_t, g_h, b_b, b_t, b_h,
    K: gl.constexpr, V: gl.constexpr, DECAYS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dq, dk, dg and dbeta, from U = T X, P = scale dO U^T o D, M = -Y U^T o D.

    TMA tiles: q, k, dq, dk [C,K] of tokens [B T,H / R K], dO and Y [C,V] of [B T,H V], E [C,V] and A_k T [C,C] of [slots,H,C,...], S^T and
    dS'^T [V,K] of [slots,H,V,K]. Reads g and beta [B,T,H] by strides. Writes dq, dk [B,T,H / R,K], dg and dbeta [B,T,H]. Program (slot of a
    chunk, head of q and k): the R heads of v that share it one after another. ``q_h`` and ``k_h`` are K, or 0 if all heads share q and k.
    """
    gl.static_assert(q_tiles.dtype == gl.bfloat16)
    gl.static_assert(gl.num_warps() == 4)
    kind: gl.constexpr = q_tiles.dtype
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
    head = slot * H + first
    own = (ring_of(q_tiles, 1, 1, 1), ring_of(k_tiles, 1, 1, 1))
    rings = (
        ring_of(e_tiles, 2, 1, 2), ring_of(y_tiles, 2, 1, 1), ring_of(r_tiles, 1, 1, 1), ring_of(o_tiles, 1, 1, 1),
        ring_of(S_tiles, 1, 1, 2), ring_of(dS_tiles, 1, 1, 2),
    )  # fmt: skip
    squares = gl.allocate_shared_memory(kind, [4 if DECAYS else 2, C, C], half)
    found = ()
    for _ in gl.static_range(2):
        found = found + (gl.allocate_shared_memory(gl.float32, [2, C], PLAIN),)
    vectors = (decay_vectors(), gl.allocate_shared_memory(gl.float32, [C], PLAIN), found)
    signals = (barriers(2, 1), barriers(1, 1), barriers(1, 1), barriers(1, 1))
    fence_async_shared()
    meet()
    g += b * g_b + begin * g_t + first.to(gl.int64) * g_h
    beta += b * b_b + begin * b_t + first.to(gl.int64) * b_h
    d_decay += token * H + first
    dbeta += token * H + first
    tiles = (e_tiles, y_tiles, r_tiles, o_tiles, S_tiles, dS_tiles)
    numbers = (H, left, scale, g_t, g_h, b_t, b_h)
    step = G.to(gl.int64) * K
    of_q = (dq_tiles, d_query, row, group * K, token, step)
    of_k = (dk_tiles, d_key, row, group * K, token, step)
    columns = (first * V, group * q_h, group * k_h)
    gl.warp_specialize(
        [
            (gradients_of_keys, (rings, own, signals, squares, vectors, g, numbers, of_k, d_decay, R, DECAYS)),
            (gradients_of_queries, (rings, own, signals, squares, vectors, (g, beta, dbeta), numbers, of_q, R, DECAYS)),
            (load_heads, ((q_tiles, k_tiles), own, tiles, rings, head, row, columns, R)),
        ],
        [4, 1],
        [240, 24],
    )
    for one in gl.static_range(2):
        invalidate(own[one][1])
    for one in gl.static_range(6):
        invalidate(rings[one][1])
    invalidate(signals)
