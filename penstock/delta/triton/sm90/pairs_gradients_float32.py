"""Gradients of pairs and of states of a chunk of KDA with float32 inputs on Hopper, in Gluon: what ``gradients_float32.py`` needs.

With S the state before the chunk, dS' the gradient of the state after it, W and Z = dV / beta from the walks,

    U = beta o W    Y = beta o Z    dbeta = rowsum(Z o W)    P = scale dO U^T (s <= t)    M = -Y U^T (s < t), transposes above
    U dS'^T, Y S^T, dO S^T, transposed: [K,C]                rowsum(S o dS'): [K]

beta is a factor of rows and columns of products, and nothing is divided. Operands have three bfloat16 parts, so a tile [C,C] takes 24 KB:
W, Z and dO stay in shared memory. S and dS' pass through it tile by tile in float32, and are left operands from registers. P and M are
stored in blocks of 16x16, as the next launch reads them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ....gpu.hopper_tiles import async_load, in_three, meet, zero_rows_from
from ....gpu.ring import barriers
from ....gpu.tiles import chunk_of_slot
from .layouts import GROUPS, ROWS, C
from .parts import as_singles, finished, product_of_parts, store_over, transposed

BLOCKS = gl.constexpr(16)
"""Of 16x16 in a matrix [C,C]."""
STAGES = gl.constexpr(2)
"""Tiles of S and dS' in shared memory, in float32."""


@gluon.jit
def three_at(memory, n):
    """The parts of tile n of a memory [3 tiles,C,C]. As float32, it is where the first two are, see ``as_singles``."""
    TILES: gl.constexpr = memory.shape[0] // 3
    return memory.index(2 * n), memory.index(2 * n + 1), memory.index(2 * TILES + n)


@gluon.jit
def store_blocks_of(x, pointer):
    """Store the parts of a matrix [C,C], on and below its diagonal, and of its transpose above, at ``pointer`` as [3,BLOCKS,ROWS,ROWS]."""
    i = gl.arange(0, C, gl.SliceLayout(1, x.type.layout))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, x.type.layout))[None, :]
    at = ((i // ROWS * GROUPS + j // ROWS) * ROWS + i % ROWS) * ROWS + j % ROWS
    mirrored = ((j // ROWS * GROUPS + i // ROWS) * ROWS + j % ROWS) * ROWS + i % ROWS
    parts = in_three(x, gl.bfloat16)
    for m in gl.static_range(3):
        gl.store(pointer + (at + m * (C * C)), parts[m], mask=i >= j)
        gl.store(pointer + (mirrored + m * (C * C)), parts[m], mask=i > j)


@gluon.jit
def load_states(S_tiles, dS_tiles, states_s, bars, row, n, TILES: gl.constexpr, COUNT: gl.constexpr):
    """Start the copies of tile n of COUNT of the states, TILES of a block of key channels, if it exists."""
    s = n % STAGES
    exists = n < COUNT
    mbarrier.expect(bars.index(1 + s), 2 * S_tiles.block_type.nbytes, pred=exists)
    async_load(S_tiles, [row + n % TILES * C, n // TILES * C], bars.index(1 + s), states_s.index(2 * s), pred=exists)
    async_load(dS_tiles, [row + n % TILES * C, n // TILES * C], bars.index(1 + s), states_s.index(2 * s + 1), pred=exists)


@gluon.jit(do_not_specialize=["N", "T", "H", "b_b", "b_t", "b_h"])
def penstock_kda_pairs_float32_sm90(
    w_tiles, z_tiles, o_tiles, S_tiles, dS_tiles, beta, pairs, own, of_states, kept, dbeta, cu_seqlens, scale, N, T, H, b_b, b_t, b_h,
    K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """P = scale dO U^T, M = -Y U^T, dbeta and the products with states of every chunk, with U = beta o W and Y = beta o Z.

    TMA tiles [C,C]: W and Z of [slots,H,C,V], dO of tokens [B T,H V], S^T and dS'^T of [slots,H,V,K]. Reads beta [B,T,H] by strides. Writes
    the parts of the blocks of P and M ``pairs`` [slots,H,2 3 BLOCKS 16,16] in bfloat16; in float32 the diagonal of P ``own`` [slots,H,C],
    the products ``of_states`` [slots,H,3,K,C], ``kept`` [slots,H,K] and dbeta [B,T,H]. Program (slot of a chunk, head).
    """
    gl.static_assert(w_tiles.dtype == gl.float32)
    TILES: gl.constexpr = V // C
    single: gl.constexpr = w_tiles.layout
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, gl.num_warps() // 4], [16, 4 * C // gl.num_warps(), 16])
    row: gl.constexpr = gl.SliceLayout(1, wide)
    column: gl.constexpr = gl.SliceLayout(0, wide)
    clean: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    half: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    slot = gl.program_id(0) // H
    h = gl.program_id(0) % H
    b, begin, left = chunk_of_slot(slot, cu_seqlens, N, T, C, PACKED)
    if left <= 0:
        return
    token = b * T + begin
    line = token.to(gl.int32)
    place = slot.to(gl.int64) * H + h
    at_values = (place * C).to(gl.int32)
    at_states = (place * V).to(gl.int32)
    memory = gl.allocate_shared_memory(gl.bfloat16, [3 * 3 * TILES, C, C], half)  # of W, Z and dO
    states_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES, C, C], single)
    given = as_singles(memory, single)
    bars = barriers(1 + STAGES, 1)
    size: gl.constexpr = w_tiles.block_type.nbytes
    fence_async_shared()
    meet()
    mbarrier.expect(bars.index(0), 3 * TILES * size)
    for n in gl.static_range(TILES):
        async_load(w_tiles, [at_values, n * C], bars.index(0), given.index(n))
        async_load(z_tiles, [at_values, n * C], bars.index(0), given.index(TILES + n))
        async_load(o_tiles, [line, h * V + n * C], bars.index(0), given.index(2 * TILES + n))
    for n in gl.static_range(STAGES):
        load_states(S_tiles, dS_tiles, states_s, bars, at_states, n, TILES, K // C * TILES)
    i = gl.arange(0, C, row)
    j = gl.arange(0, C, column)
    beta += b * b_b + begin * b_t + h.to(gl.int64) * b_h
    mbarrier.wait(bars.index(0), 0)
    if left < C:
        for n in gl.static_range(TILES):
            zero_rows_from(given.index(2 * TILES + n), left, clean)
        meet()
    for n in range(3 * TILES):
        store_over(given.index(n).load(wide), three_at(memory, n))
    fence_async_shared()
    meet()

    P = gl.zeros([C, C], gl.float32, wide)
    M = gl.zeros([C, C], gl.float32, wide)
    for n in range(TILES):
        w_s = three_at(memory, n)
        one = product_of_parts(three_at(memory, 2 * TILES + n), transposed(w_s), wide)
        other = product_of_parts(three_at(memory, TILES + n), transposed(w_s), wide)
        one, other = finished((one, other), ())
        P += one
        M += other
    rows = gl.load(beta + i.to(gl.int64) * b_t, mask=i < left, other=0.0).to(gl.float32)
    columns = gl.load(beta + j.to(gl.int64) * b_t, mask=j < left, other=0.0).to(gl.float32)[None, :]
    diagonal = i[:, None] == j[None, :]
    P *= columns * scale
    gl.store(own + place * C + i, gl.sum(gl.where(diagonal, P, 0.0), 1))
    of_beta = gl.sum(gl.where(diagonal, M, 0.0), 1)
    gl.store(dbeta + (token * H + h) + i.to(gl.int64) * H, of_beta.to(dbeta.dtype.element_ty), mask=i < left)
    pairs += place * (6 * C * C)
    store_blocks_of(P, pairs)
    store_blocks_of(gl.where(diagonal, 0.0, M * (columns * -rows[:, None])), pairs + 3 * C * C)

    of_states += place * (3 * K * C)
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    for kb in range(K // C):
        of_u = gl.zeros([C, C], gl.float32, wide)
        of_z = gl.zeros([C, C], gl.float32, wide)
        of_o = gl.zeros([C, C], gl.float32, wide)
        across = gl.zeros([C, C], gl.float32, wide)
        for n in range(TILES):
            turn = kb * TILES + n
            s = turn % STAGES
            mbarrier.wait(bars.index(1 + s), turn // STAGES & 1)
            S_s = states_s.index(2 * s).permute((1, 0))
            dS_s = states_s.index(2 * s + 1).permute((1, 0))
            across += S_s.load(wide) * dS_s.load(wide)
            x = in_three(dS_s.load(operand), gl.bfloat16)
            of_u += finished((product_of_parts(x, transposed(three_at(memory, n)), wide),), x)[0]
            x = in_three(S_s.load(operand), gl.bfloat16)
            one = product_of_parts(x, transposed(three_at(memory, TILES + n)), wide)
            other = product_of_parts(x, transposed(three_at(memory, 2 * TILES + n)), wide)
            one, other = finished((one, other), x)
            of_z += one
            of_o += other
            fence_async_shared()
            meet()  # all warps have loaded the states
            load_states(S_tiles, dS_tiles, states_s, bars, at_states, turn + STAGES, TILES, K // C * TILES)
        there = (kb * C + i[:, None]) * C + j[None, :]
        gl.store(of_states + there, of_u * columns)
        gl.store(of_states + (there + K * C), of_z * columns)
        gl.store(of_states + (there + 2 * K * C), of_o)
        gl.store(kept + place * K + kb * C + i, gl.sum(across, 1))
    bars._keep_alive()  # no other allocation may get a barrier's memory
