"""A short depthwise causal convolution."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ..call.recompute import again
from .sequences import Sequences
from .triton import kernels


class ShortConvolution(nn.Conv1d):
    r"""Causal depthwise convolution, then silu.

    .. math:: y_{t,c} = silu(b_c + \sum_{j=0}^{W-1} w_{c,j} x_{t-W+1+j,c})

    The state of a sequence is its last W - 1 inputs. Sums run over j in order, so a result depends neither on the other tokens of the
    call nor on where a sequence is cut. On a GPU, each pass is one Triton kernel, which computes in float32 and rounds once.

    hidden_size : int
        C. The weight is [C,1,W], as in ``nn.Conv1d``.
    width : int
        W, at least 1. Above 8, PyTorch computes.
    bias : bool
        Whether there is b.
    """

    def __init__(self, hidden_size: int, width: int, bias: bool, activation: Literal["silu"] | None = "silu") -> None:
        super().__init__(hidden_size, hidden_size, width, groups=hidden_size, bias=bias)
        self.activation = activation

    def initial_state(self, count: int, like: Tensor) -> Tensor:
        """Zeros [count,W-1,C]."""
        return like.new_zeros(count, self.kernel_size[0] - 1, self.in_channels)

    def forward(self, x: Tensor, state: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Map x [B,T,C] after the inputs ``state`` [N,W-1,C] to y of the same shape; and the new state.

        In place, ``state`` is a pool [P,W-1,C]. A kernel updates its rows and returns the pool; else the new state is [N,W-1,C].
        """
        silu, weight, bias = self.activation is not None, self.weight.squeeze(1), self.bias
        launch = kernels("convolution_launch", x, state, weight, bias)
        if launch is None or weight.shape[1] > launch.WIDTH or weight.shape[0] != x.shape[-1]:
            return convolution_formula(x, sequences.read(state), weight, bias, sequences=sequences, silu=silu)
        rows, weight, bias = launch.rows_of(x.flatten(0, 1)), weight.contiguous(), None if bias is None else bias.contiguous()
        if sequences.in_place and not torch.is_grad_enabled() and state.shape[0] and state.dtype == x.dtype and state.stride(-1) == 1:
            slots = None if sequences.slots is None else sequences.slots.contiguous()
            if sequences.single:
                y: Tensor = launch.step(rows, state, slots, weight, bias, silu=silu)
            else:
                y = launch.convolved(rows, state, sequences.starts, slots, weight, bias, silu=silu)
                launch.tails(rows, state, sequences.bounds, slots, in_place=True)
            return y.view(x.shape), state
        formula = partial(convolution_formula, sequences=sequences, silu=silu)
        tail = launch.rows_of(sequences.read(state).to(x.dtype))
        y, after = launch.Convolution.apply(rows, tail, sequences.starts, sequences.bounds, weight, bias, silu, formula)
        again(y, lambda *given: launch.convolved(*given[:3], None, *given[3:], silu=silu), rows, tail, sequences.starts, weight, bias)
        return y.view(x.shape), after


def convolution_formula(
    x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, *, sequences: Sequences, silu: bool
) -> tuple[Tensor, Tensor]:
    """``ShortConvolution`` of x [B,T,C] or [B*T,C]: y of the same shape and the new tail, for ``tail`` [N,W-1,C] and a weight [C,W]."""
    W, shape = weight.shape[1], x.shape
    rows, windows, tail = sequences.extended(x.view(sequences.batch, sequences.tokens, shape[-1]), tail)
    T, weight = rows.shape[1] - W + 1, weight.to(x.dtype)
    y = rows[:, :T] * weight[:, 0] if bias is None else torch.addcmul(bias.to(x.dtype), rows[:, :T], weight[:, 0])
    for j in range(1, W):
        y = torch.addcmul(y, rows[:, j : j + T], weight[:, j])
    y = windows(y).view(shape)
    return nn.functional.silu(y) if silu else y, tail
