"""What a chunk of RWKV-7 needs besides the state, on Hopper, in Gluon, where a chunk has one anchor: no levels.

With G_t the sums of log2 decays g up to and including token t, total = exp2(G) of the last token, and rest = total exp2(-G),

    Xq = scale q exp2(G)    Xa = a exp2(G - g)    Xb = b exp2(-G)    Xk = k exp2(-G)    Kr = k rest
    Aq_k = Xq Xk^T    Aq = Xq Xb^T   (s <= t)     Aa_k = Xa Xk^T    N = Xa Xb^T   (s < t)
    T = (I - N)^-1    Ap = Aq T    Bt = T^T (b rest)

Xq and Xa are the tiles that meet states. Pairs are products of bfloat16 tiles. T and what it multiplies are in two bfloat16 parts, 16 bits
with the range of float32: keys may be raw, so T has no bound. 16x16 blocks of T are substituted in float32, see ``inverse.py``, then
merged: 16 -> 32 -> 64. Shared memory has 8 tiles of 8 KB; a tile is free for the next result once all warps have multiplied it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, async_store, exp2, meet, zero_rows_from
from ....gpu.ring import barriers
from ....gpu.tiles import chunk_of_slot
from .anchored import in_two, logarithms, store_in_two, tokens_through
from .inverse import inverted_blocks, on_diagonal, store_blocks
from .layouts import GROUPS, ROWS, C
from .pairs import left_operand, right_operand


@gluon.jit
def tiles_of(COUNT: gl.constexpr, kind: gl.constexpr, layout: gl.constexpr):
    """Shared memory of tiles [C,C]. Each is an allocation: between a load from one and a store to it, Triton synchronizes all warps."""
    tiles = ()
    for _ in gl.static_range(COUNT):
        tiles = tiles + (gl.allocate_shared_memory(kind, [C, C], layout),)
    return tiles


@gluon.jit
def load_tiles(descriptors, tiles, bar, row, column):
    """Start the copies of q, a, k and b, and of other tensors of tokens, into as many tiles."""
    mbarrier.expect(bar.index(0), len(descriptors) * descriptors[0].block_type.nbytes)
    for n in gl.static_range(len(descriptors)):
        async_load(descriptors[n], [row, column], bar.index(0), tiles[n])


@gluon.jit
def zero_tiles_from(tiles, left, layout: gl.constexpr):
    """Zero the rows after the first ``left`` of tiles: they are padding or belong to another sequence."""
    if left < C:
        for n in gl.static_range(len(tiles)):
            zero_rows_from(tiles[n], left, layout)
        meet()


@gluon.jit
def sums(d, tiles):
    """G from log2 decays. Uses tiles 4 to 6 until all warps have met again.

    The left operand is in shared memory: in registers, constants were set after the fence of the product that reads them (Triton 3.6).
    """
    wide: gl.constexpr = d.type.layout
    store_in_two(d, tiles[4], tiles[5])
    tiles[6].store(tokens_through(False, wide))
    fence_async_shared()
    meet()
    G = warpgroup_mma(tiles[6], tiles[4], gl.zeros([C, C], gl.float32, wide), use_acc=False, is_async=True)
    G = warpgroup_mma(tiles[6], tiles[5], G, is_async=True)
    return warpgroup_mma_wait(0, [G])


@gluon.jit
def store_factored(G, d, total, scale, tiles, n_s):
    """Xq, Xa, Xk and Xb replace q, a, k and b, Kr goes to tile 4, b rest in two parts to 5 and 6, N's blocks on the diagonal to ``n_s``.

    Stores the chunk's decay in ``total``, pointers [1,C], and loads it again: rest = exp2(-G) total, as the gradients have it.
    """
    kind: gl.constexpr = tiles[0].dtype
    wide: gl.constexpr = G.type.layout
    inner: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, ROWS, 8])
    t = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    through = exp2(G)
    gl.store(total + t * 0, through, mask=t == C - 1)
    Xq = (tiles[0].load(wide).to(gl.float32) * (through * scale)).to(kind)
    Xa = (tiles[1].load(wide).to(gl.float32) * exp2(G - d)).to(kind)
    keys = tiles[2].load(wide)
    writes = tiles[3].load(wide)
    meet()  # q, a, k and b are in registers, tiles 4 to 6 are multiplied, the total is in memory
    total = gl.load(total)
    tiles[0].store(Xq)
    tiles[1].store(Xa)
    inverted = exp2(-G)
    keys = keys.to(gl.float32) * inverted
    tiles[2].store(keys.to(kind))
    tiles[4].store((keys * total).to(kind))
    writes = writes.to(gl.float32) * inverted
    Xb = writes.to(kind)
    tiles[3].store(Xb)
    store_in_two(writes * total, tiles[5], tiles[6])
    N = mma_v2(left_operand(Xa, inner), right_operand(Xb, inner), gl.zeros([GROUPS, ROWS, ROWS], gl.float32, inner))
    store_blocks(N, n_s)
    fence_async_shared()
    meet()


@gluon.jit
def store_pairs(tiles, wide: gl.constexpr):
    """Aq_k and Aa_k replace Xk and Xb, N in two parts goes to tiles 7 and 4. Returns Aq. After it Xq and Xa are no longer read."""
    kind: gl.constexpr = tiles[0].dtype
    zero = gl.zeros([C, C], gl.float32, wide)
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    q_s, a_s, k_s, b_s = tiles[0], tiles[1], tiles[2].permute((1, 0)), tiles[3].permute((1, 0))
    late_q = warpgroup_mma(q_s, k_s, zero, use_acc=False, is_async=True)
    late_a = warpgroup_mma(a_s, k_s, zero, use_acc=False, is_async=True)
    late_q, late_a = warpgroup_mma_wait(0, [late_q, late_a])
    late_q = gl.where(i >= j, late_q, 0.0).to(kind)
    late_a = gl.where(i > j, late_a, 0.0).to(kind)
    Aq = warpgroup_mma(q_s, b_s, zero, use_acc=False, is_async=True)
    N = warpgroup_mma(a_s, b_s, zero, use_acc=False, is_async=True)
    Aq, N = warpgroup_mma_wait(0, [Aq, N])
    tma.store_wait(0)  # Xq, Xa and Kr are read
    meet()
    tiles[2].store(late_q)
    tiles[3].store(late_a)
    store_in_two(gl.where(i > j, N, 0.0), tiles[7], tiles[4])
    return gl.where(i >= j, Aq, 0.0)


@gluon.jit
def product_in_two(x, high_s, low_s):
    """The product of a tile in registers with one in two parts."""
    wide: gl.constexpr = x.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    zero = gl.zeros([C, C], gl.float32, wide)
    high, low = in_two(x, high_s.dtype)
    high = gl.convert_layout(high, left, assert_trivial=True)
    y = warpgroup_mma(gl.convert_layout(low, left, assert_trivial=True), high_s, zero, use_acc=False)
    y = warpgroup_mma(high, low_s, y)
    return warpgroup_mma(high, high_s, y)


@gluon.jit
def product_of_parts(left, right, wide: gl.constexpr):
    """The product, in progress, of two tiles in two parts each."""
    zero = gl.zeros([C, C], gl.float32, wide)
    y = warpgroup_mma(left[1], right[0], zero, use_acc=False, is_async=True)
    y = warpgroup_mma(left[0], right[1], y, is_async=True)
    return warpgroup_mma(left[0], right[0], y, is_async=True)


@gluon.jit
def store_T(T, T_s):
    """Store T in two parts for products of all warps."""
    store_in_two(T, T_s[0], T_s[1])
    fence_async_shared()
    meet()


@gluon.jit
def merged(T, T_s, N_s, between):
    """T + (T N) T, where the product T N is taken in the blocks ``between`` those of T. Stores it."""
    wide: gl.constexpr = T.type.layout
    x = warpgroup_mma_wait(0, [product_of_parts(T_s, N_s, wide)])
    y = product_in_two(gl.where(between, x, 0.0), T_s[0], T_s[1])
    T = gl.where(between, y, T)
    meet()
    store_T(T, T_s)
    return T


@gluon.jit
def inverse(T, T_s, N_s):
    """T from its blocks on the diagonal, also in memory in two parts."""
    wide: gl.constexpr = T.type.layout
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None] // ROWS
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :] // ROWS
    store_T(T, T_s)
    T = merged(T, T_s, N_s, (i == j + 1) & (i % 2 == 1))
    return merged(T, T_s, N_s, (i >= 2) & (j < 2))


@gluon.jit(do_not_specialize=["N", "T", "H"])
def penstock_rwkv7_prepare_sm90(
    q_tiles, a_tiles, k_tiles, b_tiles, late_tiles, ap_tiles, bt_tiles, qr_tiles, ar_tiles, kr_tiles, g, solved, total, cu_seqlens, scale,
    N, T, H, g_b, g_t, g_h, g_k, K: gl.constexpr, PACKED: gl.constexpr, SOLVED: gl.constexpr,
):  # fmt: skip
    """Ap = Aq T and Bt = T^T (b rest) with T = (I - N)^-1, of every chunk.

    TMA tiles: q, k, a, b [C,K] of [B T,H K]; Ap, Bt, Xq, Xa and Kr of [slots,H,C,C] and [slots,H,C,K], Aq_k and Aa_k (``late``) of
    [slots,H,2 C,C]. Reads g [B,T,H,K] by strides. Writes also exp2 of the chunk's sum of g (``total``) [slots,H,K] and, with SOLVED, T - I
    (``solved``) [slots,H,C,C]. Program (slot of a chunk, head). Rows of tokens that do not exist are 0.
    """
    gl.static_assert(q_tiles.dtype == gl.bfloat16)
    gl.static_assert(K == C)
    gl.static_assert(gl.num_warps() == GROUPS)
    kind: gl.constexpr = q_tiles.dtype
    half: gl.constexpr = q_tiles.layout
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot = gl.program_id(0) // H
    h = gl.program_id(0) % H
    batch, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    row = (batch * T + begin).to(gl.int32)
    place = slot.to(gl.int64) * H + h
    tiles = tiles_of(8, kind, half)
    n_s = gl.allocate_shared_memory(gl.float32, [ROWS * ROWS, GROUPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    d_s = gl.allocate_shared_memory(gl.float32, [ROWS, GROUPS * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    bar = barriers(1, 1)
    fence_async_shared()
    meet()
    load_tiles((q_tiles, a_tiles, k_tiles, b_tiles), tiles, bar, row, h * K)
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    g += batch * g_b + begin * g_t + h.to(gl.int64) * g_h + (i * g_t + j * g_k)
    d = logarithms(g, (i < left) & (j < K))
    G = sums(d, tiles)
    mbarrier.wait(bar.index(0), 0)
    zero_tiles_from((tiles[0], tiles[1], tiles[2], tiles[3]), left, clean)
    store_factored(G, d, total + place * K + j, scale, tiles, n_s)
    at = (place * C).to(gl.int32)
    async_store(qr_tiles, [at, 0], tiles[0])
    async_store(ar_tiles, [at, 0], tiles[1])
    async_store(kr_tiles, [at, 0], tiles[4])

    Aq = store_pairs(tiles, wide)
    fence_async_shared()
    meet()
    async_store(late_tiles, [2 * at, 0], tiles[2])
    async_store(late_tiles, [2 * at + C, 0], tiles[3])
    T_s = (tiles[0], tiles[1])
    solution = inverse(on_diagonal(inverted_blocks(n_s, d_s), wide), T_s, (tiles[7], tiles[4]))
    if SOLVED:
        gl.store(solved + place * (C * C) + (i * C + j), gl.where(i == j, 0.0, solution))
    B = product_of_parts((T_s[0].permute((1, 0)), T_s[1].permute((1, 0))), (tiles[5], tiles[6]), wide)
    A = product_in_two(Aq, T_s[0], T_s[1])
    B = warpgroup_mma_wait(0, [B])
    tiles[7].store(A.to(kind))
    tiles[4].store(B.to(kind))
    fence_async_shared()
    meet()
    async_store(ap_tiles, [at, 0], tiles[7])
    async_store(bt_tiles, [at, 0], tiles[4])
    tma.store_wait(0)
