"""Launches of the kernels of RWKV-7's decode steps. There are no gradients. All tensors but the pool are contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from ...call.derivatives import count_write
from ...gpu.launch import on_device_of
from ...gpu.target import Target, power
from . import gates, low_rank
from .few_rows_launch import REGISTERS, step_warps
from .launch import blocks, early
from .rwkv7_launch import Given
from .rwkv7_step import penstock_rwkv7_step

PARTS = 4
"""The most low-rank maps of one launch."""
ROWS = 128
"""The most tokens of ``low_rank_maps``."""
ACTIVATIONS = {"tanh": gates.TANH.value, "sigmoid": gates.SIGMOID.value, None: gates.IDENTITY.value}


def low_rank_maps(inputs: Sequence[Tensor], downs: Sequence[Tensor], ups: Sequence[Tensor], kinds: Sequence[str | None]) -> list[Tensor]:
    """activation_i(x_i D_i) U_i of x_i [R,C], D_i [C,M_i] and U_i [M_i,N], in two launches."""
    return _products(_products(inputs, downs, None), ups, kinds)


def _products(inputs: Sequence[Tensor], weights: Sequence[Tensor], kinds: Sequence[str | None] | None) -> list[Tensor]:
    """x_i W_i, or with ``kinds`` activation_i(x_i) W_i, of x_i [R,K_i] and W_i [K_i,N_i]."""
    x, R, more = inputs[0], inputs[0].shape[0], PARTS - len(weights)
    results = [one.new_empty(R, weight.shape[1]) for one, weight in zip(inputs, weights)]
    unit, rows = gcd(8, *(size for weight in weights for size in weight.shape)), power(R, 16)
    deep = weights[0].shape[0] >= weights[0].shape[1]
    BR, BN, BK = min(rows, 64), 16 if deep else 64, (256 if rows <= 16 else 128) if deep else 64
    begins = [sum(blocks(weight.shape[1], BN) for weight in weights[:part]) for part in range(len(weights) + 1)]
    activations = {f"A{n}": ACTIVATIONS[kind] for n, kind in enumerate([*(kinds or [None] * len(weights)), *[None] * more])}
    pdl = early(x.device)
    if R:
        on_device_of(x, low_rank.penstock_low_rank_products)[begins.pop(), blocks(R, BR)](
            *inputs, *[x] * more, *weights, *[weights[0]] * more, *results, *[results[0]] * more,
            *[weight.shape[0] // unit for weight in weights], *[0] * more, *[weight.shape[1] // unit for weight in weights], *[0] * more,
            *begins[1:], *[2**31 - 1] * more, R, PARTS=len(weights), ACTIVATED=kinds is not None, UNIT=unit, BN=BN, BR=BR, BK=BK,
            STAGES=4 if deep else 2, PDL=bool(pdl), num_warps=4, **activations, **pdl,
        )  # fmt: skip
    return results


def rwkv7_step(
    c: Given, gate: Tensor, values: Tensor, weight: Tensor, shift: Tensor, eps: float, pool: Tensor, slots: Tensor | None,
    warps: int | None = None,
) -> Tensor:  # fmt: skip
    """y [R,H,N] of ``penstock_rwkv7_step``; the pool [P,H,N,N], of any strides, is updated in place.

    ``values`` are v where they are not mixed. weight and shift of the norm [H*N]. slots [R]; without them token n has row n.
    """
    (R, H, N), (v, mix, first, v0) = c.r.shape, c.mixed
    y, BN, pdl, target = torch.empty_like(c.r), power(N), early(c.r.device), Target.of(c.r.device)
    warps = warps or step_warps(R, H, target.multiprocessors, BN * BN)
    size = pool.element_size()
    lines = pool.data_ptr() % 16 == 0 == pool.stride(0) * size % 16 and pool.stride(1) * size % 16 == 0
    dense = lines and pool.stride()[2:] == (N, 1) and N * N * size % (16 * warps) == 0
    limit = {"maxnreg": REGISTERS} if target.nvidia and warps <= 4 and BN * BN // (32 * warps) <= 64 else {}
    if R:
        on_device_of(c.r, penstock_rwkv7_step)[(R * H,)](
            c.r, c.k, c.w, c.rate, values if c.v is None else v, mix, first, gate, c.k_k, c.k_a, c.r_k, c.w0, c.a0, v0, weight, shift,
            pool, c.r if slots is None else slots, y, pool.shape[0], H, *pool.stride(), eps, N=N, BN=BN, MIX=c.v is not None,
            SLOTS=slots is not None, DENSE=dense, WARPS=warps, PDL=bool(pdl), CUDA=target.nvidia, num_warps=warps,
            enable_fp_fusion=False, **limit, **pdl,
        )  # fmt: skip
        count_write(pool)
    return y
