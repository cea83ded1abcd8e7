"""Kernels of short causal depthwise convolutions: y_t = f(b + sum_j w_j x_{t-W+1+j}) for each channel; f is silu or nothing.

x is [R,C], the R tokens of all sequences one after another, with any row stride. ``starts`` [R] is the index of the sequence whose first
token this is, or -1. ``tail`` [sequences,W-1,C] are the inputs before the first token of each sequence.

A program has a few channels and loops over its tokens with the last inputs in registers, so it reads each token once. All sums run over
j in order by explicit multiply-adds: to the bit, y depends neither on other tokens nor on where programs or calls begin.
"""

import triton
import triton.language as tl

from ...gpu.tiles import uniform
from .few_rows import begin


@triton.jit
def _weights(weight, c, C, W: tl.constexpr):
    """The rows of a weight [C,W], float32: W values of [BC]."""
    w = ()
    for j in tl.static_range(W):
        w += (tl.load(weight + c * W + j, c < C, other=0.0).to(tl.float32),)
    return w


@triton.jit
def _row(slots, n, SLOTS: tl.constexpr):
    """The row of ``tail`` of sequence n. Negative rows are skipped."""
    row = n.to(tl.int64)
    if SLOTS:
        row = tl.load(slots + n).to(tl.int64)
    return row


@triton.jit
def _given(tail, row, tail_w, c, C, W: tl.constexpr):
    """The inputs before a sequence, W - 1 values of [BC], float32. ``tail`` points to the first one."""
    window = ()
    for j in tl.static_range(W - 1):
        window += (tl.load(tail + tl.cast(tail_w, tl.int64) * j + c, uniform(row >= 0) & (c < C), other=0.0).to(tl.float32),)
    return window


@triton.jit
def _either(own, given, inside, here, there):
    """Values of ``own`` if ``inside``, else of ``given``. Two loads, because Triton 3.6 cannot select between pointers on AMD GPUs."""
    return tl.where(inside, tl.load(own, uniform(inside) & here, other=0.0), tl.load(given, uniform(inside == 0) & there, other=0.0))


@triton.jit
def _before(x, tail, starts, slots, r, c, C, x_n, tail_n, tail_w, W: tl.constexpr, SLOTS: tl.constexpr):
    """The W - 1 inputs before token r. ``place`` is the index of r in its sequence, at most W - 1."""
    n, place = tl.full([], -1, tl.int32), tl.full([], W - 1, tl.int32)
    for i in tl.static_range(W - 1):
        begins = tl.load(starts + r - i, (n < 0) & (r - i >= 0), other=-1)
        place = tl.where(begins >= 0, i, place)
        n = tl.where(begins >= 0, begins, n)
    row = _row(slots, tl.maximum(n, 0), SLOTS)
    window = ()
    for j in tl.static_range(W - 1):
        back = W - 1 - j
        inside = place >= back
        own = x + (r - back).to(tl.int64) * x_n
        given = tail + row * tail_n + (W - 1 + place - back).to(tl.int64) * tail_w
        window += (_either(own + c, given + c, inside, c < C, uniform(row >= 0) & (c < C)).to(tl.float32),)
    return window


@triton.jit
def _sum(window, now, w, base, W: tl.constexpr):
    """The value before silu."""
    z = base
    for j in tl.static_range(W - 1):
        z = tl.fma(window[j], w[j], z)
    return tl.fma(now, w[W - 1], z)


@triton.jit
def _rest(values, W: tl.constexpr):
    """The last W - 1 of W values."""
    rest = ()
    for j in tl.static_range(1, W):
        rest += (values[j],)
    return rest


@triton.jit(do_not_specialize=["R", "tokens"])
def penstock_convolution_fwd(
    x,  # [R,C], row stride ``x_n``
    tail,  # [sequences,W-1,C], or with SLOTS a pool [P,W-1,C]; strides ``tail_n`` and ``tail_w``
    starts,  # [R]
    slots,  # [sequences], rows of the pool; negative ones are skipped
    weight, bias,  # [C,W]; [C]
    y,  # [R,C]
    R, C, x_n, tail_n, tail_w, tokens,
    W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y_t = silu(bias + sum_i w_i x_{t-W+1+i}); without SILU, y_t is the sum.

    Reads x [R,C], the earlier inputs ``tail`` [sequences,W-1,C], starts [R], weight [C,W], bias [C]. Writes y [R,C]. A program has
    ``tokens`` tokens, GROUP by GROUP, of BC channels.
    """
    first = tl.program_id(0) * tokens
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    here = c < C
    begin(PDL)
    w = _weights(weight, c, C, W)
    base = tl.load(bias + c, here, other=0.0).to(tl.float32) if BIAS else tl.zeros([BC], tl.float32)
    window = _before(x, tail, starts, slots, first, c, C, x_n, tail_n, tail_w, W, SLOTS)
    for group in range(tl.cdiv(tl.minimum(tokens, R - first), GROUP)):
        start = first + group * GROUP
        rows = x + start.to(tl.int64) * x_n + c
        results = y + start.to(tl.int64) * C + c
        given, begins = (), ()
        for i in tl.static_range(GROUP):  # all loads are in flight before the first use
            given += (tl.load(rows + tl.cast(x_n, tl.int64) * i, here & uniform(start + i < R), other=0.0),)
            begins += (tl.load(starts + start + i, start + i < R, other=-1),)
        for i in tl.static_range(GROUP):
            if begins[i] >= 0:
                row = _row(slots, begins[i], SLOTS)
                window = _given(tail + row * tail_n, row, tail_w, c, C, W)
            now = given[i].to(tl.float32)
            z = _sum(window, now, w, base, W)
            window = _rest(window + (now,), W)
            if SILU:
                z *= tl.sigmoid(z)
            tl.store(results + tl.cast(C, tl.int64) * i, z.to(y.dtype.element_ty), here & uniform(start + i < R))


@triton.jit(do_not_specialize=["R", "tokens"])
def penstock_convolution_bwd(
    x, tail, starts, weight, bias,
    dy,  # [R,C], row stride ``dy_n``
    dx,  # [R,C]
    sums,  # [programs,W+1,C] float32, sums over the tokens of a program: gradients of the weights, then of the bias
    R, C, x_n, tail_n, tail_w, dy_n, tokens,
    W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, GROUP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx_t = sum_i w_{W-1-i} dz_{t+i}, dw_i = sum_t dz_t x_{t-W+1+i}, dz = silu'(z) dy, where z is the value before silu.

    Reads x, dy [R,C], tail [sequences,W-1,C], weight [C,W]. Writes dx [R,C] and sums [programs,W+1,C]. A program has ``tokens`` tokens,
    GROUP by GROUP, of BC channels; z is recomputed.

    The sum is over tokens of the same sequence: the program also reads the next W - 1 tokens. ``partial`` are the sums so far of the last W
    - 1 tokens.
    """
    p = tl.program_id(0)
    first = p * tokens
    last = tl.minimum(first + tokens, R)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    here = c < C
    w = _weights(weight, c, C, W)
    base = tl.load(bias + c, here, other=0.0).to(tl.float32) if BIAS else tl.zeros([BC], tl.float32)
    window = _before(x, tail, starts, starts, first, c, C, x_n, tail_n, tail_w, W, False)
    place = tl.full([], W, tl.int32)  # index in the sequence; at least W before the first one begins: those sums are not stored
    partial, dw, db = (), (), tl.zeros([BC], tl.float32)
    for _ in tl.static_range(W - 1):
        partial += (tl.zeros([BC], tl.float32),)
    for _ in tl.static_range(W):
        dw += (tl.zeros([BC], tl.float32),)
    for group in range(tl.cdiv(last - first + W - 1, GROUP)):
        start = first + group * GROUP
        rows = x + start.to(tl.int64) * x_n + c
        gradients = dy + start.to(tl.int64) * dy_n + c
        results = dx + (start - (W - 1)).to(tl.int64) * C + c
        given, upstream, begins = (), (), ()
        for i in tl.static_range(GROUP):  # all loads are in flight before the first use
            given += (tl.load(rows + tl.cast(x_n, tl.int64) * i, here & uniform(start + i < R), other=0.0),)
            upstream += (tl.load(gradients + tl.cast(dy_n, tl.int64) * i, here & uniform(start + i < R), other=0.0),)
            begins += (tl.load(starts + start + i, start + i < R, other=0),)  # a sequence begins after the last token
        for i in tl.static_range(GROUP):
            r = start + i
            place += 1
            if begins[i] >= 0:
                window = _given(tail + begins[i].to(tl.int64) * tail_n, begins[i], tail_w, c, C, W)
                place = place * 0
            now = given[i].to(tl.float32)
            d = upstream[i].to(tl.float32)
            if SILU:
                z = _sum(window, now, w, base, W)
                share = tl.sigmoid(z)
                d *= share * (1 + z * (1 - share))
            mine = r < last
            found, after = (), ()
            for j in tl.static_range(W):
                value = window[j] if j < W - 1 else now
                found += (tl.where(mine, tl.fma(d, value, dw[j]), dw[j]),)
            for j in tl.static_range(W - 1):
                after += (tl.where(place >= W - 1 - j, tl.fma(d, w[j], partial[j]), partial[j]),)
            dw = found
            db = tl.where(mine, db + d, db)
            after += (d * w[W - 1],)
            done = r - (W - 1)
            tl.store(results + tl.cast(C, tl.int64) * i, after[0].to(dx.dtype.element_ty), here & uniform((done >= first) & (done < last)))
            partial = _rest(after, W)
            window = _rest(window + (now,), W)
    to = sums + p.to(tl.int64) * (W + 1) * C + c
    for j in tl.static_range(W):
        tl.store(to + j * C, dw[j], here)
    tl.store(to + W * C, db, here)


@triton.jit
def penstock_convolution_tails(
    x,  # [R,C], row stride ``x_n``
    bounds,  # [sequences+1], where sequences begin, and the end
    slots,  # [sequences]
    tail,  # [sequences,W-1,C], or with SLOTS a pool [P,W-1,C]
    after,  # likewise; it may alias ``tail``
    C, x_n, tail_n, tail_w, after_n, after_w,
    W: tl.constexpr, SLOTS: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """after = the last W - 1 of the earlier inputs and the tokens of a sequence: a shorter sequence keeps a part of its tail.

    Reads x [R,C], bounds [sequences+1] and tail [sequences,W-1,C]. Writes ``after`` [sequences,W-1,C]. Program (sequence, BC channels): it
    loads all values before the first store. With SLOTS, negative slots write nothing.
    """
    n = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    begin(PDL)
    start = tl.load(bounds + n).to(tl.int64)
    end = tl.load(bounds + n + 1).to(tl.int64)
    row = _row(slots, n, SLOTS)
    here = uniform(row >= 0) & (c < C)
    found = ()
    for j in tl.static_range(W - 1):
        at = end - (W - 1) + j
        given = tail + row * tail_n + (end - start + j) * tail_w
        found += (_either(x + at * x_n + c, given + c, at >= start, here, here),)
    for j in tl.static_range(W - 1):
        tl.store(after + row * after_n + tl.cast(after_w, tl.int64) * j + c, found[j], here)


@triton.jit
def penstock_convolution_step(
    x,  # [R,C], row stride ``x_n``
    tail,  # the pool [P,W-1,C]; strides ``tail_n`` and ``tail_w``
    slots,  # [R]
    weight, bias,  # [C,W]; [C]
    y,  # [R,C]
    C, x_n, tail_n, tail_w,
    W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, SLOTS: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = silu(bias + sum_i w_i x_i), x_{W-1} the token and the others its row of the pool, which then ends with the token.

    Reads x [R,C], pool [P,W-1,C], slots [R], weight [C,W], bias [C]. Writes y [R,C] and rows of the pool. Program (token, BC channels). For
    a negative slot no row changes.
    """
    n = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    here = c < C
    begin(PDL)
    row = _row(slots, n, SLOTS)
    tail += row * tail_n
    window = _given(tail, row, tail_w, c, C, W)
    now = tl.load(x + n.to(tl.int64) * x_n + c, here, other=0.0).to(tl.float32)
    base = tl.load(bias + c, here, other=0.0).to(tl.float32) if BIAS else tl.zeros([BC], tl.float32)
    z = _sum(window, now, _weights(weight, c, C, W), base, W)
    if SILU:
        z *= tl.sigmoid(z)
    tl.store(y + n.to(tl.int64) * C + c, z.to(y.dtype.element_ty), here)
    after = _rest(window + (now,), W)
    for j in tl.static_range(W - 1):
        tl.store(tail + tl.cast(tail_w, tl.int64) * j + c, after[j].to(tail.dtype.element_ty), here & uniform(row >= 0))
