"""Linear maps with up to a few hundred rows on Hopper, in Gluon: the weights stream through shared memory.

A program has BN rows of a weight and BM rows of x. The tensor memory accelerator (TMA) loads blocks of K of each into a ring of stages.
Programs that share a tile of weights are adjacent in the grid: one reads it from memory, the others from the L2 cache.
With programmatic dependent launch (PDL), the weights of all stages are loaded before the wait for the previous kernel. So memory is read
while the kernels between two launches run.

K is split into SPLIT parts, whose sums are added in order: part q has every SPLIT-th block of 64 from block q on. A part is a chain of
products with 64 rows of the left operand, so its bits depend neither on the number of rows of x nor on the tile:

- APART parts share one product: the left operand [HEIGHT,64] has BN = HEIGHT / APART rows of the weight for each part, the right operand
  the rows of x for each part. Only the diagonal blocks of the product [HEIGHT,APART*BM] are used. A stage has the operands of GROUPS such
  products. HEIGHT is 64, or 128 for two groups of four warps.
- SPREAD parts have programs of their own. The last program of a tile to finish adds the sums of all parts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra import cuda

from ...gpu.hopper_tiles import async_load, meet, reinterpret
from ...gpu.ring import barriers, invalidate

UNIT = gl.constexpr(64)  # elements of K per block: its rows are 128 bytes


@gluon.jit
def panels(tile, shape: gl.constexpr, layout: gl.constexpr):
    """View a tile [COUNT * n,64] as the tile that TMA writes, COUNT blocks of 64 columns: [n,64 * COUNT] (COLUMNS: [64 * COUNT,n])."""
    return reinterpret(tile, tile.dtype, shape, layout)


@gluon.jit
def ask(tiles, ring, bars, line, i, there, layout: gl.constexpr, COLUMNS: gl.constexpr, SPREAD: gl.constexpr):
    """Start to load block i of this program's part of K, from row ``line`` on; of a tensor [K,n], from column ``line`` on."""
    s = i % ring.shape[0]
    shape: gl.constexpr = tiles.block_shape
    if SPREAD > 1:
        i = i * SPREAD + gl.program_id(2)
    if COLUMNS:
        async_load(tiles, [i * shape[0], line], bars.index(s), panels(ring.index(s), shape, layout), pred=there)
    else:
        async_load(tiles, [line, i * shape[1]], bars.index(s), panels(ring.index(s), shape, layout), pred=there)


@gluon.jit
def added(product, sums, BN: gl.constexpr, layout: gl.constexpr):
    """The diagonal blocks of a product, added in order. ``sums`` is scratch memory."""
    PARTS: gl.constexpr = sums.shape[0] // BN
    BM: gl.constexpr = sums.shape[1] // PARTS
    meet()
    sums.store(product)
    meet()
    total = sums.slice(0, BN).slice(0, BM, 1).load(layout)
    for a in gl.static_range(1, PARTS):
        total += sums.slice(a * BN, BN).slice(a * BM, BM, 1).load(layout)
    return total


@gluon.jit
def places(n, m, N, R, BN: gl.constexpr, BM: gl.constexpr, layout: gl.constexpr):
    """Offsets and mask in [R,N] of the results [BN,BM] for weights from n on and rows from m on."""
    row = n + gl.arange(0, BN, gl.SliceLayout(1, layout))[:, None]
    m += gl.arange(0, BM, gl.SliceLayout(0, layout))[None, :]
    return m * N + row, (row < N) & (m < R)


@gluon.jit
def finish(
    o, z, x_s, y, gate, n, m, N, R, mma: gl.constexpr, out: gl.constexpr, RELAY: gl.constexpr, RELU_SQUARED: gl.constexpr,
    GATE: gl.constexpr,
):  # fmt: skip
    """Store results [BN,BM]. RELAY: change their layout through the memory of the ring of x. z: the gate, if it was loaded before."""
    BN: gl.constexpr = o.shape[0]
    BM: gl.constexpr = o.shape[1]
    relay: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [0, 1])
    if RELU_SQUARED:
        positive = gl.where(o < 0, 0.0, o)  # keeps NaN
        o = positive * positive
    if GATE:
        if RELAY:
            to, here = places(n, m, N, R, BN, BM, mma)
            z = gl.load(gate + to, mask=here, other=0.0)
        o = o / (1 + gl.exp(-z.to(gl.float32)))
    result = o.to(x_s.dtype)
    if RELAY:
        tile = reinterpret(x_s, x_s.dtype, [BN, BM], relay)
        meet()
        tile.store(result)
        meet()
        result = tile.load(out)
    to, here = places(n, m, N, R, BN, BM, out)
    gl.store(y + to, result, mask=here)


@gluon.jit
def product(
    x_tiles, w_tiles, y, others, n, N, x_s, w_s, bars,
    K: gl.constexpr, BM: gl.constexpr, APART: gl.constexpr, GROUPS: gl.constexpr, SPREAD: gl.constexpr, PDL: gl.constexpr,
    RELU_SQUARED: gl.constexpr, COLUMNS: gl.constexpr, GATE: gl.constexpr, LASTS: gl.constexpr = False,
):  # fmt: skip
    """Rows n to n + BN of one weight times a block of BM rows of x."""
    gate, normed, pool, slots, p_n, parts, counts, R = others
    x_bars, w_bars, warm = bars
    HEIGHT: gl.constexpr = w_s.shape[1] // GROUPS
    BN: gl.constexpr = HEIGHT // APART
    WIDE: gl.constexpr = APART * BM
    LEAST: gl.constexpr = 256 if GATE else 128
    RELAY: gl.constexpr = APART == 1 and (HEIGHT * BM >= LEAST * UNIT or SPREAD > 1)
    WARPS: gl.constexpr = gl.num_warps()
    STAGES: gl.constexpr = w_s.shape[0]
    STEPS: gl.constexpr = (K + GROUPS * APART * SPREAD * UNIT - 1) // (GROUPS * APART * SPREAD * UNIT)
    FIRST: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    X_STAGES: gl.constexpr = x_s.shape[0]
    X_FIRST: gl.constexpr = X_STAGES if X_STAGES < STEPS else STEPS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [HEIGHT // 16, WARPS * 16 // HEIGHT], [16, WIDE * HEIGHT // (WARPS * 16), 16])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * BN if COLUMNS and BN < UNIT else 128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = 4 if RELAY else 2
    ACROSS: gl.constexpr = BN // LINE if BN // LINE < 32 else 32
    out: gl.constexpr = gl.BlockedLayout([LINE, 1], [ACROSS, 32 // ACROSS], [1, WARPS], [0, 1])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    m = gl.program_id(0) * BM
    for i in range(FIRST):
        mbarrier.expect(w_bars.index(i), w_tiles.block_type.nbytes)
    for i in range(X_FIRST):
        mbarrier.expect(x_bars.index(i), x_tiles.block_type.nbytes)
    if PDL:
        mbarrier.expect(warm.index(0), x_tiles.block_type.nbytes)
    meet()
    for i in range(FIRST):
        ask(w_tiles, w_s, w_bars, n, i, True, narrow, COLUMNS, SPREAD)
    if PDL:
        ask(x_tiles, x_s, warm, R, 0, True, half, False, SPREAD)  # rows past the end: fetches the descriptor, not x
        cuda.gdc_wait()
        mbarrier.wait(warm.index(0), 0)
    for i in range(X_FIRST):
        ask(x_tiles, x_s, x_bars, m, i, True, half, False, SPREAD)
    z = gate
    if GATE and not RELAY:
        to, here = places(n, m, N, R, BN, BM, out)
        z = gl.load(gate + to, mask=here, other=0.0)
    if LASTS:  # stored after the products, so they do not wait for it
        c = n + gl.arange(0, BN, gl.BlockedLayout([1], [32], [WARPS], [0]))
        slot = gl.load(slots).to(gl.int64)
        last = gl.load(normed + c, mask=c < N, other=0.0)

    o = gl.zeros([HEIGHT, WIDE], gl.float32, mma)
    for i in range(STEPS):
        s = i % STAGES
        x_stage = i % X_STAGES
        mbarrier.wait(w_bars.index(s), (i // STAGES) & 1)
        mbarrier.wait(x_bars.index(x_stage), (i // X_STAGES) & 1)
        for g in gl.static_range(GROUPS):
            a = w_s.index(s).slice(g * HEIGHT, HEIGHT)
            if COLUMNS:
                a = panels(a, [UNIT, HEIGHT], narrow).permute((1, 0))
            b = x_s.index(x_stage).slice(g * WIDE, WIDE).permute((1, 0))
            o = warpgroup_mma(a, b, o, is_async=True)
        o = warpgroup_mma_wait(GROUPS, [o])
        if STEPS > STAGES or STEPS > X_STAGES:  # the previous products are done: load the next blocks into their stages
            later = i - 1 + STAGES
            x_later = i - 1 + X_STAGES
            there = (i > 0) & (later < STEPS)
            x_there = (i > 0) & (x_later < STEPS)
            mbarrier.expect(w_bars.index(later % STAGES), w_tiles.block_type.nbytes, pred=there)
            mbarrier.expect(x_bars.index(x_later % X_STAGES), x_tiles.block_type.nbytes, pred=x_there)
            meet()
            ask(w_tiles, w_s, w_bars, n, later, there, narrow, COLUMNS, SPREAD)
            ask(x_tiles, x_s, x_bars, m, x_later, x_there, half, False, SPREAD)
    o = warpgroup_mma_wait(0, [o])

    if APART > 1:
        o = added(o, reinterpret(w_s, gl.float32, [HEIGHT, WIDE], plain), BN, out)
    elif not RELAY:
        o = gl.convert_layout(o, out)
    if SPREAD == 1:
        finish(o, z, x_s, y, gate, n, m, N, R, mma, out, RELAY, RELU_SQUARED, GATE)
    else:
        tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        row = gl.arange(0, BN, gl.SliceLayout(1, mma))[:, None]
        parts += tile * (SPREAD * BN * BM) + row * BM + gl.arange(0, BM, gl.SliceLayout(0, mma))[None, :]
        gl.store(parts + gl.program_id(2) * (BN * BM), o)
        meet()
        if gl.atomic_add(counts + tile, 1) == SPREAD - 1:
            gl.store(counts + tile, 0)
            for q in gl.static_range(SPREAD):
                part = gl.load(parts + q * (BN * BM), cache_modifier=".cg")
                if q == 0:
                    o = part
                else:
                    o += part
            finish(o, z, x_s, y, gate, n, m, N, R, mma, out, RELAY, RELU_SQUARED, GATE)
    if LASTS:
        gl.store(pool + slot * p_n + c, last.to(pool.dtype.element_ty), mask=(c < N) & (slot >= 0))


@gluon.jit(do_not_specialize=["R"])
def penstock_products_hopper(
    x0, x1, x2, x3, x4, x5, x6,  # tiles [BM,BK] of [R,K], BK = 64 APART GROUPS
    w0, w1, w2, w3, w4, w5, w6,  # tiles [BN,BK] of [N,K]; where bit i of ``COLUMNS`` is set w_i has tiles [BK,BN] of [K,N]
    y0, y1, y2, y3, y4, y5, y6,  # [R,N]
    gate,  # [R,n0]
    normed, pool, slots,  # [n0]; [P,n0], row stride ``p_n``; [1]
    parts,  # SPREAD > 1: scratch memory, SPREAD float32 [BN,BM] per tile
    counts,  # SPREAD > 1: the number of finished programs per tile, int32, 0 between launches
    n0, n1, n2, n3, n4, n5, n6,
    b1, b2, b3, b4, b5, b6,  # the first program of each map
    p_n, R,
    K: gl.constexpr, PARTS: gl.constexpr, RELU_SQUARED: gl.constexpr, COLUMNS: gl.constexpr, GATE: gl.constexpr, LASTS: gl.constexpr,
    BM: gl.constexpr, APART: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, HEIGHT: gl.constexpr,
    SPREAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y_i = x_i W_i^T in one grid. RELU_SQUARED: y_0 becomes relu(y_0)^2. GATE: y_0 is multiplied by sigmoid(gate).

    Reads x_i [R,K] as tiles [BM,BK], W_i [N,K] as tiles [BN,BK], gate [R,N]. Writes y_i [R,N]. Program (block of rows, tile of weights,
    part of K).

    LASTS, for one map and one row: ``normed`` replaces the row of the pool. PDL: weights are read before the wait for the earlier kernels,
    which do not write them; all else after it.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    block = gl.program_id(1)
    BN: gl.constexpr = HEIGHT // APART
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_s = gl.allocate_shared_memory(x0.dtype, [X_STAGES, GROUPS * APART * BM, UNIT], half)
    w_s = gl.allocate_shared_memory(x0.dtype, [STAGES, GROUPS * HEIGHT, UNIT], half)
    bars = (barriers(X_STAGES, 1), barriers(STAGES, 1), barriers(1, 1))
    fence_async_shared()
    meet()
    others = (gate, normed, pool, slots, p_n, parts, counts, R)
    if PARTS == 1:
        at = block * BN
        product(x0, w0, y0, others, at, n0, x_s, w_s, bars, K, BM, APART, GROUPS, SPREAD, PDL, RELU_SQUARED, COLUMNS % 2 == 1, GATE, LASTS)
    else:
        if block < b1:
            at = block * BN
            product(x0, w0, y0, others, at, n0, x_s, w_s, bars, K, BM, APART, GROUPS, SPREAD, PDL, RELU_SQUARED, COLUMNS % 2 == 1, GATE)
        if (block >= b1) & (block < b2):
            at = (block - b1) * BN
            product(x1, w1, y1, others, at, n1, x_s, w_s, bars, K, BM, APART, GROUPS, SPREAD, PDL, False, (COLUMNS >> 1) % 2 == 1, False)
        if PARTS > 2:
            if (block >= b2) & (block < b3):
                at = (block - b2) * BN
                product(
                    x2, w2, y2, others, at, n2, x_s, w_s, bars, K, BM, APART, GROUPS, SPREAD, PDL, False, (COLUMNS >> 2) % 2 == 1, False
                )
        if PARTS > 3:
            if (block >= b3) & (block < b4):
                at = (block - b3) * BN
                product(
                    x3, w3, y3, others, at, n3, x_s, w_s, bars, K, BM, APART, GROUPS, SPREAD, PDL, False, (COLUMNS >> 3) % 2 == 1, False
                )
        if PARTS > 4:
            if (block >= b4) & (block < b5):
                at = (block - b4) * BN
                product(
                    x4, w4, y4, others, at, n4, x_s, w_s, bars, K, BM, APART, GROUPS, SPREAD, PDL, False, (COLUMNS >> 4) % 2 == 1, False
                )
        if PARTS > 5:
            if (block >= b5) & (block < b6):
                at = (block - b5) * BN
                product(
                    x5, w5, y5, others, at, n5, x_s, w_s, bars, K, BM, APART, GROUPS, SPREAD, PDL, False, (COLUMNS >> 5) % 2 == 1, False
                )
        if PARTS > 6:
            if block >= b6:
                at = (block - b6) * BN
                product(
                    x6, w6, y6, others, at, n6, x_s, w_s, bars, K, BM, APART, GROUPS, SPREAD, PDL, False, (COLUMNS >> 6) % 2 == 1, False
                )
    invalidate(bars)
