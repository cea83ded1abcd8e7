"""Layouts, shared memory and loads of the backward kernel for decays per channel on Hopper, in Gluon."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ....gpu.hopper_tiles import async_load, meet, reinterpret, zero_rows_from
from ....gpu.ring import barriers, expect
from .dyadic import GROUPS, ROWS, C, R

LEVELS = gl.constexpr(6)


class Layouts(NamedTuple):
    """Layouts of tiles in registers and shared memory."""

    tokens: Any
    """[C,K]: a thread has the tokens of a group for two channels."""
    groups: Any
    """The same registers as [GROUPS,R,K]."""
    across: Any
    """Sums over groups [GROUPS,K]."""
    rows: Any
    """[C,W] and [K,W]: a thread has 16 contiguous bytes of a row."""
    mma: Any
    """Warp-group products [C,K]."""
    square: Any
    """Warp-group products [C,C]."""
    left: Any
    """Left operands of ``mma`` in registers."""
    block: Any
    """Products within blocks of ROWS tokens: [C / ROWS,ROWS,N]."""
    block_left: Any
    block_right: Any
    """Operands of ``block``."""
    half: Any
    whole: Any
    """Shared memory of tiles of 16 and 32 bits."""
    plain: Any
    plain2: Any
    """Shared memory of vectors and of matrices that no product reads."""


@gluon.constexpr_function
def layouts_of(WARPS, K, W, BYTES):
    """The layouts of a program with WARPS warps. K: key channels, W: value channels of a step, BYTES: of an element of the inputs."""
    across = WARPS // 4
    groups = gl.BlockedLayout([1, R, 2], [1, 1, 32], [GROUPS, 1, WARPS // GROUPS], [2, 1, 0])
    part = 16 // BYTES
    mma = gl.NVMMADistributedLayout([3, 0], [4, across], [16, K // across, 16])
    block = gl.NVMMADistributedLayout([2, 0], [4, 1, across], [1, 16, 8])
    made = Layouts(
        tokens=gl.BlockedLayout([R, 2], [1, 32], [GROUPS, WARPS // GROUPS], [1, 0]),
        groups=groups,
        across=gl.SliceLayout(1, groups),
        rows=gl.BlockedLayout([1, part], [32 * part // W, W // part], [WARPS, 1], [1, 0]),
        mma=mma,
        square=gl.NVMMADistributedLayout([3, 0], [4, across], [16, C // across, 16]),
        left=gl.DotOperandLayout(0, mma, 2),
        block=block,
        block_left=gl.DotOperandLayout(0, block, 2),
        block_right=gl.DotOperandLayout(1, block, 2),
        half=gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
        whole=gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2),
        plain=gl.SwizzledSharedLayout(1, 1, 1, [0]),
        plain2=gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
    )
    return Layouts(*[gl.constexpr(one) for one in made])  # Triton 3.6 takes no other layout as an argument of a device function


class Memory(NamedTuple):
    """Shared memory of ``penstock_channel_bwd_sm90``. Some of it is used for two tensors, one after the other."""

    q: Any
    k: Any
    v: Any
    """v [C,K], later the state's part of dq. With steps: the first tile of ``streamed``."""
    dO: Any
    """dO [C,K], later sums over groups. With steps: the second tile of ``streamed``."""
    streamed: Any
    """With steps: tiles of v and dO [2,C,K]."""
    dk: Any
    """The state's part of dk."""
    M: Any
    """M [C,C], later A."""
    X: Any
    """S, dS and k o rest, later X of all levels, later Y: [LEVELS,C,K]."""
    part: Any
    """Sums over groups [GROUPS,K]."""
    tables: Any
    """Factors [4,GROUPS,K]: to the middles of blocks of 4 and 8 groups, from the start of the chunk, to its end."""
    e: Any
    """The diagonal of dA [C]."""
    D: Any
    """The blocks of ROWS tokens on the diagonal of A: [C,ROWS]."""
    row: Any
    """rowsum(S o dS) [K]."""


@gluon.jit
def memory_of(kind: gl.constexpr, K: gl.constexpr, STEPS: gl.constexpr, L: gl.constexpr):
    """The shared memory of a program. STEPS: v and dO are loaded in steps of value channels."""
    q = gl.allocate_shared_memory(kind, [C, K], L.half)
    k = gl.allocate_shared_memory(kind, [C, K], L.half)
    if STEPS:
        streamed = gl.allocate_shared_memory(kind, [2, C, K], L.half)
        v = streamed.index(0)
        dO = streamed.index(1)
    else:
        v = gl.allocate_shared_memory(kind, [C, K], L.half)
        dO = gl.allocate_shared_memory(kind, [C, K], L.half)
        streamed = v
    dk = gl.allocate_shared_memory(kind, [C, K], L.half)
    M = gl.allocate_shared_memory(kind, [C, C], L.half)
    X = gl.allocate_shared_memory(kind, [LEVELS, C, K], L.half)
    part = gl.allocate_shared_memory(gl.float32, [GROUPS, K], L.plain2)
    tables = gl.allocate_shared_memory(gl.float32, [4, GROUPS, K], L.plain2)
    e = gl.allocate_shared_memory(gl.float32, [C], L.plain)
    D = gl.allocate_shared_memory(kind, [C, ROWS], L.plain2)
    row = gl.allocate_shared_memory(gl.float32, [K], L.plain)
    return Memory(q, k, v, dO, streamed, dk, M, X, part, tables, e, D, row)


class Tiles(NamedTuple):
    """TMA descriptors. Those of S and dS are pointers if the states are float32."""

    q: Any
    k: Any
    v: Any
    dO: Any
    S: Any
    dS: Any
    dv: Any
    dq: Any


class Place(NamedTuple):
    """Rows and columns of a program's tiles in the matrices of TMA copies, and its number of tokens."""

    line: Any
    column: Any
    value_column: Any
    pid: Any
    sequence: Any
    tokens: Any


@gluon.jit
def part_of(parts, first: gl.constexpr, row: gl.constexpr, column: gl.constexpr, ACROSS: gl.constexpr):
    """The part [64,64] at 64 ``row``, 64 ``column`` of a tile [64 ACROSS,64 ACROSS]. ``parts``: the same memory as tiles [64,64].

    ``first``: the number of the tile's first part. With a swizzle of 128 bytes, the first 64 columns of all rows come before the others.
    """
    return parts.index(first + column * ACROSS + row)


@gluon.jit
def load_chunk(tiles, memory, bars, place, H: gl.constexpr, HALF: gl.constexpr, L: gl.constexpr):
    """Start the loads of q, k, v and dO and, of 16 bits, of S and dS. Returns the memory of S and dS.

    dS after a complete chunk is in the rows of its tokens in dv and dq; dS after the last, shorter chunk of a sequence is in ``tiles.dS``.
    """
    kind: gl.constexpr = memory.q.dtype
    K: gl.constexpr = memory.q.shape[1]
    ACROSS: gl.constexpr = K // C  # parts of a state along each axis
    states = reinterpret(memory.X, kind, [LEVELS // ACROSS, K, K], L.half)
    S = states.index(0)
    dS = states.index(1)
    parts = reinterpret(memory.X, kind, [LEVELS * ACROSS, C, C], L.half)
    fence_async_shared()
    meet()
    mbarrier.expect(bars.index(0), 4 * tiles.q.block_type.nbytes)
    async_load(tiles.q, [place.line, place.column], bars.index(0), memory.q)
    async_load(tiles.k, [place.line, place.column], bars.index(0), memory.k)
    async_load(tiles.v, [place.line, place.value_column], bars.index(0), memory.v)
    async_load(tiles.dO, [place.line, place.value_column], bars.index(0), memory.dO)
    if not HALF:
        mbarrier.expect(bars.index(1), 2 * tiles.S.block_type.nbytes)
        async_load(tiles.S, [place.pid * K, 0], bars.index(1), S)
        in_rows = (tiles.dv, tiles.dq)
        if place.tokens < C:
            async_load(tiles.dS, [(place.sequence * H + place.pid % H) * K, 0], bars.index(1), dS)
        else:
            for m in gl.static_range(ACROSS):
                for right in gl.static_range(ACROSS):
                    into = part_of(parts, ACROSS * ACROSS, m, right, ACROSS)
                    async_load(in_rows[m], [place.line, place.column + right * C], bars.index(1), into)
    return S, dS


@gluon.jit
def ask_step(tiles, values, states, bars, place, n, steps, COPIES: gl.constexpr):
    """Start the loads of step n: 64 value channels of v and dO and, of 16 bits (COPIES = 4), of the state and its gradient."""
    W: gl.constexpr = tiles[0].block_shape[1]
    STAGES: gl.constexpr = bars[0].shape[0]
    at = ([place.line, place.value_column + n * W], [place.pid * states.shape[1], n * W])
    parts = (values, states)
    for m in gl.static_range(COPIES):
        tile = parts[m // 2].index(m % 2 * STAGES + n % STAGES)
        async_load(tiles[m], at[m // 2], bars[m].index(n % STAGES), tile, pred=n < steps)


@gluon.jit
def load_first_steps(tiles, memory, bars, place, W: gl.constexpr, STEPS: gl.constexpr, HALF: gl.constexpr, L: gl.constexpr):
    """Start the loads of q, k and of the first steps of W value channels, for heads of several blocks.

    Returns the descriptors of a step, its memory of v and dO, of S and dS, and its barriers.
    """
    kind: gl.constexpr = memory.q.dtype
    K: gl.constexpr = memory.q.shape[1]
    STAGES: gl.constexpr = K // W
    COPIES: gl.constexpr = 2 if HALF else 4
    states = reinterpret(memory.X, kind, [LEVELS * C // W, K, W], L.half)
    values = reinterpret(memory.streamed, kind, [2 * STAGES, C, W], L.half)
    step_bars = (barriers(STAGES, 1), barriers(STAGES, 1))
    if not HALF:  # unused shared memory, of a barrier too, may be aliased
        step_bars = (step_bars[0], step_bars[1], barriers(STAGES, 1), barriers(STAGES, 1))
    fence_async_shared()
    meet()
    step_tiles = (tiles.v, tiles.dO, tiles.S, tiles.dS)
    mbarrier.expect(bars.index(0), 2 * tiles.q.block_type.nbytes)
    for first in gl.static_range(STAGES):
        expect(step_tiles, step_bars, first, first < STEPS)
    meet()
    for first in gl.static_range(STAGES):
        ask_step(step_tiles, values, states, step_bars, place, first, STEPS, COPIES)
    async_load(tiles.q, [place.line, place.column], bars.index(0), memory.q)
    async_load(tiles.k, [place.line, place.column], bars.index(0), memory.k)
    return step_tiles, values, states, step_bars


@gluon.jit
def await_chunk(memory, bar, tokens, STEPS: gl.constexpr, L: gl.constexpr):
    """Wait for q, k and, without steps, v and dO. Zero the rows after the last token."""
    mbarrier.wait(bar, 0)
    if tokens < C:
        zero_rows_from(memory.q, tokens, L.tokens)
        zero_rows_from(memory.k, tokens, L.tokens)
        if not STEPS:
            zero_rows_from(memory.v, tokens, L.tokens)
            zero_rows_from(memory.dO, tokens, L.tokens)
        fence_async_shared()
        meet()
