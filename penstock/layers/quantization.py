"""Weights of 8 and 4 bits: which numbers the codes stand for, and which linear maps of a model get them.

- ``int8``: W[n,k] = codes[n,k] scales[n]. Codes from -127 to 127, one float32 scale for each row.
- ``int4``: W[n,k] = (code - 8) scales[n,k // 64]. Codes from 0 to 15, one bfloat16 scale for each 64 columns. A group of 64 columns takes
  32 bytes: byte j has column j in its low 4 bits and column j + 32 in its high ones. K is padded to whole groups by the code of 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..tokens.dtypes import state_dtype

Kind = Literal["int8", "int4"]
KINDS: tuple[str, ...] = get_args(Kind)
GROUP = 64
"""Columns that share a scale of ``int4``."""
HALF = GROUP // 2
"""Bytes of a group."""
ZERO = 8
"""The code of 0 in ``int4``."""
FRACTIONS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Scales of ``int4`` that are compared, as fractions of the one that represents the largest weight of a group. A smaller one clips the
largest weights; the one with the least sum of squared errors is taken."""
ROWS = 2048
"""Rows that are quantised at a time, which bounds the memory of the copies in float32."""
PART = 4
"""A matrix whose smaller side is less than the hidden size / PART keeps its dtype: low-rank maps, and maps to a number for each head."""


class Quantized(NamedTuple):
    """A weight [N,K]."""

    codes: Tensor
    """``int8``: int8 [N,K]. ``int4``: uint8 [N,G*32] with G = ceil(K / 64)."""
    scales: Tensor
    """``int8``: float32 [N]. ``int4``: bfloat16 [N,G]."""

    @property
    def kind(self) -> Kind:
        """Its format."""
        return "int8" if self.codes.dtype == torch.int8 else "int4"

    def fits(self, columns: int) -> bool:
        """Whether codes and scales have the dtypes and sizes of a weight of this many columns. A state_dict may assign others."""
        codes, scales = self
        if codes.dtype == torch.int8:
            return scales.dtype == torch.float32 and codes.shape[1:] == (columns,) and scales.shape == codes.shape[:1]
        groups = -(-columns // GROUP)
        sizes = codes.shape[1:] == (groups * HALF,) and scales.shape == (codes.shape[0], groups)
        return sizes and (codes.dtype, scales.dtype) == (torch.uint8, torch.bfloat16)

    def weight(self, columns: int, dtype: torch.dtype) -> Tensor:
        """The weight [N,columns] in this dtype."""
        codes, scales = self
        wide = state_dtype(dtype)
        if self.kind == "int8":
            return (codes.to(wide) * scales[:, None].to(wide)).to(dtype)
        grouped = codes.unflatten(1, (scales.shape[1], HALF))
        both = torch.cat([grouped & 15, grouped >> 4], -1).to(wide) - ZERO
        return (both * scales[:, :, None].to(wide)).flatten(1)[:, :columns].to(dtype)


def quantized(weight: Tensor, kind: Kind) -> Quantized:
    """The codes and scales of a finite weight [N,K], on its device."""
    parts = [_int8(rows.float()) if kind == "int8" else _int4(rows.float()) for rows in weight.detach().split(ROWS)]
    return Quantized(*(torch.cat(some) for some in zip(*parts)))


def empty(rows: int, columns: int, kind: Kind, device: torch.device | None = None) -> Quantized:
    """A weight without values."""
    if kind == "int8":
        return Quantized(torch.empty(rows, columns, dtype=torch.int8, device=device), torch.empty(rows, device=device))
    groups = -(-columns // GROUP)
    codes = torch.empty(rows, groups * HALF, dtype=torch.uint8, device=device)
    return Quantized(codes, torch.empty(rows, groups, dtype=torch.bfloat16, device=device))


def _int8(w: Tensor) -> Quantized:
    scales = w.abs().amax(1) / 127
    return Quantized((w * _inverse(scales)[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales)


def _int4(w: Tensor) -> Quantized:
    """The largest weight of a group in magnitude gets the code 0, so -8 steps: codes reach further below 0 than above."""
    grouped = nn.functional.pad(w, (0, -w.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    peak = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    best, scales, codes = None, peak, grouped
    for fraction in FRACTIONS:
        scale = (peak * (fraction / -ZERO)).bfloat16().float()
        steps = (grouped * _inverse(scale)).round_().clamp_(-ZERO, ZERO - 1)
        error = (steps * scale - grouped).square().sum(2, keepdim=True)
        better = torch.ones_like(error, dtype=torch.bool) if best is None else error < best
        best = error if best is None else torch.where(better, error, best)
        scales, codes = torch.where(better, scale, scales), torch.where(better, steps, codes)
    whole = (codes + ZERO).to(torch.uint8)
    return Quantized((whole[..., :HALF] | whole[..., HALF:] << 4).flatten(1), scales.squeeze(2).bfloat16())


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale, or 0 where a scale is 0, or so small that its inverse is infinite: the codes are then those of 0."""
    inverse = scales.reciprocal()
    return torch.where(inverse.isfinite(), inverse, 0.0)


def is_large(rows: int, columns: int, hidden_size: int) -> bool:
    """Whether a matrix is quantised: see ``PART``."""
    return min(rows, columns) * PART >= hidden_size
