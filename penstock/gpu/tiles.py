"""Device functions that kernels of all families share: token ranges of programs, loads of tiles, products.

Time runs forward in a kernel: token i of a chunk is row ``first + i * step`` of the tensors, and step is -1 if the caller's time runs
backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HALVINGS = tl.constexpr(9)  # log2 of the most rows of ``sum_of_rows``


@triton.jit
def span_of(slot, cu_seqlens, N, T, L, PACKED: tl.constexpr):
    """Span ``slot`` of L tokens: its sequence, the begin and end of the sequence, and the number of the sequence's tokens before the span.

    Packed: the slots of sequence n start at ``cu_seqlens[n] // L + n``. Each sequence has at least as many slots as it needs. This needs
    no sum over sequences and no synchronization with the host. An unused slot begins at or after the end of its sequence.
    """
    if PACKED:
        low = slot * 0
        high = N
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(cu_seqlens + middle).to(tl.int64) // L + middle <= slot:
                low = middle
            else:
                high = middle
        n = low
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        end = tl.load(cu_seqlens + n + 1).to(tl.int64)
        done = (slot - begin // L - n) * L
    else:
        slots = tl.cdiv(T, L)
        n = slot // slots
        begin = (slot * 0).to(tl.int64)
        end = begin + T
        done = begin + (slot - n * slots) * L
    return n, begin, end, done


@triton.jit
def tokens_of(slot, cu_seqlens, N, T, L, SEGMENTS: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr):
    """The tokens of a program: a sequence or, with SEGMENTS, span ``slot`` of L tokens of a sequence.

    Returns sequence n, its batch row b, the first row and the step on the token axis, the begin of the sequence, the number of its tokens
    before the program's tokens, and the number of the program's tokens (0 or less for an unused slot).
    """
    if SEGMENTS:
        n, begin, end, done = span_of(slot, cu_seqlens, N, T, L, PACKED)
        tokens = tl.minimum(end - begin - done, L).to(tl.int32)
    else:
        n = slot
        begin = (slot * 0).to(tl.int64)
        end = begin + T
        if PACKED:
            begin = tl.load(cu_seqlens + n).to(tl.int64)
            end = tl.load(cu_seqlens + n + 1).to(tl.int64)
        done = begin * 0
        tokens = (end - begin).to(tl.int32)
    b = n.to(tl.int64)
    if PACKED:
        b = b * 0
    if REVERSE:
        row = end - 1 - done
    else:
        row = begin + done
    step = -1 if REVERSE else 1
    return n, b, row, step, begin, done, tokens


@triton.jit
def chunk_of_slot(slot, cu_seqlens, N, T, L, PACKED: tl.constexpr):
    """Of span ``slot`` of L tokens: the batch row, the first row on the token axis, the number of tokens (0 or less for an unused slot)."""
    _n, b, row, _step, _begin, _done, tokens = tokens_of(slot, cu_seqlens, N, T, L, True, PACKED, False)
    return b, row, tokens


@triton.jit
def slot_of(n, begin, done, T, L, PACKED: tl.constexpr):
    """The slot of the span of L tokens that begins after ``done`` tokens of sequence n: the inverse of ``span_of``."""
    if PACKED:
        slot = begin // L + n + done // L
    else:
        slot = n * tl.cdiv(T, L) + done // L
    return slot


@triton.jit
def tile(base, i, live, stride_i, j, stride_j, J: tl.constexpr, BJ: tl.constexpr):
    """Load [len(i), BJ] of a matrix, 0 where ``live`` is false or a column is out of range."""
    mask = live[:, None]
    if BJ * (J // BJ) != J:
        mask = mask & (j < J)[None, :]
    return tl.load(base + i[:, None] * stride_i + j[None, :] * stride_j, mask=mask, other=0.0)


@triton.jit
def uniform(condition):
    """A scalar condition for use in a tile's mask.

    Under Triton's interpreter the result of a comparison has the type of its operands. Broadcast, it is a tile of integers, and Triton 3.9
    refuses such masks. When compiled, this is the condition itself.
    """
    return tl.full([], True, tl.int1) & condition


@triton.jit
def rounded_bits(x, DROPPED: tl.constexpr):
    """Float32 x rounded to 24 - DROPPED significant bits. In integers: two casts are slower. The NaN that a GPU computes becomes 0."""
    return ((x.to(tl.int32, bitcast=True) + (1 << DROPPED - 1)) & -(1 << DROPPED)).to(tl.float32, bitcast=True)


@triton.jit
def to_tf32(x):
    """Round x to TF32, 11 significant bits. tl.dot truncates; truncation errors have the same sign and accumulate."""
    x = x.to(tl.float32)
    return tl.where(x == x, rounded_bits(x, 13), float("nan"))


@triton.jit
def to_bfloat16(x):
    """Round float32 x to 8 significant bits, as float32."""
    return tl.where(x == x, rounded_bits(x, 16), float("nan"))


@triton.jit
def in_two(x):
    """X as the sum of two bfloat16 tiles: 16 significant bits with the range of float32. The second has the NaN of x."""
    high = rounded_bits(x, 16)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def powers_of_two(largest, LEAST: tl.constexpr = 81):
    """Two reciprocal powers of two. ``largest`` times the first is in [2^14,2^15), if ``largest`` is at least 2^(LEAST - 127).

    Unbounded operands of float16 products are multiplied by the first, the products by the second. Neither rounds, except that values
    below 2^-28 of the largest become subnormal. The first is at most 2^(141 - LEAST) = 2^60, so products with it fit float32. If
    ``largest`` is infinite, the second is NaN, because finite values would be lost. The NaN is made by ``largest * 0.0``, which is exactly
    0 for finite values. ``largest - largest`` is not: if ``largest`` is a product, it becomes a fused multiply-add, the rounding error.
    """
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, LEAST), 254)
    return (268 - exponent << 23).to(tl.float32, bitcast=True), (exponent - 14 << 23).to(tl.float32, bitcast=True) + largest * 0.0


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """The product a b with float32 sums. PRECISION "bf16", "f16": operands of 16 bits; else tl.dot's ``input_precision`` for float32.

    Operands of "f16" must be in the range of float16.
    """
    if PRECISION == "bf16":
        c = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif PRECISION == "f16":
        c = tl.dot(a.to(tl.float16), b.to(tl.float16))
    elif PRECISION == "tf32":
        c = tl.dot(to_tf32(a), to_tf32(b), input_precision="tf32")
    else:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return c


@triton.jit
def sum_of_rows(x):
    """The sum over the first axis of x [BK,BV], whose length is a power of two: the halves are added, then the halves of the result, ...

    The order of the additions does not depend on the layout, so neither the number of warps nor BV changes a bit.
    """
    for _ in tl.static_range(HALVINGS):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), 0)
    return tl.reshape(x, [x.shape[1]])


@triton.jit
def after_loads(x, CUDA: tl.constexpr):
    """X in float32, by an instruction that the compiler does not move across loads.

    Else it moves x to other threads, which needs barriers, as soon as x is loaded, and later loads wait for it.
    """
    x = x.to(tl.float32)
    if CUDA:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x


@triton.jit
def sequence_with_pieces(rank, cu_seqlens, N, PIECE: tl.constexpr, BLOCK: tl.constexpr = 256):
    """The sequence of this rank among those of at least PIECE tokens, in their order; N if there are fewer."""
    found = rank * 0 + N
    before = rank * 0
    i = tl.arange(0, BLOCK)
    for first in tl.range(0, N, BLOCK):
        begin = tl.load(cu_seqlens + first + i, mask=first + i < N, other=0)
        end = tl.load(cu_seqlens + first + i + 1, mask=first + i < N, other=0)
        long = (end - begin >= PIECE).to(tl.int32)
        wanted = (long == 1) & (before + tl.cumsum(long, 0) == rank + 1)
        found += tl.sum(tl.where(wanted, first + i - N, 0), 0)
        before += tl.sum(long, 0)
    return found


@triton.jit
def rounded(S, pool):
    """S rounded to the dtype of the pool, if that has 16 bits. Not to float64."""
    if pool.dtype.element_ty.primitive_bitwidth < 32:
        S = S.to(pool.dtype.element_ty).to(tl.float32)
    return S
