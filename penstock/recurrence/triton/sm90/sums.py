"""Sums over tokens for the gradients of decays per channel on Hopper: from the products of all levels to dq or dk and to dg."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.hopper_tiles import exp2, meet, reinterpret
from .dyadic import GROUPS, C, R, around, decays, flat, grouped, halves, in_second_half, joined, spread, widened

KINDS = gl.constexpr(3)  # kinds of sums over groups: of levels 16 and 32, and of the terms of the states


@gluon.jit
def over_the_middle(x, L: gl.constexpr, LATER: gl.constexpr, layout: gl.constexpr, WARPS: gl.constexpr):
    """In blocks of 2 L tokens: the sum of x over the second half, for tokens of the first (LATER); else of the first, for the second."""
    a, b = halves(x, L, WARPS)
    if LATER:
        y = gl.expand_dims(gl.sum(b, 2), 2).broadcast_to(a.shape)
        y = joined(y, gl.zeros_like(b), layout)
    else:
        y = gl.expand_dims(gl.sum(a, 2), 2).broadcast_to(b.shape)
        y = joined(gl.zeros_like(a), y, layout)
    return y


@gluon.jit
def from_groups(sums, carry, LATER: gl.constexpr, across: gl.constexpr):
    """From sums of groups [KINDS,GROUPS,K]: the sums over later (LATER) or earlier groups in blocks of 2, 4 and 8 groups: [GROUPS,K]."""
    WARPS: gl.constexpr = gl.num_warps()
    K: gl.constexpr = sums.shape[2]
    whole: gl.constexpr = gl.BlockedLayout([1, GROUPS, 2], [1, 1, 32], [1, 1, WARPS], [2, 1, 0])
    eight = sums.index(2).load(gl.SliceLayout(0, whole))[None, :, :]
    four = eight + sums.index(1).load(gl.SliceLayout(0, whole))[None, :, :]
    two = four + sums.index(0).load(gl.SliceLayout(0, whole))[None, :, :]
    x = over_the_middle(two, 1, LATER, whole, WARPS)
    x += over_the_middle(four, 2, LATER, whole, WARPS)
    x += over_the_middle(eight, 4, LATER, whole, WARPS)
    carry.store(gl.convert_layout(gl.reshape(x, [GROUPS, K]), gl.SliceLayout(0, whole), assert_trivial=True))
    return carry.load(across)


@gluon.jit
def collected(
    tile, through_state, Y_s, x, tables, sums, of_levels, layout: gl.constexpr, by_group: gl.constexpr,
    QUERIES: gl.constexpr, PREVIOUS: gl.constexpr, DG: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """dq (QUERIES) or dk [C,K] from levels and state, and its part of dg [GROUPS,R,K] within groups; ``sums`` gets sums of groups.

    HALF: tiles of levels are to be multiplied by ``of_levels``, which is part of ``tables``; else it is 1.
    """
    WARPS: gl.constexpr = gl.num_warps()
    K: gl.constexpr = tile.shape[1]
    across: gl.constexpr = gl.SliceLayout(1, by_group)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, across))[:, None]
    total = exp2(grouped(x, GROUPS, by_group))
    remaining = gl.full([GROUPS, R, K], 1.0, gl.float32, by_group)
    through = remaining
    if not PREVIOUS:
        through = total
    raw = tile.load(layout).to(gl.float32)
    d = gl.zeros([C, K], gl.float32, layout)
    d_gate = gl.zeros([GROUPS, R, K], gl.float32, by_group)
    for n in gl.static_range(3):  # the levels within a group
        here = in_second_half(n, C, layout)
        factor = flat(through, layout)
        if not QUERIES:
            here = here == 0
            factor = flat(remaining, layout)
        y = gl.where(here, Y_s.index(n).load(layout).to(gl.float32) * factor, 0.0)
        d += y
        if DG:
            z = grouped(raw * y, GROUPS, by_group)
            if QUERIES and not PREVIOUS:
                d_gate += z
            for m in gl.static_range(n):
                d_gate += over_the_middle(z, 1 << m, QUERIES, by_group, WARPS)
        through, remaining, total = widened(through, remaining, total, by_group, WARPS)
    if HALF:
        d *= of_levels
        d_gate *= of_levels
    factor = flat(through, layout)
    if not QUERIES:
        factor = flat(remaining, layout)
    raw = raw * factor
    far = gl.zeros([C, K], gl.float32, layout)
    for n in gl.static_range(4):  # the levels of groups, then the state
        if n < 3:
            y = Y_s.index(3 + n).load(layout).to(gl.float32)
            here = (group >> n & 1) == 1
            if not QUERIES:
                here = here == 0
            if n == 0:
                to_middle = gl.where(here, of_levels, gl.zeros([GROUPS, K], gl.float32, across))
            else:
                to_middle = gl.where(here, tables.index(n - 1).load(across), 0.0)
        else:
            y = through_state.load(layout).to(gl.float32)
            if QUERIES:
                to_middle = tables.index(2).load(across)
            else:
                to_middle = tables.index(3).load(across)
        far += y * spread(to_middle, R, layout)
        if DG and n > 0:
            sums.index(n - 1).store(gl.sum(grouped(raw * y, GROUPS, by_group), 1) * to_middle)
    if DG:
        z = grouped(raw * far, GROUPS, by_group)
        if QUERIES and not PREVIOUS:
            d_gate += z
        for m in gl.static_range(3):
            d_gate += over_the_middle(z, 1 << m, QUERIES, by_group, WARPS)
    return d + far * factor, d_gate


@gluon.jit
def grouped_row(row, across: gl.constexpr):
    """Load [K] as [1,K]."""
    return row.load(gl.SliceLayout(0, across))[None, :]


@gluon.jit
def store_sum(to, x, part, by_group: gl.constexpr):
    """Store the sum of x [C,K] over its rows at ``to``. ``part``: memory of [GROUPS,K], which other warps may still read."""
    across: gl.constexpr = gl.SliceLayout(1, by_group)
    meet()
    part.store(gl.sum(grouped(x, part.shape[0], by_group), 1))
    _before, _after, whole = around(part, across)
    gl.store(to + gl.arange(0, part.shape[1], gl.SliceLayout(0, across)), gl.sum(whole, 0))


@gluon.jit
def store_gradients(
    memory, Y_s, x, gates, bonus, whole, of_levels, outputs, first, per_chunk, tokens, H: gl.constexpr,
    DG: gl.constexpr, STATIC: gl.constexpr, PREVIOUS: gl.constexpr, HALF: gl.constexpr, AGAIN: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Store dq, dk, dg and du of a chunk from the products Y of all levels and the states' parts of dq and dk, in ``memory``.

    ``outputs``: pointers to dq, dk, dg and du. ``first``: the chunk's place in the first three, ``per_chunk`` its place in sums over the
    tokens of chunks. ``whole``: the sum of the chunk's decays. AGAIN: decays are loaded again, which needs fewer registers, and rows are
    addressed by groups; else ``x`` has the decays.
    """
    kind: gl.constexpr = memory.q.dtype
    K: gl.constexpr = memory.q.shape[1]
    g, g_t, g_k = gates
    dq, dk, dg, du = outputs
    i = gl.arange(0, C, gl.SliceLayout(1, L.tokens))
    j = gl.arange(0, K, gl.SliceLayout(0, L.tokens))
    live = (i < tokens)[:, None]
    if AGAIN:
        at = (i // R * R).to(gl.int64)[:, None] * (H * K) + j[None, :] + (i % R).to(gl.int64)[:, None] * (H * K) + first
    else:
        at = i.to(gl.int64)[:, None] * (H * K) + j[None, :] + first
    sums = reinterpret(memory.dO, gl.float32, [KINDS, GROUPS, K], L.plain2)
    if AGAIN:
        x = decays(g, g_t, g_k, tokens, K, L.tokens)
    d, d_gate = collected(memory.q, memory.v, Y_s, x, memory.tables, sums, of_levels, L.tokens, L.groups, True, PREVIOUS, DG, HALF)
    e = memory.e.load(gl.SliceLayout(1, L.tokens))[:, None]
    gl.store(dq + at, (d + memory.k.load(L.tokens).to(gl.float32) * (e * bonus)).to(kind), mask=live)
    if DG:
        meet()
        d_gate = flat(d_gate, L.tokens) + spread(from_groups(sums, memory.part, True, L.across), R, L.tokens)
        whole = exp2(whole) * grouped_row(memory.row, L.across)
        d_gate += spread(whole.broadcast_to([GROUPS, K]), R, L.tokens)
        meet()
    if AGAIN:
        x = decays(g, g_t, g_k, tokens, K, L.tokens)
    d, more = collected(memory.k, memory.dk, Y_s, x, memory.tables, sums, of_levels, L.tokens, L.groups, False, PREVIOUS, DG, HALF)
    if AGAIN:
        e = memory.e.load(gl.SliceLayout(1, L.tokens))[:, None]
    gl.store(dk + at, (d + memory.q.load(L.tokens).to(gl.float32) * (e * bonus)).to(kind), mask=live)
    if DG:
        meet()
        d_gate += flat(more, L.tokens) + spread(from_groups(sums, memory.part, False, L.across), R, L.tokens)
        if STATIC:
            store_sum(dg + per_chunk, gl.where(live, d_gate, 0.0), memory.part, L.groups)
        else:
            gl.store(dg + at, d_gate.to(dg.dtype.element_ty), mask=live)
    if PREVIOUS:
        own = memory.q.load(L.tokens).to(gl.float32) * memory.k.load(L.tokens).to(gl.float32) * e
        store_sum(du + per_chunk, own, memory.part, L.groups)
