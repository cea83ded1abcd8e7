"""Kernels of token shifts: y_i = x + (p - x) m_i, where p is the previous token.

x is [R,C], the R tokens of all sequences one after another. ``starts`` [R] is the index of the sequence whose first token this is, or -1.
The token before the first one of sequence n is ``last[n]``. Factors m_i [N,C] may have a low-rank part per token: m_i = mu_i + h_i W_i.
"""

import triton
import triton.language as tl


@triton.jit
def _loaded(x, last, starts, slots, last_n, r, c, R, C, SLOTS: tl.constexpr, COMPLEMENT: tl.constexpr):
    """Tokens [BR,BC] and the previous tokens, float32; with COMPLEMENT, in the opposite order."""
    rows, columns = r < R, c < C
    here = rows[:, None] & columns[None, :]
    first = tl.load(starts + r, rows, other=0)
    begins = first >= 0
    if SLOTS:
        first = tl.load(slots + first, rows & begins, other=0)
    now = tl.load(x + r.to(tl.int64)[:, None] * C + c[None, :], here, other=0.0).to(tl.float32)
    inside = here & ~begins[:, None]
    before = tl.load(x + (r.to(tl.int64) - 1)[:, None] * C + c[None, :], inside, other=0.0).to(tl.float32)
    given = here & (begins & (first >= 0))[:, None]
    given = tl.load(last + first.to(tl.int64)[:, None] * last_n + c[None, :], given, other=0.0).to(tl.float32)
    before += given
    return (before, now) if COMPLEMENT else (now, before)


@triton.jit
def tanh(x):
    """tanh in float32; near 0 by its series, because 1 - exp(-2 x) loses digits there."""
    square, decayed = x * x, tl.exp(-2 * tl.abs(x))
    far = (1 - decayed) / (1 + decayed)
    near = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0, -far, far))


@triton.jit
def _factor(
    mu, hidden, up, i, r, c, R, C, N: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr, TANH: tl.constexpr
):  # fmt: skip
    """Factors m_i: [1,BC], or with a low-rank part (M > 0) [BR,BC]. ``mu`` is their constant part."""
    m = tl.load(mu + c, c < C, other=0.0).to(tl.float32)[None, :]
    if M > 0:
        j = tl.arange(0, BM)
        h = tl.load(hidden + r.to(tl.int64)[:, None] * (N * M) + i * M + j[None, :], (r < R)[:, None] & (j < M)[None, :], other=0.0)
        if TANH:
            h = tanh(h.to(tl.float32)).to(h.dtype)
        w = tl.load(up + (i * M + j)[:, None].to(tl.int64) * C + c[None, :], (j < M)[:, None] & (c < C)[None, :], other=0.0)
        m += tl.dot(h, w, input_precision=PRECISION)
    return m


@triton.jit(do_not_specialize=["R"])
def penstock_shift_fwd(
    x,  # [R,C]
    last,  # [sequences,C], or with SLOTS a pool [P,C]
    starts,  # [R]
    slots,  # [sequences], rows of the pool; negative ones are skipped
    m0, m1, m2, m3, m4, m5,  # [C] each; only N of them are read
    hidden,  # [R,N,M]; with TANH, before tanh
    up,  # [N,M,C]
    y,  # [N,R,C]
    R, C, last_n,
    N: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    SLOTS: tl.constexpr, TANH: tl.constexpr, COMPLEMENT: tl.constexpr,
):  # fmt: skip
    """y_i = x + (p - x) m_i, m_i = mu_i + h_i W_i, p the previous token. COMPLEMENT: y_i = p + (x - p) mu_i.

    Reads x [R,C], last [sequences,C], starts [R], mu_i [C], hidden h [R,N,M], up W [N,M,C]. Writes y [N,R,C]. Program (BR tokens, BC
    channels): all outputs. ``last_n`` is the stride of rows of ``last``.
    """
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    now, before = _loaded(x, last, starts, slots, last_n, r, c, R, C, SLOTS, COMPLEMENT)
    here = (r < R)[:, None] & (c < C)[None, :]
    to = r.to(tl.int64)[:, None] * C + c[None, :]
    for i in tl.static_range(N):
        mu = m0 if i == 0 else m1 if i == 1 else m2 if i == 2 else m3 if i == 3 else m4 if i == 4 else m5
        m = _factor(mu, hidden, up, i, r, c, R, C, N, M, BM, PRECISION, TANH)
        tl.store(y + tl.cast(R, tl.int64) * C * i + to, (now + (before - now) * m).to(y.dtype.element_ty), here)


@triton.jit
def _steps(x, last, starts, r, c, R, C, AMD: tl.constexpr):
    """p - x of tokens [BR,BC], float32. For the first token of a sequence, p is its row of ``last`` [sequences,C], in the dtype of x.

    AMD: two loads, because its compiler cannot select between pointers to two tensors.
    """
    first = tl.load(starts + r, r < R, other=0)
    here = (r < R)[:, None] & (c < C)[None, :]
    if AMD:
        begins = (first >= 0)[:, None]
        now = tl.load(x + r.to(tl.int64)[:, None] * C + c[None, :], here, other=0.0)
        before = tl.load(x + (r.to(tl.int64) - 1)[:, None] * C + c[None, :], here & ~begins, other=0.0)
        given = tl.load(last + first.to(tl.int64)[:, None] * C + c[None, :], here & begins, other=0.0)
        before = tl.where(begins, given, before)
    else:
        row = tl.where(first < 0, x + (r.to(tl.int64) - 1) * C, last + first.to(tl.int64) * C)
        now = tl.load(x + r.to(tl.int64)[:, None] * C + c[None, :], here, other=0.0)
        before = tl.load(row[:, None] + c[None, :], here, other=0.0)
    return before.to(tl.float32) - now.to(tl.float32)


@triton.jit(do_not_specialize=["R", "each"])
def penstock_shift_bwd(
    x, last, starts, mu,
    dy0, dy1, dy2, dy3, dy4, dy5,  # [R,C] each; only N of them are read
    further,  # [R,C], with ADD: a further gradient of x
    dx,  # [R,C]
    dmu,  # [programs,N,C] float32, sums over the tokens of a program
    R, C, each,
    N: tl.constexpr, ADD: tl.constexpr, COMPLEMENT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """dx_t = sum_i dy_{i,t} (1 - m_i) + sum_i dy_{i,t+1} m_i, dmu_i = sum_t dy_{i,t} (p - x)_t, without a low-rank part. COMPLEMENT: m = 1
    - mu.

    Reads x, dy_i [R,C], last [sequences,C], starts [R], mu [N,C]. Writes dx [R,C], dmu [programs,N,C]. A program has ``each`` blocks of BR
    tokens and BC channels.
    """
    p = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    columns = (c < C)[None, :]
    sums, factors = (), ()
    for i in tl.static_range(N):
        sums += (tl.zeros([BR, BC], tl.float32),)  # reduced over rows after the loop: no barriers inside
        factors += (tl.load(mu + i * C + c, c < C, other=0.0).to(tl.float32)[None, :],)  # a load inside would change layouts, by barriers
    for block in range(each):
        r = (p * each + block) * BR + tl.arange(0, BR)
        here = (r < R)[:, None] & columns
        follows = (tl.load(starts + r + 1, r + 1 < R, other=0) < 0)[:, None] & columns  # the next token is of the same sequence
        to = r.to(tl.int64)[:, None] * C + c[None, :]
        now, after = (), ()
        for i in tl.static_range(N):  # all loads are in flight before the first use
            dy = dy0 if i == 0 else dy1 if i == 1 else dy2 if i == 2 else dy3 if i == 3 else dy4 if i == 4 else dy5
            now += (tl.load(dy + to, here, other=0.0),)
            after += (tl.load(dy + to + C, follows, other=0.0),)
        back = tl.zeros([BR, BC], tl.float32)
        if ADD:
            back += tl.load(further + to, here, other=0.0).to(tl.float32)
        step = _steps(x, last, starts, r, c, R, C, AMD)
        found = ()
        for i in tl.static_range(N):
            m, d = factors[i], now[i].to(tl.float32)
            if COMPLEMENT:
                back += d * m + after[i].to(tl.float32) * (1 - m)
                found += (sums[i] - d * step,)
            else:
                back += d * (1 - m) + after[i].to(tl.float32) * m
                found += (sums[i] + d * step,)
        sums = found
        tl.store(dx + to, back.to(dx.dtype.element_ty), here)
    for i in tl.static_range(N):
        tl.store(dmu + (p * N + i).to(tl.int64) * C + c, tl.sum(sums[i], 0), c < C)


@triton.jit(do_not_specialize=["R", "each"])
def penstock_shift_low_rank_bwd(
    starts, mu, hidden, up,
    dy0, dy1, dy2, dy3, dy4,
    dx,  # [R,C]
    R, C, each,
    N: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx_t = sum_i dy_{i,t} (1 - m_{i,t}) + sum_i dy_{i,t+1} m_{i,t+1}, with a low-rank part.

    Reads dy_i [R,C], mu [N,C], hidden [R,N,M], up [N,M,C], starts [R]. Writes dx [R,C]. A program has ``each`` blocks of BR - 1 tokens: the
    last token of a tile belongs to the next block.
    """
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.arange(0, BR)
    below = tl.broadcast_to(tl.minimum(row + 1, BR - 1)[:, None], (BR, BC))
    for block in range(each):
        r = (tl.program_id(0) * each + block) * (BR - 1) + row
        here = (r < R)[:, None] & (c < C)[None, :]
        to = r.to(tl.int64)[:, None] * C + c[None, :]
        now = ()
        for i in tl.static_range(N):  # all loads are in flight before the first use
            dy = dy0 if i == 0 else dy1 if i == 1 else dy2 if i == 2 else dy3 if i == 3 else dy4
            now += (tl.load(dy + to, here, other=0.0),)
        begins = tl.load(starts + r, r < R, other=0) >= 0  # the previous token belongs to another sequence
        total, passed = tl.zeros([BR, BC], tl.float32), tl.zeros([BR, BC], tl.float32)
        for i in tl.static_range(N):
            m = _factor(mu + i * C, hidden, up, i, r, c, R, C, N, M, BM, PRECISION, False)
            d = now[i].to(tl.float32)
            total += d
            passed += d * m
        back = total - passed + tl.gather(tl.where(begins[:, None], 0.0, passed), below, 0)
        tl.store(dx + to, back.to(dx.dtype.element_ty), here & (row < BR - 1)[:, None])


@triton.jit(do_not_specialize=["R"])
def penstock_shift_hidden_bwd(
    x, last, starts, up,
    dy0, dy1, dy2, dy3, dy4,
    d_hidden,  # [R,N,M]
    R, C,
    N: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    AMD: tl.constexpr,
):  # fmt: skip
    """d_hidden_i = dm_i W_i^T, dm_i = dy_i (p - x).

    Reads x, dy_i [R,C], last [sequences,C], starts [R], up W [N,M,C]. Writes d_hidden [R,N,M]. Program (BR tokens, interpolation i).
    """
    i = tl.program_id(0) % N  # programs of the same tokens are adjacent: x is read from memory once
    dy = dy4 if i == 4 else dy3 if i == 3 else dy2 if i == 2 else dy1 if i == 1 else dy0
    r, j = tl.program_id(0) // N * BR + tl.arange(0, BR), tl.arange(0, BM)
    found = tl.zeros([BR, BM], tl.float32)
    for begin in range(0, C, BC):
        c = begin + tl.arange(0, BC)
        here = (r < R)[:, None] & (c < C)[None, :]
        d = tl.load(dy + r.to(tl.int64)[:, None] * C + c[None, :], here, other=0.0)
        w = tl.load(up + (i * M + j)[:, None].to(tl.int64) * C + c[None, :], (j < M)[:, None] & (c < C)[None, :], other=0.0)
        dm = d.to(tl.float32) * _steps(x, last, starts, r, c, R, C, AMD)
        found = tl.dot(dm.to(w.dtype), tl.trans(w), found, input_precision=PRECISION)
    to = (r.to(tl.int64) * N + i)[:, None] * M + j[None, :]
    tl.store(d_hidden + to, found.to(d_hidden.dtype.element_ty), (r < R)[:, None] & (j < M)[None, :])


@triton.jit(do_not_specialize=["R", "each"])
def penstock_shift_weights_bwd(
    x, last, starts, hidden,
    dy0, dy1, dy2, dy3, dy4,
    d_up,  # [programs,N,M,C] float32, sums over the tokens of a program
    dmu,  # [programs,N,C] float32, likewise
    R, C, each,
    N: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    AMD: tl.constexpr,
):  # fmt: skip
    """d_up_i = sum_t h_{i,t}^T dm_{i,t}, dmu_i = sum_t dm_{i,t}, dm_i = dy_i (p - x), with a low-rank part.

    Reads x, dy_i [R,C], last [sequences,C], starts [R], hidden h [R,N,M]. Writes d_up [programs,N,M,C], dmu [programs,N,C]. Program
    (interpolation i, BC channels, ``each`` blocks of BR tokens).
    """
    i = tl.program_id(0)  # programs of the same tokens are adjacent: x is read from memory once
    dy = dy4 if i == 4 else dy3 if i == 3 else dy2 if i == 2 else dy1 if i == 1 else dy0
    c, p, j = tl.program_id(1) * BC + tl.arange(0, BC), tl.program_id(2), tl.arange(0, BM)
    found, sums = tl.zeros([BC, BM], tl.float32), tl.zeros([BC, 16], tl.float32)
    ones = tl.full([BR, 16], 1.0, hidden.dtype.element_ty)
    for block in range(each):
        r = (p * each + block) * BR + tl.arange(0, BR)
        here = (r < R)[:, None] & (c < C)[None, :]
        d = tl.load(dy + r.to(tl.int64)[:, None] * C + c[None, :], here, other=0.0)
        h = tl.load(hidden + (r.to(tl.int64) * N + i)[:, None] * M + j[None, :], (r < R)[:, None] & (j < M)[None, :], other=0.0)
        dm = tl.trans((d.to(tl.float32) * _steps(x, last, starts, r, c, R, C, AMD)).to(h.dtype))
        found = tl.dot(dm, h, found, input_precision=PRECISION)
        sums = tl.dot(dm, ones, sums, input_precision=PRECISION)  # tl.sum would compute dm twice, in two layouts
    to = (p * N + i).to(tl.int64)
    tl.store(d_up + (to * M + j[None, :]) * C + c[:, None], found, (j < M)[None, :] & (c < C)[:, None])
    tl.store(dmu + to * C + c, tl.sum(tl.where(tl.arange(0, 16)[None, :] == 0, sums, 0.0), 1), c < C)
