"""Matrix products that compute each row independently of the number of rows, to the bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gpu.launch import on_device_of
from ...gpu.target import Target, power
from ...gpu.tiles import uniform
from .launch import PROGRAMS, blocks, precision


@triton.jit(do_not_specialize=["M"])
def penstock_product(
    x,  # [M,K]
    weight,  # [N,K]
    y,  # [M,N]; if APART [SPLIT,M,N] float32
    gate,  # [M,N]
    M, N, K, w_n, w_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, APART: tl.constexpr, EVEN: tl.constexpr,
    RELU_SQUARED: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = x W^T. RELU_SQUARED: y becomes relu(y)^2. GATE: y is multiplied by sigmoid(gate).

    Reads x [M,K], W [N,K], gate [M,N]. Writes y [M,N]. A program sums a tile [BM,BN] over K in order. EVEN: K is a multiple of SPLIT * BK.

    With SPLIT parts, part q has every SPLIT-th block of K from block q on; the sums of the parts are added in order. APART: program (tile,
    q) stores the sum of part q.
    """
    tiles = tl.cdiv(M, BM)
    pid = tl.program_id(0)
    m = pid % tiles * BM + tl.arange(0, BM)
    n = pid // tiles * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows, columns = m < M, n < N
    x += tl.where(rows, m, 0).to(tl.int64)[:, None] * K + k[None, :]
    weight += tl.where(columns, n, 0).to(tl.int64)[None, :] * w_n + k[:, None] * w_k
    to = m.to(tl.int64)[:, None] * N + n[None, :]
    here = rows[:, None] & columns[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for turn in tl.static_range(1 if APART else SPLIT):
        q = tl.program_id(1) if APART else turn
        part = tl.zeros([BM, BN], tl.float32)
        for begin in tl.range(q * BK, K, SPLIT * BK):
            if EVEN:
                a = tl.load(x + begin, rows[:, None], other=0.0)
                b = tl.load(weight + tl.cast(begin, tl.int64) * w_k)
            else:
                inside = k < K - begin
                a = tl.load(x + begin, rows[:, None] & inside[None, :], other=0.0)
                b = tl.load(weight + tl.cast(begin, tl.int64) * w_k, inside[:, None], other=0.0)
            part = tl.dot(a, b, part, input_precision=PRECISION)
        total = part if turn == 0 else total + part
    if APART:
        tl.store(y + tl.program_id(1).to(tl.int64) * M * N + to, total, here)
    else:
        total = _finished(total, gate + to, here, RELU_SQUARED, GATE)
        tl.store(y + to, total.to(y.dtype.element_ty), here)


@triton.jit
def _finished(y, gate, here, RELU_SQUARED: tl.constexpr, GATE: tl.constexpr):
    if RELU_SQUARED:
        positive = tl.where(y < 0, 0.0, y)  # keeps NaN
        y = positive * positive
    if GATE:
        y = y / (1 + tl.exp(-tl.load(gate, here, other=0.0).to(tl.float32)))
    return y


@triton.jit(do_not_specialize=["size"])
def penstock_sum_of_parts(
    parts,  # [SPLIT,size] float32
    gate, y,  # [size]
    size,
    SPLIT: tl.constexpr, RELU_SQUARED: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = sum_q parts_q in the order of the parts, then as ``penstock_product``.

    Reads parts [SPLIT,size], gate [size], writes y [size]. A program has BLOCK elements.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    total = tl.load(parts + at, here, other=0.0)
    for q in tl.static_range(1, SPLIT):
        total += tl.load(parts + q * tl.cast(size, tl.int64) + at, here, other=0.0)
    tl.store(y + at, _finished(total, gate + at, here, RELU_SQUARED, GATE).to(y.dtype.element_ty), here)


@triton.jit(do_not_specialize=["M"])
def penstock_product_of_few_rows(
    x,  # [M,K]
    weight,  # [N,K]
    y,  # [M,N]
    M, N, K, w_n,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """y = x W^T for up to ROWS rows, without tensor cores.

    Reads x [M,K], W [N,K], writes y [M,N]. A program has BN rows of W: all loads of a tile [BN,BK] are in flight at once. EVEN: K is a
    multiple of BK.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    m = tl.arange(0, ROWS)
    columns = n < N
    weight += tl.where(columns, n, 0).to(tl.int64)[:, None] * w_n + k[None, :]
    partial = tl.zeros([BN, BK], tl.float32)
    total = tl.zeros([BN, ROWS], tl.float32)
    for begin in tl.range(0, K, BK):
        inside = k < K - begin
        if EVEN:
            w = tl.load(weight).to(tl.float32)
        else:
            w = tl.load(weight, inside[None, :], other=0.0).to(tl.float32)
        for row in tl.static_range(ROWS):
            a = tl.load(x + row * tl.cast(K, tl.int64) + begin + k, inside & uniform(row < M), other=0.0).to(tl.float32)
            if ROWS == 1:
                partial += w * a[None, :]
            else:
                total += tl.where(m[None, :] == row, tl.sum(w * a[None, :], 1)[:, None], 0.0)
        weight += BK
    if ROWS == 1:
        total += tl.sum(partial, 1)[:, None]
    to = m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(y + to, total.to(y.dtype.element_ty), (m < M)[None, :] & columns[:, None])


def _tile(x: Tensor, weight: Tensor, split: int) -> tuple[int, int]:
    """Rows of x and of the weight per program."""
    BM = 64 if x.shape[0] <= 64 else 128
    BN = next((size for size in (128, 64, 32) if blocks(x.shape[0], BM) * blocks(weight.shape[0], size) * split >= PROGRAMS // 4), 16)
    return BM, min(BN, 64) if x.element_size() == 4 else BN


def in_parts(x: Tensor, weight: Tensor, split: int) -> bool:
    """Whether the parts of K have programs of their own, whose sums another kernel adds."""
    BM, BN = _tile(x, weight, split)
    return split > 1 and blocks(x.shape[0], BM) * blocks(weight.shape[0], BN) < PROGRAMS // 4


def multiply(x: Tensor, weight: Tensor, split: int = 1, *, relu_squared: bool = False, gate: Tensor | None = None) -> Tensor:
    """``x @ weight.T`` for x [M,K] and weight [N,K]. The bits of a row depend only on this row and on ``split``.

    With ``relu_squared``, the result y becomes relu(y)^2, with ``gate`` [M,N] y sigmoid(gate). Tiles of 64 rows and more use the same
    instructions: on Hopper, products of four warps with 64 rows each.
    """
    (M, K), N = x.shape, weight.shape[0]
    y, (BM, BN) = x.new_empty(M, N), _tile(x, weight, split)
    BK = 32 if x.element_size() == 4 else 128 if BN <= 64 and split == 1 else 64
    stages = min(4, 1 + Target.of(x.device).shared_memory // ((BM + BN) * BK * x.element_size()))  # one fewer is in shared memory
    programs, apart = blocks(M, BM) * blocks(N, BN), in_parts(x, weight, split)
    given, options = y if gate is None else gate, {"RELU_SQUARED": relu_squared, "GATE": gate is not None}
    sums = x.new_empty(split, M, N, dtype=torch.float32) if apart else y
    if y.numel():
        on_device_of(x, penstock_product)[programs, split if apart else 1](
            x, weight, sums, given, M, N, K, *weight.stride(), BM=BM, BN=BN, BK=BK, SPLIT=split, APART=apart,
            EVEN=K % (split * BK) == 0, PRECISION=precision(x), num_warps=BM // 16, num_stages=stages, **options,
        )  # fmt: skip
    if y.numel() and apart:
        on_device_of(x, penstock_sum_of_parts)[(blocks(M * N, 1024),)](
            sums, given, y, M * N, SPLIT=split, BLOCK=1024, num_warps=4, **options
        )
    return y


def multiply_few(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for x [M,K] of at most 4 rows and weight [N,K], contiguous along K.

    cuBLAS takes 5.5 us for one row and 2048 x 2048 weights in bfloat16 on an H200; reading them takes 2 us.
    """
    (M, K), N = x.shape, weight.shape[0]
    y = x.new_empty(M, N)
    BK = 2048 if K % 2048 == 0 and M == 1 else 1024
    BK = min(BK, power(K, 16))
    on_device_of(x, penstock_product_of_few_rows)[(blocks(N, 4),)](
        x, weight, y, M, N, K, weight.stride(0), ROWS=power(M, 1), BN=4, BK=BK, EVEN=K % BK == 0, num_warps=4
    )  # fmt: skip
    return y
