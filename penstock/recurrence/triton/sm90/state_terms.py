"""The first products of the backward kernel for decays per channel on Hopper, in Gluon: M, and the terms of the states.

The formulas are those of ``channel_backward``. Of heads of one block, v, dO, S and dS are in shared memory as a whole; of heads of
several blocks, in steps of 64 value channels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ....gpu.hopper_tiles import inverse, meet, most, zero_rows_from
from ....gpu.ring import expect
from ....gpu.tiles import powers_of_two
from .backward_memory import ask_step
from .dyadic import ROWS, C, blocks


@gluon.jit
def level_powers(dA, largest):
    """A power of two for dA, and its inverse. Rounded to float16, dA and the products Y with tiles of at most ``largest`` do not overflow.

    Y has at most 32 terms.
    """
    x = most(dA)
    return powers_of_two(gl.maximum(x, 32 * x * largest))


@gluon.jit
def rounded_states(states, d_states, S_s, dS_s, V: gl.constexpr, DG: gl.constexpr, layout: gl.constexpr):
    """Load tiles of a float32 state [K,V] and its gradient, store them as float16 times powers of two.

    Returns the inverse powers, and the sums of S o dS over value channels if DG.
    """
    K: gl.constexpr = S_s.shape[0]
    W: gl.constexpr = S_s.shape[1]
    at = gl.arange(0, K, gl.SliceLayout(1, layout))[:, None] * V + gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]
    S = gl.load(states + at)
    dS = gl.load(d_states + at)
    kept = gl.zeros([K], gl.float32, gl.SliceLayout(1, layout))
    if DG:
        kept += gl.sum(S * dS, 1)
    down, of_S = powers_of_two(most(S))
    S_s.store((S * down).to(S_s.dtype))
    down, of_dS = powers_of_two(most(dS))
    dS_s.store((dS * down).to(dS_s.dtype))
    return of_S, of_dS, kept


@gluon.jit
def sums_over_steps(
    step, S_tiles, dS_tiles, place, V: gl.constexpr, STEPS: gl.constexpr, DG: gl.constexpr, HALF: gl.constexpr, L: gl.constexpr
):
    """Sums over steps of value channels: dO V^T, V dO^T, the blocks on their diagonals, dO S^T, V dS^T and rowsum(S o dS)."""
    step_tiles, values, states, step_bars = step
    COPIES: gl.constexpr = 2 if HALF else 4
    K: gl.constexpr = states.shape[1]
    W: gl.constexpr = states.shape[2]
    STAGES: gl.constexpr = K // W
    dA = gl.zeros([C, C], gl.float32, L.square)
    dA_t = dA
    dq_in = gl.zeros([C, K], gl.float32, L.mma)
    dk_in = dq_in
    D = gl.zeros([C // ROWS, ROWS, ROWS], gl.float32, L.block)
    D_t = D
    state_row = gl.zeros([K], gl.float32, gl.SliceLayout(1, L.rows))
    for n in range(STEPS):
        stage = n % STAGES
        v = values.index(stage)
        o = values.index(STAGES + stage)
        S = states.index(stage)
        dS = states.index(STAGES + stage)
        if HALF:
            of_S, of_dS, more = rounded_states(S_tiles + n * W, dS_tiles + n * W, S, dS, V, DG, L.rows)
            state_row += more
            dq_in *= inverse(of_S)
            dk_in *= inverse(of_dS)
            fence_async_shared()
            meet()
        for one in gl.static_range(COPIES):
            mbarrier.wait(step_bars[one].index(stage), (n // STAGES) & 1)
        if place.tokens < C:
            zero_rows_from(v, place.tokens, L.rows)
            zero_rows_from(o, place.tokens, L.rows)
            fence_async_shared()
            meet()
        D = mma_v2(blocks(o, L.block_left, False), blocks(v, L.block_right, True), D)
        D_t = mma_v2(blocks(v, L.block_left, False), blocks(o, L.block_right, True), D_t)
        if DG and not HALF:
            state_row += gl.sum(S.load(L.rows).to(gl.float32) * dS.load(L.rows).to(gl.float32), 1)
        dA = warpgroup_mma(o, v.permute((1, 0)), dA, is_async=True)
        dA_t = warpgroup_mma(v, o.permute((1, 0)), dA_t, is_async=True)
        dq_in = warpgroup_mma(o, S.permute((1, 0)), dq_in, is_async=True)
        dk_in = warpgroup_mma(v, dS.permute((1, 0)), dk_in, is_async=True)
        dA, dA_t, dq_in, dk_in = warpgroup_mma_wait(0, [dA, dA_t, dq_in, dk_in])
        if HALF:
            dq_in *= of_S
            dk_in *= of_dS
        expect(step_tiles, step_bars, n + STAGES, n + STAGES < STEPS)
        meet()
        ask_step(step_tiles, values, states, step_bars, place, n + STAGES, STEPS, COPIES)
    return dA, dA_t, D, D_t, dq_in, dk_in, state_row


@gluon.jit
def store_weights(dA, dA_t, M_s, largest, scale, HALF: gl.constexpr, L: gl.constexpr):
    """Store M. Returns its factor, and the power of two in later products with it."""
    i = gl.arange(0, C, gl.SliceLayout(1, L.square))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, L.square))[None, :]
    of_M, of_levels = scale, 1.0
    if HALF:
        of_M, of_levels = level_powers(dA, largest)
    M_s.store((gl.where(i > j, dA, dA_t) * of_M).to(M_s.dtype))
    return of_M, of_levels


@gluon.jit
def state_terms(
    memory, bar, states, step, S_tiles, dS_tiles, place, largest, scale,
    V: gl.constexpr, STEPS: gl.constexpr, DG: gl.constexpr, HALF: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Store M, e, rowsum(S o dS), and the states' parts of dq (in ``memory.v``) and dk. STEPS > 0: sums over steps of value channels.

    ``states``: memory of S and dS, and powers of two of them. Returns the blocks on the diagonal of M, and the powers of two of levels and
    of the states' parts.
    """
    kind: gl.constexpr = memory.q.dtype
    K: gl.constexpr = memory.q.shape[1]
    S, dS, of_S, of_dS = states
    of_q, of_k = 1.0, 1.0
    if STEPS > 0:
        dA, dA_t, D, D_t, dq_in, dk_in, state_row = sums_over_steps(step, S_tiles, dS_tiles, place, V, STEPS, DG, HALF, L)
        of_M, of_levels = store_weights(dA, dA_t, memory.M, largest, scale, HALF, L)
    else:
        v = memory.v
        o = memory.dO
        dA = warpgroup_mma(o, v.permute((1, 0)), gl.zeros([C, C], gl.float32, L.square), use_acc=False, is_async=True)
        dA_t = warpgroup_mma(v, o.permute((1, 0)), gl.zeros([C, C], gl.float32, L.square), use_acc=False, is_async=True)
        dA, dA_t = warpgroup_mma_wait(0, [dA, dA_t])
        of_M, of_levels = store_weights(dA, dA_t, memory.M, largest, scale, HALF, L)
        zero = gl.zeros([C // ROWS, ROWS, ROWS], gl.float32, L.block)
        D = mma_v2(blocks(o, L.block_left, False), blocks(v, L.block_right, True), zero)
        D_t = mma_v2(blocks(v, L.block_left, False), blocks(o, L.block_right, True), zero)
    a = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L.block)))[None, :, None]
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, L.block)))[None, None, :]
    near = gl.convert_layout((gl.where(a > b, D, D_t) * of_M).to(kind), L.block_left)
    memory.e.store(gl.reshape(gl.sum(gl.where(a == b, D, 0.0), 2), [C]) * scale)
    if STEPS > 0:
        if DG:
            memory.row.store(state_row)
    else:
        if not HALF:
            mbarrier.wait(bar, 0)
        dq_in = warpgroup_mma(memory.dO, S.permute((1, 0)), gl.zeros([C, K], gl.float32, L.mma), use_acc=False, is_async=True)
        dk_in = warpgroup_mma(memory.v, dS.permute((1, 0)), gl.zeros([C, K], gl.float32, L.mma), use_acc=False, is_async=True)
        dq_in, dk_in = warpgroup_mma_wait(0, [dq_in, dk_in])
        if HALF:
            dq_in *= of_S
            dk_in *= of_dS
    if HALF:
        down, of_q = powers_of_two(most(dq_in))
        dq_in *= down
        of_q *= scale
        down, of_k = powers_of_two(most(dk_in))
        dk_in *= down
        of_levels *= scale
    else:
        dq_in *= scale
    meet()
    memory.v.store(dq_in.to(kind))
    memory.dk.store(dk_in.to(kind))
    if DG and not (HALF or STEPS > 0):
        memory.row.store(gl.sum(S.load(L.rows).to(gl.float32) * dS.load(L.rows).to(gl.float32), 1))
    return near, of_levels, of_q, of_k
