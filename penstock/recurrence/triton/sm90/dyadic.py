"""Factors of dyadic chunks for Hopper, in Gluon: the device functions that the forward, the backward and the weights kernel share.

A chunk of 64 tokens is GROUPS groups of R tokens. A thread holds all tokens of a group for two channels. Factors of levels up to R are
cumulative products in its registers; factors of higher levels are exponentials of sums over groups.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.hopper_tiles import exp2
from ....gpu.tiles import LOG2E, span_of

C = gl.constexpr(64)  # tokens in a chunk
GROUPS = gl.constexpr(8)  # of R tokens, where a launch has no chain over chunks; the forward kernel has 4 of 16
R = gl.constexpr(8)
ROWS = gl.constexpr(16)  # rows of a warp's product


@gluon.jit
def halves(x, L: gl.constexpr, WARPS: gl.constexpr):
    """The first and the second half of each block of 2 L tokens of x [GROUPS,N,K]: [GROUPS,N / 2 L,L,K] each."""
    GROUPS: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1] // (2 * L)
    K: gl.constexpr = x.shape[2]
    both: gl.constexpr = gl.BlockedLayout([1, N, L, 2, 2], [1, 1, 1, 32, 1], [GROUPS, 1, 1, WARPS // GROUPS, 1], [4, 3, 2, 1, 0])
    one: gl.constexpr = gl.BlockedLayout([1, N, L, 2], [1, 1, 1, 32], [GROUPS, 1, 1, WARPS // GROUPS], [3, 2, 1, 0])
    x = gl.permute(gl.reshape(x, [GROUPS, N, 2, L, K]), (0, 1, 3, 4, 2))
    a, b = gl.split(gl.convert_layout(x, both, assert_trivial=True))
    return gl.convert_layout(a, one, assert_trivial=True), gl.convert_layout(b, one, assert_trivial=True)


@gluon.jit
def joined(a, b, layout: gl.constexpr):
    """The inverse of ``halves``."""
    N: gl.constexpr = 2 * a.shape[1] * a.shape[2]
    y = gl.reshape(gl.permute(gl.join(a, b), (0, 1, 4, 2, 3)), [a.shape[0], N, a.shape[3]])
    return gl.convert_layout(y, layout, assert_trivial=True)


@gluon.jit
def widened(through, remaining, total, layout: gl.constexpr, WARPS: gl.constexpr):
    """From blocks of L tokens to blocks of 2 L: the products of decays up to each token, after each token, and of the block."""
    GROUPS: gl.constexpr = total.shape[0]
    L: gl.constexpr = through.shape[1] // total.shape[1]
    N: gl.constexpr = total.shape[1] // 2
    one: gl.constexpr = gl.BlockedLayout([1, N, L, 2], [1, 1, 1, 32], [GROUPS, 1, 1, WARPS // GROUPS], [3, 2, 1, 0])
    first, second = halves(total, 1, WARPS)
    a, b = halves(through, L, WARPS)
    through = joined(a, b * gl.convert_layout(first, one, assert_trivial=True), layout)
    a, b = halves(remaining, L, WARPS)
    remaining = joined(a * gl.convert_layout(second, one, assert_trivial=True), b, layout)
    return through, remaining, gl.convert_layout(gl.reshape(first * second, [GROUPS, N, total.shape[2]]), layout, assert_trivial=True)


@gluon.jit
def grouped(x, GROUPS: gl.constexpr, layout: gl.constexpr):
    """Reshape [C,K] to [GROUPS,R,K]."""
    return gl.convert_layout(gl.reshape(x, [GROUPS, x.shape[0] // GROUPS, x.shape[1]]), layout, assert_trivial=True)


@gluon.jit
def flat(x, layout: gl.constexpr):
    """Reshape [GROUPS,R,K] to [C,K]."""
    return gl.convert_layout(gl.reshape(x, [x.shape[0] * x.shape[1], x.shape[2]]), layout, assert_trivial=True)


@gluon.jit
def spread(x, R: gl.constexpr, layout: gl.constexpr):
    """Broadcast [GROUPS,K] over the R tokens of each group: [C,K]."""
    return flat(gl.expand_dims(x, 1).broadcast_to([x.shape[0], R, x.shape[1]]), layout)


@gluon.jit
def between(part, N: gl.constexpr, across: gl.constexpr):
    """In blocks of 2 N groups, the sums of the groups between each group and the middle of its block: [GROUPS,K]."""
    GROUPS: gl.constexpr = part.shape[0]
    K: gl.constexpr = part.shape[1]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, across))[:, None]
    x = gl.zeros([GROUPS, K], gl.float32, across)
    for n in gl.static_range(GROUPS):
        if n // N % 2 == 0:
            x += gl.where((group // N == n // N) & (group < n), part.slice(n, 1).load(across), 0.0)
        else:
            x += gl.where((group // N == n // N) & (group > n), part.slice(n, 1).load(across), 0.0)
    return x


@gluon.jit
def around(part, across: gl.constexpr):
    """The sums before each group and after each group [GROUPS,K], and of all groups [1,K]."""
    GROUPS: gl.constexpr = part.shape[0]
    K: gl.constexpr = part.shape[1]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, across))[:, None]
    before = gl.zeros([GROUPS, K], gl.float32, across)
    after = gl.zeros([GROUPS, K], gl.float32, across)
    whole = gl.zeros([1, K], gl.float32, across)
    for n in gl.static_range(GROUPS):
        one = part.slice(n, 1).load(across)
        whole += one
        before += gl.where(group > n, one, 0.0)
        after += gl.where(group < n, one, 0.0)
    return before, after, whole


@gluon.jit
def in_second_half(n: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """Whether a token is in the second half of its block of level n: [C,1]."""
    return ((gl.arange(0, C, gl.SliceLayout(1, layout)) >> n) & 1)[:, None] == 1


@gluon.jit
def factored(q, k, through, remaining, n: gl.constexpr, layout: gl.constexpr):
    """X of level n [C,K]: q with its factor in second halves, k with its factor in first halves."""
    second = in_second_half(n, q.shape[0], layout)
    Q = (q.to(gl.float32) * flat(through, layout)).to(q.dtype)
    if n == 0:
        return gl.where(second, Q, k)  # there is no token between k and the middle
    else:
        return gl.where(second, Q, (k.to(gl.float32) * flat(remaining, layout)).to(q.dtype))


@gluon.jit
def near_levels(q, k, x, PREVIOUS: gl.constexpr, layout: gl.constexpr, by_group: gl.constexpr):
    """From log2 decays x: X of the levels within a group, and q and k with their factors up to and after each token of a group [C,K]."""
    WARPS: gl.constexpr = gl.num_warps()
    total = exp2(grouped(x, GROUPS, by_group))
    remaining = gl.full([GROUPS, R, x.shape[1]], 1.0, gl.float32, by_group)
    through = remaining
    if not PREVIOUS:
        through = total
    X_0 = factored(q, k, through, remaining, 0, layout)
    through, remaining, total = widened(through, remaining, total, by_group, WARPS)
    X_1 = factored(q, k, through, remaining, 1, layout)
    through, remaining, total = widened(through, remaining, total, by_group, WARPS)
    X_2 = factored(q, k, through, remaining, 2, layout)
    through, remaining, total = widened(through, remaining, total, by_group, WARPS)
    return X_0, X_1, X_2, q.to(gl.float32) * flat(through, layout), k.to(gl.float32) * flat(remaining, layout)


@gluon.jit
def chunk_at(pid, cu_seqlens, N, T, H: gl.constexpr, PACKED: gl.constexpr):
    """Of program (chunk slot, head): the head, sequence, batch row, place of the first token in that row, and number of tokens."""
    h = (pid % H).to(gl.int64)
    n, begin, end, done = span_of(pid // H, cu_seqlens, N, T, C, PACKED)
    b = n.to(gl.int64)
    if PACKED:
        b = b * 0
    return h, n, b, begin + done, gl.minimum(end - begin - done, C).to(gl.int32)


@gluon.jit
def store_zeros(du, dg, at, K: gl.constexpr, OF_U: gl.constexpr, OF_G: gl.constexpr, layout: gl.constexpr):
    """Zeros for the sums over the tokens of a chunk that has none."""
    j = gl.arange(0, K, layout)
    if OF_U:
        gl.store(du + at + j, gl.zeros([K], gl.float32, layout))
    if OF_G:
        gl.store(dg + at + j, gl.zeros([K], gl.float32, layout))


@gluon.jit
def decays(g, g_t: gl.constexpr, g_k: gl.constexpr, tokens, K: gl.constexpr, layout: gl.constexpr):
    """Load the chunk's log2 decays [C,K], 0 after the last token."""
    i = gl.arange(0, C, gl.SliceLayout(1, layout))
    j = gl.arange(0, K, gl.SliceLayout(0, layout))
    at = (i // R * R)[:, None] * g_t + j[None, :] * g_k + (i % R)[:, None] * g_t
    return gl.load(g + at, mask=(i < tokens)[:, None], other=0.0).to(gl.float32) * LOG2E


@gluon.constexpr_function
def folded(layout, TRANSPOSED):
    """Convert a layout of four blocks [4,ROWS,K] ([4,K,ROWS] if TRANSPOSED) to the layout of the tile [C,K] of these blocks."""

    def fold(bases):
        return [[ROWS.value * x[0] + x[2], x[1]] if TRANSPOSED else [ROWS.value * x[0] + x[1], x[2]] for x in bases]

    shape = [layout.shape[0] * layout.shape[2], layout.shape[1]] if TRANSPOSED else [layout.shape[0] * layout.shape[1], layout.shape[2]]
    return gl.DistributedLinearLayout(
        fold(layout.reg_bases), fold(layout.lane_bases), fold(layout.warp_bases), fold(layout.block_bases), shape
    )


@gluon.constexpr_function
def in_blocks(layout):
    """Convert a layout of [C,C] to a layout of [C,4,ROWS]."""

    def cut(bases):
        return [[x[0], x[1] // ROWS.value, x[1] % ROWS.value] for x in bases]

    shape = [C.value, C.value // ROWS.value, ROWS.value]
    return gl.DistributedLinearLayout(cut(layout.reg_bases), cut(layout.lane_bases), cut(layout.warp_bases), cut(layout.block_bases), shape)


@gluon.jit
def blocks(tile, layout: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Load a tile [C,K] as an operand of products within its four blocks: [4,ROWS,K], or [4,K,ROWS] if TRANSPOSED."""
    K: gl.constexpr = tile.shape[1]
    N: gl.constexpr = C // ROWS
    if TRANSPOSED:
        x = tile.load(folded(gl.to_linear_layout(layout, [N, K, ROWS]), True))
        x = gl.permute(gl.reshape(x, [N, ROWS, K]), (0, 2, 1))
    else:
        x = gl.reshape(tile.load(folded(gl.to_linear_layout(layout, [N, ROWS, K]), False)), [N, ROWS, K])
    return gl.convert_layout(x, layout, assert_trivial=True)
