"""The chunkwise backward kernel for Hopper, in Gluon: decays per channel, bfloat16 products, chunks of 64 tokens, K = V = 64 or 128.

The formulas and the meaning of what is written are those of ``chunk_backward``'s first launch, which this stands in for: one program
per chunk and head, between the state S before the chunk and the state's gradient dS behind it. It differs in how it keeps things:

- Tiles come by TMA, all that fit at once; at K = 128 dS follows S into the same memory, so that two programs share a multiprocessor.
- qt and kt overwrite q and k; all products read shared memory, and none waits for registers.
- Sums over tokens are taken in registers, by threads that each hold 16 tokens of two channels. What comes out of products goes to that
  layout through memory that is free by then, and the factors are made once more there, from decays read again: registers are scarce.
- dg's sums take q dq and k dk as qt dqt and kt dkt with the rounded qt and kt, as products had them: what cancels there cancels exactly.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ...gpu.hopper_tiles import exp2, meet, others, plus, zeroed_behind
from ...gpu.tiles import LOG2E, span_of
from .tiles import FLOOR, SUITS

GROUPS = gl.constexpr(4)  # of tokens, which sum by themselves first


@gluon.jit
def grouped(x, lay3: gl.constexpr):
    """[C, K] as [GROUPS, C / GROUPS, K]: the same registers."""
    GROUP: gl.constexpr = x.shape[0] // GROUPS
    return gl.convert_layout(gl.reshape(x, [GROUPS, GROUP, x.shape[1]]), lay3, assert_trivial=True)


@gluon.jit
def spread(x, lay: gl.constexpr, C: gl.constexpr):
    """[GROUPS, K] to all tokens of a group: [C, K]."""
    K: gl.constexpr = x.shape[1]
    x3 = gl.expand_dims(x, 1).broadcast_to([GROUPS, C // GROUPS, K])
    return gl.convert_layout(gl.reshape(x3, [C, K]), lay, assert_trivial=True)


@gluon.jit
def ungrouped(x3, lay: gl.constexpr):
    """The inverse of ``grouped``."""
    return gl.convert_layout(gl.reshape(x3, [x3.shape[0] * x3.shape[1], x3.shape[2]]), lay, assert_trivial=True)


@gluon.jit
def row_sums(x, memory, PARTS: gl.constexpr, to: gl.constexpr):
    """[C] of [C, N], whose columns PARTS warps share, by way of ``memory`` [PARTS C]."""
    C: gl.constexpr = x.shape[0]
    y = gl.sum(gl.reshape(x, [C, PARTS, x.shape[1] // PARTS]), 2)
    memory.store(gl.reshape(gl.permute(y, (1, 0)), [PARTS * C]))
    total = memory.slice(0, C).load(to)
    for n in gl.static_range(1, PARTS):
        total += memory.slice(n * C, C).load(to)
    return total


@gluon.jit
def state_rows(base, S, begin: gl.constexpr, lay: gl.constexpr, HERE: gl.constexpr):
    """Half of a state's rows, from shared memory if it is still HERE."""
    K: gl.constexpr = S.shape[1]
    ROWS: gl.constexpr = K // 2
    if HERE:
        X = S.slice(begin, ROWS).load(lay)
    else:
        WAVE: gl.constexpr = gl.num_warps() * 256 // K  # rows that all threads together hold at a time
        i = gl.arange(0, ROWS, gl.SliceLayout(1, lay))[:, None]
        j = gl.arange(0, K, gl.SliceLayout(0, lay))[None, :]
        X = gl.load(base + (i % WAVE * K + j) + (i // WAVE * (WAVE * K) + begin * K))
    return X


@gluon.jit
def scale_rows(dS, X, before, behind, begin: gl.constexpr, lay: gl.constexpr, DG: gl.constexpr):
    """Half of dS times ``behind`` in place; if DG, ``before`` times rowsum(X o that) in place of ``before``."""
    ROWS: gl.constexpr = dS.shape[0] // 2
    row: gl.constexpr = gl.SliceLayout(1, lay)
    half = dS.slice(begin, ROWS)
    D = half.load(lay).to(gl.float32) * behind.slice(begin, ROWS).load(row).to(gl.float32)[:, None]
    half.store(D.to(gl.bfloat16))
    if DG:
        factor = before.slice(begin, ROWS)
        factor.store(gl.sum(X.to(gl.float32) * D, 1) * factor.load(row))


@gluon.jit(do_not_specialize=["N", "T"])
def penstock_chunk_bwd_hopper(
    q_tiles, k_tiles, v_tiles, o_tiles, S_tiles, dS_tiles, q, k, g, u, chunk_states, dq, dk, dv, dg, du, todo, cu_seqlens, scale, N, T,
    g_b, g_h, u_h, u_k,
    q_t: gl.constexpr, k_t: gl.constexpr, g_t: gl.constexpr, g_k: gl.constexpr,
    H: gl.constexpr, K: gl.constexpr, C: gl.constexpr, DG: gl.constexpr, PREVIOUS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Program (chunk slot, head). Tiles: tokens [B T, H K] in tiles of [C, K], states [slots H K, K] of [K, K].

    q and k are [B T, H, K] with token strides q_t and k_t; dq, dk, dv, dg are contiguous; du is [slots, H, K]; ``todo`` [programs].
    """
    NW: gl.constexpr = gl.num_warps()
    BOTH: gl.constexpr = 1 if K <= 64 else 0  # S and dS are in shared memory together
    WC: gl.constexpr = NW // 4
    GROUP: gl.constexpr = C // GROUPS
    lay: gl.constexpr = gl.BlockedLayout([GROUP, 2], [1, 32], [GROUPS, NW // GROUPS], [1, 0])
    lay3: gl.constexpr = gl.BlockedLayout([1, GROUP, 2], [1, 1, 32], [GROUPS, 1, NW // GROUPS], [2, 1, 0])
    row: gl.constexpr = gl.SliceLayout(1, lay3)  # [GROUPS, K]
    lay_s: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [NW, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WC], [16, K // WC, 16])
    mma_a: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WC], [16, C // WC, 16])
    rows_a: gl.constexpr = gl.SliceLayout(1, mma_a)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    full: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flat2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    pid = gl.program_id(0)
    h = (pid % H).to(gl.int64)
    slot = pid // H
    n, begin, end, done = span_of(slot, cu_seqlens, N, T, C, PACKED)
    tokens = gl.minimum(end - begin - done, C).to(gl.int32)
    d = gl.arange(0, K, gl.SliceLayout(0, lay))
    d = gl.max_contiguous(gl.multiple_of(d, 2), 2)
    per_chunk = pid.to(gl.int64) * K
    if tokens <= 0:
        if PREVIOUS:
            gl.store(du + per_chunk + d, gl.zeros([K], gl.float32, gl.SliceLayout(0, lay)))
        gl.store(todo + pid, 0)
        return
    b = n.to(gl.int64)
    if PACKED:
        b = b * 0
    token = b * T + begin + done
    place = (token * H + h) * K
    i = gl.arange(0, C, gl.SliceLayout(1, lay))
    live = (i < tokens)[:, None]
    far = (i & -GROUP).to(gl.int64)[:, None]  # a thread's first token; its others are constant distances from there, and need no address
    near = (i & (GROUP - 1)).to(gl.int64)[:, None]
    at = place + (far * (H * K) + d[None, :])
    step = near * (H * K)
    g += b * g_b + (begin + done) * g_t + h * g_h

    Q = gl.allocate_shared_memory(gl.bfloat16, [C, K], half)
    Kt = gl.allocate_shared_memory(gl.bfloat16, [C, K], half)
    VO = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], half)
    states = gl.allocate_shared_memory(gl.bfloat16, [1 + BOTH, K, K], half)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], half)
    before_s = gl.allocate_shared_memory(gl.float32, [K], flat)
    behind_s = gl.allocate_shared_memory(gl.bfloat16, [K], flat)  # powers of two
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    V = VO.index(0)
    O = VO.index(1)
    S = states.index(0)
    dS = states.index(BOTH)
    A_s = weights.index(0)
    dA_s = weights.index(1)
    part = A_s._reinterpret(gl.float32, [C * C // (2 * K), K], flat2).slice(0, GROUPS)
    own_s = A_s._reinterpret(gl.float32, [C * C // 2], flat).slice(0, WC * C)
    e_s = dA_s._reinterpret(gl.float32, [C * C // 2], flat).slice(0, C)
    carry_s = dA_s._reinterpret(gl.float32, [C * C // (2 * K), K], flat2).slice(0, GROUPS)
    for n_bar in gl.static_range(3):
        mbarrier.init(bars.index(n_bar), count=1)
    fence_async_shared()
    meet()
    line = token.to(gl.int32)
    column = (h * K).to(gl.int32)
    state = pid * K
    bar = bars.index(0)
    mbarrier.expect(bar, 2 * q_tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(q_tiles, [line, column], bar, Q)
    tma.async_copy_global_to_shared(k_tiles, [line, column], bar, Kt)
    bar = bars.index(1)
    mbarrier.expect(bar, 2 * v_tiles.block_type.nbytes + S_tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(o_tiles, [line, column], bar, O)
    tma.async_copy_global_to_shared(v_tiles, [line, column], bar, V)
    tma.async_copy_global_to_shared(S_tiles, [state, 0], bar, S)
    bar = bars.index(2)
    mbarrier.expect(bar, dS_tiles.block_type.nbytes)
    if BOTH:
        tma.async_copy_global_to_shared(dS_tiles, [state, 0], bar, dS)

    # the factors; qt and kt in place of q and k
    x = gl.load(g + (far * g_t + d[None, :] * g_k) + near * g_t, mask=live, other=0.0).to(gl.float32)
    mbarrier.wait(bars.index(0), 0)
    if tokens < C:
        zeroed_behind(Q, tokens, lay)
        zeroed_behind(Kt, tokens, lay)
    own = gl.zeros([C], gl.float32, rows_a)
    if PREVIOUS:
        bonus = gl.load(u + h * u_h + d * u_k).to(gl.float32)[None, :]
        own = row_sums(Q.load(lay).to(gl.float32) * bonus * Kt.load(lay).to(gl.float32), own_s, WC, rows_a) * scale
    part.store(gl.sum(grouped(x, lay3), 1))
    P = gl.associative_scan(grouped(x, lay3), 1, plus)
    total, carry = others(part, row, False)
    total = gl.maximum(total * LOG2E, FLOOR)
    whole = gl.floor(0.5 * total + 0.5)
    M = total - whole
    gl.store(todo + pid, 0)
    before_s.store(gl.sum(exp2(M), 0))
    behind_s.store(gl.sum(exp2(whole), 0).to(gl.bfloat16))
    shift = carry * LOG2E - M
    G = ungrouped(P, lay) * LOG2E + spread(shift, lay, C)
    Gq = G
    if PREVIOUS:
        Gq = G - x * LOG2E
    Q.store((Q.load(lay).to(gl.float32) * (exp2(Gq) * scale)).to(gl.bfloat16))
    Kt.store((Kt.load(lay).to(gl.float32) * exp2(-G)).to(gl.bfloat16))
    mbarrier.wait(bars.index(1), 0)
    if tokens < C:
        zeroed_behind(V, tokens, lay)
        zeroed_behind(O, tokens, lay)
    fence_async_shared()
    meet()
    zero = gl.arange(0, K, gl.SliceLayout(0, row))[None, :] * 0
    gl.store(todo + pid + zero, zero + 1, mask=total < -SUITS)

    # what needs S, and A
    ia = gl.arange(0, C, rows_a)[:, None]
    ja = gl.arange(0, C, gl.SliceLayout(0, mma_a))[None, :]
    dA = warpgroup_mma(O, V.permute((1, 0)), gl.zeros([C, C], gl.float32, mma_a), use_acc=False, is_async=True)
    A = warpgroup_mma(Q, Kt.permute((1, 0)), gl.zeros([C, C], gl.float32, mma_a), use_acc=False, is_async=True)
    dqt = warpgroup_mma(O, S.permute((1, 0)), gl.zeros([C, K], gl.float32, mma), use_acc=False, is_async=True)
    dA, A = warpgroup_mma_wait(1, [dA, A])
    e = gl.zeros([C], gl.float32, rows_a)
    if PREVIOUS:
        e = row_sums(gl.where(ia == ja, dA, 0.0), own_s, WC, rows_a) * scale
        dA_s.store(gl.where(ia > ja, dA, 0.0).to(gl.bfloat16))
        A_s.store(gl.where(ia > ja, A, gl.where(ia == ja, own[:, None], 0.0)).to(gl.bfloat16))
    else:
        dA_s.store(gl.where(ia >= ja, dA, 0.0).to(gl.bfloat16))
        A_s.store(gl.where(ia >= ja, A, 0.0).to(gl.bfloat16))
    dqt = warpgroup_mma_wait(0, [dqt])
    fence_async_shared()
    meet()
    if not BOTH:
        tma.async_copy_global_to_shared(dS_tiles, [state, 0], bars.index(2), dS)
    dqt = dqt * before_s.load(gl.SliceLayout(0, mma))[None, :]
    dqt = warpgroup_mma(dA_s, Kt, dqt, is_async=True)

    # dS o 2^(G_L - M) in place of dS, and rowsum(S o dS)
    chunk_states += per_chunk * K
    upper = S
    lower = S
    if DG:
        upper = state_rows(chunk_states, S, 0, lay_s, BOTH)
        lower = state_rows(chunk_states, S, K // 2, lay_s, BOTH)
    mbarrier.wait(bars.index(2), 0)
    scale_rows(dS, upper, before_s, behind_s, 0, lay_s, DG)
    scale_rows(dS, lower, before_s, behind_s, K // 2, lay_s, DG)
    fence_async_shared()
    meet()
    dkt = warpgroup_mma(V, dS.permute((1, 0)), gl.zeros([C, K], gl.float32, mma), use_acc=False, is_async=True)
    dvt = warpgroup_mma(A_s.permute((1, 0)), O, gl.zeros([C, K], gl.float32, mma), use_acc=False, is_async=True)
    dvt = warpgroup_mma(Kt, dS, dvt, is_async=True)
    dqt, dkt, dvt = warpgroup_mma_wait(0, [dqt, dkt, dvt])
    meet()  # all warps are done with V, dO, A and dS
    row_m = gl.arange(0, C, gl.SliceLayout(1, mma))[:, None]
    column_m = gl.max_contiguous(gl.multiple_of(gl.arange(0, K, gl.SliceLayout(0, mma)), 2), 2)[None, :]
    first_m = (row_m // 16 * 16 + row_m % 8).to(gl.int64) * (H * K) + (column_m // 64 * 64 + column_m % 8)
    step_m = (row_m // 8 % 2).to(gl.int64) * (8 * H * K) + column_m // 8 % 8 * 8
    where = gl.max_contiguous(gl.multiple_of(first_m + step_m, [1, 2]), [1, 2])
    gl.store(dv + place + where, dvt.to(gl.bfloat16), mask=row_m < tokens)
    if DG:
        kept = Kt.load(mma).to(gl.float32) * dkt
        part.store(gl.sum(gl.reshape(kept, [GROUPS, GROUP, K]), 1))
    dkt = warpgroup_mma(dA_s.permute((1, 0)), Q, dkt, is_async=True)
    dqt_s = states._reinterpret(gl.float32, [C, K], full)
    dkt_s = VO._reinterpret(gl.float32, [C, K], full)
    dqt_s.store(dqt)
    dkt = warpgroup_mma_wait(0, [dkt])
    dkt_s.store(dkt)

    # dq, dk, dg: the factors again
    x = gl.load(g + (far * g_t + d[None, :] * g_k) + near * g_t, mask=live, other=0.0).to(gl.float32)
    P = gl.associative_scan(grouped(x, lay3), 1, plus)
    G = ungrouped(P, lay) * LOG2E + spread(shift, lay, C)
    Gq = G
    if PREVIOUS:
        Gq = G - x * LOG2E
    e_ = gl.zeros([C], gl.float32, gl.SliceLayout(1, lay))[:, None]
    if PREVIOUS:
        meet()
        e_s.store(e)
        e_ = e_s.load(gl.SliceLayout(1, lay))[:, None]
        bonus = gl.load(u + h * u_h + d * u_k).to(gl.float32)[None, :]
    dq_ = dqt_s.load(lay)
    qdq = Q.load(lay).to(gl.float32) * dq_
    dq_ = dq_ * (exp2(Gq) * scale)
    if PREVIOUS:
        k0 = gl.load(k + token * k_t + h * K + (far * k_t + d[None, :]) + near * k_t, mask=live, other=0.0)
        dq_ += k0.to(gl.float32) * (e_ * bonus)
    gl.store(dq + at + step, dq_.to(gl.bfloat16), mask=live)
    dk_ = dkt_s.load(lay)
    difference = qdq - Kt.load(lay).to(gl.float32) * dk_
    dk_ = dk_ * exp2(-G)
    if PREVIOUS:
        meet()  # so that the load stays below
        q0 = gl.load(q + token * q_t + h * K + (far * q_t + d[None, :]) + near * q_t, mask=live, other=0.0)
        carry_s.store(gl.sum(grouped(q0.to(gl.float32) * k0.to(gl.float32) * e_, lay3), 1))
        sum_du, _rest = others(carry_s, row, False)
        gl.store(du + per_chunk + gl.arange(0, K, gl.SliceLayout(0, row)), gl.sum(sum_du, 0))
        dk_ = dkt_s.load(lay) * exp2(-G) + q0.to(gl.float32) * (e_ * bonus)
    gl.store(dk + at + step, dk_.to(gl.bfloat16), mask=live)
    if DG:
        if PREVIOUS:
            meet()
            kdk = Kt.load(lay).to(gl.float32) * dkt_s.load(lay)
            difference = Q.load(lay).to(gl.float32) * dqt_s.load(lay) - kdk
        start, _rest = others(part, row, False)
        start += gl.expand_dims(before_s.load(gl.SliceLayout(0, row)), 0)
        diff3 = grouped(difference, lay3)
        carry_s.store(gl.sum(diff3, 1))
        total, later = others(carry_s, row, True)
        own_sum = gl.sum(diff3, 1)
        P = ungrouped(gl.associative_scan(diff3, 1, plus), lay)
        d_gate = spread(start + later + own_sum, lay, C) - P
        if PREVIOUS:
            d_gate -= kdk
        else:
            d_gate += difference
        gl.store(dg + at + step, d_gate.to(dg.dtype.element_ty), mask=live)
