"""The arguments of the chains of decode steps, the formula of each, and examples.

A formula computes in plain PyTorch what the kernels of ``decode`` do, with the rows of pools that they write. Where a kernel does not run,
layers compute the same by several chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..tokens.dtypes import state_dtype
from .examples import HALF, Draw, examples
from .fused import NormParts, norm_formula, norm_of
from .linear import Linear
from .modes import in_graph
from .sequences import Sequences, drawn
from .token_shift import shift_formula


class ShiftedNorm(NamedTuple):
    """The arguments of ``shifted_norm``."""

    x: Tensor
    y: Tensor | None
    norm: Any
    pool: Tensor
    sequences: Sequences
    factors: tuple[Tensor, ...]
    complement: bool
    kept: bool

    def fits(self, parts: NormParts) -> bool:
        """Whether there are tokens, and all sizes are theirs."""
        C, learned = self.x.shape[-1], [one for one in (*parts[:2], *self.factors) if isinstance(one, Tensor)]
        same = self.y is None or self.y.shape == self.x.shape
        return bool(self.x.numel()) and same and self.pool.shape[1:] == (C,) and all(one.numel() == C for one in learned)


class OneRow(NamedTuple):
    """The arguments of ``low_rank_maps`` and ``channel_mix``."""

    x: Tensor
    y: Tensor | None
    norm: Any
    pool: Tensor
    sequences: Sequences
    factors: Sequence[Tensor]
    maps: Sequence[nn.Module]
    low_rank: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    """mu, down, up and decay of ``low_rank_maps``."""


class Step(NamedTuple):
    """The arguments of ``rwkv_step``."""

    r: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    u: Tensor
    bias: Tensor
    norm: nn.GroupNorm
    pool: Tensor
    sequences: Sequences
    low_rank: tuple[Tensor, Tensor] | None
    lasts: Any

    @property
    def fits(self) -> bool:
        """Whether tokens, the low-rank part and the norm have the sizes of the pool."""
        (H, K, V), rows = self.pool.shape[1:], self.r.shape[:-1]
        keys, values = (*rows, H * K), (*rows, H * V)
        if not (self.r.shape == self.k.shape == keys and self.v.shape == self.gate.shape == values):
            return False
        if self.low_rank is not None:
            low, up = self.low_rank
            if low.shape != (*rows, len(up)) or up.shape != (len(up), H * K):
                return False
        return self.norm.weight.numel() == self.norm.bias.numel() == H * V


def _normed(x: Tensor, y: Tensor | None, norm: Any, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """The sum of x and y, and its norm."""
    parts = norm_of(norm, sequences.halvings)
    assert not isinstance(parts, str)
    return norm_formula(x if y is None else x + y, parts.weight, parts.bias, eps=parts.eps, centre=parts.centre)


def shifted_norm(c: ShiftedNorm) -> Any:
    """``decode.shifted_norm``; then the norm and the previous tokens if they are kept, and the pool."""
    total, normed = _normed(c.x, c.y, c.norm, c.sequences)
    flat, last, starts = normed.flatten(0, 1), c.sequences.read(c.pool), None if c.sequences.single else c.sequences.starts
    mixed = shift_formula(flat, last, starts, tuple(c.factors), None, None, c.complement)
    (before,) = shift_formula(flat, last, starts, (torch.ones_like(flat[0]),), None, None)
    c.sequences.write((c.pool,), (c.sequences.last(normed),))
    kept = (normed, before.view(normed.shape)) if c.kept else ()
    return total, [one.view(normed.shape) for one in mixed], kept, c.pool


def low_rank_maps(c: OneRow) -> Any:
    """``decode.low_rank_maps``, the norm, and the pool, which does not change."""
    assert c.low_rank is not None
    mu, down, up, decay = c.low_rank
    total, normed = _normed(c.x, c.y, c.norm, c.sequences)
    now, last = normed[0], c.sequences.read(c.pool)
    (mixed,) = shift_formula(now, last, None, (mu,), None, None)
    hidden = torch.tanh(mixed @ down).unflatten(-1, up.shape[:2])
    shifted = shift_formula(now, last, None, tuple(c.factors), hidden, up)
    weights = [decay.T, *(one.weight for one in c.maps)]
    return total, [F.linear(x, weight)[None] for x, weight in zip(shifted, weights)], now, c.pool  # type: ignore[arg-type]


def channel_mix(c: OneRow) -> Any:
    """``decode.channel_mix``, and the pool."""
    total, normed = _normed(c.x, c.y, c.norm, c.sequences)
    x_k, x_r = shift_formula(normed[0], c.sequences.read(c.pool), None, tuple(c.factors), None, None)
    key, receptance, value = c.maps
    c.sequences.write((c.pool,), (normed[0],))
    return total, (torch.sigmoid(receptance(x_r)) * value(torch.relu(key(x_k)).square()))[None], c.pool


def rwkv_step(c: Step) -> Any:
    """``decode.rwkv_step``, and the pool."""
    (H, K), dtype = c.pool.shape[1:3], state_dtype(c.r.dtype)
    r, k, v, gate = (x.to(dtype).reshape(x.shape[0], H, -1) for x in (c.r, c.k, c.v, c.gate))
    bias = c.bias.to(dtype).view(H, -1).expand(H, K)
    if c.low_rank is not None:
        low, up = c.low_rank
        bias = bias + (torch.tanh(low).flatten(0, 1) @ up).to(dtype).view(r.shape)
    state, new = c.sequences.read(c.pool).to(dtype), k[..., None] * v[..., None, :]
    o = ((state + c.u.to(dtype).expand(H, K)[..., None] * new) * r[..., None]).sum(2)
    normed = torch.group_norm(o.flatten(1), H, c.norm.weight.to(dtype), c.norm.bias.to(dtype), c.norm.eps).view(v.shape)
    decayed = state * torch.exp(-torch.exp(bias)).expand(r.shape)[..., None] + new
    c.sequences.write((c.pool,), (decayed,))
    return (normed * F.silu(gate)).to(c.r.dtype).view(c.v.shape), c.pool


def _draw_shifted_norm(draw: Draw, single: bool = False, centre: bool = True) -> ShiftedNorm:
    C = draw.size(72, 2048)
    x, ends = draw("x", *((3, 1) if single else (1, 19)), C), [] if single else [0, 7, 12, 19]
    sequences, y = drawn(draw, x, ends, [4, 0, 2], in_place=True), draw("y", *x.shape) if centre else None
    norm = draw.module("norm", nn.LayerNorm(C) if centre else nn.LayerNorm(C, bias=False))
    factors = tuple(draw.learned(f"factor {n}", C) for n in range(6 if single else 4))
    return ShiftedNorm(x, y, norm, draw("pool", 5, C), sequences, factors, centre, not centre)


def _draw_row(draw: Draw, count: int, *maps: tuple[int, int]) -> OneRow:
    """One token of the width of the kernels."""
    C = 2048
    x, y, pool = draw("x", 1, 1, C), draw("y", 1, 1, C), draw("pool", 3, C)
    norm, factors = draw.module("norm", nn.LayerNorm(C)), [draw.learned(f"factor {n}", C) for n in range(count)]
    linears = [
        draw.module(f"map {n}", Linear(inputs, outputs, bias=False), inputs**-0.5) for n, (inputs, outputs) in enumerate(maps)
    ]  # fmt: skip
    return OneRow(x, y, norm, pool, drawn(draw, x, slots=[1], in_place=True), factors, linears)


def _draw_low_rank_maps(draw: Draw) -> OneRow:
    C, M = 2048, 32
    row = _draw_row(draw, 5, *[(C, 1600)] * 4)
    down, up = draw.learned("down", C, 5 * M, scale=C**-0.5), draw.learned("up", 5, M, C, scale=M**-0.5)
    return row._replace(low_rank=(draw.learned("mu", C), down, up, draw.learned("decay", C, 64, scale=C**-0.5)))


def _draw_channel_mix(draw: Draw) -> OneRow:
    C, hidden = 2048, 4352
    return _draw_row(draw, 2, (C, hidden), (C, C), (hidden, C))


def _draw_step(draw: Draw, low_rank: bool = True) -> Step:
    N, H, K, V, M = 3, draw.size(2, 32), draw.size(24, 64), draw.size(40, 64), draw.size(8, 64)
    r, k, v, gate = (draw(name, N, 1, H * size) for name, size in (("r", K), ("k", K), ("v", V), ("gate", V)))
    u, bias = draw.learned("u", H, K), draw.learned("bias", H, K)
    norm, pool = draw.module("norm", nn.GroupNorm(H, H * V, 1e-3)), draw("pool", 5, H, K, V, wide=True)
    low = (draw("low", N, 1, M), draw.learned("up", M, H * K, scale=M**-0.5)) if low_rank else None
    return Step(r, k, v, gate, u, bias, norm, pool, drawn(draw, r, slots=[4, 0, 2], in_place=True), low, None)


SHIFTED_NORM = (
    *examples(_draw_shifted_norm, gradients=False),
    *examples(partial(_draw_shifted_norm, single=True, centre=False), gradients=False, within=in_graph),
)
SINGLE_SHIFTED_NORM = (
    *examples(partial(_draw_shifted_norm, single=True), gradients=False),
    *examples(partial(_draw_shifted_norm, single=True, centre=False), gradients=False),
)
LOW_RANK_MAPS = examples(_draw_low_rank_maps, *HALF, gradients=False, within=in_graph)
CHANNEL_MIX = examples(_draw_channel_mix, *HALF, gradients=False, within=in_graph)
EAGER_RWKV_STEP = (*examples(_draw_step, gradients=False), *examples(partial(_draw_step, low_rank=False), gradients=False))
RWKV_STEP = (
    *examples(_draw_step, gradients=False, within=in_graph),
    *examples(partial(_draw_step, low_rank=False), gradients=False, within=in_graph),
)
