"""The walk backward over chunks in float32 on Hopper, in Gluon, by the tiles of ``walk_float32.py``. With dS' the gradient of the state
after a chunk,

    Z = A^T dO + B^T dS'        Y = beta o Z = dV        dS = total o dS' + q^T dO - k^T Y

As in ``walk_float32.py``, dS', dO and Y are transposed, left operands in three parts from registers, one tile of 64 key channels at a time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ....gpu.hopper_tiles import async_store, meet, unknown, zero_rows_from
from ....gpu.ring import invalidate
from .layouts import C
from .parts import finished, left_parts
from .programs import of_tokens, places, walk_of_program
from .slots import (
    PARTS,
    barriers_of,
    expect_slots,
    load_slots,
    slots_of,
    start_product,
    store_rows,
    store_totals,
    tile_in,
    wait_slots,
)


@gluon.jit(do_not_specialize=["N", "T", "H", "b_b", "b_t", "b_h"])
def penstock_delta_reverse_float32_sm90(
    b_tiles, q_tiles, k_tiles, a_tiles, o_tiles, y_tiles, beta, totals, d_final_state, d_values, z, d_chunk_states,
    d_initial_state, cu_seqlens, N, T, H, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FINAL: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Y = beta o (A^T dO + B^T dS'), dS = total o dS' + q^T dO - k^T Y, from the last chunk to the first.

    TMA tiles: the parts [C,64] of B^T, q, k and A of [slots,H,3 C,...], dO and dV [C,BV] of tokens [B T,H V]. Reads beta [B,T,H] and,
    with FINAL, the gradient of the final state [N,H,K,V] by strides, total [slots,H,K]. Writes dV, Z [slots,H,C,V], the transposed dS' of
    each chunk [slots,H,V,K] and the gradient of the initial state [N,H,K,V]. Program (sequence, head, block of BV value channels).
    """
    gl.static_assert(BV == C)
    TILES: gl.constexpr = K // C  # of key channels
    kind: gl.constexpr = b_tiles.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    by_token: gl.constexpr = gl.SliceLayout(0, wide)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    clean: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    owner, h, vb, b, row, tokens, chunks, first = walk_of_program(cu_seqlens, N, T, H, V // BV, PACKED)
    head = h.to(gl.int64)
    b_s = slots_of(b_tiles, TILES, PARTS)
    q_s = slots_of(q_tiles, TILES, PARTS)
    k_s = slots_of(k_tiles, TILES, PARTS)
    a_s = slots_of(a_tiles, 1, PARTS)
    o_s = slots_of(o_tiles, 1, 1)
    out_s = gl.allocate_shared_memory(gl.float32, [C, BV], y_tiles.layout)
    total_s = gl.allocate_shared_memory(gl.float32, [2 * TILES, C], flat)
    rate_s = gl.allocate_shared_memory(gl.float32, [2, C], flat)
    fence_async_shared()
    meet()
    last = chunks - 1
    token = (b * T + row).to(gl.int32)
    value_column = h * V + vb * BV
    step = H * (PARTS * C)
    at = (first * (PARTS * C)).to(gl.int32) + last * step
    expect_slots(b_tiles, b_s, chunks > 0)
    expect_slots(a_tiles, a_s, chunks > 0)
    expect_slots(q_tiles, q_s, chunks > 0)
    expect_slots(k_tiles, k_s, chunks > 0)
    expect_slots(o_tiles, o_s, chunks > 0)
    meet()
    load_slots(b_tiles, b_s, at, 0, chunks > 0)
    load_slots(o_tiles, o_s, token + last * C, value_column, chunks > 0)
    load_slots(a_tiles, a_s, at, 0, chunks > 0)
    load_slots(q_tiles, q_s, at, 0, chunks > 0)
    load_slots(k_tiles, k_s, at, 0, chunks > 0)
    dk = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    dv = gl.arange(0, BV, gl.SliceLayout(1, wide))[:, None] + vb * BV
    dS = ()
    for n in gl.static_range(TILES):
        tile = gl.zeros([BV, C], gl.float32, wide)
        if FINAL:
            tile = gl.load(places(d_final_state, owner, head, dk + n * C, dv, (s_n, s_h, s_k, s_v))).to(gl.float32)
        dS = dS + (tile,)
    beta += b * b_b + row * b_t + head * b_h
    totals += first * K
    d_chunk_states += first * (K * V)
    z += first * (C * V)
    d_values += ((b * T + row) * H + head) * V + vb * BV
    apart = H.to(gl.int64) * V  # of rows of values
    store_totals(total_s, totals + last * H.to(gl.int64) * K, 0, chunks > 0)
    rate_s.index(0).store(of_tokens(beta, b_t, last, tokens, line))
    for m in range(chunks):
        c = last - m
        t = c * C
        phase = m & 1
        channel = dv + unknown(m * 0)  # addresses are computed where they are used: as loop invariants they spill
        left = left_parts(dS[0], kind, PARTS)
        wait_slots(b_s, phase)
        Z = start_product(left, b_s, 0, m * 0, True, wide)
        fence_async_shared()
        meet()  # dV of the chunk after this one is stored, k is free
        if m > 0:
            load_slots(k_tiles, k_s, at - m * step, 0, m > 0)
            if t + 2 * C <= tokens:
                async_store(y_tiles, [token + t + C, value_column], out_s)
        for n in gl.static_range(TILES):
            gl.store(d_chunk_states + c * H.to(gl.int64) * (K * V) + channel * K + (n * C + dk), dS[n])
        store_totals(total_s, totals + (c - 1) * H.to(gl.int64) * K, (m + 1) & 1, c > 0)
        rate_s.index((m + 1) & 1).store(of_tokens(beta, b_t, c - 1, tokens, line))
        Z = finished((Z,), left)[0]
        for n in gl.static_range(1, TILES):
            left = left_parts(dS[n], kind, PARTS)
            Z += finished((start_product(left, b_s, n, m * 0, True, wide),), left)[0]
        wait_slots(o_s, phase)
        if t + C > tokens:  # rows after the last token are padding, or belong to another sequence
            zero_rows_from(tile_in(o_s, 0, m * 0)[0], tokens - t, clean)
            fence_async_shared()  # dO of the next chunk is copied to the same memory
            meet()
        dO = left_parts(tile_in(o_s, 0, m * 0)[0].permute((1, 0)).load(wide), kind, PARTS)
        tma.store_wait(0)
        expect_slots(b_tiles, b_s, m + 1 < chunks)
        meet()  # B^T is free, and so is the memory of dV
        load_slots(b_tiles, b_s, at - (m + 1) * step, 0, m + 1 < chunks)
        wait_slots(a_s, phase)
        Z += finished((start_product(dO, a_s, 0, m * 0, False, wide),), dO)[0]
        wait_slots(q_s, phase)
        later = ()
        for n in gl.static_range(TILES):
            tile = dS[n] * total_s.index(phase + 2 * n).load(gl.SliceLayout(0, wide))[None, :]
            later = later + (tile + finished((start_product(dO, q_s, n, m * 0, False, wide),), dO)[0],)
        gl.store(z + c * H.to(gl.int64) * (C * V) + dk * V + channel, Z)
        Y = Z * rate_s.index(phase).load(by_token)[None, :]
        out_s.permute((1, 0)).store(Y)
        expect_slots(a_tiles, a_s, m + 1 < chunks)
        expect_slots(q_tiles, q_s, m + 1 < chunks)
        expect_slots(o_tiles, o_s, m + 1 < chunks)
        meet()  # A, q and dO are free, dV is stored
        if t + C > tokens:  # the last chunk; others are stored by TMA
            store_rows(out_s, d_values + t * apart, apart, tokens - t, m * 0)
        load_slots(o_tiles, o_s, token + t - C, value_column, m + 1 < chunks)
        load_slots(a_tiles, a_s, at - (m + 1) * step, 0, m + 1 < chunks)
        load_slots(q_tiles, q_s, at - (m + 1) * step, 0, m + 1 < chunks)
        minus = left_parts(-Y, kind, PARTS)
        wait_slots(k_s, phase)
        dS = ()
        for n in gl.static_range(TILES):
            dS = dS + (later[n] + finished((start_product(minus, k_s, n, m * 0, False, wide),), minus)[0],)
        expect_slots(k_tiles, k_s, m + 1 < chunks)
    fence_async_shared()
    meet()
    if tokens >= C:
        async_store(y_tiles, [token, value_column], out_s)
    for n in gl.static_range(TILES):
        gl.store(d_initial_state + (owner * H + head) * (K * V) + (n * C + dk) * V + dv, dS[n])
    tma.store_wait(0)
    invalidate(barriers_of((b_s, q_s, k_s, a_s, o_s)))
