"""Gradients of the inputs of gated DeltaNet or DeltaNet in float32 on Hopper, in Gluon.

The formulas are those of ``scalar_gradients.py``, with W from the walk and Z = dV / beta. Every operand is the sum of three bfloat16 tiles.
Shared memory has room for dO, Y and U of a head, and 64 value channels of one of its states. q and k have the same place before the heads,
for q k^T and k k^T, and after them: P and M of the heads that share q and k are summed, then multiplied by q and k once. dq and dk
are summed in memory, each element by one thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ....gpu.hopper_decays import decay_vectors, factors_between, gradients_of_decays, log_decays, sums_of_decays
from ....gpu.hopper_tiles import async_load, meet, reinterpret, unknown, zero_rows_from
from ....gpu.ring import barriers
from ....gpu.tiles import chunk_of_slot
from .anchored import tokens_through
from .layouts import C
from .parts import (
    added_in_parts,
    as_singles,
    finished,
    parts_at,
    product_of_parts,
    store_over,
    store_parts,
    sum_of_products,
    tiles_in_three,
    transposed,
)

GROUPS = gl.constexpr(2)  # groups of four warps: each has half of the columns of every product
PARTS = gl.constexpr(3)
AT_ONCE = gl.constexpr(4096)  # elements of states that are multiplied at once


@gluon.jit
def load_values(tiles, given, bars, head, row, column, exists):
    """Start the loads of dO, Z and W of a head, if it exists: 64 columns after another. ``head``: of the slot."""
    V_TILES: gl.constexpr = given.shape[0] // 3
    for m in gl.static_range(3):
        mbarrier.expect(bars.index(m), V_TILES * tiles[m].block_type.nbytes, pred=exists)
    meet()
    for n in gl.static_range(V_TILES):
        async_load(tiles[0], [row, column + n * C], bars.index(0), given.index(n), pred=exists)
        for m in gl.static_range(1, 3):
            async_load(tiles[m], [head * C, n * C], bars.index(m), given.index(m * V_TILES + n), pred=exists)


@gluon.jit
def load_state(tiles, memory, bar, row, exists):
    """Start the load of 64 value channels of a state, if it exists. All warps have read what is in its place."""
    mbarrier.expect(bar, tiles.block_type.nbytes, pred=exists)
    meet()
    async_load(tiles, [row, 0], bar, memory, pred=exists)


@gluon.jit
def store_state(memory, bar, phase: gl.constexpr, parts, layout: gl.constexpr):
    """Wait for 64 value channels of a state, and store them in parts in their place."""
    mbarrier.wait(bar, phase)
    store_over(memory.load(layout), parts)
    fence_async_shared()
    meet()


@gluon.jit
def store_values(given, tiles, rates, zero, layout: gl.constexpr):
    """dO, Y = beta o Z and U = beta o W in parts replace dO, Z and W. Returns rowsum(Z o W). ``zero``: see ``tiles_in_three``."""
    V_TILES: gl.constexpr = len(tiles) // 3
    of_beta = gl.zeros([C], gl.float32, gl.SliceLayout(1, layout))
    for n in gl.static_range(V_TILES):
        first = unknown(zero) + n
        dO = given.index(first).load(layout)
        Z = given.index(first + V_TILES).load(layout)
        W = given.index(first + 2 * V_TILES).load(layout)
        of_beta += gl.sum(Z * W, 1)
        meet()  # the elements of other threads are where the parts will be
        store_parts(dO, tiles[n])
        store_parts(Z * rates[:, None], tiles[V_TILES + n])
        store_parts(W * rates[:, None], tiles[2 * V_TILES + n])
    fence_async_shared()
    meet()
    return of_beta


@gluon.jit
def sum_over_pairs(F, f_s, chosen_s):
    """Of each token t, the sum of F over the rows from t on and the columns before t."""
    square: gl.constexpr = F.type.layout
    t = gl.arange(0, C, gl.SliceLayout(1, square))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    store_parts(F, f_s)
    fence_async_shared()
    meet()
    later = added_in_parts((chosen_s,), f_s, gl.zeros([C, C], gl.float32, square))
    return gl.sum(gl.where(s < t, warpgroup_mma_wait(0, [later]), 0.0), 1)


@gluon.jit
def sum_of_states(S, dS, COUNT: gl.constexpr):
    """The sum of S o dS', both COUNT elements in memory."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    i = gl.arange(0, AT_ONCE, layout)
    acc = gl.zeros([AT_ONCE], gl.float32, layout)
    for n in gl.static_range(COUNT // AT_ONCE):
        acc += gl.load(S + n * AT_ONCE + i) * gl.load(dS + n * AT_ONCE + i)
    return gl.sum(acc, 0)


@gluon.jit
def rows_of(x, x_t, left, zero, layout: gl.constexpr, K: gl.constexpr):
    """The rows [C,K] of the ``left`` tokens of a chunk, ``x_t`` apart, 0 after them. ``zero``: 0, see ``unknown``."""
    i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None] + unknown(zero)
    j = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    return gl.load(x + i.to(gl.int64) * x_t + j, mask=(i < left) & (j >= 0), other=0.0)


@gluon.jit
def add_gradient(x, first, step, left, again, zero):
    """Store the rows of dq or dk [C,K] of ``left`` tokens, ``step`` apart, or ``again``: add to them. Each thread has its own elements."""
    layout: gl.constexpr = x.type.layout
    i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None] + unknown(zero)
    j = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    place = first + i.to(gl.int64) * step + j
    inside = (i < left) & (j >= 0)
    gl.store(place, x + gl.load(place, mask=inside & again, other=0.0), mask=inside)


@gluon.jit
def load_keys(q_tiles, k_tiles, given, bars, row, q_column, k_column, phase: gl.constexpr, left, layout: gl.constexpr):
    """Load q and k of a chunk of ``left`` tokens into ``given`` [2,C,K], which all warps have read, and wait."""
    mbarrier.expect(bars.index(0), q_tiles.block_type.nbytes)
    mbarrier.expect(bars.index(1), k_tiles.block_type.nbytes)
    fence_async_shared()
    meet()
    async_load(q_tiles, [row, q_column], bars.index(0), given.index(0))
    async_load(k_tiles, [row, k_column], bars.index(1), given.index(1))
    for m in gl.static_range(2):
        mbarrier.wait(bars.index(m), phase)
        if left < C:
            zero_rows_from(given.index(m), left, layout)
    meet()


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "q_h", "k_h", "g_b", "g_t", "g_h", "b_b", "b_t", "b_h"])
def penstock_gdn_gradients_float32_sm90(
    q_tiles, k_tiles, o_tiles, z_tiles, w_tiles, S_tiles, dS_tiles, q, k, chunk_states, d_chunk_states, g, beta, d_query, d_key, d_decay,
    dbeta, cu_seqlens, scale, N, T, H, R, q_h, k_h, q_t, k_t, g_b, g_t, g_h, b_b, b_t, b_h,
    K: gl.constexpr, V: gl.constexpr, DECAYS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dq, dk, dg and dbeta, from U = beta o W, P = scale dO U^T o D, M = -Y U^T o D.

    TMA tiles: q, k [C,K] of tokens [B T,H / R K], dO [C,64] of [B T,H V], Z and W [C,64] of [slots,H,C,V], S^T and dS'^T [64,K] of
    [slots,H,V,K]. q, k and the states are also read as matrices, g and beta [B,T,H] by strides. Writes dq, dk [B,T,H / R,K], dg and dbeta
    [B,T,H]. Program (slot of a chunk, head of q and k): the R heads of v that share it one after another. ``q_h`` and ``k_h`` are K, or 0
    if all heads share q and k; ``q_t`` and ``k_t``: between rows.
    """
    gl.static_assert(q_tiles.dtype == gl.float32)
    gl.static_assert(gl.num_warps() == 4 * GROUPS)
    V_TILES: gl.constexpr = V // C
    TILES: gl.constexpr = 3 * V_TILES if 3 * V > 2 * K else 2 * (K // C)
    part: gl.constexpr = gl.bfloat16
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, C // GROUPS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, K // GROUPS, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, wide)
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4 * GROUPS], [0])
    clean: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4 * GROUPS, 1], [1, 0])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    single: gl.constexpr = q_tiles.layout

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
    memory = gl.allocate_shared_memory(part, [PARTS * TILES, C, C], half)
    second = gl.allocate_shared_memory(part, [2 * PARTS, C, C], half)  # of states, of P and M
    f_memory = gl.allocate_shared_memory(part, [PARTS, C, C], half)
    chosen_s = gl.allocate_shared_memory(part, [C, C], half)
    rate_s = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    vectors = decay_vectors()
    of_keys = reinterpret(memory, part, [2 * PARTS, C, K], half)
    of_values = memory.slice(0, PARTS * 3 * V_TILES)
    of_state = reinterpret(second, part, [PARTS, C, K], half)
    keys = as_singles(of_keys, single)
    given = as_singles(of_values, single)
    state = as_singles(of_state, single)
    key_bars = barriers(2, 1)
    bars = barriers(3, 1)
    state_bars = barriers(1, 1)
    tiles = (o_tiles, z_tiles, w_tiles)
    i = gl.arange(0, C, gl.SliceLayout(1, square))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    at = gl.arange(0, C, line)
    q += token * q_t + gl.multiple_of(group * q_h, C)  # K or 0 columns apart
    k += token * k_t + gl.multiple_of(group * k_h, C)
    g += b * g_b + begin * g_t + first.to(gl.int64) * g_h
    beta += b * b_b + begin * b_t + first.to(gl.int64) * b_h + at.to(gl.int64) * b_t
    d_decay += token * H + first
    dbeta += token * H + first
    chosen_s.store(tokens_through(True, square))
    of_q = gl.zeros([C, C], gl.float32, square)
    of_k = of_q
    if DECAYS:
        load_keys(q_tiles, k_tiles, keys, key_bars, row, group * q_h, group * k_h, 0, left, clean)
        q_s, k_s = tiles_in_three(of_keys, left * 0)
        store_over(keys.index(0).load(wide), q_s)
        store_over(keys.index(1).load(wide), k_s)
        fence_async_shared()
        meet()
        of_q, of_k = finished((product_of_parts(q_s, transposed(k_s), square), product_of_parts(k_s, transposed(k_s), square)), ())
    else:
        fence_async_shared()
    load_values(tiles, given, bars, head, row, first * V, R > 0)
    load_state(S_tiles, state.index(0), state_bars.index(0), head * V, R > 0)
    P_sum = gl.zeros([C, C], gl.float32, square)
    M_sum = P_sum
    step = G.to(gl.int64) * K
    d_query += token * step + group * K
    d_key += token * step + group * K
    for r in range(R):
        phase = r & 1
        zero = unknown(r * 0)
        rates = gl.load(beta + r * b_h.to(gl.int64), mask=at < left, other=0.0).to(gl.float32)
        rate_s.store(rates)
        if DECAYS:
            d = log_decays(g + r * g_h.to(gl.int64), g_t, left, at)
            total = sums_of_decays(d, vectors, phase, 1.0, EXACT=True)
        for m in gl.static_range(3):
            mbarrier.wait(bars.index(m), phase)
        if left < C:
            for n in gl.static_range(V_TILES):
                zero_rows_from(given.index(n), left, clean)
        meet()
        values = tiles_in_three(of_values, zero)
        of_beta = store_values(given, values, rate_s.load(gl.SliceLayout(1, square)), zero, square)
        of_beta = gl.convert_layout(of_beta, line)
        gl.store(dbeta + r + at.to(gl.int64) * H, of_beta.to(dbeta.dtype.element_ty), mask=at < left)
        values = tiles_in_three(of_values, zero)
        removed = ()
        for n in gl.static_range(V_TILES):
            removed = removed + (transposed(values[2 * V_TILES + n]),)
        P = sum_of_products(values[:V_TILES], removed, square) * scale
        M = sum_of_products(values[V_TILES : 2 * V_TILES], removed, square)
        if DECAYS:
            D = factors_between(vectors, phase, 1.0, False, square, EXACT=True)
            P = P * D
            M = M * D
        P = gl.where(i >= j, P, 0.0)
        M = gl.where(i > j, -M, 0.0)
        P_sum += P
        M_sum += M
        if DECAYS:
            pairs = sum_over_pairs(P * of_q + M * of_k, parts_at(f_memory, zero, PARTS), chosen_s)
        dQ = gl.zeros([C, K], gl.float32, wide)
        dA = dQ
        of_head = (head + r) * V
        for n in gl.static_range(V_TILES):
            S_s = parts_at(of_state, zero, PARTS)
            store_state(state.index(unknown(zero)), state_bars.index(0), n & 1, S_s, wide)
            values = tiles_in_three(of_values, zero)
            dQ += finished((product_of_parts(values[n], S_s, wide),), ())[0]
            dA += finished((product_of_parts(values[V_TILES + n], S_s, wide),), ())[0]
            if n + 1 < V_TILES:
                load_state(S_tiles, state.index(zero), state_bars.index(0), of_head + (n + 1) * C, R > 0)
            else:
                load_state(dS_tiles, state.index(zero), state_bars.index(0), of_head, R > 0)
        dQ = dQ * scale
        if DECAYS:
            read = vectors[2].index(phase).load(by_row)[:, None]
            dQ = dQ * read
            dA = dA * read
            of_rows = gl.sum(rows_of(q, q_t, left, zero, wide, K) * dQ - rows_of(k, k_t, left, zero, wide, K) * dA, 1)
        add_gradient(dQ, d_query, step, left, r > 0, zero)
        dK = gl.zeros([C, K], gl.float32, wide)
        for n in gl.static_range(V_TILES):
            S_s = parts_at(of_state, zero, PARTS)
            store_state(state.index(unknown(zero)), state_bars.index(0), (V_TILES + n) & 1, S_s, wide)
            values = tiles_in_three(of_values, zero)
            dK += finished((product_of_parts(values[2 * V_TILES + n], S_s, wide),), ())[0]
            if n + 1 < V_TILES:
                load_state(dS_tiles, state.index(zero), state_bars.index(0), of_head + (n + 1) * C, R > 0)
            else:
                load_state(S_tiles, state.index(zero), state_bars.index(0), of_head + V, r + 1 < R)
        load_values(tiles, given, bars, head + r + 1, row, (first + r + 1) * V, r + 1 < R)
        if DECAYS:
            dK = dK * vectors[3].index(phase).load(by_row)[:, None]
            of_columns = gl.sum(rows_of(k, k_t, left, zero, wide, K) * dK, 1)
            at_state = (head + r).to(gl.int64) * (K * V)
            of_states = sum_of_states(chunk_states + at_state, d_chunk_states + at_state, K * V) * total
            of_rows = gl.convert_layout(of_rows, line)
            of_columns = gl.convert_layout(of_columns, line)
            gradient = gradients_of_decays(of_rows, of_columns, of_states, d, at >= left) + gl.convert_layout(pairs, line)
            gl.store(d_decay + r + at.to(gl.int64) * H, gradient.to(d_decay.dtype.element_ty), mask=at < left)
        add_gradient(dK - dA, d_key, step, left, r > 0, zero)
    meet()  # no product reads values and states
    load_keys(q_tiles, k_tiles, keys, key_bars, row, group * q_h, group * k_h, 1 if DECAYS else 0, left, clean)
    q_s, k_s = tiles_in_three(of_keys, left * 0)
    store_over(keys.index(0).load(wide), q_s)
    store_over(keys.index(1).load(wide), k_s)
    of_M = as_singles(second, single).index(0)
    of_M.store(M_sum)
    meet()
    M_sum += of_M.permute((1, 0)).load(square)
    P_s = parts_at(second, unknown(left * 0), PARTS)
    M_s = parts_at(second, unknown(left * 0) + PARTS, PARTS)
    store_over(M_sum, M_s)
    store_parts(P_sum, P_s)
    fence_async_shared()
    meet()
    q_s, k_s = tiles_in_three(of_keys, left * 0)
    add_gradient(finished((product_of_parts(P_s, k_s, wide),), ())[0], d_query, step, left, R > 0, left * 0)
    add_gradient(sum_of_products((transposed(P_s), M_s), (q_s, k_s), wide), d_key, step, left, R > 0, left * 0)
    meet()
    for m in gl.static_range(2):
        mbarrier.invalidate(key_bars.index(m))
    for m in gl.static_range(3):
        mbarrier.invalidate(bars.index(m))
    mbarrier.invalidate(state_bars.index(0))
