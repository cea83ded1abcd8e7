"""Log probabilities of tokens, and the most likely tokens: bitwise equal on every device, except for a logarithm."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from ..gpu.target import unavailable
from ..models.probabilities import ONE, weights, whole
from .request import TokenLogprobs
from .transfer import ToHost


def logprobs_of(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """float64 [R,1+2*most] of logits [R,V]: log probabilities of tokens [R] and of the ``most`` likeliest tokens, then these.

    Of equal logits, lower tokens come first. A log probability is rounded to float32. It is NaN where the largest logit is not finite.
    """
    most = min(most, logits.shape[1])
    if logits.is_cuda and unavailable() is None:
        from .scoring_kernel import logprobs_by_kernel

        return logprobs_by_kernel(logits, tokens, most)
    y = logits.float() + 0.0  # -0 and 0 are equal
    largest = y.amax(-1, keepdim=True)
    largest = largest.masked_fill_(~(largest.abs() < math.inf), math.nan)
    total = whole(weights(y, largest, torch.ones_like(largest, dtype=torch.float64)).nan_to_num_()).sum(-1, keepdim=True)
    names = tokens.new_empty(len(tokens), 0)
    if most:
        bits = y.view(torch.int32)
        order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
        names = order.mul_(1 << 20).sub_(torch.arange(y.shape[1], device=y.device)).topk(most, -1)[1]
    scores = y.gather(1, torch.cat([tokens[:, None], names], 1)).double()
    scores = (scores - largest.double() - torch.log(total / ONE)).float().double()
    return torch.cat([scores, names.double()], 1)


def add_rows(rows: array[float], found: ToHost) -> int:
    """Append the same to numbers, without objects for callers; the number of likely tokens. Raises ValueError for NaN."""
    values = found.value().contiguous()
    if bool(values[:, 0].isnan().any()):
        raise ValueError("NaN")
    rows.frombytes(ctypes.string_at(values.data_ptr(), values.nbytes))
    return values.shape[1] // 2


def to_logprobs(tokens: Items[int], found: ToHost, wanted: Items[int | None]) -> list[TokenLogprobs | None]:
    """The same as objects for callers. Row r gets its ``wanted[r]`` most likely tokens, or None."""
    values = found.value()
    most = values.shape[1] // 2
    scores, names = values[:, : 1 + most].tolist(), values[:, 1 + most :].long().tolist()
    return [
        None if count is None else TokenLogprobs(token, first, tuple(zip(some[:count], others)))
        for token, (first, *others), some, count in zip(tokens, scores, names, wanted)
    ]
