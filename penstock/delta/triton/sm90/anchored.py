"""Device functions of RWKV-7's kernels with one anchor in a chunk, for Hopper, in Gluon: decays, their sums, and tiles in two parts."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.tiles import LOG2E
from .layouts import C


@gluon.jit
def in_two(x, kind: gl.constexpr):
    """A tile as the sum of two in bfloat16: 16 significant bits."""
    most = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)  # the bits of a bfloat16 number
    return most.to(kind), (x - most).to(kind)


@gluon.jit
def store_in_two(x, high_s, low_s):
    """Store both parts of a tile."""
    high, low = in_two(x, high_s.dtype)
    high_s.store(high)
    low_s.store(low)


@gluon.jit
def logarithms(g, inside):
    """The log2 decays of a tile, 0 outside. Loaded again where they are needed again: they would take registers meanwhile."""
    return gl.load(g, mask=inside, other=0.0).to(gl.float32) * LOG2E


@gluon.jit
def tokens_through(AFTER: gl.constexpr, wide: gl.constexpr):
    """1 for the tokens u <= t (columns) of tokens t (rows), or AFTER: u >= t. [C,C] in bfloat16."""
    t = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    u = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    return gl.where(u >= t if AFTER else u <= t, 1.0, 0.0).to(gl.bfloat16)
