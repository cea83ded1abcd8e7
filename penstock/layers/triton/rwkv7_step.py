"""The kernel of a decode step between the linear maps of RWKV-7's time mix: keys, decay, recurrence, norm of heads, bonus and gate.

The state of a head stays in registers. All sums are sums of two halves and no multiply-adds are fused, as in the kernel of updates in
place: bits do not depend on the number of warps, which is chosen by the number of rows.
"""

import triton
import triton.language as tl

from ...gpu.decays import CHANNEL, decayed, exp
from ...gpu.tiles import after_loads, sum_of_rows
from ...tokens import decays
from .few_rows import begin, prefetch
from .rwkv7 import LEAST

FASTEST = tl.constexpr(decays.FASTEST)


@triton.jit(do_not_specialize=["P"])
def penstock_rwkv7_step(
    r, k, w, rate, v, mix, first, gate,  # [R,H,N]
    k_k, k_a, r_k, w0, a0, v0,  # [H,N]
    weight, shift,  # [H,N]
    pool, slots,  # [P,H,N,N] by strides; [R]
    y,  # [R,H,N]
    P, H, s_p, s_h, s_k, s_v, eps,
    N: tl.constexpr, BN: tl.constexpr, MIX: tl.constexpr, SLOTS: tl.constexpr, DENSE: tl.constexpr, WARPS: tl.constexpr,
    PDL: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """What ``penstock_rwkv7_inputs_fwd`` computes, S <- exp(g) o S + b^T (a S) + key^T values, y = (norm(r S) + share values) gate.

    Reads r, k, w, rate, v, mix, first, gate [R,H,N], parameters [H,N]. Writes y [R,H,N] and rows of pool [P,H,N,N]. Program (row, head).
    For a negative slot, y is 0 and no row changes. DENSE: the state of a head is contiguous and aligned to 16 bytes.

    Only parameters are loaded before ``begin``, and the slot and state are prefetched, as in ``penstock_rwkv_step``.
    """
    h = tl.program_id(0) % H
    n = (tl.program_id(0) // H).to(tl.int64)
    i = tl.arange(0, BN)
    there = i < N
    own = h * N + i
    removal = tl.load(k_k + own, there, other=0.0)
    strength = tl.load(k_a + own, there, other=0.0)
    bonus = tl.load(r_k + own, there, other=0.0)
    decay = tl.load(w0 + own, there, other=0.0)
    base = tl.load(a0 + own, there, other=0.0)
    scale = tl.load(weight + own, there, other=0.0)
    offset = tl.load(shift + own, there, other=0.0)
    if MIX:
        share = tl.load(v0 + own, there, other=0.0)
    slot = n
    if PDL and DENSE:
        if SLOTS:
            slot = tl.minimum(tl.maximum(tl.load(slots + n).to(tl.int64), 0), P - 1)
        prefetch(pool + slot * s_p + h.to(tl.int64) * s_h, slot * 0, N * N, N * N, WARPS, PDL)
    begin(PDL)
    if SLOTS:
        slot = tl.load(slots + n, volatile=PDL).to(tl.int64)  # reload: the value may be older than ``begin``
    at = (n * H + h) * N + i
    if slot < 0:
        tl.store(y + at, tl.zeros([BN], y.dtype.element_ty), there)
        return
    state = pool + slot * s_p + h.to(tl.int64) * s_h
    if DENSE:
        state += i[:, None] * N + i[None, :]
    else:
        state += i[:, None].to(tl.int64) * s_k + i[None, :].to(tl.int64) * s_v
    inside = there[:, None] & there[None, :]
    S = tl.load(state, inside, other=0.0, cache_modifier=".cg")
    kt = tl.load(k + at, there, other=0.0)
    lt = tl.load(rate + at, there, other=0.0)
    wt = tl.load(w + at, there, other=0.0)
    rt = tl.load(r + at, there, other=0.0)
    vt = tl.load(v + at, there, other=0.0)
    z = tl.load(gate + at, there, other=0.0)
    if MIX:
        mt = tl.load(mix + at, there, other=0.0)
        old = tl.load(first + at, there, other=0.0)
        old = after_loads(old, CUDA)
        mt = after_loads(mt, CUDA) + share.to(tl.float32)
    kt = after_loads(kt, CUDA)
    lt = after_loads(lt, CUDA) + base.to(tl.float32)
    wt = after_loads(wt, CUDA) + decay.to(tl.float32)
    rt = after_loads(rt, CUDA)
    vt = after_loads(vt, CUDA)
    z = after_loads(z, CUDA)
    if MIX:
        vt += (old - vt) * tl.sigmoid(mt)
    g = FASTEST * tl.sigmoid(wt)
    kk = kt * removal.to(tl.float32)
    norm = tl.sqrt(sum_of_rows((kk * kk)[:, None]))
    kk = kk / tl.where(norm < LEAST, LEAST, norm)  # keeps NaN
    kt *= 1 - tl.sigmoid(-lt) * strength.to(tl.float32)
    b = kk * tl.sigmoid(lt)
    late = sum_of_rows((rt * kt)[:, None])
    early = sum_of_rows((rt * b)[:, None])
    added = sum_of_rows((rt * kt * bonus.to(tl.float32))[:, None]) * vt
    S = S.to(tl.float32)  # the first use: the code above does not wait for the state
    removed = -sum_of_rows(kk[:, None] * S)
    o = sum_of_rows((rt * exp(g))[:, None] * S) + early * removed + late * vt
    S = decayed(S, g, CHANNEL) + b[:, None] * removed[None, :] + kt[:, None] * vt[None, :]
    tl.store(state, S.to(pool.dtype.element_ty), inside)
    o = tl.where(there, o, 0.0)
    o = tl.where(there, o - sum_of_rows(o[:, None]) / N, 0.0)
    o *= tl.rsqrt(sum_of_rows((o * o)[:, None]) / N + eps)
    o = o * scale.to(tl.float32) + offset.to(tl.float32)
    tl.store(y + at, ((o + added) * z).to(y.dtype.element_ty), there)
