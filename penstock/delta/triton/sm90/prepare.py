"""What a chunk of KDA needs besides the state, on Hopper, in Gluon: any decay at the same speed.

With w the decay of a token, and the scale folded into q, a chunk of 64 tokens has

    A_q[t,s] = sum over channels of q_t k_s w_{s+1} ... w_t (s <= t)             A_k likewise with k_t (s < t)
    T   = (I + diag(beta) A_k)^-1                                                A  = A_q T
    B^T = T^T (k o w_{s+1} ... w_64)                                             q, k o w_1 ... w_t           total = w_1 ... w_64

A_q and A_k are sums over dyadic levels: see ``recurrence/triton/sm90/channel_forward.py``. All factors are at most 1.
B^T is the product of T in two parts of bfloat16 and of k o w_{s+1} ... w_64 in bfloat16: in float16 strong decays at the end of a chunk
would be 0.

float16: T is refined to 16 bits, for keys that are alike and beta up to 2. All operands of A and B^T are in two parts of bfloat16. So is A
in memory, because it multiplies values, which have no bound, and no token may change the power of two of an earlier one. All other tiles
are float16, each row times a power of two: that of q and k at token t is the inverse of the largest w_1 ... w_t, which is rounded up.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from ....gpu.hopper_tiles import async_load, async_store, exp2, in_two, meet, plus, reinterpret, store_in_two, zero_rows_from
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import LOG2E, chunk_of_slot, powers_of_two
from .inverse import inverted_blocks, merge_twice, on_diagonal, store_blocks
from .layouts import GROUPS, ROWS, C, by_group, by_token, of_partner, spread
from .pairs import added, exchanged


@gluon.jit
def store_group_sums(g, part, W: gl.constexpr):
    """Store the sums of a tile of decays [C,W] over the tokens of each group, log2, in ``part`` [GROUPS,W]."""
    layout: gl.constexpr = gl.BlockedLayout([16, W // 32], [1, 32], [4, 1], [1, 0])
    across: gl.constexpr = gl.BlockedLayout([1, W // 32], [1, 32], [4, 1], [1, 0])
    x = gl.sum(gl.reshape(g.load(layout).to(gl.float32), [GROUPS, ROWS, W]), 1) * LOG2E
    part.store(gl.convert_layout(x, across, assert_trivial=True))


@gluon.jit
def sums_up_to_tokens(g, part, W: gl.constexpr):
    """The log2 decays [GROUPS,ROWS,W] from the first token of a chunk to each token, from those of a tile [C,W] and the sums of groups."""
    flat: gl.constexpr = gl.BlockedLayout([16, W // 32], [1, 32], [4, 1], [1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1, 16, W // 32], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    across: gl.constexpr = gl.SliceLayout(1, layout)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, across))[:, None]
    x = gl.convert_layout(gl.reshape(g.load(flat).to(gl.float32), [GROUPS, ROWS, W]), layout, assert_trivial=True)
    before = gl.zeros([GROUPS, W], gl.float32, across)
    for n in gl.static_range(GROUPS - 1):
        before += gl.where(group > n, part.slice(n, 1).load(across), 0.0)
    return gl.associative_scan(x, 1, plus) * LOG2E + gl.expand_dims(before, 1)


@gluon.jit
def store_powers(sums, powers_s, powers):
    """From log2 decays ``sums``: for each token the inverse of their largest, as a power of two, and that largest in memory: [C]."""
    most = gl.minimum(gl.maximum(gl.max(sums, 2), -120.0), 120.0).to(gl.int32)
    layout: gl.constexpr = most.type.layout
    token = gl.arange(0, GROUPS, gl.SliceLayout(1, layout))[:, None] * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
    powers_s.store((127 - most << 23).to(gl.float32, bitcast=True))
    gl.store(powers + token, (127 + most << 23).to(gl.float32, bitcast=True))


@gluon.jit
def memory_of_factors(W: gl.constexpr):
    """Memory [GROUPS,W] for factors of groups: decays before, for q with scale, and for k; after; of level 32, for rows and for columns.

    Each has its own: between stores to one allocation, Triton synchronizes all warps.
    """
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    a = gl.allocate_shared_memory(gl.float32, [GROUPS, W], plain2)
    b = gl.allocate_shared_memory(gl.float32, [GROUPS, W], plain2)
    c = gl.allocate_shared_memory(gl.float32, [GROUPS, W], plain2)
    d = gl.allocate_shared_memory(gl.float32, [GROUPS, W], plain2)
    e = gl.allocate_shared_memory(gl.float32, [GROUPS, W], plain2)
    return a, b, c, d, e


@gluon.jit
def store_factors(part, factors_s, totals, scale, W: gl.constexpr):
    """From log2 decays of groups ``part`` [GROUPS,W]: the factors of each group in memory, and the decays of the chunk at ``totals``."""
    across: gl.constexpr = gl.BlockedLayout([1, W // 32], [1, 32], [4, 1], [1, 0])
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, across))[:, None]
    channel = gl.arange(0, W, gl.SliceLayout(0, across))[None, :]
    zero = gl.zeros([GROUPS, W], gl.float32, across)
    one_0 = part.slice(0, 1).load(across) + zero
    one_1 = part.slice(1, 1).load(across) + zero
    one_2 = part.slice(2, 1).load(across) + zero
    one_3 = part.slice(3, 1).load(across) + zero
    before = gl.where(group > 0, one_0, 0.0) + gl.where(group > 1, one_1, 0.0) + gl.where(group > 2, one_2, 0.0)
    after = gl.where(group < 3, one_3, 0.0) + gl.where(group < 2, one_2, 0.0) + gl.where(group < 1, one_1, 0.0)
    decay = exp2(before)
    factors_s[0].store(decay * scale)
    factors_s[1].store(decay)
    factors_s[2].store(exp2(after))
    factors_s[3].store(exp2(gl.where(group == 3, one_2, 0.0)))
    factors_s[4].store(exp2(gl.where(group == 0, one_1, 0.0)))
    gl.store(totals + channel + zero.to(gl.int32), exp2(one_0 + one_1 + one_2 + one_3), mask=group == 0)


@gluon.jit
def near(x, columns, acc, paired: gl.constexpr):
    """acc plus the products of the rows x [C,W] of odd groups with the rows of the groups before them in ``columns``: [2,32,ROWS].

    ``columns`` [2,32,W]. The rows of even groups have no meaning.
    """
    W: gl.constexpr = x.shape[1]
    y = columns.slice(0, ROWS, 1).permute((0, 2, 1)).load(gl.DotOperandLayout(1, paired, 2))
    x = gl.reshape(x, [2, 2 * ROWS, W])
    return mma_v2(gl.convert_layout(x, gl.DotOperandLayout(0, paired, 2), assert_trivial=True), y, acc)


@gluon.jit
def far(x, columns, first: gl.constexpr, count: gl.constexpr, acc, mma: gl.constexpr):
    """acc plus the products of the rows x [C,W] with ``count`` rows of the tile ``columns`` [C,W] from ``first`` on: [C,count]."""
    y = columns.slice(first, count).permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2))
    return mma_v2(gl.convert_layout(x, gl.DotOperandLayout(0, mma, 2), assert_trivial=True), y, acc)


@gluon.jit
def assembled(blocks, narrow: gl.constexpr, mma: gl.constexpr):
    """A [C,C] from blocks on the diagonal, of level 16 and of level 32 (columns of groups 0 and 1)."""
    D, beside, far_01 = blocks
    D = gl.convert_layout(gl.reshape(D, [C, ROWS]), narrow, assert_trivial=True)
    beside = gl.convert_layout(gl.reshape(beside, [C, ROWS]), narrow, assert_trivial=True)
    far_0, far_1 = gl.split(gl.permute(gl.reshape(far_01, [C, 2, ROWS]), (0, 2, 1)))
    far_0 = gl.convert_layout(far_0, narrow, assert_trivial=True)
    far_1 = gl.convert_layout(far_1, narrow, assert_trivial=True)
    group = gl.arange(0, C, gl.SliceLayout(1, narrow))[:, None] // ROWS
    A_0 = gl.where(group == 0, D, gl.where(group == 1, beside, far_0))
    A_1 = gl.where(group == 1, D, gl.where(group > 1, far_1, 0.0))
    A_2 = gl.where(group == 2, D, gl.where(group > 2, beside, 0.0))
    A_3 = gl.where(group == 3, D, 0.0)
    A = gl.join(gl.join(A_0, A_2), gl.join(A_1, A_3))  # [C,ROWS, bit 1 of the group, bit 0]
    return gl.convert_layout(gl.reshape(gl.permute(A, (0, 2, 3, 1)), [C, C]), mma, assert_trivial=True)


@gluon.jit
def no_pairs():
    """Zeros for the blocks of a pair matrix: on the diagonal, of level 16 and of level 32."""
    inner: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    paired: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2, 1], [1, 16, 8])
    D = gl.zeros([GROUPS, ROWS, ROWS], gl.float32, inner)
    return D, gl.zeros([2, 2 * ROWS, ROWS], gl.float32, paired), gl.zeros([C, 2 * ROWS], gl.float32, narrow)


@gluon.jit
def near_pairs_and_tiles(q, k, g, rest, rest_low, powers_s, near_s, far_s, factors_s, D_q, D_k, W: gl.constexpr):
    """Add the products of W channels within groups to the blocks on the diagonal of A_q and A_k, without scale and beta.

    q, k [C,W] in shared memory are replaced by q, k o w_1 ... w_t; ``rest`` gets k o w_{s+1} ... w_64; ``near_s`` and ``far_s`` get the
    columns of levels 16 and 32. Returns also q, k o the decays of a group up to each token, float32. float16: rows of q and k are
    multiplied by ``powers_s`` [GROUPS,ROWS], and ``rest_low`` gets the second part of ``rest``.

    At each level a token has two factors: ``decay`` is that of its half, from the middle or to the middle; ``other`` is the other one.
    """
    kind: gl.constexpr = q.dtype
    layout: gl.constexpr = by_token(W)
    grouped: gl.constexpr = by_group(W)
    inner: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, inner)))[None, :, None]
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, inner)))[None, None, :]
    i = gl.arange(0, C, gl.SliceLayout(1, layout))
    Q = q.load(layout)
    Kt = k.load(layout)
    total = exp2(g.load(layout).to(gl.float32) * LOG2E)
    second = (i & 1)[:, None] == 1
    decay = gl.where(second, total, 1.0)
    other = gl.where(second, 1.0, total)
    D_q = added(D_q, Q, Kt, a == b, inner)
    Q = Q.to(gl.float32)
    Kt = Kt.to(gl.float32)
    for n in gl.static_range(4):
        X_q = (Q * decay).to(kind)
        X_k = (Kt * decay).to(kind)
        split = ((a ^ b) >> n == 1) & (a > b)
        D_q = added(D_q, X_q, X_k, split, inner)
        D_k = added(D_k, X_k, X_k, split, inner)
        across = of_partner(total, n, layout)
        decay *= across
        if n < 3:
            total *= across
            decay, other = exchanged(decay, other, ((i >> n ^ i >> n + 1) & 1)[:, None] == 1)
        else:
            decay, other = exchanged(decay, other, ((i >> n) & 1)[:, None] == 0)  # up to each token, and after it
    Q *= decay
    remaining = Kt * other
    Kt *= decay
    near_s.store(gl.reshape(remaining.to(kind), [2, 2 * ROWS, W]))
    far_s.store((remaining * spread(factors_s[4], W, layout, grouped)).to(kind))
    if kind == gl.float16:
        store_in_two(remaining * spread(factors_s[2], W, layout, grouped), rest, rest_low)
        power = reinterpret(powers_s, gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0])).load(gl.SliceLayout(1, layout))[:, None]
        before = spread(factors_s[1], W, layout, grouped)
        q.store((Q * before * power).to(kind))
        k.store((Kt * before * power).to(kind))
    else:
        rest.store((remaining * spread(factors_s[2], W, layout, grouped)).to(kind))
        q.store((Q * spread(factors_s[0], W, layout, grouped)).to(kind))
        k.store((Kt * spread(factors_s[1], W, layout, grouped)).to(kind))
    return D_q, D_k, Q, Kt


@gluon.jit
def far_pairs(Q, Kt, near_s, far_s, rows_s, near_q, near_k, far_q, far_k, kind: gl.constexpr, W: gl.constexpr):
    """Add the products of W channels between groups: those of level 16 and of level 32. ``rows_s``: factors of rows of level 32."""
    narrow: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    paired: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2, 1], [1, 16, 8])
    near_q = near(Q.to(kind), near_s, near_q, paired)
    near_k = near(Kt.to(kind), near_s, near_k, paired)
    rows = spread(rows_s, W, by_token(W), by_group(W))
    far_q = far((Q * rows).to(kind), far_s, 0, 2 * ROWS, far_q, narrow)
    far_k = far((Kt * rows).to(kind), far_s, 0, 2 * ROWS, far_k, narrow)
    return near_q, near_k, far_q, far_k


@gluon.jit
def store_refined(N, t_s, n_s, high_s, low_s, mma: gl.constexpr):
    """Replace T in float16 by T + T (I - (I - N) T) in two parts of bfloat16: 16 bits. N [C,C]: float32, in two parts of float16.

    ``n_s``: memory of a float16 matrix, ``high_s``: that of T.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    i = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, mma))[None, :]
    high = N.to(gl.float16)
    low = (N - high.to(gl.float32)).to(gl.float16)
    R = warpgroup_mma(gl.convert_layout(high, left, assert_trivial=True), t_s, gl.zeros([C, C], gl.float32, mma), use_acc=False)
    R = warpgroup_mma(gl.convert_layout(low, left, assert_trivial=True), t_s, R)
    T = t_s.load(mma)
    n_s.store(gl.where(i > j, R - T.to(gl.float32), 0.0).to(gl.float16))
    fence_async_shared()
    meet()
    R = warpgroup_mma(gl.convert_layout(T, left, assert_trivial=True), n_s, T.to(gl.float32))
    store_in_two(R, high_s, low_s)
    fence_async_shared()
    meet()


@gluon.jit
def product_in_two(x, high_s, low_s, mma: gl.constexpr):
    """The product of x [C,C] and a matrix, both in two parts of bfloat16."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    high, low = in_two(x, gl.bfloat16)
    high = gl.convert_layout(high, left, assert_trivial=True)
    y = warpgroup_mma(high, high_s, gl.zeros([C, C], gl.float32, mma), use_acc=False)
    y = warpgroup_mma(gl.convert_layout(low, left, assert_trivial=True), high_s, y)
    return warpgroup_mma(high, low_s, y)


@gluon.jit
def store_solved_keys(high_s, low_s, rest_s, rest_low_s, bt_tiles, powers):
    """Replace k o w_{s+1} ... w_64, two parts [PARTS,C,W], by B^T in float16. Its rows are multiplied by powers of two.

    The inverses of the powers are stored at ``powers`` [C]. ``high_s`` and ``low_s``: the parts of T.
    """
    PARTS: gl.constexpr = rest_s.shape[0]
    W: gl.constexpr = rest_s.shape[2]
    parted: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    most = gl.zeros([C], gl.float32, gl.SliceLayout(1, parted))
    B = ()
    for p in gl.static_range(PARTS):
        x = warpgroup_mma(high_s.permute((1, 0)), rest_s.index(p), gl.zeros([C, W], gl.float32, parted), use_acc=False)
        x = warpgroup_mma(high_s.permute((1, 0)), rest_low_s.index(p), x)
        x = warpgroup_mma(low_s.permute((1, 0)), rest_s.index(p), x)
        most = gl.maximum(most, gl.max(gl.abs(x), 1))
        B = B + (x,)
    down, up = powers_of_two(most, 20)
    gl.store(powers + gl.arange(0, C, gl.SliceLayout(1, parted)), up)
    meet()
    for p in gl.static_range(PARTS):
        reinterpret(rest_s.index(p), gl.float16, [C, W], bt_tiles.layout).store((B[p] * down[:, None]).to(gl.float16))


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "b_b", "b_t", "b_h"])
def penstock_kda_prepare_sm90(
    q_tiles, k_tiles, g_tiles, qt_tiles, kt_tiles, bt_tiles, a_tiles, r_tiles, beta, totals, powers, cu_seqlens, scale, N, T, H, R,
    b_b, b_t, b_h,
    K: gl.constexpr, PACKED: gl.constexpr, W: gl.constexpr, REMOVALS: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """T = (I + diag(beta) A_k)^-1, A = A_q T, B^T = T^T (k o w_{s+1} ... w_64), q and k o w_1 ... w_t, total = w_1 ... w_64.

    Reads q, k [B,T,H / R,K] and g [B,T,H,K] as TMA tiles [C,W] and beta [B,T,H] by strides. Writes q, k, B^T [slots,H,C,K] and A
    [slots,H,C,C] in the dtype of q, total [slots,H,K] in float32 and, with REMOVALS, A_k T [slots,H,C,C] in float16. Program (slot of a
    chunk, head): all of it. PIECE: only chunks of C tokens are processed.

    float16: A is two matrices in bfloat16 [slots,H,2 C,C]. ``powers`` [slots,H,2,C] gets what rows of q and k, and of B^T, lack.
    """
    gl.static_assert(q_tiles.dtype == gl.bfloat16 or q_tiles.dtype == gl.float16)
    F16: gl.constexpr = q_tiles.dtype == gl.float16
    PARTS: gl.constexpr = K // W
    kind: gl.constexpr = q_tiles.dtype
    inner: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    parted: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    slot = gl.program_id(0) // H
    h = gl.program_id(0) % H
    b, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    if PIECE > 0:
        if left < C:
            return
    line = b * T + begin
    row = line.to(gl.int32)
    q_s = gl.allocate_shared_memory(kind, [PARTS, C, W], q_tiles.layout)
    k_s = gl.allocate_shared_memory(kind, [PARTS, C, W], k_tiles.layout)
    g_s = gl.allocate_shared_memory(g_tiles.dtype, [PARTS, C, W], g_tiles.layout)
    rest_s = gl.allocate_shared_memory(gl.bfloat16, [PARTS, C, W], q_tiles.layout)
    near_s = gl.allocate_shared_memory(kind, [2, 2 * ROWS, W], gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0]))
    far_s = gl.allocate_shared_memory(kind, [C, W], q_tiles.layout)
    if F16:
        rest_low_s = gl.allocate_shared_memory(gl.bfloat16, [PARTS, C, W], q_tiles.layout)
        powers_s = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], plain2)
    else:
        rest_low_s = rest_s
        powers_s = rest_s
    part_s = gl.allocate_shared_memory(gl.float32, [PARTS if F16 else 1, GROUPS, W], plain2)
    factors_s = memory_of_factors(W)
    loaded = barriers(PARTS, 1)
    fence_async_shared()
    meet()
    for p in gl.static_range(PARTS):
        mbarrier.expect(loaded.index(p), q_tiles.block_type.nbytes + k_tiles.block_type.nbytes + g_tiles.block_type.nbytes)
        async_load(g_tiles, [row, h * K + p * W], loaded.index(p), g_s.index(p))
        async_load(q_tiles, [row, h // R * K + p * W], loaded.index(p), q_s.index(p))
        async_load(k_tiles, [row, h // R * K + p * W], loaded.index(p), k_s.index(p))
    i = gl.arange(0, C, gl.SliceLayout(1, mma))
    at = beta + b * b_b + begin * b_t + h.to(gl.int64) * b_h
    rates = gl.load(at + i.to(gl.int64) * b_t, mask=i < left, other=0.0).to(gl.float32)
    place = slot.to(gl.int64) * H + h
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    for p in gl.static_range(PARTS):
        mbarrier.wait(loaded.index(p), 0)
        if left < C:
            zero_rows_from(q_s.index(p), left, clean)
            zero_rows_from(k_s.index(p), left, clean)
            zero_rows_from(g_s.index(p), left, clean)
    if F16:
        powers += place * (2 * C)
        for p in gl.static_range(PARTS):
            store_group_sums(g_s.index(p), part_s.index(p), W)
        meet()
        sums = sums_up_to_tokens(g_s.index(0), part_s.index(0), W)
        for p in gl.static_range(1, PARTS):
            sums = gl.maximum(sums, sums_up_to_tokens(g_s.index(p), part_s.index(p), W))
        store_powers(sums, powers_s, powers)
    D_q, near_q, far_q = no_pairs()
    D_k, near_k, far_k = no_pairs()
    for p in range(PARTS):
        if F16:
            store_factors(part_s.index(p), factors_s, totals + place * K + p * W, 1.0, W)
        else:
            store_group_sums(g_s.index(p), part_s.index(0), W)
            meet()
            store_factors(part_s.index(0), factors_s, totals + place * K + p * W, scale, W)
        meet()
        D_q, D_k, Q, Kt = near_pairs_and_tiles(
            q_s.index(p), k_s.index(p), g_s.index(p), rest_s.index(p), rest_low_s.index(p) if F16 else rest_s.index(p), powers_s,
            near_s, far_s, factors_s, D_q, D_k, W,
        )  # fmt: skip
        meet()
        near_q, near_k, far_q, far_k = far_pairs(Q, Kt, near_s, far_s, factors_s[3], near_q, near_k, far_q, far_k, kind, W)
    of_q = (D_q, near_q, far_q)
    of_k = (D_k, near_k, far_k)
    fence_async_shared()
    meet()
    to = (place * C).to(gl.int32)
    for p in gl.static_range(PARTS):
        async_store(qt_tiles, [to, p * W], q_s.index(p))
        async_store(kt_tiles, [to, p * W], k_s.index(p))

    n_s = gl.allocate_shared_memory(gl.float32, [ROWS * ROWS, GROUPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    d_s = gl.allocate_shared_memory(gl.float16, [ROWS, GROUPS * ROWS], plain2)
    t_s = gl.allocate_shared_memory(gl.float16, [C, C], half)
    N_s = gl.allocate_shared_memory(gl.float16, [C, C], half)
    low_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)
    pairs = assembled(of_k, narrow, mma)
    A = pairs * -rates[:, None]
    own = gl.convert_layout(gl.reshape(rates, [GROUPS, ROWS]), gl.SliceLayout(2, inner))
    N_s.store(A.to(gl.float16))
    store_blocks(of_k[0] * -gl.expand_dims(own, 2), n_s)
    meet()
    merge_twice(on_diagonal(inverted_blocks(n_s, d_s), mma), t_s, N_s, mma)
    a_s = reinterpret(N_s, gl.bfloat16, [C, C], half)
    if F16:
        a_low_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], half)
        high_s = reinterpret(t_s, gl.bfloat16, [C, C], half)
        store_refined(A, t_s, N_s, high_s, low_s, mma)
        store_in_two(product_in_two(assembled(of_q, narrow, mma) * scale, high_s, low_s, mma), a_s, a_low_s)
    else:
        A = (assembled(of_q, narrow, mma) * scale).to(gl.float16)
        A = gl.convert_layout(A, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
        A = warpgroup_mma(A, t_s, gl.zeros([C, C], gl.float32, mma), use_acc=False)
        a_s.store(A.to(kind))
    if REMOVALS:
        if F16:
            removals = product_in_two(pairs, high_s, low_s, mma)
        else:
            removals = gl.convert_layout(pairs.to(gl.float16), gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
            removals = warpgroup_mma(removals, t_s, gl.zeros([C, C], gl.float32, mma), use_acc=False)
        removals_s = gl.allocate_shared_memory(gl.float16, [C, C], half)
        removals_s.store(removals.to(gl.float16))
    fence_async_shared()
    meet()
    if F16:
        async_store(a_tiles, [2 * to, 0], a_s)
        async_store(a_tiles, [2 * to + C, 0], a_low_s)
    else:
        async_store(a_tiles, [to, 0], a_s)
    if REMOVALS:
        async_store(r_tiles, [to, 0], removals_s)
    if F16:
        store_solved_keys(high_s, low_s, rest_s, rest_low_s, bt_tiles, powers + C)
    else:
        high_s = reinterpret(t_s, gl.bfloat16, [C, C], half)
        T = t_s.load(mma).to(gl.float32)
        meet()  # T is read
        store_in_two(T, high_s, low_s)
        fence_async_shared()
        meet()
        for p in gl.static_range(PARTS):
            B = warpgroup_mma(high_s.permute((1, 0)), rest_s.index(p), gl.zeros([C, W], gl.float32, parted), use_acc=False)
            B = warpgroup_mma(low_s.permute((1, 0)), rest_s.index(p), B)
            meet()
            rest_s.index(p).store(B.to(kind))
    fence_async_shared()
    meet()
    for p in gl.static_range(PARTS):
        if F16:
            async_store(bt_tiles, [to, p * W], reinterpret(rest_s.index(p), kind, [C, W], bt_tiles.layout))
        else:
            async_store(bt_tiles, [to, p * W], rest_s.index(p))
    tma.store_wait(0)
    # q and k are read by their stores until here: without this, later allocations get their memory
    q_s._keep_alive()
    k_s._keep_alive()
    if F16:
        a_low_s._keep_alive()
    invalidate((loaded,))
