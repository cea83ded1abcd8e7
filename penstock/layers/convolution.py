"""A causal convolution over a few tokens, each channel by itself."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from .sequences import Sequences


class ShortConvolution(nn.Conv1d):
    r"""Causal depthwise convolution, then silu.

    .. math:: y_{t,c} = silu(b_c + \sum_{j=0}^{W-1} w_{c,j} x_{t-W+1+j,c})

    The state of a sequence is its last W - 1 inputs. Sums run over j in order, so a result depends neither on the other tokens of the
    call nor on where a sequence is cut.

    hidden_size : int
        C. The weight is [C,1,W], as in ``nn.Conv1d``.
    width : int
        W, at least 1.
    bias : bool
        Whether there is b.
    """

    def __init__(self, hidden_size: int, width: int, bias: bool, activation: Literal["silu"] | None = "silu") -> None:
        super().__init__(hidden_size, hidden_size, width, groups=hidden_size, bias=bias)
        self.activation = activation

    def initial_state(self, count: int, like: Tensor) -> Tensor:
        """Zeros [count,W-1,C]."""
        return like.new_zeros(count, self.kernel_size[0] - 1, self.in_channels)

    def forward(self, x: Tensor, tail: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Map x [B,T,C] after ``tail`` [N,W-1,C] to y of the same shape; and the new tail [N,W-1,C]."""
        W = self.kernel_size[0]
        rows, windows, tail = sequences.extended(x, tail)
        T, weight = rows.shape[1] - W + 1, self.weight.squeeze(1).to(x.dtype)
        y = rows[:, :T] * weight[:, 0] if self.bias is None else torch.addcmul(self.bias.to(x.dtype), rows[:, :T], weight[:, 0])
        for j in range(1, W):
            y = torch.addcmul(y, rows[:, j : j + T], weight[:, j])
        y = windows(y)
        return nn.functional.silu(y) if self.activation else y, tail
