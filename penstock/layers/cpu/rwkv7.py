"""A decode step of RWKV-7 between its linear maps by the native kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...call.derivatives import count_write
from ...cpu import DTYPES, TEAM, Strided, address, run
from . import NARROW

_TOKENS = ("r", "k", "w", "rate", "v", "mix", "first", "gate", "y")
_LEARNED = ("k_k", "k_a", "r_k", "w0", "a0", "v0", "weight", "shift")


class _Step(ctypes.Structure):
    """The struct ``step`` of rwkv7.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*_TOKENS, *_LEARNED)),
        ("pool", Strided),
        ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("R", "H", "N", "dtype", "weight_dtype")),
        ("eps", ctypes.c_double),
        *TEAM,
    ]


def takes(tokens: Sequence[Tensor], learned: Sequence[Tensor], pool: Tensor) -> bool:
    """Whether the kernel computes a step: tokens, and parameters, are contiguous and of one dtype. Nothing is float64."""
    dtypes = ({one.dtype for one in tokens}, {one.dtype for one in learned}, {pool.dtype})
    return all(len(some) == 1 and some <= NARROW for some in dtypes) and all(one.is_contiguous() for one in (*tokens, *learned))


def rwkv7_step(
    tokens: Sequence[Tensor | None], learned: Sequence[Tensor | None], eps: float, pool: Tensor, slots: Tensor | None
) -> Tensor:  # fmt: skip
    """y, of the shape of r. The pool [P,H,N,N], of any strides, is updated in place.

    ``tokens``: r, k, w, rate, v, mix, first and gate, contiguous with R*H*N elements of one dtype. ``learned``: k_k, k_a, r_k, w0, a0, v0,
    weight and shift, contiguous with H*N elements of one dtype. mix, first and v0 may be None. slots int64 [R]; without them token n has
    row n.
    """
    r, k_k = tokens[0], learned[0]
    assert r is not None and k_k is not None  # noqa: PT018
    _, H, N, _ = pool.shape
    y, R = torch.empty_like(r), r.numel() // (H * N)
    addresses = map(address, (*tokens, y, *learned))
    call = _Step(*addresses, Strided.of(pool), address(slots), R, H, N, DTYPES[r.dtype], DTYPES[k_k.dtype], eps)
    run("rwkv7_step", call, 3 * R * H * N * N)
    count_write(pool)
    return y
