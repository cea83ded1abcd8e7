"""Mixers that pass values between layers, called alone as other mixers are."""

from typing import Any

import torch
from torch import Tensor

from penstock.layers import Mixer
from penstock.layers.values import IDS


def alone(mixer: Mixer) -> Mixer:
    """The mixer; if it takes or yields values, of a subclass that takes functions of x and returns no values."""
    base = type(mixer)
    if not (mixer.takes or mixer.yields):
        return mixer

    class Alone(base):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor, state: Any = None, cu_seqlens: Any = None, values: Any = None, **options: Any) -> Any:
            return super().forward(x, state, cu_seqlens, self._given(x) if values is None else values, **options)[:2]

        def advance(self, x: Tensor, state: Any, **options: Any) -> Any:
            return super().advance(x, state, values=self._given(x), **options)

        def _given(self, x: Any) -> Any:
            known = isinstance(x, Tensor) and x.is_floating_point()
            return (
                {name: tokens_of(x) if name == IDS else taken(x)[..., :size] for name, size in self.takes.items()} or None
                if known
                else None
            )

    mixer.__class__ = Alone
    return mixer


def taken(x: Tensor) -> Tensor:
    """Values of tokens x [...,C]."""
    return torch.tanh(x).flip(-1)


def tokens_of(x: Tensor) -> Tensor:
    """Tokens [...,1] from 0 to 7, for x [...,C] of any dtype."""
    return ((x[..., :3] > 0) * torch.tensor([1, 2, 4], device=x.device)).sum(-1, keepdim=True)
