"""The walk over chunks in float32 on Hopper, in Gluon, by the tiles of a chunk, whatever its decays are:

    X = beta o (V - k S)        O = A X + q S        S' = total o S + (B^T)^T X        W = V - k S - (A_k T) X

k, q, B^T, A and A_k T are sums of three bfloat16 tiles in memory. S and X are transposed in float32 registers, and in three parts left
operands of all products, without a copy in shared memory. S is a tuple of tiles of 64 key channels, of which one at a time is in parts.
Sums of several products are added in registers, because tensor cores cut sums off. Shared memory holds one chunk. A tile of the next chunk
is loaded as soon as its place is free: k, q and v after X, the others after the products with X.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ....gpu.hopper_tiles import async_store, meet, unknown, zero_rows_from
from ....gpu.ring import invalidate
from .layouts import C
from .parts import finished, left_parts
from .programs import of_tokens, places, row_of_pool, store_in_pool, walk_of_program
from .slots import (
    PARTS,
    add_products,
    barriers_of,
    expect_operands,
    expect_slots,
    load_operands,
    load_slots,
    slots_of,
    start_product,
    start_products,
    store_rows,
    store_totals,
    tile_in,
    wait_operands,
    wait_slots,
)


@gluon.jit(do_not_specialize=["N", "T", "H", "b_b", "b_t", "b_h"])
def penstock_delta_walk_float32_sm90(
    k_tiles, q_tiles, b_tiles, a_tiles, r_tiles, v_tiles, o_tiles, beta, totals, initial_state, output, final_state, errors, chunk_states,
    cu_seqlens, rows, N, T, H, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, INITIAL: gl.constexpr, OUTPUT: gl.constexpr, KEEP: gl.constexpr,
    PACKED: gl.constexpr, PIECE: gl.constexpr, ROWS_GIVEN: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """O = A X + q S, S <- total o S + (B^T)^T X with X = beta o (V - k S), chunk by chunk. W = V - k S - (A_k T) X.

    TMA tiles: the parts [C,64] of k, q, B^T, A and A_k T of [slots,H,3 C,...], v and output [C,BV] of tokens [B T,H V]. Reads beta
    [B,T,H] and the initial state [N,H,K,V] by strides, total [slots,H,K]. With OUTPUT writes the output and the final state [N,H,K,V], with
    KEEP W [slots,H,C,V] and the transposed states before chunks [slots,H,V,K]. Program (sequence, head, block of BV value channels). PIECE,
    ROWS_GIVEN, NARROW: see ``scalar_walk.py``.
    """
    gl.static_assert(BV == C)
    TILES: gl.constexpr = K // C  # of key channels
    kind: gl.constexpr = k_tiles.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    by_token: gl.constexpr = gl.SliceLayout(0, wide)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    clean: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    owner, h, vb, b, row, tokens, chunks, first = walk_of_program(cu_seqlens, N, T, H, V // BV, PACKED, PIECE)
    if PIECE > 0:
        owner, chunks = row_of_pool(rows, owner, chunks, ROWS_GIVEN)
    head = h.to(gl.int64)
    k_s = slots_of(k_tiles, TILES, PARTS)
    v_s = slots_of(v_tiles, 1, 1)
    b_s = slots_of(b_tiles, TILES, PARTS)
    read = (k_s,)  # by products with the state
    given = ()  # by other products with X
    read_tiles = (k_tiles,)
    given_tiles = ()
    if OUTPUT:
        read = read + (slots_of(q_tiles, TILES, PARTS),)
        read_tiles = read_tiles + (q_tiles,)
        given = given + (slots_of(a_tiles, 1, PARTS),)
        given_tiles = given_tiles + (a_tiles,)
        out_s = gl.allocate_shared_memory(gl.float32, [C, BV], o_tiles.layout)
    if KEEP:
        given = given + (slots_of(r_tiles, 1, PARTS),)
        given_tiles = given_tiles + (r_tiles,)
    total_s = gl.allocate_shared_memory(gl.float32, [2 * TILES, C], flat)
    rate_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    fence_async_shared()
    meet()
    token = (b * T + row).to(gl.int32)
    value_column = h * V + vb * BV
    at = (first * (PARTS * C)).to(gl.int32)
    step = H * (PARTS * C)
    expect_operands(read_tiles, read, chunks > 0)
    expect_slots(v_tiles, v_s, chunks > 0)
    expect_slots(b_tiles, b_s, chunks > 0)
    expect_operands(given_tiles, given, chunks > 0)
    meet()
    load_operands(read_tiles, read, at, chunks > 0)
    load_slots(v_tiles, v_s, token, value_column, chunks > 0)
    load_slots(b_tiles, b_s, at, 0, chunks > 0)
    load_operands(given_tiles, given, at, chunks > 0)
    dk = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    dv = gl.arange(0, BV, gl.SliceLayout(1, wide))[:, None] + vb * BV
    S = ()
    for n in gl.static_range(TILES):
        tile = gl.zeros([BV, C], gl.float32, wide)
        if INITIAL:
            begins = (dk >= 0) & (dv >= 0) & ((chunks > 0) | (PIECE == 0))  # a pool may be empty
            tile = gl.load(places(initial_state, owner, head, dk + n * C, dv, (s_n, s_h, s_k, s_v)), mask=begins, other=0.0).to(gl.float32)
        S = S + (tile,)
    beta += b * b_b + row * b_t + head * b_h
    totals += first * K
    chunk_states += first * (K * V)
    errors += first * (C * V)
    output += ((b * T + row) * H + head) * V + vb * BV
    store_totals(total_s, totals, 0, chunks > 0)
    rate_s.index(0).store(of_tokens(beta, b_t, chunks * 0, tokens, line))
    for c in range(chunks):
        t = c * C
        phase = c & 1
        channel = dv + unknown(c * 0)  # addresses are computed where they are used: as loop invariants they spill
        left = left_parts(S[0], kind, PARTS)
        wait_operands(read, phase)
        sums = start_products(left, read, 0, c * 0, True, wide)
        fence_async_shared()
        meet()  # the output of the chunk before is stored, all its tiles are free
        if c > 0:
            load_slots(b_tiles, b_s, at + c * step, 0, c > 0)
            load_operands(given_tiles, given, at + c * step, c > 0)
            if OUTPUT:
                async_store(o_tiles, [token + t - C, value_column], out_s)
        if KEEP:
            for n in gl.static_range(TILES):
                gl.store(chunk_states + c * H.to(gl.int64) * (K * V) + channel * K + (n * C + dk), S[n])
        store_totals(total_s, totals + (c + 1) * H.to(gl.int64) * K, (c + 1) & 1, c + 1 < chunks)
        rate_s.index((c + 1) & 1).store(of_tokens(beta, b_t, c + 1, tokens, line))
        sums = finished(sums, left)
        for n in gl.static_range(1, TILES):
            left = left_parts(S[n], kind, PARTS)
            sums = add_products(sums, left, read, n, c * 0, True, wide)
        wait_slots(v_s, phase)
        if t + C > tokens:  # rows after the last token are padding, or belong to another sequence
            zero_rows_from(tile_in(v_s, 0, c * 0)[0], tokens - t, clean)
            meet()
        W = tile_in(v_s, 0, c * 0)[0].permute((1, 0)).load(wide) - sums[0]
        X = left_parts(W * rate_s.index(phase).load(by_token)[None, :], kind, PARTS)
        tma.store_wait(0)
        expect_operands(read_tiles, read, c + 1 < chunks)
        expect_slots(v_tiles, v_s, c + 1 < chunks)
        meet()  # k, q and v are free, and so is the memory of the output
        load_operands(read_tiles, read, at + (c + 1) * step, c + 1 < chunks)
        load_slots(v_tiles, v_s, token + t + C, value_column, c + 1 < chunks)
        if KEEP:
            wait_slots(given[len(given) - 1], phase)
            W = W - finished((start_product(X, given[len(given) - 1], 0, c * 0, True, wide),), X)[0]
            gl.store(errors + c * H.to(gl.int64) * (C * V) + dk * V + channel, W)
        wait_slots(b_s, phase)
        later = ()
        for n in gl.static_range(TILES):
            moved = finished((start_product(X, b_s, n, c * 0, False, wide),), X)[0]
            tile = S[n] * total_s.index(phase + 2 * n).load(gl.SliceLayout(0, wide))[None, :] + moved
            if NARROW:
                tile = tile.to(initial_state.dtype.element_ty).to(gl.float32)
            later = later + (tile,)
        S = later
        if OUTPUT:
            wait_slots(given[0], phase)
            O = sums[1] + finished((start_product(X, given[0], 0, c * 0, True, wide),), X)[0]
        expect_slots(b_tiles, b_s, c + 1 < chunks)
        expect_operands(given_tiles, given, c + 1 < chunks)
        if OUTPUT:
            out_s.permute((1, 0)).store(O)
    if OUTPUT:
        fence_async_shared()
        meet()
        t = (chunks - 1) * C
        step = H.to(gl.int64) * V
        if t + C > tokens:
            store_rows(out_s, output + t * step, step, tokens - t, t * 0)
        elif chunks > 0:
            async_store(o_tiles, [token + t, value_column], out_s)
        for n in gl.static_range(TILES):
            if PIECE > 0:
                store_in_pool(S[n], initial_state, owner, head, dk + n * C, dv, (s_n, s_h, s_k, s_v), chunks)
            else:
                gl.store(final_state + (owner * H + head) * (K * V) + (n * C + dk) * V + dv, S[n])
    tma.store_wait(0)
    invalidate(barriers_of(read + (v_s, b_s) + given))
