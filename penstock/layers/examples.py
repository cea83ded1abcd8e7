"""Examples of chains: small calls in the domain of a form, on which tools compare it with the plain formula.

An example draws its call twice from the same numbers: in its dtype, for the form, and in float64, for the exact results. Kernels are
compiled ahead of time for the same call with the sizes of real models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..tokens.dtypes import state_dtype

Module = TypeVar("Module", bound=nn.Module)
HALF = (torch.float16, torch.bfloat16)
EVERY = (torch.float32, *HALF)


class Draw:
    """Draws the tensors of a call. Draws of one example have equal numbers, rounded to its dtype, whatever dtype they return."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, *, exact: bool = False, gradients: bool = False, real: bool = False
    ) -> None:
        """``real``: with the sizes of real models, and zeros."""
        self.dtype, self.device, self.exact, self.gradients, self.real = dtype, device, exact, gradients, real
        self.leaves: dict[str, Tensor] = {}
        """The tensors whose gradients are compared, by name."""
        self._random = torch.Generator().manual_seed(0)

    def __call__(self, name: str, *shape: int, wide: bool = False, scale: float = 1.0, fixed: bool = False) -> Tensor:
        """A tensor. ``wide``: in the dtype of states. ``fixed``: no gradient is wanted of it."""
        dtype = state_dtype(self.dtype) if wide else self.dtype
        if self.real:
            x = torch.zeros(shape, dtype=dtype, device=self.device)
        else:
            x = (torch.randn(shape, dtype=torch.float64, generator=self._random) * scale).to(dtype)
            x = x.to(self.device, torch.float64 if self.exact else dtype)
        if self.gradients and not fixed:
            self.leaves[name] = x.requires_grad_()
        return x

    def size(self, small: int, real: int) -> int:
        """A size: a small one, of which no block is a divisor, or that of a real model."""
        return real if self.real else small

    def learned(self, name: str, *shape: int, scale: float = 1.0) -> nn.Parameter:
        """A parameter. Kernels in graphs read them early."""
        made = nn.Parameter(self(name, *shape, scale=scale).detach(), requires_grad=self.gradients)
        if self.gradients:
            self.leaves[name] = made
        return made

    def module(self, name: str, module: Module, scale: float = 1.0) -> Module:
        """A module with drawn parameters, also those of the modules in it."""
        for place, part in list(module.named_modules()):
            for each, shape in {each: x.shape for each, x in part.named_parameters(recurse=False)}.items():
                setattr(part, each, self.learned(".".join(filter(None, (name, place, each))), *shape, scale=scale))
        return module

    def whole(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """A tensor of whole numbers."""
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Example:
    """A small call in the domain of a form."""

    draw: Callable[[Draw], Any]
    """The arguments of the chain."""
    dtype: torch.dtype
    gradients: bool = True
    """Whether gradients are enabled."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of the call: a graph, ``rows_alike``."""


def examples(
    draw: Callable[[Draw], Any], *dtypes: torch.dtype, gradients: bool = True,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Example, ...]:  # fmt: skip
    """An example in each of these dtypes."""
    return tuple(Example(draw, dtype, gradients, within) for dtype in dtypes or EVERY)
