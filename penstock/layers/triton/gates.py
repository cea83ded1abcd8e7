"""Kernels of activations, decays, and norms of tokens."""

import triton
import triton.language as tl

from ...tokens import decays
from .few_rows import summed_norm
from .token_shift import tanh

SIGMOID = tl.constexpr(0)
SILU = tl.constexpr(1)
TANH = tl.constexpr(2)
ELU_PLUS_ONE = tl.constexpr(3)
IDENTITY = tl.constexpr(4)
LARGEST = tl.constexpr(decays.LARGEST)


@triton.jit
def normed(x, at, here, v, V, eps, CENTRE: tl.constexpr):
    """The normed rows, and the reciprocal of their deviation [BR,1]."""
    values = tl.load(x + at, here, other=0.0).to(tl.float32)
    if CENTRE:
        values -= tl.sum(values, 1)[:, None] / V
        values = tl.where((v < V)[None, :], values, 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 1)[:, None] / V + eps)
    return values * scale, scale


@triton.jit
def normed_back(d, normed, scale, V, CENTRE: tl.constexpr):
    """The gradient of the input of ``normed`` from d [BR,BV], the gradient of its result."""
    back = d - normed * (tl.sum(d * normed, 1)[:, None] / V)
    if CENTRE:
        back -= tl.sum(d, 1)[:, None] / V
    return back * scale


@triton.jit
def penstock_add_norm(
    x, y,  # [R,C]
    total,  # [R,C], x + y
    normed,  # [R,C]
    weight, bias,  # [C]
    C, eps,
    ADD: tl.constexpr, CENTRE: tl.constexpr, BIAS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """total = x + y, rounded; normed = norm(total): with ``CENTRE`` a layer norm, else an RMS norm.

    Reads x, y [R,C], weight, bias [C]. Writes total, normed [R,C]. One program per token.
    """
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    here = c < C
    scale = tl.load(weight + c, here, other=0.0)
    offset = tl.load(bias + c, here, other=0.0) if BIAS else scale
    values = summed_norm(x, y, total, scale, offset, r, c, C, eps, ADD, CENTRE, BIAS, True)
    tl.store(normed + r * C + c, values.to(normed.dtype.element_ty), here)


@triton.jit(do_not_specialize=["R", "each"])
def penstock_add_norm_bwd(
    total,  # [R,C]
    weight,  # [C]
    d_total, d_normed,  # [R,C]
    dx,  # [R,C], the gradient of both summands
    dweight, dbias,  # [programs,C] float32, sums over the tokens of a program
    R, C, eps, each,
    ADD: tl.constexpr, CENTRE: tl.constexpr, BIAS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx = d_total + norm'(total) d_normed, dweight = sum_t d_normed_t n_t with n the norm without its weight. ADD: there is a d_total.

    Reads total, d_total, d_normed [R,C], weight [C]. Writes dx [R,C], dweight, dbias [programs,C]. A program has ``each`` blocks of BR
    tokens.
    """
    p = tl.program_id(0)
    c = tl.arange(0, BC)
    w = tl.load(weight + c, c < C, other=0.0).to(tl.float32)
    dw = tl.zeros([BR, BC], tl.float32)
    db = tl.zeros([BR, BC], tl.float32)
    for block in range(each):
        r = (p * each + block) * BR + tl.arange(0, BR)
        here = (r < R)[:, None] & (c < C)[None, :]
        at = r.to(tl.int64)[:, None] * C + c[None, :]
        d = tl.load(d_normed + at, here, other=0.0).to(tl.float32)
        residual = tl.load(d_total + at, here, other=0.0) if ADD else 0.0  # in flight before the first sum, as the other loads
        rows, scale = normed(total, at, here, c, C, eps, CENTRE)
        dw += d * rows
        if BIAS:
            db += d
        back = normed_back(d * w[None, :], rows, scale, C, CENTRE)
        if ADD:
            back += residual.to(tl.float32)
        tl.store(dx + at, back.to(dx.dtype.element_ty), here)
    to = p.to(tl.int64) * C + c
    tl.store(dweight + to, tl.sum(dw, 0), c < C)
    if BIAS:
        tl.store(dbias + to, tl.sum(db, 0), c < C)


@triton.jit
def penstock_gated_fwd(a, b, y, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """y = activation(a) b.

    Reads a, b [size], writes y [size]. A program has BLOCK elements.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    z = tl.load(a + at, here, other=0.0).to(tl.float32)
    share = tl.sigmoid(z)
    if ACTIVATION == SILU:
        share *= z
    tl.store(y + at, (share * tl.load(b + at, here, other=0.0).to(tl.float32)).to(y.dtype.element_ty), here)


@triton.jit
def penstock_gated_bwd(a, b, dy, da, db, size, ACTIVATION: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr):
    """da = activation'(a) b dy, db = activation(a) dy. AGAIN: y = activation(a) b overwrites dy.

    Reads a, b, dy [size], writes da, db [size]. A program has BLOCK elements.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    z = tl.load(a + at, here, other=0.0).to(tl.float32)
    d = tl.load(dy + at, here, other=0.0).to(tl.float32)
    other = tl.load(b + at, here, other=0.0).to(tl.float32)
    share = tl.sigmoid(z)
    slope = share * tl.sigmoid(-z)  # 1 - share would lose digits where share is near 1
    if ACTIVATION == SILU:
        slope = share * (1 + z * (1 - share))
        share *= z
    tl.store(da + at, (d * other * slope).to(da.dtype.element_ty), here)
    tl.store(db + at, (d * share).to(db.dtype.element_ty), here)
    if AGAIN:
        tl.store(dy + at, (share * other).to(dy.dtype.element_ty), here)


@triton.jit
def penstock_pointwise_fwd(x, y, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """y = activation(x).

    Reads x [size], writes y [size]. A program has BLOCK elements.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x + at, at < size, other=0.0).to(tl.float32)
    if ACTIVATION == SIGMOID:
        z = tl.sigmoid(z)
    elif ACTIVATION == TANH:
        z = tanh(z)
    else:
        z = tl.where(z < 0, tl.exp(tl.where(z < 0, z, 0.0)), 1 + z)
    tl.store(y + at, z.to(y.dtype.element_ty), at < size)


@triton.jit
def penstock_pointwise_bwd(x, dy, dx, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """dx = activation'(x) dy, computed from x: from a rounded result near 1 it would be inexact.

    Reads x, dy [size], writes dx [size]. A program has BLOCK elements.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x + at, at < size, other=0.0).to(tl.float32)
    d = tl.load(dy + at, at < size, other=0.0).to(tl.float32)
    if ACTIVATION == SIGMOID:
        share = tl.exp(-tl.abs(z))
        d *= share / ((1 + share) * (1 + share))
    elif ACTIVATION == TANH:
        share = tl.exp(-2 * tl.abs(z))
        d *= 4 * share / ((1 + share) * (1 + share))
    else:
        d *= tl.exp(tl.where(z > 0, 0.0, z))  # keeps NaN
    tl.store(dx + at, d.to(dx.dtype.element_ty), at < size)


@triton.jit
def penstock_relu_squared_fwd(x, y, size, BLOCK: tl.constexpr):
    """y = relu(x)^2.

    Reads x [size], writes y [size]. A program has BLOCK elements.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x + at, at < size, other=0.0).to(tl.float32)
    z = tl.where(z < 0, 0.0, z)  # keeps NaN
    tl.store(y + at, (z * z).to(y.dtype.element_ty), at < size)


@triton.jit
def penstock_relu_squared_bwd(x, dy, dx, size, ROOT: tl.constexpr, BLOCK: tl.constexpr):
    """dx = 2 relu(x) dy. ROOT: x is the result of the forward pass, and relu(x) its square root.

    Reads x, dy [size], writes dx [size]. A program has BLOCK elements.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x + at, at < size, other=0.0).to(tl.float32)
    z = tl.sqrt(z) if ROOT else tl.where(z < 0, 0.0, z)
    tl.store(dx + at, (2 * z * tl.load(dy + at, at < size, other=0.0).to(tl.float32)).to(dx.dtype.element_ty), at < size)


@triton.jit
def limited_exp(x):
    """exp(min(x, LARGEST)). Keeps NaN."""
    return tl.exp(tl.where(x > LARGEST, LARGEST, x))


@triton.jit(do_not_specialize=["R"])
def penstock_decay_fwd(
    x,  # [R,C]
    bias,  # [C]
    w,  # [R,C] float32
    R, C,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """w = -exp(min(bias + x, LARGEST)).

    Reads x [R,C], bias [C], writes w [R,C]. Program (BR tokens, BC channels).
    """
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    here = (r < R)[:, None] & (c < C)[None, :]
    at = r.to(tl.int64)[:, None] * C + c[None, :]
    b = tl.load(bias + c, c < C, other=0.0).to(tl.float32)[None, :]
    tl.store(w + at, -limited_exp(tl.load(x + at, here, other=0.0).to(tl.float32) + b), here)


@triton.jit(do_not_specialize=["R", "each"])
def penstock_decay_bwd(
    x,  # [R,C]
    bias,  # [C]
    dw,  # [R,C] float32
    dx,  # [R,C]
    dbias,  # [programs,C] float32, sums over the tokens of a program
    R, C, each,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx = w dw, 0 where bias + x is above LARGEST, dbias = sum_t dx_t, with w recomputed.

    Reads x, dw [R,C], bias [C]. Writes dx [R,C], dbias [programs,C]. A program has ``each`` blocks of BR tokens and BC channels.
    """
    p = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.load(bias + c, c < C, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([BR, BC], tl.float32)  # reduced over rows after the loop: no barriers inside
    for block in range(each):
        r = (p * each + block) * BR + tl.arange(0, BR)
        here = (r < R)[:, None] & (c < C)[None, :]
        at = r.to(tl.int64)[:, None] * C + c[None, :]
        z = tl.load(x + at, here, other=0.0).to(tl.float32) + b
        d = -limited_exp(z) * tl.load(dw + at, here, other=0.0)
        d = tl.where(z > LARGEST, 0.0, d)
        tl.store(dx + at, d.to(dx.dtype.element_ty), here)
        sums += d
    tl.store(dbias + p.to(tl.int64) * C + c, tl.sum(sums, 0), c < C)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log(1 + y) with y = exp(-abs(x)).

    log(1 + y) = 2 atanh(s), s = y / (2 + y), by its series up to s^15: tl.log is inexact near 1, where results are small.
    """
    y = tl.exp(-tl.abs(x))
    s = y / (2 + y)
    p = s * s
    series = 1 + p * (1 / 3 + p * (1 / 5 + p * (1 / 7 + p * (1 / 9 + p * (1 / 11 + p * (1 / 13 + p / 15))))))
    return tl.where(x > 0, x, 0.0) + 2 * s * series


@triton.jit
def penstock_log_sigmoid_fwd(x, g, size, normalizer, BLOCK: tl.constexpr):
    """g = log(sigmoid(x)) / normalizer.

    Reads x [size], writes g [size] float32. A program has BLOCK elements.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x + at, at < size, other=0.0).to(tl.float32)
    tl.store(g + at, -softplus(-z) / normalizer, at < size)


@triton.jit
def penstock_log_sigmoid_bwd(x, dg, dx, size, normalizer, BLOCK: tl.constexpr):
    """dx = sigmoid(-x) dg / normalizer.

    Reads x, dg [size], writes dx [size]. A program has BLOCK elements.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x + at, at < size, other=0.0).to(tl.float32)
    d = tl.load(dg + at, at < size, other=0.0)
    y = tl.exp(-tl.abs(z))
    tl.store(dx + at, (d * tl.where(z > 0, y, 1.0) / (1 + y) / normalizer).to(dx.dtype.element_ty), at < size)
