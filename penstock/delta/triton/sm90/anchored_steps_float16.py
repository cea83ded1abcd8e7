"""RWKV-7's chunks as steps of states on Hopper with float16 inputs, in Gluon: ``anchored_steps.py`` with operands in two bfloat16 parts.

Factors of decays between tokens and the anchor of a chunk reach exp(39), which float16 does not hold, and products of bfloat16 tiles have
fewer digits than float16 inputs. So all operands are sums of two bfloat16 tiles (``parts.py``). Of the formulas there, two are taken as

    W = total o (Xk^T V) + Bt^T X        Bt = (T^T Xb) o total

so that k rest and b rest need no memory: total is a factor of rows, and of columns. T is exactly 1 on the diagonal, so the parts of T - I
are those of T with zeros there. Shared memory has 12 tiles of 8 KB.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ....gpu.hopper_tiles import exp2, meet, store_in_two
from ....gpu.ring import barriers, invalidate
from ....gpu.tiles import chunk_of_slot
from .anchored import logarithms
from .anchored_inverse import inverse
from .anchored_steps import load_tiles, sums, tiles_of, zero_tiles_from
from .inverse import blocks_on_diagonal, inverted_blocks, on_diagonal, store_blocks
from .layouts import GROUPS, ROWS, C
from .parts import added_in_parts, as_halves, left_parts, product_from_registers, product_of_parts, send_parts, transposed


@gluon.jit
def store_product(x_s, factor, parts):
    """Store the product of a tile and a factor [C,C] in two parts, the first of which may be the memory of the tile."""
    wide: gl.constexpr = factor.type.layout
    store_in_two(x_s.load(wide).to(gl.float32) * factor, parts[0], parts[1])


@gluon.jit(do_not_specialize=["N", "T", "H"])
def penstock_rwkv7_steps_float16_sm90(
    q_tiles, a_tiles, k_tiles, b_tiles, v_tiles, step_tiles, read_tiles, write_tiles, more_tiles, g, total, cu_seqlens, scale, N, T, H,
    g_b, g_t, g_h, g_k, K: gl.constexpr, PACKED: gl.constexpr, SOLVED: gl.constexpr, RAW: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """Q = Xq + Ap Xa, Y = Ap X + Aq_k V, M = Bt^T Xa, W = Bt^T X + Kr^T V with X = Aa_k V, of every chunk.

    TMA tiles: q, k, v, a, b [C,K] of [B T,H K] in float16: V is K; both parts of M, Q, W and Y, with SOLVED of T - I in place of Y, [C,K]
    of [slots,H,2 C,K] in bfloat16. Reads g [B,T,H,K] by strides, with RAW raw gates. Writes also exp2 of the chunk's sum of g (``total``)
    [slots,H,K]. Program (slot of a chunk, head). Rows of tokens that do not exist are 0. PIECE: only chunks of C tokens are processed.
    """
    gl.static_assert(q_tiles.dtype == gl.float16)
    gl.static_assert(K == C)
    gl.static_assert(gl.num_warps() == GROUPS)
    kind: gl.constexpr = step_tiles.dtype
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
    tiles = tiles_of(12, kind, half)
    n_s = gl.allocate_shared_memory(gl.float32, [ROWS * ROWS, GROUPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    d_s = gl.allocate_shared_memory(gl.float32, [ROWS, GROUPS * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    total_s = gl.allocate_shared_memory(gl.float32, [K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = barriers(1, 1)
    fence_async_shared()
    meet()
    # both parts of Xq, Xa, Xk, Xb, V and N; the inputs are where the first parts will be
    q_s, a_s, k_s = (tiles[0], tiles[4]), (tiles[1], tiles[5]), (tiles[2], tiles[6])
    b_s, v_s, N_s = (tiles[3], tiles[8]), (tiles[7], tiles[9]), (tiles[10], tiles[11])
    given = (as_halves(q_s[0]), as_halves(a_s[0]), as_halves(k_s[0]), as_halves(b_s[0]), as_halves(v_s[0]))
    load_tiles((q_tiles, a_tiles, k_tiles, b_tiles, v_tiles), given, bar.index(0), row, h * K)
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    g += batch * g_b + begin * g_t + h.to(gl.int64) * g_h + (i * g_t + j * g_k)
    total += place * K
    d = logarithms(g, (i < left) & (j < K), RAW)
    G = sums(d, tiles[4], tiles[5], tiles[6])
    through = exp2(G)
    gl.store(total + j + i * 0, through, mask=i == C - 1)
    mbarrier.wait(bar.index(0), 0)
    zero_tiles_from(given, left, clean)
    meet()  # tiles 4 to 6 are multiplied, the total is in memory
    total_s.store(gl.load(total + gl.arange(0, K, gl.BlockedLayout([1], [32], [4], [0]))))
    store_product(given[0], through * scale, q_s)
    store_product(given[1], exp2(G - d), a_s)
    inverted = exp2(-G)
    store_product(given[2], inverted, k_s)
    store_product(given[3], inverted, b_s)
    store_in_two(given[4].load(wide).to(gl.float32), v_s[0], v_s[1])
    fence_async_shared()
    meet()
    lower = product_of_parts(a_s, transposed(b_s), wide)
    late = product_of_parts(a_s, transposed(k_s), wide)
    lower, late = warpgroup_mma_wait(0, [lower, late])
    lower = gl.where(i > j, lower, 0.0)
    store_in_two(lower, N_s[0], N_s[1])
    store_blocks(blocks_on_diagonal(lower), n_s)
    of_a = left_parts(gl.where(i > j, late, 0.0), kind, 2)
    X = product_of_parts(of_a, v_s, wide)
    if SOLVED:
        W = product_of_parts(transposed(k_s), v_s, wide)
        X, W, _high, _low = warpgroup_mma_wait(0, [X, W, of_a[0], of_a[1]])
    else:
        late = product_of_parts(q_s, transposed(k_s), wide)
        X, late, _high, _low = warpgroup_mma_wait(0, [X, late, of_a[0], of_a[1]])
        of_q = left_parts(gl.where(i >= j, late, 0.0), kind, 2)
        Y = product_of_parts(of_q, v_s, wide)
        W = product_of_parts(transposed(k_s), v_s, wide)
        Y, W, _high, _low = warpgroup_mma_wait(0, [Y, W, of_q[0], of_q[1]])
    fence_async_shared()
    meet()  # N is stored, k and V are multiplied
    store_in_two(X, v_s[0], v_s[1])
    T_s = k_s
    inverse(on_diagonal(inverted_blocks(n_s, d_s), wide), T_s, N_s)
    Aq = product_of_parts(q_s, transposed(b_s), wide)
    B = product_of_parts(transposed(T_s), b_s, wide)
    Aq, B = warpgroup_mma_wait(0, [Aq, B])
    store_in_two(B * total_s.load(gl.SliceLayout(0, wide))[None, :], N_s[0], N_s[1])
    ap = left_parts(product_from_registers(gl.where(i >= j, Aq, 0.0), T_s), kind, 2)
    bt = transposed(N_s)
    fence_async_shared()
    meet()  # X and Bt are stored
    Q = product_of_parts(ap, a_s, wide)
    if not SOLVED:
        Y = added_in_parts(ap, v_s, Y)
    M = product_of_parts(bt, a_s, wide)
    W = added_in_parts(bt, v_s, W * total_s.load(gl.SliceLayout(1, wide))[:, None])
    if SOLVED:
        Q, M, W, _high, _low = warpgroup_mma_wait(0, [Q, M, W, ap[0], ap[1]])
    else:
        Q, Y, M, W, _high, _low = warpgroup_mma_wait(0, [Q, Y, M, W, ap[0], ap[1]])
    Q += q_s[0].load(wide).to(gl.float32)
    Q += q_s[1].load(wide).to(gl.float32)
    if SOLVED:  # all warps have multiplied T and Xb
        high = T_s[0].load(wide)
        T_s[0].store(gl.where(i == j, gl.zeros_like(high), high))
    else:
        store_in_two(Y, k_s[0], k_s[1])
    store_in_two(W, b_s[0], b_s[1])
    store_in_two(Q, q_s[0], q_s[1])
    meet()  # all warps have multiplied Xa
    store_in_two(M, a_s[0], a_s[1])
    fence_async_shared()
    meet()
    at = (2 * place * C).to(gl.int32)
    send_parts(k_s, more_tiles, at, 0)
    send_parts(b_s, write_tiles, at, 0)
    send_parts(q_s, read_tiles, at, 0)
    send_parts(a_s, step_tiles, at, 0)
    tma.store_wait(0)
    invalidate((bar,))
