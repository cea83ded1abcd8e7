"""A Triton kernel that draws tokens: temperature, min_p and the draw, for all rows in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.launch import on_device_of

BLOCK, WARPS = 2048, 16
WEIGHT = tl.constexpr(2.0**44)
"""Of the most likely token."""


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
def penstock_draw(
    x,  # [R,V], logits; if READY weights, int64
    scales, leasts,  # [R] float64, ``s`` apart
    uniforms,  # [R] float64
    tokens,  # [R] int64, written
    V, x_r, s,
    READY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token at ``uniform`` of the sum of a row's weights, exp((logit - largest) / scale) as whole numbers, or 0 if below the least one.

    -1 if the largest logit is not finite.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * x_r
    lane = tl.arange(0, BLOCK)
    scale, least = tl.load(scales + row * s), tl.load(leasts + row * s)
    largest = tl.zeros([], tl.float64)
    finite = row >= 0
    if not READY:
        top, bad = tl.full([BLOCK], -float("inf"), tl.float64), tl.zeros([BLOCK], tl.int32)
        for begin in tl.range(0, V, BLOCK):
            logits = tl.load(x + begin + lane, lane < V - begin, other=-float("inf")).to(tl.float64)
            bad |= (logits != logits).to(tl.int32)
            top = tl.where(logits > top, logits, top)
        largest = tl.max(top, 0)
        finite = (tl.max(bad, 0) == 0) & (tl.abs(largest) < float("inf"))
    token = row * 0 - 1
    if finite:
        sums = tl.zeros([BLOCK], tl.int64)
        for begin in tl.range(0, V, BLOCK):
            sums += _weights(x, begin + lane, V, largest, scale, least, READY)
        total = tl.sum(sums, 0)
        drawn = tl.minimum((tl.load(uniforms + row) * total.to(tl.float64)).to(tl.int64), total - 1)
        token += 1
        before = total * 0
        begin = tl.zeros([], tl.int32)
        while (begin < V) & (before <= drawn):
            w = _weights(x, begin + lane, V, largest, scale, least, READY)
            token += tl.sum(((before + tl.cumsum(w, 0) <= drawn) & (lane < V - begin)).to(tl.int64), 0)
            before += tl.sum(w, 0)
            begin += BLOCK
    tl.store(tokens + row, token)


def draw(x: Tensor, scales: Tensor, leasts: Tensor, uniforms: Tensor, block: int = BLOCK) -> Tensor:
    """int64 [R]: a token for each row of logits or, if they are int64, of weights [R,V]. See the kernel.

    scales and leasts are columns of one table.
    """
    R, V = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens = torch.empty(R, dtype=torch.int64, device=x.device)
    on_device_of(x, penstock_draw)[(R,)](
        x, scales, leasts, uniforms, tokens, V, x.stride(0), scales.stride(0), READY=x.dtype == torch.int64, BLOCK=block, num_warps=WARPS
    )
    return tokens
