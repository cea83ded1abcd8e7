"""Device functions of RWKV-7's kernels with one anchor in a chunk, for Hopper, in Gluon: decays and their sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ....gpu.hopper_decays import COARSE, exp2_of_sum
from ....gpu.hopper_tiles import exp2, meet
from ....gpu.tiles import LOG2E
from ..portable.raw import FARTHEST, FASTEST
from .layouts import C
from .parts import added_in_parts, product_of_parts, store_parts


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
def exact_sigmoid(x):
    """``sigmoid`` as exact as float32: with range reduction, as ``exp`` in ``gpu/decays.py``. Errors of exp2(x log2(e)) grow with x."""
    x = gl.where(x > FARTHEST, FARTHEST, gl.where(x < -FARTHEST, -FARTHEST, x))  # NaN stays
    n = gl.floor(0.5 - x * LOG2E)
    r = n * 2.12194440e-4 - (x + n * 0.693359375)  # ln2 in two parts
    return 1.0 / (1.0 + exp2(n) * exp2(r * LOG2E))


@gluon.jit
def gradients_of_gates(dG, g, inside, RAW: gl.constexpr, EXACT: gl.constexpr = False):
    """The gradients of log decays or, with RAW, of raw gates; EXACT as float32. sigmoid(-x), not 1 - sigmoid(x), which loses digits."""
    if RAW:
        x = gl.load(g, mask=inside, other=0.0).to(gl.float32)
        if EXACT:
            dG = dG * FASTEST * exact_sigmoid(x) * exact_sigmoid(-x)
        else:
            dG = dG * FASTEST * sigmoid(x) * sigmoid(-x)
    return dG


@gluon.jit
def tokens_through(AFTER: gl.constexpr, wide: gl.constexpr):
    """1 for the tokens u <= t (columns) of tokens t (rows), or AFTER: u >= t. [C,C] in bfloat16."""
    t = gl.arange(0, C, gl.SliceLayout(1, wide))[:, None]
    u = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    return gl.where(u >= t if AFTER else u <= t, 1.0, 0.0).to(gl.bfloat16)


@gluon.jit
def rounded_decays(d):
    """Log2 decays, less than 1, as multiples of 2^-8, of which bfloat16 holds each and float32 their sums, and the rests."""
    coarse = (d + COARSE) - COARSE
    return coarse, d - coarse


@gluon.jit
def sums_in_two(d, coarse_s, rest_s, chosen_s):
    """G from log2 decays as the sum of two float32 tiles: in one, up to 64, rounding would change exp2(G) by 2^-19.

    Uses a tile, one in three parts, and a tile. The left operand is in shared memory: see ``sums`` of ``anchored_steps.py``.
    """
    wide: gl.constexpr = d.type.layout
    coarse, rest = rounded_decays(d)
    coarse_s.store(coarse.to(coarse_s.dtype))
    store_parts(rest, rest_s)
    chosen_s.store(tokens_through(False, wide))
    fence_async_shared()
    meet()
    coarse = product_of_parts((chosen_s,), (coarse_s,), wide)
    rest = added_in_parts((chosen_s,), rest_s, gl.zeros([C, C], gl.float32, wide))
    return warpgroup_mma_wait(0, [coarse, rest])


@gluon.jit
def sums_before(G, d):
    """The sums G, in two, without each token's own log2 decay d."""
    coarse, rest = rounded_decays(d)
    return G[0] - coarse, G[1] - rest


@gluon.jit
def power(G):
    """exp2 of G, the sum of two tiles."""
    return exp2_of_sum(G[0], G[1])


@gluon.jit
def inverse_power(G):
    """exp2 of -G."""
    return power((-G[0], -G[1]))
