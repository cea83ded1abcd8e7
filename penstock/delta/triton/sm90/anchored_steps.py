"""RWKV-7's chunks as steps of a linear recurrence of states, on Hopper, in Gluon, where a chunk has one anchor: no levels.

With G_t the sums of log2 decays g up to and including token t, total = exp2(G) of the last token, rest = total exp2(-G), and V the values,

    Xq = scale q exp2(G)    Xa = a exp2(G - g)    Xb = b exp2(-G)    Xk = k exp2(-G)    Kr = k rest
    Aq_k = Xq Xk^T    Aq = Xq Xb^T   (s <= t)     Aa_k = Xa Xk^T    N = Xa Xb^T   (s < t)
    T = (I - N)^-1    Ap = Aq T    Bt = T^T (b rest)    X = Aa_k V

X is what the tokens write into a state of zeros, and between chunks, see ``anchored_chain.py``,

    O = Q S + Y       Q = Xq + Ap Xa        Y = Ap X + Aq_k V
    S' = total o S + M S + W        M = Bt^T Xa        W = Bt^T X + Kr^T V

Decays stay in float32: M has what the tokens remove, which is rounded as the tiles are of which it is the product. W is in two bfloat16
parts, since it is added to the state. Pairs are products of bfloat16 tiles. Shared memory has 13 tiles of 8 KB; a tile is free for the next
result once all warps have multiplied it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import async_load, async_store, exp2, meet, store_in_two, zero_rows_from
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import chunk_of_slot
from .anchored import logarithms, tokens_through
from .anchored_inverse import inverse
from .inverse import inverted_blocks, on_diagonal, store_blocks
from .layouts import GROUPS, ROWS, C
from .pairs import left_operand, right_operand
from .parts import product_from_registers, product_of_parts, transposed


@gluon.jit
def tiles_of(COUNT: gl.constexpr, kind: gl.constexpr, layout: gl.constexpr):
    """Shared memory of tiles [C,C]. Each is an allocation: between a load from one and a store to it, Triton synchronizes all warps."""
    tiles = ()
    for _ in gl.static_range(COUNT):
        tiles = tiles + (gl.allocate_shared_memory(kind, [C, C], layout),)
    return tiles


@gluon.jit
def load_tiles(descriptors, tiles, bar, row, column):
    """Start the copies of tiles of as many tensors, with one barrier."""
    mbarrier.expect(bar, len(descriptors) * descriptors[0].block_type.nbytes)
    for n in gl.static_range(len(descriptors)):
        async_load(descriptors[n], [row, column], bar, tiles[n])


@gluon.jit
def zero_tiles_from(tiles, left, layout: gl.constexpr):
    """Zero the rows after the first ``left`` of tiles: they are padding or belong to another sequence."""
    if left < C:
        for n in gl.static_range(len(tiles)):
            zero_rows_from(tiles[n], left, layout)
        meet()


@gluon.jit
def sums(d, high_s, low_s, chosen_s):
    """G from log2 decays. Uses three tiles until all warps have met again.

    The left operand is in shared memory: in registers, constants were set after the fence of the product that reads them (Triton 3.6).
    """
    wide: gl.constexpr = d.type.layout
    store_in_two(d, high_s, low_s)
    chosen_s.store(tokens_through(False, wide))
    fence_async_shared()
    meet()
    G = warpgroup_mma(chosen_s, high_s, gl.zeros([C, C], gl.float32, wide), use_acc=False, is_async=True)
    G = warpgroup_mma(chosen_s, low_s, G, is_async=True)
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
    """Aq_k and Aa_k replace Xk and Xb, N in two parts goes to tiles 7 and 4. Returns Aq."""
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
    meet()  # no warp multiplies Xk and Xb any more
    tiles[2].store(late_q)
    tiles[3].store(late_a)
    store_in_two(gl.where(i > j, N, 0.0), tiles[7], tiles[4])
    return gl.where(i >= j, Aq, 0.0)


@gluon.jit(do_not_specialize=["N", "T", "H"])
def penstock_rwkv7_steps_sm90(
    q_tiles, a_tiles, k_tiles, b_tiles, v_tiles, step_tiles, read_tiles, write_tiles, more_tiles, g, total, cu_seqlens, scale, N, T, H,
    g_b, g_t, g_h, g_k, K: gl.constexpr, PACKED: gl.constexpr, SOLVED: gl.constexpr, RAW: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """Q = Xq + Ap Xa, Y = Ap X + Aq_k V, M = Bt^T Xa, W = Bt^T X + Kr^T V with X = Aa_k V, of every chunk.

    TMA tiles: q, k, a, b, v [C,K] of [B T,H K]: V is K; M and Q [C,K] of [slots,H,C,K], both parts of W of [slots,H,2 C,K]; Y of
    [slots,H,C,K] or, with SOLVED, both parts of T - I of [slots,H,2 C,C]. Reads g [B,T,H,K] by strides, with RAW raw gates. Writes also
    exp2 of the chunk's sum of g (``total``) [slots,H,K]. Program (slot of a chunk, head). Rows of tokens that do not exist are 0.
    PIECE: only chunks of C tokens are processed.
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
    if PIECE > 0:
        if left < C:
            return
    row = (batch * T + begin).to(gl.int32)
    place = slot.to(gl.int64) * H + h
    tiles = tiles_of(8, kind, half)
    v_s, x_s, low_s, high_T, low_T = tiles_of(5, kind, half)
    n_s = gl.allocate_shared_memory(gl.float32, [ROWS * ROWS, GROUPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    d_s = gl.allocate_shared_memory(gl.float32, [ROWS, GROUPS * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    bar = barriers(1, 1)
    fence_async_shared()
    meet()
    of_tokens = (tiles[0], tiles[1], tiles[2], tiles[3], v_s)
    load_tiles((q_tiles, a_tiles, k_tiles, b_tiles, v_tiles), of_tokens, bar.index(0), row, h * K)
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    g += batch * g_b + begin * g_t + h.to(gl.int64) * g_h + (i * g_t + j * g_k)
    d = logarithms(g, (i < left) & (j < K), RAW)
    G = sums(d, tiles[4], tiles[5], tiles[6])
    mbarrier.wait(bar.index(0), 0)
    zero_tiles_from(of_tokens, left, clean)
    store_factored(G, d, total + place * K + j, scale, tiles, n_s)
    q_s, a_s, late_q, late_a, k_s, b_high, b_low, n_high = tiles
    # Xq, Xa and Kr stay where they are: N and T have tiles of their own
    Aq = store_pairs((q_s, a_s, late_q, late_a, low_s, b_high, b_low, n_high), wide)
    fence_async_shared()
    meet()
    zero = gl.zeros([C, C], gl.float32, wide)
    X = warpgroup_mma(late_a, v_s, zero, use_acc=False, is_async=True)
    blocks = inverted_blocks(n_s, d_s)
    X = warpgroup_mma_wait(0, [X])
    x_s.store(X.to(kind))
    T_s = (high_T, low_T)
    solution = inverse(on_diagonal(blocks, wide), T_s, (n_high, low_s))
    B = product_of_parts(transposed(T_s), (b_high, b_low), wide)
    A = product_from_registers(Aq, T_s)
    B = warpgroup_mma_wait(0, [B])
    n_high.store(A.to(kind))
    low_s.store(B.to(kind))
    fence_async_shared()
    meet()
    ap, bt = n_high, low_s.permute((1, 0))
    Q = warpgroup_mma(ap, a_s, zero, use_acc=False, is_async=True)
    M = warpgroup_mma(bt, a_s, zero, use_acc=False, is_async=True)
    Q, M = warpgroup_mma_wait(0, [Q, M])
    W = warpgroup_mma(k_s.permute((1, 0)), v_s, zero, use_acc=False, is_async=True)
    W = warpgroup_mma(bt, x_s, W, is_async=True)
    Y = zero
    if not SOLVED:
        Y = warpgroup_mma(late_q, v_s, zero, use_acc=False, is_async=True)
        Y = warpgroup_mma(ap, x_s, Y, is_async=True)
    # no product of another warp reads these tiles any more
    b_high.store((Q + q_s.load(wide).to(gl.float32)).to(kind))
    b_low.store(M.to(kind))
    Y, W = warpgroup_mma_wait(0, [Y, W])
    store_in_two(W, high_T, low_T)
    if SOLVED:
        store_in_two(gl.where(i == j, 0.0, solution), late_q, late_a)
    else:
        late_a.store(Y.to(kind))
    fence_async_shared()
    meet()
    at = (place * C).to(gl.int32)
    async_store(read_tiles, [at, 0], b_high)
    async_store(step_tiles, [at, 0], b_low)
    async_store(write_tiles, [2 * at, 0], high_T)
    async_store(write_tiles, [2 * at + C, 0], low_T)
    if SOLVED:
        async_store(more_tiles, [2 * at, 0], late_q)
        async_store(more_tiles, [2 * at + C, 0], late_a)
    else:
        async_store(more_tiles, [at, 0], late_a)
    tma.store_wait(0)
    invalidate((bar,))
