"""Kernels of RWKV-7 between its linear maps and its recurrence."""

import triton
import triton.language as tl

from .few_rows import begin

LEAST = tl.constexpr(1e-12)  # of the norm of a removal key


@triton.jit
def _loaded(x, at, here):
    return tl.load(x + at, here, other=0.0).to(tl.float32)


@triton.jit
def _learned(x, h, n, N):
    """The parameters of a head [1,BN]."""
    return tl.load(x + h * N + n, n < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def removal_key(k, k_k):
    """The normalised removal keys of heads k [BR,BN], and the norm [BR,1], at least LEAST. Keeps NaN."""
    key = k * k_k
    norm = tl.sqrt(tl.sum(key * key, 1))[:, None]
    norm = tl.where(norm < LEAST, LEAST, norm)
    return key / norm, norm


@triton.jit(do_not_specialize=["R"])
def penstock_rwkv7_inputs_fwd(
    r, k, v, w, rate, mix, first,  # [R,H,N]
    k_k, k_a, r_k, w0, a0, v0,  # [H,N]
    raw,  # [R,H,N] float32
    key, a, b, values,  # [R,H,N]
    share,  # [R,H] float32
    R, H, N,
    MIX: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """raw = w0 + w, lr = sigmoid(a0 + rate), kk = normalised(k k_k), key = k (1 + (lr - 1) k_a), a = -kk, b = kk lr, share = rowsum(r key
    r_k). MIX: values = v + (first - v) sigmoid(v0 + mix).

    Reads r, k, v, w, rate, mix, first [R,H,N], parameters [H,N]. Writes raw, key, a, b, values [R,H,N], share [R,H]. Program (BR tokens,
    head).
    """
    h = tl.program_id(1)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    n = tl.arange(0, BN)
    live = row < R
    here = live[:, None] & (n < N)[None, :]
    row = row.to(tl.int64) * H + h
    at = row[:, None] * N + n[None, :]
    begin(PDL)
    kt = _loaded(k, at, here)
    wt = _loaded(w, at, here)
    lt = _loaded(rate, at, here)
    rt = _loaded(r, at, here)
    if MIX:
        vt = _loaded(v, at, here)
        mt = _loaded(mix, at, here)
        old = _loaded(first, at, here)
    tl.store(raw + at, wt + _learned(w0, h, n, N), here)
    kk, _ = removal_key(kt, _learned(k_k, h, n, N))
    z = lt + _learned(a0, h, n, N)
    kt *= 1 - tl.sigmoid(-z) * _learned(k_a, h, n, N)
    tl.store(key + at, kt.to(key.dtype.element_ty), here)
    tl.store(a + at, (-kk).to(a.dtype.element_ty), here)
    tl.store(b + at, (kk * tl.sigmoid(z)).to(b.dtype.element_ty), here)
    tl.store(share + row, tl.sum(rt * kt * _learned(r_k, h, n, N), 1), live)
    if MIX:
        vt += (old - vt) * tl.sigmoid(mt + _learned(v0, h, n, N))
        tl.store(values + at, vt.to(values.dtype.element_ty), here)


@triton.jit(do_not_specialize=["R", "each"])
def penstock_rwkv7_inputs_bwd(
    r, k, v, rate, mix, first,  # [R,H,N]
    k_k, k_a, r_k, a0, v0,  # [H,N]
    d_r, d_raw, d_key, d_a, d_b, d_share, d_values, d_more,  # of the results; d_more is a further one of values
    dr, dk, dv, dw, d_rate, d_mix, d_first,  # [R,H,N]
    parts,  # [programs,5,H,N] float32, with MIX [programs,6,H,N]: sums over the tokens of a program, of k_k, k_a, r_k, w0, a0 and v0
    R, H, N, each,
    MIX: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of ``penstock_rwkv7_inputs_fwd``. The norm is differentiated as kk = key / norm; below LEAST it is constant.

    Reads r, k, v, rate, mix, first, d_r, d_raw, d_key, d_a, d_b, d_values, d_more [R,H,N], d_share [R,H], parameters [H,N]. Writes dr, dk,
    dv, dw, d_rate, d_mix, d_first [R,H,N], parts. A program has ``each`` blocks of BR tokens of one head.
    """
    p, h = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, BN)
    removal, strength = _learned(k_k, h, n, N), _learned(k_a, h, n, N)
    bonus, base = _learned(r_k, h, n, N), _learned(a0, h, n, N)
    if MIX:
        mixing = _learned(v0, h, n, N)
    of_k_k = tl.zeros([BR, BN], tl.float32)  # reduced over rows after the loop: no barriers inside
    of_k_a = tl.zeros([BR, BN], tl.float32)
    of_r_k = tl.zeros([BR, BN], tl.float32)
    of_w0 = tl.zeros([BR, BN], tl.float32)
    of_a0 = tl.zeros([BR, BN], tl.float32)
    of_v0 = tl.zeros([BR, BN], tl.float32)
    for block in range(each):
        row = (p * each + block) * BR + tl.arange(0, BR)
        live = row < R
        here = live[:, None] & (n < N)[None, :]
        row = row.to(tl.int64) * H + h
        at = row[:, None] * N + n[None, :]
        kt = _loaded(k, at, here)  # all loads are in flight before the first store, which later loads would wait for
        rt = _loaded(r, at, here)
        z = _loaded(rate, at, here)
        back = _loaded(d_key, at, here)
        of_unit = _loaded(d_a, at, here)
        db = _loaded(d_b, at, here)
        of_share = tl.load(d_share + row, live, other=0.0)[:, None]
        dw_ = _loaded(d_raw, at, here)
        dr_ = _loaded(d_r, at, here)
        if MIX:
            dv_ = _loaded(d_values, at, here)
            further = _loaded(d_more, at, here)
            mt = _loaded(mix, at, here)
            old = _loaded(first, at, here)
            vt = _loaded(v, at, here)
        of_w0 += dw_
        tl.store(dw + at, dw_.to(dw.dtype.element_ty), here)
        kk, norm = removal_key(kt, removal)
        z += base
        lr, rest = tl.sigmoid(z), tl.sigmoid(-z)
        factor = 1 - rest * strength
        key = kt * factor
        of_r_k += of_share * rt * key
        tl.store(dr + at, (dr_ + of_share * key * bonus).to(dr.dtype.element_ty), here)
        back += of_share * rt * bonus
        of_k_a -= back * kt * rest
        dz = (db * kk + back * kt * strength) * lr * rest
        of_a0 += dz
        tl.store(d_rate + at, dz.to(d_rate.dtype.element_ty), here)
        of_unit = db * lr - of_unit
        along = tl.sum(of_unit * kk, 1)[:, None]
        of_unit = (of_unit - tl.where(norm > LEAST, along, 0.0) * kk) / norm
        of_k_k += of_unit * kt
        tl.store(dk + at, (back * factor + of_unit * removal).to(dk.dtype.element_ty), here)
        if MIX:
            z = mt + mixing
            d = dv_ + further
            weight, rest = tl.sigmoid(z), tl.sigmoid(-z)
            tl.store(dv + at, (d * rest).to(dv.dtype.element_ty), here)
            tl.store(d_first + at, (d * weight).to(d_first.dtype.element_ty), here)
            dz = d * (old - vt) * weight * rest
            of_v0 += dz
            tl.store(d_mix + at, dz.to(d_mix.dtype.element_ty), here)
    C = H * N
    to = parts + p.to(tl.int64) * (5 + MIX) * C + h * N + n
    tl.store(to, tl.sum(of_k_k, 0), n < N)
    tl.store(to + C, tl.sum(of_k_a, 0), n < N)
    tl.store(to + 2 * C, tl.sum(of_r_k, 0), n < N)
    tl.store(to + 3 * C, tl.sum(of_w0, 0), n < N)
    tl.store(to + 4 * C, tl.sum(of_a0, 0), n < N)
    if MIX:
        tl.store(to + 5 * C, tl.sum(of_v0, 0), n < N)
