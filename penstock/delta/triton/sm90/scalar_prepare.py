"""What a chunk of gated DeltaNet or DeltaNet needs besides the state, on Hopper, in Gluon: any decay at the same speed.

With D[t,s] = exp(sum s < u <= t of g_u), read_t = exp(sum u <= t) and rest_s = exp(sum u > s), a chunk of 64 tokens has

    A_q = scale q k^T o D (s <= t)          A_k = k k^T o D (s < t)          T = (I + diag(beta) A_k)^-1
    A   = A_q T                             B^T = T^T (k o rest) = (rest o T)^T k

q k^T and k k^T are products of the tiles that the tensor memory accelerator copies. Heads of v that share q and k do not share them: the
time is that of the inverse, which more programs on a multiprocessor hide. Sums of decays have two parts (``gpu/hopper_decays.py``), so D is
accurate for every decay. rest o T is multiplied in two parts of bfloat16, which has the range of float32: where a chunk ends with strong
decays, B^T and what it leaves of the state are as small, and float16 would lose them.

float16: T and what it multiplies have two parts of bfloat16, 16 significant bits: errors of T in float16 would be as large as those of all
other operands. A and B^T are stored in two parts, because they multiply X, which has no bound (``scalar_walk.py``). The walk backward
in time multiplies what has a power of two for each value channel by A and B^T from the right: there a token's power of two is a factor of a
column of the result. So for it they are float16 tiles, columns of A and rows of B^T times powers of two.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from ....gpu.hopper_decays import decay_vectors, factors_between, log_decays, sums_of_decays
from ....gpu.hopper_tiles import async_load, async_store, in_two, meet, reinterpret, scaled_half, store_in_two, zero_rows_from
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import chunk_of_slot
from .anchored_inverse import inverse
from .inverse import inverted_blocks, merge_twice, on_diagonal, store_blocks
from .layouts import GROUPS, ROWS, C
from .parts import product_from_registers, send_parts


@gluon.jit
def blocks_on_diagonal(x, mma: gl.constexpr):
    """The blocks [GROUPS,ROWS,ROWS] on the diagonal of a tile [C,C]."""
    column = gl.arange(0, C, gl.SliceLayout(0, mma))[None, :] // ROWS
    row = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None] // ROWS
    x = gl.sum(gl.reshape(gl.where(row == column, x, 0.0), [C, GROUPS, ROWS]), 1)
    return gl.reshape(x, [GROUPS, ROWS, ROWS])


@gluon.jit
def vectors_of_chunk(g, g_t, left, vectors, at, reads, DECAYS: gl.constexpr):
    """Store the sums of decays of a chunk at ``at`` of ``vectors``, and read_t at ``reads`` [C]. Without decays read_t is 1."""
    line: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    i = gl.arange(0, C, line)
    if DECAYS:
        d = log_decays(g, g_t, left, i)
        sums_of_decays(d, vectors, at, 1.0)
        gl.store(reads + i, vectors[2].index(at).load(line))
    else:
        gl.store(reads + i, gl.full([C], 1.0, gl.float32, line))


@gluon.jit
def operand(x, mma: gl.constexpr):
    """A tile as left operand in float16."""
    return gl.convert_layout(x.to(gl.float16), gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def in_parts(weights, pairs, N, vectors, q_s, k_s, n_s, d_s, powers, DECAYS: gl.constexpr, REMOVALS: gl.constexpr):
    """Memory with A and B^T in two parts each, from A_q, A_k, N and k. It takes that of q and k.

    With REMOVALS also A_k T, A and B^T in float16, and stores the powers of two that the latter two lack at ``powers`` [2,C].
    """
    part: gl.constexpr = gl.bfloat16
    mma: gl.constexpr = N.type.layout
    K: gl.constexpr = k_s.shape[1]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    T_s = (gl.allocate_shared_memory(part, [C, C], half), gl.allocate_shared_memory(part, [C, C], half))
    N_2 = gl.allocate_shared_memory(part, [2, C, C], half)
    N_s = (N_2.index(0), N_2.index(1))
    store_in_two(N, N_s[0], N_s[1])
    store_blocks(blocks_on_diagonal(N, mma), n_s)
    meet()
    T = inverse(on_diagonal(inverted_blocks(n_s, d_s), mma), T_s, N_s)
    A = product_from_registers(weights, T_s)
    more = ()
    if REMOVALS:
        r_s = gl.allocate_shared_memory(gl.float16, [C, C], half)
        a_s = gl.allocate_shared_memory(gl.float16, [C, C], half)
        r_s.store(product_from_registers(pairs, T_s).to(gl.float16))
        rounded, up = scaled_half(A, 0)
        a_s.store(rounded)
        gl.store(powers + gl.arange(0, C, gl.SliceLayout(0, mma)), up)
    if DECAYS:
        T = T * vectors[3].index(0).load(gl.SliceLayout(1, mma))[:, None]
    store_in_two(T, N_s[0], N_s[1])
    keys = (reinterpret(k_s, part, [C, K], k_s.layout), reinterpret(q_s, part, [C, K], q_s.layout))
    high, low = in_two(k_s.load(clean).to(gl.float32), part)  # exact: 11 bits
    meet()
    keys[0].store(high)
    keys[1].store(low)
    fence_async_shared()
    meet()
    store_in_two(A, T_s[0], T_s[1])
    B = warpgroup_mma(N_s[0].permute((1, 0)), keys[1], gl.zeros([C, K], gl.float32, wide), use_acc=False)
    B = warpgroup_mma(N_s[1].permute((1, 0)), keys[0], B)
    B = warpgroup_mma(N_s[0].permute((1, 0)), keys[0], B)
    meet()  # no product reads the keys
    store_in_two(B, keys[0], keys[1])
    if REMOVALS:
        b_s = reinterpret(N_2, gl.float16, [C, K], k_s.layout)
        rounded, up = scaled_half(B, 1)
        b_s.store(rounded)
        gl.store(powers + C + gl.arange(0, C, gl.SliceLayout(1, wide)), up)
        more = (r_s, a_s, b_s)
    return T_s, keys, more


@gluon.jit(do_not_specialize=["N", "T", "H", "R", "q_h", "k_h", "g_b", "g_t", "g_h", "b_b", "b_t", "b_h"])
def penstock_gdn_prepare_sm90(
    q_tiles, k_tiles, b_tiles, a_tiles, r_tiles, a_half_tiles, b_half_tiles, g, beta, reads, powers, cu_seqlens,
    scale, N, T, H, R, q_h, k_h, g_b, g_t, g_h, b_b, b_t, b_h,
    K: gl.constexpr, DECAYS: gl.constexpr, PACKED: gl.constexpr, REMOVALS: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """T = (I + diag(beta) A_k)^-1, A = A_q T, B^T = T^T (k o rest) and read_t, of every chunk.

    Reads q, k [B,T,H / R,K] as TMA tiles [C,K], g and beta [B,T,H] by strides. Writes B^T [slots,H,C,K] and A [slots,H,C,C] in the dtype
    of q, read_t [slots,H,C] in float32 and, with REMOVALS, A_k T [slots,H,C,C] in float16. Program (slot of a chunk, head of v). ``q_h``
    and ``k_h`` are K, or 0 if all heads share q and k. PIECE: only chunks of C tokens are processed.

    float16: B^T and A are [slots,H,2,C,...] in bfloat16, two parts whose sums they are. With REMOVALS also A [slots,H,C,C] and B^T
    [slots,H,C,K] in float16 are written, and ``powers`` [slots,H,2,C], what columns of A and rows of B^T lack there.
    """
    F16: gl.constexpr = q_tiles.dtype == gl.float16
    gl.static_assert(F16 or q_tiles.dtype == gl.bfloat16)
    kind: gl.constexpr = q_tiles.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    clean: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

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
    q_s = gl.allocate_shared_memory(kind, [C, K], q_tiles.layout)
    k_s = gl.allocate_shared_memory(kind, [C, K], k_tiles.layout)
    if not F16:
        t_s = gl.allocate_shared_memory(gl.float16, [C, C], half)
        N_s = gl.allocate_shared_memory(gl.float16, [C, C], half)
    vectors = decay_vectors()
    loaded = barriers(1, 1)
    fence_async_shared()
    meet()
    mbarrier.expect(loaded.index(0), q_tiles.block_type.nbytes + k_tiles.block_type.nbytes)
    async_load(q_tiles, [row, h // R * q_h], loaded.index(0), q_s)
    async_load(k_tiles, [row, h // R * k_h], loaded.index(0), k_s)
    i = gl.arange(0, C, gl.SliceLayout(1, mma))
    j = gl.arange(0, C, gl.SliceLayout(0, mma))[None, :]
    beta += b * b_b + begin * b_t + head * b_h + i.to(gl.int64) * b_t
    rates = gl.load(beta, mask=i < left, other=0.0).to(gl.float32)[:, None]
    vectors_of_chunk(g + b * g_b + begin * g_t + head * g_h, g_t, left, vectors, slot * 0, reads + place * C, DECAYS)
    mbarrier.wait(loaded.index(0), 0)
    if left < C:
        zero_rows_from(q_s, left, clean)
        zero_rows_from(k_s, left, clean)
    fence_async_shared()
    meet()
    zero = gl.zeros([C, C], gl.float32, mma)
    weights = warpgroup_mma(q_s, k_s.permute((1, 0)), zero, use_acc=False) * scale
    if DECAYS:
        D = factors_between(vectors, slot * 0, 1.0, False, mma)
        weights = weights * D
    weights = gl.where(i[:, None] >= j, weights, 0.0)
    if not F16:
        weights = operand(weights, mma)
    pairs = warpgroup_mma(k_s, k_s.permute((1, 0)), zero, use_acc=False)
    if DECAYS:
        pairs = pairs * D
    pairs = gl.where(i[:, None] > j, pairs, 0.0)
    A = pairs * -rates
    if F16:
        meet()  # q_s is free
        n_s = reinterpret(q_s, gl.float32, [ROWS * ROWS, GROUPS], flat)
        d_s = reinterpret(q_s.slice(C // 2, C // 2), gl.float32, [ROWS, GROUPS * ROWS], plain2)
        powers += place * (2 * C)
        a_parts, b_parts, more = in_parts(weights, pairs, A, vectors, q_s, k_s, n_s, d_s, powers, DECAYS, REMOVALS)
        fence_async_shared()
        meet()
        at = (place * (2 * C)).to(gl.int32)
        send_parts(a_parts, a_tiles, at, 0)
        send_parts(b_parts, b_tiles, at, 0)
        if REMOVALS:
            at = (place * C).to(gl.int32)
            async_store(r_tiles, [at, 0], more[0])
            async_store(a_half_tiles, [at, 0], more[1])
            async_store(b_half_tiles, [at, 0], more[2])
        tma.store_wait(0)
        for n in gl.static_range(2):  # in use until here
            a_parts[n]._keep_alive()
            b_parts[n]._keep_alive()
        for n in gl.static_range(len(more)):
            more[n]._keep_alive()
    else:
        pairs = operand(pairs, mma)
        meet()  # q_s is free
        n_s = reinterpret(q_s, gl.float32, [ROWS * ROWS, GROUPS], flat)
        d_s = reinterpret(q_s.slice(C // 2, C // 2), gl.float16, [ROWS, GROUPS * ROWS], plain2)
        N_s.store(A.to(gl.float16))
        store_blocks(blocks_on_diagonal(A, mma), n_s)
        meet()
        merge_twice(on_diagonal(inverted_blocks(n_s, d_s), mma), t_s, N_s, mma)
        A = warpgroup_mma(weights, t_s, zero, use_acc=False).to(kind)
        if REMOVALS:
            r_s = gl.allocate_shared_memory(gl.float16, [C, C], half)
            r_s.store(warpgroup_mma(pairs, t_s, zero, use_acc=False).to(gl.float16))
        rested = t_s.load(mma).to(gl.float32)
        if DECAYS:
            rested = rested * vectors[3].index(0).load(gl.SliceLayout(1, mma))[:, None]
        high_s = reinterpret(N_s, kind, [C, C], half)
        low_s = reinterpret(q_s, kind, [C, C], half)
        store_in_two(rested, high_s, low_s)
        fence_async_shared()
        meet()
        a_s = reinterpret(t_s, kind, [C, C], half)
        a_s.store(A)
        B = warpgroup_mma(high_s.permute((1, 0)), k_s, gl.zeros([C, K], gl.float32, wide), use_acc=False)
        B = warpgroup_mma(low_s.permute((1, 0)), k_s, B)
        meet()  # no product reads the keys
        k_s.store(B.to(kind))
        fence_async_shared()
        meet()
        at = (place * C).to(gl.int32)
        async_store(a_tiles, [at, 0], a_s)
        async_store(b_tiles, [at, 0], k_s)
        if REMOVALS:
            async_store(r_tiles, [at, 0], r_s)
        tma.store_wait(0)
    invalidate((loaded,))
