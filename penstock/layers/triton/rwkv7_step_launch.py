"""Launches of the kernels of RWKV-7's decode steps. There are no gradients. All tensors but the pool are contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ...call.derivatives import count_write
from ...gpu.launch import on_device_of
from ...gpu.target import Target, power
from . import gates, launch, low_rank
from .few_rows_launch import REGISTERS, step_warps
from .launch import blocks
from .rwkv7_launch import Given
from .rwkv7_step import penstock_rwkv7_step

PARTS = 4
"""The most low-rank maps of one launch."""
ROWS = 128
"""The most tokens of ``low_rank_maps``."""
HIDDEN_ROWS = 1024
"""The most tokens of ``low_rank_ups``, if bits may depend on their number."""
WHOLE = 256
"""The most rows of weights that a program holds before it waits for the previous kernel: 64 columns are 32 KB."""
ACTIVATIONS = {"tanh": gates.TANH.value, "sigmoid": gates.SIGMOID.value, None: gates.IDENTITY.value}


def low_rank_maps(
    inputs: Sequence[Tensor], downs: Sequence[Tensor], ups: Sequence[Tensor], kinds: Sequence[str | None], *, early: bool = False
) -> list[Tensor]:  # fmt: skip
    """activation_i(x_i D_i) U_i of x_i [R,C], D_i [C,M_i] and U_i [M_i,N], in two launches. ``early`` as in ``low_rank_ups``."""
    R, unit = inputs[0].shape[0], _unit(downs)
    tile = {"BR": min(power(R, 16), 64), "BN": 16, "BK": 256 if R <= 16 else 128, "STAGES": 4, "WHOLE": False}
    return low_rank_ups(_products(inputs, downs, None, unit, tile, early=True), ups, kinds, early=early)


def low_rank_ups(
    hidden: Sequence[Tensor], ups: Sequence[Tensor], kinds: Sequence[str | None], *, alike: bool = False, early: bool = False
) -> list[Tensor]:  # fmt: skip
    """activation_i(h_i) U_i of h_i [R,M_i] and U_i [M_i,N].

    ``alike``: to the bit, a row does not depend on the number of rows: products have 64 rows. ``early``: no earlier kernel still writes the
    weights, so they may be read early.
    """
    rows, deepest = 64 if alike else min(power(hidden[0].shape[0], 16), 64), max(one.shape[0] for one in ups)
    whole = deepest <= WHOLE
    tile = {"BR": rows, "BN": 64, "BK": power(deepest, 16) if whole else 64, "STAGES": 2, "WHOLE": whole}
    return _products(hidden, ups, kinds, _unit(ups), tile, early=early or not whole)


def _unit(weights: Sequence[Tensor]) -> int:
    """A divisor of all sizes, by which kernels know their alignment."""
    return gcd(8, *(size for weight in weights for size in weight.shape))


def _products(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], kinds: Sequence[str | None] | None, unit: int, tile: dict[str, Any], *, early: bool
) -> list[Tensor]:  # fmt: skip
    """x_i W_i, or with ``kinds`` activation_i(x_i) W_i, of x_i [R,K_i] and W_i [K_i,N_i]."""
    x, R, more = inputs[0], inputs[0].shape[0], PARTS - len(weights)
    results = [one.new_empty(R, weight.shape[1]) for one, weight in zip(inputs, weights)]
    begins = [sum(blocks(weight.shape[1], tile["BN"]) for weight in weights[:part]) for part in range(len(weights) + 1)]
    activations = {f"A{n}": ACTIVATIONS[kind] for n, kind in enumerate([*(kinds or [None] * len(weights)), *[None] * more])}
    pdl = launch.early(x.device) if early else {}
    if R:
        on_device_of(x, low_rank.penstock_low_rank_products)[begins.pop(), blocks(R, tile["BR"])](
            *inputs, *[x] * more, *weights, *[weights[0]] * more, *results, *[results[0]] * more,
            *[weight.shape[0] // unit for weight in weights], *[0] * more, *[weight.shape[1] // unit for weight in weights], *[0] * more,
            *begins[1:], *[2**31 - 1] * more, R, PARTS=len(weights), ACTIVATED=kinds is not None, UNIT=unit, PDL=bool(pdl),
            num_warps=8 if tile["BR"] * tile["BK"] >= 2**14 else 4, **tile, **activations, **pdl,
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
    y, BN, pdl, target = torch.empty_like(c.r), power(N), launch.early(c.r.device), Target.of(c.r.device)
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
