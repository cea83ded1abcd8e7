"""A kernel of the cross entropy of logits, and of its gradient in the memory of the logits."""

import triton
import triton.language as tl
from torch import Tensor

from ...gpu.launch import on_device_of
from ...gpu.target import power

BLOCK = 4096


@triton.jit
def penstock_cross_entropy(
    logits,  # [R,V], written if GRADIENT
    labels,  # [R] int64; -1: not counted; others outside of the vocabulary: NaN
    upstream,  # [R], gradients of the losses
    losses,  # [R] float32, written
    V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """loss = log(sum(exp(logits))) - logits[label], d logits = (softmax - one-hot label) upstream.

    Reads logits [R,V], labels [R], upstream [R]. Writes losses [R] and, if GRADIENT, the gradient over the logits. One program per token.

    Exponentials and sums are float32; each lane has its own maximum until the end. A token that is not counted has loss 0 and gradient 0.
    """
    r = tl.program_id(0).to(tl.int64)
    logits += r * V
    label = tl.load(labels + r)
    counted = label != -1
    own = tl.load(logits + label, (label >= 0) & (label < V), other=float("nan")).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    largest, total = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, V, BLOCK):
        x = tl.load(logits + begin + lane, lane < V - begin, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        finite = tl.where(larger == -float("inf"), 0.0, larger)  # avoids NaN from -inf - -inf
        total = total * tl.exp(largest - finite) + tl.exp(x - finite)
        largest = larger
    top = tl.max(largest, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    log = tl.log(tl.sum(total * tl.exp(largest - top), 0))  # top is added later: the sum would be rounded at the magnitude of a large logit
    tl.store(losses + r, tl.where(counted, log - (own - top), 0.0))
    if GRADIENT:
        factor = tl.where(counted, tl.load(upstream + r).to(tl.float32), 0.0)
        for begin in tl.range(0, V, BLOCK):
            here = lane < V - begin
            x = tl.load(logits + begin + lane, here, other=0.0).to(tl.float32)
            d = (tl.exp((x - top) - log) - tl.where(begin + lane == label, 1.0, 0.0)) * factor
            d = tl.where(counted, d, 0.0)  # also drops a NaN

            tl.store(logits + begin + lane, d.to(logits.dtype.element_ty), here)


def cross_entropy(logits: Tensor, labels: Tensor, upstream: Tensor | None, losses: Tensor) -> None:
    """Write the losses [R] of logits [R,V]; with gradients ``upstream`` [R] of the losses, overwrite the logits with their gradients."""
    R, V = logits.shape
    block = min(BLOCK, power(V))
    if R:
        on_device_of(logits, penstock_cross_entropy)[(R,)](
            logits, labels, losses if upstream is None else upstream, losses, V, GRADIENT=upstream is not None, BLOCK=block,
            num_warps=min(max(block // 512, 1), 8),
        )  # fmt: skip
