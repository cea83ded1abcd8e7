"""Device functions of RWKV-7's kernels with one anchor in a chunk, for Hopper, in Gluon: decays and their sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.hopper_tiles import exp2
from ....gpu.tiles import LOG2E
from ..portable.raw import FASTEST
from .layouts import C


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), 0 where exp(-x) overflows."""
    return 1.0 / (1.0 + exp2(x * -LOG2E))


@gluon.jit
def logarithms(g, inside, RAW: gl.constexpr):
    """The log2 decays of a tile, 0 outside. Loaded again where they are needed again: they would take registers meanwhile.

    With RAW from raw gates x: g = -exp(-1/2) sigmoid(x).
    """
    d = gl.load(g, mask=inside, other=0.0).to(gl.float32)
    if RAW:
        d = gl.where(inside, sigmoid(d) * FASTEST, 0.0)
    return d * LOG2E


@gluon.jit
def gradients_of_gates(dG, g, inside, RAW: gl.constexpr):
    """The gradients of log decays or, with RAW, of raw gates. sigmoid(-x) in place of 1 - sigmoid(x), which loses digits."""
    if RAW:
        x = gl.load(g, mask=inside, other=0.0).to(gl.float32)
        dG = dG * FASTEST * sigmoid(x) * sigmoid(-x)
    return dG


@gluon.jit
def tokens_through(AFTER: gl.constexpr, wide: gl.constexpr):
    """1 for the tokens u <= t (columns) of tokens t (rows), or AFTER: u >= t. [C,C] in bfloat16."""
    t = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    u = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    return gl.where(u >= t if AFTER else u <= t, 1.0, 0.0).to(gl.bfloat16)
