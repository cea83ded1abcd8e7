"""Softmax attention over pages: sizes of tiles, and the launches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.derivatives import count_write
from ...gpu.launch import on_device_of
from ...gpu.plan import chunks
from ...gpu.target import Target, power
from .portable import pages as kernels
from .portable.forms import precision

SPLIT = 512
"""Positions of a split of the keys. Bits of results depend on it."""
BLOCK = 1024
"""Elements per program of ``penstock_paged_store``."""
FULL = 2
"""Programs of a multiprocessor for which splits get no programs of their own."""


class Tiles(NamedTuple):
    """Rows of queries and keys of a tile, warps and pipeline stages. All calls of a model have the same, for equal bits."""

    BM: int
    BN: int
    warps: int
    stages: int


class Pages(NamedTuple):
    """What a call reads of the pages of a layer."""

    keys: Tensor
    """[P,PAGE,G,D]"""
    values: Tensor
    pages: Tensor
    """int32 [rows,M]"""


class Tokens(NamedTuple):
    """Where the tokens of a call are."""

    slots: Tensor | None
    """[N]"""
    cu_seqlens: Tensor | None
    """[N+1]"""
    owners: Tensor | None
    """[R] with ``cu_seqlens``: the sequence of each token."""
    positions: Tensor
    """int64 [R]"""
    sequences: int
    """N"""
    each: int
    """Tokens of each sequence without ``cu_seqlens``."""


def tiles(dtype: torch.dtype, BD: int, target: Target) -> Tiles:
    """The tiles for heads of BD elements: a function of the model and the GPU alone."""
    if dtype == torch.float32:
        found = Tiles(16, 32 if BD <= 128 else 16, 4, 1)
    else:
        found = Tiles(64 if BD <= 128 else 32, 64 if BD <= 128 else 32, 4, 2)
    size = dtype.itemsize
    while size * BD * (found.BM + 2 * found.BN * found.stages) + 8192 > target.shared_memory and found.stages > 1:
        found = found._replace(stages=found.stages - 1)
    return found


def store(k: Tensor, v: Tensor, given: Pages, tokens: Tokens) -> None:
    """Write k and v [R,G,D] to the pages."""
    R, W = k.shape[0], k.shape[1] * k.shape[2]
    k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (k, v))
    on_device_of(k, kernels.penstock_paged_store)[R, -(-W // BLOCK)](
        k, v, given.keys, given.values, given.pages, tokens.positions if tokens.slots is None else tokens.slots,
        tokens.positions if tokens.owners is None else tokens.owners, tokens.positions,
        max(tokens.each, 1), given.pages.shape[1], k.stride(0), v.stride(0), given.keys.stride(0), given.values.stride(0),
        given.pages.stride(0), W=W, PAGE=given.keys.shape[1], SLOTS=tokens.slots is not None, PACKED=tokens.cu_seqlens is not None,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    for one in (given.keys, given.values):
        count_write(one)


def attend(q: Tensor, given: Pages, tokens: Tokens, scale: float, window: int | None) -> Tensor:
    """The output [R,H,D] of queries q [R,H,D], whose own keys are stored."""
    (R, H, D), (_, PAGE, G, _) = q.shape, given.keys.shape
    q = q if q[0].is_contiguous() else q.contiguous()
    target, BD, packed = Target.of(q.device), power(D), tokens.cu_seqlens is not None
    config, heads = tiles(q.dtype, BD, target), H // G
    BM, BN = config.BM, min(config.BN, PAGE)
    BR = min(power(heads, 1), BM)
    programs = chunks(R if packed else tokens.each, BM // BR, tokens.sequences, packed) * G * -(-heads // BR)
    splits = -(-given.pages.shape[1] * PAGE // SPLIT)
    whole = programs >= FULL * target.multiprocessors
    S = 1 if whole else splits
    sums, outputs = (q.new_empty(R, H, S, width, dtype=torch.float32) for width in (2, D))
    reach = 0 if window is None else min(window, given.pages.shape[1] * PAGE)
    on_device_of(q, kernels.penstock_paged_attention)[programs, S](
        q, given.keys, given.values, given.pages, tokens.positions, tokens.positions if tokens.slots is None else tokens.slots,
        tokens.positions if tokens.cu_seqlens is None else tokens.cu_seqlens, sums, outputs,
        scale * math.log2(math.e), reach, tokens.sequences, R if packed else tokens.each, S, int(whole), q.stride(0), given.keys.stride(0),
        given.values.stride(0), given.pages.stride(0), H=H, G=G, D=D, BD=BD, BR=BR, BM=BM, BN=BN, PAGE=PAGE, SPLIT=SPLIT,
        SLOTS=tokens.slots is not None, PACKED=packed, WINDOW=window is not None, PRECISION=precision(q.dtype, target),
        STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    output = q.new_empty(R, H, D)
    BH = min(power(H, 1), max(4096 // BD, 1))
    on_device_of(q, kernels.penstock_paged_attention_merge)[R, -(-H // BH)](
        sums, outputs, tokens.positions, output, reach, S, int(whole), H=H, D=D, BD=BD, BH=BH, SPLIT=SPLIT, WINDOW=window is not None,
        num_warps=4,
    )  # fmt: skip
    return output
