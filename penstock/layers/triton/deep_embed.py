"""The kernel of DeepEmbed: factors of the channels of each token, by a matrix of its own."""

import triton
import triton.language as tl

from .few_rows import begin


@triton.jit
def penstock_deep_embed(
    k, hidden, ids, table, part, up, offset,  # [R,F], [R,E], [R], [V,E,E], [R,E,E], [E,F], [F]
    y,  # [R,F]
    F, E: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = k o (h D up + offset) with h = hidden and D = table[id] + part, in float32, rounded once.

    Reads k [R,F], hidden [R,E], ids [R], table [V,E,E], part [R,E,E], up [E,F], offset [F]. Writes y [R,F]. Program (row, BF columns).
    EARLY: no earlier kernel still writes up and offset, so they are loaded before the wait for it.
    """
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BE)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = f < F
    if not EARLY:
        begin(PDL)
    weights = tl.load(up + i[:, None] * F + f[None, :], (i < E)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    base = tl.load(offset + f, inside, other=0.0).to(tl.float32)
    if EARLY:
        begin(PDL)
    token = tl.load(ids + n).to(tl.int64)
    at = i[:, None] * E + i[None, :]
    there = (i < E)[:, None] & (i < E)[None, :]
    matrix = tl.load(table + token * (E * E) + at, there, other=0.0).to(tl.float32)
    matrix += tl.load(part + n * (E * E) + at, there, other=0.0).to(tl.float32)
    mixed = tl.sum(tl.load(hidden + n * E + i, i < E, other=0.0).to(tl.float32)[:, None] * matrix, 0)
    factors = tl.sum(mixed[:, None] * weights, 0) + base
    values = tl.load(k + n * F + f, inside, other=0.0).to(tl.float32)
    tl.store(y + n * F + f, (values * factors).to(y.dtype.element_ty), inside)
