"""Gradients of the inputs of gated DeltaNet or DeltaNet in float32 on Hopper, in Gluon.

The formulas are those of ``scalar_gradients.py``, with W from the walk and Z = dV / beta. Every operand is the sum of three bfloat16 tiles
[64,64], 24 KB. Shared memory has four of them, so that two programs share a multiprocessor: while one loads tiles or converts them, tensor
cores multiply those of the other. For each head of v a program takes

    1. dO, Y = beta o Z and U = beta o W, 64 value channels after another: P and M,
    2. q and k, 64 key channels after another: P k, P^T q + (M + M^T) k, and F with its part of dg,
    3. for 64 key channels after another dO, Y, U, S and dS' of 64 value channels after another: the parts of dq, dk and dg of the states.

dO, Z and W are loaded and converted again for 3, for which registers and memory have no room beside P and M. Parts of dg are summed in
registers, those of dq and dk, and over heads, in memory, each element by one thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ....gpu.hopper_decays import decay_vectors, factors_between, gradients_of_decays, log_decays, sums_of_decays
from ....gpu.hopper_tiles import async_load, meet, unknown, zero_rows_from
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import chunk_of_slot
from .anchored import tokens_through
from .layouts import GROUPS, C
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

TILES = gl.constexpr(4)
PAIRS, KEYS, STATES, ROWS = gl.constexpr(0), gl.constexpr(3), gl.constexpr(5), gl.constexpr(10)
"""The first barrier of dO, Z and W; of q and k; of dO, Z, W, S and dS' in part 3; of q and k there."""
BARRIERS = gl.constexpr(12)


@gluon.jit
def expect(tiles, bars, first: gl.constexpr, COUNT: gl.constexpr):
    """Announce COUNT tiles, each of a barrier from ``first`` on."""
    for m in gl.static_range(first, first + COUNT):
        mbarrier.expect(bars.index(m), tiles.block_type.nbytes)


@gluon.jit
def load(tiles, row, column, bars, m: gl.constexpr, given, n: gl.constexpr):
    """Start the load of tile n of ``given``, which barrier m expects. All warps have read what is in its place."""
    async_load(tiles, [row, column], bars.index(m), given.index(n))


@gluon.jit
def wait(bars, parity, first: gl.constexpr, COUNT: gl.constexpr):
    """Wait for COUNT tiles."""
    for m in gl.static_range(first, first + COUNT):
        mbarrier.wait(bars.index(m), parity)


@gluon.jit
def clean(given, left, first: gl.constexpr, COUNT: gl.constexpr):
    """Zero rows of tiles after the last token."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    if left < C:
        for n in gl.static_range(first, first + COUNT):
            zero_rows_from(given.index(n), left, layout)
        meet()


@gluon.jit
def store_values(given, tiles, rates, zero, layout: gl.constexpr):
    """dO, Y = beta o Z and U = beta o W in parts replace dO, Z and W. Returns rowsum(Z o W). ``zero``: see ``tiles_in_three``."""
    first = unknown(zero)
    Z = given.index(first + 1).load(layout)
    W = given.index(first + 2).load(layout)
    of_beta = gl.sum(Z * W, 1)
    meet()  # the elements of other threads are where the parts will be
    store_parts(Z * rates, tiles[1])
    store_parts(W * rates, tiles[2])
    store_over(given.index(first).load(layout), tiles[0])
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
def add_gradient(x, first, step, left, again, zero):
    """Store the rows of dq or dk [C,C] of ``left`` tokens, ``step`` apart, or ``again``: add to them. Each thread has its own elements."""
    layout: gl.constexpr = x.type.layout
    i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None] + unknown(zero)
    j = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    place = first + i.to(gl.int64) * step + j
    inside = (i < left) & (j >= 0)
    gl.store(place, x + gl.load(place, mask=inside & again, other=0.0), mask=inside)


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "q_h", "k_h", "g_b", "g_t", "g_h", "b_b", "b_t", "b_h"])
def penstock_gdn_gradients_float32_sm90(
    q_tiles, k_tiles, o_tiles, z_tiles, w_tiles, S_tiles, dS_tiles, g, beta, d_query, d_key, d_decay, dbeta, cu_seqlens,
    scale, N, T, H, R, q_h, k_h, g_b, g_t, g_h, b_b, b_t, b_h,
    K: gl.constexpr, V: gl.constexpr, DECAYS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dq, dk, dg and dbeta, from U = beta o W, P = scale dO U^T o D, M = -Y U^T o D.

    TMA tiles [C,64]: q, k of tokens [B T,H / R K], dO of [B T,H V], Z and W of [slots,H,C,V], S^T and dS'^T of [slots,H,V,K]. Reads g and
    beta [B,T,H] by strides. Writes dq, dk [B,T,H / R,K], dg and dbeta [B,T,H]. Program (slot of a chunk, head of q and k): the R heads of v
    that share it one after another. ``q_h`` and ``k_h`` are K, or 0 if all heads share q and k.
    """
    gl.static_assert(q_tiles.dtype == gl.float32)
    gl.static_assert(gl.num_warps() == GROUPS)
    KEY_TILES: gl.constexpr = K // C
    VALUE_TILES: gl.constexpr = V // C
    part: gl.constexpr = gl.bfloat16
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, square)
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
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
    memory = gl.allocate_shared_memory(part, [3 * TILES, C, C], half)
    given = as_singles(memory, single)
    chosen_s = gl.allocate_shared_memory(part, [C, C], half)
    rate_s = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    vectors = decay_vectors()
    bars = barriers(BARRIERS, 1)
    i = gl.arange(0, C, by_row)[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    at = gl.arange(0, C, line)
    g += b * g_b + begin * g_t + first.to(gl.int64) * g_h
    beta += b * b_b + begin * b_t + first.to(gl.int64) * b_h + at.to(gl.int64) * b_t
    d_decay += token * H + first
    dbeta += token * H + first
    step = G.to(gl.int64) * K
    d_query += token * step + group * K
    d_key += token * step + group * K
    chosen_s.store(tokens_through(True, square))
    zeros = gl.zeros([C, C], gl.float32, square)
    for r in range(R):
        parity = r & 1
        zero = unknown(r * 0)
        head = slot * H + first + r
        column = (first + r) * V
        rates = gl.load(beta + r * b_h.to(gl.int64), mask=at < left, other=0.0).to(gl.float32)
        rate_s.store(rates)
        total = 1.0
        if DECAYS:
            d = log_decays(g + r * g_h.to(gl.int64), g_t, left, at)
            total = sums_of_decays(d, vectors, parity, 1.0, EXACT=True)
        meet()
        P = zeros
        M = zeros
        of_beta = gl.zeros([C], gl.float32, by_row)
        for n in range(VALUE_TILES):
            expect(q_tiles, bars, PAIRS, 3)
            fence_async_shared()
            meet()  # the memory of all tiles is free
            load(o_tiles, row, column + n * C, bars, PAIRS, given, 0)
            load(z_tiles, head * C, n * C, bars, PAIRS + 1, given, 1)
            load(w_tiles, head * C, n * C, bars, PAIRS + 2, given, 2)
            wait(bars, r * VALUE_TILES + n & 1, PAIRS, 3)
            clean(given, left, 0, 1)
            of_beta += store_values(given, tiles_in_three(memory, zero), rate_s.load(by_row)[:, None], zero, square)
            fence_async_shared()
            meet()
            O_s, Y_s, U_s, _ = tiles_in_three(memory, zero)
            P += finished((product_of_parts(O_s, transposed(U_s), square),), ())[0]
            M += finished((product_of_parts(Y_s, transposed(U_s), square),), ())[0]
        gl.store(dbeta + r + at.to(gl.int64) * H, gl.convert_layout(of_beta, line).to(dbeta.dtype.element_ty), mask=at < left)
        P = P * scale
        if DECAYS:
            D = factors_between(vectors, parity, 1.0, False, square, EXACT=True)
            P = P * D
            M = M * D
        P = gl.where(i >= j, P, 0.0)
        M = gl.where(i > j, -M, 0.0)
        meet()  # no product reads dO, Y and U
        M_s, _, P_s, _ = tiles_in_three(memory, zero)
        of_M = given.index(unknown(zero))
        of_M.store(M)
        store_parts(P, P_s)
        meet()
        store_over(M + of_M.permute((1, 0)).load(square), M_s)
        of_q = zeros
        of_k = zeros
        for n in range(KEY_TILES):
            expect(q_tiles, bars, KEYS, 2)
            fence_async_shared()
            meet()  # M + M^T and P are stored, the memory of q and k is free
            load(q_tiles, row, group * q_h + n * C, bars, KEYS, given, 1)
            load(k_tiles, row, group * k_h + n * C, bars, KEYS + 1, given, 3)
            wait(bars, r * KEY_TILES + n & 1, KEYS, 2)
            clean(given, left, 1, 1)
            clean(given, left, 3, 1)
            M_s, q_s, P_s, k_s = tiles_in_three(memory, zero)
            store_over(given.index(unknown(zero) + 1).load(square), q_s)
            store_over(given.index(unknown(zero) + 3).load(square), k_s)
            fence_async_shared()
            meet()
            M_s, q_s, P_s, k_s = tiles_in_three(memory, zero)
            add_gradient(finished((product_of_parts(P_s, k_s, square),), ())[0], d_query + n * C, step, left, r > 0, zero)
            add_gradient(sum_of_products((transposed(P_s), M_s), (q_s, k_s), square), d_key + n * C, step, left, r > 0, zero)
            if DECAYS:
                of_q += finished((product_of_parts(q_s, transposed(k_s), square),), ())[0]
                of_k += finished((product_of_parts(k_s, transposed(k_s), square),), ())[0]
        if DECAYS:
            meet()  # no product reads q
            M_s, F_s, P_s, _ = tiles_in_three(memory, zero)
            F = load_parts(P_s, square) * of_q + gl.where(i > j, load_parts(M_s, square) * of_k, 0.0)
            pairs = gl.convert_layout(sum_over_pairs(F, F_s, chosen_s), line)
        queries = gl.zeros([C], gl.float32, line)  # the terms of dg by states, summed over key channels
        keys = queries
        states = queries
        for m in range(KEY_TILES):
            key = m * C  # the first of the channels
            turn = r * KEY_TILES + m
            dQ = zeros
            dA = zeros
            dK = zeros
            of_state = gl.zeros([C], gl.float32, by_row)
            for n in range(VALUE_TILES):
                expect(q_tiles, bars, STATES, 4)
                fence_async_shared()
                meet()  # the memory of all tiles is free
                load(o_tiles, row, column + n * C, bars, STATES, given, 0)
                load(z_tiles, head * C, n * C, bars, STATES + 1, given, 1)
                load(w_tiles, head * C, n * C, bars, STATES + 2, given, 2)
                load(S_tiles, head * V + n * C, key, bars, STATES + 3, given, 3)
                wait(bars, turn * VALUE_TILES + n & 1, STATES, 4)
                clean(given, left, 0, 1)
                store_values(given, tiles_in_three(memory, zero), rate_s.load(by_row)[:, None], zero, square)
                store_over(given.index(unknown(zero) + 3).load(square), tiles_in_three(memory, zero)[3])
                fence_async_shared()
                meet()
                O_s, Y_s, U_s, S_s = tiles_in_three(memory, zero)
                dQ += finished((product_of_parts(O_s, S_s, square),), ())[0]
                expect(q_tiles, bars, STATES + 4, 1)
                meet()  # dO is free
                load(dS_tiles, head * V + n * C, key, bars, STATES + 4, given, 0)
                dA += finished((product_of_parts(Y_s, S_s, square),), ())[0]
                wait(bars, turn * VALUE_TILES + n & 1, STATES + 4, 1)
                dS_s, _, U_s, S_s = tiles_in_three(memory, zero)
                dS = given.index(unknown(zero)).load(square)
                if DECAYS:
                    of_state += gl.sum(load_parts(S_s, square) * dS, 1)
                store_over(dS, dS_s)
                fence_async_shared()
                meet()
                dK += finished((product_of_parts(U_s, dS_s, square),), ())[0]
            dQ = dQ * scale
            if DECAYS:
                expect(q_tiles, bars, ROWS, 2)
                meet()  # the memory of q and k is free
                load(q_tiles, row, group * q_h + key, bars, ROWS, given, 1)
                load(k_tiles, row, group * k_h + key, bars, ROWS + 1, given, 3)
                read = vectors[2].index(parity).load(by_row)[:, None]
                dQ = dQ * read
                dA = dA * read
                dK = dK * vectors[3].index(parity).load(by_row)[:, None]
                wait(bars, turn & 1, ROWS, 2)
                clean(given, left, 1, 1)
                clean(given, left, 3, 1)
                of_rows = gl.sum(given.index(unknown(zero) + 1).load(square) * dQ, 1)
                k_rows = given.index(unknown(zero) + 3).load(square)
                of_rows -= gl.sum(k_rows * dA, 1)
                queries += gl.convert_layout(of_rows, line)
                keys += gl.convert_layout(gl.sum(k_rows * dK, 1), line)
                states += gl.sum(of_state, 0) * total
            add_gradient(dQ, d_query + key, step, left, True, zero)
            add_gradient(dK - dA, d_key + key, step, left, True, zero)
        if DECAYS:
            gradient = gradients_of_decays(queries, keys, states, d, at >= left) + pairs
            gl.store(d_decay + r + at.to(gl.int64) * H, gradient.to(d_decay.dtype.element_ty), mask=at < left)
    invalidate((bars,))
