"""The Triton kernel of log probabilities, ``scoring.logprobs_of`` with one program per row.

Each lane keeps its most likely token. The most likely of all is removed from its lane, whose tokens are then read again for the next one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.launch import on_device_of
from .choosing_kernel import INF, WARPS, WHOLE, scales, weight, whole

LANES = 4096


@triton.jit
def penstock_score(
    x,  # [R,V], logits
    tokens,  # [R] int64
    scores,  # [R,1+2*most] float64, written
    V, x_r, most,
    COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """score_v = x_v - log(sum(exp(x))) of a row's token and of the ``most`` likeliest tokens.

    Reads logits x [R,V], tokens [R]. Writes scores [R,1+2*most]: the token's, those of the likeliest, and these tokens. One program per
    row.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * x_r
    scores += row * (1 + 2 * most)
    lane = tl.arange(0, LANES)
    top, bad = tl.full([LANES], -INF, tl.float32), tl.zeros([LANES], tl.int1)
    first = tl.where(lane < V, lane, V)
    for begin in tl.range(0, V, LANES, num_stages=3):
        y = tl.load(x + begin + lane, lane < V - begin, other=-INF).to(tl.float32)
        bad |= y != y
        first = tl.where(y > top, begin + lane, first)
        top = tl.where(y > top, y, top)
    largest = tl.max(top, 0)
    if (tl.max(bad.to(tl.int32), 0) > 0) | (tl.abs(largest) == INF):
        tl.store(scores, float("nan"))
        for n in range(most):
            tl.store(scores + 1 + n, float("nan"))
            tl.store(scores + 1 + most + n, n + 0.0)
    else:
        scale, high, low, lowest = scales(tl.full([], 1.0, tl.float64))
        sums = tl.zeros([LANES], tl.int64)
        for begin in tl.range(0, V, LANES, num_stages=3):
            y = tl.load(x + begin + lane, lane < V - begin, other=-INF).to(tl.float32)
            sums += whole(weight(y, largest, scale, high, low, lowest, 1 / WHOLE))
        total = tl.log(tl.sum(sums, 0).to(tl.float64) / WHOLE)
        own = tl.load(x + tl.load(tokens + row)).to(tl.float32)
        tl.store(scores, (own.to(tl.float64) - largest.to(tl.float64) - total).to(tl.float32).to(tl.float64))
        for n in range(most):
            best = tl.max(top, 0)
            token = tl.min(tl.where(top == best, first, V), 0)
            tl.store(scores + 1 + n, (best.to(tl.float64) - largest.to(tl.float64) - total).to(tl.float32).to(tl.float64))
            tl.store(scores + 1 + most + n, token + 0.0)
            column = token % LANES + LANES * tl.arange(0, COLUMNS)
            z = tl.load(x + column, column < V, other=-INF).to(tl.float32)
            later = (column < V) & ((z < best) | ((z == best) & (column > token)))
            z = tl.where(later, z, -INF)
            following = tl.max(z, 0)
            at = tl.min(tl.where(later & (z == following), column, V), 0)
            top = tl.where(lane == token % LANES, following, top)
            first = tl.where(lane == token % LANES, at, first)


def logprobs_by_kernel(logits: Tensor, tokens: Tensor, most: int, lanes: int = LANES) -> Tensor:
    """float64 [R,1+2*most], see the kernel; ``most`` is at most V."""
    R, V = logits.shape
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    scores = torch.empty(R, 1 + 2 * most, dtype=torch.float64, device=x.device)
    on_device_of(x, penstock_score)[(R,)](
        x, tokens, scores, V, x.stride(0), most, COLUMNS=triton.next_power_of_2(triton.cdiv(V, lanes)), LANES=lanes,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return scores
