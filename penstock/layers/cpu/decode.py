"""Decode steps of RWKV around their linear maps by native kernels: a norm with a token shift, and the recurrence of RWKV-5 and RWKV-6."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...call.derivatives import count_write
from ...cpu import DTYPES, TEAM, Strided, address, run

FACTORS = 6
"""The most factors of ``shifted_norm``."""


class _Shift(ctypes.Structure):
    """The struct ``shift`` of shift.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "y", "total", "normed", "before", "weight", "bias")),
        ("mu", ctypes.c_void_p * FACTORS),
        ("mixed", ctypes.c_void_p),
        ("pool", Strided),
        ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("R", "C", "count", "dtype", "weight_dtype", "mu_dtype", "centre", "complement")),
        ("eps", ctypes.c_double),
        *TEAM,
    ]


class _Step(ctypes.Structure):
    """The struct ``step`` of rwkv.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("r", "k", "v", "gate", "low", "y")),
        *((name, Strided) for name in ("u", "bias")),
        *((name, ctypes.c_void_p) for name in ("weight", "shift")),
        ("pool", Strided),
        ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("R", "H", "K", "V", "dtype", "weight_dtype")),
        ("eps", ctypes.c_double),
        *TEAM,
    ]


def refuses_shift(x: Tensor, y: Tensor | None, norm: Sequence[Tensor], factors: Sequence[Tensor]) -> str | None:
    """Why ``shifted_norm`` does not take these dtypes and this number of factors, or None. ``norm``: its weight and bias."""
    if not 0 < len(factors) <= FACTORS:
        return f"it takes 1 to {FACTORS} factors, got {len(factors)}"
    if (y is not None and y.dtype != x.dtype) or len({one.dtype for one in norm}) > 1 or len({one.dtype for one in factors}) > 1:
        return "tokens and the residual must have one dtype, weight and bias of the norm, too, and all factors"
    return None


def refuses_step(tokens: Sequence[Tensor], norm: Sequence[Tensor]) -> str | None:
    """Why ``rwkv_step`` does not take these dtypes, or None. ``tokens``: also the low-rank part. ``norm``: its weight and bias."""
    if len({x.dtype for x in tokens}) > 1 or norm[0].dtype != norm[1].dtype:
        return "tokens must have one dtype, weight and bias of the norm, too"
    return None


def shifted_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, pool: Tensor, slots: Tensor | None,
    mu: Sequence[Tensor], *, centre: bool, complement: bool, kept: bool,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """The sum of x and y [B,1,C], its norm z, the rows p of the pool, and z + (p - z) m_i for each token; z replaces p.

    x, y, weight, bias and mu [C] are contiguous, mu of one dtype. m_i = mu_i, with ``complement`` 1 - mu_i. z and p are undefined unless
    they are ``kept``. pool [P,C] may have any strides and dtype. slots int64 [B], contiguous; without them token n has row n.
    """
    C = x.shape[-1]
    total = x if y is None else torch.empty_like(x)
    normed, before = (torch.empty_like(x), torch.empty_like(x)) if kept else (x, x)
    mixed = x.new_empty((len(mu), *x.shape))
    written = (normed.data_ptr(), before.data_ptr()) if kept else (None, None)
    factors = (ctypes.c_void_p * FACTORS)(*(one.data_ptr() for one in mu))
    call = _Shift(
        x.data_ptr(), address(y), total.data_ptr(), *written, weight.data_ptr(), address(bias), factors, mixed.data_ptr(), Strided.of(pool),
        address(slots), x.numel() // C, C, len(mu), DTYPES[x.dtype], DTYPES[weight.dtype], DTYPES[mu[0].dtype], centre, complement, eps,
    )  # fmt: skip
    run("shifted_norm", call, x.numel() * (4 + len(mu)))
    count_write(pool)
    return total, normed, before, mixed.unbind()


def rwkv_step(
    r: Tensor, k: Tensor, v: Tensor, gate: Tensor, u: Tensor, bias: Tensor, low: Tensor | None, pool: Tensor, slots: Tensor | None,
    weight: Tensor, shift: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """y, of the shape of v, of a step whose log decay is -exp(bias + low). The pool [P,H,K,V], of any strides, is updated in place.

    r, k and low have R*H*K elements, v and gate R*H*V, weight and shift, of one dtype, H*V; all of these are contiguous. u and bias are
    [H,K] of any strides. slots int64 [R], contiguous; without them token n has row n.
    """
    _, H, K, V = pool.shape
    y, R = torch.empty_like(v), v.numel() // (H * V)
    call = _Step(
        *map(address, (r, k, v, gate, low, y)), Strided.of(u), Strided.of(bias), weight.data_ptr(), shift.data_ptr(), Strided.of(pool),
        address(slots), R, H, K, V, DTYPES[r.dtype], DTYPES[weight.dtype], eps,
    )  # fmt: skip
    run("rwkv_step", call, 2 * R * H * K * V)
    count_write(pool)
    return y
