"""Kernels of norms of heads times a gate."""

import triton
import triton.language as tl

from .few_rows import begin
from .gates import SIGMOID, SILU, normed, normed_back


@triton.jit
def _activated(z, ACTIVATION: tl.constexpr):
    """The gate and its derivative; without an activation, z and 1."""
    if ACTIVATION == SILU:
        share = tl.sigmoid(z)
        gate, slope = z * share, share * (1 + z * (1 - share))
    elif ACTIVATION == SIGMOID:
        gate = tl.sigmoid(z)
        slope = gate * tl.sigmoid(-z)  # 1 - gate would lose digits where the gate is near 1
    else:
        gate, slope = z, 1.0
    return gate, slope


@triton.jit(do_not_specialize=["R"])
def penstock_norm_gate_fwd(
    x,  # [R,H,V]
    gate,  # [R,H,V]
    weight, bias,  # [H,V], or with ``h_step`` = 0 [V]
    share,  # [R,H] float32
    values,  # [R,H,V]
    y,  # [R,H,V]
    R, H, V, h_step, eps,
    CENTRE: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ADD: tl.constexpr, BR: tl.constexpr,
    BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = norm(x) activation(gate), with ADD (norm(x) + share values) activation(gate).

    The norm is over V: with ``CENTRE`` a layer norm, else an RMS norm.

    Reads x, gate, values [R,H,V], share [R,H], weight, bias [H,V] or [V]. Writes y [R,H,V]. Program (BR tokens, head).
    """
    h = tl.program_id(1)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    v = tl.arange(0, BV)
    here = (r < R)[:, None] & (v < V)[None, :]
    row = r.to(tl.int64) * H + h
    at = row[:, None] * V + v[None, :]
    begin(PDL)
    rows, _ = normed(x, at, here, v, V, eps, CENTRE)
    if AFFINE:
        rows *= tl.load(weight + h * h_step + v, v < V, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        rows += tl.load(bias + h * h_step + v, v < V, other=0.0).to(tl.float32)[None, :]
    if ADD:
        rows += tl.load(share + row, r < R, other=0.0)[:, None] * tl.load(values + at, here, other=0.0).to(tl.float32)
    factor, _ = _activated(tl.load(gate + at, here, other=0.0).to(tl.float32), ACTIVATION)
    tl.store(y + at, (rows * factor).to(y.dtype.element_ty), here)


@triton.jit(do_not_specialize=["R", "each"])
def penstock_norm_gate_bwd(
    x, gate, weight, bias, share, values,
    dy,  # [R,H,V]
    dx, dgate,  # [R,H,V]
    dshare,  # [R,H] float32
    dvalues,  # [R,H,V]
    dweight, dbias,  # [programs,H,V] float32, sums over the tokens of a program
    y,  # [R,H,V]
    R, H, V, h_step, eps, each,
    CENTRE: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ADD: tl.constexpr, AGAIN: tl.constexpr,
    BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dx = norm'(x) d with d = dy activation(gate), dgate = dy norm(x) activation'(gate). AGAIN: y of the forward pass is stored, too.

    ADD: share values is added to the norm, dshare = rowsum(d values), dvalues = d share.

    Reads x, gate, values, dy [R,H,V], share [R,H], weight, bias [H,V] or [V]. Writes dx, dgate, dvalues, y [R,H,V], dshare [R,H], dweight,
    dbias [programs,H,V]. A program has ``each`` blocks of BR tokens of one head.
    """
    p, h = tl.program_id(0), tl.program_id(1)
    v = tl.arange(0, BV)
    w = tl.full([BV], 1.0, tl.float32)
    b = tl.zeros([BV], tl.float32)
    if AFFINE:
        w = tl.load(weight + h * h_step + v, v < V, other=0.0).to(tl.float32)
    if BIAS:
        b = tl.load(bias + h * h_step + v, v < V, other=0.0).to(tl.float32)
    dw = tl.zeros([BR, BV], tl.float32)  # reduced over rows after the loop: no barriers inside
    db = tl.zeros([BR, BV], tl.float32)
    for block in range(each):
        r = (p * each + block) * BR + tl.arange(0, BR)
        here = (r < R)[:, None] & (v < V)[None, :]
        row = r.to(tl.int64) * H + h
        at = row[:, None] * V + v[None, :]
        z = tl.load(gate + at, here, other=0.0).to(tl.float32)  # all loads are in flight before the first sum
        d = tl.load(dy + at, here, other=0.0).to(tl.float32)
        if ADD:
            others = tl.load(values + at, here, other=0.0).to(tl.float32)
            bonus = tl.load(share + row, r < R, other=0.0)[:, None]
        rows, scale = normed(x, at, here, v, V, eps, CENTRE)
        factor, slope = _activated(z, ACTIVATION)
        scaled = rows * w[None, :] + b[None, :]
        if ADD:
            scaled += bonus * others
        if AGAIN:
            tl.store(y + at, (scaled * factor).to(y.dtype.element_ty), here)
        tl.store(dgate + at, (d * scaled * slope).to(dgate.dtype.element_ty), here)
        d *= factor
        if ADD:
            tl.store(dvalues + at, (d * bonus).to(dvalues.dtype.element_ty), here)
            tl.store(dshare + row, tl.sum(d * others, 1), r < R)
        dw += d * rows
        if BIAS:
            db += d
        back = normed_back(d * w[None, :], rows, scale, V, CENTRE)
        tl.store(dx + at, back.to(dx.dtype.element_ty), here)
    to = (p * H + h).to(tl.int64) * V + v
    if AFFINE:
        tl.store(dweight + to, tl.sum(dw, 0), v < V)
    if BIAS:
        tl.store(dbias + to, tl.sum(db, 0), v < V)
