"""Programs that walk over the chunks of a sequence on Hopper, in Gluon: what a program computes, and its vectors of tokens."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.hopper_decays import GONE
from ....gpu.hopper_tiles import sequence_with_pieces, unknown
from ....gpu.tiles import LOG2E, slot_of, tokens_of
from .layouts import C


@gluon.jit
def walk_of_program(cu_seqlens, N, T, H, BLOCKS: gl.constexpr, PACKED: gl.constexpr, PIECE: gl.constexpr = 0):
    """The sequence, head and block of value channels of a program (sequence, head, block).

    Returns also the batch row and first row of the sequence, the numbers of its tokens and chunks, the index [slots,H] of its first chunk.
    PIECE > 0: of whole pieces of PIECE tokens; if PACKED, the programs are those of sequences that have one.
    """
    pid = gl.program_id(0)
    block = pid % BLOCKS
    slot = pid // BLOCKS // H
    h = pid // BLOCKS % H
    there = slot >= 0
    if PIECE > 0 and PACKED:
        slot = sequence_with_pieces(slot, cu_seqlens, N, PIECE)
        there = slot < N
        slot = gl.minimum(slot, N - 1)
    n, b, row, _, begin, done, tokens = tokens_of(slot, cu_seqlens, N, T, T, False, PACKED, False)
    if PIECE > 0:
        tokens = gl.where(there, tokens // PIECE * PIECE, 0)
    chunks = (gl.maximum(tokens, 0) + (C - 1)) // C
    first_chunk = slot_of(n, begin, done, T, C, PACKED).to(gl.int64) * H + h
    return slot.to(gl.int64), h, block, b, row, tokens, chunks, first_chunk


@gluon.jit
def nonzero(beta):
    """beta, at least 2^-100 in absolute value: what is divided by it later has the same factor."""
    return gl.where(gl.abs(beta) < 2.0**-100, 2.0**-100, beta)


@gluon.jit
def vectors_of(beta, reads, c, tokens, b_t, step, exists):
    """beta and read_t of chunk c, if it exists: [C]. beta is 0 after the last token."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = gl.arange(0, C, line)
    t = c * C + i
    known = (i * 0 == 0) & exists
    rates = gl.load(beta + t.to(gl.int64) * b_t, mask=known & (t < tokens), other=0.0).to(gl.float32)
    return rates, gl.load(reads + c * step + i, mask=known, other=1.0)


@gluon.jit
def of_tokens(x, x_t, c, tokens, layout: gl.constexpr):
    """The numbers of chunk c's tokens [C], 0 where there is no such token."""
    t = c * C + gl.arange(0, C, layout)
    return gl.load(x + t.to(gl.int64) * x_t, mask=(t >= 0) & (t < tokens), other=0.0).to(gl.float32)


@gluon.jit
def decays_of(g, g_t, c, tokens, layout: gl.constexpr, DECAYS: gl.constexpr):
    """The decays of chunk c [C] in log2 units, 0 where there is no such token."""
    if DECAYS:
        return gl.maximum(of_tokens(g, g_t, c, tokens, layout) * LOG2E, GONE)
    else:
        return gl.zeros([C], gl.float32, layout)


@gluon.jit
def places(state, n, head, dk, dv, steps):
    """The addresses of elements of the state of a head in row n."""
    s_n, s_h, s_k, s_v = steps
    return state + n * s_n + head * s_h + dk.to(gl.int64) * s_k + dv.to(gl.int64) * s_v


@gluon.jit
def row_of_pool(rows, n, chunks, ROWS_GIVEN: gl.constexpr):
    """The row of a pool that sequence n updates, and the number of its chunks: 0 where the row is negative."""
    if ROWS_GIVEN:
        n = gl.load(rows + n).to(gl.int64)
    return gl.maximum(n, 0), gl.where(n < 0, 0, chunks)


@gluon.jit
def store_in_pool(S, pool, n, head, dk, dv, steps, chunks):
    """Store a state [BV,K] in row n of a pool, if there was a chunk. Addresses are computed again: kept since it was loaded, they spill."""
    zero = unknown(chunks * 0)
    dk += zero
    dv += zero
    gl.store(places(pool, n, head, dk, dv, steps), S.to(pool.dtype.element_ty), mask=(dk >= 0) & (dv >= 0) & (chunks > 0))
