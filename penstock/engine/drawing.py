"""Triton kernels that choose tokens: the most likely one, or temperature, min_p and a draw, for all rows in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.launch import on_device_of
from .uniforms import LAST_SHIFT, ROUNDS, STEP

BLOCK, WARPS = 2048, 16
WEIGHT = tl.constexpr(2.0**44)
"""Of the most likely token."""
STEPS, SHIFT, FACTOR, NEXT_SHIFT, NEXT_FACTOR, END = map(tl.constexpr, (STEP, *ROUNDS[0], *ROUNDS[1], LAST_SHIFT))


@triton.jit
def _uniform(key, position):
    """``uniforms.uniforms``."""
    x = key.to(tl.uint64) + position.to(tl.uint64) * STEPS
    x = (x ^ (x >> SHIFT)) * FACTOR
    x = (x ^ (x >> NEXT_SHIFT)) * NEXT_FACTOR
    x = x ^ (x >> END)
    return (x >> 11).to(tl.int64).to(tl.float64) * (1 / 9007199254740992)


@triton.jit
def _weights(x, at, V, largest, scale, least, READY: tl.constexpr):
    """Weights of a block of tokens, int64, 0 behind the last one."""
    if READY:
        w = tl.load(x + at, at < V, other=0)
    else:
        logits = tl.load(x + at, at < V, other=-float("inf")).to(tl.float64)
        w = (tl.exp((logits - largest) / scale) * WEIGHT).to(tl.int64)
        w = tl.where(w.to(tl.float64) < least, 0, w)
    return w


@triton.jit
def _drawn(x, V, uniform, largest, scale, least, READY: tl.constexpr, BLOCK: tl.constexpr):
    """The token at ``uniform`` of the sum of a row's weights."""
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.int64)
    for begin in tl.range(0, V, BLOCK):
        sums += _weights(x, begin + lane, V, largest, scale, least, READY)
    total = tl.sum(sums, 0)
    drawn = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    token = total * 0
    before = total * 0
    begin = tl.zeros([], tl.int32)
    while (begin < V) & (before <= drawn):
        w = _weights(x, begin + lane, V, largest, scale, least, READY)
        token += tl.sum(((before + tl.cumsum(w, 0) <= drawn) & (lane < V - begin)).to(tl.int64), 0)
        before += tl.sum(w, 0)
        begin += BLOCK
    return token


@triton.jit
def penstock_pick(
    x,  # [R,V], logits
    scales, leasts,  # [slots] float64, ``s`` apart
    keys,  # [slots] int64, ``s`` apart
    slots, positions,  # [R] int64
    tokens, last,  # [R]; [slots] int64, written
    V, x_r, s,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A token at a random place in the sum of a row's weights.

    They are exp((logit - largest) / scale) as whole numbers, or 0 if below the least one. The random number is that of the row's key and
    position; if the position is negative, the token is the lowest of the most likely ones. -1 if the largest logit is not finite.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * x_r
    SEARCHED: tl.constexpr = 4 * BLOCK  # at a time, for more bytes in flight
    lane = tl.arange(0, SEARCHED)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    scale, least = tl.load(scales + slot * s), tl.load(leasts + slot * s)
    EXACT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    top, bad = tl.full([SEARCHED], -float("inf"), EXACT), tl.zeros([SEARCHED], tl.int1)
    first = tl.zeros([SEARCHED], tl.int32)
    for begin in tl.range(0, V, SEARCHED, num_stages=3):
        logits = tl.load(x + begin + lane, lane < V - begin, other=-float("inf")).to(EXACT)
        bad |= logits != logits
        first = tl.where(logits > top, begin + lane, first)
        top = tl.where(logits > top, logits, top)
    largest = tl.max(top, 0)
    token = row * 0 - 1
    if (tl.max(bad.to(tl.int32), 0) == 0) & (tl.abs(largest) < float("inf")):
        if position < 0:
            token = tl.min(tl.where(top == largest, first, V), 0).to(tl.int64)
        else:
            uniform = _uniform(tl.load(keys + slot * s), position)
            token = _drawn(x, V, uniform, largest.to(tl.float64), scale, least, False, BLOCK)
    tl.store(tokens + row, token)
    tl.store(last + slot, token)


@triton.jit
def penstock_draw(
    x,  # [R,V] int64, weights
    keys,  # [R] int64, ``s`` apart
    positions,  # [R] int64
    tokens,  # [R] int64, written
    V, x_r, s,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A token at the random place of the row's key and position in the sum of a row's weights."""
    row = tl.program_id(0).to(tl.int64)
    uniform = _uniform(tl.load(keys + row * s), tl.load(positions + row))
    tl.store(tokens + row, _drawn(x + row * x_r, V, uniform, uniform, uniform, uniform, True, BLOCK))


def pick(
    logits: Tensor, scales: Tensor, leasts: Tensor, keys: Tensor, slots: Tensor, positions: Tensor, last: Tensor, block: int = BLOCK
) -> Tensor:  # fmt: skip
    """int64 [R]: a token for each row of logits [R,V], also written to ``last`` at its slot. See the kernel.

    scales, leasts and keys are columns of one table.
    """
    R, V = logits.shape
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(R, dtype=torch.int64, device=x.device)
    on_device_of(x, penstock_pick)[(R,)](
        x, scales, leasts, keys, slots, positions, tokens, last, V, x.stride(0), scales.stride(0), BLOCK=block, num_warps=WARPS
    )
    return tokens


def draw(weights: Tensor, keys: Tensor, positions: Tensor, block: int = BLOCK) -> Tensor:
    """int64 [R]: a token for each row of weights [R,V]. See the kernel."""
    R, V = weights.shape
    x = weights if weights.stride(1) == 1 else weights.contiguous()
    tokens = torch.empty(R, dtype=torch.int64, device=x.device)
    on_device_of(x, penstock_draw)[(R,)](x, keys, positions, tokens, V, x.stride(0), keys.stride(0), BLOCK=block, num_warps=WARPS)
    return tokens
