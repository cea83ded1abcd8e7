"""The inverse of a chunk of RWKV-7 on Hopper, in Gluon: T = (I - N)^-1 in bfloat16 parts.

Keys may be raw, so T has no bound: T and what it multiplies have two parts, 16 bits and the range of float32, or three. 16x16 blocks of T
are substituted in float32, see ``inverse.py``, then merged: 16 -> 32 -> 64.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ....gpu.hopper_tiles import meet
from .layouts import ROWS, C
from .parts import product_from_registers, product_of_parts, store_parts


@gluon.jit
def store_T(T, T_s):
    """Store T in its parts for products of all warps."""
    store_parts(T, T_s)
    fence_async_shared()
    meet()


@gluon.jit
def merged(T, T_s, N_s, between):
    """T + (T N) T, where the product T N is taken in the blocks ``between`` those of T. Stores it."""
    wide: gl.constexpr = T.type.layout
    x = warpgroup_mma_wait(0, [product_of_parts(T_s, N_s, wide)])
    y = product_from_registers(gl.where(between, x, 0.0), T_s)
    T = gl.where(between, y, T)
    meet()
    store_T(T, T_s)
    return T


@gluon.jit
def inverse(T, T_s, N_s):
    """T from its blocks on the diagonal, also in memory in as many parts as N."""
    wide: gl.constexpr = T.type.layout
    i = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None] // ROWS
    j = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :] // ROWS
    store_T(T, T_s)
    T = merged(T, T_s, N_s, (i == j + 1) & (i % 2 == 1))
    return merged(T, T_s, N_s, (i >= 2) & (j < 2))
