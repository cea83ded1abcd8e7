"""The Triton kernel of ``graphs.with_sampled``: the tokens of a step in one launch in place of five."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.launch import on_device_of

BLOCK = 128


@triton.jit(do_not_specialize=["T"])
def penstock_known_tokens(ids, sources, last, known, T, BLOCK: tl.constexpr):
    """known_t = ids_t, or where sources_t >= 0 max(last[sources_t], 0).

    Reads ids, sources [T], last [slots]. Writes known [T]. All int64. Program (BLOCK tokens).
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = t < T
    source = tl.load(sources + t, here, other=-1)
    own = tl.load(ids + t, here, other=0)
    sampled = tl.load(last + source, source >= 0, other=0)
    tl.store(known + t, tl.where(source < 0, own, tl.maximum(sampled, 0)), here)


def known_tokens(ids: Tensor, sources: Tensor, last: Tensor) -> Tensor:
    """``graphs.with_sampled``. All tensors are contiguous."""
    known = torch.empty_like(ids)
    if ids.numel():
        on_device_of(ids, penstock_known_tokens)[(-(-ids.numel() // BLOCK),)](
            ids, sources, last, known, ids.numel(), BLOCK=BLOCK, num_warps=4
        )
    return known
