"""The kernel of a decode step between the linear maps of an RWKV time mix: decay, recurrence, norm of heads and gate.

Three kernels in one: the state of a head stays in registers, so neither decays nor the output of the recurrence are stored. All sums are
sums of two halves and no multiply-adds are fused, as in the kernel of updates in place. So the bits do not depend on the number of warps,
which is chosen by the number of rows. The state is bitwise equal to that of updates in place with the same decays.
"""

import triton
import triton.language as tl

from ...gpu.decays import CHANNEL, FLOOR, decayed
from ...gpu.tiles import after_loads, sum_of_rows
from .few_rows import begin, prefetch
from .token_shift import tanh


@triton.jit(do_not_specialize=["P"])
def penstock_rwkv_step(
    low,  # [R,M]
    up,  # [M,H,K]
    bias, u,  # [H,K] by strides
    r, k,  # [R,H,K]
    v, gate,  # [R,H,V]
    pool, slots,  # [P,H,K,V] by strides; [R]
    weight, shift,  # [H,V]
    y,  # [R,H,V]
    normed, lasts,  # [C]; [P,C], row stride ``l_p``
    P, H, b_h, b_k, u_h, u_k, s_p, s_h, s_k, s_v, l_p, C, eps,
    K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, LOW_RANK: tl.constexpr,
    SLOTS: tl.constexpr, LASTS: tl.constexpr, BC: tl.constexpr, DENSE: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
    CUDA: tl.constexpr,
):  # fmt: skip
    """w = -exp(bias + tanh(low) up), S <- exp(w) o S + k^T v, o = r (S + u o k^T v) of the old S, y = norm(o) silu(gate).

    Reads low [R,M], up [M,H,K], bias, u [H,K], r, k [R,H,K], v, gate [R,H,V]. Writes y [R,H,V] and rows of pool [P,H,K,V]. Program (row,
    head). Without LOW_RANK, w = -exp(bias).

    LASTS, for one row: ``normed`` replaces the row of ``lasts``, BC columns per program. For a negative slot, y is 0 and no row of a pool
    changes. DENSE: the state of a head is contiguous and aligned to 16 bytes.

    Only weights are loaded before ``begin``: no kernel of a graph writes them. The state must not be: an earlier step in the same graph
    writes it, and if all kernels between start early, none has waited for that step. A prefetch to the L2 cache is safe, because later
    writes update the cache. A prefetch with a stale slot is safe, too, because it is limited to rows of the pool.
    """
    h = tl.program_id(0) % H
    n = (tl.program_id(0) // H).to(tl.int64)
    dk = tl.arange(0, BK)
    dv = tl.arange(0, BV)
    there = dk < K
    mine = dv < V
    log = tl.load(bias + h * b_h + dk * b_k, there, other=0.0)
    bonus = tl.load(u + h * u_h + dk * u_k, there, other=0.0)
    scale = tl.load(weight + h * V + dv, mine, other=0.0)
    offset = tl.load(shift + h * V + dv, mine, other=0.0)
    if LOW_RANK:
        m = tl.arange(0, BM)
        high = tl.load(up + (m[:, None] * H + h) * K + dk[None, :], (m < M)[:, None] & there[None, :], other=0.0)
    slot = n
    if PDL and DENSE:
        if SLOTS:
            slot = tl.minimum(tl.maximum(tl.load(slots + n).to(tl.int64), 0), P - 1)
        prefetch(pool + slot * s_p + h.to(tl.int64) * s_h, slot * 0, K * V, K * V, WARPS, PDL)
    begin(PDL)
    if SLOTS:
        slot = tl.load(slots + n, volatile=PDL).to(tl.int64)  # reload: the value may be older than ``begin``
    head = n * H + h
    if slot < 0:
        tl.store(y + head * V + dv, tl.zeros([BV], y.dtype.element_ty), mine)
        return
    state = pool + slot * s_p + h.to(tl.int64) * s_h
    if DENSE:
        state += dk[:, None] * V + dv[None, :]
    else:
        state += dk[:, None].to(tl.int64) * s_k + dv[None, :].to(tl.int64) * s_v
    inside = there[:, None] & mine[None, :]
    S = tl.load(state, inside, other=0.0, cache_modifier=".cg")  # read once, so L1 keeps ``up``
    if LOW_RANK:
        hidden = tl.load(low + n * M + m, m < M, other=0.0)
    rt = tl.load(r + head * K + dk, there, other=0.0)
    kt = tl.load(k + head * K + dk, there, other=0.0)
    vt = tl.load(v + head * V + dv, mine, other=0.0)
    z = tl.load(gate + head * V + dv, mine, other=0.0)
    if LASTS:
        c = h * BC + tl.arange(0, BC)
        last = tl.load(normed + c, c < C, other=0.0)
    log = after_loads(log, CUDA)
    bonus = after_loads(bonus, CUDA)
    rt = after_loads(rt, CUDA)
    kt = after_loads(kt, CUDA)
    vt = after_loads(vt, CUDA)
    z = after_loads(z, CUDA)
    own = sum_of_rows((rt * bonus * kt)[:, None])
    if LOW_RANK:
        hidden = tanh(after_loads(hidden, CUDA))
        log += sum_of_rows(hidden[:, None] * high.to(tl.float32))
    w = -tl.exp(log)
    w = tl.where(w < FLOOR, FLOOR, w)  # keeps NaN
    S = S.to(tl.float32)  # the first use: the code above does not wait for the state
    o = sum_of_rows(rt[:, None] * S) + own * vt
    S = decayed(S, w, CHANNEL) + kt[:, None] * vt[None, :]
    tl.store(state, S.to(pool.dtype.element_ty), inside)
    if LASTS:
        tl.store(lasts + slot * l_p + c, last.to(lasts.dtype.element_ty), c < C)
    o = tl.where(mine, o, 0.0)
    o = tl.where(mine, o - sum_of_rows(o[:, None]) / V, 0.0)
    o *= tl.rsqrt(sum_of_rows((o * o)[:, None]) / V + eps)
    o = o * scale.to(tl.float32) + offset.to(tl.float32)
    tl.store(y + head * V + dv, (o * z * tl.sigmoid(z)).to(y.dtype.element_ty), mine)
