"""float32 operands of products on Hopper, in Gluon: sums of float16 tiles times powers of two.

A tile, or each of its rows, is multiplied by the power of two that brings the largest value into [2^14,2^15). PARTS = 2: it is then the sum
of a float16 tile and the rest, rounded to float16: 22 bits, as float32 inputs need it. Values below 2^-16 of the largest have fewer: their
error is at most 2^-39 of the largest. Of a product of two tiles, the product of the two rests is left out. PARTS = 1: the first float16
tile alone, which has as many bits as TF32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

LEAST = gl.constexpr(15)  # of ``powers_of_two``: multiplies values down to 2^-112 fully


@gluon.jit
def halved(x, PARTS: gl.constexpr):
    """The parts of x, which is multiplied by its power of two: float16, and the rest (the same again if PARTS is 1)."""
    high = x.to(gl.float16)
    rest = high
    if PARTS > 1:
        rest = (x - high.to(gl.float32)).to(gl.float16)
    return high, rest


@gluon.jit
def store_parts(tiles, first, x, PARTS: gl.constexpr):
    """Store the parts of x in tiles ``first`` and, if there are two, the next one."""
    high = x.to(gl.float16)
    tiles.index(first).store(high)
    if PARTS > 1:  # after the first store, in the order that was measured
        tiles.index(first + 1).store((x - high.to(gl.float32)).to(gl.float16))


@gluon.jit
def times(a, b, c, PARTS: gl.constexpr):
    """c + a b by warp-group products under way. a and b: pairs of tiles in shared memory, the parts of each."""
    if PARTS > 1:
        c = warpgroup_mma(a[1], b[0], c, is_async=True)
        c = warpgroup_mma(a[0], b[1], c, is_async=True)
    return warpgroup_mma(a[0], b[0], c, is_async=True)


@gluon.jit
def parts_of(tiles, first, PARTS: gl.constexpr):
    """The pair of tiles that ``store_parts`` wrote; the same tile twice if PARTS is 1."""
    return tiles.index(first), tiles.index(first + (PARTS - 1))


@gluon.jit
def turned(parts):
    """The transposes of a pair of tiles."""
    return parts[0].permute((1, 0)), parts[1].permute((1, 0))
