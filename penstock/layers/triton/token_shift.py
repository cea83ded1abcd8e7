"""Kernels of token shifts: y_i = x + (p - x) m_i, where p is the previous token.

x is [R,C], R tokens of all sequences one after another. ``starts`` [R] is the sequence whose first token this is, or -1; the token before
the first of sequence n is ``last[n]``. Factors m_i [N,C] may have a low-rank part for each token: m_i = mu_i + h_i W_i.
"""

import triton
import triton.language as tl


@triton.jit
def _loaded(x, last, starts, slots, last_n, r, c, R, C, SLOTS: tl.constexpr):
    """Tokens [BR,BC] and the tokens before them, float32."""
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
    return now, before + given


@triton.jit
def tanh(x):
    """In float32; near 0 by its series, because 1 - exp(-2 x) has few digits there."""
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


@triton.jit
def penstock_shift_fwd(
    x,  # [R,C]
    last,  # [sequences,C], or with SLOTS a pool [P,C]
    starts,  # [R]
    slots,  # [sequences], rows of the pool; negative ones are skipped
    m0, m1, m2, m3, m4,  # [C] each; those from N on are not read
    hidden,  # [R,N,M]; with TANH, its tanh is taken
    up,  # [N,M,C]
    y,  # [N,R,C]
    R, C, last_n,
    N: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    SLOTS: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """A program computes all outputs of BR tokens and BC channels. ``last_n`` is the stride of rows of ``last``."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    now, before = _loaded(x, last, starts, slots, last_n, r, c, R, C, SLOTS)
    here = (r < R)[:, None] & (c < C)[None, :]
    to = r.to(tl.int64)[:, None] * C + c[None, :]
    for i in tl.static_range(N):
        mu = m0 if i == 0 else m1 if i == 1 else m2 if i == 2 else m3 if i == 3 else m4
        m = _factor(mu, hidden, up, i, r, c, R, C, N, M, BM, PRECISION, TANH)
        tl.store(y + tl.cast(R, tl.int64) * C * i + to, (now + (before - now) * m).to(y.dtype.element_ty), here)


@triton.jit
def penstock_shift_bwd(
    x, last, starts, mu, hidden, up,
    dy0, dy1, dy2, dy3, dy4,  # [R,C] each; those from N on are not read
    dx,  # [R,C]
    dm,  # [N,R,C], gradients of factors of each token; with a low-rank part only
    dmu,  # [programs,N,C] float32, sums over the tokens of a program
    R, C, each,
    N: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program takes ``each`` blocks of BR - 1 tokens. dx_t = sum dy_t (1 - m_t) + sum dy_{t+1} m_{t+1}: a tile has one more token."""
    p = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    sums = tl.zeros([BN, BC], tl.float32)
    index = tl.arange(0, BN)
    row = tl.arange(0, BR)
    below = tl.broadcast_to(tl.minimum(row + 1, BR - 1)[:, None], (BR, BC))
    for block in range(each):
        r = (p * each + block) * (BR - 1) + row
        here = (r < R)[:, None] & (c < C)[None, :]
        own = here & (row < BR - 1)[:, None]
        to = r.to(tl.int64)[:, None] * C + c[None, :]
        now, before = _loaded(x, last, starts, starts, C, r, c, R, C, False)
        step = before - now
        kept = tl.zeros([BR, BC], tl.float32)
        passed = tl.zeros([BR, BC], tl.float32)
        for i in tl.static_range(N):
            dy = dy0 if i == 0 else dy1 if i == 1 else dy2 if i == 2 else dy3 if i == 3 else dy4
            m = _factor(mu + i * C, hidden, up, i, r, c, R, C, N, M, BM, PRECISION, False)
            d = tl.load(dy + to, here, other=0.0).to(tl.float32)
            kept += d * (1 - m)
            passed += d * m
            d = tl.where(own, d * step, 0.0)
            if M > 0:
                tl.store(dm + tl.cast(R, tl.int64) * C * i + to, d.to(dm.dtype.element_ty), own)
            sums += tl.where(index[:, None] == i, tl.sum(d, 0)[None, :], 0.0)
        begins = tl.load(starts + r, r < R, other=0) >= 0  # the token before is of another sequence
        kept += tl.gather(tl.where(begins[:, None], 0.0, passed), below, 0)
        tl.store(dx + to, kept.to(dx.dtype.element_ty), own)
    tl.store(dmu + (p * N + index)[:, None].to(tl.int64) * C + c[None, :], sums, (index < N)[:, None] & (c < C)[None, :])
