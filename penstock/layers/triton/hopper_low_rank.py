"""What an RWKV-6 decode step on Hopper computes between two launches of linear maps, in Gluon: norm, low-rank maps, interpolations."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra import cuda

from .few_rows import centred, interpolated, likely, moments, of_slot, scaled, selected, summed
from .token_shift import tanh

WARPS = gl.constexpr(8)  # of a program


@gluon.jit
def product(a, b, BM: gl.constexpr):
    """Sums over K of W [K,BM] times b [K]: ``a`` [WARPS*BM,K/WARPS] has a part of K for each warp, one below another.

    The parts of b are the columns of the right operand. Of the product [WARPS*BM,WARPS], the diagonal blocks are used.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    parts = gl.permute(gl.reshape(b, [WARPS, b.shape[0] // WARPS]), [1, 0])
    o = mma_v2(a, gl.convert_layout(parts, gl.DotOperandLayout(1, mma, 2)), gl.zeros([WARPS * BM, WARPS], gl.float32, mma))
    block = gl.arange(0, WARPS * BM, gl.SliceLayout(1, mma))[:, None] // BM
    o = gl.where(block == gl.arange(0, WARPS, gl.SliceLayout(0, mma))[None, :], o, 0.0)
    return gl.sum(gl.reshape(gl.sum(o, 1), [WARPS, BM]), 0)


@gluon.jit(do_not_specialize=["P"])
def penstock_shifted_low_rank(
    x, y,  # [R,C]
    total,  # [R,C]
    weight, bias,  # [C]
    pool, slots,  # [P,C], rows ``p_n`` apart; [R]
    normed,  # [R,C]
    mu,  # [C]
    down,  # [C,PARTS*M]
    up,  # [PARTS,M,C]
    mu0, mu1, mu2, mu3, mu4,  # [C]
    shifted,  # [PARTS,R,C]
    C, P, p_n, eps,
    ADD: gl.constexpr, CENTRE: gl.constexpr, BIAS: gl.constexpr, PARTS: gl.constexpr, M: gl.constexpr, BM: gl.constexpr,
    BC: gl.constexpr, BN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y_i = x + (p - x) m_i, m_i = mu_i + tanh((x + (p - x) mu) down_i) up_i, by (columns, part i, row).

    x is the norm of x + y, as ``penstock_shifted_norm`` computes it for single tokens, and p the row of the pool.

    No program waits for another one: each computes the norm and the tanh of its part again. The weights, which no kernel of a graph
    writes, are in registers before the wait for the kernel ahead: shared memory is left to the weights of the launch behind.
    All programs read the row of the pool, so a later launch replaces it by ``normed``.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    dense: gl.constexpr = gl.BlockedLayout([8, 1], [BM // 8, 256 // BM], [WARPS, 1], [0, 1])
    line: gl.constexpr = gl.BlockedLayout([BC // (32 * WARPS)], [32], [WARPS], [0])
    single: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    own: gl.constexpr = gl.BlockedLayout([BM // 2, BN // (16 * WARPS)], [2, 16], [1, WARPS], [1, 0])  # sums over M within a warp
    dtype: gl.constexpr = x.dtype.element_ty
    i = gl.program_id(1)
    r = gl.program_id(2).to(gl.int64)

    row = gl.arange(0, WARPS * BM, gl.SliceLayout(1, dense))[:, None]
    k = row // BM * (BC // WARPS) + gl.arange(0, BC // WARPS, gl.SliceLayout(0, dense))[None, :]
    first = gl.load(down + k * (PARTS * M) + i * M + row % BM, mask=(k < C) & (row % BM < M), other=0.0)
    first = gl.convert_layout(first, gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8]), 2))
    c = gl.arange(0, BC, line)
    n = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(0, own))
    m = gl.arange(0, BM, gl.SliceLayout(1, own))[:, None]
    here = c < C
    mine = n < C
    second = gl.load(up + (i * M + m) * C + n[None, :], mask=(m < M) & mine[None, :], other=0.0)
    scale = gl.load(weight + c, mask=here, other=0.0)
    n_scale = gl.load(weight + n, mask=mine, other=0.0)
    offset = scale
    n_offset = n_scale
    if BIAS:
        offset = gl.load(bias + c, mask=here, other=0.0)
        n_offset = gl.load(bias + n, mask=mine, other=0.0)
    share = gl.load(mu + c, mask=here, other=0.0)
    base = gl.load(selected(i, mu0, mu1, mu2, mu3, mu4, PARTS) + n, mask=mine, other=0.0)
    place = likely(slots, r, P)

    if PDL:
        cuda.gdc_wait()
    slot = gl.load(slots + r, volatile=PDL).to(gl.int64)  # not the value from before the wait
    last = gl.load(pool + place * p_n + c, mask=here, other=0.0)
    n_last = gl.load(pool + place * p_n + n, mask=mine, other=0.0)
    values = summed(x + r * C, y + r * C, total, c, here, ADD)
    n_values = summed(x + r * C, y + r * C, total, n, mine, ADD)
    mean, deviation = moments(values, here, C, eps, CENTRE)
    last = of_slot(last, pool, p_n, slot, place, c, here)
    n_last = of_slot(n_last, pool, p_n, slot, place, n, mine)
    rounded = scaled(centred(values, mean, here, CENTRE), deviation, scale, offset, BIAS).to(dtype)
    low = product(first, interpolated(rounded, last, share, False).to(dtype), BM)
    low = tanh(gl.convert_layout(low, single).to(dtype).to(gl.float32)).to(dtype)
    low = gl.convert_layout(low, gl.SliceLayout(1, own)).to(gl.float32)
    factor = gl.sum(second.to(gl.float32) * low[:, None], 0) + base.to(gl.float32)
    rounded = scaled(centred(n_values, mean, mine, CENTRE), deviation, n_scale, n_offset, BIAS).to(dtype)
    mixed = interpolated(rounded, n_last, factor, False).to(dtype)
    gl.store(shifted + (i.to(gl.int64) * gl.num_programs(2) + r) * C + n, mixed, mask=mine)
    if i == 0:
        if ADD:
            gl.store(total + r * C + n, n_values, mask=mine)
        gl.store(normed + r * C + n, rounded, mask=mine)
