"""Kernels of Mamba-2 before and after its recurrence: time steps, and the gated norm of groups of channels."""

import triton
import triton.language as tl

from .few_rows import begin
from .gates import LARGEST, limited_exp, softplus


@triton.jit
def _time_step(dt, dt_bias, A_log, at, h, here, heads):
    """For a tile of tokens and heads: dt + dt_bias, its softplus, and -exp(min(A_log, LARGEST))."""
    raw = tl.load(dt + at, here, other=0.0).to(tl.float32) + tl.load(dt_bias + h, heads, other=0.0).to(tl.float32)
    return raw, softplus(raw), -limited_exp(tl.load(A_log + h, heads, other=0.0).to(tl.float32))


@triton.jit
def _clamped(x, low, high):
    """x limited to [low, high]. Keeps NaN."""
    x = tl.where(x < low, low, x)
    return tl.where(x > high, high, x)


@triton.jit(do_not_specialize=["R"])
def penstock_time_steps_fwd(
    dt,  # [R,H], row stride ``dt_r`` * UNIT
    dt_bias, A_log,  # [H]
    x,  # [R,H,V], row stride ``x_r`` * UNIT
    g,  # [R,H] float32
    v,  # [R,H,V]
    R, H, dt_r, x_r, low, high,
    V: tl.constexpr, UNIT: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """step = clamp(softplus(dt + dt_bias), low, high), g = -exp(min(A_log, LARGEST)) step, v = x step.

    Reads dt [R,H], dt_bias, A_log [H], x [R,H,V]. Writes g [R,H], v [R,H,V]. Program (BR tokens, BH heads).
    """
    row = tl.arange(0, BR * BH)
    r = tl.program_id(0).to(tl.int64) * BR + row // BH
    h = tl.program_id(1) * BH + row % BH
    c = tl.arange(0, BV)
    heads = h < H
    here = (r < R) & heads
    every = here[:, None] & (c < V)[None, :]
    begin(PDL)
    values = tl.load(x + (r * x_r * UNIT + h * V)[:, None] + c[None, :], every, other=0.0).to(tl.float32)
    _, step, A = _time_step(dt, dt_bias, A_log, r * dt_r * UNIT + h, h, here, heads)
    step = _clamped(step, low, high)
    at = r * H + h
    tl.store(g + at, A * step, here)
    tl.store(v + (at * V)[:, None] + c[None, :], (values * step[:, None]).to(v.dtype.element_ty), every)


@triton.jit(do_not_specialize=["R", "each"])
def penstock_time_steps_bwd(
    dt, dt_bias, A_log, x,
    dg,  # [R,H] float32
    dv, further,  # [R,H,V]
    d_dt,  # [R,H]
    dx,  # [R,H,V]
    d_bias, dA,  # [programs,H] float32, sums over the tokens of a program
    R, H, dt_r, x_r, low, high, each,
    ADD: tl.constexpr, V: tl.constexpr, UNIT: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """d step = A dg + rowsum(x o dv), A = -exp(min(A_log, LARGEST)), d_dt = d step step', dx = step dv, dA = sum_t g dg. ADD: add
    ``further`` to dx. dA is 0 where A_log is above LARGEST.

    Reads dt, dg [R,H], x, dv [R,H,V]. Writes d_dt [R,H], dx [R,H,V], d_bias, dA [programs,H]. A program has ``each`` blocks of BR tokens of
    BH heads.
    """
    p = tl.program_id(0)
    row = tl.arange(0, BR * BH)
    h = tl.program_id(1) * BH + row % BH
    c = tl.arange(0, BV)
    heads = h < H
    bias_sums = tl.zeros([BR * BH], tl.float32)
    A_sums = tl.zeros([BR * BH], tl.float32)
    for block in range(each):
        r = (p * each + block).to(tl.int64) * BR + row // BH
        here = (r < R) & heads
        every = here[:, None] & (c < V)[None, :]
        at = r * H + h
        wide = (at * V)[:, None] + c[None, :]
        d = tl.load(dv + wide, every, other=0.0).to(tl.float32)  # all loads are in flight before the first sum
        values = tl.load(x + (r * x_r * UNIT + h * V)[:, None] + c[None, :], every, other=0.0).to(tl.float32)
        others = tl.load(further + wide, every, other=0.0) if ADD else 0.0
        d_log = tl.load(dg + at, here, other=0.0)
        raw, step, A = _time_step(dt, dt_bias, A_log, r * dt_r * UNIT + h, h, here, heads)
        clamped = _clamped(step, low, high)
        back = d * clamped[:, None]
        if ADD:
            back += others.to(tl.float32)
        tl.store(dx + wide, back.to(dx.dtype.element_ty), every)
        d_step = tl.sum(d * values, 1) + d_log * A
        d_raw = tl.where((step >= low) & (step <= high), d_step, 0.0) * tl.sigmoid(raw)
        tl.store(d_dt + at, d_raw.to(d_dt.dtype.element_ty), here)
        bias_sums += d_raw
        A_sums += d_log * A * clamped
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    to = p.to(tl.int64) * H + h
    tl.store(d_bias + to, tl.sum(tl.reshape(bias_sums, [BR, BH]), 0), h < H)
    limited = tl.load(A_log + h, h < H, other=0.0) > LARGEST
    tl.store(dA + to, tl.where(limited, 0.0, tl.sum(tl.reshape(A_sums, [BR, BH]), 0)), h < H)


@triton.jit
def _gated(o, x, z, skip, here, CACHE: tl.constexpr):
    """x, the gate z, its sigmoid, and o + skip x."""
    values = tl.load(x, here, other=0.0, cache_modifier=CACHE).to(tl.float32)
    gate = tl.load(z, here, other=0.0, cache_modifier=CACHE).to(tl.float32)
    total = tl.load(o, here, other=0.0, cache_modifier=CACHE).to(tl.float32) + skip * values
    return values, gate, tl.sigmoid(gate), total


@triton.jit
def penstock_gated_norm_fwd(
    o, x,  # [R,H,V], row strides ``o_r`` * UNIT and ``x_r`` * UNIT
    z,  # [R,G*S], row stride ``z_r`` * UNIT
    D,  # [H]
    weight,  # [G*S]
    y,  # [R,G*S]
    G, o_r, x_r, z_r, eps,
    S: tl.constexpr, V: tl.constexpr, UNIT: tl.constexpr, PIECE: tl.constexpr, BC: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = norm((o + D x) silu(z)) weight, with the RMS norm of a group of S = H V / G channels.

    Reads o, x [R,H,V], D [H], z [R,G*S], weight [G*S]. Writes y [R,G*S]. Program (token, group): COUNT blocks of BC channels. A tile
    consists of pieces of PIECE channels of one head.
    """
    r, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * S
    piece = tl.arange(0, BC // PIECE) * PIECE
    lane = tl.arange(0, PIECE)[None, :]
    begin(PDL)
    squares = tl.zeros([BC // PIECE], tl.float32)
    blocks = ()
    for n in tl.static_range(COUNT):
        at = n * BC + piece
        here = (at < S)[:, None]
        c = first + at[:, None] + lane
        skip = tl.load(D + (first + at) // V, at < S, other=0.0).to(tl.float32)[:, None]
        _, gate, share, total = _gated(o + r * o_r * UNIT + c, x + r * x_r * UNIT + c, z + r * z_r * UNIT + c, skip, here, "")
        gated = total * gate * share
        squares += tl.sum(gated * gated, 1)
        blocks = blocks + (gated,)
    scale = tl.rsqrt(tl.sum(squares, 0) / S + eps)
    for n in tl.static_range(COUNT):
        here = (n * BC + piece < S)[:, None]
        c = first + n * BC + piece[:, None] + lane
        w = tl.load(weight + c, here, other=0.0).to(tl.float32)
        tl.store(y + r * G * S + c, (blocks[n] * scale * w).to(y.dtype.element_ty), here)


@triton.jit
def _sums(o, x, z, dy, weight, skip, here):
    """For each piece of a tile of channels: the sum of u^2, u = (o + skip x) silu(z), and the sum of u dy weight."""
    d = tl.load(dy, here, other=0.0).to(tl.float32)
    w = tl.load(weight, here, other=0.0).to(tl.float32)
    _, gate, share, total = _gated(o, x, z, skip, here, "")
    gated = total * gate * share
    return tl.sum(gated * gated, 1), tl.sum(gated * d * w, 1)


@triton.jit(do_not_specialize=["R", "each"])
def penstock_gated_norm_bwd(
    o, x, z, D, weight,
    dy,  # [R,G*S]
    d_o, dx,  # [R,H,V], contiguous, as are dz and y
    dz,  # [R,G*S]
    y,  # [R,G*S]
    dD,  # [programs,G*S/PIECE] float32, sums over the tokens of a program and the channels of a piece
    dweight,  # [programs,G*S] float32, sums over the tokens of a program
    R, G, o_r, x_r, z_r, eps, each,
    AGAIN: tl.constexpr, S: tl.constexpr, V: tl.constexpr, UNIT: tl.constexpr, PIECE: tl.constexpr, BC: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """d_o = norm'((o + D x) silu(z)) (dy weight) silu(z), dx = D d_o, dD = sum x d_o, dz alike. AGAIN: y is stored, too.

    Reads o, x [R,H,V], z, dy [R,G*S], D [H], weight [G*S]. Writes d_o, dx [R,H,V], dz, y [R,G*S] and sums [programs,...]. A program has one
    group of ``each`` tokens, in COUNT blocks of BC channels.

    Inputs are read for the two sums of a group and again, from the cache, for the gradients: held in registers, they would spill. The
    second loads have a cache modifier. Without it the compiler would merge them with the first ones.
    """
    p, first = tl.program_id(0), tl.program_id(1) * S
    piece = tl.arange(0, BC // PIECE) * PIECE
    lane = tl.arange(0, PIECE)[None, :]
    skips, D_sums, weight_sums = (), (), ()
    for n in tl.static_range(COUNT):
        at = n * BC + piece
        skips = skips + (tl.load(D + (first + at) // V, at < S, other=0.0).to(tl.float32)[:, None],)
        D_sums = D_sums + (tl.zeros([BC // PIECE], tl.float32),)
        weight_sums = weight_sums + (tl.zeros([BC // PIECE, PIECE], tl.float32),)
    for token in range(p * each, tl.minimum(p * each + each, R)):
        r = tl.cast(token, tl.int64)
        to = r * G * S + first
        o_row, x_row, z_row, dy_row = o + r * o_r * UNIT + first, x + r * x_r * UNIT + first, z + r * z_r * UNIT + first, dy + to
        squares = tl.zeros([BC // PIECE], tl.float32)
        products = tl.zeros([BC // PIECE], tl.float32)
        if S <= 6144:  # the loads of all blocks are in flight at once; wider groups would spill
            for n in tl.static_range(COUNT):
                c = n * BC + piece[:, None] + lane
                square, product = _sums(
                    o_row + c, x_row + c, z_row + c, dy_row + c, weight + first + c, skips[n], (n * BC + piece < S)[:, None]
                )
                squares += square
                products += product
        else:
            for m in range(COUNT):
                at = m * BC + piece
                c = at[:, None] + lane
                skip = tl.load(D + (first + at) // V, at < S, other=0.0).to(tl.float32)[:, None]
                square, product = _sums(o_row + c, x_row + c, z_row + c, dy_row + c, weight + first + c, skip, (at < S)[:, None])
                squares += square
                products += product
        scale = tl.rsqrt(tl.sum(squares, 0) / S + eps)
        slope = tl.sum(products, 0) * scale * scale / S
        new_D, new_weight = (), ()
        for n in tl.static_range(COUNT):
            c, here = n * BC + piece[:, None] + lane, (n * BC + piece < S)[:, None]
            d = tl.load(dy_row + c, here, other=0.0, cache_modifier=".ca").to(tl.float32)
            w = tl.load(weight + first + c, here, other=0.0, cache_modifier=".ca").to(tl.float32)
            values, gate, share, total = _gated(o_row + c, x_row + c, z_row + c, skips[n], here, ".ca")
            silu = gate * share
            normed = total * silu * scale
            new_weight = new_weight + (weight_sums[n] + d * normed,)
            if AGAIN:
                tl.store(y + to + c, (normed * w).to(y.dtype.element_ty), here)
            back = (d * w - total * silu * slope) * scale
            tl.store(dz + to + c, (back * total * share * (1 + gate * (1 - share))).to(dz.dtype.element_ty), here)
            back *= silu
            new_D = new_D + (D_sums[n] + tl.sum(back * values, 1),)
            tl.store(d_o + to + c, back.to(d_o.dtype.element_ty), here)
            tl.store(dx + to + c, (back * skips[n]).to(dx.dtype.element_ty), here)
        D_sums, weight_sums = new_D, new_weight
    for n in tl.static_range(COUNT):
        at = n * BC + piece
        to = p.to(tl.int64) * G * S + first + at
        tl.store(dD + to // PIECE, D_sums[n], at < S)
        tl.store(dweight + to[:, None] + lane, weight_sums[n], (at < S)[:, None])
