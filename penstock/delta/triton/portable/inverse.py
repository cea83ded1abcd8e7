"""T = (I - diag(beta) N)^-1 of a chunk, with N strictly lower triangular: T - I in memory that only this program uses.

16x16 diagonal blocks of T are substituted forward in float32. Then pairs of blocks are merged, T21 = T22 (N21 T11), first those of 16
tokens, then those of 32: two products of [C/2,C/2]. T - I is the operand, and the identity is added in float32.

Results go through memory, because Triton does not share work between warps where operands of products are results of others, and because
halves of tiles take half the registers. A barrier of the program is enough.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .levels import strengths, within
from .products import product_with_T

SUBCHUNK = tl.constexpr(16)  # tokens of a block that is solved by substitution


@triton.jit
def solved_blocks(pairs, beta, tokens, beta_t, C: tl.constexpr, STREAMS: tl.constexpr):
    """T - I of the diagonal blocks [C/16,16,16], by forward substitution: row r of T is row r of I plus N[r,:r] T[:r]."""
    block = tl.arange(0, C // SUBCHUNK) * SUBCHUNK
    r = tl.arange(0, SUBCHUNK)
    t = tl.zeros((C // SUBCHUNK, SUBCHUNK, SUBCHUNK), tl.float32)
    for row in tl.range(1, SUBCHUNK, num_stages=1):
        token = block + row
        strength = strengths(beta, token, token < tokens, beta_t, STREAMS)
        n = tl.load(pairs + (token * C + block)[:, None] + r[None, :], mask=(r < row)[None, :], other=0.0) * strength[:, None]
        made = n + tl.sum(n[:, :, None] * t, 1)
        t = tl.where((r == row)[None, :, None], made[:, None, :], t)
    return t


@triton.jit
def merge(pairs, solved, beta, tokens, beta_t, L, C: tl.constexpr, STREAMS: tl.constexpr, SOLVE: tl.constexpr):
    """Store the blocks of T below pairs of diagonal blocks of L tokens."""
    r = tl.arange(0, C // 2)
    first = r // L * (2 * L) + r % L  # the tokens of the first block of each pair
    second = first + L
    own = within(r, L)
    strength = strengths(beta, second, second < tokens, beta_t, STREAMS)[:, None]
    at = second[:, None] * C + first[None, :]
    N = tl.load(pairs + at, mask=own, other=0.0) * strength
    N += product_with_T(N, tl.load(solved + first[:, None] * C + first[None, :], mask=own, other=0.0), SOLVE)
    N += product_with_T(tl.load(solved + second[:, None] * C + second[None, :], mask=own, other=0.0), N, SOLVE)
    tl.debug_barrier()
    tl.store(solved + at, N, mask=own)
    tl.debug_barrier()


@triton.jit
def solve(pairs, solved, beta, tokens, beta_t, i, C: tl.constexpr, STREAMS: tl.constexpr, SOLVE: tl.constexpr):
    """Store T - I in ``solved`` [C,C], from N in ``pairs`` [C,C], which may be the same memory. Of N, the lower triangle is read."""
    tl.debug_barrier()
    t = solved_blocks(pairs, beta, tokens, beta_t, C, STREAMS)
    tl.debug_barrier()
    block = tl.arange(0, C // SUBCHUNK)[:, None, None] * SUBCHUNK
    r = tl.arange(0, SUBCHUNK)
    tl.store(solved + (block + r[None, :, None]) * C + block + r[None, None, :], t)
    tl.store(solved + i[:, None] * C + i[None, :], tl.zeros((C, C), tl.float32), mask=(i // SUBCHUNK)[:, None] < (i // SUBCHUNK)[None, :])
    tl.debug_barrier()
    merge(pairs, solved, beta, tokens, beta_t, SUBCHUNK, C, STREAMS, SOLVE)
    merge(pairs, solved, beta, tokens, beta_t, 2 * SUBCHUNK, C, STREAMS, SOLVE)


@triton.jit
def store_product_with_T(made, Aq, solved, i, C: tl.constexpr, BJ: tl.constexpr, SOLVE: tl.constexpr):
    """Store Ap = Aq T (pointer [C,C]), BJ columns at a time."""
    tl.static_assert(C % BJ == 0)
    A = tl.load(Aq + i[:, None] * C + i[None, :], mask=i[None, :] <= i[:, None], other=0.0)
    for first in tl.range(0, C, BJ, num_stages=1):
        u = first + tl.arange(0, BJ)
        at = i[:, None] * C + u[None, :]
        P = tl.load(Aq + at, mask=u[None, :] <= i[:, None], other=0.0)
        P += product_with_T(A, tl.load(solved + at), SOLVE)
        tl.store(made + at, P.to(made.dtype.element_ty))
