"""The states of RWKV-7 from chunk to chunk on Hopper, in Gluon, by what ``anchored_steps.py`` computes.

    O = Q S + Y       S' = total o S + M S + W       dS = total o dS' + M^T dS' + Q^T dO

with dS' the gradient of the state after a chunk. Between two states there is one product, forward and backward in time. The state is in
registers, transposed, as the left operand of both products of a chunk. With float16 inputs PARTS is 2: it has two bfloat16 parts there, as
have dO and, in memory, M, Q, Y, states and their gradients. A product is three. With float32 inputs PARTS is 3: the operands have three
parts, and W, Y, states and their gradients are in memory in float32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....gpu.hopper_tiles import async_store, meet, zero_rows_from
from ....gpu.ring import barriers, expect, invalidate, load_tiles
from .layouts import C
from .parts import added_in_parts, as_left, finished, in_parts, load_parts, product_of_parts, transposed
from .programs import places, row_of_pool, store_in_pool, walk_of_program


@gluon.jit
def rows_of(at, PARTS: gl.constexpr):
    """Where the parts of tile ``at`` / C of [slots,H] are."""
    found = ()
    for m in gl.static_range(PARTS):
        found = found + ([PARTS * at + m * C, 0],)
    return found


@gluon.jit
def rings_of(tiles, STAGES: gl.constexpr):
    """A ring and barriers for each descriptor."""
    rings = ()
    bars = ()
    for m in gl.static_range(len(tiles)):
        rings = rings + (gl.allocate_shared_memory(tiles[m].dtype, [STAGES, C, C], tiles[m].layout),)
        bars = bars + (barriers(STAGES, 1),)
    return rings, bars


@gluon.jit
def load_chunk(tiles, rings, bars, first, H, c, chunks, PARTS: gl.constexpr, ADDED: gl.constexpr, MADE: gl.constexpr):
    """Start the loads of the tiles of chunk c, if it exists: of M and Q PARTS parts, of W ADDED, of Y MADE."""
    at = ((first + c * H) * C).to(gl.int32)
    operand = rows_of(at, PARTS)
    load_tiles(tiles, rings, bars, operand + rows_of(at, ADDED) + operand + rows_of(at, MADE), c, c < chunks)


@gluon.jit
def parts_in(rings, s, first: gl.constexpr, PARTS: gl.constexpr):
    """The tile whose parts are in slot ``s`` of PARTS rings."""
    found = ()
    for m in gl.static_range(PARTS):
        found = found + (rings[first + m].index(s),)
    return found


@gluon.jit
def wait_for(bars, s, phase, first: gl.constexpr, COUNT: gl.constexpr):
    """Wait for the tiles in slot ``s`` of COUNT rings."""
    for m in gl.static_range(first, first + COUNT):
        mbarrier.wait(bars[m].index(s), phase)


@gluon.jit
def store_transposed(made_s, n, parts):
    """Store the transpose of a state, result n, in as many parts."""
    for m in gl.static_range(len(parts)):
        made_s.index(len(parts) * (n & 1) + m).permute((1, 0)).store(parts[m])


@gluon.jit
def store_state(tiles, made_s, place, n, PARTS: gl.constexpr):
    """Start the store of state ``place`` of [slots,H], result n, in PARTS parts."""
    for m in gl.static_range(PARTS):
        async_store(tiles, [(place * (PARTS * C)).to(gl.int32) + m * C, 0], made_s.index(PARTS * (n & 1) + m))


@gluon.jit
def store_chunk(tiles, made_s, token, first, h, H, c, OUTPUT: gl.constexpr, PARTS: gl.constexpr):
    """Start the store of the output of chunk c, or of the state before it in PARTS parts."""
    K: gl.constexpr = made_s.shape[2]
    if OUTPUT:
        async_store(tiles, [token + c * C, h * K], made_s.index(c & 1))
    else:
        store_state(tiles, made_s, first + c * H, c, PARTS)


@gluon.jit(do_not_specialize=["N", "T", "H"])
def penstock_rwkv7_chain_sm90(
    step_tiles, write_tiles, read_tiles, own_tiles, made_tiles, totals, initial_state, output, final_state, cu_seqlens, rows, N, T, H,
    s_n, s_h, s_k, s_v, K: gl.constexpr, STAGES: gl.constexpr, INITIAL: gl.constexpr, OUTPUT: gl.constexpr, KEEP: gl.constexpr,
    PACKED: gl.constexpr, PIECE: gl.constexpr, ROWS_GIVEN: gl.constexpr, NARROW: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """O = Q S + Y, S <- total o S + M S + W, chunk by chunk.

    TMA tiles [C,K]: M, Q and Y of [slots,H,PARTS C,K], W of [slots,H,2 C,K]; with OUTPUT the output of tokens [B T,H K], with KEEP the
    states before chunks of [slots,H,PARTS K,V]: V is K. Reads the initial state [N,H,K,V] by strides, total [slots,H,K]. With OUTPUT writes
    the output [B,T,H,V] and the final state [N,H,K,V], with KEEP the states before chunks. Program (sequence, head). PARTS: with bfloat16,
    float16 and float32 inputs 1, 2 and 3. With 3 parts Y, W and states are one part of float32. PIECE, ROWS_GIVEN, NARROW: see
    ``scalar_walk.py``.
    """
    gl.static_assert(K == C)
    gl.static_assert(OUTPUT != KEEP)
    ADDED: gl.constexpr = 1 if PARTS == 3 else 2  # parts of W
    MADE: gl.constexpr = 1 if PARTS == 3 else PARTS  # parts of Y and of states
    FROM: gl.constexpr = PARTS + ADDED
    kind: gl.constexpr = step_tiles.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    owner, h, _, b, row, tokens, chunks, first = walk_of_program(cu_seqlens, N, T, H, 1, PACKED, PIECE)
    if PIECE > 0:
        owner, chunks = row_of_pool(rows, owner, chunks, ROWS_GIVEN)
    head = h.to(gl.int64)
    tiles = (step_tiles,) * PARTS + (write_tiles,) * ADDED
    if OUTPUT:
        tiles = tiles + (read_tiles,) * PARTS + (own_tiles,) * MADE
    rings, bars = rings_of(tiles, STAGES)
    made_s = gl.allocate_shared_memory(made_tiles.dtype, [2 if OUTPUT else 2 * MADE, C, K], made_tiles.layout)
    total_s = gl.allocate_shared_memory(gl.float32, [2, K], flat)
    fence_async_shared()
    meet()
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks * 0 + m < chunks)
    meet()
    for m in gl.static_range(STAGES):
        load_chunk(tiles, rings, bars, first, H, chunks * 0 + m, chunks, PARTS, ADDED, MADE)
    dk = gl.arange(0, K, gl.SliceLayout(0, wide))[None, :]
    dv = gl.arange(0, K, gl.SliceLayout(1, wide))[:, None]
    zero = gl.zeros([K, K], gl.float32, wide)
    S = zero
    if INITIAL:
        begins = (dk >= 0) & (dv >= 0) & ((chunks > 0) | (PIECE == 0))  # a pool may be empty
        S = gl.load(places(initial_state, owner, head, dk, dv, (s_n, s_h, s_k, s_v)), mask=begins, other=0.0).to(gl.float32)
    channel = gl.arange(0, K, line)
    totals += first * K + channel
    step = H.to(gl.int64) * K
    total_s.index(0).store(gl.load(totals, mask=channel * 0 < chunks, other=0.0))
    token = (b * T + row).to(gl.int32)
    output += ((b * T + row) * H + head) * K
    for c in range(chunks):
        s = c % STAGES
        t = c * C
        phase = (c // STAGES) & 1
        coming = gl.load(totals + (c + 1) * step, mask=channel * 0 + c + 1 < chunks, other=0.0)
        rounded = in_parts(S, kind, PARTS)
        L = as_left(rounded)
        wait_for(bars, s, phase, 0, PARTS)
        moved = product_of_parts(L, transposed(parts_in(rings, s, 0, PARTS)), wide)
        O = zero
        if OUTPUT:
            wait_for(bars, s, phase, FROM, PARTS)
            O = product_of_parts(L, transposed(parts_in(rings, s, FROM, PARTS)), wide)
        # while the tensor cores compute: the store of the chunk before, and loads into its memory
        tma.store_wait(0)
        expect(tiles, bars, c - 1 + STAGES, (c > 0) & (c - 1 + STAGES < chunks))
        fence_async_shared()
        meet()  # totals and results are stored
        if c > 0:
            load_chunk(tiles, rings, bars, first, H, c - 1 + STAGES, chunks, PARTS, ADDED, MADE)
            store_chunk(made_tiles, made_s, token, first, h, H, c - 1, OUTPUT, MADE)
        wait_for(bars, s, phase, PARTS, ADDED)
        written = load_parts(transposed(parts_in(rings, s, PARTS, ADDED)), wide)
        kept = (S,) if PARTS == 3 else rounded
        S = S * total_s.index(c & 1).load(gl.SliceLayout(0, wide))[None, :] + written
        total_s.index((c + 1) & 1).store(coming)
        if KEEP:
            store_transposed(made_s, c, kept)
        moved, O = finished((moved, O), L)
        S = S + moved
        if NARROW:
            S = S.to(initial_state.dtype.element_ty).to(gl.float32)
        if OUTPUT:
            wait_for(bars, s, phase, FROM + PARTS, MADE)
            O = (O + load_parts(transposed(parts_in(rings, s, FROM + PARTS, MADE)), wide)).to(made_tiles.dtype)
            store_transposed(made_s, c, (O,))
            if t + C > tokens:  # the last chunk; others are stored by TMA
                gl.store(output + (t + dk) * (H.to(gl.int64) * K) + dv, O, mask=t + dk < tokens)
    fence_async_shared()
    meet()
    if OUTPUT:
        if chunks * C == tokens:
            if chunks > 0:
                store_chunk(made_tiles, made_s, token, first, h, H, chunks - 1, OUTPUT, MADE)
        if PIECE > 0:
            store_in_pool(S, initial_state, owner, head, dk, dv, (s_n, s_h, s_k, s_v), chunks)
        else:
            gl.store(final_state + (owner * H + head) * (K * K) + dk * K + dv, S)
    elif chunks > 0:
        store_chunk(made_tiles, made_s, token, first, h, H, chunks - 1, OUTPUT, MADE)
    tma.store_wait(0)
    invalidate(bars)


@gluon.jit
def load_step(tiles, rings, bars, token, first, h, H, m, chunks, PARTS: gl.constexpr):
    """Start the loads of step m, which is chunk ``chunks - 1 - m``: M and Q in PARTS parts, and dO."""
    K: gl.constexpr = rings[0].shape[2]
    c = chunks - 1 - m
    parts = rows_of(((first + c * H) * C).to(gl.int32), PARTS)
    load_tiles(tiles, rings, bars, parts + parts + ([token + c * C, h * K],), m, m < chunks)


@gluon.jit(do_not_specialize=["N", "T", "H"])
def penstock_rwkv7_chain_bwd_sm90(
    step_tiles, read_tiles, o_tiles, dS_tiles, totals, d_final_state, d_initial_state, cu_seqlens, N, T, H,
    s_n, s_h, s_k, s_v, K: gl.constexpr, FINAL: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """dS = total o dS' + M^T dS' + Q^T dO, from the last chunk to the first.

    TMA tiles [C,K]: M and Q of [slots,H,PARTS C,K], dO of tokens [B T,H K], dS' of [slots,H,PARTS K,V]: V is K. With FINAL reads the
    gradient of the final state [N,H,K,V] by strides; total [slots,H,K]. Writes dS' and the gradient of the initial state [N,H,K,V].
    Program (sequence, head). PARTS: with bfloat16, float16 and float32 inputs 1, 2 and 3; with 3, dS' is one part of float32.
    """
    gl.static_assert(K == C)
    MADE: gl.constexpr = 1 if PARTS == 3 else PARTS  # parts of dS'
    kind: gl.constexpr = step_tiles.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    owner, h, _, b, row, tokens, chunks, first = walk_of_program(cu_seqlens, N, T, H, 1, PACKED)
    head = h.to(gl.int64)
    tiles = (step_tiles,) * PARTS + (read_tiles,) * PARTS + (o_tiles,)
    rings, bars = rings_of(tiles, STAGES)
    o_s: gl.constexpr = 2 * PARTS
    made_s = gl.allocate_shared_memory(dS_tiles.dtype, [2 * MADE, C, K], dS_tiles.layout)
    total_s = gl.allocate_shared_memory(gl.float32, [2, K], flat)
    fence_async_shared()
    meet()
    token = (b * T + row).to(gl.int32)
    for m in gl.static_range(STAGES):
        expect(tiles, bars, chunks * 0 + m, chunks * 0 + m < chunks)
    meet()
    for m in gl.static_range(STAGES):
        load_step(tiles, rings, bars, token, first, h, H, chunks * 0 + m, chunks, PARTS)
    dk = gl.arange(0, K, gl.SliceLayout(0, wide))[None, :]
    dv = gl.arange(0, K, gl.SliceLayout(1, wide))[:, None]
    dS = gl.zeros([K, K], gl.float32, wide)
    if FINAL:
        dS = gl.load(places(d_final_state, owner, head, dk, dv, (s_n, s_h, s_k, s_v))).to(gl.float32)
    channel = gl.arange(0, K, line)
    last = chunks - 1
    totals += first * K + channel
    step = H.to(gl.int64) * K
    total_s.index(0).store(gl.load(totals + last * step, mask=channel * 0 < chunks, other=0.0))
    for m in range(chunks):
        s = m % STAGES
        c = last - m
        phase = (m // STAGES) & 1
        coming = gl.load(totals + (c - 1) * step, mask=channel * 0 + c > 0, other=0.0)
        rounded = in_parts(dS, kind, PARTS)
        L = as_left(rounded)
        wait_for(bars, s, phase, 0, PARTS)
        moved = product_of_parts(L, parts_in(rings, s, 0, PARTS), wide)
        # while the tensor cores compute: the store of the chunk after this one, and loads into its memory
        tma.store_wait(0)
        expect(tiles, bars, m - 1 + STAGES, (m > 0) & (m - 1 + STAGES < chunks))
        wait_for(bars, s, phase, PARTS, PARTS + 1)
        if (c + 1) * C > tokens:  # rows after the last token are padding, or belong to another sequence
            zero_rows_from(rings[o_s].index(s), tokens - c * C, clean)
        fence_async_shared()
        meet()  # totals, results and zeros are stored
        if m > 0:
            load_step(tiles, rings, bars, token, first, h, H, m - 1 + STAGES, chunks, PARTS)
            store_state(dS_tiles, made_s, first + (c + 1) * H, m - 1, MADE)
        dO = (rings[o_s].index(s).permute((1, 0)).load(left),)
        if PARTS > 1:
            dO = in_parts(dO[0].to(gl.float32), kind, PARTS)
        if PARTS == 3:  # a sum in registers: tensor cores would cut it off at each step
            added = product_of_parts(dO, parts_in(rings, s, PARTS, PARTS), wide)
            store_transposed(made_s, m, (dS,))
        else:
            moved = added_in_parts(dO, parts_in(rings, s, PARTS, PARTS), moved)
            store_transposed(made_s, m, rounded)
        dS = dS * total_s.index(m & 1).load(gl.SliceLayout(0, wide))[None, :]
        total_s.index((m + 1) & 1).store(coming)
        if PARTS == 3:
            moved, added = finished((moved, added), L + dO)
            dS = dS + added
        else:
            moved = finished((moved,), L + dO)[0]
        dS = dS + moved
    fence_async_shared()
    meet()
    if chunks > 0:
        store_state(dS_tiles, made_s, first, last, MADE)
    gl.store(d_initial_state + (owner * H + head) * (K * K) + dk * K + dv, dS)
    tma.store_wait(0)
    invalidate(bars)
