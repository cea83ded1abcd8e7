"""Decays of one number per token on Hopper, in Gluon: sums of a chunk's decays, factors between its tokens, gradients."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_tiles import exp2, plus
from .tiles import LN2, LOG2E

C = gl.constexpr(64)  # tokens in a chunk
GONE = gl.constexpr(-256.0)  # log2 units: 2^GONE is 0 in float32, and 64 sums of multiples of 2^-8 are exact
COARSE = gl.constexpr(49152.0)  # 1.5 * 2^15: adding and subtracting it rounds to multiples of 2^-8


@gluon.jit
def exp2_of_sum(whole, rest):
    """2^(whole + rest), as exact as float32 where the sum is not."""
    total = whole + rest
    return exp2(total) * (1.0 + LN2 * (rest - (total - whole)))


@gluon.jit
def exponential(whole, rest, EXACT: gl.constexpr):
    """2^(whole + rest)."""
    if EXACT:
        return exp2_of_sum(whole, rest)
    else:
        return exp2(whole + rest)


@gluon.jit
def log_decays(g, g_t, left, i):
    """The decays of a chunk of ``left`` tokens in log2 units, 0 after them."""
    return gl.maximum(gl.load(g + i * g_t, mask=i < left, other=0.0).to(gl.float32) * LOG2E, GONE)


@gluon.jit
def decay_vectors():
    """Memory of ``sums_of_decays`` for two chunks. Each has its own: Triton has all warps meet between stores in one allocation."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    coarse = gl.allocate_shared_memory(gl.float32, [2, C], plain)
    fine = gl.allocate_shared_memory(gl.float32, [2, C], plain)
    factor = gl.allocate_shared_memory(gl.float32, [2, C], plain)
    rest = gl.allocate_shared_memory(gl.float32, [2, C], plain)
    return coarse, fine, factor, rest


@gluon.jit
def sums_of_decays(d, vectors, at, scale, EXACT: gl.constexpr = False):
    """Store the sums of decays as multiples of 2^-8 and rests, scale 2^G and 2^R at ``at`` of four ``vectors``; returns 2^(G_L).

    Sums of multiples are exact, and so are their differences: D is accurate for every decay. EXACT: factors have the bits of float32.
    """
    whole = (d + COARSE) - COARSE
    rest = d - whole
    coarse = gl.associative_scan(whole, 0, plus)
    fine = gl.associative_scan(rest, 0, plus)
    all_coarse = gl.sum(whole, 0)
    all_fine = gl.sum(rest, 0)
    vectors[0].index(at).store(coarse)
    vectors[1].index(at).store(fine)
    vectors[2].index(at).store(exponential(coarse, fine, EXACT) * scale)
    vectors[3].index(at).store(exponential(all_coarse - coarse, all_fine - fine, EXACT))
    return exponential(all_coarse, all_fine, EXACT)


@gluon.jit
def factors_between(vectors, at, scale, TRANSPOSED: gl.constexpr, layout: gl.constexpr, EXACT: gl.constexpr = False):
    """The factors scale D [C,C] of the sums at ``at`` of ``vectors``: rows are queries; TRANSPOSED: columns are."""
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    if TRANSPOSED:
        coarse = vectors[0].index(at).load(by_column)[None, :] - vectors[0].index(at).load(by_row)[:, None]
        fine = vectors[1].index(at).load(by_column)[None, :] - vectors[1].index(at).load(by_row)[:, None]
    else:
        coarse = vectors[0].index(at).load(by_row)[:, None] - vectors[0].index(at).load(by_column)[None, :]
        fine = vectors[1].index(at).load(by_row)[:, None] - vectors[1].index(at).load(by_column)[None, :]
    return exponential(coarse, fine, EXACT) * scale


@gluon.jit
def before(a_sum, a_last, b_sum, b_last):
    """For scans of pairs (0, x): the sums of x before an element, without a difference."""
    return a_sum + a_last + b_sum, b_last


@gluon.jit
def gradients_of_decays(queries, keys, of_state, d, padding):
    """The gradient dg of a chunk: ``queries`` and ``keys`` are the terms of tokens from t on and before t, ``of_state`` of the state."""
    earlier = gl.associative_scan((gl.zeros_like(keys), keys), 0, before)[0]
    d_gate = gl.associative_scan(queries, 0, plus, reverse=True)
    d_gate += earlier + of_state
    return gl.where((d < -126.0) | padding, 0.0, d_gate)
