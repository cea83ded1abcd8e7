"""What a chunk of gated DeltaNet or DeltaNet in float32 needs besides the state, on Hopper, in Gluon: ``scalar_prepare.py`` in three parts.

With D, read, rest, A_q, A_k and T as there, the tiles of ``forms/float32_sm90.py`` are

    k o read        scale q o read        B^T = (rest o T)^T k        A = A_q T        A_k T        read of the last token

Every operand is the sum of three bfloat16 tiles, so a product is six. q and k are taken 64 columns at a time: with 4 tiles of 24 KB two
programs share a multiprocessor, for heads of 128, too. For B^T the first columns of k are loaded again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....gpu.hopper_decays import decay_vectors, factors_between, log_decays, sums_of_decays
from ....gpu.hopper_tiles import async_load, meet, unknown, zero_rows_from
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import chunk_of_slot
from .anchored_inverse import inverse
from .inverse import blocks_on_diagonal, inverted_blocks, on_diagonal, store_blocks
from .layouts import GROUPS, ROWS, C
from .parts import as_singles, finished, parts_at, product_from_registers, product_of_parts, send_parts, store_over, store_parts, transposed
from .slots import PARTS


@gluon.jit
def operands_in(memory, zero):
    """The parts of the operands in several memories. ``zero``: 0, see ``tiles_in_three``."""
    found = ()
    for m in gl.static_range(len(memory)):
        found = found + (parts_at(memory[m], unknown(zero), PARTS),)
    return found


@gluon.jit
def wait_and_clean(bar, phase, tile, left):
    """Wait for a tile of ``left`` tokens. Rows after them are zeroed."""
    clean: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    mbarrier.wait(bar, phase)
    if left < C:
        zero_rows_from(tile, left, clean)
        meet()


@gluon.jit
def load_both(q_tiles, k_tiles, q_given, k_given, q_bar, k_bar, row, q_column, k_column):
    """Start the copies of 64 columns of q and k."""
    mbarrier.expect(q_bar, q_tiles.block_type.nbytes)
    mbarrier.expect(k_bar, k_tiles.block_type.nbytes)
    async_load(q_tiles, [row, q_column], q_bar, q_given)
    async_load(k_tiles, [row, k_column], k_bar, k_given)


@gluon.jit
def load_again(k_tiles, q_given, q_bar, row, k_column, exists: gl.constexpr):
    """Start the copy of the first 64 columns of k to the place of q, unless k has no others. All warps have met since they used it."""
    if exists:
        mbarrier.expect(q_bar, k_tiles.block_type.nbytes)
        async_load(k_tiles, [row, k_column], q_bar, q_given)


@gluon.jit
def store_solved_keys(tiles, row, column, T_s, k_s, wide: gl.constexpr):
    """Store the product of T^T and k, both in memory, which takes the place of k."""
    B = finished((product_of_parts(transposed(T_s), k_s, wide),), ())[0]
    meet()  # no product reads the keys
    store_parts(B, k_s)
    fence_async_shared()
    meet()
    send_parts(k_s, tiles, row, column)


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "q_h", "k_h", "g_b", "g_t", "g_h", "b_b", "b_t", "b_h"])
def penstock_gdn_prepare_float32_sm90(
    q_tiles, k_tiles, key_tiles, query_tiles, b_tiles, a_tiles, r_tiles, totals, g, beta, cu_seqlens,
    scale, N, T, H, R, q_h, k_h, g_b, g_t, g_h, b_b, b_t, b_h,
    K: gl.constexpr, DECAYS: gl.constexpr, PACKED: gl.constexpr, REMOVALS: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """k o read, scale q o read, B^T = T^T (k o rest), A = A_q T, read of the last token and, with REMOVALS, A_k T, of every chunk.

    TMA tiles [C,64]: q, k of tokens [B T,H / R K] and the parts of the results of [slots,H,3 C,...]. Reads g and beta [B,T,H] by strides.
    Writes the decay of a chunk K times (``totals``) [slots,H,K]. Program (slot of a chunk, head of v). ``q_h`` and ``k_h`` are K, or 0 if
    all heads share q and k. Rows of tokens that do not exist are 0. PIECE: only chunks of C tokens are processed.
    """
    gl.static_assert(q_tiles.dtype == gl.float32)
    gl.static_assert(gl.num_warps() == GROUPS)
    TILES: gl.constexpr = K // C  # of key channels
    kind: gl.constexpr = key_tiles.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, wide)
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    single: gl.constexpr = q_tiles.layout
    channels: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])

    slot = gl.program_id(0) // H
    h = gl.program_id(0) % H
    b, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    if PIECE > 0:
        if left < C:
            return
    row = (b * T + begin).to(gl.int32)
    head = h.to(gl.int64)
    place = slot.to(gl.int64) * H + h
    at = (place * (PARTS * C)).to(gl.int32)
    q_memory = gl.allocate_shared_memory(kind, [PARTS, C, C], key_tiles.layout)
    k_memory = gl.allocate_shared_memory(kind, [PARTS, C, C], key_tiles.layout)
    N_memory = gl.allocate_shared_memory(kind, [PARTS, C, C], key_tiles.layout)
    T_memory = gl.allocate_shared_memory(kind, [PARTS, C, C], key_tiles.layout)
    n_s = gl.allocate_shared_memory(gl.float32, [ROWS * ROWS, GROUPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    d_s = gl.allocate_shared_memory(gl.float32, [ROWS, GROUPS * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    q_given = as_singles(q_memory, single).index(0)
    k_given = as_singles(k_memory, single).index(0)
    memory = (q_memory, k_memory, N_memory, T_memory)
    vectors = decay_vectors()
    bars = barriers(2, 1)
    q_bar = bars.index(0)
    k_bar = bars.index(1)
    q_column = h // R * q_h
    k_column = h // R * k_h
    i = gl.arange(0, C, by_row)
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    weights = gl.zeros([C, C], gl.float32, wide)
    pairs = weights
    fence_async_shared()
    meet()
    load_both(q_tiles, k_tiles, q_given, k_given, q_bar, k_bar, row, q_column, k_column)
    total = 1.0
    if DECAYS:
        d = log_decays(g + b * g_b + begin * g_t + head * g_h, g_t, left, gl.arange(0, C, line))
        total = sums_of_decays(d, vectors, slot * 0, 1.0, EXACT=True)
        meet()
    channel = gl.arange(0, C, channels)
    for n in range(TILES):
        gl.store(totals + place * K + n * C + channel, gl.full([C], 1.0, gl.float32, channels) * total)
        wait_and_clean(q_bar, n & 1, q_given, left)
        wait_and_clean(k_bar, n & 1, k_given, left)
        keys = k_given.load(wide)
        queries = q_given.load(wide)
        meet()  # parts will be where other threads have loaded
        q_s, k_s, N_s, T_s = operands_in(memory, n * 0)
        store_parts(keys, k_s)
        store_parts(queries, q_s)
        queries = queries * scale
        if DECAYS:
            read = vectors[2].index(slot * 0).load(by_row)[:, None]
            keys = keys * read
            queries = queries * read
        store_parts(keys, N_s)
        store_parts(queries, T_s)
        fence_async_shared()
        meet()
        send_parts(N_s, key_tiles, at, n * C)
        send_parts(T_s, query_tiles, at, n * C)
        q_s, k_s, N_s, T_s = operands_in(memory, n * 0)
        of_q = product_of_parts(q_s, transposed(k_s), wide)
        of_k = product_of_parts(k_s, transposed(k_s), wide)
        of_q, of_k = finished((of_q, of_k), ())
        weights += of_q
        pairs += of_k
        tma.store_wait(0)
        meet()  # the memory of all tiles is free
        if n + 1 < TILES:
            column = (n + 1) * C
            load_both(q_tiles, k_tiles, q_given, k_given, q_bar, k_bar, row, q_column + column, k_column + column)
    weights = weights * scale
    if DECAYS:
        D = factors_between(vectors, slot * 0, 1.0, False, wide, EXACT=True)
        weights = weights * D
        pairs = pairs * D
    weights = gl.where(i[:, None] >= j, weights, 0.0)
    pairs = gl.where(i[:, None] > j, pairs, 0.0)
    if REMOVALS:
        q_given.store(pairs)  # each thread has its own elements: registers would spill
    else:
        load_again(k_tiles, q_given, q_bar, row, k_column, TILES > 1)
    beta += b * b_b + begin * b_t + head * b_h
    rates = gl.load(beta + i.to(gl.int64) * b_t, mask=i < left, other=0.0).to(gl.float32)[:, None]
    removed = pairs * -rates
    q_s, k_s, N_s, T_s = operands_in(memory, left * 0)
    store_parts(removed, N_s)
    store_blocks(blocks_on_diagonal(removed), n_s)
    fence_async_shared()
    meet()
    solved = inverse(on_diagonal(inverted_blocks(n_s, d_s), wide), T_s, N_s)
    q_s, k_s, N_s, T_s = operands_in(memory, left * 0)
    A = product_from_registers(weights, T_s)
    if REMOVALS:
        pairs = product_from_registers(q_given.load(wide), T_s)
    q_s, k_s, N_s, T_s = operands_in(memory, left * 0)
    store_parts(A, N_s)
    if DECAYS:
        solved = solved * vectors[3].index(slot * 0).load(by_row)[:, None]
        meet()  # no product reads T
        store_parts(solved, T_s)
    fence_async_shared()
    meet()
    if REMOVALS:
        load_again(k_tiles, q_given, q_bar, row, k_column, TILES > 1)
    send_parts(N_s, a_tiles, at, 0)
    store_solved_keys(b_tiles, at, (TILES - 1) * C, T_s, k_s, wide)
    q_s, k_s, N_s, T_s = operands_in(memory, left * 0)
    if TILES > 1:
        wait_and_clean(q_bar, 0, q_given, left)
        store_over(q_given.load(wide), q_s)
        fence_async_shared()
        meet()
        store_solved_keys(b_tiles, at, 0, T_s, q_s, wide)
    if REMOVALS:
        tma.store_wait(0)
        meet()  # A is stored
        q_s, k_s, N_s, T_s = operands_in(memory, left * 0)
        store_parts(pairs, N_s)
        fence_async_shared()
        meet()
        send_parts(N_s, r_tiles, at, 0)
    tma.store_wait(0)
    q_memory._keep_alive()  # in use until here
    k_memory._keep_alive()
    N_memory._keep_alive()
    T_memory._keep_alive()
    invalidate((bars,))
